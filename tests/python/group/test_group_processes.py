# SPDX-License-Identifier: Apache-2.0
"""A model on three servers, which are processes of their own and meet in a real etcd."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_group import ServerGroup
from server_process import ServerProcess
from testing import EMACTL

# A killed member comes back when its lease of 10 s has expired.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]

WEIGHTS = {f"t{i}": np.full((64, 100), i, np.float32) for i in range(9)}


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path, 3) as running:
        yield running


def push(client: ema_client.Client, steps: range) -> None:
    with client.open_run("m", timeout_s=60) as run:
        for step in steps:
            values = {name: value + np.float32(step) for name, value in WEIGHTS.items()}
            run.push(step=step, weights=values)


def pulled_step(client: ema_client.Client) -> int:
    """The step of the newest version, whose tensors must all be of that step."""
    pulled = client.pull("m", track="raw", timeout_s=60)
    step = pulled.version.step
    for name, value in WEIGHTS.items():
        assert np.array_equal(pulled[name], value + np.float32(step)), (name, step)
    return step


def test_a_killed_server_takes_the_model_back_to_its_newest_checkpoint(group):
    with ema_client.Client(group.address, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        step = 0
        # Each of them, so the home among them.
        for index, server in enumerate(group.servers):
            push(client, range(step + 1, step + 4))
            client.create_checkpoint("m")
            push(client, range(step + 4, step + 6))
            server.kill()
            group.start_server(index)
            assert pulled_step(client) == step + 3
            step += 3
        push(client, range(step + 1, step + 3))
        assert pulled_step(client) == step + 2


def test_a_stop_of_all_servers_loses_no_step(group):
    with ema_client.Client(group.address, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        push(client, range(1, 8))
        average = client.pull("m", track="ema")
        assert group.stop() == 0, group.log()
        group.start()
        assert pulled_step(client) == 7
        again = client.pull("m", track="ema", timeout_s=60)
        for name in WEIGHTS:
            assert np.array_equal(again[name], average[name])


def test_a_trainer_in_cpp_has_the_averages_of_one_server(group, tmp_path):
    example = EMACTL.parents[2] / "deploy/examples/cpp_train"
    averages = []
    with ServerProcess(tmp_path) as one:
        for address in (group.address, one.address):
            trained = subprocess.run(
                [example, address, "m"],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert trained.returncode == 0, trained.stderr
            with ema_client.Client(address, timeout_s=60) as client:
                averages.append(client.pull("m", track="ema"))
    of_group, of_one = averages
    assert of_group.version.step == of_one.version.step == 300
    assert (
        set(of_group)
        == set(of_one)
        == {f"{a}.{b}" for a in ("hidden", "last") for b in ("weight", "bias")}
    )
    for name, average in of_one.items():
        assert np.array_equal(of_group[name], average), name
