# SPDX-License-Identifier: Apache-2.0
"""A run whose server may go away: joining it again, and how long a trainer waits for that."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable
from typing import Literal

from ema_client._client.run import Joined, PendingPush, Run
from ema_client._client.types import Version
from ema_client._errors import (
    AbortedError,
    AlreadyExistsError,
    DeadlineExceededError,
    EmaError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    failure_of,
)

_logger = logging.getLogger(__name__)

# In a thread of its own: how long each call of a try to join again may take, and what lies between two
# tries. It doubles up to the most, and each time is drawn from its upper half: the ranks of a large job
# must not ask a server all at once that has just begun to live.
_REJOIN_TIMEOUT_S = 2.0
_FIRST_PAUSE_S = 0.5
_MOST_PAUSE_S = 4.0
# What the next try ends with, too, unless somebody does something.
_LASTING = (
    AlreadyExistsError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnimplementedError,
)
# The same, of errors whose class says too little.
_LASTING_REASONS = ("ALL_CHECKPOINTS_CORRUPT",)
# What a push ends with that has found the server restarted.
_FORGOTTEN = ("FENCED", "MODEL_NOT_FOUND", "RUN_INCOMPLETE")
# What it ends with because another rank could not push.
_OTHER_RANKS = ("STEP_ABANDONED", "SESSION_EXPIRED")
# A GPU of ours that does not answer in time.
_OWN_DEVICE = "DEVICE"

#: Of `attach`.
MAX_OUTAGE_S = 120.0

OnError = Literal["skip", "wait", "raise"]


def is_outage(error: EmaError) -> bool:
    """The server is away, or has come back and does not know the run."""
    if error.reason in _FORGOTTEN:
        return True
    is_away = isinstance(error, (UnavailableError, DeadlineExceededError))
    return is_away and error.reason != _OWN_DEVICE


def is_worth_waiting(error: EmaError) -> bool:
    """A step whose push has ended so may succeed later: an outage, here or of another rank."""
    return is_outage(error) or error.reason in _OTHER_RANKS


def is_final(error: EmaError) -> bool:
    """This rank cannot push the step, now or later; the others do not know."""
    return not is_worth_waiting(error) and not isinstance(error, AbortedError)


class Link:
    """The run that pushes go to, and the thread that joins it again after the server was away.

    All but the thread's work is done by the thread that trains.
    """

    def __init__(self, model_name: str, on_back: Callable[[], None]) -> None:
        """`on_back`: called by the thread when it has joined another run. The server may have been
        restarted, and counts anew."""
        self._model_name = model_name
        self._on_back = on_back
        self._is_fenced = False
        self._problem = ""  # Of the last try to join.
        self._lost_version: Version | None = None
        # The run can be pushed to, or never again. Set last.
        self._is_settled = threading.Event()
        self._is_settled.set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        # The step that was lost, and its push: of a thread that could not be started yet.
        self._unstarted: tuple[int, PendingPush | None] | None = None

    def take(self, joined: Joined) -> None:
        """Goes by a run that no step has been pushed to."""
        self.run = joined.run
        self._open_run = joined.open_run

    @property
    def is_away(self) -> bool:
        """Nothing can be pushed now."""
        return self._is_fenced or not self._is_settled.is_set()

    @property
    def is_fenced(self) -> bool:
        """Nor ever again: a newer run pushes, or the model was rolled back."""
        return self._is_fenced

    def go_away(self, lost_step: int, lost: PendingPush | None) -> None:
        """Starts to join again, on every rank by itself, after `lost` has been dropped.

        `lost_step`: the server is asked what has become of it.
        """
        self._is_settled.clear()
        self._lost_version = None
        self._unstarted = lost_step, lost
        self.start()

    def start(self) -> None:
        """Starts what `go_away` could not start: to be called at each step that is due."""
        if self._unstarted is None:
            return
        thread = threading.Thread(target=self._rejoin, args=self._unstarted, name="ema-rejoin")
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:  # The process may have no more threads now.
            self._problem = f"no thread to join the run again: {error}"
            return
        self._thread, self._unstarted = thread, None

    def take_lost_version(self) -> Version | None:
        """The version that the lost step has become after all, said once; None: it has not, or it is not
        known yet."""
        if self.is_away:
            return None
        version, self._lost_version = self._lost_version, None
        return version

    def wait_back(self, until: float) -> None:
        """Waits until all ranks have joined again, none ever will, or it is `until` (monotonic)."""
        # A Ctrl-C that comes just before a lock is waited for is noticed only after that wait.
        while not self._is_settled.wait(min(max(0.0, until - time.monotonic()), _FIRST_PAUSE_S)):
            if time.monotonic() >= until:
                return
            self.start()

    def close(self, *, until: float = math.inf) -> None:
        """Lets the run go; waits for a try to join again that is under way, at most until then (monotonic).
        What goes on longer ends by itself, and lets its run go."""
        self._stop.set()
        try:
            if self._unstarted is not None:
                (_, lost), self._unstarted = self._unstarted, None
                if lost is not None:
                    lost.abandon()
            if self._thread is not None:
                # One try may be under way.
                self._thread.join(min(3 * _REJOIN_TIMEOUT_S, max(0.0, until - time.monotonic())))
        finally:
            self.run.close()

    def error(self) -> EmaError:
        """Why nothing can be pushed now."""
        if self._is_fenced:
            return AbortedError(
                f'model "{self._model_name}": this run does not push any more: {self._problem}',
                reason="FENCED",
            )
        return UnavailableError(
            f'model "{self._model_name}": the server is away, or a rank: {self._problem}'
        )

    def _rejoin(self, lost_step: int, lost: PendingPush | None) -> None:
        run = self._join(lost_step, lost)
        if run is None:
            return
        # The thread that trains never meets a run that is closed.
        old, self.run = self.run, run
        old.close()
        if self._stop.is_set():  # close() may not have waited so long.
            run.close()
            return
        self._on_back()
        _logger.info('model "%s": joined again', self._model_name)
        self._is_settled.set()

    def _join(self, lost_step: int, lost: PendingPush | None) -> Run | None:
        """A run that all ranks have joined. None: it is fenced, or closed."""
        self._problem = ""
        pause_s = _FIRST_PAUSE_S
        has_warned = False
        while True:
            has_joined = False
            try:
                if lost is not None:
                    lost.abandon()
                    lost = None
                run = self._open_run(self.run.run_epoch, _REJOIN_TIMEOUT_S)
                # The server lives: what lasts now is the wait for other ranks.
                pause_s = _FIRST_PAUSE_S
                run.wait_ready(timeout_s=_REJOIN_TIMEOUT_S)
                has_joined = True
                # Only its reply may have been lost.
                self._lost_version = run.committed_as(lost_step, timeout_s=_REJOIN_TIMEOUT_S)
                return run
            except Exception as raised:  # Out of memory, for example: there may be some later.
                error = failure_of(raised)
            # A server that has started once more since then says so, too, of any run.
            if error.reason == "FENCED" and not has_joined:
                # The server knows this launch: a newer one has taken over, or it was rolled back.
                self._problem = str(error.args[0])
                self._is_fenced = True
                self._is_settled.set()
                _logger.warning("%s", self.error().args[0])
                return None
            is_lasting = isinstance(error, _LASTING) or error.reason in _LASTING_REASONS
            if is_lasting and not has_warned:
                has_warned = True
                _logger.warning(
                    'model "%s": pushes do not start again before this is mended: %s',
                    self._model_name,
                    error,
                )
            elif str(error) != self._problem:
                _logger.info('model "%s": not pushing yet: %s', self._model_name, error)
            self._problem = str(error)
            # A program that has forgotten close() ends all the same.
            # Not drawn from the training's own numbers, of which all ranks may have the same.
            drawn_s = random.SystemRandom().uniform(pause_s / 2, pause_s)
            is_closed = self._stop.wait(drawn_s)
            if is_closed or not threading.main_thread().is_alive():
                return None
            pause_s = min(_MOST_PAUSE_S, 2 * pause_s)


class Patience:
    """How much longer a trainer with on_error "wait" waits for a server that is away."""

    def __init__(self, max_outage_s: float) -> None:
        self._max_outage_s = max_outage_s
        self._since: float | None = None
        # It has been said that the time is over.
        self.is_over = False

    @property
    def until(self) -> float:
        """When it ends, by the monotonic clock."""
        return (time.monotonic() if self._since is None else self._since) + self._max_outage_s

    def lasts_after(self, error: EmaError) -> bool:
        """Whether a step may be tried again whose push has ended so; the first one begins the outage."""
        if self.is_over or not is_worth_waiting(error):
            return False
        if self._since is None:
            self._since = time.monotonic()
        return True

    def end_outage(self) -> None:
        """A push has succeeded."""
        self._since = None
        self.is_over = False
