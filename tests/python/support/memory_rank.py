# SPDX-License-Identifier: Apache-2.0
"""A trainer that prints how much memory its pushes take at most; test_rank_memory.py runs it.

Usage: memory_rank.py URL COUNT ELEMENTS BUFFER_ELEMENTS
The model: COUNT parameters of ELEMENTS each, and a buffer, all float32. Prints the most bytes above what the
process had before its first push, pushes, and bytes sent.
"""

import pathlib
import sys

import ema_client
import torch


def kib(field: str) -> int:
    """Of /proc/self/status."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise KeyError(field)


def main() -> None:
    url, (count, elements, buffer_elements) = sys.argv[1], map(int, sys.argv[2:])
    torch.set_num_threads(1)
    net = torch.nn.ParameterList(torch.full((elements,), float(i)) for i in range(count))
    net.register_buffer("buffer", torch.ones(buffer_elements))
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    # One tensor at a time, in place: the training itself takes nothing.
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)
    with ema_client.attach(net, optimizer, url, half_life="3ba") as ema:
        # The peak begins anew.
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before = kib("VmRSS")
        for _ in range(4):
            optimizer.step()
            ema.wait_pushed()
        print(1024 * (kib("VmHWM") - before), ema.stats.pushes, ema.stats.sent_bytes)


if __name__ == "__main__":
    main()
