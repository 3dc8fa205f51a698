# SPDX-License-Identifier: Apache-2.0
"""A training loop that used ema_pytorch.EMA, with the average on an EMA Server: two lines have changed.

Usage: ema_pytorch_train.py ema://host:50051/model
"""

from __future__ import annotations

import sys

import ema_client
import torch

STEPS = 200


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    # Was: ema = EMA(net, beta=0.99, ...), and ema.update() after each step.
    ema = ema_client.attach(
        net,
        optimizer,
        sys.argv[1],
        preset="ema_pytorch",
        beta=0.99,
        update_every=1,
        update_after_step=20,
        update_model_with_ema_every=50,  # Switch-EMA.
        # A second run starts a new average; the server keeps the checkpoints of the old one.
        existing="new",
    )
    for _ in range(STEPS):
        x = torch.randn(16, 8)
        y = x.sum(1, keepdim=True) + torch.randn(16, 1)  # Much noise, which averaging takes out.
        loss = torch.nn.functional.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    x = torch.randn(1000, 8)
    for name, model in (("trained", net), ("averaged", ema)):
        with torch.no_grad():
            loss = torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        print(f"{name}: {loss.item():.4f}")
    ema.close()


if __name__ == "__main__":
    main()
