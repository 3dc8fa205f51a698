# SPDX-License-Identifier: Apache-2.0
"""What `attach` returns: it follows an optimizer and pushes the weights when an update is due."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ema_client._away import Link, OnError, Patience, is_outage, is_worth_waiting
from ema_client._client import Client
from ema_client._due import DueTracks
from ema_client._ema_model import WithEmaModel
from ema_client._errors import (
    AbortedError,
    DeadlineExceededError,
    EmaError,
)
from ema_client._gpu import is_capturing
from ema_client._guard import BeforeLoad, Push, PushedWeights, WatchedWeights, checksums_of
from ema_client._optimizers import after_closure, was_skipped
from ema_client._resume import WithState
from ema_client._run import Joined, PendingPush
from ema_client._torch_model import NamedTensors
from ema_client._types import Stats, TimeLike, Version

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# How long a reply is waited for after a push that failed: the ranks may have come back at different
# steps, and then it never comes. Long enough for all to meet at the next one.
_OUT_OF_STEP_WAIT_S = 1.0
# How long an interpreter that ends without close(), and an exception, wait for the last push.
_EXIT_WAIT_S = 1.0

# Attachments that push. `averaged` must not write into weights that one of them still reads.
live: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment(WithEmaModel, WithState):
    """Follows an optimizer: counts its steps and pushes the weights of those that are due.

    Made by `ema_client.attach`. To be used by the thread that trains. A push reads the parameters in place
    while the next forward and backward run; `optimizer.step()` waits for it (on a GPU its stream does),
    at most `max_wait_s`, before it changes them, and so does `load_state_dict`. Whoever else writes
    weights between steps (clipping of weights) must call `wait_released` first. A forked child (a
    DataLoader worker) does nothing. Replays of a CUDA graph call no hooks: where a graph makes the step,
    attach without an optimizer, and call `wait_released()` before and
    `after_step(wait_released=False)` after each `graph.replay()`.

    When the server is away, a thread joins the run again, on every rank, and pushes start again when
    all have: unless on_error is "wait", no training thread waits for the server or, but for the reply
    to a push, for another rank.
    """

    def __init__(
        self,
        *,
        client: Client,
        joined: Joined,
        join_at: Callable[[Mapping[str, Any]], Joined],
        model_name: str,
        module: torch.nn.Module,
        tensors_of: Callable[[], NamedTensors],
        optimizers: list[torch.optim.Optimizer] | None,
        is_alone: bool,
        time_of: Callable[[int], TimeLike] | None,
        max_wait_s: float,
        timeout_s: float,
        on_error: OnError,
        max_outage_s: float,
        frozen: list[str],
        keep_resumable: int,
        check: bool,
    ) -> None:
        self._client = client
        self._link = Link(model_name, lambda run: self._due.go_on(run))
        self._join_at = join_at  # Collective.
        self._model_name = model_name
        self._module = module
        self._tensors_of = tensors_of
        # With other ranks a plan is adopted at the next step that is due.
        self._is_alone = is_alone
        self._time_of = time_of
        self._max_wait_s = max_wait_s
        self._timeout_s = timeout_s
        self._on_error = on_error
        self._max_outage_s = max_outage_s if on_error == "wait" else 0.0
        self._keep_resumable = keep_resumable

        self._pid = os.getpid()
        self._closed = False
        self._has_stepped = False
        self._pending: PendingPush | None = None
        self._pending_step = 0
        self._pushes = 0
        self._skipped = 0
        self._sent_bytes = 0
        self._wait_seconds = 0.0
        # False: the last push failed, so ranks may push at different steps.
        self._in_step = True
        # The reply to the pending push has been waited for.
        self._has_waited = False
        # What is left of max_wait_s for the hooks of this step.
        self._budget_s = max_wait_s
        # For on_error "raise" and "wait": what the next hook raises.
        self._error: EmaError | None = None
        # For on_error "wait".
        self._patience = Patience(max_outage_s) if on_error == "wait" else None
        self._pushed: Push | None = None  # What the pending push is of.
        self._again: tuple[Push, EmaError] | None = None  # It has failed, and will be tried again.

        self._take(joined)
        self._frozen = frozen
        # Checksums of these as the server has them, if this rank knows: of its last push, if that
        # succeeded. Before the first the run has none.
        self._frozen_sums: list[int] | None = None
        self._has_pushed = False
        self._pending_sums: list[int] = []
        # For `check`: what the last push reads in place.
        self._watched = WatchedWeights() if check else None
        self._weights = PushedWeights(optimizers)
        # Called when a step has been counted, and pushed if it was due.
        self._followers: list[Callable[[], None]] = []
        # Optimizers that have not stepped yet, and the last of them then.
        self._awaited = set(map(id, optimizers or ()))
        self._closing: int | None = None
        self._counting = [
            optimizer.register_step_post_hook(self._after_step) for optimizer in optimizers or ()
        ]
        self._hooks: list[Any] = [
            *(
                optimizer.register_step_pre_hook(self._before_step)
                for optimizer in optimizers or ()
            ),
            *self._counting,
        ]
        for part in module.modules():
            hook = part.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                BeforeLoad(self._before_load)
            )
            self._hooks.append(hook)
        live.add(self)

    def _take(self, joined: Joined) -> None:
        """Goes by a run that no step has been pushed to."""
        self._link.take(joined)
        self._launch_id = joined.launch_id
        self._step = joined.step
        self._version = joined.run.latest
        self._due = DueTracks(joined.run, self._time_of)
        self._pushed_names = frozenset(shard.name for shard in joined.run.shards)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes; after an exception without waiting long, since the other ranks may not push any more."""
        self.close(timeout_s=None if exc is None else min(_EXIT_WAIT_S, self._timeout_s))

    @property
    def module(self) -> torch.nn.Module:
        """The model, outside any wrapper."""
        return self._module

    @property
    def version(self) -> Version | None:
        """The last version that came of this run's pushes; before the first, the model's newest."""
        self._harvest()
        return self._version

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    @property
    def stats(self) -> Stats:
        self._harvest()
        return Stats(
            pushes=self._pushes,
            skipped=self._skipped,
            sent_bytes=self._sent_bytes,
            wait_seconds=self._wait_seconds,
        )

    def after_step(self, *, wait_released: bool = True) -> None:
        """Counts a step, and pushes the weights if it is due: of an attachment without an optimizer.

        To be called on every rank, after each step.

        Args:
            wait_released: waits until the bytes have left, at most `max_wait_s`. False: whoever changes
                the weights next calls the method `wait_released` first.

        Raises:
            EmaError: a step could not be pushed, unless on_error is "skip".
        """
        if self._is_ours():
            self._budget_s = self._max_wait_s
            try:
                self._advance(self._step + 1)
            finally:
                if wait_released:
                    start = time.monotonic()
                    self._wait_released(self._budget_s)
                    self._wait_seconds += time.monotonic() - start
            self._raise_error()

    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Waits for the end of the running push, if there is one.

        Args:
            timeout_s: seconds. None: those of `attach`. With on_error "wait" an outage may take longer.

        Returns:
            As `version`: the same on all ranks, unless the reply to one was lost.

        Raises:
            DeadlineExceededError: the push has not ended. It goes on.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._give_up_written()
        self._settle()
        pending = self._pending if os.getpid() == self._pid else None
        if pending is not None and not pending.wait_done(max_wait_s=timeout_s):
            raise DeadlineExceededError(f"the push of step {self._pending_step} has not ended")
        return self.version

    def wait_released(self) -> None:
        """Waits until no push reads the weights in place any more, at most `max_wait_s`.

        With on_error "wait": until the push has ended, an outage included.
        """
        self._wait_released(self._max_wait_s)

    def count_by_hand(self) -> None:
        """From now on `count` says which step it is, not each `optimizer.step()`: before the first step."""
        for hook in self._counting:
            hook.remove()

    def count(self, step: int) -> None:
        """Says that `step` steps are done, as many as before or more; pushes if an update is due."""
        if self._is_ours():
            self._advance(step)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Waits for the last push, at most `timeout_s`, and lets the optimizer and the server go.

        May be called again. Never raises an EmaError: a push that fails now is a skipped one.
        """
        if self._closed:
            return
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        try:
            self._give_up_written()
            self._settle(until=time.monotonic() + timeout_s)
            self._detach()
            if os.getpid() != self._pid:
                return
            if self._pending is not None:
                if self._pending.wait_done(max_wait_s=timeout_s):
                    self._harvest()
                else:
                    self._drop(f"it had not ended {timeout_s} s after the last step")
            if self._copy is not None:
                self._update_copy(raises=False, timeout_s=timeout_s)
        finally:
            # Also after a Ctrl-C.
            self._detach()
            if os.getpid() == self._pid:
                try:
                    self._link.close()
                finally:
                    self._client.close()

    def _detach(self) -> None:
        self._closed = True
        live.discard(self)
        for hook in self._hooks:
            hook.remove()

    def _is_ours(self) -> bool:
        # A step that is captured into a CUDA graph is not made now, nor are its replays seen.
        return not self._closed and os.getpid() == self._pid and not is_capturing()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        with_wait = after_closure(optimizer, args, kwargs, self._before_change)
        if with_wait is None:
            self._before_change()
        return with_wait

    def _before_change(self) -> None:
        if self._is_ours():
            start = time.monotonic()
            self._wait_released(self._max_wait_s)
            self._budget_s = max(0.0, self._max_wait_s - (time.monotonic() - start))
            self._wait_seconds += time.monotonic() - start
            self._raise_error()

    def _before_load(self) -> None:
        if self._is_ours():
            self.wait_released()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_ours() or was_skipped(optimizer):
            return
        self._awaited.discard(id(optimizer))
        if self._awaited:
            return
        # The one that ends the first step ends all: the others may be skipped now and then.
        self._closing = self._closing or id(optimizer)
        if id(optimizer) == self._closing:
            self._advance(self._step + 1)

    def _advance(self, step: int) -> None:
        start = time.monotonic()
        self._step = step
        self._has_stepped = True
        # The weights are others now.
        self._pushed = None
        self._lose()
        self._harvest()
        try:
            self._push_if_due()
        except EmaError as error:
            self._skip(self._step, error)
        self._wait_seconds += time.monotonic() - start
        failure: EmaError | None = None
        for follow in self._followers:
            # Collective: also on a rank that has something to raise.
            try:
                follow()
            except EmaError as error:
                failure = error
        self._raise_error()
        if failure is not None:
            raise failure

    def _wait_released(self, max_wait_s: float) -> None:
        if is_capturing():
            return
        if os.getpid() != self._pid:
            return
        if self._watched is not None:
            self._watched.check(self._model_name, self._pending_step)
        self._give_up_written()
        self._settle()
        if self._pending is None:
            return
        start = time.monotonic()
        if not self._pending.wait_released(max_wait_s=max_wait_s):
            self._drop(f"its bytes had not left after {time.monotonic() - start:.1f} s")

    def _give_up_written(self) -> None:
        """Gives the pending push up if somebody has written what it reads."""
        written = self._weights.release() if self._is_ours() else []
        if not written:
            return
        problem = (
            f"written since the push of step {self._pending_step} began, without wait_released(): "
            f"{', '.join(written)}; copied before each push from now on"
        )
        self._pushed = None
        self._lose()
        if self._pending is None or self._pending.done:
            _logger.warning('model "%s": %s', self._model_name, problem)
        else:
            self._pending.wait_released(max_wait_s=0.0)
            self._drop(problem)

    def _push_if_due(self) -> None:
        now = self._due.time(self._step)
        due = self._due.at(now)
        if not due:
            return
        can_push = self._is_back() and self._previous_has_ended()
        # All ranks have the reply to the push before by now, and go by its plan from this step on.
        if can_push and self._due.adopt():
            due = self._due.at(now)
        self._due.count(due, now)
        if all(track.paused for track in due):
            if due and can_push:
                self._due.refresh()
            return
        if not can_push:
            self._skipped += 1
            return
        tensors = self._tensors_of()
        frozen = {
            name: tensors.parameters[name] for name in self._frozen if name in tensors.parameters
        }
        sums = checksums_of(frozen)
        frozen_changed = self._has_pushed and self._frozen_sums != sums
        # Until its reply says that the server has these values, it may have others.
        self._frozen_sums, self._pending_sums, self._has_pushed = None, sums, True
        omits_frozen = self._link.run.may_omit_frozen and not frozen_changed
        weights = self._weights.take(
            tensors, self._pushed_names.difference(self._frozen if omits_frozen else ())
        )
        if self._watched is not None:
            self._watched.watch(weights)
        self._start(Push(self._step, now, weights, frozen_changed))

    def _start(self, push: Push) -> None:
        self._pending = self._link.run.start_push(
            step=push.step,
            weights=push.weights,
            time=push.time,
            frozen_changed=push.frozen_changed,
            timeout_s=self._timeout_s,
        )
        self._pending_step = push.step
        self._has_waited = False
        self._pushed = push if self._patience is not None else None

    def _is_back(self) -> bool:
        """Whether there is a run to push to; with on_error "wait", waits for that."""
        patience = self._patience
        if patience is not None and self._link.is_away and not patience.is_over:
            self._link.wait_back(patience.until)
            if self._link.is_away:
                patience.is_over = True
                self._note(self._step, self._link.error())
        return not self._link.is_away

    def _settle(self, *, until: float = math.inf) -> None:
        """With on_error "wait": waits until the pushed step is a version, and pushes it again after an
        outage, while nothing else writes the weights. Once an outage has lasted too long it does
        nothing until a push has succeeded: the ranks may be at different steps."""
        patience = self._patience
        if patience is None or not self._is_ours():
            return
        try:
            while self._again is not None or (self._pending is not None and not patience.is_over):
                if self._again is not None:
                    self._push_again(patience, until)
                    continue
                assert self._pending is not None
                start = time.monotonic()
                if self._pending.wait_done(
                    max_wait_s=min(self._max_wait_s, max(0.0, until - start))
                ):
                    self._harvest()
                else:
                    self._pending.wait_released(max_wait_s=0.0)
                    self._drop(f"it had not ended after {time.monotonic() - start:.1f} s")
        except BaseException:
            # Ctrl-C: what waits is not waited for again.
            self._lose()
            raise

    def _push_again(self, patience: Patience, until: float) -> None:
        assert self._again is not None
        push, _ = self._again
        self._link.wait_back(min(until, patience.until))
        if self._link.is_away or time.monotonic() >= min(until, patience.until):
            patience.is_over = True
            self._lose()
            return
        weights = push.weights
        self._again = None
        try:
            if not self._link.run.may_omit_frozen:
                # As they were then: buffers, and what no optimizer holds.
                weights = {**self._weights.take(self._tensors_of(), self._pushed_names), **weights}
            self._start(dataclasses.replace(push, weights=weights))
        except EmaError as error:
            self._skip(push.step, error)

    def _lose(self) -> None:
        """Gives up the step that would be pushed again."""
        if self._again is not None:
            (push, error), self._again = self._again, None
            self._skipped += 1
            self._note(push.step, self._link.error() if self._link.is_fenced else error)

    def _previous_has_ended(self) -> bool:
        """Waits for the reply to the pending push: a rank must not start another before it.

        Once: if it has not come by then, the steps that are due meanwhile are skipped at once.
        """
        if self._pending is None:
            return True
        if not self._has_waited:
            self._has_waited = True
            limit_s = self._budget_s
            if not self._in_step:
                limit_s = min(limit_s, _OUT_OF_STEP_WAIT_S)
            start = time.monotonic()
            if not self._pending.wait_done(max_wait_s=limit_s):
                waited_s = time.monotonic() - start
                self._note(
                    self._step,
                    DeadlineExceededError(
                        f"the push of step {self._pending_step} had not ended after {waited_s:.1f} s"
                    ),
                )
        self._harvest()
        return self._pending is None and not self._link.is_away

    def _harvest(self) -> None:
        """Takes the result of the pending push if there is one."""
        push = self._pending
        if push is None or os.getpid() != self._pid or not push.done:
            return
        self._pending = None
        self._sent_bytes += push.stats.sent_bytes
        try:
            self._version = push.wait()
        except EmaError as error:
            self._skip(self._pending_step, error)
            return
        self._pushes += 1
        self._pushed = None
        if self._patience is not None:
            self._patience.end_outage()
        self._in_step = True
        self._frozen_sums = self._pending_sums
        if self._is_alone:
            self._due.adopt()
        _logger.debug("step %d is version %d", self._pending_step, self._version.number)

    def _drop(self, problem: str) -> None:
        """Gives the pending push up, which reads no weights any more."""
        push = self._pending
        if push is None:
            return
        self._pending = None
        self._sent_bytes += push.stats.sent_bytes
        self._skip(self._pending_step, DeadlineExceededError(problem), lost=push)

    def _skip(self, step: int, error: EmaError, *, lost: PendingPush | None = None) -> None:
        """Counts a step that was not pushed, or keeps it to push it again; goes away from a server that
        seems to be away."""
        self._in_step = False
        push, self._pushed = self._pushed, None
        patience = None if self._closed else self._patience
        if push is not None and patience is not None and patience.lasts_after(error):
            self._again = (push, error)
            _logger.warning(
                'model "%s": push of step %d waits for the server, at most %g s: %s',
                self._model_name,
                step,
                self._max_outage_s,
                error,
            )
        else:
            self._skipped += 1
            self._note(step, error)
        if self._closed:
            if lost is not None:
                lost.abandon()
        elif is_outage(error):
            self._link.go_away(lost)

    def _note(self, step: int, error: EmaError) -> None:
        if self._on_error == "raise" or (self._on_error == "wait" and is_worth_waiting(error)):
            self._error = error
        _logger.warning(
            'model "%s": push of step %d skipped, the average goes on with the next: %s',
            self._model_name,
            step,
            error,
        )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_at_exit(self) -> None:
        if self._pending is None or self._closed or os.getpid() != self._pid:
            return
        if not self._pending.wait_done(max_wait_s=_EXIT_WAIT_S):
            self._pending.abandon()
        self._pending = None


@atexit.register
def _at_exit() -> None:
    for attachment in list(live):
        attachment._end_at_exit()
