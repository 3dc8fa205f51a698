# SPDX-License-Identifier: Apache-2.0
"""Training time as a trainer counts it, and units that tracks need and it does not count."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ema_client import _ema
from ema_client._errors import InvalidArgumentError
from ema_client._types import TIME_UNITS, TimeLike, time_dict

# What a trainer would write.
_EXAMPLES = {
    "batch": "step",
    "epoch": "step // steps_per_epoch",
    "sample": "step * batch_size",
    "token": "step * batch_tokens",
    "iteration": "step // steps_per_iteration",
    "progress": "step / total_steps",
    "seconds": "clock()",
}


def time_after(time_of: Callable[[int], TimeLike] | None, step: int) -> dict[str, float]:
    """After so many steps, which are the batches unless `time_of`, of `attach`, says otherwise."""
    given = None if time_of is None else time_of(step)
    return {"batch": step, **time_dict(given, step=step)}


def check_units(track: _ema.Track, now: Mapping[str, float]) -> None:
    """InvalidArgumentError: the track needs a unit that is not in `now`; says how to count it, if it is
    not wrong for another reason."""
    try:
        track.plan([], dict(now))
        return
    except InvalidArgumentError as raised:
        error = raised
    if not now.keys() <= set(TIME_UNITS.values()):
        raise error
    whole = {unit: 0.0 for unit in TIME_UNITS.values()} | dict(now)
    for unit in TIME_UNITS.values():
        if unit not in now and not _can_plan(track, {**whole, unit: None}):
            raise InvalidArgumentError(
                f'track "{track.name}": {error.args[0]}: give it by attach(time=), such as '
                f'time=lambda step: {{"{unit}": {_EXAMPLES[unit]}}}'
                + ", the same on all ranks" * (unit == "seconds"),
                reason=error.reason,
            )
    raise error


def _can_plan(track: _ema.Track, now: Mapping[str, float | None]) -> bool:
    try:
        track.plan([], {unit: value for unit, value in now.items() if value is not None})
    except InvalidArgumentError:
        return False
    return True
