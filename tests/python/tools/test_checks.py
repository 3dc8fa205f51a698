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


def test_the_tests_of_a_suite_are_counted(tmp_path: pathlib.Path) -> None:
    """To ctest a suite is one test; one that crashes has no report, or one of tests that all passed."""
    entries = [("Good", "run"), ("Typed/0", "run"), ("Crashed", "fail"), ("Leaks", "fail")]
    problem = {"run": "", "fail": "<failure message='Failed'/>"}
    (tmp_path / "cpp.xml").write_text(
        "<testsuite>"
        + "".join(
            f"<testcase name='{name}' classname='{name}' status='{status}'>{problem[status]}</testcase>"
            for name, status in entries
        )
        + "</testsuite>"
    )
    (tmp_path / "cpp").mkdir()
    passed = "<testcase name='A' classname='S' status='run'/>"
    skipped = "<testcase name='B' classname='S' status='run'><skipped message='f.cc:1&#x0A;no GPU'/></testcase>"
    for report, cases in (("Good", passed + skipped), ("Typed.0", passed), ("Leaks", passed)):
        (tmp_path / "cpp" / f"{report}.xml").write_text(f"<testsuites>{cases}</testsuites>")
    assert run(tmp_path, "true") == (
        1,
        [
            "skipped: cpp: S.B: no GPU",
            "failed: cpp: Crashed: Failed",
            "failed: cpp: Leaks: Failed",
            "3 passed, 2 failed, 1 skipped",
        ],
    )
