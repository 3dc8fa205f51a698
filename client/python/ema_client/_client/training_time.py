# SPDX-License-Identifier: Apache-2.0
"""Training time: how far training has come, and the units in which that is said."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Union

from ema_client._errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class TrainingTime:
    """How far training has come, in every unit that the trainer counts.

    Attributes:
        batch, epoch, sample, token, iteration: counts.
        progress: share of the whole training, 0 to 1 (unit "dur").
        seconds: time spent training; the same on all ranks.
    """

    batch: int | None = None
    epoch: int | None = None
    sample: int | None = None
    token: int | None = None
    iteration: int | None = None
    progress: float | None = None
    seconds: float | None = None


#: A training time as an argument. A mapping's keys are TrainingTime's attributes, or suffixes such
#: as "ep". None: the step is the batch.
TimeLike = Union[TrainingTime, Mapping[str, float], None]

#: TrainingTime's attributes, by the suffixes of times such as "2ep". Both may be keys of a training
#: time.
TIME_UNITS = {
    "ba": "batch",
    "ep": "epoch",
    "sp": "sample",
    "tok": "token",
    "iter": "iteration",
    "dur": "progress",
    "sec": "seconds",
}


def time_dict(time: TimeLike, *, step: int) -> dict[str, float]:
    """The training time in the form that the extension module takes."""
    if time is None:
        return {"batch": step}
    if isinstance(time, TrainingTime):
        given: Mapping[str, float | None] = dataclasses.asdict(time)
    elif isinstance(time, Mapping):
        given = time
    else:
        raise InvalidArgumentError(
            f'time {time!r}: must be a TrainingTime, or numbers by unit, such as {{"batch": {step}}}'
        )
    fields: dict[str, float] = {}
    for unit, value in given.items():
        name = TIME_UNITS.get(unit, unit)
        if name in fields:
            raise InvalidArgumentError(f'time {time!r}: "{name}" is given twice', reason="BAD_TIME")
        if value is not None or not isinstance(time, TrainingTime):
            fields[name] = value  # type: ignore[assignment]
    return fields


def time_after(time_of: Callable[[int], TimeLike] | None, step: int) -> dict[str, float]:
    """The training time after `step` steps. `time_of`: the `time` of `attach`; the steps are
    batches unless it returns "batch"."""
    given = None if time_of is None else time_of(step)
    return {"batch": step, **time_dict(given, step=step)}
