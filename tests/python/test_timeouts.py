# SPDX-License-Identifier: Apache-2.0
"""The seconds that calls are given."""

from __future__ import annotations

import math
import os
import signal
import time

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess

WEIGHTS = {"a": np.zeros(3, np.float32)}
CALLS = {
    "model": lambda client, **given: client.model("m", **given),
    "pull": lambda client, **given: client.pull("m", track="raw", **given),
    "watch": lambda client, **given: next(client.watch("m", **given)),
    "wait_for": lambda client, **given: client.wait_for("m", step=1, **given),
    "save": lambda client, **given: client.save("m", "/nowhere/a", track="raw", **given),
    "create_checkpoint": lambda client, **given: client.create_checkpoint("m", **given),
    "report_metric": lambda client, **given: client.report_metric("m", 1, 0.5, **given),
    "set_label": lambda client, **given: client.set_label("m", "stable", **given),
    "restore": lambda client, **given: client.restore("m", version=1, **given),
    "statistics": lambda client, **given: client.statistics("m", **given),
    "synthesize": lambda client, **given: client.synthesize("m", result="r", **given),
    "open_run": lambda client, **given: client.open_run("m", **given),
}


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan, "1", True])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_time_is_refused(client, call, timeout_s):
    if call == "wait_for" and timeout_s == 0:
        return  # Only looks.
    with pytest.raises(ema_client.InvalidArgumentError, match="timeout_s.*must be seconds"):
        CALLS[call](client, timeout_s=timeout_s)


@pytest.mark.parametrize("timeout_s", [0, -1, math.nan])
def test_what_is_no_time_of_a_run_is_refused(client, model, timeout_s):
    client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        for call in (
            run.wait_ready,
            run.refresh_plan,
            lambda **given: run.committed_as(1, **given),
        ):
            with pytest.raises(ema_client.InvalidArgumentError, match="timeout_s"):
                call(timeout_s=timeout_s)
        with pytest.raises(ema_client.InvalidArgumentError, match="timeout_s"):
            run.push(step=1, weights=WEIGHTS, timeout_s=timeout_s)


def test_wait_for_has_one_deadline_where_the_server_hangs(model, tmp_path):
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
        os.kill(server.pid, signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(ema_client.DeadlineExceededError):
                client.wait_for(model, step=1, timeout_s=0.5)
            assert time.monotonic() - start < 20
        finally:
            os.kill(server.pid, signal.SIGCONT)


def test_what_moves_weights_has_more_time_unless_it_is_given(server, client, model, monkeypatch):
    client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=WEIGHTS)
    given = []
    pull = ema_client._ema.Client.pull

    def spy(self, *args):
        given.append(args[-2])
        return pull(self, *args)

    monkeypatch.setattr(ema_client._ema.Client, "pull", spy)
    url = server.url(model)
    client.pull(model, track="raw")
    client.pull(model, track="raw", timeout_s=7)
    ema_client.pull(url, track="raw")
    ema_client.pull(url, track="raw", timeout_s=8)
    with ema_client.Client(server.address) as another:
        another.pull_stacked(model, tracks=["raw"])
        another.refresh(another.pull(model, track="raw", timeout_s=9))
    assert given == [30, 7, 600, 8, 600, 9]
