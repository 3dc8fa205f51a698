# SPDX-License-Identifier: Apache-2.0
"""One rank of a small training as torchtitan runs it; test_torchtitan.py starts four.

Usage: torchtitan_rank.py RANK FOLDER URL
A mesh of two pipeline ranks and two FSDP ranks. Each rank has two parts of the model, which keep the names of the whole model, and
torchtitan's container of their optimizers. Logs to FOLDER/RANK.npz, by step and name, the whole tensors of its parts; under "averaged"
what they are with the average in them.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor

STEPS = 9
WORLD_SIZE = 4
WIDTH, WORDS, LAYERS = 12, 17, 4
SCHEDULE: dict[str, Any] = {"half_life": "5ba", "update_interval": "3ba", "max_wait_s": 300}
Log = dict[str, np.ndarray]


class Decoder(torch.nn.Module):
    """The whole model, or some of its layers: what a part lacks is None, as in torchtitan."""

    def __init__(self, layers: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        whole = {str(n): torch.nn.Linear(WIDTH, WIDTH) for n in range(LAYERS)}
        embeddings, norm = torch.nn.Embedding(WORDS, WIDTH), torch.nn.RMSNorm(WIDTH)
        output = torch.nn.Linear(WIDTH, WORDS, bias=False)
        is_last = LAYERS - 1 in layers
        self.tok_embeddings = embeddings if 0 in layers else None
        self.layers = torch.nn.ModuleDict({str(n): whole[str(n)] for n in layers})
        self.norm = norm if is_last else None
        self.output = output if is_last else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.tok_embeddings is None else self.tok_embeddings(x)
        for layer in self.layers.values():
            x = x + torch.tanh(layer(x))
        return x if self.output is None else self.output(self.norm(x))


class OptimizersContainer(torch.optim.Optimizer):
    """As torchtitan's: one optimizer for each part."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=0.02) for part in parts]
        super().__init__([one for part in parts for one in part.parameters()], {})

    def step(self, closure: None = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=set_to_none)


def shard(part: Decoder, mesh: Any) -> torch.nn.Module:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": policy, "reshard_after_forward": False}
    for layer in part.layers.values():
        fully_shard(layer, **options)
    return fully_shard(part, **options)


def log_parts(log: Log, prefix: object, parts: list[torch.nn.Module]) -> None:
    for part in parts:
        for name, tensor in part.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            log[f"{prefix}/{name}"] = whole.detach().clone().numpy()


def loss_of(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), words.flatten())


def train(parts: list[torch.nn.Module], mesh: Any, url: str, log: Log) -> None:
    pipeline = mesh["pp"]
    indices = [pipeline.get_local_rank(), pipeline.get_local_rank() + 2]
    stages = [
        PipelineStage(part, index, LAYERS, torch.device("cpu"), group=pipeline.get_group())
        for index, part in zip(indices, parts)
    ]
    schedule = ScheduleInterleaved1F1B(stages, n_microbatches=2, loss_fn=loss_of)
    optimizers = OptimizersContainer(parts)
    generator = torch.Generator().manual_seed(mesh["fsdp"].get_local_rank())
    with ema_client.attach(parts, optimizers, url, **SCHEDULE) as ema:
        for step in range(1, STEPS + 1):
            optimizers.zero_grad()
            words = torch.randint(WORDS, (4, 5), generator=generator)
            inputs = (words,) if 0 in indices else ()
            target = words if LAYERS - 1 in indices else None
            schedule.step(*inputs, target=target)
            optimizers.step()
            assert ema.step == step
            log_parts(log, step, parts)
    own: Log = {}
    log_parts(own, "own", parts)
    # The module is a part of the model, which has to be said.
    with ema_client.averaged(parts, url, process_group=dist.group.WORLD):
        log_parts(log, "averaged", parts)
    now: Log = {}
    log_parts(now, "own", parts)
    assert all(np.array_equal(own[name], now[name]) for name in own)


def main() -> None:
    rank, folder, url = int(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=WORLD_SIZE
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "fsdp"))
    first = mesh["pp"].get_local_rank()
    parts = [shard(Decoder([layer]), mesh["fsdp"]) for layer in (first, first + 2)]
    log: Log = {}
    train(parts, mesh, url, log)
    np.savez(folder / f"{rank}.npz", **log)
    dist.barrier()


if __name__ == "__main__":
    main()
