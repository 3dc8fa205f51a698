# SPDX-License-Identifier: Apache-2.0
"""Weights that PyTorch moves to other memory. In processes of their own: a mistake here ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

BETWEEN_STEPS = """
import logging, sys
import ema_client, torch

address, model, how = sys.argv[1:]
logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
client = ema_client.Client(address)
net = torch.nn.Linear(2048, 2048)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 2048)).sum().backward()
with ema_client.attach(net, optimizer, f"ema://{address}/{model}", half_life="3ba") as ema:
    for step in range(1, 4):
        optimizer.step()
        client.wait_for(model, step=step, timeout_s=60)
        if step != 2:
            continue
        if how == "queue":
            queue = torch.multiprocessing.get_context("fork").SimpleQueue()
            queue.put(net.state_dict())
        elif how == "share":
            net.share_memory()
        else:
            values = net.weight.detach().clone()
            net.weight.untyped_storage().resize_(0)
            if how == "there and back":
                net.weight.untyped_storage().resize_(values.nbytes)
                net.weight.data.copy_(values)
            ema.wait_released()
            break
"""


@pytest.mark.parametrize(
    "how, said",
    [
        ("queue", ""),
        ("share", ""),
        ("there and back", ""),
        ("gone", "written since the push of step 2 began, without wait_released(): weight; "),
    ],
)
def test_weights_may_move_between_a_push_and_the_next_step(server, model, how, said):
    """It is their contents that tell whether they have been written."""
    done = run(BETWEEN_STEPS, server.address, model, how)
    assert done.returncode == 0, (done.returncode, done.stderr[-4000:])
    assert said in done.stdout
    assert bool(said) == bool(done.stdout)


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        timeout=110,
        capture_output=True,
        text=True,
        check=False,
    )
