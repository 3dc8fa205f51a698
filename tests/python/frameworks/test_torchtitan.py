# SPDX-License-Identifier: Apache-2.0
"""A model in torchtitan's layout, which is built by hand, because torchtitan needs nightly builds of PyTorch: two parts on each rank of a
pipeline, each of them sharded by FSDP2. The average is that of the gathered weights, bit by bit."""

from __future__ import annotations

import os
import pathlib
import sys

import ema_client
import numpy as np
import pytest
from testing import SUPPORT, Weights, assert_same_bits, exit_codes, replay, started
from torchtitan_rank import LAYERS, STEPS, WORLD_SIZE, Decoder

pytestmark = [pytest.mark.framework, pytest.mark.slow, pytest.mark.timeout(400)]

# At the first step, and when an update is due.
DUE = [1, *range(3, STEPS + 1, 3)]


def whole_model(logs: list[Weights], prefix: object) -> Weights:
    """The tensors of all parts; the ranks that have the same part have logged the same values."""
    result: Weights = {}
    for log in logs:
        found = {
            key.removeprefix(f"{prefix}/"): log[key] for key in log if key.startswith(f"{prefix}/")
        }
        common = result.keys() & found.keys()
        assert_same_bits({name: result[name] for name in common}, {n: found[n] for n in common})
        result |= found
    return result


def test_two_parts_on_each_pipeline_rank_are_one_model(server, client, model, tmp_path):
    url = server.url(model)
    command = [sys.executable, SUPPORT / "example_rank.py", SUPPORT / "torchtitan_rank.py"]
    path = [str(pathlib.Path(ema_client.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, path))}
    commands = [[*command, rank, tmp_path, url] for rank in range(WORLD_SIZE)]
    with started(*commands, env=environment) as ranks:
        assert exit_codes(ranks, timeout_s=300) == [0] * WORLD_SIZE
    logs = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in range(WORLD_SIZE)]

    pushes = [
        (entry.version, whole_model(logs, entry.version.step)) for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == DUE
    whole = Decoder(list(range(LAYERS)))
    assert pushes[0][1].keys() == whole.state_dict().keys()
    assert not np.array_equal(pushes[0][1]["output.weight"], pushes[-1][1]["output.weight"])
    average = client.pull(model, track="ema")
    assert_same_bits(replay(pushes, "ema"), average)
    assert_same_bits(average, whole_model(logs, "averaged"))
    ema_client.load_into(whole, url)
    assert_same_bits(average, whole.state_dict())
