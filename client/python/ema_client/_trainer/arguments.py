# SPDX-License-Identifier: Apache-2.0
"""What `attach` is called with, checked before anything is done with it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, get_args

from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.timeouts import check_seconds, check_timeout
from ema_client._client.types import NonFinite, WireDtype
from ema_client._errors import InvalidArgumentError
from ema_client._trainer.push import OnError


def check_values(given: Mapping[str, Any]) -> None:
    """InvalidArgumentError: one of these arguments of `attach` is wrong; names it, its value and what
    was expected. Those that other code checks before it does anything are left to that."""
    for name, value in given.items():
        if name in _CHECKS:
            _CHECKS[name](name, value)


def check_module(model: object) -> None:
    """InvalidArgumentError: it is no torch.nn.Module, or a lazy one whose shapes nobody knows yet."""
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InvalidArgumentError(f"model of type {_type_name(model)}: must be a torch.nn.Module")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f'"{name}": a lazy module\'s, which has no shape yet; run a forward first, and make '
                "the optimizer after it"
            )


def _count(least: int) -> Callable[[str, object], None]:
    def check(name: str, value: Any) -> None:
        try:
            if not isinstance(value, bool) and operator.index(value) >= least:
                return
        except TypeError:
            pass
        raise InvalidArgumentError(f"{name} {value!r}: must be a whole number, {least} or more")

    return check


def _one_of(words: tuple[str, ...]) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        if not isinstance(value, str) or value not in words:
            *others, last = [f'"{word}"' for word in words]
            raise InvalidArgumentError(f"{name} {value!r}: must be {', '.join(others)} or {last}")

    return check


def _function(name: str, value: object) -> None:
    if not callable(value):
        raise InvalidArgumentError(f"{name} {value!r}: must be a function")


def _tracks(name: str, value: object) -> None:
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(
            f"{name} {value!r}: must be tracks by name, such as "
            '{"slow": "1000ba", "raw": "copy"}'
        )


def _preset(name: str, value: object) -> None:
    if not isinstance(value, (str, Mapping)):
        raise InvalidArgumentError(
            f'{name} {value!r}: must be a name such as "diffusers", or '
            '{"preset": "diffusers", "decay": 0.999}'
        )


def _or_none(check: Callable[[str, object], None]) -> Callable[[str, object], None]:
    return lambda name, value: None if value is None else check(name, value)


def _type_name(value: object) -> str:
    cls = type(value)
    return f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")


_CHECKS: dict[str, Callable[[str, object], None]] = {
    "preset": _or_none(_preset),
    "tracks": _or_none(_tracks),
    "non_finite": _one_of(get_args(NonFinite)),
    "wire_dtype": _one_of(get_args(WireDtype)),
    "max_staging_bytes": _count(STAGING_BYTES),
    "start_step": _or_none(_count(0)),
    "time": _or_none(_function),
    "rename": _or_none(_function),
    "max_pinned_versions": _or_none(_count(0)),
    "max_wait_s": check_seconds,
    "max_outage_s": check_seconds,
    "on_error": _one_of(get_args(OnError)),
    "timeout_s": _or_none(check_timeout),
    "keep_resumable": _count(1),
}
