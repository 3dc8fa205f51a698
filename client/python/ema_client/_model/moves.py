# SPDX-License-Identifier: Apache-2.0
"""Memory that PyTorch would give back while a push reads it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@functools.cache
def move_inside(unread: Callable[[torch.UntypedStorage], AbstractContextManager[None]]) -> None:
    """Makes PyTorch move storages to memory that processes share, as `share_memory` and queues of
    torch.multiprocessing do from any thread, inside of `unread(storage)`, which waits for who reads it.

    The storage gets other memory: nobody who keeps it, or a tensor, keeps what it had.
    """
    import torch

    # The first calls one of the others while it has PyTorch's lock on the storage. All wait before they
    # take that lock.
    for name in ("share_memory_", "_share_fd_cpu_", "_share_filename_cpu_"):
        setattr(torch.UntypedStorage, name, _inside(unread, getattr(torch.UntypedStorage, name)))


def _inside(
    unread: Callable[[torch.UntypedStorage], AbstractContextManager[None]],
    move: Callable[..., Any],
) -> Callable[..., Any]:
    @functools.wraps(move)
    def waiting(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        if storage.is_shared():
            return move(storage, *args, **kwargs)
        with unread(storage):
            return move(storage, *args, **kwargs)

    return waiting
