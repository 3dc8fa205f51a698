# SPDX-License-Identifier: Apache-2.0
"""The values that calls take and return."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Union

from ema_client import _ema
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


#: What a call takes for a training time: None means that the step is the batch.
TimeLike = Union[TrainingTime, Mapping[str, float], None]


@dataclasses.dataclass(frozen=True)
class TrackVersion:
    """What one track did at one version.

    Attributes:
        weight: that was given to the pushed values, as it was applied (a float32); 1 is a copy.
        elapsed: training time since the track's update before, in its half-life's unit.
        update_count: updates since the track began, this one included.
        updated: False: the track was not due and is the same as in the version before.
    """

    weight: float
    elapsed: float
    update_count: int
    updated: bool


@dataclasses.dataclass(frozen=True)
class Version:
    """The record of one commit. Versions are ordered by (incarnation, number).

    Attributes:
        number: the model's count of commits, from 1.
        step: the trainer's step.
        incarnation: the server's life in which it was made; grows at each start.
        time: training time at the step.
        tracks: by name.
        run_epoch: the run that pushed it.
        commit_time: seconds since 1970, by the server's clock.
        skipped: from `watch` only: versions before this one whose records were gone.
    """

    number: int
    step: int
    incarnation: int
    time: TrainingTime
    tracks: Mapping[str, TrackVersion] = dataclasses.field(hash=False)
    run_epoch: int = 0
    commit_time: float = 0.0
    skipped: int = dataclasses.field(default=0, compare=False)


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One named array. `dtype` is a name that PyTorch and NumPy share, such as "float32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Track:
    """How one track averages: by half-life, by constant decay, or (with neither) as a copy.

    Attributes:
        half_life: training time until a contribution halves, such as "200ba" or "2ep".
        smoothing: share of the old average kept in each update, in [0, 1); never rescaled.
        update_interval: such as "5ba". None: the server's default, one unit of the half-life.
    """

    half_life: str | None = None
    smoothing: float | None = None
    update_interval: str | None = None

    @property
    def is_copy(self) -> bool:
        return self.half_life is None and self.smoothing is None


#: "copy", a half-life such as "200ba", a Track, or its fields as a dict.
TrackLike = Union[str, Track, Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class ModelInfo:
    """A model as the server has it.

    Attributes:
        tensors: in manifest order; empty in the result of `Client.models`.
        max_pinned_versions: versions that readers may hold at once.
        reserved_bytes: what the model can use at most of the server's memory.
        latest: the newest version; None before the first.
        run_epoch: the run that may push; 0 before the first.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    tracks: Mapping[str, Track] = dataclasses.field(hash=False)
    max_pinned_versions: int
    reserved_bytes: int
    latest: Version | None
    run_epoch: int


@dataclasses.dataclass(frozen=True)
class ListedVersion:
    """A version's record, and whether its weights can still be pulled."""

    version: Version
    available: bool


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A version on the server's disk; `name` is its folder in the model's."""

    version: Version
    name: str
    total_bytes: int


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rectangular region of tensor `name`: first element and size per dimension."""

    name: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class PushStats:
    """What a push has done so far.

    Attributes:
        total_bytes: of this rank.
        sent_bytes: handed to the network, resends included.
        stream_count: 1 if no connection broke.
        send_seconds: from the start to the last byte's leaving.
    """

    total_bytes: int
    sent_bytes: int
    stream_count: int
    send_seconds: float


class Weights(dict[str, Any]):
    """Pulled tensors by name, and which version and track they are."""

    def __init__(self, tensors: Mapping[str, Any], *, version: Version, track: str) -> None:
        super().__init__(tensors)
        self.version = version
        self.track = track


def version_from(fields: dict[str, Any], *, skipped: int = 0) -> Version:
    tracks = {
        name: TrackVersion(
            weight=weight, elapsed=elapsed, update_count=update_count, updated=updated
        )
        for name, (updated, weight, elapsed, update_count) in fields["tracks"].items()
    }
    return Version(
        number=fields["number"],
        step=fields["step"],
        incarnation=fields["incarnation"],
        time=TrainingTime(**fields["time"]),
        tracks=tracks,
        run_epoch=fields["run_epoch"],
        commit_time=fields["commit_time"],
        skipped=skipped,
    )


def model_from(fields: dict[str, Any]) -> ModelInfo:
    tracks = {name: track_from(schedule) for name, schedule in fields["tracks"]}
    latest = fields["latest"]
    return ModelInfo(
        name=fields["name"],
        tensors=tuple(specs_from(fields["tensors"])),
        tracks=tracks,
        max_pinned_versions=fields["max_pinned_versions"],
        reserved_bytes=fields["reserved_bytes"],
        latest=None if latest is None else version_from(latest),
        run_epoch=fields["run_epoch"],
    )


def specs_from(tuples: Sequence[_ema.Spec]) -> list[TensorSpec]:
    return [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tuples]


def track_from(schedule: _ema.Schedule) -> Track:
    half_life, smoothing, update_interval = schedule.fields()
    return Track(half_life=half_life, smoothing=smoothing, update_interval=update_interval)


def time_dict(time: TimeLike, *, step: int) -> dict[str, float]:
    """The time as the extension module takes it."""
    if time is None:
        return {"batch": step}
    if isinstance(time, TrainingTime):
        fields = dataclasses.asdict(time)
        return {unit: value for unit, value in fields.items() if value is not None}
    return dict(time)


def schedule_of(name: str, track: TrackLike, *, update_interval: str | None) -> _ema.Schedule:
    """The schedule of track `name`; `update_interval` is for tracks that set none."""
    if isinstance(track, Mapping):
        unknown = set(track) - {"half_life", "smoothing", "copy", "update_interval"}
        if unknown:
            raise InvalidArgumentError(
                f'track "{name}": unknown {", ".join(sorted(map(str, unknown)))}; there are '
                "half_life, smoothing, copy, update_interval",
                reason="BAD_SCHEDULE",
            )
        is_copy = bool(track.get("copy", False))
        half_life = track.get("half_life")
        smoothing = track.get("smoothing")
        own_interval = track.get("update_interval")
    elif isinstance(track, Track):
        is_copy = track.is_copy
        half_life, smoothing, own_interval = track.half_life, track.smoothing, track.update_interval
    else:
        # A bare number has no unit, which the parser says better.
        is_copy = track == "copy"
        half_life = None if is_copy else str(track)
        smoothing = None
        own_interval = None
    if [half_life is not None, smoothing is not None, is_copy].count(True) != 1:
        raise InvalidArgumentError(
            f'track "{name}": exactly one of half_life, smoothing and copy is needed',
            reason="BAD_SCHEDULE",
        )
    interval = own_interval if own_interval is not None else update_interval
    if interval is not None:
        interval = str(interval)
    if half_life is not None:
        return _ema.Schedule.half_life(str(half_life), interval)
    if smoothing is not None:
        return _ema.Schedule.constant_decay(float(smoothing), interval)
    return _ema.Schedule.copy(interval)
