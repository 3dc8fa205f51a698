# SPDX-License-Identifier: Apache-2.0
"""A trainer that prints what the client does to its heap; test_heap.py runs it.

Usage: heap_rank.py URL
Prints how many of six blocks of 12 MB the system has back when the trainer has freed them after a push.
Without torch, whose tensors would change malloc's bounds.
"""

import ctypes
import pathlib
import resource
import sys

import ema_client
import numpy as np

MIB = 1 << 20
BLOCK_BYTES = 12_000_000
BLOCKS = 6


def resident_bytes() -> int:
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * resource.getpagesize()


def returned_blocks() -> float:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = []
    for _ in range(BLOCKS):
        block = libc.malloc(ctypes.c_size_t(BLOCK_BYTES))
        ctypes.memset(block, 1, BLOCK_BYTES)
        blocks.append(block)
        # Stays allocated, behind the block if that is in the heap: too large for most holes before it.
        libc.malloc(ctypes.c_size_t(100_000))
    before = resident_bytes()
    for block in blocks:
        libc.free(block)
    return (before - resident_bytes()) / BLOCK_BYTES


def main() -> None:
    address, _, name = sys.argv[1].removeprefix("ema://").partition("/")
    weights = {"w": np.ones(32 * MIB, np.float32)}
    with ema_client.Client(address) as client:
        client.create_model(name, weights, tracks={"raw": "copy"})
        with client.open_run(name) as run:
            run.push(step=1, weights=weights)
            print(returned_blocks())


if __name__ == "__main__":
    main()
