# SPDX-License-Identifier: Apache-2.0
"""The newest average on every rank: the same version on all of them, or an error on all of them."""

from __future__ import annotations

from ema_client._client.state import version_id
from ema_client._client.types import Version, Weights
from ema_client._errors import EmaError, FailedPreconditionError, failure_of
from ema_client._model.ranks import Ranks
from ema_client._trainer.attachment import Attachment


def pull_on_all_ranks(
    attachment: Attachment,
    ranks: Ranks,
    *,
    track: str,
    least_batch: int = 0,
    failure: EmaError | None = None,
) -> Weights:
    """Waits for the pending push, then pulls the version that it made. Collective.

    Args:
        least_batch: the batch that the version must have reached.
        failure: an earlier failure of this rank; then all ranks raise.

    Raises:
        FailedPreconditionError: a rank has no version, an older one, or another one than the other
            ranks.
        DeadlineExceededError: a push has not ended within `max_wait_s`.
        EmaError: a pull failed. An error on any rank raises on every rank.
    """
    options = attachment._pusher.options
    version: Version | None = None
    try:
        version = attachment.wait_pushed(timeout_s=options.max_wait_s)
        if version is None or (version.time.batch or 0) < least_batch:
            has = "no version" if version is None else f"version {version.number}, of an older step"
            raise FailedPreconditionError(
                f'model "{options.model_name}" has {has}', reason="NO_VERSION"
            )
    except Exception as raised:
        failure = failure or failure_of(raised)
    numbers = ranks.gather_or_raise(failure, version_id(version))
    if len(set(numbers)) > 1:
        raise FailedPreconditionError(
            f'model "{options.model_name}": the ranks do not know of the same newest version: '
            f"{', '.join(str(number) for number, _ in numbers)}",
            reason="NO_VERSION",
        )
    return ranks.call_or_raise(
        lambda: attachment._client.pull(
            options.model_name,
            track=track,
            version=version,
            framework="torch",
            timeout_s=options.timeout_s,
        )
    )
