# SPDX-License-Identifier: Apache-2.0
"""The pushes of one rank, one after the other, and what becomes of those that fail."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import threading
import time
from collections.abc import Callable

from ema_client import _ema
from ema_client._client.gpu import is_capturing
from ema_client._client.run import Joined, PendingPush
from ema_client._client.types import Version, time_after
from ema_client._errors import DeadlineExceededError, EmaError, InvalidArgumentError, failure_of
from ema_client._trainer.away import Link, Patience, is_final, is_outage, is_worth_waiting
from ema_client._trainer.changes import Changes
from ema_client._trainer.entrances import entrance
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.guard import WRITTEN_SINCE, PushedWeights, WatchedWeights, written_error
from ema_client._trainer.push import Push, PushOptions
from ema_client._trainer.refused_time import explained
from ema_client._trainer.skips import Skips, outlook
from ema_client._trainer.stalling import Stalling

_logger = logging.getLogger(__name__)

# How long a reply is waited for after a push that failed: the ranks may have come back at different
# steps, and then it never comes. Long enough for all to meet at the next one.
_OUT_OF_STEP_WAIT_S = 1.0
# How long an interpreter that ends without close(), and an exception, wait for the last push.
EXIT_WAIT_S = 1.0
# How long a push whose time is over may take to say why: it tells the server first.
_END_GRACE_S = 2.0
# How long the training waits while the server is told of a step that this rank cannot push.
_GIVE_UP_TIMEOUT_S = 1.0
# How long a trainer whose tracks are all paused waits for an answer whether they still are.
_REFRESH_TIMEOUT_S = 1.0


class Pushing:
    """The part of an `Attachment` that pushes. For the thread that trains."""

    def __init__(
        self,
        options: PushOptions,
        joined: Joined,
        weights: PushedWeights,
        frozen: FrozenTensors,
    ) -> None:
        waits = options.on_error == "wait"
        self._link = Link(options.model_name, lambda: self._due.go_on())
        self._model_name = options.model_name
        self._tensors_of = options.tensors_of
        self._changes = Changes(options.model_name, options.tensors_of())
        self._weights = weights
        self._frozen = frozen
        # With other ranks a plan is adopted at the next step that is due.
        self._is_alone = options.is_alone
        self._time_of = options.time_of
        self._max_wait_s = options.max_wait_s
        self._timeout_s = options.timeout_s
        self._on_error = options.on_error
        self._max_outage_s = options.max_outage_s if waits else 0.0

        # Held by the thread that is in a method or hook.
        self._lock = threading.RLock()
        self._pid = os.getpid()
        # The thread that trains, by what it did last.
        self._trainer = threading.get_ident()
        self._has_stepped = False
        self._unasked: Version | None = None
        self._closed = False
        self._pending: PendingPush | None = None
        self._pending_step = 0
        self._pushes = 0
        self._skipped = 0
        self._skips = Skips(says_all=options.on_error != "skip")
        # What had been skipped when the server went away, or was first late; None: it is there.
        self._skipped_before: int | None = None
        # Of the pushes, those that the server had and has no more.
        self._gone = 0
        self._stalling = Stalling(options.model_name)
        self._sent_bytes = 0
        self._wait_seconds = 0.0
        # False: the last push failed, so ranks may push at different steps.
        self._in_step = True
        # The reply to the pending push has been waited for.
        self._has_waited = False
        # What is left of max_wait_s for the hooks of this step.
        self._budget_s = options.max_wait_s
        # For on_error "raise" and "wait": what the next hook raises.
        self._error: EmaError | None = None
        # For on_error "wait".
        self._patience = Patience(options.max_outage_s) if waits else None
        self._pushed: Push | None = None  # What the pending push is of.
        self._again: tuple[Push, EmaError] | None = None  # It has failed, and will be tried again.
        # For `check`: what the last push reads in place.
        self._watched = WatchedWeights() if options.check else None
        # Called when a step has been counted, and pushed if it was due.
        self._follow: Callable[[], None] | None = None
        self._take(joined)

    @property
    def version(self) -> Version | None:
        """The last version that came of this run's pushes; before the first, and where a server has come
        back without it, the model's newest.

        For any thread, as `stats`.
        """
        self._look()
        return self._version

    @entrance
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

    def _take(self, joined: Joined) -> None:
        """Goes by a run that no step has been pushed to."""
        self._link.take(joined)
        self._known_run = joined.run
        self._step = joined.step
        self._version = joined.run.latest
        self._unasked = joined.unasked
        # Counted here and not taken from the server's replies: all ranks must try at the same steps,
        # whatever became of the pushes before.
        self._due = _ema.DueTracks()
        self._adopt_plan()
        self._pushed_names = frozenset(shard.name for shard in joined.run.shards)

    def _adopt_plan(self) -> None:
        """Takes over what UpdateModel has changed, as far as this rank knows."""
        self._due.adopt(self._link.run._get())

    def _refresh_plan(self) -> None:
        """Asks for the plan: with every track paused, no reply to a push brings it."""
        try:
            self._link.run.refresh_plan(timeout_s=_REFRESH_TIMEOUT_S)
        except EmaError as error:
            _logger.debug('model "%s": no new plan: %s', self._model_name, error)

    def _training_time(self, step: int) -> dict[str, float]:
        """After so many steps."""
        return time_after(self._time_of, step)

    def _due_at(self, now: dict[str, float]) -> list[_ema.DueTrack]:
        """As `DueTracks.at`, whose error says here which track it is, and what helps."""
        try:
            return self._due.at(now)
        except InvalidArgumentError as raised:
            error = raised  # `raised` goes at the end of the block.
        tracks, last = self._due.tracks, self._version
        raise explained(error, self._model_name, tracks, now, last, is_behind=self._is_behind())

    def _is_behind(self) -> bool:
        """The run has not come to the last step of the one before, as it was asked to begin earlier: pushes
        are refused until it has passed that."""
        return self._version is not None and self._step < self._version.step

    def _is_ours(self) -> bool:
        # A step that is captured into a CUDA graph is not made now, nor are its replays seen.
        return not self._closed and os.getpid() == self._pid and not is_capturing()

    def _wait_released(self, max_wait_s: float) -> None:
        if is_capturing():
            return
        if os.getpid() != self._pid:
            return
        self._give_up_written()
        self._settle()
        if self._pending is None:
            return
        start = time.monotonic()
        if not self._pending.wait_released(max_wait_s=max_wait_s):
            waited_s = time.monotonic() - start
            # It gives a server up sooner that is gone or hangs, and ranks that have not joined.
            why = "the server was away, or a rank, and " if waited_s < max_wait_s else ""
            self._drop(f"{why}its bytes had not left after {waited_s:.1f} s")

    def _advance(self, step: int) -> None:
        """Counts a step, and pushes the weights if it is due. Leaves what it fails with for `_raise_error`."""
        start = time.monotonic()
        self._trainer = threading.get_ident()
        self._step = step
        if not self._has_stepped:
            self._warn_of_old_weights()
        self._has_stepped = True
        # The weights are others now.
        self._pushed = None
        self._lose()
        self._harvest()
        try:
            self._push_if_due()
        except Exception as raised:  # No memory, or the user's `time`: the training goes on.
            self._skip(self._step, failure_of(raised))
        self._wait_seconds += time.monotonic() - start
        if self._follow is not None:
            # Collective: also on a rank that has something to raise.
            try:
                self._follow()
            except EmaError as error:
                self._error = self._error or error

    def _warn_of_old_weights(self) -> None:
        old = self._unasked
        if old is not None and self._link.run.rank == 0:
            _logger.warning(
                'model "%s": its averages go on from version %d (step %d), which an earlier run has '
                "made, with this run's weights. To begin anew, take another name or delete the model; "
                "to go on where this trainer stands, attach(..., resume=) with the state_dict() in its "
                "checkpoint",
                self._model_name,
                old.number,
                old.step,
            )

    def _push_if_due(self) -> None:
        now = self._training_time(self._step)
        due = self._due_at(now)
        if not due:
            return
        can_push = self._is_back() and self._previous_has_ended()
        # All ranks have the reply to the push before by now, and go by its plan from this step on.
        if can_push:
            self._adopt_plan()
        # Alone, this rank may have gone by it since the reply.
        due = self._due_at(now)
        self._due.count(due, now)
        if self._due.are_paused(due):
            if due and can_push:
                self._refresh_plan()
            return
        if not can_push:
            # The server is away, or hangs and has the push before.
            if self._skipped_before is None:
                self._skipped_before = self._skipped
            self._skipped += 1
            return
        self._push(now)
        if self._weights.must_wait:
            self._wait_released(self._budget_s)

    def _push(self, now: dict[str, float]) -> None:
        tensors = self._tensors_of()
        self._changes.look(tensors)
        frozen_changed = self._frozen.begin_push(tensors)
        omits_frozen = self._link.run.may_omit_frozen and not frozen_changed
        weights = self._weights.take(
            tensors, self._pushed_names.difference(self._frozen.names if omits_frozen else ())
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
            check=self._watched is not None,
            timeout_s=self._timeout_s,
        )
        self._pending_step = push.step
        self._has_waited = False
        self._pushed = push if self._patience is not None else None

    def _is_back(self) -> bool:
        """Whether there is a run to push to; with on_error "wait", waits for that."""
        patience = self._patience
        self._link.start()
        if patience is not None and self._link.is_away and not patience.is_over:
            self._link.wait_back(patience.until)
            if self._link.is_away:
                self._note(self._step, self._link.error())
                patience.is_over = True
        if self._link.is_away:
            return False
        self._find_lost()
        self._look_back(self._step)
        return True

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
                # No less than the push has itself, or one that takes long would be begun again for
                # ever. Where the server is gone or hangs, it takes some seconds.
                if self._pending.wait_done(
                    max_wait_s=min(self._timeout_s + _END_GRACE_S, max(0.0, until - start))
                ):
                    self._harvest()
                else:
                    self._pending.wait_released(max_wait_s=0.0)
                    self._drop(f"it had not ended after {time.monotonic() - start:.1f} s")
        except BaseException:
            # Ctrl-C: what waits is not waited for again.
            self._lose()
            raise
        # A push that was made again has marked what it reads; the caller is about to write it.
        self._weights.unmark()

    def _push_again(self, patience: Patience, until: float) -> None:
        assert self._again is not None
        push, _ = self._again
        self._link.wait_back(min(until, patience.until))
        if self._link.is_away or time.monotonic() >= min(until, patience.until):
            self._lose()
            patience.is_over = True
            return
        self._find_lost()
        self._look_back(push.step)
        if self._again is None:
            return
        weights = push.weights
        self._again = None
        try:
            if not self._link.run.may_omit_frozen:
                # As they were then: buffers, and what no optimizer holds.
                weights = {**self._weights.take(self._tensors_of(), self._pushed_names), **weights}
            self._start(dataclasses.replace(push, weights=weights))
        except Exception as raised:  # As in `_advance`.
            self._skip(push.step, failure_of(raised))

    def _find_lost(self) -> None:
        """Counts the step whose push an outage has cut off, if it is a version: only the reply was lost."""
        version = self._link.take_lost_version()
        if version is None:
            return
        if self._again is not None:
            self._again = None
        else:
            self._skipped -= 1
        self._count_pushed(version)
        _logger.info(
            'model "%s": step %d had been pushed, only the reply was lost',
            self._model_name,
            version.step,
        )

    def _look_back(self, next_step: int) -> None:
        """After the run was joined again: says whether the server still has all that it had."""
        run, last = self._link.run, self._version
        if run is self._known_run:
            return
        self._known_run = run
        there = run.latest
        if last is None or (there is not None and there.step >= last.step):
            return
        kept = self._pushes - self._gone
        gone = kept if there is None else min(kept, max(0, last.number - there.number))
        self._gone += gone
        _logger.warning(
            'model "%s": %s, %d of this trainer\'s updates are gone',
            self._model_name,
            (
                f"the server has forgotten the model, and the average begins anew at step {next_step}"
                if there is None
                else f"the server has gone back from step {last.step} to step {there.step}"
            ),
            gone,
        )
        if self._skipped_before is not None:
            self._skipped_before -= gone
        self._version = there

    def _look(self) -> None:
        """Takes the result of the pending push, unless another thread may be about to. What failed only
        the thread that trains: it may tell the server, while the next hook would wait for this one.
        """
        if self._lock.acquire(blocking=False):
            try:
                self._harvest(leaves_failure=threading.get_ident() != self._trainer)
            finally:
                self._lock.release()

    def _count_pushed(self, version: Version) -> None:
        self._version = version
        self._pushes += 1
        self._skips.end()
        self._frozen.end_push()
        if self._patience is not None:
            self._patience.end_outage()
        if self._skipped_before is not None:
            lost, self._skipped_before = self._skipped - self._skipped_before, None
            _logger.warning('model "%s": pushing again, %d steps were lost', self._model_name, lost)
        if self._link.run.rank == 0:
            self._stalling.look(version)

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
            is_done = self._pending.wait_done(max_wait_s=limit_s)
            waited_s = time.monotonic() - start
            self._budget_s = max(0.0, self._budget_s - waited_s)
            if not is_done:
                self._note(
                    self._step,
                    DeadlineExceededError(
                        f"the push of step {self._pending_step} had not ended after {waited_s:.1f} s"
                    ),
                )
        self._harvest()
        return self._pending is None and not self._link.is_away

    def _harvest(self, *, leaves_failure: bool = False, because: EmaError | None = None) -> None:
        """Takes the result of the pending push if there is one. `leaves_failure`: only a version, which
        takes no time. `because`: why it has been given up."""
        if os.getpid() != self._pid:
            return
        self._find_lost()
        push = self._pending
        if push is None or not push.done:
            return
        try:
            version = push.wait()
        except EmaError as error:
            if not leaves_failure:
                self._let_go(push)
                if (
                    because is None
                    and self._watched is not None
                    and error.reason == "DIGEST_MISMATCH"
                ):
                    because = written_error(self._model_name, self._pending_step, ())
                    self._error = self._error or because
                self._skip(self._pending_step, because or error)
            return
        self._let_go(push)
        self._count_pushed(version)
        self._pushed = None
        self._in_step = True
        if self._is_alone:
            self._adopt_plan()
        _logger.debug("step %d is version %d", self._pending_step, version.number)

    def _give_up_written(self) -> None:
        """Gives the pending push up if somebody has written what it reads; with `check` the next hook
        raises."""
        if not self._is_ours():
            return
        written = self._weights.take_written()
        moved = [] if self._watched is None else self._watched.moved()
        if not written and not moved:
            if self._watched is not None:  # What it has found by itself.
                self._harvest()
            return
        error = written_error(self._model_name, self._pending_step, moved or written)
        _logger.warning("%s%s", error.args[0], "" if moved else WRITTEN_SINCE)
        self._pushed = None
        self._lose()
        if self._pending is not None and not self._pending.done:
            self._pending.wait_released(max_wait_s=0.0)
            # No outage, as far as is known: the next step goes by the same run.
            self._pending.abandon()
            self._harvest(because=error)
        elif moved:
            self._harvest()  # It may have found that, too.
        if moved:
            self._error = error

    def _drop(self, problem: str) -> None:
        """Gives the pending push up, which reads no weights any more."""
        push = self._pending
        if push is None:
            return
        self._let_go(push)
        self._skip(self._pending_step, DeadlineExceededError(problem), lost=push)

    def _let_go(self, push: PendingPush) -> None:
        self._pending = None
        self._sent_bytes += push.stats.sent_bytes

    def _skip(self, step: int, error: EmaError, *, lost: PendingPush | None = None) -> None:
        """Counts a step that was not pushed, or keeps it to push it again; goes away from a server that
        seems to be away."""
        self._in_step = False
        if is_outage(error) and self._skipped_before is None:
            self._skipped_before = self._skipped
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
            if is_final(error):
                self._give_up(step, str(error))
            self._skipped += 1
            self._note(step, error)
        if self._closed:
            if lost is not None:
                lost.abandon()
        elif is_outage(error):
            self._link.go_away(step, lost)

    def _give_up(self, step: int, why: str) -> None:
        """Says that this rank will not push the step, so that no other waits for it."""
        if self._is_alone or self._closed or self._link.is_away:
            return
        try:
            self._link.run.give_up(step, why, timeout_s=_GIVE_UP_TIMEOUT_S)
        except EmaError as error:
            _logger.debug(
                'model "%s": nobody knows that step %d is given up: %s',
                self._model_name,
                step,
                error,
            )

    def _lose(self) -> None:
        """Gives up the step that would be pushed again."""
        if self._again is not None:
            (push, error), self._again = self._again, None
            error = self._link.error() if self._link.is_fenced else error
            self._give_up(push.step, str(error))
            self._skipped += 1
            self._note(push.step, error)

    def _note(self, step: int, error: EmaError) -> None:
        patience = self._patience
        waited = patience is not None and not patience.is_over and is_worth_waiting(error)
        if waited or self._on_error == "raise":
            self._error = error
        count = self._skips.count(error)
        _logger.log(
            logging.WARNING if count > 0 else logging.DEBUG,
            'model "%s": push of step %d skipped, %s: %s%s',
            self._model_name,
            step,
            outlook(error),
            error,
            f" ({count} steps by now; the next warning is at {2 * count})" if count > 1 else "",
        )

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _end_at_exit(self) -> None:
        if self._pending is None or self._closed or os.getpid() != self._pid:
            return
        if not self._pending.wait_done(max_wait_s=EXIT_WAIT_S):
            self._pending.abandon()
        self._pending = None
