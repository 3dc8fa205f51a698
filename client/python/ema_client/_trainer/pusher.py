# SPDX-License-Identifier: Apache-2.0
"""One rank's pushes: reads the weights for the engine, and detects writes to weights that a push reads."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from ema_client import _ema
from ema_client._client.arrays import read_all, some
from ema_client._client.gpu import current_streams, is_capturing
from ema_client._client.pieces import BoxCache, HeldWeights
from ema_client._client.training_time import time_after
from ema_client._client.types import Stats, Version
from ema_client._errors import EmaError, failure_of
from ema_client._model.torch_model import NamedTensors
from ema_client._trainer.arguments import PushOptions
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.guard import WRITTEN_HINT, PushedWeights
from ema_client._trainer.joining import Joined

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# How long an exit without close(), or an exception, waits for the last push.
EXIT_WAIT_S = 1.0

# Indexed by the engine's LogLevel.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def log_line(level: int, text: bytes) -> None:
    """Logs a line of the engine. Called by the extension module, from any thread."""
    _logger.log(_LEVELS[level], "%s", text.decode("utf-8", "replace"))


class Pusher:
    """Follows a training loop. The engine decides which steps are pushed, and what happens to those that
    cannot be. For the training thread; `poll`, `stats`, `version` and `step` are for any.

    Attributes:
        options: the arguments of `attach`.
        lock: held by the thread that is in a method or hook of the attachment.
        pid: of the process that trains; a forked child does nothing.
        engine: the protocol. Only `step`, `stats`, `version` and `rank` need no lock.
        weights: what a push reads.
        has_stepped: a step was counted.
        is_closed: steps are no longer counted.
        after_counted_step: called when a step has been counted, and pushed if it was due.
        error: an error of `after_counted_step`, which `raise_error` raises like the engine's.
        other_wait_seconds: time that the training has waited for anything but pushes.
    """

    def __init__(
        self, options: PushOptions, joined: Joined, weights: PushedWeights, frozen: FrozenTensors
    ) -> None:
        self.options = options
        self.lock = threading.RLock()
        self.pid = os.getpid()
        self.has_stepped = False
        self.is_closed = False
        self.after_counted_step: Callable[[], None] | None = None
        self.error: EmaError | None = None
        self.other_wait_seconds = 0.0
        # The thread that called `advance` last.
        self._trainer = threading.get_ident()
        # The model's tensors at the last push, and the names that were attached or warned of.
        self._tensors = options.tensors_of()
        self._known_names = set(self._tensors.all())
        self.weights = weights
        self._frozen = frozen
        self._boxes = BoxCache()
        # GPUs that the last push reads from.
        self._gpus: frozenset[int] = frozenset()
        # The last exception from reading the weights; the engine keeps only its text.
        self._read_failure: EmaError | None = None
        # By name: pushes whose values the server skipped.
        self._skipped_tensors: dict[str, int] = {}
        self.adopt(joined)

    def adopt(self, joined: Joined) -> None:
        """Starts to push to a newly joined run, or to one that the engine will join."""
        options = self.options
        self._pushed_names = joined.names
        self.engine = joined.make_engine(
            step=joined.step,
            max_wait_s=options.max_wait_s,
            timeout_s=options.timeout_s,
            on_error=options.on_error,
            max_outage_s=options.max_outage_s,
            check=options.check,
        )
        self._version: Version | None = None
        # The last version whose skipped tensors are counted.
        self._counted = self.engine.version

    @property
    def version(self) -> Version | None:
        self.poll()
        version = self.engine.version
        # The same object for the same version.
        known = self._version
        if known is not None and known == version:
            return known
        self._version = version
        return version

    @property
    def stats(self) -> Stats:
        self.poll()
        fields = self.engine.stats
        fields["wait_seconds"] += self.other_wait_seconds
        return Stats(**fields, skipped_tensors=dict(self._skipped_tensors))

    @property
    def step(self) -> int:
        return self.engine.step

    def disconnected_error(self) -> EmaError | None:
        """Why nothing can be pushed now: the server is unreachable; or, FENCED, a newer run pushes, or the
        model was rolled back, and nothing is pushed any more. None: steps can be pushed."""
        with self.lock:
            return self.engine.disconnected_error() if self.engine.is_disconnected else None

    @property
    def is_in_this_process(self) -> bool:
        return os.getpid() == self.pid

    @property
    def is_active(self) -> bool:
        """Whether a step that is made now counts."""
        # A step that is captured into a CUDA graph is not made now, nor are its replays seen.
        return not self.is_closed and self.is_in_this_process and not is_capturing()

    @property
    def is_training_thread(self) -> bool:
        return self.is_active and self._trainer == threading.get_ident()

    def training_time(self, step: int) -> dict[str, float]:
        """The training time after `step` steps."""
        return time_after(self.options.time_of, step)

    def wait_released(self) -> None:
        """Waits until no push reads the weights in place any more."""
        if is_capturing() or not self.is_in_this_process:
            return
        self.abandon_if_written()
        self.engine.wait_released(current_streams(self._gpus))
        # After a repeated push, the weights are guarded again, and the caller is about to write them.
        self.weights.release()

    def wait_pushed(self, timeout_s: float) -> Version | None:
        """DeadlineExceededError: the push is still running after `timeout_s`."""
        if self.is_in_this_process:
            with self.lock:
                self.abandon_if_written()
                self.engine.wait_pushed(timeout_s)
                self.weights.release()
        return self.version

    def advance(self, step: int) -> None:
        """The training has made `step` steps: pushes the last one if it is due. `raise_error` raises what
        fails here."""
        self._trainer = threading.get_ident()
        self._read_failure = None  # Its traceback keeps arrays alive.
        self.has_stepped = True
        reading = _Step(self, step)
        self.engine.after_step(step, reading)
        self._count_skipped_tensors()
        if reading.has_read and self.weights.must_wait:
            self.wait_released()
        if self.after_counted_step is not None:
            # Collective: also on a rank that has something to raise.
            try:
                self.after_counted_step()
            except EmaError as error:
                self.error = self.error or error

    def abandon_if_written(self) -> None:
        """Abandons the pending push if the weights that it reads were written. If checksums have shown it,
        the next hook raises."""
        if not self.is_active:
            return
        counted, differing = self.weights.take_written()
        if counted or differing:
            hint = "" if differing else WRITTEN_HINT
            self.engine.abandon_written_push(some(differing or counted), hint, bool(differing))
        elif self.options.check:  # The engine checks what it sends, too.
            self.engine.poll(False)

    def raise_error(self) -> None:
        """Raises the error of a lost step, as on_error says, or of `after_counted_step`."""
        with self.lock:
            error, self.error = self.error, None
            try:
                self.engine.raise_error()
            except EmaError as raised:
                read = self._read_failure
                error = read if read is not None and str(read) == str(raised) else raised
        # Not inside `except`: the traceback would show both.
        if error is not None:
            raise error

    def poll(self) -> None:
        """Takes the result of a finished push, if the lock is free. Only the training thread handles failures,
        because that can call the server."""
        if not self.is_in_this_process:
            return
        if self.lock.acquire(blocking=False):
            try:
                self.engine.poll(threading.get_ident() != self._trainer)
                self._count_skipped_tensors()
            finally:
                self.lock.release()

    def _count_skipped_tensors(self) -> None:
        """Counts those of the last push, and warns of each once."""
        if self.options.non_finite != "skip":
            return
        version, counted = self.engine.version, self._counted
        self._counted = version
        if version is None or version == counted:
            return
        names = version.skipped_tensors
        new = [name for name in names if name not in self._skipped_tensors]
        for name in names:
            self._skipped_tensors[name] = self._skipped_tensors.get(name, 0) + 1
        if new:
            _logger.warning(
                'model "%s": step %d has NaN or infinity in %d tensors, which keep their averages '
                '(non_finite="skip"): %s; stats.skipped_tensors counts such pushes',
                self.options.model_name,
                version.step,
                version.skipped_tensor_count,
                some(new),
            )

    def _frozen_changed(self) -> bool:
        tensors = self.options.tensors_of()
        # The same object as long as the module has the same tensors.
        if tensors is not self._tensors:
            self._tensors = tensors
            self._warn_of_new_tensors(tensors)
        return self._frozen.have_changed(tensors)

    def _warn_of_new_tensors(self, tensors: NamedTensors) -> None:
        new = tensors.all().keys() - self._known_names
        if new:
            self._known_names |= new
            _logger.warning(
                'model "%s": not averaged, because the model got them after attach(): %s',
                self.options.model_name,
                some(sorted(new)),
            )

    def _read(
        self, trained: bool, frozen: bool
    ) -> tuple[Sequence[_ema.Array], Sequence[tuple[int, int]]]:
        names = self._pushed_names if frozen else self._pushed_names - self._frozen.names
        tensors = self._tensors  # The engine has called `_frozen_changed`, which finds them.
        self.options.averaged_buffers.warn_of_changes(tensors, self._pushed_names)
        # Everything that the push reads, even if a part was read before.
        weights = self.weights.take(tensors, names)
        if not trained:
            weights = HeldWeights(
                (name, value) for name, value in weights.items() if name in self._frozen.names
            )
        arrays = read_all(weights, self._boxes)
        gpus = frozenset(array.gpu for array in arrays if array.gpu >= 0)
        self._gpus = gpus if trained else self._gpus | gpus
        return arrays, current_streams(gpus)


class _Step:
    """Answers the engine's questions about one step: its time, and the rest only if an update is due."""

    def __init__(self, pusher: Pusher, step: int) -> None:
        # The engine may keep this object, and Python does not see that.
        self._pusher: Pusher = weakref.proxy(pusher)
        self._step = step
        self.has_read = False

    def time(self) -> dict[str, float]:
        return self._kept(lambda: self._pusher.training_time(self._step))

    def frozen_changed(self) -> bool:
        return self._kept(self._pusher._frozen_changed)

    def read(
        self, trained: bool, frozen: bool
    ) -> tuple[Sequence[_ema.Array], Sequence[tuple[int, int]]]:
        """Arrays of the shards that are trained, of those that are frozen, or of both; and the streams
        on which the GPUs of these work."""
        self.has_read = True
        return self._kept(lambda: self._pusher._read(trained, frozen))

    def _kept(self, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except Exception as raised:  # No memory, or the user's `time`: the training continues.
            self._pusher._read_failure = failure_of(raised)
            raise self._pusher._read_failure
