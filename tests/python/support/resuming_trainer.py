# SPDX-License-Identifier: Apache-2.0
"""A small training that goes on from its own checkpoint; a program that test_resume.py kills.

Usage: resuming_trainer.py URL CHECKPOINT STEPS SAVE_EVERY [RANK WORLD_SIZE INIT_FILE]
Rank 0 prints each step's number when it has been made. What it does at a step depends on nothing but the
weights, the optimizer and the step, so that a resumed training is the same as one that was never killed.
Each rank has a checkpoint of its own, from whose average's state it resumes: these must be equal.
"""

from __future__ import annotations

import os
import pathlib
import sys

import ema_client
import torch
import torch.distributed as dist

TRACKS: dict[str, ema_client.Track] = {
    "fast": ema_client.Track(half_life="7ba"),
    "slow": ema_client.Track(half_life="50ba", update_interval="4ba"),
    "fixed": ema_client.Track(smoothing=0.9, update_interval="3ba"),
    "warm": ema_client.Track(inv_gamma=1.0, power=0.75),
    "zero": ema_client.Track(smoothing=0.95, zero_init="debias"),
    "swa": ema_client.Track(uniform=True, ema_start="20ba"),
    "mean": ema_client.Track(mean_of_last=5, update_interval="2ba"),
    "exact": ema_client.Track(half_life="30ba", dtype="float64"),
    "samples": ema_client.Track(half_life="200sp", update_interval="10sp"),
    "raw": ema_client.Track(copy=True),
}


def make_net() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 33), torch.nn.BatchNorm1d(33), torch.nn.ReLU(), torch.nn.Linear(33, 5)
    )


def main() -> None:
    url, path = sys.argv[1], pathlib.Path(sys.argv[2])
    steps, save_every = int(sys.argv[3]), int(sys.argv[4])
    rank = int(sys.argv[5]) if len(sys.argv) > 5 else 0
    torch.set_num_threads(1)
    net = make_net()
    model = net
    if len(sys.argv) > 5:
        dist.init_process_group(
            "gloo", init_method=f"file://{sys.argv[7]}", rank=rank, world_size=int(sys.argv[6])
        )
        model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    first, state = 0, None
    if path.exists():
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        first, state = saved["step"], saved["ema"]
    with ema_client.attach(
        model,
        optimizer,
        url,
        tracks=TRACKS,
        time=lambda step: {"batch": step, "sample": 3 * step},
        resume=state,
        on_error="raise",
        timeout_s=30,
    ) as ema:
        assert ema.step == first
        for step in range(first + 1, steps + 1):
            generator = torch.Generator().manual_seed(1000 * rank + step)
            optimizer.zero_grad()
            model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            if step % save_every == 0:
                saved = {
                    "net": net.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "step": step,
                    "ema": ema.state_dict(),
                }
                torch.save(saved, f"{path}.new")
                os.replace(f"{path}.new", path)
            if rank == 0:
                print(step, flush=True)


if __name__ == "__main__":
    main()
