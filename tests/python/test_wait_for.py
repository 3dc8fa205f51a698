# SPDX-License-Identifier: Apache-2.0
"""wait_for(): an evaluator that waits for a step."""

from __future__ import annotations

import concurrent.futures

import ema_client
import numpy as np
import pytest

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


def test_a_model_that_is_deleted_meanwhile(client, model, run):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(client.wait_for, model, step=10)
        run.push(step=2, weights=WEIGHTS)
        client.delete_model(model)
        with pytest.raises(ema_client.NotFoundError):
            waiting.result(60)
    with pytest.raises(ema_client.NotFoundError):
        client.wait_for("nobody", step=1)
