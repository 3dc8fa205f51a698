# SPDX-License-Identifier: Apache-2.0
"""The demo's task: scikit-learn's digits (1797 real 8x8 images), and a small network for them."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

HELD_OUT = 597


def images(*, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, 8, 8] from -1 to 1, and labels; the same split in every process."""
    data, target = load_digits(return_X_y=True)
    x = torch.from_numpy(data).float().view(-1, 1, 8, 8) / 8 - 1
    y = torch.from_numpy(target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    chosen = order[:HELD_OUT] if held_out else order[HELD_OUT:]
    return x[chosen], y[chosen]


def network() -> torch.nn.Module:
    def block(inputs: int, outputs: int) -> list[torch.nn.Module]:
        return [
            torch.nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(outputs),
            torch.nn.ReLU(),
        ]

    return torch.nn.Sequential(
        *block(1, 16),
        *block(16, 32),
        torch.nn.MaxPool2d(2),
        *block(32, 32),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 4 * 4, 10),
    )


@torch.no_grad()
def accuracy(module: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    module.eval()
    return float((module(x).argmax(1) == y).float().mean())
