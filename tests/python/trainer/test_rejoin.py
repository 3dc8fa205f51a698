# SPDX-License-Identifier: Apache-2.0
"""The thread that joins a run again: what it survives, how often it asks, and what it says."""

from __future__ import annotations

import logging
import random
import re
import threading
import time

import ema_client
import pytest
import torch
from ema_client._client.run import Joined
from ema_client._trainer.away import Link, is_outage
from ema_client._trainer.skips import outlook
from server_process import ServerProcess
from testing import step_until, wait_for


class FakeRun:
    run_epoch = 7

    def __init__(self, on_close=lambda: None) -> None:
        self.is_closed = False
        self._on_close = on_close

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def committed_as(self, step: int, timeout_s: float) -> None:
        return None

    def close(self) -> None:
        self._on_close()
        self.is_closed = True


class FakePush:
    is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True


class FakeStop:
    """Comes after so many pauses, which last no time."""

    def __init__(self, pauses: int) -> None:
        self._count = pauses
        self.pauses: list[float] = []

    def wait(self, pause_s: float) -> bool:
        self.pauses.append(pause_s)
        return len(self.pauses) == self._count

    def is_set(self) -> bool:
        return False

    def set(self) -> None:
        pass


def no_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def link_to(open_run) -> Link:
    link = Link("m", lambda: None)
    link.take(Joined(FakeRun(), open_run, 0))
    return link


@pytest.mark.parametrize("closes", [False, True], ids=["goes on", "closes"])
def test_a_run_that_is_joined_again(closes):
    came_back = []
    link = Link("m", lambda: came_back.append(link.run))
    new = FakeRun()
    at_close = []
    old = FakeRun(lambda: at_close.append(link.run))

    def open_run(last_run_epoch: int, timeout_s: float) -> FakeRun:
        if closes:
            link._stop.set()  # As by a close() that does not wait any longer.
        return new

    link.take(Joined(old, open_run, 0))
    link.go_away(1, None)
    assert link._thread is not None
    link._thread.join(30)
    assert at_close == [new]
    assert old.is_closed
    assert new.is_closed == closes
    assert came_back == ([] if closes else [new])
    assert link.is_away == closes


def test_a_process_without_threads_is_away_until_it_has_one(monkeypatch):
    link = link_to(lambda last_run_epoch, timeout_s: FakeRun())
    lost = FakePush()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        link.go_away(1, lost)
        link.start()
        assert link.is_away
        assert "can't start new thread" in str(link.error())
    link.start()
    link.wait_back(time.monotonic() + 30)
    assert not link.is_away and lost.is_abandoned
    link.close()


def test_a_process_without_threads_closes(monkeypatch):
    link = link_to(lambda last_run_epoch, timeout_s: FakeRun())
    lost = FakePush()
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    link.go_away(1, lost)
    link.wait_back(time.monotonic())
    link.close()
    assert link.run.is_closed and lost.is_abandoned


def test_what_is_no_error_of_the_server_does_not_end_the_tries(monkeypatch):
    failures = [MemoryError(), KeyError("rank")]

    def open_run(last_run_epoch: int, timeout_s: float) -> FakeRun:
        if failures:
            raise failures.pop()
        return FakeRun()

    link = link_to(open_run)
    link._stop = FakeStop(99)
    link.go_away(1, None)
    link.wait_back(time.monotonic() + 30)
    assert not link.is_away and not failures
    link.close()


def test_a_server_that_starts_again_while_it_is_asked_has_no_newer_run():
    """To a question about the lost step it answers that it does not know the run, as of one it has fenced."""
    restarts = [ema_client.AbortedError("restarted", reason="FENCED")]

    class AskedRun(FakeRun):
        def committed_as(self, step: int, timeout_s: float) -> None:
            if restarts:
                raise restarts.pop()

    link = link_to(lambda last_run_epoch, timeout_s: AskedRun())
    link._stop = FakeStop(99)
    link.go_away(1, None)
    link.wait_back(time.monotonic() + 30)
    assert not restarts and not link.is_away and not link.is_fenced
    link.close()


def test_a_run_that_has_been_fenced_is_not_joined_again(caplog):
    why = "fenced by a newer run, or a rollback"

    def open_run(last_run_epoch: int, timeout_s: float) -> FakeRun:
        raise ema_client.AbortedError(why, reason="FENCED")

    link = link_to(open_run)
    link.go_away(1, None)
    link.wait_back(time.monotonic() + 30)
    assert link.is_fenced and link.is_away
    link._thread.join(30)
    said = f'model "m": this run does not push any more: {why}'
    assert [record.getMessage() for record in caplog.records] == [said]
    assert str(link.error()) == f"{said} [FENCED]"
    link.close()


def pauses_of(count: int, error: ema_client.EmaError) -> list[float]:
    def open_run(last_run_epoch: int, timeout_s: float) -> FakeRun:
        raise error

    random.seed(7)  # As each rank of a training does.
    seeded = random.getstate()
    link = link_to(open_run)
    link._stop = FakeStop(count)
    link.go_away(1, None)
    assert link._thread is not None
    link._thread.join(30)
    assert random.getstate() == seeded
    return link._stop.pauses


def test_tries_grow_rarer_and_ranks_do_not_ask_at_once():
    away = ema_client.UnavailableError("away")
    ranks = [pauses_of(8, away) for _ in range(10)]
    for least, of_all in zip([0.25, 0.5, 1, 2, 2, 2, 2, 2], zip(*ranks)):
        assert all(least <= pause <= 2 * least for pause in of_all)
        assert len(set(of_all)) == len(ranks)


def test_an_error_that_stays_is_said_once(caplog):
    caplog.set_level(logging.INFO, "ema_client")
    pauses_of(5, ema_client.AlreadyExistsError("other tracks"))
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == [
        'model "m": pushes do not start again before this is mended: other tracks'
    ]
    caplog.clear()
    refused = ema_client.FailedPreconditionError("no good one", reason="ALL_CHECKPOINTS_CORRUPT")
    pauses_of(5, refused)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.message for record in warnings] == [
        'model "m": pushes do not start again before this is mended: no good one '
        "[ALL_CHECKPOINTS_CORRUPT]"
    ]
    caplog.clear()
    pauses_of(5, ema_client.UnavailableError("away"))
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_an_own_gpu_that_hangs_is_no_outage():
    assert is_outage(ema_client.DeadlineExceededError("late"))
    assert is_outage(ema_client.UnavailableError("away"))
    assert is_outage(ema_client.AbortedError("restarted", reason="FENCED"))
    assert not is_outage(ema_client.DeadlineExceededError("copy", reason="DEVICE"))
    assert not is_outage(ema_client.UnavailableError("copy", reason="DEVICE"))


def test_a_skipped_step_says_whether_the_next_is_any_better():
    assert outlook(ema_client.UnavailableError("away")) == "the average goes on with the next"
    differs = ema_client.FailedPreconditionError("time", reason="PLAN_MISMATCH")
    assert "attach(time=) gives the same on all ranks" in outlook(differs)
    frozen = ema_client.FailedPreconditionError("frozen: step 3: ...", reason="PLAN_MISMATCH")
    assert "goes on with the next (a step is lost when frozen" in outlook(frozen)
    assert "time=" not in outlook(frozen)
    wrong = ema_client.InvalidArgumentError("shape", reason="BAD_LAYOUT")
    assert "no step can be pushed until" in outlook(wrong)


def test_a_training_whose_process_has_no_more_threads(tmp_path, model, monkeypatch, caplog):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with ServerProcess(tmp_path) as server:
        with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
            step()
            ema.wait_pushed()
            server.kill()
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", no_threads)
                for _ in range(4):
                    step()
            assert ema.stats.pushes == 1 and ema.stats.skipped >= 1
            server.start(port=server.port)
            step_until(lambda: ema.stats.pushes >= 2, step)
            lost = ema.stats.skipped + 1  # The server has forgotten the first.
            for _ in range(3):
                step()
                ema.wait_pushed()
    said = re.findall(r"pushing again, (\d+) steps were lost", caplog.text)
    assert [int(count) for count in said] == [lost]


def test_a_restart_forgets_nobody_who_was_fenced(tmp_path, model, caplog):
    class Trainer:
        def __init__(self, url: str) -> None:
            self.net = torch.nn.Linear(3, 2)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            self.ema = ema_client.attach(self.net, self.optimizer, url, half_life="3ba")

        def step(self) -> None:
            self.net(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()

    with ServerProcess(tmp_path) as server:
        fenced, newer = Trainer(server.url(model)), Trainer(server.url(model))
        newer.step()
        newer.ema.wait_pushed()
        server.kill()
        # It has not heard that it was fenced, and comes back first.
        step_until(lambda: fenced.ema._link.is_away, fenced.step)
        server.start(port=server.port)
        wait_for(lambda: not fenced.ema._link.is_away, "the fenced one came back")
        step_until(lambda: newer.ema.stats.pushes >= 2, newer.step)
        step_until(lambda: "does not push any more" in caplog.text, fenced.step)
        pushes = newer.ema.stats.pushes
        newer.step()
        newer.ema.wait_pushed()
        assert newer.ema.stats.pushes > pushes and fenced.ema.stats.pushes == 0
        newer.ema.close()
        fenced.ema.close()


def test_a_step_that_is_pushed_again_after_an_outage_is_not_said_to_be_written(
    tmp_path, model, caplog
):
    """Nor is what it read copied from then on. The step behind it pushes nothing."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with ServerProcess(tmp_path) as server:
        options = {"half_life": "3ba", "update_interval": "2ba", "on_error": "wait"}
        with ema_client.attach(net, optimizer, server.url(model), **options) as ema:
            step()
            ema.wait_pushed()
            server.kill()
            step()  # Pushes, and its push fails.
            restart = threading.Timer(0.5, server.start, kwargs={"port": server.port})
            restart.start()
            for _ in range(3):
                step()
            restart.join()
        assert (ema.stats.pushes, ema.stats.skipped) == (3, 0)
    assert "waits for the server" in caplog.text
    assert "written since" not in caplog.text


GONE = {
    True: "the server has gone back from step 5 to step 2, 3 of this trainer's updates are gone",
    False: "and the average begins anew at step {next}, 5 of this trainer's updates are gone",
}


@pytest.mark.parametrize("on_error", ["skip", "wait"])
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "never saved"])
def test_what_a_crash_of_the_server_has_lost_is_said(tmp_path, model, caplog, is_saved, on_error):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.attach(
            net, optimizer, server.url(model), half_life="3ba", on_error=on_error
        ) as ema:
            for count in range(1, 6):
                step()
                ema.wait_pushed()
                if is_saved and count == 2:
                    with ema_client.Client(server.address) as client:
                        client.create_checkpoint(model)
            server.kill()
            if on_error == "skip":
                for _ in range(3):
                    step()
            server.start(port=server.port)
            step_until(lambda: ema.stats.pushes >= 6, step)
            skipped = ema.stats.skipped
            ema.wait_pushed()
            # A second crash: what was gone is not counted again.
            server.kill()
            server.start(port=server.port)
            pushes = ema.stats.pushes
            step_until(lambda: ema.stats.pushes > pushes, step)
    assert GONE[is_saved].format(next=6 + skipped) in caplog.text
    gone = [int(count) for count in re.findall(r"(\d+) of this trainer's updates", caplog.text)]
    assert gone == [3 if is_saved else 5, pushes - 5]
    lost = [int(count) for count in re.findall(r"pushing again, (\d+) steps", caplog.text)]
    assert lost[0] == gone[0] + skipped
