# SPDX-License-Identifier: Apache-2.0
"""Weights that PyTorch moves to other memory. In processes of their own: a mistake here ends the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
from server_process import ServerProcess

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


DURING_A_PUSH = """
import os, signal, sys, threading
import ema_client, torch

url, server, how = sys.argv[1:]
client = ema_client.Client(url.removeprefix("ema://").split("/")[0])
net = torch.nn.Linear(4096, 4096)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net(torch.ones(1, 4096)).sum().backward()
with ema_client.attach(net, optimizer, url, tracks={"raw": "copy"}) as ema:
    optimizer.step()
    assert ema.wait_pushed().step == 1
    os.kill(int(server), signal.SIGSTOP)
    optimizer.step()
    pushed = {name: value.clone() for name, value in net.state_dict().items()}
    queue = torch.multiprocessing.get_context("fork").SimpleQueue()
    move = net.share_memory if how == "share" else lambda: queue.put(net.state_dict())
    has_moved = threading.Event()

    def wait_and_move():
        move()
        has_moved.set()

    thread = threading.Thread(target=wait_and_move)
    thread.start()
    # As long as the server takes nothing, the weights stay where they are.
    assert not has_moved.wait(0.5)
    assert not net.weight.is_shared()
    os.kill(int(server), signal.SIGCONT)
    thread.join()
    assert net.weight.is_shared()
    assert ema.wait_pushed().step == 2
    got = client.pull(url.split("/")[-1], track="raw")
    assert all(torch.equal(got[name], value) for name, value in pushed.items())
    # From now on nothing moves, and nobody waits.
    os.kill(int(server), signal.SIGSTOP)
    optimizer.step()
    move()
    assert not ema._pusher.engine.is_push_done
    os.kill(int(server), signal.SIGCONT)
    assert ema.wait_pushed().step == 3
    assert (ema.stats.pushes, ema.stats.skipped) == (3, 0), ema.stats
"""


@pytest.mark.parametrize("how", ["queue", "share"])
def test_weights_that_are_being_pushed_move_afterwards(model, how, tmp_path):
    with ServerProcess(tmp_path) as server:
        done = run(DURING_A_PUSH, server.url(model), str(server.pid), how)
    assert done.returncode == 0, (done.returncode, done.stderr[-4000:])


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        timeout=110,
        capture_output=True,
        text=True,
        check=False,
    )
