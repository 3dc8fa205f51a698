# SPDX-License-Identifier: Apache-2.0
"""What `attach` returns: it follows an optimizer and pushes the weights when an update is due."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client.client import Client
from ema_client._client.run import Joined
from ema_client._client.types import Stats
from ema_client._client.unread import attachments
from ema_client._errors import EmaError, FailedPreconditionError
from ema_client._model.moves import move_inside
from ema_client._model.optimizers import OutOfTurn, StepKind, after_closure, step_kind, was_skipped
from ema_client._trainer.ema_model import WithEmaModel
from ema_client._trainer.entrances import entrance, keep_uncompiled
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.guard import BeforeLoad, PushedWeights, memory_of
from ema_client._trainer.push import PushOptions
from ema_client._trainer.pushing import EXIT_WAIT_S
from ema_client._trainer.uncounted import Uncounted, listen

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class Attachment(WithEmaModel):
    """Follows an optimizer: counts its steps and pushes the weights of those that are due.

    Made by `ema_client.attach`. To be used by the thread that trains; `stats`, `version` and `step` any
    thread may read at any time. A push reads the parameters in place while the next forward and backward run;
    `optimizer.step()` waits for it (on a GPU its stream does), at most `max_wait_s`, before it changes
    them, and so do `load_state_dict` (but that of a ScriptModule that is in no other module) and what
    moves them to shared memory, from any thread. Whoever else writes weights between steps, or resizes
    their storage, must call `wait_released` first, and what it writes is not averaged before the next
    step: for what belongs to the step (clipping of weights) attach without an optimizer, and call
    `after_step` after it. A forked child (a DataLoader worker) does nothing. Replays of a CUDA
    graph call no hooks: where a graph makes the step, attach without an optimizer, and call
    `wait_released()` before and `after_step(wait_released=False)` after each `graph.replay()`.

    When the server is away, a thread joins the run again, on every rank, and pushes start again when
    all have: unless on_error is "wait", no training thread waits for the server or, but for the reply
    to a push, for another rank.
    """

    def __init__(
        self,
        options: PushOptions,
        *,
        client: Client,
        joined: Joined,
        join_at: Callable[[Mapping[str, Any] | None], Joined | None],
        module: torch.nn.Module,
        optimizers: list[torch.optim.Optimizer] | None,
        frozen: FrozenTensors,
        keep_resumable: int,
    ) -> None:
        super().__init__(options, joined, PushedWeights(optimizers, frozen.names), frozen)
        keep_uncompiled(Attachment)
        move_inside(_unread)
        self._client = client
        self._join_at = join_at  # Collective.
        self._module = module
        self._keep_resumable = keep_resumable
        self._is_by_hand = optimizers is None
        self._expects_steps = True
        # For a callback that evaluates with the average.
        self._has_told_of_start = False
        # Optimizers that have not stepped yet, and the last of them then.
        self._awaited = set(map(id, optimizers or ()))
        self._closing: int | None = None
        self._out_of_turn = OutOfTurn(optimizers or ())
        self._uncounted = Uncounted(optimizers, module)
        self._counting: list[Any] = []
        self._hooks: list[Any] = []
        try:
            self._hook(optimizers or [])
        except BaseException:
            self._detach()
            raise
        attachments.add(self)
        listen()

    def _hook(self, optimizers: list[torch.optim.Optimizer]) -> None:
        import torch

        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
            self._counting.append(optimizer.register_step_post_hook(self._after_step))
            self._hooks.append(self._counting[-1])
        for part in self._module.modules():
            # Those take no hooks, but what they are in may have one, which comes first.
            if not isinstance(part, torch.jit.ScriptModule):
                hook = part.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    BeforeLoad(self.wait_released)
                )
                self._hooks.append(hook)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Closes; after an exception without waiting long, since the other ranks may not push any more."""
        self._expects_steps &= exc_type is None
        self.close(timeout_s=None if exc_type is None else min(EXIT_WAIT_S, self._timeout_s))

    @property
    def module(self) -> torch.nn.Module:
        """The model, outside any wrapper."""
        return self._module

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._step

    @property
    def stats(self) -> Stats:
        """What has been done up to now. For any thread: while another one is in a hook or method, a push
        that has just ended may not be counted yet. One that has failed is counted by the thread that
        trains."""
        self._look()
        return Stats(
            pushes=self._pushes,
            skipped=self._skipped,
            sent_bytes=self._sent_bytes,
            wait_seconds=self._wait_seconds,
        )

    def _reads_in(self, ranges: Iterable[tuple[int, int]]) -> bool:
        return self._weights.are_in(ranges)

    def _is_trained_here(self, address: str, model_name: str) -> bool:
        """Whether this thread makes the steps, and the model is that one of that server."""
        is_ours = self._is_ours() and self._trainer == threading.get_ident()
        return is_ours and (self._client._address, self._model_name) == (address, model_name)

    @entrance
    def after_step(self, *, wait_released: bool = True) -> None:
        """Counts a step, and pushes the weights if it is due: of an attachment without an optimizer.

        To be called on every rank, after each step.

        Args:
            wait_released: waits until the bytes have left, at most `max_wait_s`. False: whoever changes
                the weights next calls the method `wait_released` first.

        Raises:
            FailedPreconditionError: the attachment has an optimizer, whose steps count by themselves; or
                it is closed.
            EmaError: a step could not be pushed, unless on_error is "skip".
        """
        self._check_open()
        if self._is_ours():
            if self._counting:
                raise FailedPreconditionError(
                    f'model "{self._model_name}": after_step(), but each optimizer.step() counts by '
                    "itself here: leave it out, or attach(model, None, url)",
                    reason="BAD_REQUEST",
                )
            self._budget_s = self._max_wait_s
            try:
                self._advance(self._step + 1)
            finally:
                if wait_released:
                    start = time.monotonic()
                    self._wait_released(self._budget_s)
                    self._wait_seconds += time.monotonic() - start
            self._raise_error()

    @entrance
    def wait_released(self) -> None:
        """Waits until no push reads the weights in place any more, at most `max_wait_s`.

        With on_error "wait": until the push has ended, an outage included.
        """
        self._wait_released(self._max_wait_s)

    @entrance
    def _count_by_hand(self) -> None:
        """From now on `_count` or `after_step` counts, not each `optimizer.step()`: before the first step."""
        self._expects_steps = False
        for hook in self._counting:
            hook.remove()
        self._counting = []

    @entrance
    def _count(self, step: int) -> None:
        """Says that `step` steps are done, as many as before or more; pushes if an update is due."""
        self._check_open()
        if self._is_ours():
            self._advance(step)
            self._raise_error()

    @entrance
    def close(self, *, timeout_s: float | None = None) -> None:
        """Waits for the last push, and lets the optimizer and the server go: at most `timeout_s` in all
        (None: that of `attach`), and a second more to tell other ranks what this one has given up.
        To be called on all ranks after the same step: no later one can be pushed without this rank, and
        the others wait for it.

        Brings `ema_model`, if it was asked for, to the last version, unless less time is left than that
        took before: then it stays as it was, with a warning. May be called again. Never raises an
        EmaError: a push that fails now is a skipped one.
        """
        if self._closed:
            return
        self._warn_of_no_step()
        until = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        try:
            self._give_up_written()
            self._settle(until=until)
            self._detach()
            if os.getpid() != self._pid:
                return
            if self._pending is not None:
                start = time.monotonic()
                if self._pending.wait_done(max_wait_s=left_s()):
                    self._harvest()
                else:
                    self._drop(
                        f"it had not ended {time.monotonic() - start:.1f} s after the last step"
                    )
            if self._copy is not None:
                # 0 is no time for a call.
                try:
                    self._update_copy(raises=False, timeout_s=max(left_s(), 0.001))
                except EmaError as error:
                    _logger.warning("%s", error)
        finally:
            # Also after a Ctrl-C.
            self._detach()
            if os.getpid() == self._pid:
                try:
                    self._link.close(until=until)
                finally:
                    self._client.close()

    def _check_open(self) -> None:
        if self._closed and os.getpid() == self._pid:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the attachment is closed, so no step is averaged any more: '
                "attach() anew",
                reason="BAD_REQUEST",
            )

    def _hear_of_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Of any optimizer, in any thread: nothing is waited for."""
        if self._is_ours() and self._expects_steps and self._uncounted.hear(optimizer):
            _logger.warning(
                'model "%s": its weights are changed, since step %d, by an optimizer (%s) that attach() was '
                "not given: was it made after that? Its steps do not count: attach to it",
                self._model_name,
                self._step,
                type(optimizer).__name__,
            )

    def _warn_of_no_step(self) -> None:
        if not self._is_ours() or not self._expects_steps or self._has_stepped:
            return
        # There may have been nothing to train: steps by hand, or a run that goes on.
        is_open = self._is_by_hand or (self._step > 0 and self._unasked is None)
        if is_open and not self._uncounted.has_any:
            return
        _logger.warning(
            'model "%s": no step was counted, so nothing was pushed: %s',
            self._model_name,
            (
                "attach() was given no optimizer, so after_step() must be called after each step"
                if self._is_by_hand
                else "each optimizer that attach() was given must step; was one made anew after it?"
            ),
        )

    def _detach(self) -> None:
        self._closed = True
        attachments.discard(self)
        listen()
        for hook in self._hooks:
            hook.remove()

    @entrance
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        kind = step_kind(optimizer)
        if kind is StepKind.STATE_INITIALIZATION:
            # This step writes the weights, although with unchanged values. The error of a failed push is
            # left to the next step of the training: an exception here would leave learning rates at 0.
            self.wait_released()
        if kind is not StepKind.TRAINING:
            return None
        with_wait = after_closure(optimizer, args, kwargs, self._before_change)
        if with_wait is None:
            self._before_change()
        return with_wait

    @entrance
    def _before_change(self) -> None:
        if self._is_ours():
            start = time.monotonic()
            self._wait_released(self._max_wait_s)
            self._budget_s = max(0.0, self._max_wait_s - (time.monotonic() - start))
            self._wait_seconds += time.monotonic() - start
            if self._on_error == "raise":
                self._harvest()
            self._raise_error()

    @entrance
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._is_ours() or step_kind(optimizer) is not StepKind.TRAINING:
            return
        if was_skipped(optimizer):
            return
        if self._out_of_turn.count(id(optimizer), self._closing):
            _logger.warning(
                'model "%s": of the optimizers of one parameter each some step twice before others have '
                "stepped, so steps are counted wrongly: attach(model, None, url), and call after_step() "
                "after each step",
                self._model_name,
            )
        self._awaited.discard(id(optimizer))
        if self._awaited:
            return
        # The one that ends the first step ends all: the others may be skipped now and then.
        self._closing = self._closing or id(optimizer)
        if id(optimizer) == self._closing:
            self._advance(self._step + 1)


@contextlib.contextmanager
def _unread(storage: torch.UntypedStorage) -> Iterator[None]:
    """No push reads it meanwhile, nor starts to."""
    with contextlib.ExitStack() as held:
        for attachment in list(attachments):
            if attachment._pid == os.getpid() and attachment._reads_in([memory_of(storage)]):
                held.enter_context(attachment._lock)
                attachment.wait_released()
        yield


@atexit.register
def _at_exit() -> None:
    for attachment in list(attachments):
        if attachment._pid != os.getpid():
            continue
        # A daemon thread may be in a hook, and not come out any more.
        is_alone = attachment._lock.acquire(timeout=EXIT_WAIT_S)
        attachment._end_at_exit()
        if is_alone:
            attachment._lock.release()
