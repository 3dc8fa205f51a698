# SPDX-License-Identifier: Apache-2.0
"""accelerate: `ema_client.attach` takes what `Accelerator.prepare` returns.

Usage: accelerate launch accelerate_train.py URL
such as: accelerate launch accelerate_train.py ema://localhost:50051/example
"""

import sys

import accelerate
import ema_client
import torch


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    url = sys.argv[1]
    accelerate.utils.set_seed(0)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.randn(64, 8)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    # Counts the steps that the optimizer makes, on every rank: one for two batches here.
    # A second run of this script starts a new average; the server keeps the checkpoints of the old one.
    with ema_client.attach(model, optimizer, url, half_life="10ba", existing="new") as ema:
        for epoch in range(4):
            for inputs, targets in batches:
                with accelerator.accumulate(model):
                    loss = torch.nn.functional.mse_loss(model(inputs), targets)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
    with ema_client.averaged(model, url), torch.no_grad():
        loss = torch.nn.functional.mse_loss(model(x.to(accelerator.device)), x.sum(1, keepdim=True))
    accelerator.print(f"step {ema.step}: {loss:.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
