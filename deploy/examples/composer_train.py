# SPDX-License-Identifier: Apache-2.0
"""Trains with MosaicML Composer, which evaluates with the average that an EMA Server keeps.

Usage: composer_train.py ema://host:50051/model
"""

from __future__ import annotations

import sys

import torch
from composer import Trainer
from composer.models import ComposerModel
from ema_client.composer import EMA  # Was: from composer.algorithms import EMA
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError


class Regression(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
        )
        self.metric = MeanSquaredError()

    def forward(self, batch):
        return self.net(batch[0])

    def loss(self, outputs, batch):
        return torch.nn.functional.mse_loss(outputs, batch[1])

    def get_metrics(self, is_train=False):
        return {} if is_train else {"error": self.metric}

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def update_metric(self, batch, outputs, metric) -> None:
        metric.update(outputs, batch[1])


def loader(count: int, noise: float) -> DataLoader:
    x = torch.randn(count, 8)
    y = x.sum(1, keepdim=True) + noise * torch.randn(count, 1)
    return DataLoader(TensorDataset(x, y), batch_size=16)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    model = Regression()
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        train_dataloader=loader(2000, noise=1),
        eval_dataloader=loader(500, noise=0),
        max_duration="2ep",
        # A second run starts a new average; the server keeps the checkpoints of the old one.
        algorithms=[EMA(half_life="50ba", url=sys.argv[1], existing="new")],
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    averaged = float(trainer.state.eval_metrics["eval"]["error"].compute())
    print(f"averaged: {averaged:.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
