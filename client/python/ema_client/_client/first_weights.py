# SPDX-License-Identifier: Apache-2.0
"""How much of an average is still the weights with which it began: much, if the training is short for
its schedule."""

from __future__ import annotations

import dataclasses
import logging
import math
import re

from ema_client._client.training_time import TIME_UNITS, TrainingTime
from ema_client._client.types import TrackVersion, Version

_logger = logging.getLogger(__name__)

# The largest share without a warning.
_MOST_SHARE = 0.1
_LENGTH = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)([a-z]+)")
# Fields of the rules by which an average may lag behind.
_RULES = {"half_life", "smoothing", "ramp_ratio", "inv_gamma", "ramp", "exp_ramp", "decays"}
# By model, track and incarnation.
_warned: set[tuple[str, str, int]] = set()


def schedule_of(record: TrackVersion) -> dict[str, str]:
    """The track's schedule, as text by field."""
    # Options and tensor rules follow the schedule.
    fields = record.config.partition("; ")[0].split(", ")
    return {name: value for name, _, value in (field.partition("=") for field in fields)}


def share_of_first_weights(record: TrackVersion, time: TrainingTime) -> float | None:
    """The weight that a track's first weights have in the average at `time`, supposing that all
    updates came as regularly as the last one. Loops end early where it is below `_MOST_SHARE`, and
    then return a value below that.

    None: the track is no average yet, or a copy; or it cannot lag behind in this way: the mean of all
    weights, the power function, and averages that begin with zeros.
    """
    fields = schedule_of(record)
    rule = _RULES & fields.keys()
    if record.averaged_count == 0 or not rule or {"debias", "zero_init"} & fields.keys():
        return None
    half_life = _length(fields.get("half_life"))
    interval = _length(fields.get("update_interval")) or (1.0, half_life[1] if half_life else "ba")
    unit = half_life[1] if half_life else interval[1]
    now = getattr(time, TIME_UNITS.get(unit, ""), None)
    if now is None:
        return None
    start = _length(fields.get("ema_start")) or (0.0, unit)
    moves = record.averaged_count - 1  # The first update set the first weights.
    if moves == 0:
        return 1.0
    age = max(0.0, now - start[0]) if start[1] == unit else None
    longest = (now if age is None else age) / moves
    step = min(longest, max(interval[0], record.elapsed)) if interval[1] == unit else longest
    if "smoothing" in fields:
        return float(fields["smoothing"]) ** moves
    if half_life and "ramp_ratio" not in fields:
        return float(2 ** (-moves * step / half_life[0]))
    table = _Table.of(fields, time)
    share = 1.0
    for move in range(1, moves + 1):
        left = (moves - move) * step
        if table:
            share *= table.decay(left / now if now else 0.0)
        else:
            then = move * step if age is None else age - left
            share *= _decay(fields, half_life[0] if half_life else math.inf, step, then)
        if share < _MOST_SHARE:
            break
    return share


def _decay(fields: dict[str, str], half_life: float, step: float, age: float) -> float:
    """The decay of an update by a rule with a warm-up."""
    if "ramp_ratio" in fields:
        length = min(half_life, float(fields["ramp_ratio"]) * age)
        return float(2 ** (-step / length)) if length > 0 else 0.0
    position = age - 1 + float(fields.get("count_offset", 0))
    if position <= 0:
        return 0.0
    if "exp_ramp" in fields:
        most = float(fields.get("max_decay", 0.9999))
        return most * -math.expm1(-position / float(fields["exp_ramp"]))
    if "ramp" in fields:
        decay = (1 + position) / (float(fields["ramp"]) + position)
    else:
        power = float(fields.get("power", 2 / 3))
        decay = 1 - (1 + position / float(fields["inv_gamma"])) ** -power
    least, most = float(fields.get("min_decay", 0)), float(fields.get("max_decay", 0.9999))
    return min(max(decay, least), most)


@dataclasses.dataclass(frozen=True)
class _Table:
    """The points of a decay that depends on the training time: pairs of a time and a decay.

    Attributes:
        now: the training time, in the unit of the points.
    """

    points: list[tuple[float, float]]
    is_cosine: bool
    now: float

    @classmethod
    def of(cls, fields: dict[str, str], time: TrainingTime) -> _Table | None:
        """None: the schedule has no table."""
        points: list[tuple[float, float]] = []
        now = 0.0
        for point in fields.get("decays", "").split():
            text, _, decay = point.partition(":")
            length = _length(text)
            if length is None:
                return None
            points.append((length[0], float(decay)))
            now = getattr(time, TIME_UNITS[length[1]]) or 0.0
        return cls(points, fields.get("decays_shape") == "cosine", now) if points else None

    def decay(self, before: float) -> float:
        """The decay at an earlier time. `before`: how much earlier, as a share of the time until now."""
        time = self.now * (1 - before)
        passed = [point for point in self.points if point[0] <= time]
        coming = self.points[len(passed) :]
        if not passed or not coming:
            return passed[-1][1] if passed else coming[0][1]
        (begin, first), (end, last) = passed[-1], coming[0]
        share = (time - begin) / (end - begin)
        if self.is_cosine:
            share = (1 - math.cos(math.pi * share)) / 2
        return first + share * (last - first)


def _length(text: str | None) -> tuple[float, str] | None:
    match = _LENGTH.fullmatch(text or "")
    return None if match is None else (float(match[1]), match[2])


def warn_of_first_weights(model_name: str, version: Version, track: str) -> None:
    """Warns, once for each average, if its first weights have a large share in the version."""
    record = version.tracks.get(track)
    key = (model_name, track, version.incarnation)
    # After its first update, the average is the weights of that step: it does not lag behind them.
    if record is None or record.averaged_count < 2 or key in _warned:
        return
    share = share_of_first_weights(record, version.time)
    if share is None or share <= _MOST_SHARE:
        return
    _warned.add(key)
    _logger.warning(
        'model "%s": track "%s": at step %d, %.0f %% of the average are still its first weights, because '
        'the training is short for this schedule: %s. See client/docs/schedules.md, "Choose a schedule '
        'in one minute"',
        model_name,
        track,
        version.step,
        100 * share,
        _advice(schedule_of(record)),
    )


def _advice(fields: dict[str, str]) -> str:
    if "ramp_ratio" in fields:
        return "give a smaller ramp_ratio, such as ramp_ratio=0.1"
    if "half_life" in fields:
        return (
            f'half_life="{fields["half_life"]}", ramp_ratio=0.1 shortens it while training is young'
        )
    if "smoothing" in fields:
        return (
            f"ramp=10, max_decay={fields['smoothing']} in place of the constant decay keeps less while "
            "training is young"
        )
    return "evaluate later, or choose an interval or a warm-up that is shorter"
