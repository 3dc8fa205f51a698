# SPDX-License-Identifier: Apache-2.0
"""Which tracks are due at a step, as far as one rank of a trainer knows."""

from __future__ import annotations

import logging
from collections.abc import Callable

from ema_client import _ema
from ema_client._errors import EmaError
from ema_client._run import Run
from ema_client._types import TimeLike, time_dict

_logger = logging.getLogger(__name__)

# How long a trainer whose tracks are all paused waits for an answer whether they still are.
_REFRESH_TIMEOUT_S = 1.0


class DueTracks:
    """The tracks of a run's plan, and where each stands as far as this rank has tried.

    Counted here and not taken from the server's replies: all ranks must try at the same steps, whatever
    became of the pushes before.
    """

    def __init__(self, run: Run, time_of: Callable[[int], TimeLike] | None) -> None:
        self._run = run
        self._time_of = time_of
        self._tracks = _ema.DueTracks()
        self.adopt()

    @property
    def tracks(self) -> list[_ema.Track]:
        return self._tracks.tracks

    def go_on(self, run: Run) -> None:
        """By another run of the same trainer. The server may have been restarted, and counts anew."""
        self._run = run
        self._tracks.go_on()

    def time(self, step: int) -> dict[str, float]:
        """The training time after so many steps."""
        time_like = None if self._time_of is None else self._time_of(step)
        return time_dict(time_like, step=step)

    def at(self, now: dict[str, float]) -> list[_ema.DueTrack]:
        """Tracks that a push would update; if all are paused, those that it would update else."""
        return self._tracks.at(now)

    def count(self, due: list[_ema.DueTrack], now: dict[str, float]) -> None:
        """These are tried now. They must be of `at(now)` since the last `adopt`."""
        self._tracks.count(due, now)

    def are_paused(self, due: list[_ema.DueTrack]) -> bool:
        """Whether a push would update none of them. They must be as for `count`."""
        return self._tracks.are_paused(due)

    def adopt(self) -> None:
        """Takes over what UpdateModel has changed, as far as this rank knows."""
        self._tracks.adopt(self._run._get())

    def refresh(self) -> None:
        """Asks for the plan: with every track paused, no reply to a push brings it."""
        try:
            self._run.refresh_plan(timeout_s=_REFRESH_TIMEOUT_S)
        except EmaError as error:
            _logger.debug("no new plan: %s", error)
