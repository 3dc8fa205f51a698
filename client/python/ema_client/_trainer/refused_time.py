# SPDX-License-Identifier: Apache-2.0
"""What is said of a training time at which a track cannot go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ema_client import _ema
from ema_client._client.types import Version
from ema_client._errors import InvalidArgumentError

_HINT = (
    ". The units of its half_life and update_interval have to be counted on from where the average stands: "
    "give them in batches, or attach(time=) that goes on from there"
)


def explained(
    error: InvalidArgumentError,
    model_name: str,
    tracks: Sequence[_ema.Track],
    now: Mapping[str, float],
    last: Version | None,
    *,
    is_behind: bool,
) -> InvalidArgumentError:
    """The same error, which says of which track it is and what helps.

    Args:
        now: the time that is refused.
        last: the newest version, if there is one.
        is_behind: the run was asked to begin before that, so the time is right.
    """
    problems = {}
    for track in tracks:
        try:
            track.plan(_state_at(last, track), dict(now))
        except InvalidArgumentError as its:
            problems[track.name] = its.args[0]
    # One that was not due at the newest version has an earlier time, and so another message.
    names = [name for name, its in problems.items() if its == error.args[0]] or list(problems)
    of_track = f'track "{names[0]}": ' if names else ""
    return InvalidArgumentError(
        f'model "{model_name}": {of_track}{error.args[0]}{"" if is_behind else _HINT}',
        reason=error.reason,
    )


def _state_at(last: Version | None, track: _ema.Track) -> _ema.TrackState:
    """As if the version had updated the track and each of its rules."""
    if last is None:
        return []
    then = {unit: value for unit, value in vars(last.time).items() if value is not None}
    schedule_count = 1 + sum(schedule is not None for *_, schedule in track.tensor_rules)
    return [_ema.ScheduleState.from_fields(1, 1, then, then)] * schedule_count
