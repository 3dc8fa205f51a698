# SPDX-License-Identifier: Apache-2.0
"""The arguments of `attach`: their checks, and whether all ranks were given the same."""

from __future__ import annotations

import dataclasses
import operator
import os.path
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, get_args

from ema_client import _ema
from ema_client._client.arrays import some
from ema_client._client.files import FilesLike
from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.timeouts import check_seconds, check_timeout
from ema_client._client.training_time import TimeLike
from ema_client._client.types import NonFinite, WireDtype
from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import NamedTensors
from ema_client._tracks.track import TensorRules, TrackLike
from ema_client._trainer.buffers import AveragedBuffers

#: The default of `attach(max_outage_s=)`.
MAX_OUTAGE_S = 120.0

OnError = Literal["skip", "wait", "raise"]
Source = Literal["parameters", "master"]
Existing = Literal["error", "new", "continue"]


class RunArguments(TypedDict, total=False):
    """The arguments of `attach` that do not belong to the schedule, for functions that pass them on.
    `attach` itself lists them with their defaults."""

    tracks: Mapping[str, TrackLike] | None
    time: Callable[[int], TimeLike] | None
    tensor_rules: TensorRules | None
    buffers: str | None
    dtype: Any
    paused: bool | None
    snapshot_interval: str | None
    non_finite: NonFinite
    wire_dtype: WireDtype
    source: Source
    rename: Callable[[str], str] | None
    max_staging_bytes: int
    max_pinned_versions: int | None
    check: bool
    process_group: Any
    on_error: OnError | None
    timeout_s: float | None
    max_wait_s: float
    max_outage_s: float
    existing: Existing | None
    start_step: int | None
    keep_resumable: int
    files: FilesLike | None


@dataclasses.dataclass(frozen=True)
class PushOptions:
    """The arguments of `attach` that concern pushes."""

    model_name: str
    tensors_of: Callable[[], NamedTensors]
    time_of: Callable[[int], TimeLike] | None
    max_wait_s: float
    timeout_s: float
    on_error: OnError
    max_outage_s: float
    check: bool
    averaged_buffers: AveragedBuffers
    non_finite: NonFinite


def check_values(given: Mapping[str, Any]) -> None:
    """Checks those of these arguments of `attach` that no other code checks in time.

    Raises:
        InvalidArgumentError: names the argument, its value and what was expected.
    """
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)


def check_module(model: object) -> None:
    """InvalidArgumentError: not a torch.nn.Module."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model of type {_type_name(model)}: must be a torch.nn.Module")


def _count(least: int) -> Callable[[str, object], None]:
    def check(name: str, value: Any) -> None:
        try:
            if not isinstance(value, bool) and operator.index(value) >= least:
                return
        except TypeError:
            pass
        raise InvalidArgumentError(f"{name} {value!r}: must be a whole number, {least} or more")

    return check


def _one_of(words: tuple[str, ...]) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in words:
            *others, last = [f'"{word}"' for word in words]
            raise InvalidArgumentError(f"{name} {value!r}: must be {', '.join(others)} or {last}")

    return check


def _function(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidArgumentError(f"{name} {value!r}: must be a function")


def _bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} {value!r}: must be True or False")


def _tracks(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(
            f"{name} {value!r}: must be tracks by name, such as "
            '{"slow": "1000ba", "raw": "copy"}'
        )


def _preset(name: str, value: object) -> None:
    if not isinstance(value, (str, Mapping)):
        raise InvalidArgumentError(
            f'{name} {value!r}: must be a name such as "diffusers", or '
            '{"preset": "diffusers", "decay": 0.999}'
        )


def _or_none(check: Callable[[str, object], None]) -> Callable[[str, object], None]:
    return lambda name, value: None if value is None else check(name, value)


def _type_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


_CHECKS: dict[str, Callable[[str, object], None]] = {
    "preset": _or_none(_preset),
    "tracks": _or_none(_tracks),
    "non_finite": _one_of(get_args(NonFinite)),
    "wire_dtype": _one_of(get_args(WireDtype)),
    "source": _one_of(get_args(Source)),
    "max_staging_bytes": _count(STAGING_BYTES),
    "start_step": _or_none(_count(0)),
    "time": _or_none(_function),
    "rename": _or_none(_function),
    "max_pinned_versions": _or_none(_count(0)),
    "max_wait_s": check_seconds,
    "max_outage_s": check_seconds,
    "on_error": _or_none(_one_of(get_args(OnError))),
    "existing": _or_none(_one_of(get_args(Existing))),
    "timeout_s": _or_none(check_timeout),
    "keep_resumable": _count(1),
    "check": _bool,
}


# The most characters of a value in a message.
_SHOWN_CHARACTERS = 200


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of one rank, as text. Equal values have equal texts on all ranks.

    Attributes:
        values: by argument.
        tracks: the tracks that `of_tracks` describe. The same tracks can be written in several ways.
        of_tracks: the arguments for tracks, as given, and a preset's own arguments by their names.
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
    """InvalidArgumentError, the same on all ranks: names the arguments that differ, and the ranks."""
    problems = _differences([one.values for one in ranks])
    if any(one.tracks != ranks[0].tracks for one in ranks):
        problems += _differences([one.of_tracks for one in ranks]) or _differences(
            [{"the resulting tracks": one.tracks} for one in ranks]
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
    """The part of a text around position `at`, where it differs from the others."""
    begin = max(0, at - _SHOWN_CHARACTERS // 2)
    end = begin + _SHOWN_CHARACTERS
    return f"{'...' if begin > 0 else ''}{text[begin:end]}{'...' if end < len(text) else ''}"


def _text_of(value: object) -> str:
    if isinstance(value, (set, frozenset)):  # The order of a set differs between processes.
        return repr(sorted(value, key=repr))
    return repr(float(value) if type(value) is int else value)


def _text_of_track(track: _ema.Track) -> str:
    rules = [
        (pattern, action, schedule and sorted(schedule.to_fields().items()))
        for pattern, action, schedule in track.tensor_rules
    ]
    fields = sorted(track.schedule.to_fields().items())
    rest = track.buffers, track.dtype, track.paused, track.snapshot_interval
    return repr((track.name, fields, rules, *rest))
