# SPDX-License-Identifier: Apache-2.0
"""An fsync of a real server fails: saves end there, all else goes on, it can be seen, and a restart heals it.

The kernel reports such an error once, and may have dropped the bytes: that the next fsync succeeds says nothing.
"""

from __future__ import annotations

import shutil
import threading

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess
from system_calls import Point, attach, fail_at, why_no_strace
from test_kill_server_at_syscall import check_starts, make_template, push
from testing import NOT_SERVING, SERVING, check_health

SYNCS = ["fsync", "fdatasync"]
# How much traffic there must be after the failure.
ROUNDS = 30

pytestmark = [
    pytest.mark.skipif(why_no_strace() != "", reason=why_no_strace() or "strace works"),
]


def weights_at(step: int) -> dict[str, np.ndarray]:
    return {"w": np.full((100, 301), step, np.float32), "count": np.array(step, np.int64)}


class Traffic:
    """One client pushes, another pulls, until the body of the context ends."""

    def __init__(self, address: str, first_step: int) -> None:
        self._address = address
        self._step = first_step
        self._changed = threading.Condition()
        self._is_over = False
        self._counts = {"push": 0, "pull": 0}
        self._problems: list[str] = []
        jobs = {"push": self._push, "pull": self._pull}
        self._threads = [threading.Thread(target=self._run, args=job) for job in jobs.items()]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        for thread in self._threads:
            thread.join()

    def await_rounds(self, count: int) -> None:
        """Until there have been so many more pushes, and pulls, without a problem."""
        with self._changed:
            goal = {name: value + count for name, value in self._counts.items()}
            self._changed.wait_for(
                lambda: self._problems or all(self._counts[name] >= goal[name] for name in goal),
                timeout=60,
            )
            assert not self._problems, self._problems
            assert all(self._counts[name] >= goal[name] for name in goal), (self._counts, goal)

    def _run(self, name, job) -> None:
        try:
            with ema_client.Client(self._address, timeout_s=10) as client:
                for _ in job(client):
                    with self._changed:
                        self._counts[name] += 1
                        self._changed.notify_all()
                    if self._is_over:
                        break
        except (ema_client.EmaError, AssertionError) as error:
            with self._changed:
                self._problems.append(f"{name}: {error!r}")
                self._changed.notify_all()

    def _push(self, client):
        with client.open_run("m") as run:
            while True:
                self._step += 1
                assert run.push(step=self._step, weights=weights_at(self._step)).step == self._step
                yield

    def _pull(self, client):
        last = 0
        while True:
            pulled = client.pull("m", track="raw", framework="numpy")
            assert pulled.version.step >= last
            last = pulled.version.step
            for name, value in weights_at(last).items():
                assert (pulled[name] == value).all(), name
            yield


def expect_read_only(call, *arguments, **options) -> None:
    with pytest.raises(ema_client.UnavailableError) as error:
        call(*arguments, timeout_s=30, **options)
    assert error.value.reason == "STORE_READ_ONLY"


def test_pushes_and_pulls_go_on_and_a_restart_heals(tmp_path):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model("m", weights_at(0), tracks={"ema": "2ba", "raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights_at(1))
            first = client.create_checkpoint("m", label="first")
            assert check_health(server.address, "checkpoints") == SERVING
            with Traffic(server.address, first_step=1) as traffic:
                traffic.await_rounds(1)
                strace = attach(server.pid, SYNCS, *fail_at(Point("fsync", 1), "EIO"))
                expect_read_only(client.create_checkpoint, "m")
                strace.terminate()
                strace.communicate()
                # The disk is good again; what it holds is not known.
                for _ in range(2):
                    expect_read_only(client.create_checkpoint, "m")
                expect_read_only(client.set_label, "m", "second", version=first.version)
                expect_read_only(client.remove_label, "m", "first")
                expect_read_only(client.report_metric, "m", first.version, 0.5)
                expect_read_only(client.delete_checkpoint, "m", first.name)
                traffic.await_rounds(ROUNDS)
            # It is seen: by probes, by who lists checkpoints, in the log.
            assert check_health(server.address, "checkpoints") == NOT_SERVING
            assert check_health(server.address, "") == SERVING
            listed = client.checkpoints("m")
            assert {c.state for c in listed[:-1]} == {"failed"}
            assert (listed[-1].name, listed[-1].state) == (first.name, "complete")
            assert all(
                "read-only until the server is started again" in c.problem for c in listed[:-1]
            )
            assert (
                server.log().count("the checkpoint store is read-only until the server is started")
                >= 1
            )
            # What was saved before can be read.
            assert client.pull("m", track="raw", version="first", framework="numpy")["count"] == 1
        assert server.stop() == 1, "what could not be saved is lost, and it says so"
        server.start()
        assert check_health(server.address, "checkpoints") == SERVING
        with ema_client.Client(server.address) as client:
            assert client.model("m").latest == first.version
            assert list(client.labels("m")) == ["first"]
            with client.open_run("m") as run:
                last = run.push(step=2, weights=weights_at(2))
            assert client.create_checkpoint("m").version == last
            assert [c.state for c in client.checkpoints("m")] == ["complete", "complete"]
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_any_fsync_of_a_save_may_fail(tmp_path):
    template = make_template(tmp_path, 3)
    answers = []
    for number in range(1, 100):
        data = tmp_path / "data"
        shutil.copytree(template, data)
        log = tmp_path / "strace"
        with ServerProcess(tmp_path, data_dir=data) as server:
            with ema_client.Client(server.address) as client:
                push(client, 4)
                strace = attach(
                    server.pid, SYNCS, *fail_at(Point("fsync", number), "EIO"), log=str(log)
                )
                try:
                    is_saved = client.create_checkpoint("m", timeout_s=30).version.step == 4
                except ema_client.UnavailableError as error:
                    assert error.reason == "STORE_READ_ONLY"
                    is_saved = False
                strace.terminate()
                strace.communicate()
                is_failed = "INJECTED" in log.read_text()
                if is_failed:
                    push(client, 5)
                    expect_read_only(client.create_checkpoint, "m")
                    assert check_health(server.address, "checkpoints") == NOT_SERVING
                    assert client.pull("m", track="raw", framework="numpy").version.step == 5
            server.kill()
        check_starts(tmp_path, data, {4} if is_saved else {3, 4})
        shutil.rmtree(data)
        if not is_failed:
            assert is_saved
            break
        answers.append(is_saved)
    print(f"failed each of {len(answers)} syncs; answered OK after it: {sum(answers)}")
    assert len(answers) >= 10
    # Only that before the removal of what is old, when the save is done.
    assert answers == sorted(answers) and sum(answers) == 1
