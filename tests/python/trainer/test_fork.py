# SPDX-License-Identifier: Apache-2.0
"""Processes that fork while the client's threads run: DataLoader's workers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import ema_client
import numpy as np
import torch
from testing import wait_for

FORKS_DURING_A_PUSH = """
import sys, time
import ema_client, numpy as np, torch

address, model = sys.argv[1:]
client = ema_client.Client(address)
weights = {"w": torch.ones(8 << 20)}
client.create_model(model, weights, tracks={"raw": "copy"})
runs = [client.open_run(model, launch_id="x", rank=rank, world_size=2) for rank in (0, 1)]
# Rank 1 has not pushed: this one is on its way until it has.
pending = runs[0].start_push(step=1, weights=weights)

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((3,), index)

loader = torch.utils.data.DataLoader(
    Data(), batch_size=4, num_workers=4, multiprocessing_context="fork"
)
for _ in range(2):
    assert sum(int(batch.sum()) for batch in loader) == 3 * 63 * 64 // 2
assert not pending.done
other = runs[1].start_push(step=1, weights=weights)
assert pending.wait() == other.wait()
assert bool((client.pull(model, track="raw")["w"] == 1).all())
"""


def test_four_workers_forked_during_a_push(server, model):
    subprocess.run(
        [sys.executable, "-c", FORKS_DURING_A_PUSH, server.address, model],
        timeout=120,
        check=True,
    )


def test_a_child_may_exit_in_any_way(server, client, model):
    """Python's own ending, with the parent's client, run and push in its memory."""
    weights = {"w": torch.ones(1 << 20)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    run = client.open_run(model)
    push = run.start_push(step=1, weights=weights)
    child = os.fork()
    if child == 0:
        del push, run
        os._exit(0)
    assert exit_code_of(child) == 0
    assert push.wait().number == 1
    program = f"""
import os, sys, ema_client, torch
client = ema_client.Client({server.address!r})
run = client.open_run({model!r})
push = run.start_push(step=2, weights={{"w": torch.zeros(1 << 20)}})
child = os.fork()
if child == 0:
    sys.exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
push.wait()
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
    assert client.model(model).latest.number == 2


def test_a_child_that_uses_the_parents_client_is_told(client, model):
    client.create_model(model, {"w": np.ones(3, np.float32)}, tracks={"raw": "copy"})
    child = os.fork()
    if child == 0:
        try:
            client.model(model)
        except ema_client.FailedPreconditionError:
            os._exit(7)
        os._exit(1)
    assert exit_code_of(child) == 7
    client.model(model)


def test_a_child_may_write_the_weights_that_its_parent_pushes(server, model):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    url = server.url(model)
    with ema_client.attach(module, optimizer, url, half_life="2ba", check=True) as ema:
        optimizer.step()
        child = os.fork()
        if child == 0:
            try:
                with torch.no_grad():
                    module.weight.zero_()
                ema.wait_released()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert exit_code_of(child) == 0


def test_a_child_takes_nothing_that_its_parent_shall_find(server, model):
    """The process that has pushed a version counts it."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="2ba") as ema:
        optimizer.step()
        wait_for(lambda: ema._pusher.engine.is_push_done, "the push has ended")
        child = os.fork()
        if child == 0:
            os._exit(0 if ema.stats.pushes == 0 and ema.version is None else 1)
        assert exit_code_of(child) == 0
        assert ema.stats.pushes == 1


def exit_code_of(child: int, timeout_s: float = 30.0) -> int:
    """The exit code of a forked child; one that hangs is killed."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")
