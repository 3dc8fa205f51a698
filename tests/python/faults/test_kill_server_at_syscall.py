# SPDX-License-Identifier: Apache-2.0
"""A whole ema-server is killed at every call that changes or syncs its data directory, in what clients ask for and at
its start; or, if this is no campaign, at some of these calls.

test_kill_at_syscall.py kills at every call of the checkpoints alone, where one thread makes them all; a server has
many, so here only those calls count that one thread of it makes: the one that saves, or that starts.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import pathlib
import shutil
import signal
import time
from collections.abc import Callable

import ema_client
import numpy as np
import pytest
from server_process import ServerError, ServerProcess, server_binary
from system_calls import Point, attach, kill_at, why_no_strace, write_killed_binary
from testing import IS_CAMPAIGN, sample, wait_for

# Calls by which the disk changes, or what was written becomes durable.
CHANGES = "fsync fdatasync rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat ftruncate".split()
TRACKS = {"ema": "2ba", "raw": "copy"}
# A client goes on trying for so long when its server has been killed; the tests' end waits for it.
TIMEOUT_S = 20
# After so long, a sample of each test tries no other system call.
SAMPLE_S = 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
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


def check_starts(
    folder: pathlib.Path,
    data: pathlib.Path,
    steps: set[int],
    labels: tuple[dict[str, int], ...] = ({},),
    deleted: int = 0,
) -> None:
    """Two starts find the same step, one of `steps`, with some of `labels`, all whole, and clear what was left.

    Args:
        labels: names, and at which step they are.
        deleted: a step that has no checkpoint any more.
    """
    found = []
    with ServerProcess(folder, data_dir=data) as server:
        for _ in range(2):
            with ema_client.Client(server.address) as client:
                pulled = client.pull("m", track="raw", framework="numpy")
                assert pulled.version.step in steps
                check_weights(pulled, pulled.version.step)
                found_labels = {name: label.step for name, label in client.labels("m").items()}
                assert found_labels in labels
                for name, step in found_labels.items():
                    check_weights(
                        client.pull("m", track="raw", version=name, framework="numpy"), step
                    )
                assert deleted not in [checkpoint.step for checkpoint in client.checkpoints("m")]
                found.append((pulled.version.step, pulled.version.number, found_labels))
            assert not list(data.rglob(".tmp-*"))
            assert not list(data.rglob(".corrupt-*"))
            server.kill()
            server.start()
    assert found[0] == found[1]


def check_weights(pulled: ema_client.Weights, step: int) -> None:
    for name, value in weights_of(step).items():
        assert (pulled[name] == value).all()


@dataclasses.dataclass(frozen=True)
class Act:
    """What is asked of a server that has checkpoints of steps 1 to 3; three are kept."""

    name: str
    act: Callable[[ema_client.Client], object]
    # The step and the labels that there are when it is done.
    step: int
    # What must be tested at the least.
    least_points: int
    before: Callable[[ema_client.Client], object] = lambda client: None
    labels: dict[str, int] = dataclasses.field(default_factory=dict)
    labels_before: dict[str, int] = dataclasses.field(default_factory=dict)
    deleted: int = 0
    flags: tuple[str, ...] = ()


def push_4(client: ema_client.Client) -> None:
    push(client, 4)


def delete_oldest(client: ema_client.Client) -> None:
    client.delete_checkpoint("m", client.checkpoints("m")[-1].name, timeout_s=TIMEOUT_S)


def push_and_await_save(client: ema_client.Client) -> None:
    push(client, 4)
    while (client.checkpoints("m")[0].step, client.checkpoints("m")[0].state) != (4, "complete"):
        time.sleep(0.01)


def push_4_and_5(client: ema_client.Client) -> None:
    push(client, 4)
    push(client, 5)


def score_and_push_4(client: ema_client.Client) -> None:
    client.report_metric("m", 1, 0.5, timeout_s=TIMEOUT_S)
    push(client, 4)


ACTS = [
    Act(
        "a save",
        lambda client: client.create_checkpoint("m", timeout_s=TIMEOUT_S),
        4,
        15,
        before=push_4,
    ),
    Act("an automatic save", push_and_await_save, 4, 15, flags=("--save-every-commits", "1")),
    Act(
        "a rollback",
        lambda client: client.restore("m", version=2, timeout_s=TIMEOUT_S),
        2,
        15,
        before=push_4,
    ),
    Act(
        "a rollback in memory",
        lambda client: client.restore("m", version=4, timeout_s=TIMEOUT_S),
        4,
        15,
        before=push_4_and_5,
    ),
    Act(
        "a label",
        lambda client: client.set_label("m", "stable", version=1, timeout_s=TIMEOUT_S),
        3,
        4,
        labels={"stable": 1},
    ),
    # What had the label is removed.
    Act(
        "a better score",
        lambda client: client.report_metric("m", 4, 0.7, timeout_s=TIMEOUT_S),
        4,
        18,
        before=score_and_push_4,
        labels={"best": 4},
        labels_before={"best": 1},
    ),
    Act("deleting a checkpoint", delete_oldest, 3, 6, deleted=1),
]


def is_answered(server: ServerProcess, act: Callable[[ema_client.Client], object]) -> bool:
    """Whether `act` was answered with OK; False: the server was gone before."""

    def call() -> None:
        with ema_client.Client(server.address, timeout_s=TIMEOUT_S) as client:
            act(client)

    pool = concurrent.futures.ThreadPoolExecutor(1)
    called = pool.submit(call)
    while not called.done() and server.is_running():
        time.sleep(0.01)
    # Its client goes on trying for a while; nobody waits for that.
    pool.shutdown(wait=False)
    try:
        called.result(timeout=1)
        return True
    except (concurrent.futures.TimeoutError, ema_client.UnavailableError):
        # A killed process takes a moment to be gone.
        wait_for(lambda: not server.is_running(), "the server's end", 10)
        return False


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.name.replace(" ", "-"))
def test_a_server_killed_at_every_change(tmp_path, act):
    template = make_template(tmp_path, 3)
    killed = []
    for name in sample(CHANGES, SAMPLE_S):
        for number in range(1, 100):
            point = Point(name, number)
            data = tmp_path / "data"
            shutil.copytree(template, data)
            with ServerProcess(tmp_path, *act.flags, data_dir=data) as server:
                with ema_client.Client(server.address) as client:
                    act.before(client)
                strace = attach(server.pid, [name], *kill_at(point))
                is_done = is_answered(server, act.act)
                is_killed = not server.is_running()
                server.kill()
                strace.communicate()
            if is_done:
                check_starts(tmp_path, data, {act.step}, (act.labels,), act.deleted)
            else:
                check_starts(tmp_path, data, {3, act.step}, (act.labels_before, act.labels))
            shutil.rmtree(data)
            if not is_killed:
                assert is_done
                break
            killed.append(point)
    print(f"{act.name}: killed at {len(killed)} points")
    assert not IS_CAMPAIGN or len(killed) >= act.least_points


def test_a_server_killed_at_every_change_of_its_start(tmp_path, monkeypatch):
    template = make_template(tmp_path, 3)
    folder = template / "models/m/checkpoints"
    shutil.copytree(sorted(folder.glob("step-*"))[0], folder / ".tmp-removed")
    real = server_binary()
    script = tmp_path / "ema-server"
    killed = []
    for name in sample(CHANGES, SAMPLE_S):
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
    print(f"killed at {len(killed)} points")
    assert not IS_CAMPAIGN or len(killed) >= 8
