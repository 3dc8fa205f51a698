# SPDX-License-Identifier: Apache-2.0
"""The types of arguments and results of calls."""

from __future__ import annotations

import collections
import dataclasses
import operator
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsIndex, Union

from ema_client import _ema
from ema_client._client.training_time import TimeLike, TrainingTime, time_dict
from ema_client._errors import InvalidArgumentError
from ema_client._tracks.track import Track, track_from


@dataclasses.dataclass(frozen=True)
class Tls:
    """PEM files for a server behind `emas://`. They are read for each new connection.

    Attributes:
        ca_file: the CAs that sign the server's certificate; empty: the system's.
        certificate_file, key_file: the client's certificate and key, if the server requires them.
    """

    ca_file: str | os.PathLike[str] = ""
    certificate_file: str | os.PathLike[str] = ""
    key_file: str | os.PathLike[str] = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (str, os.PathLike)):
                raise InvalidArgumentError(f"tls.{field.name} {value!r}: must be a path")

    @classmethod
    def from_environment(cls) -> Tls:
        """The files that EMA_TLS_CA, EMA_TLS_CERT and EMA_TLS_KEY name."""
        return cls(*(os.environ.get(f"EMA_TLS_{name}", "") for name in ("CA", "CERT", "KEY")))


#: The dtype in which floats are sent: their own, or float32 rounded to bfloat16, half the bytes.
WireDtype = Literal["as pushed", "bfloat16"]
#: How a step is handled if a pushed float is NaN or infinity: the step is rejected, the tensor
#: keeps its value in every track, or the value goes into the averages.
NonFinite = Literal["reject", "skip", "allow"]


@dataclasses.dataclass(frozen=True)
class TrackVersion:
    """What one track did at one version.

    Attributes:
        update_weight: weight of the pushed values, as it was applied (rounded to the track's dtype);
            1 is a copy, 0 leaves the average as it was.
        elapsed: training time since the track's previous update, in the unit of its half-life, or
            of its interval if it has none.
        update_count: updates since the track began, this one included.
        averaged_count: updates from `ema_start` on. 0: the track is not an average yet but,
            depending on before_start, the first or the latest weights.
        updated: False: the track was not due, or is paused, and is the same as in the previous
            version.
        window_steps: steps that the average covers: the steps since the track's previous update,
            divided by update_weight. 0 if not updated.
        config: the track's schedule and options as text.
        stall_gap: the average cannot come closer to a constant value than this share of it, because
            smaller changes are rounded away. 0 if copied.
        rules: the same for each tensor rule with a schedule of its own, by its pattern.
    """

    update_weight: float
    elapsed: float
    update_count: int
    updated: bool
    averaged_count: int = 0
    window_steps: float = 0.0
    config: str = ""
    stall_gap: float = 0.0
    rules: Mapping[str, TrackVersion] = dataclasses.field(default_factory=dict, hash=False)


@dataclasses.dataclass(frozen=True)
class TrackStatistics:
    """The norm of an average and its distance from the weights, at one version.

    Attributes:
        norm: L2 norm of all values that the track averages.
        distance: L2 norm of (raw - average) over the averaged tensors that a copy track has in the
            same version; `raw` are its values. None: there are none.
    """

    norm: float
    distance: float | None = None


@dataclasses.dataclass(frozen=True, repr=False)
class Version:
    """The record of one commit. Versions are ordered by (incarnation, number).

    Attributes:
        number: the model's count of commits, from 1.
        step: the trainer's step.
        incarnation: grows when the server restarts, when the model is created again, and, in a group of
            servers, when the model returns to a checkpoint.
        time: training time at the step.
        tracks: by name.
        run_epoch: epoch of the run that pushed it, or of the rollback that made it.
        commit_time: seconds since 1970, by the server's clock.
        skipped: from `watch` only: number of versions before this one that were missed, because the
            server has dropped their records.
        skipped_tensor_count: tensors that kept their values because pushed ones were not finite.
        skipped_tensors: names of at most 16 of them.
        wire_dtype: dtype in which the step's weights were sent: "as pushed", or "bfloat16".
        restored_from: (number, incarnation) of the version that a rollback restored as this one;
            None: a push made this one.
        statistics: by track, those that the server has computed so far; see `Client.statistics`.
    """

    number: int
    step: int
    incarnation: int
    time: TrainingTime
    tracks: Mapping[str, TrackVersion] = dataclasses.field(hash=False)
    run_epoch: int = 0
    commit_time: float = 0.0
    skipped: int = dataclasses.field(default=0, compare=False)
    skipped_tensor_count: int = 0
    skipped_tensors: tuple[str, ...] = ()
    wire_dtype: str = "as pushed"
    restored_from: tuple[int, int] | None = None
    # Computed later, so they do not count when versions are compared.
    statistics: Mapping[str, TrackStatistics] = dataclasses.field(
        default_factory=dict, compare=False
    )

    def __repr__(self) -> str:
        """One line. `dataclasses.asdict` has every field."""
        committed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.commit_time))
        return (
            f"Version(number={self.number}, step={self.step}, incarnation={self.incarnation}, "
            f"tracks={list(self.tracks)}, committed {committed})"
        )


@dataclasses.dataclass(frozen=True)
class Statistics:
    """The result of `Client.statistics`.

    Attributes:
        version: whose they are.
        tracks: by track; the requested ones.
    """

    version: Version
    tracks: Mapping[str, TrackStatistics] = dataclasses.field(hash=False)


#: What a finite value becomes that is too large for the dtype to which it is cast: an error, the
#: largest finite value of that dtype, or infinity.
Overflow = Literal["error", "saturate", "inf"]

#: What `Attachment.state_dict` has returned.
SavedState = Mapping[str, Any]

#: A version as an argument: its number, its record, a saved state that names it, or one of its
#: labels.
VersionLike = Union[int, Version, SavedState, str]


def is_after(version: Version, other: int | Version) -> bool:
    """Whether `version` was committed later than the record `other`, or has a larger number than
    the number `other`, whatever its incarnation."""
    if isinstance(other, Version):
        return (version.incarnation, version.number) > (other.incarnation, other.number)
    return version.number > other


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One named array.

    Attributes:
        dtype: a name that PyTorch and NumPy share, such as "float32".
        is_buffer: a value beside the parameters, such as BatchNorm's statistics; `Track.buffers`
            says how tracks treat it.
        aliases: other names of the same array (tied weights): it is pushed and kept once.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    is_buffer: bool = False
    aliases: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, repr=False)
class ModelInfo:
    """A server's description of a model.

    Attributes:
        tensors: in manifest order; empty in the result of `Client.models`.
        tracks: by name.
        max_pinned_versions: versions that readers may hold at once.
        reserved_bytes: memory reserved for the model on the server; it never uses more.
        latest: the newest version; None before the first.
        run_epoch: epoch of the newest run or rollback; before the first, the model's incarnation.
        non_finite: how a step is handled if a pushed float is not finite.
        plan_revision: grows when a track is added, changed, paused, resumed or removed.
        pending_tracks: the tracks after the next commit, by name; None: no change.
        attached_files: sizes in bytes, by name, of the files from `Client.attach_files`.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    tracks: Mapping[str, Track] = dataclasses.field(hash=False)
    max_pinned_versions: int
    reserved_bytes: int
    latest: Version | None
    run_epoch: int
    non_finite: NonFinite = "reject"
    plan_revision: int = 0
    pending_tracks: Mapping[str, Track] | None = dataclasses.field(default=None, hash=False)
    attached_files: Mapping[str, int] = dataclasses.field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        """One line. `dataclasses.asdict` has every field."""
        latest = self.latest and f"version {self.latest.number} of step {self.latest.step}"
        return (
            f"ModelInfo(name={self.name!r}, {len(self.tensors)} tensors, tracks={list(self.tracks)}, "
            f"latest={latest})"
        )


@dataclasses.dataclass(frozen=True)
class ServerLimit:
    """A limit on the number of some resource.

    Attributes:
        in_use: the current number; None: it is not counted for the whole server.
        limit: the largest number; 0: unlimited.
    """

    in_use: int | None
    limit: int


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """A server's version, device, memory and limits, and whether it serves.

    Attributes:
        version: of the program, such as "0.1.0".
        device: the device that holds the averages: "cpu", or the name of a GPU.
        incarnation: number of this start of the server; another one after each start.
        start_time: seconds since 1970, by the server's clock.
        not_serving: why health checks say NOT_SERVING; empty: they say SERVING.
        memory_budget_bytes: memory for models.
        memory_reserved_bytes: the part of it that is reserved for models.
        memory_used_bytes: the part of it that is in use.
        limits: by name, such as "models" or "pull_streams".
    """

    version: str
    device: str
    incarnation: int
    start_time: float
    not_serving: str
    memory_budget_bytes: int
    memory_reserved_bytes: int
    memory_used_bytes: int
    limits: Mapping[str, ServerLimit] = dataclasses.field(hash=False)

    @property
    def is_serving(self) -> bool:
        return not self.not_serving


@dataclasses.dataclass(frozen=True)
class ListedVersion:
    """A version's record, and whether its weights can still be pulled."""

    version: Version
    available: bool


CheckpointState = Literal["saving", "complete", "failed", "corrupt"]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A version that `Client.create_checkpoint` has saved, or is saving.

    Attributes:
        name: its folder in the model's folder; `Client.checkpoint` and `delete_checkpoint` take it.
        state: "complete", or with wait=False also "saving".
    """

    version: Version
    name: str
    total_bytes: int
    state: CheckpointState = "complete"


@dataclasses.dataclass(frozen=True)
class CheckpointInfo:
    """A version on the server's disk, one that is being written, or one that could not be written.

    Attributes:
        name: its folder in the model's folder.
        state: "failed": it could not be written. "corrupt": one of three things, which `problem`
            describes: a checkpoint that was set aside, because a byte of it is wrong or a crash
            left it newer than the version from which training continued; the newest checkpoint,
            which has vanished; or the file of the model's labels, which is damaged.
        number, incarnation: of the version.
        step: the trainer's step.
        commit_time: of the version, seconds since 1970 by the server's clock; 0: not known.
        tracks: the tracks that have a value in it.
        is_partial: it lacks tracks of the model, so no server starts from it.
        labels: the labels of the version.
        problem: what is wrong with a failed or corrupt one. Of a complete one: why something that
            was requested with it, such as a label, was not done, or why it cannot be read now.
    """

    name: str
    state: CheckpointState
    number: int
    incarnation: int
    step: int
    commit_time: float
    tracks: tuple[str, ...]
    is_partial: bool
    total_bytes: int
    labels: tuple[str, ...]
    problem: str = ""


@dataclasses.dataclass(frozen=True)
class Label:
    """A name for a version on the server's disk. Retention keeps versions with labels.

    Attributes:
        number, incarnation, step: of the version.
        metric: the score that placed it; None: it was set without a score.
        lower_is_better: of the metric.
    """

    name: str
    number: int
    incarnation: int
    step: int
    metric: float | None = None
    lower_is_better: bool = False


@dataclasses.dataclass(frozen=True)
class MetricResult:
    """The label after a score, and whether this call moved it (after a retry perhaps False).

    `label` is None if the server keeps no labels, because it has no data directory.
    """

    label: Label | None
    moved: bool


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The position of a trainer that resumes from its own checkpoint.

    Attributes:
        step: its optimizer steps so far.
        version: (number, incarnation) of the average that belongs to the checkpoint. None: the one
            that an uninterrupted run would have after `step`.
        time: training time at the step. By it the server checks whether an update was due between
            the version's step and this one. None: unknown.
    """

    step: int
    version: tuple[int, int] | None = None
    time: TimeLike = None


@dataclasses.dataclass(frozen=True)
class SynthesisSource:
    """A track at one step, and its weight in a synthesized average. All weights add up to 1."""

    track: str
    step: int
    weight: float


@dataclasses.dataclass(frozen=True)
class Synthesis:
    """An average that the server has built from kept snapshots.

    Attributes:
        version: its step and time; number and incarnation are those of the newest checkpoint used.
        residual: relative error of its profile: the norm of the difference from the requested
            profile, divided by the norm of the latter. Up to about 0.1 the result is the requested
            average; near 1 and above it has little to do with it.
        sources: the tracks and steps from which it was built.
    """

    version: Version
    residual: float
    sources: tuple[SynthesisSource, ...]


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rectangular region of tensor `name`: first element and size per dimension."""

    name: str
    offsets: tuple[int, ...]
    extents: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of an attachment, on this rank.

    Attributes:
        pushes: steps that became a version.
        skipped: steps that were due and did not become a version, such as those of an outage.
        sent_bytes: handed to the network, resends included.
        wait_seconds: how long the hooks have delayed the training.
        skipped_tensors: with non_finite "skip", by name: pushes in which the tensor kept its averages,
            because its values were not finite. A push names at most 16.
    """

    pushes: int
    skipped: int
    sent_bytes: int
    wait_seconds: float
    skipped_tensors: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class PushStats:
    """Progress of a push.

    Attributes:
        total_bytes: bytes that this rank pushes; 0 until the run is ready.
        sent_bytes: handed to the network, resends included.
        stream_count: 1 if no connection broke.
        connection_count: connections, or same-host lanes, that the last try used.
        send_seconds: from the start until the last byte left; for weights on a GPU, until the last
            copy started.
        lane: transport of the last stream: "grpc", "shared memory", or "shared window" (the server
            read the weights of a GPU without a copy).
        lane_reason: why no faster transport was used, such as "the server is not on this host"; "" if this
            is the fastest, or nothing was sent yet. A run that had no same-host lane when it was opened usually keeps
            to gRPC.
        server_seconds: after the reply: how long the server spent in each phase: "receive" (waiting
            for bytes), "fold", "wait" (for its device and other ranks), "commit". None if the reply
            was lost.
    """

    total_bytes: int
    sent_bytes: int
    stream_count: int
    connection_count: int
    send_seconds: float
    lane: str
    lane_reason: str
    server_seconds: dict[str, float] | None = None


class Weights(dict[str, Any]):
    """Pulled tensors by name, with their version and track.

    A tied tensor has an entry for each of its names; `aliases` maps its further names to the first
    one. `Client.refresh` updates the tensors to the newest version. `received_bytes` is the size of
    the last transfer, and `lane` its transport: "grpc" or "shared memory" (0 and "" after a pull
    with `out` or `device`). `torch.save` writes only the tensors, in an OrderedDict, which
    `torch.load` accepts. Copies and pickles keep the attributes, too, but cannot be refreshed.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        *,
        version: Version,
        track: str,
        aliases: Mapping[str, str] | None = None,
        pulled: _ema.Pulled | None = None,
    ) -> None:
        super().__init__(tensors)
        self.version = version
        self.track = track
        self.aliases = dict(aliases or {})
        self.received_bytes = 0 if pulled is None else pulled.received_bytes
        self.lane = "" if pulled is None else pulled.lane
        # Owns the memory of the tensors.
        self._pulled = pulled
        for alias, name in self.aliases.items():
            self.setdefault(alias, self[name])

    def __getstate__(self) -> dict[str, Any]:
        # A copy has memory of its own.
        return {**self.__dict__, "_pulled": None}

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        # torch.save uses protocol 2. torch.load rejects classes that it does not know.
        if operator.index(protocol) < 4:
            return collections.OrderedDict, (), None, None, iter(self.items())
        return super().__reduce_ex__(protocol)


def model_from(model: _ema.ModelInfo) -> ModelInfo:
    pending = model.pending_tracks
    return ModelInfo(
        name=model.name,
        tensors=tuple(specs_from(model.tensors)),
        tracks={track.name: track_from(track) for track in model.tracks},
        max_pinned_versions=model.max_pinned_versions,
        reserved_bytes=model.reserved_bytes,
        latest=model.latest,
        run_epoch=model.run_epoch,
        non_finite=model.non_finite,
        plan_revision=model.plan_revision,
        pending_tracks={track.name: track_from(track) for track in pending} if pending else None,
        attached_files=model.attached_files,
    )


def specs_from(tuples: Sequence[_ema.Spec]) -> list[TensorSpec]:
    return [
        TensorSpec(name, dtype, tuple(shape), is_buffer, tuple(aliases))
        for name, dtype, shape, is_buffer, aliases in tuples
    ]


def resume_tuple(resume: int | ResumePoint | None) -> _ema.ResumeTuple | None:
    if resume is None:
        return None
    if isinstance(resume, int):
        return resume, None, None
    time = None if resume.time is None else time_dict(resume.time, step=resume.step)
    return resume.step, resume.version, time
