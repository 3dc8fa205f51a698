# SPDX-License-Identifier: Apache-2.0
"""How threads, and code that PyTorch compiles, come into an `Attachment`."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar


class Entered(Protocol):
    """What has methods that are entrances.

    Attributes:
        _lock: of the process `_pid`; a forked child may have it held by a thread that is not there.
    """

    _lock: threading.RLock
    _pid: int


Owner = TypeVar("Owner", bound=Entered)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def entrance(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """Lets one thread at a time in."""

    @functools.wraps(method)
    def locked(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if os.getpid() != self._pid:
            return method(self, *args, **kwargs)
        with self._lock:
            return method(self, *args, **kwargs)

    setattr(locked, "_is_entrance", True)
    return locked


def uncompiled(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Makes torch.compile call it as it is, also in what it compiles.

    Traced, it would be replayed with the numbers of the step that was traced. What is compiled with
    fullgraph=True cannot call it: PyTorch refuses it, with our reason.
    """
    import torch

    disable: Callable[..., Any] = torch.compiler.disable
    if "reason" in inspect.signature(disable).parameters:
        disable = functools.partial(
            disable,
            reason="ema_client waits and pushes between compiled parts: leave out fullgraph=True",
        )
    return disable(function)  # type: ignore[no-any-return]


@functools.cache
def keep_uncompiled(owner: type[Any]) -> None:
    """Makes the entrances of a class `uncompiled`."""
    for name, method in list(vars(owner).items()):
        if getattr(method, "_is_entrance", False):
            setattr(owner, name, uncompiled(method))
