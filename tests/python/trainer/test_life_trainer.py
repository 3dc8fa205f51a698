# SPDX-License-Identifier: Apache-2.0
"""A long run whose trainers die, sleep, end in every way, and come back as others."""

from __future__ import annotations

import signal

import ema_client
import numpy as np
import pytest
from commanded import check_average, do_all, end_all, logged, running
from server_process import ServerProcess

# Short, since the others wait so long for a rank that is dead.
SESSION_TIMEOUT_S = 2


@pytest.mark.slow
def test_an_old_trainer_that_wakes_up_cannot_push(server, client, model, tmp_path):
    url, folder = server.url(model), tmp_path / "ranks"
    with running("apart", [url], folder) as (old,):
        for _ in range(3):
            old.do()
        old.do("checkpoint")
        first_epoch = client.model(model).run_epoch
        old.do()
        old.do("pushed")
        old.send(signal.SIGSTOP)
        with running("apart", [url], folder) as (new,):
            assert client.model(model).run_epoch > first_epoch
            for _ in range(2):
                new.do()
            assert new.do("pushed")["pushes"] == 2
            old.send(signal.SIGCONT)
            for _ in range(3):
                old.do()
            old.await_log("has taken over; this one no longer pushes.")
            assert old.do()["pushes"] == 4
            answer = new.do()
            assert new.do("pushed")["pushes"] == 3
            # What the old one has pushed after the checkpoint is no part of the average.
            latest = client.model(model).latest
            assert latest.step == answer["step"] == 6
            assert latest.tracks["ema"].update_count == 6
            end_all([old])
            end_all([new])


@pytest.mark.slow
def test_two_ranks_of_ddp_are_three_of_fully_shard_after_a_restart(tmp_path, model):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        folder, url = tmp_path / "ranks", server.url(model)
        with running("ddp", [url] * 2, folder) as ranks:
            for _ in range(4):
                do_all(ranks)
            do_all(ranks, "checkpoint")
            do_all(ranks, "save")
            weights = logged(folder)
            # Beyond the checkpoint, and lost with the ranks.
            do_all(ranks)
            with ema_client.Client(server.address) as client:
                versions = [entry.version for entry in client.versions(model)][:4]
        with running("fsdp", [url] * 3, folder) as ranks:
            for _ in range(3):
                do_all(ranks)
            assert [answer["step"] for answer in do_all(ranks, "pushed")] == [7] * 3
            do_all(ranks, "save")
            weights |= logged(folder)
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            versions += [entry.version for entry in client.versions(model)][-3:]
            average = client.pull(model, track="ema", framework="numpy")
    assert [version.step for version in versions] == [1, 2, 3, 4, 5, 6, 7]
    check_average(versions, weights, average)


ENDS = {
    "Ctrl-C": (signal.SIGINT, -signal.SIGINT),
    "SIGTERM": (signal.SIGTERM, -signal.SIGTERM),
    "exception": ("raise", 1),
    "sys.exit": ("exit", 3),
    "os._exit": ("os._exit", 4),
    "return": ("end", 0),
}


# Those that the others are most like.
FAST = (("Ctrl-C", False), ("return", True))


@pytest.mark.parametrize(
    "how, code, forgets",
    [
        pytest.param(
            *end,
            forgets,
            id=f"{name}, {'no close' if forgets else 'closes'}",
            marks=() if (name, forgets) in FAST else pytest.mark.slow,
        )
        for name, end in ENDS.items()
        for forgets in (False, True)
    ],
)
def test_however_a_trainer_ends(server, client, model, tmp_path, how, code, forgets):
    """With workers of a DataLoader forked while pushes run."""
    folder = tmp_path / "ranks"
    with running("apart", [server.url(model)], folder, forgets=forgets) as (rank,):
        for _ in range(3):
            last = rank.do()
        rank.do("workers")
        last = rank.do()
        if isinstance(how, str):
            rank.tell(how)
        else:
            rank.send(how)
        assert rank.wait() == code
        assert client.model(model).latest.step >= last["step"] - 1
        assert ("ValueError" in rank.log()) == (how == "raise")
        # Nothing is left that the next trainer would wait for.
        with client.open_run(model) as run:
            weights = client.pull(model, track="ema", framework="numpy")
            assert run.push(step=100, weights=dict(weights)).step == 100


@pytest.mark.slow
def test_ranks_that_are_interrupted_in_mid_step(server, client, model, tmp_path):
    """One has pushed, and the other will not."""
    with running("apart", [server.url(model)] * 2, tmp_path / "ranks") as ranks:
        for _ in range(2):
            do_all(ranks)
        do_all(ranks, "pushed")
        ranks[0].do()
        for rank in ranks:
            rank.send(signal.SIGINT)
        assert [rank.wait() for rank in ranks] == [-signal.SIGINT] * 2
    assert client.model(model).latest.step == 2


@pytest.mark.slow
def test_a_rank_that_is_slow_is_waited_for_by_the_session_alone(tmp_path, model):
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        options = {"update_interval": "4ba", "max_wait_s": 60}
        with running("apart", [server.url(model)] * 2, folder, **options) as (fast, slow):
            for _ in range(3):
                do_all([fast, slow])
            slow.send(signal.SIGSTOP)
            # The step that is due is pushed, and the three after it are made.
            for step in (4, 5, 6, 7):
                assert fast.do()["step"] == step
            assert client.model(model).latest.step == 1
            slow.send(signal.SIGCONT)
            for _ in range(4):
                slow.do()
            for rank in (fast, slow):
                assert rank.do("pushed")["pushes"] == 2
            do_all([fast, slow])
            last = do_all([fast, slow], "pushed")
            assert [(one["step"], one["pushes"], one["skipped"]) for one in last] == [(8, 3, 0)] * 2
            fast.do("save")
            versions = [entry.version for entry in client.versions(model)]
            average = client.pull(model, track="ema", framework="numpy")
            end_all([fast, slow])
    assert [version.step for version in versions] == [1, 4, 8]
    check_average(versions, logged(folder), average)


@pytest.mark.slow
def test_a_rank_that_is_dead_is_named_and_the_others_go_on(server, client, model, tmp_path):
    options = {"update_interval": "4ba"}
    with running("apart", [server.url(model)] * 2, tmp_path / "ranks", **options) as (alive, dead):
        for _ in range(3):
            do_all([alive, dead])
        dead.send(signal.SIGKILL)
        assert dead.wait() == -signal.SIGKILL
        for step in (4, 5, 6, 7):
            assert alive.do()["step"] == step
        alive.do("pushed")
        assert "missing ranks: 1" in alive.log()
        assert alive.do("pushed")["skipped"] == 1
        before = client.pull(model, track="ema", framework="numpy")
        assert before.version.step == 1
        assert all(np.isfinite(value).all() for value in before.values())
        end_all([alive])
