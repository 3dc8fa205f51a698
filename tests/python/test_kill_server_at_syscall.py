# SPDX-License-Identifier: Apache-2.0
"""A whole ema-server is killed at every call that changes or syncs its data directory, in a save and at its start.

test_kill_at_syscall.py kills at every call of the store alone, where one thread makes them all; a server has many,
so here only those calls count that one thread of it makes: the save's, or the start's.
"""

from __future__ import annotations

import pathlib
import shutil
import signal
import time

import ema_client
import numpy as np
import pytest
from server_process import ServerError, ServerProcess, server_binary
from system_calls import Point, attach, kill_at, why_no_strace, write_killed_binary

# Calls by which the disk changes, or what was written becomes durable.
CHANGES = "fsync fdatasync rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat ftruncate".split()
TRACKS = {"ema": "2ba", "raw": "copy"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_strace() != "", reason=why_no_strace() or "strace works"),
]


def weights_of(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full((20, 30), step, np.float32), "count": np.array(step, np.int64)}


def push(client: ema_client.Client, step: int) -> ema_client.Version:
    with client.open_run("m") as run:
        return run.push(step=step, weights=weights_of(step))


def make_template(folder: pathlib.Path, saves: int) -> pathlib.Path:
    """A data directory with checkpoints of steps 1 to `saves`; three are kept."""
    data = folder / "template"
    with ServerProcess(folder, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights_of(0), tracks=TRACKS)
            for step in range(1, saves + 1):
                push(client, step)
                client.create_checkpoint("m")
        server.kill()
    return data


def check_starts(folder: pathlib.Path, data: pathlib.Path, steps: set[int]) -> None:
    """Two starts find the same step, one of `steps`, whole, and clear what was left."""
    found = []
    with ServerProcess(folder, data_dir=data) as server:
        for _ in range(2):
            with ema_client.Client(server.address) as client:
                pulled = client.pull("m", track="raw", framework="numpy")
                assert pulled.version.step in steps
                for name, value in weights_of(pulled.version.step).items():
                    assert (pulled[name] == value).all()
                found.append((pulled.version.step, pulled.version.number))
            assert not list(data.rglob(".tmp-*"))
            assert not list(data.rglob(".corrupt-*"))
            server.kill()
            server.start()
    assert found[0] == found[1]


def test_a_server_killed_at_every_change_of_a_save(tmp_path):
    template = make_template(tmp_path, 3)
    killed = []
    for name in CHANGES:
        for number in range(1, 100):
            point = Point(name, number)
            data = tmp_path / "data"
            shutil.copytree(template, data)
            with ServerProcess(tmp_path, data_dir=data) as server:
                with ema_client.Client(server.address) as client:
                    push(client, 4)
                    strace = attach(server.pid, [name], *kill_at(point))
                    try:
                        is_saved = client.create_checkpoint("m", timeout_s=30).version.step == 4
                    except ema_client.UnavailableError:
                        is_saved = False
                deadline = time.monotonic() + 10
                while not is_saved and server.is_running() and time.monotonic() < deadline:
                    time.sleep(0.01)  # A killed process takes a moment to be gone.
                is_killed = not server.is_running()
                server.kill()
                strace.communicate()
            check_starts(tmp_path, data, {4} if is_saved else {3, 4})
            shutil.rmtree(data)
            if not is_killed:
                assert is_saved
                break
            killed.append(point)
    print(f"killed at each of {len(killed)} points")
    assert len(killed) >= 15


def test_a_server_killed_at_every_change_of_its_start(tmp_path, monkeypatch):
    template = make_template(tmp_path, 3)
    folder = template / "models/m/checkpoints"
    shutil.copytree(sorted(folder.glob("step-*"))[0], folder / ".tmp-removed")
    real = server_binary()
    script = tmp_path / "ema-server"
    killed = []
    for name in CHANGES:
        for number in range(1, 100):
            point = Point(name, number)
            data = tmp_path / "data"
            shutil.copytree(template, data)
            write_killed_binary(script, real, point)
            monkeypatch.setenv("EMA_SERVER_BIN", str(script))
            server = ServerProcess(tmp_path, data_dir=data)
            try:
                server.start()
                is_killed = False
            except ServerError as error:
                assert f"ended with {-signal.SIGKILL}" in str(error)
                is_killed = True
            server.kill()
            monkeypatch.delenv("EMA_SERVER_BIN")
            check_starts(tmp_path, data, {3})
            shutil.rmtree(data)
            if not is_killed:
                break
            killed.append(point)
    print(f"killed at each of {len(killed)} points")
    assert len(killed) >= 8
