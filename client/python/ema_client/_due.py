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
        self._states: dict[str, list[_ema.ScheduleState]] = {}
        self._track_ids: dict[str, int] = {}
        self._revision = 0
        self._tracks: list[_ema.Track] = []
        self.adopt()

    @property
    def tracks(self) -> list[_ema.Track]:
        return self._tracks

    def go_on(self, run: Run) -> None:
        """By another run of the same trainer. The server may have been restarted, and counts anew."""
        self._run = run
        self._revision = 0

    def time(self, step: int) -> dict[str, float]:
        """The training time after so many steps."""
        time_like = None if self._time_of is None else self._time_of(step)
        return time_dict(time_like, step=step)

    def at(self, now: dict[str, float]) -> list[_ema.Track]:
        """Tracks that a push would update; if all are paused, those that it would update else."""
        active = [track for track in self._tracks if not track.paused] or self._tracks
        return [
            track
            for track in active
            if any(due for due, *_ in track.plan(self._states[track.name], now))
        ]

    def count(self, tracks: list[_ema.Track], now: dict[str, float]) -> None:
        """These are tried now."""
        for track in tracks:
            self._states[track.name] = track.next(self._states[track.name], now)

    def adopt(self) -> bool:
        """Takes over what UpdateModel has changed, as far as this rank knows. True: something."""
        revision, entries = self._run.plan
        if revision == self._revision:
            return False
        self._revision = revision
        self._tracks = [track for track, _, _ in entries]
        ids = {track.name: track_id for track, _, track_id in entries}
        self._states = {
            track.name: (
                self._states[track.name] if self._track_ids.get(track.name) == track_id else state
            )
            for track, state, track_id in entries
        }
        self._track_ids = ids
        return True

    def refresh(self) -> None:
        """Asks for the plan: with every track paused, no reply to a push brings it."""
        try:
            self._run.refresh_plan(timeout_s=_REFRESH_TIMEOUT_S)
        except EmaError as error:
            _logger.debug("no new plan: %s", error)
