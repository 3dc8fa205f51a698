# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel: each rank has a stage, and sends it by the names that it has in the whole model.

Usage: torchrun --nproc-per-node 2 pipeline_train.py URL
Experts, of which each rank has its own by the same names, take the same two arguments.
"""

import sys

import ema_client
import torch
import torch.distributed as dist
from pytorch_train import STEPS, images, network
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    url = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    whole = network()
    # Both call their first layer "0".
    part = torch.nn.Sequential(*(whole[:2], whole[2:])[rank])
    first = (0, 2)[rank]

    def rename(name):
        layer, _, rest = name.partition(".")
        return f"{first + int(layer)}.{rest}"

    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05, momentum=0.9)
    x, y = images(held_out=False)
    batches = torch.Generator().manual_seed(0)

    # A second run of this script starts a new average; the server keeps the checkpoints of the old one.
    with ema_client.attach(
        part,
        optimizer,
        url,
        half_life="30ba",
        update_interval="5ba",
        rename=rename,
        existing="new",
    ):
        for _ in range(STEPS):
            batch = torch.randint(len(x), (8,), generator=batches)
            optimizer.zero_grad()
            if rank == 0:
                schedule.step(x[batch])
            else:
                schedule.step(target=y[batch])
            optimizer.step()

    trained = accuracy(part, rank)
    # On all ranks: each pulls its stage. A process of its own can evaluate the whole: evaluate.py.
    with ema_client.averaged(part, url, rename=rename) as version:
        average = accuracy(part, rank)
    if rank == 1:
        print(f"step {version.step}: trained {trained:.4f}, averaged {average:.4f}")
    dist.destroy_process_group()


@torch.no_grad()
def accuracy(part, rank):
    """The share of held-out digits that both stages know; on the last rank."""
    x, y = images(held_out=True)
    hidden = part(x) if rank == 0 else torch.empty(len(x), part[0].in_features)
    dist.broadcast(hidden, src=0)
    return (part(hidden).argmax(1) == y).float().mean().item() if rank == 1 else None


if __name__ == "__main__":
    main()
