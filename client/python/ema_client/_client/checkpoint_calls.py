# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on the server's disk, labels and metrics: functions that are methods of `Client`."""

from __future__ import annotations

import logging
from collections.abc import Collection

from ema_client._client.connection import Connection
from ema_client._client.state import version_id
from ema_client._client.types import (
    Checkpoint,
    CheckpointInfo,
    Label,
    MetricResult,
    SavedState,
    Version,
)
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._argument_checks import check_name, names_from

_logger = logging.getLogger(__name__)


def create_checkpoint(
    client: Connection,
    name: str,
    *,
    version: int | Version | SavedState | None = None,
    tracks: str | Collection[str] | None = None,
    label: str | None = None,
    wait: bool = True,
    timeout_s: float | None = None,
) -> Checkpoint:
    """Saves a version to the server's disk. Returns when it is saved, unless `wait` is False.

    A saved version is not written again, except the newest if the model's tracks or attached files have
    changed since. Training and pulls do not wait for it.

    Args:
        name: the model.
        version: a number, a record or a saved state; None: the newest.
        tracks: saves only these, for evaluators; a server cannot start from such a checkpoint. None: all.
        label: a name for the version, which keeps it whatever the retention policy. Not with `tracks`.
        wait: False: returns when the version is pinned; poll `checkpoint` for the state.
        timeout_s: seconds.

    Raises:
        FailedPreconditionError: the model has no version yet, or the server has no disk.
        NotFoundError: no such model or track.
        OutOfRangeError: the version is no longer kept, or not committed yet.
        ResourceExhaustedError: the disk is full, readers hold too many other versions, or, with `wait`
            False, too many versions wait to be saved.
        UnavailableError: the server's disk has failed.
        DataLossError: the saved bytes, read back, differ from those written.

    Example:
        >>> saving = client.create_checkpoint("m", wait=False)
        >>> client.checkpoint("m", saving.name).state
        'saving'
    """
    number, incarnation = version_id(version, of=name)
    return client._client.create_checkpoint(
        name,
        number,
        incarnation,
        names_from("tracks", tracks),
        label or "",
        wait,
        client._timeout(timeout_s, is_transfer=True),
    )


def checkpoint(
    client: Connection, name: str, checkpoint: str, *, timeout_s: float | None = None
) -> CheckpointInfo:
    """One checkpoint, even if it is being written or has failed. NotFoundError: no such checkpoint."""
    return client._client.get_checkpoint(name, checkpoint, client._timeout(timeout_s))


def checkpoints(
    client: Connection, name: str, *, timeout_s: float | None = None
) -> tuple[CheckpointInfo, ...]:
    """All checkpoints, even those that are being written or have failed; newest first."""
    checkpoints, _ = client._client.list_checkpoints(name, client._timeout(timeout_s))
    return tuple(checkpoints)


def delete_checkpoint(
    client: Connection, name: str, checkpoint: str, *, timeout_s: float | None = None
) -> None:
    """Deletes a checkpoint, if it exists. Pulls that read it finish.

    Raises:
        FailedPreconditionError: it has labels, or is the newest.
        UnavailableError: the server's disk has failed.
    """
    check_name("checkpoint", checkpoint)
    client._client.delete_checkpoint(name, checkpoint, client._timeout(timeout_s))


def labels(client: Connection, name: str, *, timeout_s: float | None = None) -> dict[str, Label]:
    """The labels of a model's versions, by name."""
    _, labels = client._client.list_checkpoints(name, client._timeout(timeout_s))
    return {label.name: label for label in labels}


def set_label(
    client: Connection,
    name: str,
    label: str,
    *,
    version: int | Version | SavedState | None = None,
    timeout_s: float | None = None,
) -> Label:
    """Sets a label, or moves it to another version, which is saved if it is not yet.

    Retention keeps versions with labels, and `pull(..., version=label)` reads them.

    Args:
        name: the model.
        label: such as "stable": letters, digits, `.`, `_`, `-`; not digits only.
        version: a number, a record or a saved state; None: the newest.
        timeout_s: seconds.

    Raises:
        EmaError: as `create_checkpoint`.
    """
    number, incarnation = version_id(version, of=name)
    timeout = client._timeout(timeout_s, is_transfer=True)
    return client._client.set_label(name, label, number, incarnation, timeout)


def remove_label(
    client: Connection, name: str, label: str, *, timeout_s: float | None = None
) -> None:
    """Removes a label, if it exists. Retention may then delete its checkpoint."""
    client._client.remove_label(name, label, client._timeout(timeout_s))


def report_metric(
    client: Connection,
    name: str,
    version: int | Version | SavedState,
    value: float,
    *,
    lower_is_better: bool = False,
    label: str = "best",
    timeout_s: float | None = None,
) -> MetricResult:
    """Reports an evaluator's score of a version: the first score and each better one move `label`.

    Of equal scores, the first keeps the label.

    Args:
        name: the model.
        version: the evaluated version, such as a pull's `weights.version`, or a saved state.
        value: the score.
        lower_is_better: as for a loss; equal for all scores of a label.
        label: the label to move.
        timeout_s: seconds.

    Returns:
        The label. A server without a data directory (`--data-dir`) keeps no labels, and therefore no score: a
        warning says so, and the result has no label.

    Raises:
        InvalidArgumentError: the score is not a number; `lower_is_better` differs from earlier scores;
            or `set_label` has set the label, which then stays until it is removed.
        OutOfRangeError: the version was dropped during the evaluation, so the score does not count. A
            larger `max_pinned_versions` keeps it longer, and `set_label` keeps it.
        EmaError: as `set_label`.

    Example:
        >>> weights = client.pull("m", track="ema")
        >>> client.report_metric("m", weights.version, accuracy(weights))
        >>> best = client.pull("m", track="ema", version="best")
    """
    if isinstance(value, bool):  # The result of a comparison, say, which would count as 1.
        raise InvalidArgumentError(f"value {value!r}: must be a number")
    if version is None:
        raise InvalidArgumentError(f"version {version}: must be the one that was evaluated")
    check_name("label", label)
    number, incarnation = version_id(version, of=name)
    timeout = client._timeout(timeout_s, is_transfer=True)
    try:
        return client._client.report_metric(
            name, number, incarnation, value, lower_is_better, label, timeout
        )
    except FailedPreconditionError as error:
        if error.reason != "NO_DATA_DIR":
            raise
        _logger.warning('model "%s": the score %s has no effect: %s', name, value, error)
        return MetricResult(None, False)


def restore(
    client: Connection,
    name: str,
    *,
    version: int | Version | SavedState | None = None,
    label: str | None = None,
    timeout_s: float | None = None,
) -> Version:
    """Rolls a model back to an earlier version.

    One server makes a new version that equals the earlier one. In a group of servers the earlier
    version itself becomes the newest again, without `restored_from`. The current run ends, and its
    trainer is fenced; the next run continues from the new version. The versions in between are kept.
    Not retried after a broken connection: check the newest version then.

    Args:
        name: the model.
        version: a number, a record or a saved state, in memory or on the disk.
        label: instead of a version: its label.
        timeout_s: seconds.

    Returns:
        The version that is the newest now.

    Raises:
        InvalidArgumentError: both or neither of version and label.
        NotFoundError: no such model or label.
        OutOfRangeError: the version is not kept; the message lists the kept ones.
        FailedPreconditionError: the checkpoint does not have all tracks.
        DataLossError: the checkpoint is corrupt.
    """
    if (version is None) == (label is None):
        raise InvalidArgumentError(
            f"restore: give either version or label, not {version} and {label}"
        )
    if label is not None:
        check_name("label", label)
    number, incarnation = version_id(version, of=name)
    timeout = client._timeout(timeout_s, is_transfer=True)
    return client._client.restore_checkpoint(name, number, incarnation, label or "", timeout)
