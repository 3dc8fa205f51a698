# SPDX-License-Identifier: Apache-2.0
"""That the Python benchmarks run, not how fast."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("name", ["update_bench.py", "evaluate_bench.py"])
def test_runs(name: str) -> None:
    command = [sys.executable, FOLDER / name, "--quick", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert "loop" in result.stdout
