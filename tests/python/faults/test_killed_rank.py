# SPDX-License-Identifier: Apache-2.0
"""A rank that is killed in mid-push: the previous version is served, and the next step works."""

from __future__ import annotations

import signal
import sys
import time

import ema_client
import numpy as np
import pytest
from testing import started, unchanged

# Short, since rank 0 may wait so long for the one that is killed.
SESSION_TIMEOUT_S = 2

# Joins as rank 1 and pushes STEP; with "die", it is killed when a part of its bytes has left.
RANK_1 = """
import os, signal, sys, time
import ema_client, numpy as np

address, model, step, how = sys.argv[1:]
client = ema_client.Client(address)
# Before it joins: then rank 0 pushes, and the server waits for this rank as for one that may have died.
weights = {"w": np.full(SIZE, int(step), np.float32)}
run = client.open_run(model, launch_id="x", rank=1, world_size=2)
push = run.start_push(step=int(step), weights=weights)
if how == "die":
    while not 0 < push.stats.sent_bytes:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
push.wait()
"""
SIZE = 64 << 20  # Half of it is 128 MiB: not sent before the kill.


def rank_1(server, model, step, how):
    program = RANK_1.replace("SIZE", str(SIZE))
    return started([sys.executable, "-c", program, server.address, model, step, how])


@pytest.mark.slow
def test_a_rank_killed_in_mid_push(server, client, model):
    weights = {"w": np.full(SIZE, 1, np.float32)}
    client.create_model(model, weights, tracks={"ema": "1ba"}, max_pinned_versions=1)
    run = client.open_run(model, launch_id="x", rank=0, world_size=2)
    with rank_1(server, model, 1, "live") as [partner]:
        assert run.push(step=1, weights=weights).number == 1
        assert partner.wait(60) == 0

    weights["w"][:] = 2
    with unchanged(client, model, "ema"), rank_1(server, model, 2, "die") as [partner]:
        start = time.monotonic()
        with pytest.raises(ema_client.EmaError) as error:
            run.push(step=2, weights=weights, timeout_s=60)
        assert partner.wait(60) == -signal.SIGKILL
        assert time.monotonic() - start < 30
        assert error.value.code == "ABORTED"
        assert error.value.reason in ("SESSION_EXPIRED", "STEP_ABANDONED")

    weights["w"][:] = 3
    with rank_1(server, model, 3, "live") as [partner]:
        version = run.push(step=3, weights=weights)
        assert partner.wait(60) == 0
    assert (version.number, version.step) == (2, 3)
    assert version.tracks["ema"].elapsed == 2
    average = client.pull(model, track="ema", framework="numpy")["w"]
    assert average[0] == average[-1] == np.float32(1) + np.float32(0.75) * np.float32(2)
    assert (average == average[0]).all()
