# SPDX-License-Identifier: Apache-2.0
"""A model's weights saved from the trainer, by what people use for that."""

from __future__ import annotations

import os
import pathlib
import shutil
from collections.abc import Callable

import peer_loop
import safetensors.torch
import torch
import torch.distributed.checkpoint

Weights = dict[str, torch.Tensor]


def by_torch(weights: Weights, folder: pathlib.Path) -> None:
    torch.save(weights, folder / "weights.pt")


def by_safetensors(weights: Weights, folder: pathlib.Path) -> None:
    safetensors.torch.save_file(weights, folder / "weights.safetensors")


def by_dcp(weights: Weights, folder: pathlib.Path) -> None:
    torch.distributed.checkpoint.save(weights, checkpoint_id=folder / "dcp", no_dist=True)


SAVERS: dict[str, Callable[[Weights, pathlib.Path], None]] = {
    "torch": by_torch,
    "safetensors": by_safetensors,
    "dcp": by_dcp,
}


def sync_all(folder: pathlib.Path) -> None:
    """What a program has to do after a save that syncs nothing, or not everything."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    parser = peer_loop.parser(__doc__)
    parser.add_argument("--by", choices=SAVERS, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="made anew each round")
    parser.add_argument("--sync", action="store_true", help="everything, after the save")
    options = parser.parse_args()
    tensors, elements = peer_loop.shape(options)
    weights = {f"layer{i}": torch.rand(elements) for i in range(tensors)}

    def prepare() -> None:
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)

    def save() -> None:
        SAVERS[options.by](weights, options.folder)
        if options.sync:
            sync_all(options.folder)

    peer_loop.serve(save, os.getpid(), 0, prepare)


if __name__ == "__main__":
    main()
