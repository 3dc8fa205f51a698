# SPDX-License-Identifier: Apache-2.0
"""The float32 masters of Megatron-core's optimizers, of two virtual pipeline stages a rank, on the CPU: bit by bit what a gather of
them gives."""

from __future__ import annotations

import os
import pathlib

import ema_client
import numpy as np
import pytest
import torch
from testing import SUPPORT, assert_same_bits, beside_python, exit_codes, replay, started

pytestmark = [pytest.mark.framework, pytest.mark.slow, pytest.mark.timeout(400)]

STEPS = 9
# At the first step, and when an update is due.
DUE = [1, *range(3, STEPS + 1, 3)]
KINDS = ["distributed", "replicated"]


def logged(log: dict[str, np.ndarray], prefix: object) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in log.items()
        if name.startswith(f"{prefix}/")
    }


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory) -> pathlib.Path:
    """Where the logs of all kinds are."""
    python = beside_python("deepspeed")
    if not list(python.parents[1].glob("lib/*/site-packages/megatron/core")):
        pytest.skip("no Megatron-core in build/venv-deepspeed: deploy/setup.sh --all installs it")
    result: pathlib.Path = tmp_path_factory.mktemp("ranks")
    path = [str(pathlib.Path(ema_client.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": ":".join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [python, SUPPORT / "example_rank.py", SUPPORT / "megatron_rank.py"]
    rest = [2, result, server.url("m"), STEPS, *KINDS]
    commands = [[*command, rank, *rest] for rank in range(2)]
    with started(*commands, env={**os.environ, **environment}) as ranks:
        assert exit_codes(ranks, timeout_s=300) == [0, 0]
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_that_of_the_masters(client, folder, kind):
    logs = [dict(np.load(folder / f"{kind}.{rank}.npz")) for rank in (0, 1)]
    model = f"m-{kind}"
    pushes = [
        (entry.version, logged(logs[0], entry.version.step)) for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == DUE
    assert {spec.dtype for spec in client.model(model).tensors} == {"float32"}
    weight = torch.from_numpy(pushes[-1][1]["layers.3.weight"])
    assert not torch.equal(weight, weight.bfloat16().float())
    fast = client.pull(model, track="fast")
    assert_same_bits(replay(pushes, "fast"), fast)
    assert_same_bits(pushes[-1][1], client.pull(model, track="raw"))
    rounded = {name: torch.as_tensor(one).bfloat16().float() for name, one in fast.items()}
    for log in logs:
        assert_same_bits(rounded, logged(log, "averaged"))
