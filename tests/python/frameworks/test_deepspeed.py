# SPDX-License-Identifier: Apache-2.0
"""attach(), averaged() and others with DeepSpeed's engine, on the CPU: bit by bit what DeepSpeed gathers."""

from __future__ import annotations

import functools
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from testing import (
    SUPPORT,
    Weights,
    assert_same_bits,
    beside_python,
    exit_codes,
    replay,
    started,
)

# Importing DeepSpeed takes long where much else runs.
pytestmark = [pytest.mark.framework, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12
# By number of ranks: the ZeRO stages, dtypes other than float32, whether parameters and optimizer are offloaded to
# the CPU, and whether the float32 masters are averaged.
KINDS = {
    2: ["3", "3-bf16", "2", "2-bf16", "1-bf16", "0", "3-bf16-cpu-master", "2-bf16-cpu-master"],
    3: ["3", "3-bf16-master", "2-bf16-master", "1-bf16-master", "1-bf16-fp32grad-master"],
    4: ["3", "2-bf16-master"],
}
# At the first step, and when an update is due.
DUE = [1, *range(3, STEPS + 1, 3)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that waits for ranks as long as it does by default: several of them share two processors."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, data_dir=folder / "data") as process:
        yield process
        assert process.stop() == 0, process.log()


def logged(log: dict[str, np.ndarray], prefix: str) -> Weights:
    """A rank's weights that it has logged by names with this prefix."""
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in log.items()
        if name.startswith(f"{prefix}/")
    }


def environment() -> dict[str, str]:
    path = [
        str(pathlib.Path(ema_client.__file__).parents[1]),
        *os.environ.get("PYTHONPATH", "").split(":"),
    ]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, path)), "DS_ACCELERATOR": "cpu"}


def run_ranks(program: str, world_size: int, folder: pathlib.Path, *arguments: object) -> None:
    command = [beside_python("deepspeed"), SUPPORT / "example_rank.py", SUPPORT / program]
    commands = [[*command, rank, world_size, folder, *arguments] for rank in range(world_size)]
    with started(*commands, env=environment()) as ranks:
        assert exit_codes(ranks, timeout_s=500) == [0] * world_size


@pytest.fixture(scope="module")
def train(server, tmp_path_factory) -> Callable[[int], pathlib.Path]:
    """Trains all kinds on a number of ranks, once, and returns where their logs are."""

    @functools.cache
    def run(world_size: int) -> pathlib.Path:
        folder: pathlib.Path = tmp_path_factory.mktemp("ranks")
        url = server.url(f"ranks-{world_size}")
        run_ranks("zero_rank.py", world_size, folder, url, STEPS, *KINDS[world_size])
        return folder

    return run


@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(world_size, kind) for world_size, kinds in KINDS.items() for kind in kinds],
)
def test_averages_are_those_of_what_deepspeed_gathers(client, train, world_size, kind):
    folder = train(world_size)
    model = f"ranks-{world_size}-{kind}"
    logs = [dict(np.load(folder / f"{kind}.{rank}.npz")) for rank in range(world_size)]
    made = STEPS - 2 * kind.startswith(("1-bf16", "2-bf16"))
    due = [step for step in DUE if step <= made]
    pushes = [
        (entry.version, logged(logs[0], str(entry.version.step)))
        for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == due
    specs = {spec.name: (spec.shape, spec.dtype) for spec in client.model(model).tensors}
    assert {name: shape for name, (shape, _) in specs.items()} == {
        name: value.shape for name, value in pushes[0][1].items()
    }
    is_rounded = specs["up.weight"][1] == "bfloat16"
    assert is_rounded == kind.endswith("-bf16")
    if kind.endswith("-master"):  # What is averaged has bits that the parameters do not have.
        weight = torch.from_numpy(logs[0]["1/up.weight"])
        assert not torch.equal(weight, weight.bfloat16().float())
    for log in logs:
        for step in range(1, made + 1):
            for name in ("up.weight", "down.weight", "scale"):
                assert np.array_equal(log[f"{step}/{name}"], logs[0][f"{step}/{name}"])
    assert not np.array_equal(logs[0]["1/up.weight"], logs[0]["2/up.weight"])

    fast = client.pull(model, track="fast")
    for track in ("fast", "slow"):
        assert_same_bits(replay(pushes, track), client.pull(model, track=track))
    raw = client.pull(model, track="raw")
    raw = {
        name: value.float() if value.is_floating_point() else value for name, value in raw.items()
    }
    assert_same_bits(pushes[-1][1], raw)

    # Nothing is sent twice: frozen tensors once, all else in each push.
    assert [int(log["pushes"]) for log in logs] == [len(due)] * world_size
    bytes_of = {"float32": 4, "bfloat16": 2, "int64": 8}
    sizes = {name: int(np.prod(shape)) * bytes_of[dtype] for name, (shape, dtype) in specs.items()}
    sent_bytes = len(due) * sum(sizes.values()) - (len(due) - 1) * sizes["frozen"]
    assert sum(int(log["sent_bytes"]) for log in logs) == sent_bytes

    rounded = {
        name: value.bfloat16().float() if "-bf16" in kind and value.is_floating_point() else value
        for name, value in fast.items()
    }
    for log in logs:
        assert int(log["averaged_step"]) == due[-1]
        assert_same_bits(rounded, logged(log, "averaged"))
        for loaded in ("loaded", "pulled"):
            assert_same_bits(fast if not kind.startswith("3-") else rounded, logged(log, loaded))


@pytest.mark.timeout(1500)  # Six trainings.
def test_a_run_continues_with_other_libraries_on_other_ranks(tmp_path, model):
    folder = tmp_path / "ranks"
    folder.mkdir()
    steps = 4
    runs = [("fsdp1", 2), ("zero3", 3), ("fsdp", 2), ("ddp", 2), ("zero3", 2), ("plain", 1)]
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        url = server.url(model)
        weights: Weights = {}
        for kind, world_size in runs:
            (folder / "init").unlink(missing_ok=True)
            if kind == "zero3":
                run_ranks("zero_rank.py", world_size, folder, url, steps, "resumed")
            else:
                command = [
                    sys.executable,
                    SUPPORT / "example_rank.py",
                    SUPPORT / "sharded_rank.py",
                    kind,
                ]
                rest = [world_size, folder, url, steps]
                with started(*([*command, rank, *rest] for rank in range(world_size))) as ranks:
                    assert exit_codes(ranks, timeout_s=300) == [0] * world_size
            weights |= dict(np.load(folder / "0.npz"))
        with ema_client.Client(server.address) as client:
            pushes = [
                (entry.version, logged(weights, str(entry.version.step)))
                for entry in client.versions(model)
            ]
            made = len(runs) * steps
            assert [version.step for version, _ in pushes] == [1, *range(3, made + 1, 3)]
            assert_same_bits(replay(pushes, "fast"), client.pull(model, track="fast"))
