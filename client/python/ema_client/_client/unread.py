# SPDX-License-Identifier: Apache-2.0
"""Waits for pushes that read memory in place, before that memory is written."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ema_client._client import gpu
from ema_client._client.arrays import is_instance, is_sparse, range_of
from ema_client._client.pieces import local_of

if TYPE_CHECKING:
    import torch

    from ema_client._client.types import Version


class Attached(Protocol):
    """The interface of `Attachment` for modules below it, which cannot import it."""

    _lock: threading.RLock
    _pid: int

    @property
    def step(self) -> int:
        """Optimizer steps so far."""

    def _tensors_in_place(self) -> Iterable[torch.Tensor]:
        """Tensors that a push may be reading in place."""

    def wait_released(self) -> None:
        """Waits until no push reads the weights in place."""

    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Waits for the end of the pending push."""

    def _is_trained_here(self, address: str, model_name: str) -> bool:
        """Whether the current thread trains this model and pushes it to this server."""

    def _end_at_exit(self) -> None:
        """Waits at most a second for the pending push, because the process ends."""


# The attachments of this process that are not closed.
attachments: weakref.WeakSet[Attached] = weakref.WeakSet()


def wait_unread(arrays: Iterable[Any]) -> None:
    """Waits until no push reads the memory of these torch tensors or NumPy arrays. Called before they are
    written."""
    written = _ranges_of(arrays)
    for attachment in list(attachments):
        if _overlap(written, _ranges_of(attachment._tensors_in_place())):
            attachment.wait_released()


def _ranges_of(arrays: Iterable[Any]) -> list[tuple[int, int]]:
    """The addresses of those arrays that a push could read in place: first byte, end."""
    ranges: list[tuple[int, int]] = []
    for array in arrays:
        if is_instance(array, "torch", "Tensor"):
            local = local_of(array)
            # The host and its GPUs share one address space.
            is_reachable = local.is_cpu or gpu.is_readable(local)
            if is_reachable and not is_sparse(local) and local.data_ptr() != 0:
                ranges.append(range_of(local))
        elif is_instance(array, "numpy", "ndarray") and array.size > 0:
            ranges.append(range_of(array))
    return ranges


def _overlap(some: list[tuple[int, int]], others: list[tuple[int, int]]) -> bool:
    """Whether a range of the first list has an address in common with one of the second."""
    # The largest end so far in each list, as the ranges of both are visited by their begin.
    ends = [0, 0]
    for begin, end, side in sorted([(*one, 0) for one in some] + [(*one, 1) for one in others]):
        if begin < ends[1 - side]:
            return True
        ends[side] = max(ends[side], end)
    return False
