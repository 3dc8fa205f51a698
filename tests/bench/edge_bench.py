# SPDX-License-Identifier: Apache-2.0
"""What the edge of deploy/edge costs, and what it keeps of a pair's speed while it is flooded. Needs HAProxy.

Push and pull through the edge, which clients reach over TLS, beside the server directly, with and without TLS: rounds
in turns, medians. Then for each flood of tests/python/support/http2_flood.py, against the server and against the edge:
the rate of a trainer and an evaluator with the flood beside that without it, in turns, and how much memory the
processes gained. The floods come from an address of their own. They share this machine's processors with all else, so
the pair's speed is also given for each second of processor time that the server, the edge and the pair took.

    python tests/bench/edge_bench.py [--rounds N] [--kinds [KIND ...]] [--targets direct|edge ...]; --help lists all
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

ROOT = pathlib.Path(__file__).parents[2]
sys.path += [str(ROOT / "deploy/demo"), str(ROOT / "tests/python/support")]
import numpy as np  # noqa: E402
from edge import Edge, Pair, resident_bytes  # noqa: E402
from http2_flood import KINDS  # noqa: E402
from server_process import ServerProcess  # noqa: E402

FLOOD = ROOT / "tests/python/support/http2_flood.py"


def seconds_of(work: Callable[[], object]) -> float:
    began = time.monotonic()
    work()
    return time.monotonic() - began


def measure_throughput(edge: Edge, tls_server: ServerProcess, megabytes: int, rounds: int) -> None:
    weights = {f"w{i}": np.ones(megabytes * 31_250, np.float32) for i in range(8)}
    clients = {
        "direct": edge.direct_client(),
        "direct with TLS": edge.client(address=tls_server.address),
        "edge": edge.client(),
    }
    runs = {}
    for name, client in clients.items():
        model = name.replace(" ", "-")
        client.create_model(model, weights, tracks={"ema": "10ba"})
        runs[name] = model, client, client.open_run(model)
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for step in range(rounds + 1):
        for name, (model, client, run) in runs.items():
            push = seconds_of(lambda: run.push(step=step + 1, weights=weights))
            pull = seconds_of(lambda: client.pull(model, track="ema", framework="numpy"))
            # The first round makes connections and touches memory.
            if step > 0:
                rates[name].append((megabytes / push, megabytes / pull))
    base = [statistics.median(column) for column in zip(*rates["direct"], strict=True)]
    for name, (_, client, run) in runs.items():
        call_us = statistics.median(seconds_of(client.models) for _ in range(300)) * 1e6
        for what, column, direct in zip(("push", "pull"), zip(*rates[name]), base, strict=True):
            median = statistics.median(column)
            print(f"{what} {name}: {median:.0f} MB/s, {median / direct:.2f} of direct;", end=" ")
            print(f"from {min(column):.0f} to {max(column):.0f}")
        print(f"ListModels {name}: {call_us:.0f} us", flush=True)
        run.close()
        client.close()


def cpu_seconds(pid: int) -> float:
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rates_of(pair: Pair, seconds: float, pids: list[int]) -> tuple[float, float]:
    """Pushes and pulls per second, and per second of the processors' time that these processes took."""
    began, cpu_began = time.monotonic(), sum(map(cpu_seconds, pids))
    with pair:
        time.sleep(seconds)
    moved, elapsed = pair.pushes + pair.pulls, time.monotonic() - began
    return moved / elapsed, moved / (sum(map(cpu_seconds, pids)) - cpu_began)


def ratios_during(
    command: list[str], pair: Pair, pids: list[int], seconds: float, turns: int
) -> tuple[list[tuple[float, float]], str]:
    """The pair's rates while `command` attacks, divided by those just before; and what its last line says."""
    ratios = []
    for _ in range(turns):
        before = rates_of(pair, seconds, pids)
        # In a session of its own, as schedulers share processors between sessions.
        attack = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert attack.stdout is not None and attack.stdout.readline() == "flooding\n"
        try:
            during = rates_of(pair, seconds, pids)
        finally:
            sent = attack.communicate(timeout=60)[0].strip()
        ratios.append((during[0] / before[0], during[1] / before[1]))
    return ratios, sent


def text_of(ratios: list[tuple[float, float]]) -> str:
    wall, cpu = (sorted(column) for column in zip(*ratios, strict=True))
    return (
        f"of the pair's speed {statistics.median(wall):.2f} ({wall[0]:.2f} to {wall[-1]:.2f}),"
        f" per CPU second {statistics.median(cpu):.2f} ({cpu[0]:.2f} to {cpu[-1]:.2f})"
    )


def measure_flood(kind: str, target: str, options: argparse.Namespace) -> None:
    """One flood against one target, with a server of its own: memory that a flood left behind must not count twice."""
    with tempfile.TemporaryDirectory() as folder, Edge(pathlib.Path(folder)) as edge:
        make = edge.client if target == "edge" else edge.direct_client
        address = edge.address if target == "edge" else edge.server.address
        with make() as trainer, make() as evaluator:
            pair = Pair(trainer, evaluator, 64)
            pids = {"server": edge.server.pid, "edge": edge.pid}
            measured = [*pids.values(), os.getpid()]
            rates_of(pair, 2, measured)
            resident = {name: resident_bytes(pid) for name, pid in pids.items()}
            command = [sys.executable, FLOOD, kind, address, "--source", "127.0.1.1"]
            command += ["--connections", str(options.connections)]
            command += ["--seconds", str(options.seconds)] + ["--tls"] * (target == "edge")
            ratios, sent = ratios_during(command, pair, measured, options.seconds, options.turns)
            print(f"{kind} {target}: {text_of(ratios)};", end=" ")
            for name, size in resident.items():
                print(f"{name} {(resident_bytes(pids[name]) - size) >> 20:+} MiB", end=", ")
            print(sent, flush=True)
            pair.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--targets", nargs="*", default=["direct", "edge"])
    options = parser.parse_args()
    if options.rounds:
        with tempfile.TemporaryDirectory() as name, Edge(pathlib.Path(name)) as edge:
            flags = ["--tls-cert", edge.ca_file, "--tls-key", edge.key_file]
            flags += ["--auth-tokens", edge.token_file]
            with ServerProcess(pathlib.Path(name) / "tls", *map(str, flags)) as tls_server:
                measure_throughput(edge, tls_server, options.megabytes, options.rounds)
    for kind in options.kinds:
        for target in options.targets:
            measure_flood(kind, target, options)


if __name__ == "__main__":
    main()
