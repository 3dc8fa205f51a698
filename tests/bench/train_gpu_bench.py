# SPDX-License-Identifier: Apache-2.0
"""What an average on the server costs a training step, and in memory: nothing, ours, copies.

Trains a small transformer, each way in a process of its own, in turns: without an average; with
`attach`, which reads weights in place, by the default's pinned memory and by as much as they need;
and with `attach` made to copy them to host memory inside optimizer.step(). Prints a table: of a step
the median, the mean and the 95th percentile (medians of the rounds), the ratio to no average in the
same round and its range; the GPU's peak memory and the process's; and how many pushes became a
version, which all that are due must. Nothing counts before the server's memory has been used.

    python tests/bench/train_gpu_bench.py --server EMA-SERVER [--device cuda|cpu] [--layers N] [--steps N]
        [--rounds N] [--seconds N] [--output FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch

WIDTH = 1024
BATCH, LENGTH = 16, 256
WAYS = {
    "nothing": "no average",
    "ours": "ours, every step",
    "ours/10": "ours, every 10 steps",
    "ours/10/staged": "ours, every 10 steps, pinned memory for all",
    "copies": ".cpu() copies, every step",
}


def train(way: str, url: str, device: str, layers: int, steps: int) -> dict[str, float]:
    import ema_client
    from ema_client._client import gpu

    if way == "copies":
        # What is not read in place is copied.
        gpu.is_readable = lambda tensor: False  # type: ignore[assignment]
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(WIDTH, 16, 4 * WIDTH, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(BATCH if device == "cuda" else 1, LENGTH, WIDTH, device=device)
    ema = None
    interval = 10 if way.startswith("ours/10") else 1
    if way != "nothing":
        ema = ema_client.attach(
            model,
            optimizer,
            url,
            half_life="100ba",
            update_interval=f"{interval}ba",
            max_staging_bytes=(1 << 30) if way == "ours/10/staged" else 64 << 20,
            on_error="raise",
        )
    seconds = []
    # A CPU server's memory is new at the first four pushes, as it has so many versions, and so slow.
    warm_up = max(1, min(5, steps // 10)) * interval
    for step in range(warm_up + steps):
        if step == warm_up and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            loss = model(data).square().mean()
        loss.backward()
        optimizer.step()
        if device == "cuda":
            # Not the whole device: what ours still copies may go on during the next step.
            torch.cuda.current_stream().synchronize()
        if step >= warm_up:
            seconds.append(time.perf_counter() - start)
    pushes = 0
    if ema is not None:
        # What was not pushed costs nothing.
        ema.wait_pushed()
        pushes = ema.stats.pushes
        due = (warm_up + steps) // interval
        if ema.stats.skipped > 0 or pushes < due:
            raise SystemExit(f"{way}: {pushes} of {due} pushes became a version")
        ema.close()
        # The server has memory for a few of them.
        address, name = url.rsplit("/", 1)
        with ema_client.Client(address) as client:
            client.delete_model(name)
    seconds.sort()
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return {
        "weight_bytes": float(sum(p.numel() * p.element_size() for p in model.parameters())),
        "median_s": statistics.median(seconds),
        "mean_s": statistics.fmean(seconds),
        "p95_s": seconds[int(len(seconds) * 0.95)],
        "gpu_bytes": float(peak),
        "host_bytes": float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
        "pushes": float(pushes),
    }


def start_server(program: str, folder: pathlib.Path) -> tuple[subprocess.Popen[bytes], str]:
    port_file = folder / "port"
    command = [program, "--listen", "127.0.0.1:0", "--port-file", port_file]
    command += ["--device", "cpu", "--memory-bytes", "32G"]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while not port_file.exists() or not port_file.read_text().endswith("\n"):
        if server.poll() is not None:
            raise SystemExit(f"{program} ended with {server.returncode}")
        time.sleep(0.01)
    return server, f"ema://127.0.0.1:{port_file.read_text().strip()}"


Round = dict[str, dict[str, Any]]  # By way.


def measure(args: argparse.Namespace, url: str, number: int) -> Round:
    results = {}
    ways = list(WAYS)
    # Who goes first changes.
    for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
        model = f"{url}/model-{number}-{ways.index(way)}"
        command = [sys.executable, __file__, "--way", way, "--url", model]
        for name in ("device", "layers", "steps"):
            command += [f"--{name}", str(getattr(args, name))]
        result = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        results[way] = json.loads(result.stdout)
    return results


def table(rounds: list[Round]) -> str:
    weight_bytes = rounds[0]["nothing"]["weight_bytes"]
    text = (
        f"A transformer with {weight_bytes / 1e6:.0f} MB of weights, batches of bfloat16; {len(rounds)} rounds.\n\n"
        "| average | step, ms | of none | mean, ms | of none | p95, ms "
        "| peak GPU memory, MB | peak host memory, MB | pushes |\n"
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    for way, name in WAYS.items():
        cells = [name]
        for key in ("median_s", "mean_s"):
            ratios = sorted(results[way][key] / results["nothing"][key] for results in rounds)
            cells.append(f"{1e3 * statistics.median(r[way][key] for r in rounds):.1f}")
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} - {ratios[-1]:.2f})")
        cells.append(f"{1e3 * statistics.median(r[way]['p95_s'] for r in rounds):.1f}")
        for key in ("gpu_bytes", "host_bytes"):
            cells.append(f"{max(r[way][key] for r in rounds) / 1e6:.0f}")
        cells.append(f"{min(r[way]['pushes'] for r in rounds):.0f}")
        text += "| " + " | ".join(cells) + " |\n"
    return text


def measure_rounds(args: argparse.Namespace, url: str) -> str:
    """Returns the table."""
    rounds: list[Round] = []
    begin = time.monotonic()
    longest = 0.0
    while len(rounds) < args.rounds:
        start = time.monotonic()
        if rounds and start - begin + longest > args.seconds:
            break
        rounds.append(measure(args, url, len(rounds)))
        longest = max(longest, time.monotonic() - start)
        if args.output:
            args.output.write_text(table(rounds))
    return table(rounds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--server", help="the ema-server to start")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no round that may end later"
    )
    parser.add_argument("--output", type=pathlib.Path, help="the table so far, after each round")
    parser.add_argument("--way", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(train(args.way, args.url, args.device, args.layers, args.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_server(args.server, pathlib.Path(folder))
        try:
            print(measure_rounds(args, url), end="")
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
