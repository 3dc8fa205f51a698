# SPDX-License-Identifier: Apache-2.0
"""Saves the state of an attachment, and resumes from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ema_client._client.client import Client
from ema_client._client.state import State
from ema_client._errors import (
    AbortedError,
    DeadlineExceededError,
    EmaError,
    FailedPreconditionError,
    UnavailableError,
)
from ema_client._trainer.joining import Joined
from ema_client._trainer.pusher import Pusher
from ema_client._trainer.resume import labels_stay, save, trim, warn_of_no_state

_logger = logging.getLogger(__name__)


class ResumableState:
    """An attachment's state for the trainer's checkpoint; see `Attachment.state_dict`."""

    def __init__(
        self,
        pusher: Pusher,
        client: Client,
        join_at: Callable[[Mapping[str, Any] | None], Joined | None],
        *,
        keep: int,
    ) -> None:
        """`join_at`: opens a run that resumes from a state; collective. `keep`: the number of
        newest states that the server keeps."""
        self._pusher = pusher
        self._client = client
        self._join_at = join_at
        self._keep = keep
        self._model_name = pusher.options.model_name
        # The label of a state saved before the first step, on rank 0.
        self._template: str | None = None

    def check_disk(self) -> None:
        """Warns on rank 0 if the server can be reached and keeps no checkpoints."""
        engine = self._pusher.engine
        if engine.rank != 0 or engine.is_disconnected:
            return
        try:
            self._client.labels(self._model_name)
        except EmaError as error:  # If another one lasts, state_dict() says so.
            if error.reason == "NO_DATA_DIR":
                _logger.warning(
                    'model "%s": %s: state_dict() returns None, report_metric() moves no label, and after '
                    "a restart of the server the average begins again; start it with --data-dir DIRECTORY",
                    self._model_name,
                    error.args[0],
                )

    def save(self, timeout_s: float | None) -> dict[str, int | str] | None:
        """As `Attachment.state_dict`."""
        pusher = self._pusher
        options = pusher.options
        if timeout_s is None:
            longest_outage_s = options.max_outage_s if options.on_error == "wait" else 0.0
            timeout_s = max(options.timeout_s, longest_outage_s)
        try:
            return self._state(timeout_s).to_dict()
        except FailedPreconditionError as error:
            if error.reason != "NO_DATA_DIR":
                raise
            warn_of_no_state(pusher.step, error)
            return None
        except (UnavailableError, DeadlineExceededError) as error:
            problem: EmaError = error
            if (disconnected := pusher.disconnected_error()) is not None:
                problem = disconnected
            elif not error.reason:  # It does not come from the server, as one of its disk does.
                problem = type(error)(
                    f'model "{self._model_name}": the server is unavailable or too slow: {error.args[0]}'
                )
            if options.on_error != "skip":
                raise problem from None
        warn_of_no_state(pusher.step, problem)
        return None

    def _state(self, timeout_s: float) -> State:
        """The current state; rank 0 saves it."""
        pusher = self._pusher
        pusher.wait_pushed(timeout_s)
        pusher.raise_error()
        disconnected = pusher.disconnected_error()
        if (
            disconnected is not None
            and disconnected.reason != "FENCED"
            and pusher.options.on_error != "wait"
        ):
            raise disconnected
        # Not this rank's last reply: after a restart of the server the average may be an earlier one.
        # Until this rank pushes again, nothing can be committed, so all ranks find the same.
        # The lookup needs a timeout, even if the caller gave 0 for the push.
        latest = self._client.model(self._model_name, timeout_s=timeout_s or None).latest
        with pusher.lock:
            is_fenced, run_epoch = pusher.engine.is_fenced, pusher.engine.run_epoch
        if is_fenced or (latest is not None and latest.run_epoch > run_epoch):
            raise AbortedError(
                f'Another trainer of model "{self._model_name}" has taken over, or the model was rolled '
                "back; this one no longer pushes",
                reason="FENCED",
            )
        if latest is not None and latest.step > pusher.step:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the average is of step {latest.step}, the trainer at step '
                f"{pusher.step}",
                reason="RESUME_MISMATCH",
            )
        state = State(
            model=self._model_name,
            step=pusher.step,
            version=0 if latest is None else latest.number,
            incarnation=0 if latest is None else latest.incarnation,
        )
        if latest is None:
            return state
        # On all ranks, so that none has a state if the server keeps no checkpoints.
        labels = self._client.labels(self._model_name, timeout_s=timeout_s or None)
        if pusher.engine.rank == 0:
            if pusher.has_stepped:
                save(self._client, state, latest)
                trim(self._client, self._model_name, keep=self._keep)
            else:
                # dcp.load may use this only as a template, so no older label is removed.
                is_new = state.label not in labels
                save(self._client, state, latest)
                self._template = state.label if is_new else self._template
        return state

    def load(self, state: Mapping[str, Any] | None) -> None:
        """As `Attachment.load_state_dict`."""
        pusher = self._pusher
        if pusher.has_stepped or pusher.is_closed:
            raise FailedPreconditionError(
                f'model "{self._model_name}": load_state_dict comes before the first step, and this is '
                f"step {pusher.step}",
                reason="BAD_REQUEST",
            )
        joined = self._join_at(state)
        loaded: str | None = None
        if joined is not None and state is not None:
            loaded = State.from_dict(state, model=self._model_name).label
            with pusher.lock:
                before = pusher.engine
                pusher.adopt(joined)
                before.leave(pusher.options.timeout_s)
        template, self._template = self._template, None
        if template is not None and template != loaded:
            with labels_stay(self._model_name):
                self._client.remove_label(self._model_name, template)
