# SPDX-License-Identifier: Apache-2.0
"""How long a server takes to serve, and to say that it no longer does.

From the start of the process, without data, to the first health check that answers SERVING; from SIGTERM to
NOT_SERVING, and to 503 of /readyz. Prints median and range over rounds.

    python tests/bench/health_bench.py [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import http.client
import os
import pathlib
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import grpc

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "deploy/demo"))
from server_process import server_binary  # noqa: E402

SERVING, NOT_SERVING = b"\x08\x01", b"\x08\x02"
LIMIT_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def seconds_until(condition: Callable[[], bool], since: float) -> float:
    while not condition():
        if time.monotonic() > since + LIMIT_S:
            raise TimeoutError(f"not within {LIMIT_S} s")
        time.sleep(0.001)
    return time.monotonic() - since


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def ready(port: int) -> int:
    """The status of /readyz."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/readyz")
        return connection.getresponse().status
    finally:
        connection.close()


def measure(folder: str) -> dict[str, float]:
    port, http_port = free_port(), free_port()
    command = [server_binary(), "--listen", f"127.0.0.1:{port}", "--data-dir", folder]
    command += ["--http-listen", f"127.0.0.1:{http_port}", "--drain-delay", f"{LIMIT_S}s"]
    began = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        seconds_until(lambda: listens(port), began)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            seconds = {
                "start to SERVING": seconds_until(lambda: check(b"", timeout=10) == SERVING, began)
            }
            assert ready(http_port) == 200
            asked = time.monotonic()
            os.kill(server.pid, signal.SIGTERM)
            not_serving = seconds_until(lambda: check(b"", timeout=10) == NOT_SERVING, asked)
            seconds["SIGTERM to NOT_SERVING"] = not_serving
            seconds["SIGTERM to 503 of /readyz"] = seconds_until(
                lambda: ready(http_port) == 503, asked
            )
        return seconds
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="one round")
    arguments = parser.parse_args()
    rounds = []
    for _ in range(1 if arguments.quick else arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append(measure(folder))
    print("| from, to | median ms | range |\n|---|---:|---:|")
    for name in rounds[0]:
        times = [1000 * one[name] for one in rounds]
        print(f"| {name} | {statistics.median(times):.0f} | {min(times):.0f} to {max(times):.0f} |")


if __name__ == "__main__":
    main()
