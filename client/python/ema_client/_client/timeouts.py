# SPDX-License-Identifier: Apache-2.0
"""How long calls may take."""

from __future__ import annotations

import math
import numbers

from ema_client._errors import InvalidArgumentError

# Of a call that moves no weights, and of one that does: tens of gigabytes by a slow network.
CALL_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 600.0


def check_timeout(name: str, value: object) -> None:
    """InvalidArgumentError: it is no number of seconds that a call could take."""
    if not _number(value) > 0:
        raise InvalidArgumentError(f"{name} {value!r}: must be seconds, above 0")


def check_seconds(name: str, value: object) -> None:
    """InvalidArgumentError: it is no number of seconds, which may be none."""
    if not _number(value) >= 0:
        raise InvalidArgumentError(f"{name} {value!r}: must be seconds, 0 or more")


def _number(value: object) -> float:
    """NaN: it is none."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return math.nan
