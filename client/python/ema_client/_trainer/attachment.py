# SPDX-License-Identifier: Apache-2.0
"""What `attach` returns: it counts the steps of an optimizer, and pushes the weights when an update is due."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client.client import Client
from ema_client._client.types import Stats, Version
from ema_client._client.unread import attachments
from ema_client._errors import FailedPreconditionError
from ema_client._model.engine import StepHook
from ema_client._model.optimizers import (
    StepKind,
    after_closure,
    calls_hooks,
    check_counted,
    check_held,
    current_step,
    was_skipped,
    with_contained,
)
from ema_client._model.torch_model import shard_again
from ema_client._trainer.arguments import PushOptions
from ema_client._trainer.ema_model import EmaModel
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.guard import BeforeLoad, PushedWeights, synchronized, keep_uncompiled
from ema_client._trainer.joining import Joined
from ema_client._trainer.pusher import EXIT_WAIT_S, Pusher
from ema_client._trainer.resumable import ResumableState

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class Attachment:
    """Counts the steps of an optimizer, and pushes the weights of those steps that are due.

    Created by `ema_client.attach`. For the training thread; any thread may read `stats`, `version` and
    `step` at any time.

    A push reads the parameters in place while the next forward and backward run. `optimizer.step()` waits
    for the push (on a GPU, its stream waits) before it changes them, at most `max_wait_s`, and so does
    `load_state_dict` of the model (but not that of a top-level ScriptModule, which takes no hooks). Other
    code that writes weights between two steps, moves them to shared memory or resizes their storage must
    first call `wait_released`. What it writes is averaged with the next step: if the write belongs to
    the step (weight clipping), attach without an optimizer, and call `after_step` after the write.

    A replay of a CUDA graph calls no hooks. If a graph contains the step, attach without an optimizer, and
    call `wait_released()` before and `after_step(wait_released=False)` after each `graph.replay()`.

    A forked child, such as a DataLoader worker, ignores the attachment.

    After an outage, a thread rejoins the run on every rank, and pushes continue when all ranks have
    rejoined. Until then, the training thread does not wait for the server or for other ranks, unless
    on_error is "wait".
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
        engine: Any,
        frozen: FrozenTensors,
        keep_resumable: int,
    ) -> None:
        """`engine`: DeepSpeed's, or Megatron-core's optimizer. Its steps are counted instead of those of
        `optimizers`."""
        weights = PushedWeights(optimizers, frozen.names, checks=options.check)
        self._pusher = pusher = Pusher(options, joined, weights, frozen)
        # Used by `synchronized`.
        self._lock = pusher.lock
        self._pid = pusher.pid
        self._state = ResumableState(pusher, client, join_at, keep=keep_resumable)
        self._ema_model = EmaModel(pusher, client, module)
        keep_uncompiled(Attachment)
        self._client = client
        self._model_name = options.model_name
        self._module = module
        self._is_by_hand = optimizers is None and engine is None
        # `close` warns if no step was counted.
        self._expects_steps = True
        # The given optimizers' ids: all, those that have not stepped yet, those that have stepped in the
        # current call of an outermost step(), and the one that completes each step.
        self._given = frozenset(map(id, optimizers or ()))
        self._awaited = set(self._given)
        self._stepped: list[int] = []
        self._closing: int | None = None
        # The optimizers with hooks, by id: also those that contain the given ones, or are contained in them.
        self._hooked: dict[int, torch.optim.Optimizer] = {}
        self._hooks: list[Any] = []
        try:
            self._hook(with_contained(optimizers or []))
            if engine is not None:
                hook = StepHook(engine, self._before_change, self._after_engine_step)
                self._hooks.append(hook)
        except BaseException:
            self._detach()
            raise
        attachments.add(self)

    def _hook(self, optimizers: list[torch.optim.Optimizer]) -> None:
        import torch

        for optimizer in filter(calls_hooks, optimizers):
            self._hook_steps(optimizer)
        for part in self._module.modules():
            # A ScriptModule takes no hooks. The hook of a module that contains it runs first.
            if not isinstance(part, torch.jit.ScriptModule):
                hook = part.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                    BeforeLoad(self.wait_released)
                )
                self._hooks.append(hook)

    def _hook_steps(self, optimizer: torch.optim.Optimizer) -> None:
        self._hooked[id(optimizer)] = optimizer
        self._hooks.append(optimizer.register_step_pre_hook(self._before_step))
        self._hooks.append(optimizer.register_step_post_hook(self._after_step))

    def __repr__(self) -> str:
        stats = self._pusher.stats
        state = "closed" if self._pusher.is_closed else "open"
        version = self.version and self.version.number
        return (
            f"Attachment(model {self._model_name!r}, {state}, step={self.step}, version={version}, "
            f"pushes={stats.pushes}, skipped={stats.skipped})"
        )

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        """Closes. After an exception it waits at most a second, because the other ranks may have stopped
        pushing."""
        self._expects_steps &= exc_type is None
        self.close(
            timeout_s=None if exc_type is None else min(EXIT_WAIT_S, self._pusher.options.timeout_s)
        )

    @property
    def module(self) -> torch.nn.Module:
        """The model, outside any wrapper."""
        return self._module

    @property
    def step(self) -> int:
        """Optimizer steps so far."""
        return self._pusher.step

    @property
    def stats(self) -> Stats:
        """What the pushes have done so far. While another thread is in a hook or method, a push that has just
        ended may not be counted yet. Only the training thread counts a failed push."""
        return self._pusher.stats

    @property
    def version(self) -> Version | None:
        """The last version that this run's pushes have made. Before the first push, and after a server has
        restarted without that version, the model's newest version."""
        return self._pusher.version

    @synchronized
    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Waits for the end of the pending push, if there is one.

        Args:
            timeout_s: seconds. None: that of `attach`. With on_error "wait", an outage may take longer.

        Returns:
            The same as `version`. It is equal on all ranks, unless one rank has lost the reply.

        Raises:
            DeadlineExceededError: the push has not ended. It continues.
        """
        return self._pusher.wait_pushed(
            self._pusher.options.timeout_s if timeout_s is None else timeout_s
        )

    def state_dict(self, *, timeout_s: float | None = None) -> dict[str, int | str] | None:
        """The state to put into the trainer's own checkpoint: it identifies the average of this step.

        Call it between two steps, on rank 0 or on all ranks. All ranks get equal dicts of plain numbers and
        strings. No rank waits for another, except for the pending push. Rank 0 returns when the server has
        written the version to its disk, with a label that begins with "resume-<step>". Of these labels the
        server keeps the newest `keep_resumable`. Use only the dict in rank 0's checkpoint, whose version is
        then certain to exist.

        `dcp.load` also calls this, before the first step, for a template that it overwrites. So a call
        before the first step removes no older label, and `load_state_dict` removes the label of that call,
        unless it loads that state.

        A server without a data directory (`--data-dir`), or with on_error "skip" one that is unreachable or
        cannot write to its disk, does not fail the trainer's checkpoint: the result is None, with a warning.
        `attach(existing="continue")` then continues the average from the server's newest version.

        Args:
            timeout_s: seconds for the push, and for each call except the save, which may take minutes.
                None: that of `attach`, or with on_error "wait" `max_outage_s`, if that is longer. 0: does
                not wait for the push. With on_error "wait", an outage may take longer.

        Raises:
            AbortedError: FENCED: a newer run has started, or the model was rolled back.
            FailedPreconditionError: RESUME_MISMATCH: the average is of a later step than the trainer's.
            UnavailableError, DeadlineExceededError: the server is unreachable, its disk has failed, or the
                push has not ended. Not with on_error "skip".
            EmaError: as `Client.create_checkpoint`.

        Example:
            >>> torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, path)
            >>> ...  # after a restart
            >>> ema = ema_client.attach(model, optimizer, url, resume=torch.load(path)["ema"])
        """
        return self._state.save(timeout_s)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continues from a result of `state_dict`, as `attach(..., resume=state)` does. To be called after
        `attach(..., existing="continue")`, which accepts a model that has an average.

        Collective. Call it before the first step, on every rank, with equal dicts, or with None to resume
        nothing. It opens a new run. After an error the attachment is unchanged.

        Raises:
            InvalidArgumentError: the state is of another model or format, or differs between ranks.
            FailedPreconditionError: steps have been made; or RESUME_MISMATCH: the server has no average
                for the state; the message lists the existing ones.
            OutOfRangeError: VERSION_NOT_KEPT: the server no longer has the version that the state names.
            EmaError: an error on any rank raises on every rank.
        """
        self._state.load(state)

    @property
    def ema_model(self) -> torch.nn.Module:
        """A copy of the model with the newest average, in eval mode.

        Always the same module. The first access creates it: a deep copy whose tensors are the pulled bytes.
        Each later access updates it in place, as `update_ema_model` does, if a push has made a newer
        version; only changed bytes are sent. Its parameters have no gradients. Tensors that the track
        ignores have the model's own values. Any rank may access it, alone. After `close` it holds the last
        version, or, if a warning says so, an earlier one.

        An update that fails half-way leaves values of two versions. Until an update succeeds, this property
        raises, and so do the module's forward and `state_dict`.

        Raises:
            As `update_ema_model`.
        """
        return self._ema_model.module

    def update_ema_model(self) -> Version:
        """Waits for the pending push, then updates `ema_model` to the newest version.

        With on_error "skip", an unreachable server leaves the copy unchanged, with a warning.

        Returns:
            The version that the copy holds.

        Raises:
            FailedPreconditionError: there is no version yet; the model cannot be copied; the attachment is
                closed, and `ema_model` had not been accessed; or, with on_error "skip" or after `close`,
                an update has failed and left values of two versions.
            NotFoundError: there are several tracks, and none is named "ema".
            EmaError: the push has not ended within `max_wait_s`, or the pull failed. With on_error "skip",
                only if there is no copy yet.
        """
        return self._ema_model.update()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`ema_model(...)`."""
        return self.ema_model(*args, **kwargs)

    def _forwarded(self, name: str) -> Callable[..., Any]:
        """A function that calls this method of the current `ema_model`."""
        return lambda *args, **kwargs: getattr(self.ema_model, name)(*args, **kwargs)

    def _tensors_in_place(self) -> Iterable[torch.Tensor]:
        return self._pusher.weights.in_place

    def _is_trained_here(self, address: str, model_name: str) -> bool:
        """Whether the current thread trains this model and pushes it to this server."""
        is_ours = (self._client._address, self._model_name) == (address, model_name)
        return is_ours and self._pusher.is_training_thread

    @synchronized
    def after_step(self, *, wait_released: bool = True) -> None:
        """Counts a step, and pushes the weights if an update is due. For attachments without an optimizer.

        Call it on every rank, after each step.

        Args:
            wait_released: waits until the bytes have been read, at most `max_wait_s`. False: call the method
                `wait_released` before the weights change.

        Raises:
            FailedPreconditionError: the attachment has an optimizer, whose steps are counted by its hooks; or
                it is closed.
            EmaError: a step could not be pushed. Not with on_error "skip".
        """
        self._check_open()
        if self._pusher.is_active:
            if not self._is_by_hand:
                raise FailedPreconditionError(
                    f'model "{self._model_name}": after_step() called, but attach() was given an optimizer, '
                    "or DeepSpeed's engine, whose steps are counted already: remove the call, or use "
                    "attach(model, None, url)",
                    reason="BAD_REQUEST",
                )
            try:
                self._pusher.advance(self.step + 1)
            finally:
                if wait_released:
                    self._pusher.wait_released()
            self._pusher.raise_error()

    @synchronized
    def wait_released(self) -> None:
        """Waits until no push reads the weights in place, at most `max_wait_s`.

        With on_error "wait", until the push has ended, even during an outage.
        """
        self._pusher.wait_released()

    @synchronized
    def _count_by_hand(self) -> None:
        """Stops counting by hooks: `_count` or `after_step` will be called. Before the first step."""
        self._expects_steps = False
        self._is_by_hand = True

    @synchronized
    def _count(self, step: int) -> None:
        """Sets the number of steps, which must not shrink; pushes if an update is due."""
        self._check_open()
        if self._pusher.is_active:
            self._pusher.advance(step)
            self._pusher.raise_error()

    @synchronized
    def close(self, *, timeout_s: float | None = None) -> None:
        """Waits for the last push, and removes the hooks. Call it on all ranks after the same step: without
        this rank, no later step can be pushed, and the other ranks would wait.

        Also updates `ema_model`, if it was accessed, to the last version. If less time is left than the last
        update took, it is left unchanged, with a warning. May be called again. Never raises an EmaError: a
        push that fails now is skipped.

        Args:
            timeout_s: seconds in all. None: that of `attach`. One second more may be needed to report to
                the other ranks which step this rank has abandoned.
        """
        pusher = self._pusher
        if pusher.is_closed:
            return
        self._warn_of_no_step()
        until = time.monotonic() + (pusher.options.timeout_s if timeout_s is None else timeout_s)

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        try:
            pusher.abandon_if_written()
            if pusher.is_in_this_process:
                pusher.engine.end_pushes(left_s())
            self._detach()
            if pusher.is_in_this_process:
                # A call's timeout must be positive.
                self._ema_model.update_at_close(max(left_s(), 0.001))
        finally:
            # Also after a Ctrl-C.
            self._detach()
            if pusher.is_in_this_process:
                try:
                    pusher.engine.leave(left_s())
                finally:
                    self._client.close()

    def _check_open(self) -> None:
        if self._pusher.is_closed and self._pusher.is_in_this_process:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the attachment is closed, so steps are no longer averaged: '
                "call attach() again",
                reason="BAD_REQUEST",
            )

    def _warn_of_no_step(self) -> None:
        if not self._pusher.is_active or not self._expects_steps or self._pusher.has_stepped:
            return
        if self.step > 0:
            return  # A resumed run may have nothing left to train.
        _logger.warning(
            'model "%s": no step was counted, so nothing was pushed: %s',
            self._model_name,
            (
                "attach() was given no optimizer, so after_step() must be called after each step"
                if self._is_by_hand
                else "each optimizer that attach() was given must step, or DeepSpeed's engine; was one "
                "created after attach()?"
            ),
        )

    def _detach(self) -> None:
        self._pusher.is_closed = True
        attachments.discard(self)
        for hook in self._hooks:
            hook.remove()

    @synchronized
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        kind, outermost = current_step(optimizer)
        if kind is StepKind.STATE_INITIALIZATION:
            # This step writes the weights, although with equal values. The next step of the training raises
            # the error of a failed push: an exception here would leave learning rates at 0.
            self.wait_released()
            return None
        if kind is StepKind.NESTED and id(outermost) in self._hooked:
            return None
        if self._pusher.is_active and not self._pusher.has_stepped and not self._is_by_hand:
            # Again: the optimizer may have been given other tensors since attach().
            shard_again(self._module)
            check_held(self._hooked.values(), self._module.parameters())
        if kind is StepKind.NESTED:
            check_counted(optimizer, outermost)
            self._hook_steps(outermost)
            self._before_change()
            return None
        with_wait = after_closure(optimizer, args, kwargs, self._before_change)
        if with_wait is None:
            self._before_change()
        return with_wait

    @synchronized
    def _before_change(self) -> None:
        if self._pusher.is_active:
            self._pusher.wait_released()
            self._pusher.raise_error()

    @synchronized
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_by_hand or not self._pusher.is_active:
            return
        kind = current_step(optimizer)[0]
        if kind is StepKind.STATE_INITIALIZATION:
            return
        if id(optimizer) in self._given and not was_skipped(optimizer):
            self._stepped.append(id(optimizer))
        if kind is StepKind.NESTED:
            return
        stepped, self._stepped = self._stepped, []
        self._awaited.difference_update(stepped)
        if self._awaited or not stepped:
            return
        # The optimizer that completed the first step completes every step: others may skip a step.
        self._closing = self._closing or stepped[-1]
        if self._closing in stepped:
            self._pusher.advance(self.step + 1)

    @synchronized
    def _after_engine_step(self) -> None:
        if not self._is_by_hand and self._pusher.is_active:
            self._pusher.advance(self.step + 1)


@atexit.register
def _at_exit() -> None:
    """Abandons last pushes that take too long."""
    for attachment in list(attachments):
        assert isinstance(attachment, Attachment)
        pusher = attachment._pusher
        # A daemon thread may hold the lock for ever.
        if pusher.is_in_this_process and pusher.lock.acquire(timeout=EXIT_WAIT_S):
            try:
                pusher.engine.end_pushes(EXIT_WAIT_S)
                pusher.engine.leave(EXIT_WAIT_S)
            finally:
                pusher.lock.release()
