# SPDX-License-Identifier: Apache-2.0
"""Lightning: a fit whose average an EMA Server keeps, and which is validated with that average.

Usage: lightning_train.py URL      such as: lightning_train.py ema://localhost:50051/example
"""

import sys

import lightning
import torch
from ema_client.lightning import EMAWeightAveraging


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
        )

    def loss(self, batch):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def training_step(self, batch, index):
        return self.loss(batch)

    def validation_step(self, batch, index):
        self.log("loss_of_average", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    lightning.seed_everything(0)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    batches = torch.utils.data.DataLoader(data, batch_size=8)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        # In place of lightning.pytorch.callbacks.EMAWeightAveraging(decay=0.9). Other arguments are
        # those of ema_client.attach: half_life="200ba", tracks=..., on_error=...
        # A second run starts a new average; the server keeps the checkpoints of the old one.
        callbacks=[EMAWeightAveraging(sys.argv[1], decay=0.9, existing="new")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression(), batches, batches)
    # The model has the average now. So has the state_dict in a checkpoint of the trainer
    # (ModelCheckpoint); trainer.fit(..., ckpt_path=...) resumes with the raw weights, which are there, too.
    print(f"step {trainer.global_step}: {trainer.callback_metrics['loss_of_average']:.4f}")


if __name__ == "__main__":
    main()
