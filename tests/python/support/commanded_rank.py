# SPDX-License-Identifier: Apache-2.0
"""One rank of a small training that does what its standard input says; test_life_*.py run them.

Usage: commanded_rank.py KIND RANK WORLD_SIZE FOLDER URL OPTIONS
KIND: "ddp" or "fsdp"; "apart": each rank trains by itself, on the same data, and waits for no other.
OPTIONS: of `attach`, in JSON; and "forgets": never closes what it has attached; "frozen": does not train
the first layer; "optimizer": "sgd", "lbfgs", or "gan": one for each half. Starts from FOLDER/state.pt if that
is there.

Commands, one a line; each is answered by a line of JSON when it is done:
  step        makes a step; "error" is what it raised.
  checkpoint  writes FOLDER/state.pt, with the average's state.
  workers     forks four workers of a DataLoader, and reads what they give.
  pushed      waits for the running push.
  starve      from now on it has no memory for a push; feed: it has again.
  write       writes the weights without asking whether they are being pushed.
  save        writes the weights after each step to FOLDER/RANK.npz, by step and name.
  end, raise, exit, os._exit: ends, in this way.
"""

from __future__ import annotations

import dataclasses
import contextlib
import faulthandler
import json
import logging
import os
import pathlib
import select
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

_FULL = StateDictOptions(full_state_dict=True)


class Net(torch.nn.Module):
    """With statistics that each forward changes, and odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(9, 17)
        self.norm = torch.nn.BatchNorm1d(17)
        self.second = torch.nn.Linear(17, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


class Data(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((9,), float(index))


class Training:
    def __init__(
        self, kind: str, rank: int, folder: pathlib.Path, optimizer: str, frozen: bool
    ) -> None:
        torch.manual_seed(5)
        net = Net()
        net.first.requires_grad_(not frozen)
        self.folder, self.rank, self.kind = folder, rank, kind
        self.net: torch.nn.Module = fully_shard(net) if kind == "fsdp" else net
        self.model = self.net
        if kind == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(net)
        self.resume = None
        if (folder / "state.pt").exists():
            state = torch.load(folder / "state.pt")
            set_model_state_dict(self.net, state["model"], options=_FULL)
            self.resume = state["ema"]
        parts = [self.net] if optimizer != "gan" else [self.net.norm, self.net.second]
        make = torch.optim.LBFGS if optimizer == "lbfgs" else torch.optim.SGD
        self.optimizers = [
            make([p for p in part.parameters() if p.requires_grad], lr=0.05) for part in parts
        ]
        self.log: dict[str, np.ndarray] = {}
        self.ema: ema_client.Attachment | None = None

    def step(self) -> dict[str, Any]:
        assert self.ema is not None
        generator = torch.Generator().manual_seed(self.ema.step)
        x = torch.randn(8, 9, generator=generator)

        def loss() -> torch.Tensor:
            self.model.zero_grad()
            result = self.model(x).square().mean()
            result.backward()
            return result

        answer: dict[str, Any] = {}
        before = self.ema.step
        try:
            for optimizer in self.optimizers:
                if isinstance(optimizer, torch.optim.LBFGS):
                    optimizer.step(loss)
                else:
                    loss()
                    optimizer.step()
        except ema_client.EmaError as error:
            answer = {"error": type(error).__name__, "reason": error.reason, "text": str(error)}
        if self.ema.step == before:
            return answer
        for name, tensor in self.net.state_dict().items():
            whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            self.log[f"{self.ema.step}/{name}"] = whole.clone().numpy()
        return answer

    def checkpoint(self) -> None:
        assert self.ema is not None
        ema_state = self.ema.state_dict()
        model_state = get_model_state_dict(self.net, options=_FULL)
        if self.rank == 0:
            torch.save({"model": model_state, "ema": ema_state}, self.folder / "state.pt")

    def workers(self) -> None:
        loader = torch.utils.data.DataLoader(
            Data(), batch_size=8, num_workers=4, multiprocessing_context="fork"
        )
        assert sum(float(batch.sum()) for batch in loader) == 9 * 63 * 64 / 2

    def obey(self) -> None:
        assert self.ema is not None
        for line in commands():
            answer: dict[str, Any] = {}
            match line.strip():
                case "step":
                    answer = self.step()
                case "checkpoint":
                    self.checkpoint()
                case "workers":
                    self.workers()
                case "pushed":
                    self.ema.wait_pushed()
                case "starve":
                    self.options = self.ema._pusher.options
                    starved = dataclasses.replace(self.options, tensors_of=no_memory)
                    self.ema._pusher.options = starved
                case "feed":
                    self.ema._pusher.options = self.options
                case "write":
                    with torch.no_grad():
                        self.net.first.weight.add_(1)
                case "save":
                    np.savez(self.folder / f"{self.rank}.npz", **self.log)
                case "raise":
                    raise ValueError("in the loop")
                case "exit":
                    sys.exit(3)
                case "os._exit":
                    os._exit(4)
                case "end":
                    return
            stats = self.ema.stats
            answer |= {"step": self.ema.step, "pushes": stats.pushes, "skipped": stats.skipped}
            print(json.dumps(answer), flush=True)


def commands() -> Iterator[str]:
    """The lines of standard input.

    No read waits: a signal that comes just before one is noticed by Python only when it has returned, which
    is never if the test sends no other command. Commands come one at a time, so none is in the buffer,
    where `select` would not see it.
    """
    while True:
        if select.select([sys.stdin], [], [], 0.2)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            yield line


def no_memory() -> NoReturn:
    raise torch.OutOfMemoryError("no memory")


def main() -> None:
    kind, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, url, options = pathlib.Path(sys.argv[4]), sys.argv[5], json.loads(sys.argv[6])
    # A job in the background of a shell starts with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.register(signal.SIGUSR1)  # Says where it hangs.
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    if world_size > 1 or kind != "apart":
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
        )
    forgets = options.pop("forgets", False)
    optimizer, frozen = options.pop("optimizer", "sgd"), options.pop("frozen", False)
    training = Training(kind, rank, folder, optimizer, frozen)
    ema = ema_client.attach(
        training.model, training.optimizers, url, resume=training.resume, **options
    )
    training.ema = ema
    print(json.dumps({"step": ema.step, "pushes": 0, "skipped": 0}), flush=True)
    with contextlib.nullcontext() if forgets else ema:
        training.obey()


if __name__ == "__main__":
    main()
