# SPDX-License-Identifier: Apache-2.0
"""A small training that saves checkpoints as PyTorch's tutorial of torch.distributed.checkpoint does.

Usage: dcp_training.py OPTIMIZER RANK WORLD_SIZE FOLDER URL
Trains with fully_shard up to SAVED_STEP, saves FOLDER/checkpoint and makes one more step. Rank 0 also writes
the state of the average to ema.json in the checkpoint. test_dcp.py runs this program on two ranks, and
resumes from its checkpoint on one.

All ranks train on the same data, and the sizes of their shards are multiples of a vector register, so the
weights have the same bits on one rank and on two.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Iterable
from typing import Any

import ema_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

HALF_LIFE = "4ba"
SAVED_STEP = 5


class AppState(Stateful):
    """The tutorial's wrapper of the model and the optimizer."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def make_net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128))


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    kind: type[torch.optim.Optimizer] = getattr(torch.optim, name)
    return kind(model.parameters(), lr=0.05)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Clears the gradients last: PyTorch initializes the state of an optimizer only without gradients."""
    for step in steps:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    name, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, url = pathlib.Path(sys.argv[4]), sys.argv[5]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    net = make_net(seed=0)
    for layer in (net[0], net[2]):
        fully_shard(layer)
    fully_shard(net)
    optimizer = make_optimizer(name, net)
    with ema_client.attach(net, optimizer, url, half_life=HALF_LIFE) as ema:
        train(net, optimizer, range(1, SAVED_STEP + 1))
        path = folder / "checkpoint"
        dcp.save({"app": AppState(net, optimizer), "ema": ema}, checkpoint_id=path)
        state = ema.state_dict()
        if rank == 0:
            (path / "ema.json").write_text(json.dumps(state))
        train(net, optimizer, [SAVED_STEP + 1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
