# SPDX-License-Identifier: Apache-2.0
"""How the scripts of tests count: tests/tools/checks.sh and sum_results.py."""

from __future__ import annotations

import pathlib
import subprocess

import pytest
from server_process import ROOT

SCRIPT = """
source deploy/common.sh
source tests/tools/checks.sh
results=$1
eval "$2"
python3 tests/tools/sum_results.py "$results"
"""


def run(folder: pathlib.Path, checks: str) -> tuple[int, list[str]]:
    """Returns the exit status, and what the sum says."""
    command = ["bash", "-uc", SCRIPT, "checks", folder, checks]
    result = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=False
    )
    lines = result.stdout.splitlines()
    return result.returncode, [line for line in lines if not line.startswith(("checks:", "  | "))]


@pytest.mark.parametrize(
    ("checks", "status", "summary"),
    [
        ("check a true", 0, ["1 passed, 0 failed, 0 skipped"]),
        ("check a true; check b false", 1, ["failed: b", "1 passed, 1 failed, 0 skipped"]),
        (
            "check a true; record skipped 'b: why'",
            0,
            ["skipped: b: why", "1 passed, 0 failed, 1 skipped"],
        ),
        (
            "check a true; check b timeout 0.1 sleep 30",
            1,
            ["cut off: b", "1 passed, 0 failed, 0 skipped, 1 cut off"],
        ),
        (
            "check a true; check b timeout --signal KILL 0.1 sleep 30",
            1,
            ["cut off: b", "1 passed, 0 failed, 0 skipped, 1 cut off"],
        ),
        (
            "check a true; report b timeout 0.1 sleep 30",
            1,
            ["cut off: b tests", "1 passed, 0 failed, 0 skipped, 1 cut off"],
        ),
        (
            "check a true; report b true",
            1,
            ["failed: b tests wrote no report", "1 passed, 1 failed, 0 skipped"],
        ),
    ],
)
def test_a_verdict(tmp_path: pathlib.Path, checks: str, status: int, summary: list[str]) -> None:
    assert run(tmp_path, checks) == (status, summary)


def test_a_report_is_of_tests_that_ran(tmp_path: pathlib.Path) -> None:
    """One without any has failed, and so has a program that ends badly behind a good one."""
    (tmp_path / "none.xml").write_text("<testsuites/>")
    (tmp_path / "one.xml").write_text('<testsuites><testcase name="t"/></testsuites>')
    status, summary = run(tmp_path, "report none true; report one false")
    assert status == 1
    assert summary == [
        "failed: one tests ended with status 1",
        "failed: none: ran no test",
        "1 passed, 2 failed, 0 skipped",
    ]
