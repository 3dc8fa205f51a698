# SPDX-License-Identifier: Apache-2.0
"""A long run whose server goes away: what becomes of the pushes, and of the average."""

from __future__ import annotations

import signal
from typing import Any

import ema_client
import pytest
import torch
from commanded import Rank, check_average, do_all, end_all, logged, running
from cut_off import Way
from ema_client._callbacks import check_options, call_timeout_s, pull_timeout_s, raises
from server_process import ServerProcess

keeps_or_forgets = pytest.mark.parametrize(
    "keeps",
    [
        pytest.param(True, id="data dir"),
        pytest.param(False, id="no data dir", marks=pytest.mark.slow),
    ],
)


def versions_of(client, model):
    return [entry.version for entry in client.versions(model)]


def step_until_pushed(ranks, count):
    """Steps until so many pushes have succeeded on every rank."""
    for _ in range(2000):
        answers = do_all(ranks)
        if all(answer["pushes"] >= count for answer in answers):
            return
    raise AssertionError(f"no new pushes: {answers}")


@keeps_or_forgets
def test_skipped_steps_are_counted_and_the_next_average_is_right(tmp_path, model, keeps):
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path, data_dir=tmp_path / "data" if keeps else None) as server:
        with running("ddp", [server.url(model)] * 2, folder) as ranks:
            for _ in range(4):
                do_all(ranks)
            do_all(ranks, "pushed")
            with ema_client.Client(server.address) as client:
                if keeps:
                    client.create_checkpoint(model)
                before = versions_of(client, model) if keeps else []
            server.kill()
            for _ in range(5):
                answers = do_all(ranks)
            assert all(answer["skipped"] >= 1 for answer in answers)
            assert "skipped, the average continues with the next" in ranks[0].log()
            server.start(port=server.port)
            step_until_pushed(ranks, 4 + 3)
            last = do_all(ranks, "pushed")
            assert last[0] == last[1]
            assert last[0]["pushes"] + last[0]["skipped"] == last[0]["step"]
            do_all(ranks, "save")
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            after = versions_of(client, model)[-(last[0]["pushes"] - 4) :]
            average = client.pull(model, track="ema", framework="numpy")
        # From one server to the next some steps are missing.
        assert [version.step for version in before] == [1, 2, 3, 4][: len(before)]
        assert after[0].step > 5
        check_average(before + after, logged(folder), average)


@keeps_or_forgets
def test_steps_that_wait_are_not_lost(tmp_path, model, keeps):
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path, data_dir=tmp_path / "data" if keeps else None) as server:
        with running("ddp", [server.url(model)] * 2, folder, on_error="wait") as ranks:
            for _ in range(3):
                do_all(ranks)
            do_all(ranks, "pushed")
            before = []
            if keeps:
                with ema_client.Client(server.address) as client:
                    client.create_checkpoint(model)
                    before = versions_of(client, model)
            server.kill()
            # Of step 4 the push fails, and step 5 waits for it.
            assert [answer["step"] for answer in do_all(ranks)] == [4, 4]
            for rank in ranks:
                rank.tell("step")
            for rank in ranks:
                rank.await_log("push of step 4 waits for the server")
            server.start(port=server.port)
            assert [rank.answer()["step"] for rank in ranks] == [5, 5]
            do_all(ranks)
            last = do_all(ranks, "pushed")
            assert [(one["pushes"], one["skipped"], one["step"]) for one in last] == [(6, 0, 6)] * 2
            do_all(ranks, "save")
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            versions = before + versions_of(client, model)[-3:]
            average = client.pull(model, track="ema", framework="numpy")
    # A server without a disk begins with the step that has waited.
    assert [version.step for version in versions] == [1, 2, 3, 4, 5, 6][0 if keeps else 3 :]
    check_average(versions, logged(folder), average)


def test_a_push_that_takes_longer_than_max_wait_is_not_begun_again(server, model, caplog):
    net = torch.nn.Linear(4096, 4096)
    options = {"on_error": "wait", "max_wait_s": 1e-6, "max_outage_s": 3}
    with ema_client.attach(net, None, server.url(model), half_life="4ba", **options) as ema:
        for _ in range(2):
            ema.after_step()
    assert (ema.stats.pushes, ema.stats.skipped) == (2, 0)
    assert ema.stats.sent_bytes == 2 * 4 * (4096 + 1) * 4096
    assert not caplog.records


@pytest.mark.slow
def test_a_wait_that_is_over_raises_and_training_may_go_on(tmp_path, model):
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path) as server:
        options = {"on_error": "wait", "max_outage_s": 1.5}
        with running("ddp", [server.url(model)] * 2, folder, **options) as ranks:
            do_all(ranks)
            do_all(ranks, "pushed")
            server.kill()
            do_all(ranks)
            for answer in do_all(ranks):
                assert answer["error"] in ("UnavailableError", "DeadlineExceededError")
                # Before the optimizer has changed anything.
                assert (answer["step"], answer["pushes"], answer["skipped"]) == (2, 1, 1)
            # Still away: said once. Then pushes start again.
            assert ["error" in answer for answer in do_all(ranks)] == [False, False]
            server.start(port=server.port)
            step_until_pushed(ranks, 3)
            do_all(ranks, "pushed")
            # The next outage is waited for anew.
            server.kill()
            do_all(ranks)
            assert ["error" in answer for answer in do_all(ranks)] == [True, True]
            end_all(ranks)


def test_raise_raises_and_training_may_go_on(tmp_path, model):
    with ServerProcess(tmp_path) as server:
        url = server.url(model)
        with running("apart", [url], tmp_path / "ranks", on_error="raise") as (rank,):
            rank.do()
            rank.do("pushed")
            server.kill()
            answers = [rank.do() for _ in range(3)]
            errors = [answer["error"] for answer in answers if "error" in answer]
            assert errors in (["UnavailableError"], ["DeadlineExceededError"])
            server.start(port=server.port)
            step_until_pushed([rank], 3)
            end_all([rank])


def test_ctrl_c_ends_the_wait(tmp_path, model):
    with ServerProcess(tmp_path) as server:
        url = server.url(model)
        with running("apart", [url], tmp_path / "ranks", on_error="wait") as (rank,):
            rank.do()
            rank.do("pushed")
            server.kill()
            rank.do()
            rank.tell("step")
            rank.await_log("waits for the server, at most 120 s")
            rank.send(signal.SIGINT)
            assert rank.wait() == -signal.SIGINT
            assert "KeyboardInterrupt" in rank.log()


def test_a_newer_run_ends_the_wait(server, client, model, tmp_path):
    url = server.url(model)
    with running("apart", [url], tmp_path / "ranks", on_error="wait") as (rank,):
        rank.do()
        rank.do("pushed")
        newer = client.open_run(model)
        rank.do()
        answer = rank.do()
        assert (answer["error"], answer["reason"]) == ("AbortedError", "FENCED")
        # Said once; the run stays fenced, and the trainer may go on without its average.
        answer = rank.do()
        assert "error" not in answer
        assert (answer["step"], answer["pushes"], answer["skipped"]) == (3, 1, 2)
        assert client.model(model).latest.step == 1
        assert client.model(model).run_epoch == newer.run_epoch
        end_all([rank])


@pytest.mark.slow
def test_one_rank_that_is_cut_off_is_waited_for_by_all(tmp_path, model):
    """The server and the other rank see nothing but that rank's silence."""
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path, "--same-host-lane", "off") as server, Way(server.port) as way:
        urls = [server.url(model), way.url(model)]
        with running("ddp", urls, folder, on_error="wait") as ranks:
            for _ in range(3):
                do_all(ranks)
            do_all(ranks, "pushed")
            way.cut()
            do_all(ranks)
            for rank in ranks:
                rank.tell("step")
            ranks[1].await_log("push of step 4 waits for the server")
            way.mend()
            assert [rank.answer()["step"] for rank in ranks] == [5, 5]
            last = do_all(ranks, "pushed")
            assert [(one["pushes"], one["skipped"], one["step"]) for one in last] == [(5, 0, 5)] * 2
            do_all(ranks, "save")
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            versions = versions_of(client, model)
            average = client.pull(model, track="ema", framework="numpy")
    assert [version.step for version in versions] == [1, 2, 3, 4, 5]
    check_average(versions, logged(folder), average)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip", "wait"])
def test_a_step_whose_reply_is_lost_counts_as_pushed(tmp_path, model, on_error):
    """With frozen tensors: who does not know that the server has them would push them again, alone."""
    folder = tmp_path / "ranks"
    options = {"frozen": True, "timeout_s": 5}
    with ServerProcess(tmp_path, "--same-host-lane", "off") as server, Way(server.port) as way:
        urls = [server.url(model), way.url(model)]
        with running(
            "apart", urls, folder, on_error=on_error, update_interval="4ba", **options
        ) as ranks:
            with ema_client.Client(server.address) as client:
                way.hold_replies()
                for rank in ranks:
                    rank.tell("step")
                client.wait_for(model, step=1)
                way.cut()
            ranks[0].answer()
            ranks[0].await_stats(pushes=1)
            if on_error == "wait":
                ranks[1].await_log("push of step 1 waits for the server")
                way.mend()
                ranks[1].answer()
            else:
                ranks[1].answer()
                ranks[1].await_stats(skipped=1)
                way.mend()
            ranks[1].await_stats(pushes=1, skipped=0)
            for _ in range(7):
                do_all(ranks)
            last = do_all(ranks, "pushed")
            assert [(one["pushes"], one["skipped"], one["step"]) for one in last] == [(3, 0, 8)] * 2
            ranks[0].do("save")
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            versions = versions_of(client, model)
            average = client.pull(model, track="ema", framework="numpy")
    assert [version.step for version in versions] == [1, 4, 8]
    check_average(versions, logged(folder), average)


@pytest.mark.slow
def test_a_rank_that_cannot_push_does_not_keep_the_others(server, client, model, tmp_path):
    folder = tmp_path / "ranks"
    with running("ddp", [server.url(model)] * 2, folder, on_error="wait") as ranks:
        do_all(ranks)
        ranks[1].do("starve")
        for step in (2, 3, 4):
            assert [answer["step"] for answer in do_all(ranks)] == [step] * 2
        ranks[1].do("feed")
        do_all(ranks)
        last = do_all(ranks, "pushed")
        assert [(one["pushes"], one["skipped"]) for one in last] == [(2, 3)] * 2
        for step in (2, 3, 4):
            assert f"step {step}: rank 1 has abandoned it: OutOfMemoryError: no memory" in (
                ranks[0].log()
            )
        assert "waits for the server" not in ranks[0].log()
        do_all(ranks, "save")
        end_all(ranks)
    versions = versions_of(client, model)
    assert [version.step for version in versions] == [1, 5]
    average = client.pull(model, track="ema", framework="numpy")
    check_average(versions, logged(folder), average)


@pytest.mark.slow
@pytest.mark.parametrize("on_error", ["skip", "wait", "raise"])
def test_a_write_on_one_rank_costs_the_step_that_it_pushed(
    server, client, model, tmp_path, on_error
):
    options = {"on_error": on_error, "max_wait_s": 60}

    def step(rank: Rank) -> dict[str, Any]:
        """The next one after that which is lost."""
        answer = rank.do()
        assert ("error" in answer) == (on_error == "raise")
        return rank.do() if "error" in answer else answer

    with running("apart", [server.url(model)] * 2, tmp_path / "ranks", **options) as ranks:
        for _ in range(2):
            do_all(ranks)
        do_all(ranks, "pushed")
        ranks[1].do()  # Its push waits for the other rank's.
        ranks[1].do("write")
        assert step(ranks[1]) == {"step": 4, "pushes": 2, "skipped": 1}
        ranks[0].do()
        ranks[0].do("pushed")
        assert step(ranks[0])["skipped"] == 1
        do_all(ranks, "pushed")
        do_all(ranks)
        last = do_all(ranks, "pushed")
        assert [(one["step"], one["pushes"], one["skipped"]) for one in last] == [(5, 4, 1)] * 2
        assert "pushing again" not in ranks[0].log() + ranks[1].log()
        assert "step 3: rank 1 has abandoned it: " in ranks[0].log()
        end_all(ranks)
    assert [version.step for version in versions_of(client, model)] == [1, 2, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, world_size, options",
    [
        pytest.param("fsdp", 2, {}, id="fully_shard"),
        pytest.param("ddp", 2, {"frozen": True}, id="frozen"),
        pytest.param("apart", 1, {"optimizer": "lbfgs"}, id="LBFGS"),
        pytest.param("apart", 1, {"optimizer": "gan", "frozen": True}, id="two optimizers"),
    ],
)
def test_every_kind_of_training_waits(tmp_path, model, kind, world_size, options):
    folder = tmp_path / "ranks"
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        urls = [server.url(model)] * world_size
        with running(kind, urls, folder, on_error="wait", **options) as ranks:
            for _ in range(3):
                do_all(ranks)
            do_all(ranks, "pushed")
            with ema_client.Client(server.address) as client:
                client.create_checkpoint(model)
                before = versions_of(client, model)
            server.kill()
            do_all(ranks)
            for rank in ranks:
                rank.tell("step")
            ranks[-1].await_log("push of step 4 waits for the server")
            server.start(port=server.port)
            assert [rank.answer()["step"] for rank in ranks] == [5] * world_size
            last = do_all(ranks, "pushed")
            assert {(one["pushes"], one["skipped"], one["step"]) for one in last} == {(5, 0, 5)}
            do_all(ranks, "save")
            end_all(ranks)
        with ema_client.Client(server.address) as client:
            versions = before + versions_of(client, model)[-2:]
            average = client.pull(model, track="ema", framework="numpy")
    assert [version.step for version in versions] == [1, 2, 3, 4, 5]
    check_average(versions, logged(folder), average)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"on_error": "retry"}, 'on_error \'retry\': must be "skip", "wait" or "raise"'),
        ({"max_outage_s": -1}, "max_outage_s -1: must be seconds, 0 or more"),
        ({"max_outage_s": float("nan")}, "max_outage_s nan: must be seconds"),
        ({"max_outage_s": "5s"}, "max_outage_s '5s': must be seconds"),
    ],
)
def test_wrong_policies_are_refused(server, client, model, options, message):
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        ema_client.attach(net, optimizer, server.url(model), half_life="4ba", **options)
    assert message in str(error.value)
    assert model not in [info.name for info in client.models()]


def test_callbacks_of_frameworks_pass_the_policy_on():
    options = {"on_error": "wait", "max_outage_s": 90, "timeout_s": 20}
    check_options("EMA", options)
    with pytest.raises(ema_client.InvalidArgumentError, match="max_outage_s '90'"):
        check_options("EMA", {"on_error": "wait", "max_outage_s": "90"})
    # Their own calls wait as long.
    assert raises(options) and call_timeout_s(options) == 90
    assert call_timeout_s({"on_error": "wait", "max_outage_s": 5}) == 60
    assert call_timeout_s({"timeout_s": 20}) == 20
    assert call_timeout_s({"timeout_s": None}) == 60
    # What moves weights has more time, whatever the policy.
    assert pull_timeout_s(options) == 90
    assert pull_timeout_s({}) is None and pull_timeout_s({"timeout_s": None}) is None
    assert pull_timeout_s({"on_error": "wait", "max_outage_s": 90}) == 600
    assert pull_timeout_s({"on_error": "wait", "max_outage_s": 900}) == 900
    assert not raises({}) and raises({"on_error": "raise"})
