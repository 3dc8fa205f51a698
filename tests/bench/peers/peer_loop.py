# SPDX-License-Identifier: Apache-2.0
"""How a peer in Python talks to the benchmark: python_peer.h says what is said."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of the flags that every peer has."""
    result = argparse.ArgumentParser(description=description, allow_abbrev=False)
    result.add_argument("--megabytes", type=int, default=400)
    result.add_argument("--tensors", type=int, default=400)
    return result


def shape(options: argparse.Namespace) -> tuple[int, int]:
    """Tensors, and float32 elements of each, as the command line has them."""
    return options.tensors, options.megabytes * 1_000_000 // 4 // options.tensors


def serve(
    run: Callable[[], None],
    client_pid: int,
    server_pid: int,
    prepare: Callable[[], None] = lambda: None,
) -> None:
    """Runs a round for each line of input, until its end; `prepare` before each is not timed."""
    print(client_pid, server_pid, flush=True)
    for _ in sys.stdin:
        prepare()
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)
