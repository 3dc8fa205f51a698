# SPDX-License-Identifier: Apache-2.0
"""Default timeouts of calls, and checks of timeouts."""

from __future__ import annotations

import math
import numbers

from ema_client._errors import InvalidArgumentError

# For calls that move no weights, and for those that do: tens of gigabytes over a slow network.
CALL_TIMEOUT_S = 60.0
TRANSFER_TIMEOUT_S = 600.0


def check_timeout(name: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a number of seconds above 0."""
    if not _number(value) > 0:
        raise InvalidArgumentError(f"{name} {value!r}: must be seconds, above 0")


def check_seconds(name: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a number of seconds, 0 or more."""
    if not _number(value) >= 0:
        raise InvalidArgumentError(f"{name} {value!r}: must be seconds, 0 or more")


def _number(value: object) -> float:
    """The value as a float; NaN: it is not a number."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    return math.nan
