# SPDX-License-Identifier: Apache-2.0
"""Saves on the server the versions that a trainer's checkpoints name."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

from ema_client._client.client import Client
from ema_client._client.state import State
from ema_client._client.types import Version
from ema_client._errors import EmaError

_logger = logging.getLogger(__name__)

_LABEL = re.compile(r"resume-(\d+)-\d+-\d+")
# Timeout of calls that read a model from the server's disk or write it there.
DISK_TIMEOUT_S = 600.0


def save(client: Client, state: State, version: Version) -> None:
    """Saves the version to the server's disk, with the label that the state resumes from."""
    client.create_checkpoint(
        state.model, version=version, label=state.label, timeout_s=DISK_TIMEOUT_S
    )


@contextlib.contextmanager
def labels_stay(model: str) -> Iterator[None]:
    """Turns EmaErrors into warnings: old labels do no harm, and a later call removes them."""
    try:
        yield
    except EmaError as error:
        _logger.warning('model "%s": labels of older steps are still there: %s', model, error)


def trim(client: Client, model: str, *, keep: int) -> None:
    """Removes the labels of all saved states but the newest `keep`."""
    with labels_stay(model):
        # By version first: after a rollback, newer labels may have earlier steps.
        labels = [
            (found.incarnation, found.number, int(match.group(1)), found.name)
            for found in client.labels(model).values()
            if (match := _LABEL.fullmatch(found.name))
        ]
        for *_, name in sorted(labels)[:-keep]:
            client.remove_label(model, name)


def warn_of_no_state(step: int, why: EmaError) -> None:
    _logger.warning(
        "the trainer's checkpoint of step %d has no average to resume from: %s", step, why
    )
