#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Sums the reports of one test run: `N passed, N failed, N skipped`, and `N cut off` if anything
was, after what failed and why something was skipped.

Usage: sum_results.py FOLDER, with the JUnit reports of ctest, GoogleTest and pytest, and checks.tsv,
each line of which is the verdict and the name of one other check. To ctest a GoogleTest suite is one
test: the reports of the suites in NAME.xml are in the folder NAME, and the tests in them are counted.

Exits with 1 if anything failed or was cut off, or nothing passed.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Iterator, NamedTuple

PASSED, FAILED, SKIPPED, CUT_OFF = "passed", "failed", "skipped", "cut off"
SHOWN_CHARACTERS = 600  # Of why a test failed: its log may be on a machine that is gone.


class Result(NamedTuple):
    name: str
    verdict: str
    reason: str = ""


def skip_reason(case: ElementTree.Element, skipped: ElementTree.Element) -> str:
    # ctest only knows that GoogleTest skipped; why stands in the line after "file:line: Skipped".
    said = re.search(r": Skipped\n(.+)", case.findtext("system-out") or "")
    if said:
        return said.group(1)
    # GoogleTest's own reports have why behind "file:line".
    message = re.sub(r"^.+:\d+\n", "", skipped.get("message", ""))
    return "no reason given" if message.startswith("SKIP_") else message


def read_case(case: ElementTree.Element, suite: str) -> Result:
    name = case.get("name", "?")
    if case.get("classname", name) != name:
        name = f"{case.get('classname')}.{name}"
    name = f"{suite}: {name}"
    for problem in case.findall("failure") + case.findall("error"):
        lines = problem.get("message", "").split("\n")
        reason = " | ".join(line.strip() for line in lines if line.strip())
        return Result(name, FAILED, reason[:SHOWN_CHARACTERS])
    skipped = case.find("skipped")
    if skipped is not None:
        # ctest calls a test "skipped", too, that it could not start.
        could_run = case.get("status") != "notrun" or "SKIP_" in skipped.get("message", "")
        return Result(name, SKIPPED if could_run else FAILED, skip_reason(case, skipped))
    if case.get("status") == "disabled":
        return Result(name, SKIPPED, "disabled")
    return Result(name, PASSED)


def read_entry(case: ElementTree.Element, report: Path) -> Iterator[Result]:
    """Yields the results of one test of ctest, of whose own tests there may be a report."""
    suite = report.parent.name
    entry = read_case(case, suite)
    suffix = ".OnFake" if entry.name.endswith(".OnFake") else ""
    if not report.exists():  # It is no GoogleTest suite, or it ended before its last test.
        yield entry
        return
    results = [read_case(test, suite) for test in ElementTree.parse(report).iter("testcase")]
    yield from (result._replace(name=result.name + suffix) for result in results)
    # A process can also fail after its last test.
    if entry.verdict == FAILED and FAILED not in [result.verdict for result in results]:
        yield entry


def read_results(folder: Path) -> Iterator[Result]:
    checks = folder / "checks.tsv"
    for line in checks.read_text().splitlines() if checks.exists() else []:
        verdict, name = line.split("\t")
        yield Result(name, verdict)
    for report in sorted(folder.glob("*.xml")):
        suite = report.stem
        try:
            cases = list(ElementTree.parse(report).iter("testcase"))
        except ElementTree.ParseError as error:
            yield Result(suite, FAILED, f"broken report: {error}")
            continue
        if not cases:
            yield Result(suite, FAILED, "ran no test")
        for case in cases:
            name = case.get("name", "").replace("/", ".")
            yield from read_entry(case, folder / suite / f"{name}.xml")


def main() -> int:
    results = list(read_results(Path(sys.argv[1])))
    for result in results:
        if result.verdict != PASSED:
            print(
                f"{result.verdict}: {result.name}" + (f": {result.reason}" if result.reason else "")
            )
    verdicts = [result.verdict for result in results]
    text = ", ".join(f"{verdicts.count(v)} {v}" for v in (PASSED, FAILED, SKIPPED))
    print(text + (f", {verdicts.count(CUT_OFF)} {CUT_OFF}" if CUT_OFF in verdicts else ""))
    return 1 if FAILED in verdicts or CUT_OFF in verdicts or PASSED not in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
