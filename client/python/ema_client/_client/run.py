# SPDX-License-Identifier: Apache-2.0
"""Runs: how a rank joins one, and its pushes, which may continue in the background."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ema_client import _ema
from ema_client._client import gpu
from ema_client._client.arrays import read_all
from ema_client._client.connection import Connection
from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.pieces import BoxCache
from ema_client._client.timeouts import check_timeout
from ema_client._client.training_time import TimeLike, time_dict
from ema_client._client.types import (
    PushStats,
    ResumePoint,
    Shard,
    TensorSpec,
    Version,
    WireDtype,
    resume_tuple,
    specs_from,
)
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._argument_checks import check_int64, names_from


class PendingPush:
    """A push that runs in the background; created by `Run.start_push`. Thread-safe.

    The arrays are read in place: they must not change until `wait_released` has returned or the push has
    ended. Until then the object keeps references to them; to arrays on a GPU, until `wait_done` or `wait` has
    found that the push has ended, or the object is freed.
    """

    def __init__(self, push: _ema.PendingPush, gpus: frozenset[int] = frozenset()) -> None:
        self._push = push
        self._gpus = gpus  # GPUs that hold some of the arrays.

    @property
    def done(self) -> bool:
        """True when `wait` would not block."""
        return self._push.done

    @property
    def stats(self) -> PushStats:
        return self._push.stats

    def wait_released(self, *, max_wait_s: float) -> bool:
        """Waits until all bytes of the arrays have been read; then the arrays may change.

        Arrays on a GPU are copied to pinned memory (`max_staging_bytes` of `Client.open_run`), on a separate
        stream. This waits until all copies have been started, and makes the GPU's current stream wait for
        them: work that is queued on that stream later may change the arrays.

        Args:
            max_wait_s: the most seconds to wait. At most one second without a stream to the server (it is
                unreachable, or ranks have not joined), and at most five if it does not answer.

        Returns:
            True: all bytes have been read, or the push has ended. False: the time ran out; the step
            was abandoned, and nothing reads the arrays.
        """
        return self._push.wait_released(max_wait_s, gpu.current_streams(self._gpus))

    def wait_done(self, *, max_wait_s: float) -> bool:
        """Waits for the end of the push, as long as `wait_released` does. True: `wait` will not block."""
        return self._push.wait_done(max_wait_s)

    def wait(self) -> Version:
        """Waits for the end of the push, at most its timeout.

        Returns:
            The committed version: the same on all ranks.

        Raises:
            EmaError: the step did not commit; the average is unchanged.
        """
        return self._push.wait()

    def abandon(self) -> None:
        """Drops the step unless it has committed. After this, nothing reads the arrays."""
        self._push.abandon()


class Run:
    """One rank of a run; created by `Client.open_run`. One push at a time.

    Example:
        >>> with client.open_run("m") as run:
        ...     version = run.push(step=10, weights=weights)
    """

    def __init__(self, run: _ema.Run, *, timeout_s: float, push_timeout_s: float) -> None:
        self._run: _ema.Run | None = run
        self._timeout_s = timeout_s
        self._push_timeout_s = push_timeout_s
        self._tensors = tuple(specs_from(run.tensors))
        self._boxes = BoxCache()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the run. Its pending push is abandoned, see `PendingPush.abandon`."""
        self._run = None

    def _timeout(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            return self._timeout_s
        check_timeout("timeout_s", timeout_s)
        return timeout_s

    def _get(self) -> _ema.Run:
        if self._run is None:
            raise FailedPreconditionError("the run is closed", reason="BAD_REQUEST")
        return self._run

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """The model's tensors in manifest order."""
        return self._tensors

    @property
    def shards(self) -> tuple[Shard, ...]:
        """What this rank pushes."""
        return tuple(
            Shard(self._tensors[index].name, tuple(offsets), tuple(extents))
            for index, offsets, extents in self._get().shards
        )

    @property
    def total_bytes(self) -> int:
        """The bytes that this rank sends in a push, frozen tensors included."""
        return self._get().total_bytes

    @property
    def frozen(self) -> tuple[str, ...]:
        """The frozen tensors of which this rank has shards."""
        return tuple(self._get().frozen)

    @property
    def may_omit_frozen(self) -> bool:
        """Whether the next push may omit the frozen tensors: all tracks that are not paused have their values."""
        return self._get().may_omit_frozen

    @property
    def rank(self) -> int:
        return self._get().rank

    @property
    def run_epoch(self) -> int:
        return self._get().run_epoch

    @property
    def latest(self) -> Version | None:
        """The version of the last push; before it, the newest version when the run was opened."""
        return self._get().latest

    def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Waits until all ranks have joined. DeadlineExceededError names those that have not."""
        self._get().wait_ready(self._timeout(timeout_s))

    def is_due(self, time: TimeLike = None, *, step: int = 0) -> bool:
        """True if a push at `time` would update a track, as far as this rank knows from its last push."""
        return self._get().is_due(time_dict(time, step=step))

    def start_push(
        self,
        *,
        step: int,
        weights: Mapping[str, Any],
        time: TimeLike = None,
        frozen_changed: bool = False,
        check: bool = False,
        timeout_s: float | None = None,
    ) -> PendingPush:
        """Starts to push one step in the background.

        Args:
            step: the trainer's step; larger than the last one.
            weights: arrays by name that support DLPack or the buffer protocol (PyTorch, NumPy, JAX, ...).
                Each is a whole tensor, of which this rank's share is sent, or only the rank's shard.
                They are read in place, also on NVIDIA GPUs. A torch tensor in host memory that is not
                contiguous (channels_last) is reordered a chunk at a time; other such arrays are copied
                first. With `may_omit_frozen`, frozen tensors may be missing.
            time: training time at the step. None: the step is the batch.
            frozen_changed: the frozen tensors have changed since the run's last push, or may have changed
                because a push failed. Equal on all ranks.
            check: computes the arrays' checksums before it returns. If the push then sends other bytes,
                because the arrays were written (and perhaps restored) meanwhile, it commits nothing, and
                `PendingPush.wait` raises DataLossError. Has no effect if an array is on a GPU.
            timeout_s: seconds for the whole push, waiting for other ranks included. None: the client's, by
                default 600.

        Raises:
            InvalidArgumentError: arrays do not match the model; the message lists them.
            FailedPreconditionError: the previous push is still running.
        """
        check_int64("step", step)
        arrays = read_all(weights, self._boxes)
        gpus = frozenset(array.gpu for array in arrays if array.gpu >= 0)
        push = self._get().start_push(
            step,
            time_dict(time, step=step),
            arrays,
            self._push_timeout_s if timeout_s is None else self._timeout(timeout_s),
            frozen_changed,
            gpu.current_streams(gpus),
            check,
        )
        return PendingPush(push, gpus)

    def push(
        self,
        *,
        step: int,
        weights: Mapping[str, Any],
        time: TimeLike = None,
        frozen_changed: bool = False,
        timeout_s: float | None = None,
    ) -> Version:
        """Pushes one step and waits until it is committed. Arguments as for `start_push`.

        Returns:
            The version: number, step, and the update weight of each track.

        Raises:
            EmaError: the step did not commit; the average is unchanged.
        """
        push = self.start_push(
            step=step,
            weights=weights,
            time=time,
            frozen_changed=frozen_changed,
            timeout_s=timeout_s,
        )
        return push.wait()


def open_run(
    client: Connection,
    name: str,
    *,
    launch_id: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    shards: Sequence[Shard] | None = None,
    rank0_only: str | Collection[str] = (),
    frozen: str | Collection[str] = (),
    wire_dtype: WireDtype = "as pushed",
    max_staging_bytes: int = STAGING_BYTES,
    resume: int | ResumePoint | None = None,
    timeout_s: float | None = None,
) -> Run:
    """Joins a run: the ranks of one start of a trainer. A new launch_id fences the previous run.

    If a push finds that the server, or one of a group of servers, was restarted, it rejoins, and waits
    for the other ranks. On a group, a push whose weights have been released already
    (`PendingPush.wait_released`) raises AbortedError, STEP_ABANDONED, instead; later pushes continue.

    Args:
        name: the model.
        launch_id: new for each start of the trainer, equal on all its ranks. None: a random one, only
            for a single rank.
        rank, world_size: this rank, and the number of ranks.
        shards: what this rank pushes. None: an even share, as if all ranks held all tensors.
        rank0_only: tensors that differ between ranks (BatchNorm's statistics): rank 0 pushes them as a
            part of its share. Ignored with `shards`.
        frozen: tensors that do not change during the run; equal on all ranks. They are pushed until
            every track has their values, then omitted.
        wire_dtype: "bfloat16": float32 weights are rounded before they are sent, which halves the
            bytes; the averages are those of the rounded values. Equal on all ranks.
        max_staging_bytes: the most pinned host memory for weights on GPUs, at least 64 MiB; may differ
            between ranks. At most as much as the shards that are not frozen need is allocated, at the
            first push that needs it, and kept until the run ends. If the host has less memory, half of
            that is tried, and so on. If all pushed bytes fit, `PendingPush.wait_released` waits only for
            copies on the GPU; otherwise also for the network.
        resume: the trainer continues from its own checkpoint: a step, or a ResumePoint, equal on all
            ranks. The server restores the model to that state.
        timeout_s: seconds.

    Raises:
        InvalidArgumentError: a shard that does not fit its tensor, or overlaps another rank's; or
            max_staging_bytes is too small.
        AbortedError: the launch_id belongs to a fenced run.
        FailedPreconditionError: RESUME_MISMATCH: the model has no version for the trainer's step; the
            message lists the existing ones. No run was opened.
        OutOfRangeError: VERSION_NOT_KEPT: the server no longer has the version of the ResumePoint.
    """
    return join_run(**locals())


def join_run(
    client: Connection,
    name: str,
    *,
    launch_id: str | None = None,
    rank: int = 0,
    world_size: int = 1,
    shards: Sequence[Shard] | None = None,
    rank0_only: str | Collection[str] = (),
    frozen: str | Collection[str] = (),
    wire_dtype: WireDtype = "as pushed",
    max_staging_bytes: int = STAGING_BYTES,
    rejoins: bool = True,
    resume: int | ResumePoint | None = None,
    imported_updates: int = 0,
    timeout_s: float | None = None,
) -> Run:
    """`open_run`, with arguments that are not public.

    Args:
        rejoins: False: a push that finds a restarted server fails, FENCED.
        imported_updates: the number of updates in the first weights.
    """
    if launch_id is None:
        if world_size != 1:
            raise InvalidArgumentError(
                f"launch_id: None with world_size {world_size}, expected the same text on all ranks"
            )
        launch_id = secrets.token_hex(16)
    # A resume may read a version from the disk.
    timeout = client._timeout(timeout_s, is_transfer=resume is not None)
    rank0_only, frozen = names_from("rank0_only", rank0_only), names_from("frozen", frozen)
    tuples: list[_ema.ShardTuple] | None = None
    frozen_count = 0
    if shards is not None or world_size != 1 or frozen:
        specs = client._client.get_model(name, timeout).tensors
        names = {spec[0] for spec in specs}
        unknown = sorted({*frozen, *(shard.name for shard in shards or ())} - names)
        if unknown:
            raise InvalidArgumentError(
                f'model "{name}" has no tensors {", ".join(unknown)}', reason="BAD_LAYOUT"
            )
        if shards is None:
            tuples, frozen_count = _ema.even_share(specs, rank0_only, frozen, rank, world_size)
        else:
            tuples, frozen_count = shard_tuples(specs, shards, frozen)
    run = client._client.open_run(
        name,
        launch_id,
        rank,
        world_size,
        tuples,
        frozen_count,
        wire_dtype,
        rejoins,
        resume_tuple(resume),
        0,  # The epoch of an earlier run of this launch: there is none.
        imported_updates,
        max_staging_bytes,
        timeout,
    )
    return Run(run, timeout_s=client._timeout_s, push_timeout_s=client._transfer_timeout_s)


def shard_tuples(
    specs: Sequence[_ema.Spec], shards: Sequence[Shard], frozen: Collection[str]
) -> tuple[list[_ema.ShardTuple], int]:
    """The shards as the extension module takes them: those of frozen tensors last, and their number."""
    index = {spec[0]: i for i, spec in enumerate(specs)}
    ordered = sorted(shards, key=lambda shard: shard.name in frozen)
    tuples: list[_ema.ShardTuple] = [(index[one.name], one.offsets, one.extents) for one in ordered]
    return tuples, sum(shard.name in frozen for shard in shards)
