# SPDX-License-Identifier: Apache-2.0
"""What a trainer and an evaluator keep of their speed while other clients want all slots for streams.

For each attack of tests/python/support/slot_hog.py the rate of the pair with the attack beside that without it, in
turns. Each hostile client has a token of its own, and all clients have one address. They share this machine's processors
with the pair, so its speed is also given for each second of processor time that the server and the pair took.

    python tests/bench/slots_bench.py [--seconds S] [--turns N] [--hostile-clients N] [--pause S]
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
import tempfile

from edge_bench import ROOT, ratios_during, rates_of, text_of

sys.path += [str(ROOT / "deploy/demo"), str(ROOT / "tests/python/support")]
import ema_client  # noqa: E402
from edge import Pair, resident_bytes  # noqa: E402
from server_process import ServerProcess  # noqa: E402
from slot_hog import CALLS  # noqa: E402

HOG = ROOT / "tests/python/support/slot_hog.py"
PAIR_TOKEN = "trainer-6f1d2c70b4e94b0f"


def measure(kind: str, folder: pathlib.Path, options: argparse.Namespace) -> None:
    hostile = [f"hostile-{number:016d}" for number in range(options.hostile_clients)]
    tokens = folder / "tokens"
    tokens.write_text("".join(f"trainer {token}\n" for token in (PAIR_TOKEN, *hostile)))
    with ServerProcess(folder, "--auth-tokens", str(tokens)) as server:
        arguments = {"token": PAIR_TOKEN, "timeout_s": 60, "same_host_lane": False}
        with (
            ema_client.Client(server.address, **arguments) as trainer,
            ema_client.Client(server.address, **arguments) as evaluator,
        ):
            pair = Pair(trainer, evaluator, options.megabytes)
            measured = [server.pid, os.getpid()]
            rates_of(pair, 2, measured)
            before = resident_bytes(server.pid)
            command = [sys.executable, str(HOG), kind, str(server.port), *hostile]
            command += ["--seconds", str(options.seconds), "--pause", str(options.pause)]
            ratios, sent = ratios_during(command, pair, measured, options.seconds, options.turns)
            more = (resident_bytes(server.pid) - before) >> 20
            print(f"{kind}, {len(hostile)} hostile clients: {text_of(ratios)}; server {more:+} MiB")
            print(f"    in the last turn {sent}", flush=True)
            pair.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--hostile-clients", type=int, default=1)
    # Until a hostile client opens other calls. 0: it floods the server with calls, too.
    parser.add_argument("--pause", type=float, default=0.05)
    parser.add_argument("--kinds", nargs="*", choices=CALLS, default=list(CALLS))
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            measure(kind, pathlib.Path(folder), options)


if __name__ == "__main__":
    main()
