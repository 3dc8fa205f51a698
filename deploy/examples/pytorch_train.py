# SPDX-License-Identifier: Apache-2.0
"""Plain PyTorch, one process: two lines more in a training loop, and the average is on an EMA Server.

Usage: pytorch_train.py URL      such as: pytorch_train.py ema://localhost:50051/digits
"""

import sys

import ema_client
import torch
from sklearn.datasets import load_digits

STEPS = 300


def images(held_out):
    """Real images of 8x8 pixels, and the digits that they show."""
    x, y = load_digits(return_X_y=True)
    is_held_out = torch.arange(len(x)) % 3 == 0
    chosen = is_held_out if held_out else ~is_held_out
    return torch.from_numpy(x).float()[chosen] / 16, torch.from_numpy(y)[chosen]


def network():
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))


@torch.no_grad()
def accuracy(model):
    x, y = images(held_out=True)
    return (model(x).argmax(1) == y).float().mean().item()


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    url = sys.argv[1]
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = images(held_out=False)

    # Makes the model on the server and follows the optimizer: after every 5th step the weights are sent
    # in the background. A gradient scaler's skipped steps and batches that only accumulate do not count.
    # A second run of this script starts a new average; the server keeps the checkpoints of the old one.
    ema = ema_client.attach(
        model, optimizer, url, half_life="30ba", update_interval="5ba", existing="new"
    )
    for _ in range(STEPS):
        batch = torch.randint(len(x), (8,))  # Small batches: the weights rattle about.
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ema.close()  # Waits for the last push.

    trained = accuracy(model)
    with ema_client.averaged(model, url) as version:  # Its own weights are back after this.
        average = accuracy(model)
    print(f"step {version.step}: trained {trained:.4f}, averaged {average:.4f}")


if __name__ == "__main__":
    main()
