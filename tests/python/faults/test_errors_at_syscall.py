# SPDX-License-Identifier: Apache-2.0
"""Every single system call that touches a file fails once: the disk has an error, is full, or is read-only.

If this is no campaign, only some of the calls fail.

Whatever fails, the version before or the one after is found later, nothing good is set aside, and a save says
what it was. A full disk heals by itself; a failed fsync leaves the store read-only.
"""

from __future__ import annotations

import pathlib
import re
import shutil

import pytest
from checkpoint_victim import CASES, Case, Expected, all_points, live, live_traced, prepare
from system_calls import Point, fail_at, for_each, is_of_data, why_no_strace
from testing import sample

# How long a sample of each case takes.
SAMPLE_S = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_strace() != "", reason=why_no_strace() or "strace works"),
]

# What a save may answer when a call fails so. A call that finds the error may be one that a save can
# do without; then it is OK.
ANSWERS = {
    "EIO": {"UNAVAILABLE DISK_FAILED", "UNAVAILABLE STORE_READ_ONLY"},
    "ENOSPC": {"RESOURCE_EXHAUSTED DISK_FULL"},
    "EDQUOT": {"RESOURCE_EXHAUSTED DISK_FULL"},
    "EROFS": {"UNAVAILABLE STORE_READ_ONLY"},
}


def is_sync(point: Point) -> bool:
    """An fsync, or the opening of a folder for one (to list it is another thing: that does not block)."""
    is_folder = "O_DIRECTORY" in point.text and "O_NONBLOCK" not in point.text
    return point.name in ("fsync", "fdatasync") or (point.name == "openat" and is_folder)


def check_failed_at(
    point: Point,
    error: str,
    case: Case,
    template: pathlib.Path,
    data: pathlib.Path,
    expected: Expected,
) -> None:
    shutil.copytree(template, data)
    end = live_traced(data, case.mode, *fail_at(point, error))
    assert end.code in (0, 1), end
    failed = re.search(r"failed=(.*)", end.output)
    again = re.search(r"again=(.*)", end.output)
    if failed and case.has_helper:
        assert failed[1].startswith(("UNAVAILABLE ", "RESOURCE_EXHAUSTED ")), end.output
    elif failed:
        assert failed[1] in ANSWERS[error], end.output
        is_latched = is_sync(point) and error in ("EIO", "EROFS")
        assert again is not None
        assert again[1].split()[0] == ("UNAVAILABLE" if is_latched else "OK"), end.output
        if is_latched:
            assert failed[1] == again[1] == "UNAVAILABLE STORE_READ_ONLY"

    found = live(data, "recover")
    expected.check(found, end.is_done, removes=case.mode == "remove")
    assert live(data, "recover") == found
    # That it cannot be read, or written, now is no reason to set it aside.
    aside = list(data.rglob(".corrupt-*"))
    assert len(aside) == (1 if case.after_accident else 0), aside
    assert not list(data.rglob(".tmp-*"))
    shutil.rmtree(data)


@pytest.mark.parametrize("error", ANSWERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_every_file_call_fails_once(tmp_path, case, error):
    template = tmp_path / "template"
    expected = prepare(template, case)
    points = all_points(template, case, tmp_path)
    points = [point for point in points if is_of_data(point.name, point.text)]
    checked, problems = for_each(
        sample(points, SAMPLE_S),
        lambda point, number: check_failed_at(
            point, error, case, template, tmp_path / f"data-{number}", expected
        ),
    )
    print(f"{case.name}: {error} at {checked} of {len(points)} system calls")
    assert not problems, "\n".join(problems)
