# SPDX-License-Identifier: Apache-2.0
"""One rank of a small DDP training; a program that test_attach.py runs twice.

Usage: training_rank.py RANK WORLD_SIZE INIT_FILE URL LOG_FILE STEPS [STOP_FILE]
Logs the weights and buffers after each step, how long the slowest took, and what the attachment
says at the end. With STOP_FILE: trains until that is there, logs no weights, and rank 0 prints a line
for each version that comes.
"""

from __future__ import annotations

import pathlib
import sys
import time

import ema_client
import numpy as np
import torch
import torch.distributed as dist

TRACKS = {"fast": "8ba", "slow": {"half_life": "40ba", "update_interval": "6ba"}, "raw": "copy"}


class Net(torch.nn.Module):
    """BatchNorm (its statistics differ by rank), a tied weight, a frozen one, a buffer not kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(9, 17)
        self.norm = torch.nn.BatchNorm1d(17)
        self.second = torch.nn.Linear(17, 9, bias=False)
        self.third = torch.nn.Linear(9, 17, bias=False)
        self.third.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.norm(self.first(x))))
        return self.third(x) * self.frozen.sum()


def main() -> None:
    rank, world_size = int(sys.argv[1]), int(sys.argv[2])
    init_file, url, log_file, steps = sys.argv[3], sys.argv[4], sys.argv[5], int(sys.argv[6])
    stop_file = pathlib.Path(sys.argv[7]) if len(sys.argv) > 7 else None
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size
    )
    torch.manual_seed(5)
    net = Net()
    model = torch.nn.parallel.DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    log: dict[str, np.ndarray] = {}
    generator = torch.Generator().manual_seed(100 + rank)
    with ema_client.attach(
        model,
        optimizer,
        url,
        update_interval="3ba",
        tracks=TRACKS,
        max_pinned_versions=4,
        max_wait_s=300,
    ) as ema:
        slowest_s = 0.0
        printed: ema_client.Version | None = None
        for step in range(1, steps + 1):
            start = time.monotonic()
            optimizer.zero_grad()
            model(torch.randn(16, 9, generator=generator)).square().mean().backward()
            optimizer.step()
            slowest_s = max(slowest_s, time.monotonic() - start)
            if stop_file is not None:
                version = ema.version
                if rank == 0 and version is not None and version != printed:
                    printed = version
                    print(version.step, flush=True)
                must_stop = torch.tensor(int(stop_file.exists()))
                dist.broadcast(must_stop, 0)
                if must_stop:
                    break
                continue
            for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
                log[f"{step}/{name}"] = tensor.detach().clone().numpy()
    stats = ema.stats
    log["slowest_s"] = np.array(slowest_s)
    log["pushes"] = np.array(stats.pushes)
    log["skipped"] = np.array(stats.skipped)
    log["sent_bytes"] = np.array(stats.sent_bytes)
    assert ema.version is not None
    log["version"] = np.array(ema.version.number)
    np.savez(log_file, **log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
