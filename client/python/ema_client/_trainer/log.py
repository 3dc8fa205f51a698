# SPDX-License-Identifier: Apache-2.0
"""Lines that the push engine writes to Python's log."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)

# Indexed by the engine's LogLevel.
_LEVELS = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)


def write(level: int, text: bytes) -> None:
    """Called by the extension module, from any thread."""
    _logger.log(_LEVELS[level], "%s", text.decode("utf-8", "replace"))
