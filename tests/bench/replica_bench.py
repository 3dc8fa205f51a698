# SPDX-License-Identifier: Apache-2.0
"""Compares the read throughput of four replicas of a server with that of one.

Each server runs in a network namespace of its own, so this needs root, and sends at most --rate. Eight evaluators pull all
weights; rounds alternate between one replica and four. Prints the median and the range of the total throughput.

    python tests/bench/replica_bench.py [--quick] [--rounds N] [--rate 1gbit]
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

import ema_client
import numpy as np

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "deploy/demo"), str(ROOT / "tests/python/support")]
from group_network import Network, ip  # noqa: E402
from server_process import ServerProcess  # noqa: E402

CLIENTS, SOURCE, FIRST_REPLICA, REPLICAS = 0, 1, 2, 4
EVALUATORS = 8
WEIGHTS = {f"layer{i}": np.full(1 << 20, i, np.float32) for i in range(4)}


def read(address: str, pulls: int, ready: Any) -> None:
    with ema_client.Client(address, timeout_s=60) as client:
        client.pull("m", track="raw", framework="numpy")
        ready.wait(60)
        for _ in range(pulls):
            client.pull("m", track="raw", framework="numpy")


def gigabytes_per_second(addresses: list[str], pulls: int) -> float:
    """The total of all evaluators; each pulls `pulls` times from one address."""
    # gRPC cannot be used in a child that was forked after its first use.
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(EVALUATORS + 1)
    readers = [
        context.Process(target=read, args=(addresses[i % len(addresses)], pulls, ready))
        for i in range(EVALUATORS)
    ]
    for reader in readers:
        reader.start()
    ready.wait(60)
    began = time.monotonic()
    for reader in readers:
        reader.join(600)
        assert reader.exitcode == 0
    taken = time.monotonic() - began
    return EVALUATORS * pulls * sum(array.nbytes for array in WEIGHTS.values()) / taken / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rate", default="1gbit", help="how much each server sends at most, in the syntax of tc"
    )
    parser.add_argument("--quick", action="store_true", help="one short round")
    arguments = parser.parse_args()
    rounds, pulls = (1, 1) if arguments.quick else (arguments.rounds, 10)
    with contextlib.ExitStack() as stack:
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        network = stack.enter_context(Network(FIRST_REPLICA + REPLICAS))
        for place in network.places[SOURCE:]:
            namespace = place.prefix[-1]
            shape = ("tbf", "rate", arguments.rate, "burst", "2mb", "latency", "50ms")
            ip("netns", "exec", namespace, "tc", "qdisc", "add", "dev", "eth0", "root", *shape)
        network.enter(CLIENTS)
        flag = "--allow-unauthenticated"
        source = stack.enter_context(
            ServerProcess(folder / "source", flag, place=network.places[SOURCE])
        )
        with ema_client.Client(source.address, timeout_s=60) as client:
            client.create_model("m", WEIGHTS, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=WEIGHTS)
        replicas = [
            stack.enter_context(
                ServerProcess(
                    folder / f"replica{i}", flag, "--follow", source.url("m"), place=place
                )
            ).address
            for i, place in enumerate(network.places[FIRST_REPLICA:])
        ]
        rates: dict[int, list[float]] = {1: [], REPLICAS: []}
        for _ in range(rounds):
            for count, samples in rates.items():
                samples.append(gigabytes_per_second(replicas[:count], pulls * count))
    print("| replicas | GB/s, median | range |\n|---:|---:|---:|")
    for count, values in rates.items():
        print(
            f"| {count} | {statistics.median(values):.3f} | {min(values):.3f} to {max(values):.3f} |"
        )
    ratios = [many / one for one, many in zip(rates[1], rates[REPLICAS], strict=True)]
    print(f"\nmedian of the ratios: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
