# SPDX-License-Identifier: Apache-2.0
"""Checks of the numbers in an averaging rule. Each raises InvalidArgumentError with the name of the
argument, its value and what was expected."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from ema_client._errors import InvalidArgumentError


def refuse(message: str) -> NoReturn:
    raise InvalidArgumentError(message, reason="BAD_SCHEDULE")


def check_default(**arguments: tuple[object, object]) -> None:
    for name, (value, default) in arguments.items():
        if value != default:
            refuse(
                f"{name} {value!r}: does nothing here; leave it out, or at its default {default!r}"
            )


def check_no_functions(**functions: object) -> None:
    for name, value in functions.items():
        if value is not None:
            refuse(
                f"{name}: a function cannot be sent to a server; give the decay that it has, such as "
                'decay=0.999, or kind="swa" for the mean of all updates, or, without a preset, another '
                'rule, such as half_life="1000ba"'
            )


def check_number(
    name: str, value: object, example: str, *, most: float = 1.0, below: float = math.inf
) -> float:
    """A number of 0 to `most`, and less than `below`."""
    number = _any_number(name, value, example)
    if not 0 <= number <= most or number >= below:
        if most == math.inf:
            limits = "0 or more and finite"
        else:
            limits = "0 or more and below 1" if below <= most else "0 to 1"
        refuse(f"{name} {value!r}: must be {limits}, such as {example}")
    return number


def check_above_zero(name: str, value: object, example: str) -> float:
    number = _any_number(name, value, example)
    if not 0 < number < math.inf:
        refuse(f"{name} {value!r}: must be finite and above 0, such as {example}")
    return number


def _any_number(name: str, value: Any, example: str) -> float:
    if not isinstance(value, (str, bool)):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    refuse(f"{name} {value!r}: must be a number, such as {example}")


def check_count(name: str, value: Any, example: str, *, least: int = 1) -> int:
    if not isinstance(value, (str, bool)):
        try:
            if int(value) == value and value >= least:
                return int(value)
        except (TypeError, ValueError, OverflowError):
            pass
    refuse(f"{name} {value!r}: must be a whole number, {least} or more, such as {example}")


def check_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(f"{name} {value!r}: must be True or False")
    return value
