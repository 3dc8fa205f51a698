# SPDX-License-Identifier: Apache-2.0
"""What `attach` returns: it follows an optimizer and pushes the weights when an update is due."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client.client import Client
from ema_client._client.types import Stats, Version
from ema_client._client.unread import attachments
from ema_client._errors import FailedPreconditionError
from ema_client._model.moves import move_inside
from ema_client._model.optimizers import OutOfTurn, StepKind, after_closure, step_kind, was_skipped
from ema_client._trainer.ema_model import EmaModel
from ema_client._trainer.entrances import entrance, keep_uncompiled
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.guard import BeforeLoad, PushedWeights, memory_of
from ema_client._trainer.joining import Joined
from ema_client._trainer.push import PushOptions
from ema_client._trainer.pusher import EXIT_WAIT_S, Pusher
from ema_client._trainer.resumable import ResumableState
from ema_client._trainer.uncounted import Uncounted, listen

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


class Attachment:
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
        weights = PushedWeights(optimizers, frozen.names)
        self._pusher = pusher = Pusher(options, joined, weights, frozen)
        # The entrances take the lock in the process that trains.
        self._lock = pusher.lock
        self._pid = pusher.pid
        self._state = ResumableState(pusher, client, join_at, keep=keep_resumable)
        self._ema_model = EmaModel(pusher, client, module)
        keep_uncompiled(Attachment)
        move_inside(_unread)
        self._client = client
        self._model_name = options.model_name
        self._module = module
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
        """What has been done up to now. For any thread: while another one is in a hook or method, a push
        that has just ended may not be counted yet. One that has failed is counted by the thread that
        trains."""
        return self._pusher.stats

    @property
    def version(self) -> Version | None:
        """The last version that came of this run's pushes; before the first, and where a server has come
        back without it, the model's newest.

        For any thread, as `stats`.
        """
        return self._pusher.version

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
        return self._pusher.wait_pushed(
            self._pusher.options.timeout_s if timeout_s is None else timeout_s
        )

    def state_dict(self, *, timeout_s: float | None = None) -> dict[str, int | str] | None:
        """What belongs into the trainer's own checkpoint: which average is that of this step.

        To be called between two steps, on rank 0 or on all ranks: they get equal dicts, of plain
        numbers and strings. No rank waits for another, but for the running push. Rank 0 returns when
        the version is on the server's disk and has a label that begins with "resume-<step>"; of such
        labels the server keeps the newest `keep_resumable`; one from before the first step takes no
        other's place until the next, and goes when load_state_dict loads another state, or none (dcp.load
        asks for such a one, as its template, and overwrites it). What rank 0's checkpoint says is
        therefore there; other ranks' are not to be used without it.

        With on_error "skip", a server that is away, or cannot write to its disk, costs the checkpoint its
        average, not the training the checkpoint: then this is None, with a warning, and at once if that
        is known. `attach(resume=None)` resumes nothing: the average goes on from where the server stands.

        Args:
            timeout_s: seconds for the push, and for each call but the save, which may take minutes.
                None: those of `attach`; with on_error "wait" `max_outage_s`, if that is more. 0: does not
                wait for the push. With on_error "wait" an outage may take longer.

        Raises:
            AbortedError: FENCED: the average is not this run's any more: a newer one has begun, or it was
                rolled back.
            FailedPreconditionError: NO_DATA_DIR: the server keeps nothing; RESUME_MISMATCH: the
                average is of a later step than the trainer's.
            UnavailableError, DeadlineExceededError: the server is away, or its disk has failed, or the
                push has not ended; unless on_error is "skip".
            EmaError: as `Client.create_checkpoint`.

        Example:
            >>> torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, path)
            >>> ...  # after a restart
            >>> ema = ema_client.attach(model, optimizer, url, resume=torch.load(path)["ema"])
        """
        return self._state.save(timeout_s)

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state_dict` gave: as `attach(..., resume=state)`, for an attachment.

        Collective. Before the first step, on every rank, with equal dicts; None, on all of them, resumes
        nothing. Opens a new run; on an error the attachment stays as it was.

        Raises:
            InvalidArgumentError: the state is of another model or format, or another one on another rank.
            FailedPreconditionError: steps have been made; or RESUME_MISMATCH: the server has no average
                that stands where the state does; the message lists what there is.
            OutOfRangeError: VERSION_NOT_KEPT: the very version that the state names is gone.
            EmaError: what fails on any rank raises on every rank.
        """
        self._state.load(state)

    @property
    def ema_model(self) -> torch.nn.Module:
        """A copy of the model with the newest average, to evaluate with; in eval mode.

        Always the same module. At the first access it is made: a deep copy whose tensors are the pulled
        bytes. At later ones it is brought to the newest version in place, as by `update_ema_model`, if
        a push has made one since: what has changed is sent. Without any access it costs nothing. Its
        parameters have no gradients; tensors that the track ignores have the model's own values.
        Any rank may ask, alone. After `close` it stays as the last push has left it, or, where a warning
        says so, as it was before.

        An update that breaks off half-way leaves values of two versions, with no copy of the older ones.
        Until one succeeds, this raises, and so do the module's forward and `state_dict` where it was kept.

        Raises:
            As `update_ema_model`.
        """
        return self._ema_model.module

    def update_ema_model(self) -> Version:
        """Brings `ema_model` to the newest version, this step's included; waits for its push.

        When the server is away, with on_error "skip", the copy stays as it is, with a warning.

        Returns:
            The version that is in it.

        Raises:
            FailedPreconditionError: there is no version yet; the attachment is closed, and
                `ema_model` had not been asked for; or, with on_error "skip" or after `close`, an
                update has broken off and left values of two versions.
            NotFoundError: of several tracks none is named "ema": which one is not clear.
            EmaError: the push has not ended within `max_wait_s`, or the pull failed; with on_error
                "skip" only if there is no copy yet.
        """
        return self._ema_model.update()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`ema_model(...)`."""
        return self.ema_model(*args, **kwargs)

    def _forwarded(self, name: str) -> Callable[..., Any]:
        """The method of `ema_model`, as it is at each call."""
        return lambda *args, **kwargs: getattr(self.ema_model, name)(*args, **kwargs)

    def _reads_in(self, ranges: Iterable[tuple[int, int]]) -> bool:
        return self._pusher.reads_in(ranges)

    def _is_trained_here(self, address: str, model_name: str) -> bool:
        """Whether this thread makes the steps, and the model is that one of that server."""
        is_ours = (self._client._address, self._model_name) == (address, model_name)
        return is_ours and self._pusher.is_training_thread

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
        if self._pusher.is_active:
            if self._counting:
                raise FailedPreconditionError(
                    f'model "{self._model_name}": after_step(), but each optimizer.step() counts by '
                    "itself here: leave it out, or attach(model, None, url)",
                    reason="BAD_REQUEST",
                )
            try:
                self._pusher.advance(self.step + 1)
            finally:
                if wait_released:
                    self._pusher.wait_released()
            self._pusher.raise_error()

    @entrance
    def wait_released(self) -> None:
        """Waits until no push reads the weights in place any more, at most `max_wait_s`.

        With on_error "wait": until the push has ended, an outage included.
        """
        self._pusher.wait_released()

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
        if self._pusher.is_active:
            self._pusher.advance(step)
            self._pusher.raise_error()

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
        pusher = self._pusher
        if pusher.is_closed:
            return
        self._warn_of_no_step()
        until = time.monotonic() + (pusher.options.timeout_s if timeout_s is None else timeout_s)

        def left_s() -> float:
            return max(0.0, until - time.monotonic())

        try:
            pusher.give_up_written()
            if pusher.is_in_this_process:
                pusher.engine.end_pushes(left_s())
            self._detach()
            if pusher.is_in_this_process:
                # 0 is no time for a call.
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
                f'model "{self._model_name}": the attachment is closed, so no step is averaged any more: '
                "attach() anew",
                reason="BAD_REQUEST",
            )

    def _hear_of_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Of any optimizer, in any thread: nothing is waited for."""
        if self._pusher.is_active and self._expects_steps and self._uncounted.hear(optimizer):
            _logger.warning(
                'model "%s": its weights are changed, since step %d, by an optimizer (%s) that attach() was '
                "not given: was it made after that? Its steps do not count: attach to it",
                self._model_name,
                self.step,
                type(optimizer).__name__,
            )

    def _warn_of_no_step(self) -> None:
        if not self._pusher.is_active or not self._expects_steps or self._pusher.has_stepped:
            return
        # There may have been nothing to train: steps by hand, or a run that goes on.
        is_open = self._is_by_hand or (self.step > 0 and self._pusher.resumed_unasked is None)
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

    def _end_at_exit(self) -> None:
        """Without the last push, if it takes long."""
        self._pusher.engine.end_pushes(EXIT_WAIT_S)
        self._pusher.engine.leave(EXIT_WAIT_S)

    def _detach(self) -> None:
        self._pusher.is_closed = True
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
        if self._pusher.is_active:
            self._pusher.wait_released()
            self._pusher.raise_error()

    @entrance
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._pusher.is_active or step_kind(optimizer) is not StepKind.TRAINING:
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
            self._pusher.advance(self.step + 1)


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
        # A daemon thread may be in a hook, and not come out any more.
        if attachment._pid == os.getpid() and attachment._lock.acquire(timeout=EXIT_WAIT_S):
            try:
                attachment._end_at_exit()
            finally:
                attachment._lock.release()
