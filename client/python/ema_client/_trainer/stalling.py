# SPDX-License-Identifier: Apache-2.0
"""Tracks whose updates have a weight that float32 is too coarse for."""

from __future__ import annotations

import logging

from ema_client._client.types import Version

_logger = logging.getLogger(__name__)

# From which TrackVersion.stall_gap on a track is named, as in the server's log (kStallGap there): that of
# decays of 0.9999 and up.
_STALL_GAP = 5e-4


class Stalling:
    """Warns of them, once for each schedule."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        # Track, pattern of its rule, and schedule.
        self._told: set[tuple[str, str, str]] = set()

    def look(self, version: Version) -> None:
        """To be called with each version."""
        for name, track in version.tracks.items():
            for pattern, record in [("", track), *track.rules.items()]:
                key = name, pattern, record.config
                if record.stall_gap < _STALL_GAP or key in self._told:
                    continue
                self._told.add(key)
                _logger.warning(
                    'model "%s": track "%s"%s: an update has the weight %.3g, below what float32 can '
                    "resolve: values stall within %.2g of their size short of the average. With "
                    "compensated=True, at twice the server's memory, they do not",
                    self._model_name,
                    name,
                    f', "{pattern}"' if pattern else "",
                    record.update_weight,
                    record.stall_gap,
                )
