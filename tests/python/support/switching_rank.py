# SPDX-License-Identifier: Apache-2.0
"""One rank of a small DDP training with Switch-EMA; a program that test_switch_ema.py runs twice.

Usage: switching_rank.py RANK WORLD_SIZE INIT_FILE URL LOG_FILE
Logs the weights and buffers after each step.
"""

from __future__ import annotations

import sys

import ema_client
import numpy as np
import torch
import torch.distributed as dist

STEPS = 25


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    init_file, url, log_file = sys.argv[3:6]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size
    )
    torch.manual_seed(5)
    net = torch.nn.Sequential(torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2))
    model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    generator = torch.Generator().manual_seed(100 + rank)
    log: dict[str, np.ndarray] = {}
    with ema_client.attach(
        model,
        optimizer,
        url,
        preset={
            "preset": "ema_pytorch",
            "update_every": 1,
            "update_after_step": 0,
            "update_model_with_ema_every": 3,
        },
    ) as ema:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            model(torch.randn(8, 5, generator=generator)).square().mean().backward()
            optimizer.step()
            for name, tensor in net.state_dict().items():
                log[f"{step}/{name}"] = tensor.clone().numpy()
    assert (ema.stats.pushes, ema.stats.skipped) == (STEPS, 0)
    np.savez(log_file, **log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
