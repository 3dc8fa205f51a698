# SPDX-License-Identifier: Apache-2.0
"""Threads beside the one that trains. Many are in processes of their own, which a mistake here ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import ema_client
import pytest
import torch
from testing import wait_for

READS_WHILE_IT_TRAINS = """
import sys, threading
import ema_client, torch

# Else whoever reads without a pause keeps Python's lock for 5 ms each time that PyTorch lets it go.
sys.setswitchinterval(1e-4)

url = sys.argv[1]
STEPS = 100
torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(150)])
optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
ema = ema_client.attach(net, optimizer, url, half_life="3ba", max_wait_s=60)
has_ended = threading.Event()
samples = []
problems = []

def sample(pause_s):
    before = (0, 0)
    while not has_ended.is_set():
        try:
            version, stats = ema.version, ema.stats
        except BaseException as problem:
            problems.append(repr(problem))
            return
        now = (0 if version is None else version.number, stats.pushes)
        if now[0] < before[0] or now[1] < before[1]:
            problems.append(f"{now} after {before}")
        before = now
        samples.append(now)
        if pause_s:
            has_ended.wait(pause_s)

threads = [threading.Thread(target=sample, args=(pause_s,)) for pause_s in (0, 0.001)]
for thread in threads:
    thread.start()
net(torch.randn(2, 4)).square().sum().backward()
for _ in range(STEPS):
    optimizer.step()
ema.wait_pushed()
has_ended.set()
for thread in threads:
    thread.join()
ema.close()
assert not problems, problems
assert len(samples) > 100, len(samples)
# No push was counted twice, or not at all.
assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (STEPS, STEPS, 0), ema.stats
"""

FOUR_WAIT_FOR_EACH_PUSH = """
import sys, threading
import ema_client, torch

address, model = sys.argv[1:]
client = ema_client.Client(address)
weights = {str(i): torch.ones(16) for i in range(300)}
client.create_model(model, weights, tracks={"raw": "copy"})
run = client.open_run(model)
for step in range(1, 51):
    # Arrays that nobody else has: they go with the push.
    push = run.start_push(
        step=step, weights={name: value.clone() for name, value in weights.items()}
    )
    got = []

    def wait():
        assert push.wait_released(max_wait_s=60)
        got.append((push.wait(), push.stats.total_bytes, push.done))

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 4, got
    assert all(one == (got[0][0], 300 * 16 * 4, True) for one in got), got
    assert got[0][0].step == step
"""


def test_who_reads_stats_leaves_a_failure_to_the_thread_that_trains(server, model):
    """To take one may mean to tell other ranks of it, while the next hook would wait for the reader."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        optimizer.step()
        assert ema.wait_pushed().step == 1
        with torch.no_grad():
            net.weight.fill_(torch.nan)
        optimizer.step()
        wait_for(lambda: ema._pusher.engine.is_push_done, "the push has ended")
        read = []
        thread = threading.Thread(target=lambda: read.extend([ema.stats, ema.version]))
        thread.start()
        thread.join()
        stats, version = read
        assert (stats.pushes, stats.skipped, version.step) == (1, 0, 1)
        assert ema.wait_pushed().step == 1
        assert (ema.stats.pushes, ema.stats.skipped) == (1, 1)


def run_program(program: str, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], timeout=110, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_others_may_read_stats_and_version_while_it_trains(server, model):
    run_program(READS_WHILE_IT_TRAINS, server.url(model))


def test_four_threads_may_wait_for_one_push(server, model):
    run_program(FOUR_WAIT_FOR_EACH_PUSH, server.address, model)
