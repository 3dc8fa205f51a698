# SPDX-License-Identifier: Apache-2.0
"""What a real server writes to its log."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
from typing import Any

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, scrape, value
from server_process import ServerProcess, server_binary
from testing import started, wait_for

TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")


def weights(value: float) -> dict[str, np.ndarray]:
    return {"w": np.full(1000, value, np.float32)}


def events(server: ServerProcess) -> list[dict[str, Any]]:
    """All lines, each of which is JSON."""
    lines = [json.loads(line) for line in server.log_path.read_text().splitlines()]
    for line in lines:
        assert TIME.fullmatch(line["ts"]) and line["level"] in ("debug", "info", "warn", "error")
    return lines


def only(lines: list[dict[str, Any]], event: str) -> dict[str, Any]:
    (found,) = [line for line in lines if line["event"] == event]
    return found


def use(server: ServerProcess) -> None:
    with ema_client.Client(server.address) as client:
        client.create_model("m", weights(0), tracks={"ema": "1ba", "raw": "copy"})
        with client.open_run("m", launch_id="first") as run:
            for step in (1, 2, 3):
                run.push(step=step, weights=weights(step))
        client.create_checkpoint("m", label="stable")
        client.update_model("m", tracks={"slow": "10ba"})
        client.restore("m", label="stable")
        client.delete_model("m")


def test_json_has_one_line_an_event_with_its_fields(tmp_path):
    flags = ["--log-format", "json", "--log-level", "debug"]
    with ServerProcess(tmp_path, *flags, data_dir=tmp_path / "data") as server:
        use(server)
    lines = events(server)
    starting = only(lines, "starting")
    assert starting["version"].count(".") == 2 and starting["data_dir"] == str(tmp_path / "data")
    limits = only(lines, "limits")
    assert limits["max_models"] == 64 and limits["session_timeout"] == "30s"
    memory = only(lines, "memory")
    assert memory["at_most_bytes"] == (
        memory["now"]
        + memory["models"]
        + memory["files_and_casts"]
        + memory["push_streams"] * memory["push_stream"]
        + memory["pull_streams"] * memory["pull_stream"]
        + memory["lanes"] * memory["lane"]
        + memory["requests"]
        + memory["waiting"]
        + memory["max_models"] * memory["records"]
        + memory["freed"]
    )
    assert memory["shared_windows"] > 0
    serving = only(lines, "serving")
    assert serving["listen"] == server.address
    assert isinstance(serving["seconds"], float) and serving["seconds"] > 0
    assert only(lines, "model created")["model"] == "m"
    opened = only(lines, "run opened")
    assert (opened["model"], opened["ranks"], opened["launch"]) == ("m", 1, "first")
    for line in (opened, only(lines, "model created"), only(lines, "model deleted")):
        assert line["peer"].startswith("ipv4:127.0.0.1:") and "role" not in line
    commits = [line for line in lines if line["event"] == "committed"]
    # The last is the rollback's.
    assert [line["step"] for line in commits] == [1, 2, 3, 3]
    assert [line["version"] for line in commits] == [1, 2, 3, 4]
    assert {line["level"] for line in commits} == {"debug"}
    assert {line["run"] for line in commits[:3]} == {opened["run"]}
    saved = [line for line in lines if line["event"] == "checkpoint saved"]
    assert (saved[0]["model"], saved[0]["step"], saved[0]["version"]) == ("m", 3, 3)
    for event in ("model updated", "label set", "rolled back", "model deleted", "draining"):
        assert only(lines, event)["level"] == "info"
    assert lines[-1]["event"] == "stopped"


def test_limits_that_the_machine_has_no_memory_for_are_warned_of(tmp_path):
    with ServerProcess(
        tmp_path / "large", "--log-format", "json", "--memory-bytes", "900T"
    ) as server:
        pass
    lines = events(server)
    warning = only(lines, "the limits allow more memory than is available")
    assert warning["level"] == "warn" and warning["memory"] == "host"
    assert warning["at_most_bytes"] == only(lines, "memory")["at_most_bytes"] > 900 << 40
    assert warning["available_bytes"] < 900 << 40
    with ServerProcess(
        tmp_path / "small", "--log-format", "json", "--memory-bytes", "1M"
    ) as server:
        pass
    assert "allow more" not in server.log()


def test_text_says_the_same_without_commits(tmp_path):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        use(server)
    text = server.log_path.read_text()
    for line in text.splitlines():
        time, level, rest = line.split(" ", 2)
        assert TIME.fullmatch(time) and level in ("info", "warn"), line
    assert re.search(
        r" info run opened model=m run=\d+ launch=first ranks=1 peer=ipv4:127\.0\.0\.1:\d+\n", text
    )
    assert re.search(r" info checkpoint saved model=m step=3 version=3 checkpoint=\S+ ", text)
    assert " committed " not in text


def test_saving_what_is_saved_already_is_no_save(tmp_path):
    flags = ["--log-format", "json", *LISTEN]
    with ServerProcess(tmp_path, *flags, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights(0), tracks={"ema": "1ba"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights(1))
            first = client.create_checkpoint("m")
            assert client.create_checkpoint("m") == first
            saves = value(scrape(server), "ema_checkpoint_saves_total", model="m", result="ok")
        assert saves == 1
        assert server.stop() == 0
    only(events(server), "checkpoint saved")


def test_a_restart_says_what_it_has_restored(tmp_path):
    flags = ["--log-format", "json"]
    with ServerProcess(tmp_path, *flags, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights(0), tracks={"ema": "1ba"})
            with client.open_run("m") as run:
                run.push(step=7, weights=weights(7))
    assert only(events(server), "checkpoint saved")["step"] == 7
    with server:
        pass
    restored = only(events(server), "restored")
    assert (restored["model"], restored["step"], restored["version"]) == ("m", 7, 1)
    # At the first start, not the second.
    assert only(events(server), "model created")


def test_a_dropped_step_is_a_warning_with_its_reason(tmp_path):
    with ServerProcess(tmp_path, "--log-format", "json") as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights(0), tracks={"ema": "1ba"})
            with client.open_run("m") as run:
                with pytest.raises(ema_client.EmaError):
                    run.push(step=1, weights=weights(np.nan))
    dropped = only(events(server), "step dropped")
    assert dropped["level"] == "warn" and dropped["model"] == "m" and dropped["step"] == 1
    assert dropped["reason"] == "NON_FINITE" and '"w"' in dropped["error"]


def test_names_from_clients_cannot_make_lines(tmp_path):
    # Names of models and tensors have no such characters; who launches a run may call it anything.
    hostile = 'w\n{"event":"forged"}\r\x1b[2J"'
    for log_format in ("json", "text"):
        folder = tmp_path / log_format
        with ServerProcess(folder, "--log-format", log_format) as server:
            with ema_client.Client(server.address) as client:
                client.create_model("m", weights(0), tracks={"ema": "1ba"})
                client.open_run("m", launch_id=hostile).close()
        log = server.log_path.read_text()
        assert "run opened" in log
        assert all(" " <= c <= "~" or c == "\n" for c in log)
        assert not [line for line in log.splitlines() if line.startswith('{"event":"forged')]
        if log_format == "json":
            assert only(events(server), "run opened")["launch"] == hostile


def test_keys_stay_secret(tmp_path):
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
        + ["-nodes", "-subj", "/CN=server", "-keyout", str(key), "-out", str(cert)],
        check=True,
        capture_output=True,
    )
    with ServerProcess(
        tmp_path,
        *("--log-level", "debug", "--log-format", "json"),
        *("--tls-cert", str(cert), "--tls-key", str(key)),
    ) as server:
        pass
    log = server.log_path.read_text()
    secret = [line for line in key.read_text().splitlines() if not line.startswith("-----")]
    assert events(server) and secret
    assert not [line for line in secret if line in log]


def test_a_log_that_nobody_reads_stops_nothing(tmp_path):
    port_file, data = tmp_path / "port", tmp_path / "data"
    flags = ["--listen", "127.0.0.1:0", "--port-file", port_file, "--data-dir", data]
    read_end, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, 4096)
    with started([server_binary(), *flags, "--log-level", "debug"], stderr=write_end) as [process]:
        os.close(write_end)
        wait_for(lambda: port_file.exists() and port_file.read_text(), "it listens")
        address = f"127.0.0.1:{port_file.read_text().strip()}"
        with ema_client.Client(address, timeout_s=60) as client:
            client.create_model("m", weights(0), tracks={"raw": "copy"})
            with client.open_run("m") as run:
                # More than the pipe has room for, a line each.
                for step in range(1, 101):
                    run.push(step=step, weights=weights(step))
            client.create_checkpoint("m", label="kept")
        process.terminate()
        assert process.wait(60) == 0
    assert b" starting " in os.read(read_end, 1 << 16)
    os.close(read_end)
    with ServerProcess(tmp_path, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            pulled = client.pull("m", track="raw", framework="numpy")
            assert pulled.version.step == client.labels("m")["kept"].step == 100


def test_no_socket_or_file_takes_the_place_of_a_log_that_is_closed(tmp_path):
    port_file = tmp_path / "port"
    closing = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash"]
    flags = ["--listen", "127.0.0.1:0", "--port-file", port_file, "--data-dir", tmp_path / "data"]
    with subprocess.Popen([*closing, server_binary(), *flags]) as process:
        wait_for(lambda: port_file.exists() and port_file.read_text(), "it listens")
        files = [os.readlink(f"/proc/{process.pid}/fd/{fd}") for fd in range(3)]
        process.terminate()
        assert process.wait(60) == 0
    assert files == ["/dev/null"] * 3
