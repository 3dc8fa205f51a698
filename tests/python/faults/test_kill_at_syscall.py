# SPDX-License-Identifier: Apache-2.0
"""A checkpoint store is killed at every single system call that touches a file; or, if this is no campaign, at some.

At each of them a real process on a real disk ends by SIGKILL, as it enters the call: in a save, a rollback, a
change of labels, a removal, a start. Then what is recovered is the version before or the one after, its digest
right; all that is on the disk is whole, and what has a label is there; recovering again finds the same; nothing
temporary is left; and training goes on from there.
"""

from __future__ import annotations

import pathlib
import shutil
import signal

import pytest
from checkpoint_victim import CASES, Case, Expected, all_points, live, live_traced, prepare
from system_calls import Point, for_each, kill_at, why_no_strace
from testing import sample

# How long a sample of each case takes.
SAMPLE_S = 5

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.timeout(900),
    pytest.mark.skipif(why_no_strace() != "", reason=why_no_strace() or "strace works"),
]


def check_killed_at(
    point: Point, case: Case, template: pathlib.Path, data: pathlib.Path, expected: Expected
) -> None:
    shutil.copytree(template, data)
    killed = live_traced(data, case.mode, *kill_at(point))
    assert killed.code == -signal.SIGKILL, f"it was not killed: {killed}"

    first = live(data, "recover")
    expected.check(first, killed.is_done)
    second = live(data, "recover")
    assert second == first
    assert (second.checkpoints, second.labels) == (first.checkpoints, first.labels)
    # Nothing that a kill leaves looks like a checkpoint without being one.
    assert second.corrupt == 0
    assert first.corrupt <= (1 if case.after_accident else 0)
    assert second.incarnation > first.incarnation
    left = [path for path in data.rglob("*") if path.name.startswith(".tmp-")]
    assert not left, left
    # And the training goes on as if nothing had been.
    assert live(data, "save") == expected.next[first]
    third = live(data, "recover")
    assert (third, third.labels) == (expected.next[first], first.labels)
    shutil.rmtree(data)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_killed_at_every_file_call(tmp_path, case):
    template = tmp_path / "template"
    expected = prepare(template, case)
    points = all_points(template, case, tmp_path)
    checked, problems = for_each(
        sample(points, SAMPLE_S),
        lambda point, number: check_killed_at(
            point, case, template, tmp_path / f"data-{number}", expected
        ),
    )
    print(f"{case.name}: killed at {checked} of {len(points)} system calls")
    assert not problems, "\n".join(problems)
