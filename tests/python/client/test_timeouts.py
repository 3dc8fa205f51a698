# SPDX-License-Identifier: Apache-2.0
"""The seconds that calls are given."""

from __future__ import annotations

import math
import signal
import time

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess

WEIGHTS = {"a": np.zeros(3, np.float32)}
CALLS = {
    "model": lambda client, **given: client.model("m", **given),
    "pull": lambda client, **given: client.pull("m", track="raw", **given),
    "watch": lambda client, **given: next(client.watch("m", **given)),
    "wait_for": lambda client, **given: client.wait_for("m", step=1, **given),
    "save": lambda client, **given: client.save(
        "m", "/nowhere/a.safetensors", track="raw", **given
    ),
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
        with pytest.raises(ema_client.InvalidArgumentError, match="timeout_s"):
            run.wait_ready(timeout_s=timeout_s)
        with pytest.raises(ema_client.InvalidArgumentError, match="timeout_s"):
            run.push(step=1, weights=WEIGHTS, timeout_s=timeout_s)


def test_wait_for_has_one_deadline_where_the_server_hangs(model, tmp_path):
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
        server.send_signal(signal.SIGSTOP)
        try:
            start = time.monotonic()
            with pytest.raises(ema_client.DeadlineExceededError):
                client.wait_for(model, step=1, timeout_s=0.5)
            assert time.monotonic() - start < 20
        finally:
            server.send_signal(signal.SIGCONT)


@pytest.fixture
def given(monkeypatch):
    """The seconds that pushes and pulls were given, in order."""
    seconds = []

    def spy(cls, name, index):
        call = getattr(cls, name)

        def told(self, *args):
            seconds.append((name, args[index]))
            return call(self, *args)

        monkeypatch.setattr(cls, name, told)

    spy(ema_client._ema.Client, "pull", -2)
    spy(ema_client._ema.Client, "refresh", -1)
    spy(ema_client._ema.Run, "start_push", 3)
    return seconds


def test_what_moves_weights_has_more_time_unless_it_is_given(server, client, model, given):
    client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=WEIGHTS)
        run.push(step=2, weights=WEIGHTS, timeout_s=5)
    url = server.url(model)
    client.pull(model, track="raw")
    client.pull(model, track="raw", timeout_s=7)
    ema_client.pull(url, track="raw")
    ema_client.pull(url, track="raw", timeout_s=8)
    with ema_client.Client(server.address) as another:
        with another.open_run(model) as run:
            run.push(step=3, weights=WEIGHTS)
        another.pull_stacked(model, tracks=["raw"])
        another.refresh(another.pull(model, track="raw", timeout_s=9))
    pushes = [seconds for call, seconds in given if call == "start_push"]
    pulls = [seconds for call, seconds in given if call != "start_push"]
    assert pushes == [30, 5, 600]
    assert pulls == [30, 7, 600, 8, 600, 9, 600]


@pytest.mark.parametrize("seconds", [None, 20])
def test_an_attachment_has_more_time_for_its_average_than_for_a_push(server, model, given, seconds):
    net = torch.nn.Linear(2, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), timeout_s=seconds) as ema:
        for _ in range(2):
            net(torch.ones(2)).sum().backward()
            optimizer.step()
            assert ema.ema_model is not None
        push, pull = (60, 600) if seconds is None else (seconds, seconds)
        assert ema._pusher.options.timeout_s == push
    assert given[:2] == [("pull", pull), ("refresh", pull)]
