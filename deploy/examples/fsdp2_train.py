# SPDX-License-Identifier: Apache-2.0
"""FSDP2 (`fully_shard`): each rank sends the pieces that it has, and a checkpoint remembers its average.

Usage: torchrun --nproc-per-node 2 fsdp2_train.py URL FOLDER STEPS
Saves a checkpoint in FOLDER after its last step; called again with more STEPS, also on another number of
ranks, it goes on from there, and so does the average. The server needs --data-dir.
"""

import pathlib
import sys

import ema_client
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pytorch_train import accuracy, images, network
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


def save(folder, step, model, optimizer, ema):
    path = folder / str(step)
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    # Says which average belongs to these weights; waits until the server has that on its disk. None, if
    # the server is unavailable.
    ema_state = ema.state_dict()
    if dist.get_rank() == 0:
        torch.save(ema_state, path / "ema.pt")


def load(folder, model, optimizer):
    """Brings both to the newest checkpoint, and returns the trainer's steps so far and what the average
    resumes from; None: nothing."""
    saved = sorted(folder.glob("*/ema.pt"), key=lambda path: int(path.parent.name))
    if not saved:
        return 0, None
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=saved[-1].parent)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    return int(saved[-1].parent.name), torch.load(saved[-1])


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    url, folder, steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = images(held_out=False)

    first, resume = load(folder, model, optimizer)
    with ema_client.attach(
        model,
        optimizer,
        url,
        half_life="30ba",
        update_interval="5ba",
        resume=resume,
        # A checkpoint from an outage of the server has no state of the average, which then continues.
        existing="continue" if first > 0 else None,
    ) as ema:
        # Not ema.step, which continues from the server's newest version where there is no state.
        for step in range(first, steps):
            mine = torch.Generator().manual_seed(1000 * rank + step)
            batch = torch.randint(len(x), (4,), generator=mine)
            loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        save(folder, max(first, steps), model, optimizer, ema)

    trained = accuracy(model)
    # On all ranks: each pulls just its own pieces. Any other number of ranks can evaluate it, too.
    with ema_client.averaged(model, url):
        average = accuracy(model)
    if rank == 0:
        print(f"step {steps}: trained {trained:.4f}, averaged {average:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
