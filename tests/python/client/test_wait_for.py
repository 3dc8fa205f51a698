# SPDX-License-Identifier: Apache-2.0
"""wait_for(): an evaluator that waits for a step, or for a newer version."""

from __future__ import annotations

import concurrent.futures

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess
from testing import wait_for

WEIGHTS = {"w": np.arange(6, dtype=np.float32)}


@pytest.fixture
def run(client, model):
    client.create_model(model, WEIGHTS, tracks={"ema": "4ba"})
    with client.open_run(model) as opened:
        yield opened


def test_what_is_there_is_not_waited_for(client, model, run):
    run.push(step=5, weights=WEIGHTS)
    newest = run.push(step=9, weights=WEIGHTS)
    assert client.wait_for(model, step=5, timeout_s=0) == newest
    assert client.wait_for(model, step=9) == newest


@pytest.mark.parametrize("timeout_s", [None, 60])
@pytest.mark.parametrize("before", [(), (1,)])
def test_the_first_commit_that_is_not_before_it(client, model, run, timeout_s, before):
    for step in before:
        run.push(step=step, weights=WEIGHTS)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.wait_for, model, step=10, timeout_s=timeout_s)
        run.push(step=2, weights=WEIGHTS)
        run.push(step=9, weights=WEIGHTS)
        assert not waiting.done()
        version = run.push(step=11, weights=WEIGHTS)
        assert waiting.result(60) == version
    assert client.pull(model, track="ema", version=version).version == version


def test_the_time_is_over(client, model, run):
    with pytest.raises(ema_client.DeadlineExceededError, match="at no version, not at step 3"):
        client.wait_for(model, step=3, timeout_s=0.1)
    run.push(step=2, weights=WEIGHTS)
    for timeout_s in (0, 0.1):
        with pytest.raises(ema_client.DeadlineExceededError, match="at step 2, not at step 3"):
            client.wait_for(model, step=3, timeout_s=timeout_s)


def push_to_new(client, model, step):
    client.create_model(model, WEIGHTS, tracks={"ema": "4ba"})
    with client.open_run(model) as run:
        return run.push(step=step, weights=WEIGHTS)


@pytest.mark.parametrize("how", ["wait_for", "watch", "watch after 0", "watch by URL"])
def test_a_model_that_does_not_exist_yet_is_waited_for(server, client, model, how, caplog):
    first = {
        "wait_for": lambda: client.wait_for(model, step=5),
        "watch": lambda: next(client.watch(model)),
        "watch after 0": lambda: next(client.watch(model, after=0, timeout_s=60)),
        "watch by URL": lambda: next(ema_client.watch(server.url(model))),
    }[how]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(first)
        wait_for(lambda: caplog.messages, "it says that it waits")
        version = push_to_new(client, model, step=5)
        assert waiting.result(60) == version
    (message,) = caplog.messages
    assert f'model "{model}" does not exist; readable models: ' in message
    assert "; waiting until it is created" in message
    assert ("at most 60 s (timeout_s)" in message) == (how == "watch after 0")


def test_a_model_that_is_deleted_meanwhile_is_waited_for(client, model, run):
    """As by attach(existing="new")."""
    seen = run.push(step=20, weights=WEIGHTS)
    commits = client.watch(model)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.wait_for, model, after=seen)
        watching = pool.submit(next, commits)
        refusing = pool.submit(client.wait_for, model, after=seen, must_exist=True)
        refused = client.watch(model, must_exist=True)
        client.delete_model(model)
        for ended in (lambda: refusing.result(60), lambda: next(refused)):
            with pytest.raises(ema_client.NotFoundError):
                ended()
        version = push_to_new(client, model, step=3)
        assert waiting.result(60) == watching.result(60) == version


def test_a_model_that_must_exist_or_comes_too_late(client, model, run):
    near = f'"{model[:-1]}" does not exist; readable models: {model}'
    for refused in (
        lambda: client.wait_for(model[:-1], step=1, must_exist=True),
        lambda: client.watch(model[:-1], must_exist=True),
        lambda: next(client.watch(model[:-1], after=0, must_exist=True)),
    ):
        with pytest.raises(ema_client.NotFoundError, match=near):
            refused()
    for late in (
        lambda: client.wait_for(model[:-1], step=1, timeout_s=0),
        lambda: client.wait_for(model[:-1], step=1, timeout_s=0.1),
        lambda: next(client.watch(model[:-1], timeout_s=0.1)),
    ):
        with pytest.raises(ema_client.DeadlineExceededError, match=f"{near}.*within 0[.1]* s"):
            late()


@pytest.mark.one_server("a rollback of a group makes no new version")
def test_a_newer_version_may_be_of_an_earlier_step(client, model, run):
    """As after a rollback."""
    good = run.push(step=50, weights=WEIGHTS)
    client.set_label(model, "good", version=good)
    seen = run.push(step=100, weights=WEIGHTS)
    assert client.wait_for(model, after=good) == seen
    assert client.wait_for(model, after=good.number) == seen
    with pytest.raises(
        ema_client.DeadlineExceededError, match="at version 2, not at one after version 2"
    ):
        client.wait_for(model, after=seen, timeout_s=0.1)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.wait_for, model, after=seen)
        restored = client.restore(model, label="good")
        assert waiting.result(60) == restored
    with client.open_run(model) as again:
        newest = again.push(step=51, weights=WEIGHTS)
    assert client.wait_for(model, after=seen, timeout_s=0) == newest


def test_a_version_of_the_servers_next_life_is_newer(tmp_path, model):
    """Its number may be an earlier one: what was not saved is gone."""
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, WEIGHTS, tracks={"ema": "4ba"})
            with client.open_run(model) as run:
                run.push(step=1, weights=WEIGHTS)
                client.create_checkpoint(model)
                run.push(step=2, weights=WEIGHTS)
                seen = run.push(step=3, weights=WEIGHTS)
            port = server.port
            server.kill()
            server.start(port=port)
            with concurrent.futures.ThreadPoolExecutor() as pool:
                waiting = pool.submit(client.wait_for, model, after=seen)
                with client.open_run(model) as run:
                    version = run.push(step=2, weights=WEIGHTS)
                assert waiting.result(60) == version
            assert version.number < seen.number


@pytest.mark.parametrize(
    "given, message",
    [
        ({}, "give either step or after, not None and None"),
        ({"step": 3, "after": "x"}, "give either step or after"),
        ({"step": "70"}, "step '70': must be a whole number"),
        ({"step": True}, "step True: must be a whole number"),
        ({"step": 1.5}, "step 1.5: must be a whole number"),
        ({"after": 7.5}, "after 7.5: must be a whole number or a Version"),
        ({"after": "best"}, "after 'best': must be a whole number or a Version"),
    ],
)
def test_what_is_waited_for_is_named_if_it_is_none(client, given, message):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        client.wait_for("m", **given)
    assert message in str(error.value)
