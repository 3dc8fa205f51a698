# SPDX-License-Identifier: Apache-2.0
"""The main job, end to end: two ranks train, the server averages, an evaluator measures; then all is checked.

Usage: run_demo.py [--short]. Everything it writes is in build/demo/, or in build/demo-short/.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

from server_process import ROOT, ServerError, ServerProcess

HERE = pathlib.Path(__file__).resolve().parent
MODEL = "digits"
INTERVAL = 10
STEPS = 800
SHORT_STEPS = 200
# The slower average is the one that is worth keeping.
BEST = "slow"
# Versions that the evaluator must have caught while training went on.
LEAST_EVALUATED = 3


class DemoError(RuntimeError):
    """The demo cannot go on; says why and what to do."""


class Child:
    """A program in a process group of its own, so that all of it can be ended."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")])
            ),
        }
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def is_running(self) -> bool:
        """False: it has ended well. Raises DemoError: it has failed."""
        code = self.process.poll()
        if code:
            raise DemoError(f"the {self.name} ended with exit code {code}; its messages are above")
        return code is None

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help=f"{SHORT_STEPS} steps, for the tests")
    is_short = parser.parse_args().short
    # So that `kill` cleans up as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        if is_short:
            demo(SHORT_STEPS, ROOT / "build/demo-short")
        else:
            demo(STEPS, ROOT / "build/demo")
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    except (DemoError, ServerError) as error:
        print(f"demo: FAILED: {error}", file=sys.stderr)
        return 1
    print("demo: ok")
    return 0


def demo(steps: int, out: pathlib.Path) -> None:
    start = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("trainer_log", "pulled", "server"):
        (out / folder).mkdir(parents=True)
    with ServerProcess(out / "server") as server:
        print(f"demo: the server listens on {server.address}, two ranks train {steps} steps")
        train_and_evaluate(server, steps, out)
        trained = time.monotonic()
        report = check_and_report(server, out)
    report["seconds"] = {
        "training": round(trained - start, 1),
        "all": round(time.monotonic() - start, 1),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1))
    print(f"demo: took {report['seconds']['all']:.0f} s; report and plot are in {out}")


def train_and_evaluate(server: ServerProcess, steps: int, out: pathlib.Path) -> None:
    """Runs the trainer and the evaluator side by side until both have ended."""
    python = sys.executable
    url = server.url(MODEL)
    torchrun = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    children: list[Child] = []
    try:
        children.append(Child("evaluator", [python, str(HERE / "evaluator.py"), url, str(out)]))
        arguments = [str(HERE / "train.py"), url, str(steps), str(INTERVAL), str(out)]
        children.append(Child("trainer", [*torchrun, *arguments]))
        while any([child.is_running() for child in children]):
            if not server.is_running():
                raise DemoError(f"the server ended by itself:\n{server.log()}")
            time.sleep(0.05)
    finally:
        for child in children:
            child.end()


def check_and_report(server: ServerProcess, out: pathlib.Path) -> dict[str, Any]:
    # Imported late: the ranks have the cores until here.
    import ema_client
    import report as reporting
    from check import CheckError, check_averages, check_file, check_shares
    from train import TRACKS

    evaluated = json.loads((out / "evaluator.json").read_text())
    with ema_client.Client(server.address) as client:
        model = client.model(MODEL)
        records = [listed.version for listed in client.versions(MODEL)]
        best = dict(client.pull(MODEL, track=BEST, framework="numpy"))
    # As the trainer asked for them, not as the server has them.
    copies = [name for name, rule in TRACKS.items() if rule == "copy"]
    half_lives = {
        name: float(rule.removesuffix("ba")) for name, rule in TRACKS.items() if name not in copies
    }
    averages = list(half_lives)
    safetensors = out / "ema.safetensors"
    emactl_pull(server, safetensors)
    try:
        checked = check_averages(out, records, half_lives, copies)
        tensor_bytes = sum(array.nbytes for array in best.values())
        ranks = check_shares(out, pushes=len(records), tensor_bytes=tensor_bytes)
        check_file(safetensors, best)
    except CheckError as error:
        raise DemoError(str(error)) from error

    measured = reporting.measured(evaluated["series"])
    if len(measured) < LEAST_EVALUATED:
        raise DemoError(f"the evaluator caught only {len(measured)} of {len(records)} versions")
    summary = reporting.summary(evaluated["series"], [*copies, *averages])
    reporting.plot(evaluated["series"], [*copies, *averages], out / "accuracy.png")
    tracks = {
        name: track.half_life and f"half-life {track.half_life}"
        for name, track in model.tracks.items()
    }
    reporting.print_table(evaluated["series"], [*copies, *averages])
    total = sum(rank["sent_bytes"] for rank in ranks)
    for rank in ranks:
        print(
            f"rank {rank['rank']} sent {rank['sent_bytes']:,} bytes in {rank['pushes']} pushes "
            f"({rank['sent_bytes'] / total:.1%}); training waited {1e3 * rank['wait_seconds']:.0f} ms"
        )
    print(
        f"check: {checked['tensors_compared']} tensors of the {checked['versions_compared']} versions that were "
        f"pulled (of {len(records)}) are the replay in float32 bit for bit"
    )
    for track, error in checked["float64_error"].items():
        print(f"check: {track}: error against float64 {error:.2f} x 2^-24 x largest |weight|")
    if summary[BEST] <= max(summary[copy] for copy in copies):
        raise DemoError(f"averaging did not help: {summary}")
    print(f"check: safetensors.torch.load_file reads {safetensors.name}: the same bits")
    return {
        "model": MODEL,
        "tracks": tracks,
        "series": evaluated["series"],
        "versions_missed_by_the_evaluator": evaluated["missed"],
        "ranks": ranks,
        "check": checked,
        "mean_accuracy_of_the_second_half": summary,
    }


def emactl_pull(server: ServerProcess, path: pathlib.Path) -> None:
    """Writes the averaged weights as a file with our own tool."""
    emactl = ROOT / "build/release/client/cli/emactl"
    command = [emactl, "--server", server.address, "pull", MODEL, "--track", BEST, "-o", path]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        raise DemoError(f"emactl pull ended with {result.returncode}: {result.stderr}")


if __name__ == "__main__":
    sys.exit(main())
