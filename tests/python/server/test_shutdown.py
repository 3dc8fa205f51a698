# SPDX-License-Identifier: Apache-2.0
"""How a real server ends: asked by a signal or a call, idle or at work."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
from collections.abc import Callable, Iterator

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess, server_binary
from system_calls import why_no_strace
from testing import EMACTL, NOT_SERVING, SERVING, assert_same_bits, check_health, wait_for

WEIGHTS = {"w": np.arange(1000, dtype=np.float32)}
OTHER_WEIGHTS = {"w": np.ones(1000, dtype=np.float32)}
TRACKS = {"ema": "4ba"}

Ask = Callable[[ServerProcess], None]


@pytest.fixture(autouse=True)
def heeds_hang_ups() -> Iterator[None]:
    """Also where the tests run under nohup, of which servers would inherit that they ignore SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def emactl(server: ServerProcess, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [EMACTL, "--server", server.address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def by_sigterm(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGTERM)


def by_sigint(server: ServerProcess) -> None:
    os.kill(server.pid, signal.SIGINT)


def by_sighup(server: ServerProcess) -> None:
    """As when its terminal is closed."""
    os.kill(server.pid, signal.SIGHUP)


def by_call(server: ServerProcess) -> None:
    asked = emactl(server, "drain", "--yes", "--json")
    assert asked.returncode == 0, asked.stderr
    assert json.loads(asked.stdout)["began"]


ASKS = pytest.mark.parametrize("ask", [by_sigterm, by_sigint, by_sighup, by_call])


def push(server: ServerProcess, steps: list[int]) -> None:
    with ema_client.Client(server.address, timeout_s=30) as client:
        client.create_model("m", WEIGHTS, tracks=TRACKS)
        with client.open_run("m") as run:
            for step in steps:
                run.push(step=step, weights=WEIGHTS)


def assert_saved(tmp_path: pathlib.Path, step: int) -> None:
    """What another server finds."""
    with ServerProcess(tmp_path / "after", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=30) as client:
            latest = client.model("m").latest
            assert latest is not None and latest.step == step
            assert_same_bits(WEIGHTS, client.pull("m", track="ema", framework="numpy"))


@ASKS
def test_an_idle_server_saves_and_ends_with_0(tmp_path, ask: Ask):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        push(server, [1, 2])
        ask(server)
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()
        assert " stopped" in server.log()
    assert_saved(tmp_path, step=2)


@ASKS
def test_a_step_that_is_being_pushed_is_committed_and_saved(tmp_path, ask: Ask):
    with ServerProcess(tmp_path, "--drain-grace", "60s", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", WEIGHTS, tracks=TRACKS)
            runs = [client.open_run("m", launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
            first = runs[0].start_push(step=1, weights=WEIGHTS)
            wait_for(lambda: sessions(server) == 1, "the step is open")
            # Through shared memory: the server has read it. Before, a step may only be about to open.
            assert first.wait_released(max_wait_s=30) and first.stats.lane == "shared memory"
            ask(server)
            wait_for(lambda: check_health(server.address, "") == NOT_SERVING, "it drains")
            assert sessions(server) == 1
            wait_for(lambda: "waiting for running calls" in server.log(), "it says for what")
            assert re.search(r"running calls pulls=0 pushes=\d steps=1 longest=1m", server.log())
            second = runs[1].start_push(step=1, weights=WEIGHTS)
            assert [pending.wait().step for pending in (first, second)] == [1, 1]
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()
    assert_saved(tmp_path, step=1)


def sessions(server: ServerProcess) -> int:
    info = emactl(server, "info", "--json")
    return int(json.loads(info.stdout)["limits"]["sessions"]["in_use"])


def test_a_step_that_does_not_end_is_dropped_after_the_grace(tmp_path):
    with ServerProcess(tmp_path, "--drain-grace", "200ms", data_dir=tmp_path / "data") as server:
        push(server, [1])
        with ema_client.Client(server.address, timeout_s=30) as client:
            runs = [client.open_run("m", launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
            # It goes on trying for so long when the server has gone.
            pending = runs[0].start_push(step=2, weights=WEIGHTS, timeout_s=5)
            wait_for(lambda: sessions(server) == 1, "the step is open")
            assert server.stop() == 0, server.log()
            with pytest.raises(ema_client.EmaError):
                pending.wait()
    assert_saved(tmp_path, step=1)


@pytest.mark.slow
def test_a_save_that_runs_is_finished(tmp_path):
    if why_no_strace():
        pytest.skip(why_no_strace())
    port_file, log = tmp_path / "port", tmp_path / "log"
    # -D: the process is the server, and strace is beside it.
    slow = ["strace", "-D", "-f", "-o", str(tmp_path / "trace"), "-e", "trace=fsync"]
    slow += ["-e", "inject=fsync:delay_enter=500000"]
    command = [server_binary(), "--listen", "127.0.0.1:0", "--port-file", port_file]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*slow, *command, "--data-dir", tmp_path / "data"], stdout=file, stderr=file
        )
    try:
        wait_for(lambda: port_file.exists() and port_file.read_text() != "", "serving")
        address = f"127.0.0.1:{int(port_file.read_text())}"
        with ema_client.Client(address, timeout_s=60) as client:
            client.create_model("m", WEIGHTS, tracks=TRACKS)
            with client.open_run("m") as run:
                run.push(step=1, weights=WEIGHTS)
                # Not what the server saves at its end by itself.
                saving = client.create_checkpoint("m", label="kept", wait=False)
                assert saving.state == "saving"
                run.push(step=2, weights=OTHER_WEIGHTS)
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    with ServerProcess(tmp_path / "after", data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address, timeout_s=30) as client:
            latest = client.model("m").latest
            assert latest is not None and latest.step == 2
            kept = client.pull("m", track="ema", version="kept", framework="numpy")
            assert kept.version.step == 1
            assert_same_bits(WEIGHTS, kept)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(tmp_path, second: signal.Signals):
    with ServerProcess(tmp_path, "--drain-delay", "1h") as server:
        by_sigterm(server)
        wait_for(lambda: check_health(server.address, "") == NOT_SERVING, "it drains")
        os.kill(server.pid, second)
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == -second
        assert "stopped" not in server.log()


def test_a_signal_after_a_call_is_no_second_signal(tmp_path):
    """What Kubernetes, systemd or Docker sends to a server that somebody has asked to drain."""
    with ServerProcess(tmp_path, "--drain-delay", "500ms", data_dir=tmp_path / "data") as server:
        push(server, [1, 2])
        by_call(server)
        wait_for(lambda: " draining " in server.log(), "it drains")
        by_sigterm(server)
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()
    assert_saved(tmp_path, step=2)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGHUP])
def test_a_hang_up_is_no_second_signal(tmp_path, first: signal.Signals):
    """A terminal is closed after Ctrl-C; or bash and the kernel both tell that it is."""
    with ServerProcess(tmp_path, "--drain-delay", "500ms", data_dir=tmp_path / "data") as server:
        push(server, [1, 2])
        os.kill(server.pid, first)
        wait_for(lambda: " draining " in server.log(), "it drains")
        by_sighup(server)
        by_sighup(server)
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()
    assert_saved(tmp_path, step=2)


def test_a_second_call_is_no_second_signal(tmp_path):
    with ServerProcess(tmp_path, "--drain-delay", "1h", "--drain-grace", "90s") as server:
        assert emactl(server, "drain").returncode == 2, "it wants --yes"
        assert check_health(server.address, "") == SERVING
        for began in (True, False, False):
            answer = json.loads(emactl(server, "drain", "--yes", "--json").stdout)
            assert answer == {"began": began, "delay_seconds": 3600.0, "grace_seconds": 90.0}
        assert "draining already" in emactl(server, "drain", "--yes").stdout
        assert server.is_running()
        server.kill()


def test_in_the_delay_everything_is_served_to_those_who_have_not_noticed(tmp_path):
    with ServerProcess(tmp_path, "--drain-delay", "1h") as server:
        push(server, [1])
        by_sigterm(server)
        wait_for(lambda: check_health(server.address, "") == NOT_SERVING, "not serving")
        assert json.loads(emactl(server, "info", "--json").stdout)["serving"] is False
        with ema_client.Client(server.address, timeout_s=30) as client:
            assert_same_bits(WEIGHTS, client.pull("m", track="ema", framework="numpy"))
            client.create_model("another", WEIGHTS, tracks=TRACKS)
            with client.open_run("m") as run:
                assert run.push(step=2, weights=WEIGHTS).number == 2
        assert server.is_running()
        server.kill()


def test_after_the_delay_new_work_is_refused_and_the_reason_says_why(tmp_path):
    flags = ["--drain-delay", "300ms", "--drain-grace", "60s"]
    with ServerProcess(tmp_path, *flags) as server:
        push(server, [1])
        with (
            ema_client.Client(server.address, timeout_s=60) as client,
            ema_client.Client(server.address, timeout_s=3) as impatient,
        ):
            runs = [client.open_run("m", launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
            pending = [runs[0].start_push(step=2, weights=WEIGHTS)]
            wait_for(lambda: sessions(server) == 1, "the step is open")
            by_sigterm(server)

            def refusal() -> str | None:
                try:
                    impatient.pull("m", track="ema", framework="numpy")
                except ema_client.EmaError as error:
                    assert isinstance(error, ema_client.UnavailableError)
                    return error.reason
                return None

            wait_for(lambda: refusal() == "DRAINING", "pulls are refused")
            with pytest.raises(ema_client.UnavailableError) as error:
                impatient.create_model("late", WEIGHTS, tracks=TRACKS)
            assert error.value.reason == "DRAINING"
            # What is under way ends as ever.
            pending.append(runs[1].start_push(step=2, weights=WEIGHTS))
            assert [one.wait().step for one in pending] == [2, 2]
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()


def test_a_first_process_heeds_a_signal_that_comes_while_it_loads(tmp_path):
    """A container's; the kernel drops what such a process neither blocks nor handles."""
    command = ["unshare", "--pid", "--fork", "--kill-child", str(server_binary())]
    if subprocess.run([*command, "--version"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces: unshare --pid does not work here")

    def is_early() -> bool:
        """That it was asked before its first line; False: this test was too slow for it."""
        with (tmp_path / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, "--listen", "127.0.0.1:0"], stdout=log, stderr=log
            )
        try:
            wait_for(lambda: first_process(process.pid) != 0, "the signals are blocked")
            said = (tmp_path / "log").read_text()
            os.kill(first_process(process.pid), signal.SIGTERM)
            assert process.wait(60) == 0
            return said == ""
        finally:
            process.kill()
            process.wait()

    assert any(is_early() for _ in range(5))


def first_process(unshare: int) -> int:
    """The server in its namespace, once it has SIGTERM blocked; 0: not yet."""
    for child in pathlib.Path(f"/proc/{unshare}/task/{unshare}/children").read_text().split():
        if os.path.basename(os.readlink(f"/proc/{child}/exe")) != "ema-server":
            return 0
        status = pathlib.Path(f"/proc/{child}/status").read_text()
        mask = int(status.split("SigBlk:")[1].split()[0], 16)
        return int(child) if mask >> (signal.SIGTERM - 1) & 1 else 0
    return 0


def test_a_hang_up_that_nohup_ignores_is_ignored(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with ServerProcess(tmp_path) as server:
        by_sighup(server)
        push(server, [1])
        assert server.stop() == 0
        assert "SIGHUP" not in server.log()
