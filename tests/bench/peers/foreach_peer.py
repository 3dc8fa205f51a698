# SPDX-License-Identifier: Apache-2.0
"""Averages of a model's weights on its GPU, by torch, in place."""

from __future__ import annotations

import os

import peer_loop
import torch

UPDATE_WEIGHT = 0.25


def main() -> None:
    parser = peer_loop.parser(__doc__)
    parser.add_argument("--by", choices=["foreach", "loop"], required=True)
    parser.add_argument("--tracks", type=int, default=4, help="averages of each tensor")
    parser.add_argument("--repeats", type=int, default=20, help="updates that are timed as one")
    parser.add_argument("--device", default="cuda:0")
    options = parser.parse_args()
    tensors, elements = peer_loop.shape(options)

    def new_tensors() -> list[torch.Tensor]:
        return [torch.rand(elements, device=options.device) for _ in range(tensors)]

    weights = new_tensors()
    tracks = [new_tensors() for _ in range(options.tracks)]

    def update(averages: list[torch.Tensor]) -> None:
        if options.by == "foreach":
            torch._foreach_lerp_(averages, weights, UPDATE_WEIGHT)
        else:
            for average, weight in zip(averages, weights):
                average.lerp_(weight, UPDATE_WEIGHT)

    def run() -> None:
        for _ in range(options.repeats):
            for averages in tracks:
                update(averages)
        if weights[0].is_cuda:
            torch.cuda.synchronize()

    peer_loop.serve(run, os.getpid(), 0)


if __name__ == "__main__":
    main()
