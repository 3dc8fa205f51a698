# SPDX-License-Identifier: Apache-2.0
"""Frameworks that start several ranks themselves: the average is that of the gathered weights, bit by bit."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from framework_rank import STEPS
from replay import half_life_weight
from testing import SUPPORT, Weights, assert_same_bits, replay

# At the first step, and when an update is due.
DUE = [1, *range(3, STEPS + 1, 3)]


def run_ranks(folder: pathlib.Path, kind: str, url: str) -> list[Weights]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        [*command, SUPPORT / "example_rank.py", SUPPORT / "framework_rank.py", kind, folder, url],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert result.returncode == 0, result.stderr
    return [dict(np.load(folder / f"{rank}.npz")) for rank in (0, 1)]


def gathered(logs: list[Weights], step: int) -> Weights:
    """Of what both ranks have, the first one's."""
    return {
        name.removeprefix(f"{step}/"): value
        for log in reversed(logs)
        for name, value in log.items()
        if name.startswith(f"{step}/")
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.framework
@pytest.mark.parametrize(
    "kind, library, shared",
    [
        ("pipelining", "torch", ()),
        ("accelerate", "accelerate", ("0.weight", "0.bias", "1.weight", "1.bias")),
        ("hf_trainer", "transformers", ("transformer.wte.weight", "lm_head.weight")),
    ],
)
def test_two_ranks(server, client, model, tmp_path, kind, library, shared):
    pytest.importorskip(library, reason=f"{library} is not installed")
    logs = run_ranks(tmp_path, kind, server.url(model))
    pushes = [
        (entry.version, gathered(logs, entry.version.step)) for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == DUE
    # Each stage has its own tensors; replicas have the same parameters.
    in_both = {name for name in logs[0].keys() & logs[1].keys() if name != "pushes"}
    assert bool(in_both) == bool(shared)
    for name in (f"{step}/{name}" for step in DUE for name in shared):
        assert np.array_equal(logs[0][name], logs[1][name]), name
    for (version, weights), before in zip(pushes[1:], DUE):
        record = version.tracks["ema"]
        assert np.float32(record.update_weight) == half_life_weight(version.step - before, 5)
        assert not np.array_equal(
            *(gathered(logs, step)[next(iter(weights))] for step in (1, version.step))
        )
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))
