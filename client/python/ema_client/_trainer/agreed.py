# SPDX-License-Identifier: Apache-2.0
"""Arguments of `attach` that must be the same on all ranks."""

from __future__ import annotations

import dataclasses
import os.path
from collections.abc import Mapping, Sequence

from ema_client import _ema
from ema_client._client.arrays import some
from ema_client._errors import InvalidArgumentError

# Of a value in a message.
_SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Arguments:
    """What one rank was given, as text. Texts of equal values are equal on all ranks.

    Attributes:
        values: by argument.
        tracks: what `of_tracks` make together: there are several ways to write the same.
        of_tracks: as they were written; a preset's own arguments by their names, if there are any.
    """

    values: dict[str, str]
    tracks: str
    of_tracks: dict[str, str]

    @classmethod
    def of(
        cls,
        values: Mapping[str, object],
        tracks: Sequence[_ema.Track],
        of_tracks: Mapping[str, object],
    ) -> Arguments:
        return cls(
            {name: _text_of(value) for name, value in values.items()},
            repr(sorted(map(_text_of_track, tracks))),
            {name: _text_of(value) for name, value in of_tracks.items()},
        )


def check_agreed(ranks: Sequence[Arguments]) -> None:
    """InvalidArgumentError, the same on all ranks: names the arguments that differ, and where."""
    problems = _differences([one.values for one in ranks])
    if any(one.tracks != ranks[0].tracks for one in ranks):
        problems += _differences([one.of_tracks for one in ranks]) or _differences(
            [{"what the tracks are made of": one.tracks} for one in ranks]
        )
    if problems:
        raise InvalidArgumentError(
            f"arguments of attach() that must be the same on all ranks: {'; '.join(problems)}"
        )


def _differences(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    problems = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        where: dict[str, list[str]] = {}
        for rank, values in enumerate(ranks):
            where.setdefault(values.get(name, "not given"), []).append(str(rank))
        if len(where) > 1:
            at = len(os.path.commonprefix(list(where)))
            texts = [f"{_part_of(text, at)} on rank {some(held)}" for text, held in where.items()]
            problems.append(f"{name} is {', '.join(texts)}")
    return problems


def _part_of(text: str, at: int) -> str:
    """What is shown of a text whose interest is `at` a place: from the beginning, if that is near."""
    begin = max(0, at - _SHOWN_CHARACTERS // 2)
    end = begin + _SHOWN_CHARACTERS
    return f"{'...' if begin > 0 else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _text_of(value: object) -> str:
    if isinstance(value, (set, frozenset)):  # Whose order is each process's own.
        return repr(sorted(value, key=repr))
    return repr(float(value) if type(value) is int else value)


def _text_of_track(track: _ema.Track) -> str:
    rules = [
        (pattern, action, schedule and sorted(schedule.to_fields().items()))
        for pattern, action, schedule in track.tensor_rules
    ]
    fields = sorted(track.schedule.to_fields().items())
    rest = track.buffers, track.compensated, track.paused, track.snapshot_interval
    return repr((track.name, fields, rules, *rest))
