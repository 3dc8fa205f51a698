# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments. The errors name the argument, its value and the expected value."""

from __future__ import annotations

import difflib
import operator
import os
import pathlib
from collections.abc import Collection
from typing import Any

from ema_client._errors import InvalidArgumentError


def check_text(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a str, or has lone surrogates."""
    if not _is_text(value):
        raise InvalidArgumentError(f"{what} {value!r}: must be a str, without lone surrogates")


def check_name(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a str, or is empty, as from a variable that is not set."""
    check_text(what, value)
    if not value:
        raise InvalidArgumentError(f"{what} {value!r}: must not be empty")


def path_from(what: str, value: str | os.PathLike[str]) -> pathlib.Path:
    """The path. InvalidArgumentError: not one, or empty, which pathlib takes for the working directory."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InvalidArgumentError(f"{what} {value!r}: must be the path of a file or folder")
    return pathlib.Path(value)


def is_whole(value: Any) -> bool:
    """Whether `value` is an integer of 64 bits, and not a bool."""
    try:
        return -(2**63) <= operator.index(value) < 2**63 and not isinstance(value, bool)
    except TypeError:
        return False


def check_int64(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not an integer of 64 bits, or is a bool."""
    if not is_whole(value):
        raise InvalidArgumentError(f"{what} {value!r}: must be a whole number of 64 bits")


def name_of_dtype(dtype: object) -> str:
    """The name of a dtype that is given by it, or as PyTorch's, NumPy's or JAX's."""
    # Classes, such as numpy.float16, and JAX's dtypes have a __name__.
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    return str(name).removeprefix("torch.")


def names_from(what: str, value: Any) -> list[Any]:
    """The names in an argument that takes one or several. InvalidArgumentError: not iterable, or a
    name is empty."""
    try:
        names = [value] if isinstance(value, str) else [] if value is None else list(value)
    except TypeError:
        raise InvalidArgumentError(f"{what} {value!r}: must be a name, or several") from None
    for name in names:
        if isinstance(name, str):
            check_name(what, name)
    return names


def check_by_name(what: str, value: object) -> None:
    """InvalidArgumentError: `value` is not a mapping."""
    if not callable(getattr(value, "items", None)):
        raise InvalidArgumentError(
            f"{what} of type {type(value).__name__}: must be a mapping by name"
        )


def _is_text(value: object) -> bool:
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


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
