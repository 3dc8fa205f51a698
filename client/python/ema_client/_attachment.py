# SPDX-License-Identifier: Apache-2.0
"""What `attach` returns: it follows an optimizer and pushes the weights when an update is due."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

from ema_client._client import Client
from ema_client._due import DueTracks
from ema_client._ema_model import WithEmaModel
from ema_client._errors import (
    AbortedError,
    DeadlineExceededError,
    EmaError,
    FailedPreconditionError,
    UnavailableError,
)
from ema_client._guard import BeforeLoad, WatchedWeights, checksums_of, weights_to_push
from ema_client._optimizers import after_closure, was_skipped
from ema_client._resume import State, save
from ema_client._run import Joined, PendingPush
from ema_client._torch_model import NamedTensors
from ema_client._types import Stats, TimeLike, Version

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# For a server that is away, in a thread of its own: how long a try to join again may take, and what
# lies between two.
_REJOIN_TIMEOUT_S = 2.0
_REJOIN_INTERVAL_S = 0.25
# What a push ends with that has found the server restarted.
_FORGOTTEN = ("FENCED", "MODEL_NOT_FOUND", "RUN_INCOMPLETE")
# How long a reply is waited for after a push that failed: the ranks may have come back at different
# steps, and then it never comes. Long enough for all to meet at the next one.
_OUT_OF_STEP_WAIT_S = 1.0
# How long an interpreter that ends without close() waits for the last push.
_EXIT_WAIT_S = 1.0

OnError = Literal["skip", "raise"]

# Attachments that push. `averaged` must not write into weights that one of them still reads.
live: weakref.WeakSet[Attachment] = weakref.WeakSet()


class Attachment(WithEmaModel):
    """Follows an optimizer: counts its steps and pushes the weights of those that are due.

    Made by `ema_client.attach`. To be used by the thread that trains. A push reads the parameters in place
    while the next forward and backward run; `optimizer.step()` waits for it, at most
    `max_wait_s`, before it changes them, and so does `load_state_dict`. Whoever else writes weights
    between steps (clipping of weights) must call `wait_released` first. A forked child (a
    DataLoader worker) does nothing.

    When the server is away, a thread joins the run again, on every rank, and pushes start again when
    all have: no training thread waits for the server or, but for the reply to a push, for another rank.
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
        frozen: list[str],
        keep_resumable: int,
        check: bool,
    ) -> None:
        self._client = client
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
        # For on_error "raise": what the next hook raises.
        self._error: EmaError | None = None

        # Written by the thread that joins again; `_away` last.
        self._away = False
        self._is_fenced = False
        self._rejoining: threading.Thread | None = None
        self._stop = threading.Event()

        self._take(joined)
        self._frozen = frozen
        # Checksums of these as the server has them, if this rank knows: of its last push, if that
        # succeeded. Before the first the run has none.
        self._frozen_sums: list[int] | None = None
        self._has_pushed = False
        self._pending_sums: list[int] = []
        # For `check`: what the last push reads in place.
        self._watched = WatchedWeights() if check else None
        self._optimizers = optimizers
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
        atexit.register(_at_exit, weakref.ref(self))

    def _take(self, joined: Joined) -> None:
        """Goes by a run that no step has been pushed to."""
        self._run = joined.run
        self._open_run = joined.open_run
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
        self.close()

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

    def state_dict(self, *, timeout_s: float | None = None) -> dict[str, int | str]:
        """What belongs into the trainer's own checkpoint: which average is that of this step.

        To be called between two steps, on rank 0 or on all ranks: they get equal dicts, of plain
        numbers and strings. No rank waits for another, but for the running push. Rank 0 returns when
        the version is on the server's disk and has a label that begins with "resume-<step>"; of such
        labels the server keeps the newest `keep_resumable`. What rank 0's checkpoint says is therefore
        there; other ranks' are not to be used without it.

        A server that is away raises: whether a checkpoint without its average is worth something is
        the trainer's to say.

        Args:
            timeout_s: seconds for the push, and for each call but the save, which may take minutes.
                None: those of `attach`.

        Raises:
            AbortedError: FENCED: a newer run pushes now, and the average is not this run's any more.
            FailedPreconditionError: NO_DATA_DIR: the server keeps nothing; RESUME_MISMATCH: the
                average is of a later step than the trainer's.
            DeadlineExceededError: the push has not ended.
            EmaError: as `Client.create_checkpoint`.

        Example:
            >>> torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, path)
            >>> ...  # after a restart
            >>> ema = ema_client.attach(model, optimizer, url, resume=torch.load(path)["ema"])
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self.wait_pushed(timeout_s=timeout_s)
        self._raise_error()
        # Not this rank's last reply: after a restart of the server the average may be an earlier one.
        # Until this rank pushes again, nothing can be committed, so all ranks find the same.
        latest = self._client.model(self._model_name, timeout_s=timeout_s).latest
        if self._is_fenced or (latest is not None and latest.run_epoch > self._run.run_epoch):
            raise AbortedError(
                f'model "{self._model_name}": a newer run pushes now; the average is not this run\'s',
                reason="FENCED",
            )
        if latest is not None and latest.step > self._step:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the average is of step {latest.step}, the trainer at step '
                f"{self._step}",
                reason="RESUME_MISMATCH",
            )
        state = State(
            model=self._model_name,
            launch_id=self._launch_id,
            step=self._step,
            version=0 if latest is None else latest.number,
            incarnation=0 if latest is None else latest.incarnation,
            version_step=0 if latest is None else latest.step,
        )
        if latest is not None and self._run.rank == 0:
            save(self._client, state, latest, keep=self._keep_resumable)
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave: as `attach(..., resume=state)`, for an attachment.

        Before the first step, on every rank, with equal dicts. Opens a new run; on an error the
        attachment stays as it was.

        Raises:
            InvalidArgumentError: the state is of another model or format.
            FailedPreconditionError: steps have been made; or RESUME_MISMATCH: the server has no average
                that stands where the state does; the message lists what there is.
            EmaError: what fails on any rank raises on every rank.
        """
        if self._has_stepped or self._closed:
            raise FailedPreconditionError(
                f'model "{self._model_name}": load_state_dict comes before the first step, and this is '
                f"step {self._step}",
                reason="BAD_REQUEST",
            )
        old_run = self._run
        self._take(self._join_at(state))
        old_run.close()

    def after_step(self, *, wait_released: bool = True) -> None:
        """Counts a step, and pushes the weights if it is due: of an attachment without an optimizer.

        To be called on every rank, after each step.

        Args:
            wait_released: waits until the bytes have left, at most `max_wait_s`. False: whoever changes
                the weights next calls the method `wait_released` first.

        Raises:
            EmaError: with on_error "raise": a step could not be pushed.
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

    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Waits for the end of the running push, if there is one.

        Args:
            timeout_s: seconds. None: those of `attach`.

        Returns:
            As `version`: the same on all ranks, unless the reply to one was lost.

        Raises:
            DeadlineExceededError: the push has not ended. It goes on.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        pending = self._pending if os.getpid() == self._pid else None
        if pending is not None and not pending.wait_done(max_wait_s=timeout_s):
            raise DeadlineExceededError(f"the push of step {self._pending_step} has not ended")
        return self.version

    def wait_released(self) -> None:
        """Waits until no push reads the weights in place any more, at most `max_wait_s`."""
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
        self._closed = True
        live.discard(self)
        for hook in self._hooks:
            hook.remove()
        if os.getpid() != self._pid:
            return
        if self._pending is not None:
            timeout_s = self._timeout_s if timeout_s is None else timeout_s
            if self._pending.wait_done(max_wait_s=timeout_s):
                self._harvest()
            else:
                self._drop(f"it had not ended {timeout_s} s after the last step")
        if self._copy is not None:
            self._update_copy(raises=False, timeout_s=timeout_s)
        self._stop.set()
        if self._rejoining is not None:
            # One try may be under way.
            self._rejoining.join(3 * _REJOIN_TIMEOUT_S)
        self._run.close()
        self._client.close()

    def _is_ours(self) -> bool:
        return not self._closed and os.getpid() == self._pid

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
        self._harvest()
        try:
            self._push_if_due()
        except EmaError as error:
            self._skip(self._step, error)
        self._wait_seconds += time.monotonic() - start
        self._raise_error()
        for follow in self._followers:
            follow()

    def _wait_released(self, max_wait_s: float) -> None:
        written = [] if self._watched is None else self._watched.take_written()
        if written:
            raise FailedPreconditionError(
                f'model "{self._model_name}": written while they were pushed at step '
                f"{self._pending_step}, without wait_released(): {', '.join(written)}",
                reason="BAD_REQUEST",
            )
        if self._pending is None or os.getpid() != self._pid:
            return
        start = time.monotonic()
        if not self._pending.wait_released(max_wait_s=max_wait_s):
            self._drop(f"its bytes had not left after {time.monotonic() - start:.1f} s")

    def _push_if_due(self) -> None:
        now = self._due.time(self._step)
        due = self._due.at(now)
        if not due:
            return
        can_push = not (self._away or self._is_fenced) and self._previous_has_ended()
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
        weights = self._weights(tensors, self._run.may_omit_frozen and not frozen_changed)
        if self._watched is not None:
            self._watched.watch(weights)
        self._pending = self._run.start_push(
            step=self._step,
            weights=weights,
            time=now,
            frozen_changed=frozen_changed,
            timeout_s=self._timeout_s,
        )
        self._pending_step = self._step
        self._has_waited = False

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
        return self._pending is None and not self._away

    def _weights(self, tensors: NamedTensors, omits_frozen: bool) -> dict[str, torch.Tensor]:
        names = self._pushed_names.difference(self._frozen if omits_frozen else ())
        return weights_to_push(tensors, names, self._optimizers)

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
        """Counts a step that was not pushed; goes away from a server that seems to be away."""
        self._skipped += 1
        self._in_step = False
        self._note(step, error)
        is_away = isinstance(error, (UnavailableError, DeadlineExceededError))
        if self._closed:
            if lost is not None:
                lost.abandon()
        elif is_away or error.reason in _FORGOTTEN:
            self._away = True
            self._rejoining = threading.Thread(target=self._rejoin, args=(lost,), name="ema-rejoin")
            self._rejoining.start()

    def _note(self, step: int, error: EmaError) -> None:
        if self._on_error == "raise":
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

    def _rejoin(self, lost: PendingPush | None) -> None:
        """Joins the run again and waits until all ranks have; in a thread of its own."""
        if lost is not None:
            lost.abandon()
        problem = ""
        while True:
            try:
                run = self._open_run(_REJOIN_TIMEOUT_S)
                run.wait_ready(timeout_s=_REJOIN_TIMEOUT_S)
                break
            except EmaError as error:
                if error.reason == "FENCED":
                    # The server knows this launch: a newer one has taken over.
                    self._is_fenced = True
                    _logger.warning(
                        'model "%s": a newer run pushes now; this one does not any more',
                        self._model_name,
                    )
                    return
                if str(error) != problem:
                    problem = str(error)
                    _logger.info('model "%s": not pushing yet: %s', self._model_name, problem)
            # A program that has forgotten close() ends all the same.
            if self._stop.wait(_REJOIN_INTERVAL_S) or not threading.main_thread().is_alive():
                return
        self._run.close()
        self._run = run
        self._due.go_on(run)
        _logger.info('model "%s": pushing again', self._model_name)
        self._away = False

    def _end_at_exit(self) -> None:
        if self._pending is None or self._closed or os.getpid() != self._pid:
            return
        if not self._pending.wait_done(max_wait_s=_EXIT_WAIT_S):
            self._pending.abandon()
        self._pending = None


def _at_exit(reference: weakref.ref[Attachment]) -> None:
    attachment = reference()
    if attachment is not None:
        attachment._end_at_exit()
