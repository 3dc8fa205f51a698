# SPDX-License-Identifier: Apache-2.0
"""Probes and the status page of a real server: in service, while it drains, while it recovers."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, find_url, get, get_status, server, url_of  # noqa: F401
from server_process import ServerProcess, server_binary
from system_calls import why_no_strace
from testing import NOT_SERVING, check_health, started, wait_for

WEIGHTS = {"w": np.ones(1000, np.float32)}
TRACKS = {"ema": "4ba", "raw": "copy"}


def test_probes_of_a_server_that_serves(server):
    assert get(url_of(server), "/livez") == (200, "ok\n")
    assert get(url_of(server), "/readyz") == (200, "ok\n")
    assert get(url_of(server), "/nothing")[0] == 404


def test_without_the_option_there_is_no_http(tmp_path):
    with ServerProcess(tmp_path) as server:
        assert find_url(server.log_path.read_text()) == ""


def test_an_address_in_use_is_told(server, tmp_path):
    address = url_of(server).removeprefix("http://")
    second = subprocess.run(
        [server_binary(), "--listen", "127.0.0.1:0", "--http-listen", address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode == 1
    assert "--http-listen" in second.stderr


def test_sigterm_turns_the_probes_while_a_step_may_still_end(tmp_path):
    with ServerProcess(tmp_path, *LISTEN, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=30) as client:
            client.create_model("m", WEIGHTS, tracks=TRACKS)
            runs = [client.open_run("m", launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
            first = runs[0].start_push(step=1, weights=WEIGHTS)
            wait_for(
                lambda: 'ema_sessions_open{model="m"} 1' in get(url_of(server), "/metrics")[1],
                "the step is open",
            )
            second = runs[1].start_push(step=1, weights=WEIGHTS)
            first.wait()
            # A step that one rank has begun keeps the server from ending.
            third = runs[0].start_push(step=2, weights=WEIGHTS)
            second.wait()
            wait_for(
                lambda: 'ema_sessions_open{model="m"} 1' in get(url_of(server), "/metrics")[1],
                "the next step is open",
            )
            os.kill(server.pid, signal.SIGTERM)
            wait_for(lambda: get(url_of(server), "/readyz")[0] == 503, "not ready")
            assert "shutting down" in get(url_of(server), "/readyz")[1]
            assert get(url_of(server), "/livez") == (200, "ok\n")
            assert "ema_health_serving 0" in get(url_of(server), "/metrics")[1]
            status = get_status(url_of(server))
            assert not status["is_serving"] and "shutting down" in status["problem"]
            assert check_health(server.address, "") == NOT_SERVING
            runs[1].push(step=2, weights=WEIGHTS)
            third.wait()
        # A second signal would end it at once.
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()


# --- A recovery that takes long ---


@pytest.fixture
def recovering(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[subprocess.Popen[bytes], pathlib.Path]]:
    """A server that has begun to read a checkpoint and takes minutes, and its log."""
    if why_no_strace():
        pytest.skip(why_no_strace())
    weights = {"w": np.ones(16 << 20, np.float32)}
    with ServerProcess(tmp_path / "first", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", weights, tracks={"ema": "4ba"})
            with client.open_run("m") as run:
                run.push(step=9, weights=weights)
        assert server.stop() == 0, server.log()
    log = tmp_path / "second.log"
    # -D: the process is the server, and strace is beside it.
    slow = ["strace", "-D", "-f", "-o", "/dev/null", "-e", "trace=pread64"]
    slow += ["-e", "inject=pread64:delay_enter=1000000"]
    command = [server_binary(), "--listen", "127.0.0.1:0", "--port-file", tmp_path / "port"]
    command += ["--data-dir", tmp_path / "data", *LISTEN]
    with log.open("wb") as file, started([*slow, *command], stdout=file, stderr=file) as [process]:
        wait_for(lambda: find_url(log.read_text()) != "", "HTTP")
        yield process, log


def test_a_server_that_recovers_is_alive_not_ready_and_ends_at_sigterm(recovering, tmp_path):
    process, log = recovering
    url = find_url(log.read_text())
    assert get(url, "/livez") == (200, "ok\n")
    code, text = get(url, "/readyz")
    assert code == 503
    assert "recovering" in text
    metrics = get(url, "/metrics")[1]
    assert "ema_health_serving 0" in metrics
    assert "ema_recovering 1" in metrics
    assert "recovering" in get_status(url)["problem"]
    assert not (tmp_path / "port").exists()

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not (tmp_path / "port").exists()
    with ServerProcess(tmp_path / "third", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            latest = client.model("m").latest
            assert latest is not None
            assert latest.step == 9


# --- The status page ---


def test_the_page_uses_only_its_own_script_and_endpoint(server):
    with urllib.request.urlopen(url_of(server) + "/", timeout=30) as answer:
        page = answer.read().decode()
        assert answer.headers.get_content_type() == "text/html"
        policy = answer.headers["Content-Security-Policy"].split("; ")
    assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
    links = set(re.findall(r'(?:src|href)="([^"]*)"', page.replace("\n", " ")))
    assert links == {"status.js", "status.json", "metrics", "readyz", "livez"}
    assert "emactl info" in page.split("<noscript>")[1].split("</noscript>")[0]
    with urllib.request.urlopen(url_of(server) + "/status.js", timeout=30) as answer:
        script = answer.read().decode()
        assert answer.headers.get_content_type() == "text/javascript"
    assert re.findall(r"fetch\(([^,]*),", script) == ['"status.json"']
    assert set(re.findall(r"https?://[^\"]*", script)) == {"http://www.w3.org/2000/svg"}
    # What would read text as HTML.
    assert not re.search("innerHTML|outerHTML|insertAdjacentHTML|document.write|eval", script)


@pytest.fixture
def shown(server: ServerProcess) -> Iterator[None]:
    """The server has a model, statistics, and an error."""
    rng = np.random.default_rng(1)
    with ema_client.Client(server.address, timeout_s=30) as client:
        client.create_model("shown", WEIGHTS, tracks=TRACKS)
        with client.open_run("shown") as run:
            for step in range(1, 6):
                run.push(step=step, weights={"w": rng.standard_normal(1000).astype(np.float32)})
                client.statistics("shown")
            with pytest.raises(ema_client.EmaError):
                run.push(step=2, weights=WEIGHTS)
            yield
        client.delete_model("shown")


def test_the_json_has_models_tracks_and_errors(server, shown):
    status = get_status(url_of(server))
    assert status["is_serving"]
    assert status["usage"]["models"]["used"] == 1
    assert status["memory"]["limit"] >= status["memory"]["used"] > 0
    (model,) = status["models"]
    assert (model["name"], model["step"], model["version"]) == ("shown", 5, 5)
    assert [track["name"] for track in model["tracks"]] == ["ema", "raw"]
    assert model["history"][-1]["distances"]["ema"] > 0
    assert model["run"]["world_size"] == 1
    assert any("is not after" in problem["text"] for problem in status["problems"])


@pytest.mark.framework
def test_a_browser_shows_the_page(server, shown, tmp_path):
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium: Debian's package chromium-headless-shell has it")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    # Virtual time passes only when nothing is being fetched.
    flags += ["--virtual-time-budget=4000", "--enable-logging=stderr"]
    dumped = subprocess.run(
        [browser, *flags, "--dump-dom", url_of(server) + "/"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert dumped.returncode == 0, dumped.stderr
    for part in (
        "<h2>shown</h2>",
        "step 5, version 5",
        ">ema</td>",
        "<polyline",
        "1 rank",
    ):
        assert part in dumped.stdout
    assert "is not after" in dumped.stdout
    assert dumped.stdout.rstrip().endswith("</html>")
    assert "Content Security Policy" not in dumped.stderr
    assert "Uncaught" not in dumped.stderr
