# SPDX-License-Identifier: Apache-2.0
"""The demo's trainer: one of two ranks, started by torchrun. The ema_client lines are the ones marked so.

Usage: torchrun --nproc-per-node 2 train.py URL STEPS UPDATE_INTERVAL OUT_FOLDER
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from digits import images, network
from tqdm import tqdm

TRACKS = {"fast": "20ba", "slow": "100ba", "raw": "copy"}
# Small batches and a high learning rate: the weights rattle about, and their average does not. Weight decay
# keeps it so: under BatchNorm it holds the weights small, and the steps large beside them.
BATCH = 4
LEARNING_RATE = 0.1
MOMENTUM = 0.9
WEIGHT_DECAY = 0.01


def main() -> None:
    url, steps, interval = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    out = pathlib.Path(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(1)
    net = network()
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )
    x, y = images(held_out=False)
    generator = torch.Generator().manual_seed(10 + rank)

    ema = ema_client.attach(  # ema_client
        model, optimizer, url, update_interval=f"{interval}ba", tracks=TRACKS, max_pinned_versions=4
    )
    bar = tqdm(
        range(1, steps + 1),
        desc="training",
        unit="step",
        disable=rank != 0,
        mininterval=0.1 if sys.stderr.isatty() else 5.0,
        dynamic_ncols=True,
    )
    for step in bar:
        batch = torch.randint(len(x), (BATCH,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()  # Here a push starts when an update is due.
        if rank == 0 and (step == 1 or step % interval == 0):
            log_weights(out / "trainer_log", step, net)
            bar.set_postfix(loss=f"{loss.item():.3f}", version=number(ema.version), refresh=False)
    ema.close()  # ema_client

    stats = ema.stats
    text = {
        "rank": rank,
        **dataclasses.asdict(stats),
        "steps": steps,
        "last_version": number(ema.version),
    }
    (out / f"rank{rank}.json").write_text(json.dumps(text))
    dist.barrier()
    dist.destroy_process_group()


def number(version: ema_client.Version | None) -> int:
    return 0 if version is None else version.number


def log_weights(folder: pathlib.Path, step: int, net: torch.nn.Module) -> None:
    """What the server was sent at this step, for the check at the end."""
    np.savez(
        folder / f"{step:06d}.npz",
        **{name: tensor.detach().numpy() for name, tensor in net.state_dict().items()},
    )


if __name__ == "__main__":
    main()
