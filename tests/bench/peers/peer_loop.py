# SPDX-License-Identifier: Apache-2.0
"""How a peer in Python talks to the benchmark: python_peer.h says what is said."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable


def shape(description: str | None) -> tuple[int, int]:
    """Tensors, and float32 elements of each, as the command line has them."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--tensors", type=int, default=400)
    options = parser.parse_args()
    return options.tensors, options.megabytes * 1_000_000 // 4 // options.tensors


def serve(run: Callable[[], None], client_pid: int, server_pid: int) -> None:
    """Runs a round for each line of input, until its end."""
    print(client_pid, server_pid, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)
