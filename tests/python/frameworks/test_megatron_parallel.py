# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's GPTModel on the CPU, with tensor, pipeline and expert parallelism: `sharded_state_dict` says what each rank has. The
average is that of the tensors that the pieces of all ranks give together, bit by bit."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from testing import SUPPORT, Weights, assert_same_bits, beside_python, exit_codes, replay, started

pytestmark = [pytest.mark.framework, pytest.mark.slow, pytest.mark.timeout(600)]

WORLD_SIZE = 4
# The last steps of both trainings: the second one continues the run without groups.
STEPS = (6, 9)
# At the first step, and when an update is due.
DUE = [1, 3, 6, 9]
LAYER = "decoder.layers.3."
# A tensor of the last layer, and the shape of the whole.
KINDS = {
    "stages": (LAYER + "mlp.linear_fc1.weight_w", (12, 8)),
    "distributed": (LAYER + "self_attention.linear_proj.weight", (8, 8)),
    "experts": (LAYER + "mlp.experts.experts.3.linear_fc2.weight", (8, 12)),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that waits for ranks as long as it does by default: four of them share two processors."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, data_dir=folder / "data") as process:
        yield process
        assert process.stop() == 0, process.log()


@pytest.fixture(scope="module")
def folder(server, tmp_path_factory) -> pathlib.Path:
    """Where the logs of all kinds are."""
    python = beside_python("deepspeed")
    if not list(python.parents[1].glob("lib/*/site-packages/megatron/core")):
        pytest.skip("no Megatron-core in build/venv-deepspeed: deploy/setup.sh --all installs it")
    result: pathlib.Path = tmp_path_factory.mktemp("ranks")
    path = [str(pathlib.Path(ema_client.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": ":".join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ""}
    command = [python, SUPPORT / "example_rank.py", SUPPORT / "megatron_parallel_rank.py"]
    rest = [WORLD_SIZE, result, server.url("m"), *KINDS]
    commands = [[*command, rank, *rest] for rank in range(WORLD_SIZE)]
    with started(*commands, env={**os.environ, **environment}) as ranks:
        assert exit_codes(ranks, timeout_s=500) == [0] * WORLD_SIZE
    return result


def logged(log: dict[str, np.ndarray], prefix: object) -> Weights:
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in log.items()
        if name.startswith(f"{prefix}/")
    }


def rounded(weights: Weights) -> Weights:
    """As the models have them."""
    return {name: torch.as_tensor(one).bfloat16().float().numpy() for name, one in weights.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_average_is_that_of_the_whole_tensors(client, folder, kind):
    log = dict(np.load(folder / f"{kind}.npz"))
    model = f"m-{kind}"
    pushes = [(entry.version, logged(log, entry.version.step)) for entry in client.versions(model)]
    assert [version.step for version, _ in pushes] == DUE
    name, shape = KINDS[kind]
    assert pushes[0][1][name].shape == shape
    assert not np.array_equal(pushes[0][1][name], pushes[-1][1][name])
    is_master = {spec.dtype for spec in client.model(model).tensors} == {"float32"}
    assert is_master == (kind != "experts")
    fast = client.pull(model, track="fast")
    assert_same_bits(replay(pushes, "fast"), fast)
    raw = {name: one.float() for name, one in client.pull(model, track="raw").items()}
    assert_same_bits(pushes[-1][1], raw)
    first, last = STEPS
    assert_same_bits(rounded(fast), logged(log, f"averaged {last}"))
    # In the model of the first training, and in a model that each rank has as a whole.
    of_first = replay([push for push in pushes if push[0].step <= first], "fast")
    assert_same_bits(rounded(of_first), logged(log, f"averaged {first}"))
    assert_same_bits(rounded(of_first), logged(log, "loaded"))
