# SPDX-License-Identifier: Apache-2.0
"""The thread that joins a run again, when its trainer closes meanwhile."""

from __future__ import annotations

import pytest
from ema_client._away import Link
from ema_client._run import Joined


class FakeRun:
    def __init__(self, on_close=lambda: None) -> None:
        self.is_closed = False
        self._on_close = on_close

    def wait_ready(self, timeout_s: float) -> None:
        pass

    def committed_as(self, step: int, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        self._on_close()
        self.is_closed = True


@pytest.mark.parametrize("closes", [False, True], ids=["goes on", "closes"])
def test_a_run_that_is_joined_again(closes):
    came_back = []
    link = Link("m", came_back.append)
    new = FakeRun()
    at_close = []
    old = FakeRun(lambda: at_close.append(link.run))

    def open_run(timeout_s: float) -> FakeRun:
        if closes:
            link._stop.set()  # As by a close() that does not wait any longer.
        return new

    link.take(Joined(old, open_run, "launch", 0))
    link.go_away(1, None)
    assert link._thread is not None
    link._thread.join(30)
    assert at_close == [new]
    assert old.is_closed
    assert new.is_closed == closes
    assert came_back == ([] if closes else [new])
    assert link.is_away == closes
