# SPDX-License-Identifier: Apache-2.0
"""Probes and the status page of a real server: in service, while it drains, while it recovers."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, find_url, get, server, url_of  # noqa: F401
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
            assert "not serving" in get(url_of(server), "/")[1]
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
    assert "recovering" in get(url, "/")[1]
    assert not (tmp_path / "port").exists()

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    assert not (tmp_path / "port").exists()
    with ServerProcess(tmp_path / "third", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            latest = client.model("m").latest
            assert latest is not None
            assert latest.step == 9


# --- The page ---


@pytest.fixture
def shown(server: ServerProcess) -> Iterator[str]:
    """The page of a server with a model, statistics, and an error."""
    rng = np.random.default_rng(1)
    with ema_client.Client(server.address, timeout_s=30) as client:
        client.create_model("shown", WEIGHTS, tracks=TRACKS)
        with client.open_run("shown") as run:
            for step in range(1, 6):
                run.push(step=step, weights={"w": rng.standard_normal(1000).astype(np.float32)})
                client.statistics("shown")
            with pytest.raises(ema_client.EmaError):
                run.push(step=2, weights=WEIGHTS)
        yield get(url_of(server), "/")[1]
        client.delete_model("shown")


def test_the_page_shows_models_tracks_and_errors(shown):
    assert "<h2>shown</h2>" in shown
    assert "step 5, version 5" in shown
    assert "<td>ema</td>" in shown
    assert "<polyline" in shown
    assert "1 rank" in shown
    assert "is not after" in shown


@pytest.mark.framework
def test_a_browser_shows_the_page(server, shown, tmp_path):
    browser = shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if browser is None:
        pytest.skip("no Chromium: Debian's package chromium-headless-shell has it")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    dumped = subprocess.run(
        [browser, *flags, "--dump-dom", url_of(server) + "/"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert dumped.returncode == 0, dumped.stderr
    # What the browser has made of it, and nothing that it had to refuse.
    assert "<polyline" in dumped.stdout
    assert dumped.stdout.rstrip().endswith("</html>")
    assert "Content Security Policy" not in dumped.stderr
