# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. The errors name the argument, its value and the expected value."""

from __future__ import annotations

import difflib
import functools
import numbers
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, cast

from ema_client._errors import InvalidArgumentError

Given = ParamSpec("Given")
Result = TypeVar("Result")
Target = TypeVar("Target")

_TEXT = "a str, without lone surrogates"
_WHOLE = "a whole number of 64 bits"


def call(function: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
    """Calls a function of the extension module.

    InvalidArgumentError: an argument has the wrong type or is out of range; the message names it,
    whereas the extension's own TypeError lists only the given types.
    """
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        problem = _problem(str(error), args)
        if problem is None:
            raise
    raise InvalidArgumentError(problem)


def checked(target: Target) -> Target:
    """Wraps an object of the extension module, so that its methods are called by `call`."""
    return cast(Target, _Checked(target))


class _Checked:
    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return functools.partial(call, getattr(self._target, name))


def check_text(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a str, or has lone surrogates."""
    if not _is_text(value):
        raise InvalidArgumentError(f"{what} {value!r}: must be {_TEXT}")


def is_whole(value: object) -> bool:
    """Whether `value` is an integer of 64 bits, and not a bool."""
    return _is_int64(value) and not isinstance(value, bool)


def check_int64(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not an integer of 64 bits, or is a bool."""
    if not is_whole(value):
        raise InvalidArgumentError(f"{what} {value!r}: must be {_WHOLE}")


def names_from(what: str, value: Any) -> list[Any]:
    """The names in an argument that takes one or several. InvalidArgumentError: not iterable."""
    if isinstance(value, str):
        return [value]
    try:
        return [] if value is None else list(value)
    except TypeError:
        raise InvalidArgumentError(f"{what} {value!r}: must be a name, or several") from None


def check_by_name(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a mapping."""
    if not callable(getattr(value, "items", None)):
        raise InvalidArgumentError(
            f"{what} of type {type(value).__name__}: must be a mapping by name"
        )


def _problem(message: str, args: tuple[object, ...]) -> str | None:
    """Describes the first wrong argument of a call that raised TypeError(message), if known."""
    signature = re.search(r"^ +1\. \w+\(self, (.*)\)(?: -> [^()]*)?$", message, re.MULTILINE)
    if "incompatible function arguments" not in message or signature is None:
        return None
    for parameter, value in zip(re.split(r", (?=\w+: )", signature[1]), args):
        name, _, rest = parameter.partition(": ")
        kind = rest.partition(" = ")[0]
        if kind.endswith(" | None") and value is None:
            continue
        fits, expected = _KINDS.get(kind.removesuffix(" | None"), (_is_anything, ""))
        if not fits(value):
            return f"{name} {value!r}: must be {expected}"
    return None


def _is_anything(_: object) -> bool:
    return True


def _is_int64(value: Any) -> bool:
    try:
        return -(2**63) <= operator.index(value) < 2**63
    except TypeError:
        return False


def _is_float(value: object) -> bool:
    try:
        return isinstance(value, numbers.Real) and float(value) is not None
    except OverflowError:
        return False


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


# For each type, by its name in the extension module: a check, and a description.
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_is_int64, _WHOLE),
    "float": (_is_float, "a number, not beyond a float's range"),
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "str": (_is_text, _TEXT),
    "collections.abc.Sequence[str]": (
        lambda value: all(map(_is_text, value)),
        f"names, each {_TEXT}",
    ),
}


# Names that libraries use for the share of the old average that each update keeps.
DECAY_NAMES = ("decay", "ema_decay", "beta", "momentum", "alpha")


def nearest_name(name: str, names: Collection[str]) -> str:
    """A question that suggests the name in `names` that was probably meant by `name`; "": none."""
    if name in DECAY_NAMES:  # A similarly spelled name means something else.
        nearest = [one for one in (*DECAY_NAMES, "smoothing") if one in names]
        what = ", the share of the old average that each update keeps"
    else:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        what = ""
    return f'did you mean "{nearest[0]}"{what}?' if nearest else ""
