# SPDX-License-Identifier: Apache-2.0
# The extension module, bound in client/python/src.
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ema_client._client.types import (
    Checkpoint,
    CheckpointInfo,
    Label,
    ListedVersion,
    MetricResult,
    NonFinite,
    PushStats,
    ServerInfo,
    Synthesis,
    Version,
)
from ema_client._errors import EmaError

Spec = tuple[str, str, Sequence[int], bool, Sequence[str]]
ShardTuple = tuple[int, Sequence[int], Sequence[int]]
# Step, (version, incarnation), training time.
ResumeTuple = tuple[int, tuple[int, int] | None, dict[str, float] | None]
# Tensors, shards, number of frozen shards (the last ones), rank, resume point.
UnopenedRun = tuple[Sequence[Spec], Sequence[ShardTuple], int, int, ResumeTuple | None]

class Array:
    def __init__(
        self,
        name: str,
        object: object,
        dtype: str = "",
        offsets: Sequence[int] | None = None,
        may_have_strides: bool = False,
    ) -> None: ...
    @property
    def spec(self) -> Spec: ...
    @property
    def gpu(self) -> int: ...
    @property
    def crc32c(self) -> int: ...

class ScheduleState:
    def __init__(self) -> None: ...
    @staticmethod
    def from_fields(
        update_count: int,
        averaged_count: int,
        last_update: dict[str, float] | None,
        started: dict[str, float] | None,
    ) -> ScheduleState: ...
    @property
    def update_count(self) -> int: ...
    @property
    def averaged_count(self) -> int: ...
    @property
    def last_update(self) -> dict[str, float] | None: ...
    @property
    def started(self) -> dict[str, float] | None: ...

# States of a track's schedule, then of its tensor rules' schedules. Empty before the first update.
TrackState = list[ScheduleState]
# Pattern, action, schedule.
RuleTuple = tuple[str, str, Schedule | None]

class Schedule:
    @staticmethod
    def from_fields(fields: dict[str, str]) -> Schedule: ...
    @staticmethod
    def parse(text: str) -> Schedule: ...
    def to_fields(self) -> dict[str, str]: ...
    @property
    def is_copy(self) -> bool: ...
    # Of a mean of the last k: k - 1. Else 0.
    @property
    def kept_weights_count(self) -> int: ...
    # Empty: an update is due at every push.
    @property
    def update_interval(self) -> str: ...

class Track:
    def __init__(
        self,
        name: str,
        schedule: Schedule,
        tensor_rules: Sequence[RuleTuple] = ...,
        buffers: str = "average",
        dtype: str = "float32",
        paused: bool = False,
        snapshot_interval: str | None = None,
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def schedule(self) -> Schedule: ...
    @property
    def tensor_rules(self) -> list[RuleTuple]: ...
    @property
    def buffers(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def paused(self) -> bool: ...
    @property
    def snapshot_interval(self) -> str | None: ...
    # Raises if the track would soon overwrite an average that is imported at `now`.
    def check_keeps_first_value(self, now: dict[str, float], updates: int) -> None: ...
    # Raises if the track is invalid, or one of its rules matches none of the specs.
    def check(self, specs: Sequence[Spec]) -> None: ...
    # The track without the rules that the server would reject because they match none of the specs.
    def without_idle_rules(self, specs: Sequence[Spec]) -> Track: ...
    # For each tensor: the action, and the index of its schedule in the track.
    def actions(self, specs: Sequence[Spec]) -> list[tuple[str, int]]: ...
    # For each schedule: (due, update_weight, from_zero, elapsed).
    def plan(
        self, state: TrackState, now: dict[str, float]
    ) -> list[tuple[bool, float, bool, float]]: ...
    def next(self, state: TrackState, now: dict[str, float]) -> TrackState: ...

# The share of one rank: its shards, and how many of them, the last ones, are frozen. `boxes`: the
# boxes to share; None: the whole model.
def even_share(
    specs: Sequence[Spec],
    rank0_only: Sequence[str],
    frozen: Sequence[str],
    rank: int,
    world_size: int,
    boxes: Sequence[ShardTuple] | None = None,
) -> tuple[list[ShardTuple], int]: ...

# `earlier`: lists of weights like `emas`, the oldest first; if there are any, emas[i] becomes the mean
# of params[i] and of their `i`-th arrays.
def fold_many(
    emas: Sequence[object],
    params: Sequence[object],
    update_weight: float,
    threads: int = 0,
    earlier: list[list[Any]] = ...,
) -> None: ...

# Reads tensors in place, if their type is exactly one of `types`. None for each tensor that must be
# converted first or cannot be read. `are_held`: no other code has these tensor objects, so none can
# replace their memory.
def read_tensors(
    names: list[str],
    tensors: list[Any],
    offsets: Sequence[Sequence[int] | None],
    types: tuple[type, ...],
    are_held: bool,
) -> list[Array | None]: ...

class PendingPush:
    def wait_released(self, max_wait_s: float, streams: Sequence[tuple[int, int]]) -> bool: ...
    def wait_done(self, max_wait_s: float) -> bool: ...
    def wait(self) -> Version: ...
    def abandon(self) -> None: ...
    @property
    def done(self) -> bool: ...
    @property
    def stats(self) -> PushStats: ...

class Run:
    def start_push(
        self,
        step: int,
        time: dict[str, float],
        arrays: Sequence[Array],
        timeout_s: float,
        frozen_changed: bool = False,
        streams: Sequence[tuple[int, int]] = (),
        check: bool = False,
    ) -> PendingPush: ...
    def wait_ready(self, timeout_s: float) -> None: ...
    def is_due(self, now: dict[str, float]) -> bool: ...
    @property
    def may_omit_frozen(self) -> bool: ...
    @property
    def frozen(self) -> list[str]: ...
    @property
    def tensors(self) -> list[Spec]: ...
    @property
    def shards(self) -> list[ShardTuple]: ...
    @property
    def total_bytes(self) -> int: ...
    @property
    def run_epoch(self) -> int: ...
    @property
    def rank(self) -> int: ...
    @property
    def latest(self) -> Version | None: ...

# Called by PushEngine.after_step(); the methods may raise.
class TrainingStep(Protocol):
    def time(self) -> dict[str, float]: ...
    def frozen_changed(self) -> bool: ...
    def read(
        self, trained: bool, frozen: bool
    ) -> tuple[Sequence[Array], Sequence[tuple[int, int]]]: ...

class PushEngine:
    def __init__(
        self,
        *,
        client: Client,
        run: Run | None,
        unopened: UnopenedRun | None,
        existing: str,
        model: str,
        launch_id: str,
        world_size: int,
        tracks: Sequence[Track],
        max_pinned_versions: int,
        non_finite: str,
        files: dict[str, bytes],
        wire_dtype: str,
        max_staging_bytes: int,
        step: int,
        max_wait_s: float,
        timeout_s: float,
        on_error: str,
        max_outage_s: float,
        check: bool,
    ) -> None: ...
    def wait_released(self, streams: Sequence[tuple[int, int]]) -> None: ...
    def after_step(self, step: int, training_step: TrainingStep) -> None: ...
    def abandon_written_push(self, names: str, hint: str, raises: bool) -> None: ...
    def raise_error(self) -> None: ...
    def wait_pushed(self, timeout_s: float) -> None: ...
    def end_pushes(self, timeout_s: float) -> None: ...
    def leave(self, timeout_s: float) -> None: ...
    def poll(self, leaves_failure: bool) -> None: ...
    def disconnected_error(self) -> EmaError: ...
    @property
    def is_push_done(self) -> bool: ...
    @property
    def is_disconnected(self) -> bool: ...
    @property
    def is_fenced(self) -> bool: ...
    @property
    def rank(self) -> int: ...
    @property
    def run_epoch(self) -> int: ...
    @property
    def step(self) -> int: ...
    @property
    def stats(self) -> dict[str, Any]: ...
    @property
    def version(self) -> Version | None: ...
    @property
    def tracks(self) -> list[Track]: ...

class VersionWatch:
    def next(self) -> Version: ...

class Pulled:
    @property
    def version(self) -> Version: ...
    # (name, dtype, shape, offset, length)
    @property
    def tensors(self) -> list[tuple[str, str, list[int], int, int]]: ...
    @property
    def aliases(self) -> dict[str, str]: ...
    # The buffer that holds all the tensors.
    @property
    def bytes(self) -> Any: ...
    @property
    def is_mixed(self) -> bool: ...
    @property
    def received_bytes(self) -> int: ...
    @property
    def lane(self) -> str: ...

# Of a model: what ModelInfo of _client/types.py is made of.
class ModelInfo:
    @property
    def name(self) -> str: ...
    @property
    def tensors(self) -> list[Spec]: ...
    @property
    def tracks(self) -> list[Track]: ...
    @property
    def pending_tracks(self) -> list[Track] | None: ...
    @property
    def plan_revision(self) -> int: ...
    @property
    def max_pinned_versions(self) -> int: ...
    @property
    def non_finite(self) -> NonFinite: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def latest(self) -> Version | None: ...
    @property
    def run_epoch(self) -> int: ...
    # By name: sizes in bytes.
    @property
    def attached_files(self) -> dict[str, int]: ...

class Client:
    def __init__(
        self,
        address: str,
        timeout_s: float,
        same_host_lane: bool,
        max_connections: int,
        tls: tuple[str, str, str],
        token: str,
        token_file: str,
    ) -> None: ...
    def close(self) -> None: ...
    def create_model(
        self,
        model: str,
        specs: Sequence[Spec],
        tracks: Sequence[Track],
        max_pinned_versions: int,
        non_finite: str,
        timeout_s: float,
    ) -> ModelInfo: ...
    def update_model(
        self,
        model: str,
        put: Sequence[Track],
        remove: Sequence[str],
        pause: Sequence[str],
        resume: Sequence[str],
        timeout_s: float,
    ) -> ModelInfo: ...
    def get_server_info(self, timeout_s: float) -> ServerInfo: ...
    def get_model(self, model: str, timeout_s: float) -> ModelInfo: ...
    def list_models(self, timeout_s: float) -> list[ModelInfo]: ...
    def delete_model(self, model: str, purge: bool, timeout_s: float) -> None: ...
    def attach_file(self, model: str, name: str, data: bytes, timeout_s: float) -> None: ...
    def get_attached_file(self, model: str, name: str, timeout_s: float) -> bytes: ...
    def remove_attached_file(self, model: str, name: str, timeout_s: float) -> None: ...
    def list_versions(self, model: str, after: int, timeout_s: float) -> list[ListedVersion]: ...
    def get_statistics(
        self, model: str, version: int, incarnation: int, tracks: Sequence[str], timeout_s: float
    ) -> Version: ...
    def create_checkpoint(
        self,
        model: str,
        version: int,
        incarnation: int,
        tracks: Sequence[str],
        label: str,
        wait: bool,
        timeout_s: float,
    ) -> Checkpoint: ...
    def get_checkpoint(self, model: str, checkpoint: str, timeout_s: float) -> CheckpointInfo: ...
    # Checkpoints and labels.
    def list_checkpoints(
        self, model: str, timeout_s: float
    ) -> tuple[list[CheckpointInfo], list[Label]]: ...
    def delete_checkpoint(self, model: str, checkpoint: str, timeout_s: float) -> None: ...
    # Uses `label`, unless it is empty.
    def restore_checkpoint(
        self, model: str, version: int, incarnation: int, label: str, timeout_s: float
    ) -> Version: ...
    def set_label(
        self, model: str, label: str, version: int, incarnation: int, timeout_s: float
    ) -> Label: ...
    def remove_label(self, model: str, label: str, timeout_s: float) -> None: ...
    def report_metric(
        self,
        model: str,
        version: int,
        incarnation: int,
        value: float,
        lower_is_better: bool,
        label: str,
        timeout_s: float,
    ) -> MetricResult: ...
    def synthesize(
        self,
        model: str,
        result: str,
        sigma_rel: float | None,
        half_life: str,
        step: int,
        tracks: Sequence[str],
        timeout_s: float,
    ) -> Synthesis: ...
    def open_run(
        self,
        model: str,
        launch_id: str,
        rank: int,
        world_size: int,
        shards: Sequence[ShardTuple] | None,
        frozen_shard_count: int,
        wire_dtype: str,
        rejoins: bool,
        resume: ResumeTuple | None,
        last_run_epoch: int,
        imported_updates: int,
        max_staging_bytes: int,
        timeout_s: float,
    ) -> Run: ...
    def pull(
        self,
        model: str,
        track: str,
        version: int,
        incarnation: int,
        label: str,
        step: int | None,
        tensors: Sequence[str],
        slices: Sequence[tuple[str, Sequence[int], Sequence[int]]],
        dtype: str | None,
        overflow: str,
        timeout_s: float,
        on_progress: Callable[[int], object] | None,
    ) -> Pulled: ...
    def refresh(self, pulled: Pulled, timeout_s: float) -> bool: ...
    def watch(
        self, model: str, after: tuple[int, int] | None, timeout_s: float
    ) -> VersionWatch: ...
