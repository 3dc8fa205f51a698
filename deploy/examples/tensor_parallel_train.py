# SPDX-License-Identifier: Apache-2.0
"""Tensor parallel and FSDP2 on a mesh of two dimensions: each rank sends the pieces that it has.

Usage: torchrun --nproc-per-node 4 tensor_parallel_train.py URL
"""

import sys

import ema_client
import torch
import torch.distributed as dist
from pytorch_train import STEPS, accuracy, images, network
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    url = sys.argv[1]
    dist.init_process_group("gloo")
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("data", "tensor")
    )
    torch.manual_seed(0)
    model = network()
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = images(held_out=False)
    # Ranks that have pieces of the same layers see the same batches.
    mine = torch.Generator().manual_seed(mesh["data"].get_local_rank())

    # As without a mesh: names and shapes on the server are those of the whole model.
    # A second run of this script starts a new average; the server keeps the checkpoints of the old one.
    with ema_client.attach(
        model, optimizer, url, half_life="30ba", update_interval="5ba", existing="new"
    ):
        for _ in range(STEPS):
            batch = torch.randint(len(x), (4,), generator=mine)
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    trained = accuracy(model)
    # On all ranks: each pulls just its own pieces. Any other layout can evaluate it, too.
    with ema_client.averaged(model, url) as version:
        average = accuracy(model)
    if dist.get_rank() == 0:
        print(f"step {version.step}: trained {trained:.4f}, averaged {average:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
