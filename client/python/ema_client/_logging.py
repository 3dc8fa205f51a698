# SPDX-License-Identifier: Apache-2.0
"""Names the library in its warnings where the program has not set up logging."""

from __future__ import annotations

import copy
import logging


class _LastResort(logging.Handler):
    """Prints as Python's `logging.lastResort` does, after the name of the library.

    Python uses its own only for loggers without any handler, and prints the message alone.
    """

    def emit(self, record: logging.LogRecord) -> None:
        last = logging.lastResort
        if last is None or record.levelno < last.level or self._has_others(record.name):
            return
        named = copy.copy(record)
        named.msg, named.args = f"ema_client: {record.getMessage()}", None
        last.handle(named)

    def _has_others(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def add_last_resort() -> None:
    logging.getLogger("ema_client").addHandler(_LastResort())
