# SPDX-License-Identifier: Apache-2.0
"""EMA_MODE: whether averages are on a server, in this process, or nowhere."""

from __future__ import annotations

import functools
import logging
import os
from typing import Literal, cast, get_args

from ema_client._client.training_time import TrainingTime
from ema_client._client.types import Version
from ema_client._errors import FailedPreconditionError, InvalidArgumentError

_logger = logging.getLogger(__name__)

Mode = Literal["server", "local", "disabled"]


def current_mode() -> Mode:
    """The mode that the environment variable EMA_MODE names. InvalidArgumentError: it names none."""
    value = os.environ.get("EMA_MODE") or "server"
    if value not in get_args(Mode):
        raise InvalidArgumentError(
            f'EMA_MODE={value}: must be "server" (or empty), "local" (averages in this process) or '
            '"disabled" (no averages)'
        )
    return cast(Mode, value)


def no_server_error(mode: Mode, what: str) -> FailedPreconditionError:
    """The error of a call that needs a server. Its reason is that of a server without checkpoints."""
    return FailedPreconditionError(
        f"EMA_MODE={mode}: {what} needs a server; unset EMA_MODE to use one", reason="NO_DATA_DIR"
    )


def check_server(what: str) -> None:
    """FailedPreconditionError: EMA_MODE says that there is no server."""
    mode = current_mode()
    if mode != "server":
        raise no_server_error(mode, what)


def is_disabled(url: str) -> bool:
    """Whether there are no averages, so that a model keeps its own weights. Then the first call for each
    model logs a warning."""
    if current_mode() != "disabled":
        return False
    _warn_of_own_weights(url)
    return True


@functools.cache
def _warn_of_own_weights(url: str) -> None:
    _logger.warning("%s: EMA_MODE=disabled: models keep their own weights, not their average", url)


def no_version(step: int = 0) -> Version:
    """The version of a model's own weights, where there are no averages."""
    return Version(number=0, step=step, incarnation=0, time=TrainingTime(batch=step), tracks={})
