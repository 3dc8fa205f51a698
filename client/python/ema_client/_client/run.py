# SPDX-License-Identifier: Apache-2.0
"""One rank of a run, and a push that goes on in the background."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ema_client import _ema
from ema_client._client import gpu
from ema_client._client.arrays import read_all
from ema_client._client.pieces import BoxCache
from ema_client._client.timeouts import check_timeout
from ema_client._client.types import (
    PushStats,
    Shard,
    TensorSpec,
    TimeLike,
    Version,
    specs_from,
    time_dict,
    version_from,
)
from ema_client._errors import FailedPreconditionError
from ema_client._given import call


class PendingPush:
    """A push that runs in the background; made by `Run.start_push`. Thread-safe.

    The arrays are read in place: they must not change until `wait_released` has returned or the
    push has ended. The object keeps a reference to them as long; if one is on a GPU, until `wait_done`
    or `wait` has found that the push has ended, or the object goes.
    """

    def __init__(self, push: _ema.PendingPush, gpus: frozenset[int] = frozenset()) -> None:
        self._push = push
        self._gpus = gpus  # On which some of the arrays are.

    @property
    def done(self) -> bool:
        """True when `wait` would not block."""
        return self._push.done

    @property
    def stats(self) -> PushStats:
        return PushStats(**self._push.stats)

    def wait_released(self, *, max_wait_s: float) -> bool:
        """Waits until no byte of the arrays will be read any more; then they may change.

        Arrays on a GPU are copied to a ring of pinned memory (`max_staging_bytes` of
        `Client.open_run`), on a stream of its own: this waits until all copies have been started, and
        makes the GPU's current stream wait until they have been made. What is queued on that stream
        from then on may change the arrays.

        Args:
            max_wait_s: seconds to wait at most; while there is no stream to the server (it is gone,
                or ranks have not joined), one second at most; while nothing moves and the server does
                not answer (it hangs), five.

        Returns:
            True: all bytes have left, or the push has ended. False: neither, in that time: the step was
            abandoned, and nothing reads the arrays any more. After less than `max_wait_s`, there was no
            stream, or no answer.
        """
        return self._push.wait_released(max_wait_s, gpu.current_streams(self._gpus))

    def wait_done(self, *, max_wait_s: float) -> bool:
        """Waits for the end, as long as `wait_released`; True: it has come, and `wait` will not block."""
        return self._push.wait_done(max_wait_s)

    def wait(self) -> Version:
        """Waits for the end, at most as long as the push's time-out.

        Returns:
            The version that the step became: the same on all ranks.

        Raises:
            EmaError: the step did not commit; the average is unchanged.
        """
        return version_from(self._push.wait())

    def abandon(self) -> None:
        """Drops the step unless it has committed; nothing reads the arrays any more after this."""
        self._push.abandon()


class Run:
    """One rank of a run; made by `Client.open_run`. One push at a time.

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
        """Lets the run go. A push that is running ends as by `PendingPush.abandon`."""
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
        """Bytes that this rank sends in a push, frozen tensors included."""
        return self._get().total_bytes

    @property
    def frozen(self) -> tuple[str, ...]:
        """The frozen tensors of which this rank holds some."""
        return tuple(self._get().frozen)

    @property
    def may_omit_frozen(self) -> bool:
        """The next push leaves the frozen tensors out: every track that is not paused has their values."""
        return self._get().may_omit_frozen

    @property
    def rank(self) -> int:
        return self._get().rank

    @property
    def run_epoch(self) -> int:
        return self._get().run_epoch

    @property
    def latest(self) -> Version | None:
        """The newest version when the run was opened, or that the last push made."""
        latest = self._get().latest
        return None if latest is None else version_from(latest)

    def wait_ready(self, *, timeout_s: float | None = None) -> None:
        """Waits until all ranks have joined. DeadlineExceededError names those that have not."""
        self._get().wait_ready(self._timeout(timeout_s))

    def is_due(self, time: TimeLike = None, *, step: int = 0) -> bool:
        """True if a push at `time` would update a track; the same on all ranks."""
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
            weights: arrays by name, of anything that speaks DLPack or the buffer protocol (PyTorch,
                NumPy, JAX, ...). Each is a whole tensor (a contiguous piece of it is this rank's
                share), or just the rank's shard of it. They are read in place, also on a GPU of
                NVIDIA's. Of what is not contiguous (channels_last) a torch tensor in host memory is
                put in order a chunk at a time, where it is sent; else it is copied first. Frozen
                tensors may be missing where `may_omit_frozen`.
            time: training time at the step. None: the step is the batch.
            frozen_changed: the run's frozen tensors are not as they were at its pushes before, or one
                of these has failed and they may not be. To be said by all ranks.
            check: reads all arrays in host memory once before it returns; a push that then sends
                anything else, because somebody has written them (and even if they are back by its
                end), commits nothing, and `PendingPush.wait` raises DataLossError.
            timeout_s: seconds for everything, the wait for other ranks included. None: the client's, by
                default 600.

        Raises:
            InvalidArgumentError: arrays do not match the model; lists every one that does not.
            FailedPreconditionError: the push before is still running.
        """
        arrays = read_all(weights, self._boxes)
        gpus = frozenset(array.gpu for array in arrays if array.gpu >= 0)
        push = call(
            self._get().start_push,
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
            The record of the version: number, step, and the weight applied per track.

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
