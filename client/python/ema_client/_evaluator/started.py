# SPDX-License-Identifier: Apache-2.0
"""Whether a version's track is an average yet: before its `ema_start` it is the first weights or the latest."""

from __future__ import annotations

import logging

from ema_client._client.types import Version

_logger = logging.getLogger(__name__)


def awaited_start(version: Version, track: str) -> str | None:
    """The track's `ema_start`, such as "1000ba", if the version is from before that."""
    return _schedule(version, track).get("ema_start")


def warn_of_no_average(model_name: str, version: Version, track: str) -> None:
    """Says so where the version's values are the first weights, while others were to be expected."""
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
    """Of a track that has not started, as text by field; of another one nothing."""
    # No version's record has a synthesized average.
    record = version.tracks.get(track)
    if record is None or record.averaged_count > 0:
        return {}
    # The schedule, then what is for some tensors.
    fields = record.config.partition("; ")[0].split(", ")
    return {name: value for name, _, value in (field.partition("=") for field in fields)}
