# SPDX-License-Identifier: Apache-2.0
"""That the Python benchmarks run, not how fast; and what the report says of its rows."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from typing import Any

import pytest
from group_network import why_not
from server_process import ROOT, server_binary

FOLDER = ROOT / "tests/bench"
BENCH_PYTHON = ROOT / "build/venv-bench/bin/python"


@pytest.mark.parametrize("name", ["update_bench.py", "evaluate_bench.py"])
def test_runs(name: str) -> None:
    command = [sys.executable, FOLDER / name, "--quick", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert "loop" in result.stdout


@pytest.mark.framework
def test_health_bench_runs() -> None:
    command = [sys.executable, FOLDER / "health_bench.py", "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert "| start to SERVING |" in result.stdout


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_replica_bench_runs() -> None:
    command = [sys.executable, FOLDER / "replica_bench.py", "--quick"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    assert "median of the ratios" in result.stdout


@pytest.mark.slow
def test_slots_bench_runs() -> None:
    command = [sys.executable, FOLDER / "slots_bench.py", "--megabytes", "1"]
    command += ["--seconds", "0.5", "--turns", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert "pulls, 1 hostile clients: of the pair's speed" in result.stdout


@pytest.mark.framework
@pytest.mark.timeout(600)
def test_train_bench_runs() -> None:
    command = [sys.executable, FOLDER / "train_bench.py", "--quick", "--ranks", "2"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stderr
    assert "| ours, four tracks, every 10 |" in result.stdout


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_train_gpu_bench_runs(tmp_path: pathlib.Path) -> None:
    table = tmp_path / "table.md"
    command = [sys.executable, FOLDER / "train_gpu_bench.py", "--server", server_binary()]
    command += ["--device", "cpu", "--layers", "1", "--steps", "2", "--seconds", "0"]
    command += ["--output", table]
    result = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert result.returncode == 0, result.stderr
    # However little time there is, one round.
    assert "; 1 rounds." in result.stdout
    assert "| ours, every step |" in result.stdout
    assert table.read_text() == result.stdout


@pytest.mark.parametrize(
    "line",
    [
        "torch_peer.py",
        "foreach_peer.py --by foreach --device cpu",
        "foreach_peer.py --by loop --device cpu",
        "ray_peer.py",
        "save_peer.py --by torch",
        "save_peer.py --by safetensors --sync",
        "save_peer.py --by dcp",
    ],
)
def test_peer_runs(line: str, tmp_path: pathlib.Path) -> None:
    name, *flags = line.split()
    if name == "save_peer.py":
        flags += ["--folder", str(tmp_path / "saved")]
    python = pathlib.Path(sys.executable)
    if name == "ray_peer.py":
        python = BENCH_PYTHON
        if not python.exists():
            pytest.skip("no build/venv-bench: deploy/setup.sh --bench makes it")
    command = [python, FOLDER / "peers" / name, "--megabytes", "4", "--tensors", "10", *flags]
    result = subprocess.run(
        command, input="round\nround\n", capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    pids, *seconds = result.stdout.splitlines()
    assert int(pids.split()[0]) > 0
    assert len(seconds) == 2 and all(float(text) > 0 for text in seconds)


ROW: dict[str, Any] = {
    "key": "push",
    "name": "a push",
    "unit": "GB/s",
    "ours": 6.6,
    "peer_name": "a socket",
    "peer": 6.0,
    "ratio": 1.1,
    "ratio_min": 0.9,
    "ratio_max": 1.2,
    "goal": 1.0,
    "goal_kind": "at least",
    "met": True,
    "statistic": "median",
    "missing": "",
    "rounds": 9,
    "cpu_client_s_per_gb": 0.14,
    "cpu_server_s_per_gb": 0.13,
}
NOT_THERE = {"peer": None, "ratio": None, "met": None, "missing": "peer: no Ray here"}


def test_report_has_every_row(tmp_path: pathlib.Path) -> None:
    rows = tmp_path / "rows.jsonl"
    absent = ROW | NOT_THERE | {"key": "ray", "name": "another push"}
    rows.write_text("".join(json.dumps(row) + "\n" for row in (ROW, absent)))
    command = [sys.executable, FOLDER / "report.py", rows, tmp_path]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == (tmp_path / "report.md").read_text()
    assert "| 1.100 (0.900 - 1.200) | at least 1 | yes | 0.14 + 0.13 |" in result.stdout
    assert "another push: missing. peer: no Ray here." in result.stdout
    assert [row["met"] for row in json.loads((tmp_path / "report.json").read_text())] == [
        True,
        None,
    ]
