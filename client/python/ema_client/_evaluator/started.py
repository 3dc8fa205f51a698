# SPDX-License-Identifier: Apache-2.0
"""Whether a track is an average yet: before `ema_start` it has the first or latest weights."""

from __future__ import annotations

import logging

from ema_client._client.first_weights import schedule_of
from ema_client._client.types import Version

_logger = logging.getLogger(__name__)


def awaited_start(version: Version, track: str) -> str | None:
    """The track's `ema_start`, such as "1000ba", if the version is from before it, else None."""
    return _schedule(version, track).get("ema_start")


def warn_of_no_average(model_name: str, version: Version, track: str) -> None:
    """Warns if the track has not reached its ema_start and still holds its first weights."""
    schedule = _schedule(version, track)
    if "ema_start" in schedule and schedule.get("before_start") != "copy":
        _logger.warning(
            'model "%s": track "%s" is no average yet, but the weights of its first push: version %d '
            "(step %d) is from before its ema_start, %s",
            model_name,
            track,
            version.number,
            version.step,
            schedule["ema_start"],
        )


def _schedule(version: Version, track: str) -> dict[str, str]:
    """The schedule of a track that has not started, as text by field; {} for any other track."""
    # Records of versions do not include synthesized averages.
    record = version.tracks.get(track)
    if record is None or record.averaged_count > 0:
        return {}
    return schedule_of(record)
