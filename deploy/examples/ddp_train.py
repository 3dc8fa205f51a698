# SPDX-License-Identifier: Apache-2.0
"""DistributedDataParallel: the same lines on every rank, each of which sends an even share of the weights.

Usage: torchrun --nproc-per-node 2 ddp_train.py URL
"""

import sys

import ema_client
import torch
import torch.distributed as dist
from pytorch_train import STEPS, accuracy, images, network


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    url = sys.argv[1]
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = images(held_out=False)
    mine = torch.Generator().manual_seed(dist.get_rank())  # Other batches on each rank.

    # On all ranks; closed at the end of `with`. The weights are read in place: each rank's optimizer waits
    # only for those of its own bytes that have not left by its next step.
    # A second run of this script starts a new average; the server keeps the checkpoints of the old one.
    with ema_client.attach(
        model, optimizer, url, half_life="30ba", update_interval="5ba", existing="new"
    ) as ema:
        for _ in range(STEPS):
            batch = torch.randint(len(x), (4,), generator=mine)
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    sent = [None] * dist.get_world_size()
    dist.all_gather_object(sent, ema.stats.sent_bytes)
    if dist.get_rank() == 0:
        trained = accuracy(model.module)
        # A whole model can be evaluated on one rank, or in a process of its own: evaluate.py.
        with ema_client.averaged(model, url) as version:
            average = accuracy(model.module)
        print(f"step {version.step}: trained {trained:.4f}, averaged {average:.4f}, sent {sent}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
