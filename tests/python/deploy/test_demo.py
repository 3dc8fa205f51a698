# SPDX-License-Identifier: Apache-2.0
"""The demo in its short form."""

from __future__ import annotations

import json
import subprocess

import pytest
from server_process import ROOT


@pytest.mark.timeout(600)  # demo.sh builds first what has changed.
def test_the_short_demo_passes():
    result = subprocess.run(
        [ROOT / "deploy/demo.sh", "--short"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "demo: ok", result.stdout
    folder = ROOT / "build/demo-short"
    report = json.loads((folder / "report.json").read_text())
    assert set(report["tracks"]) == {"fast", "slow", "raw"}
    assert report["check"]["tensors_compared"] > 0
    assert all(error < 10 for error in report["check"]["float64_error"].values())
    for name in ("accuracy.png", "ema.safetensors"):
        assert (folder / name).stat().st_size > 1000
