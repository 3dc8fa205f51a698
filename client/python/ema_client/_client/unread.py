# SPDX-License-Identifier: Apache-2.0
"""Memory that pushes read in place: they are waited for before it is written."""

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
    """An attachment, as the modules know it that `attachment.py` imports."""

    _lock: threading.RLock
    _pid: int

    @property
    def step(self) -> int:
        """The last step that was counted."""

    def _reads_in(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether a push may read in one of these ranges of addresses."""

    def wait_released(self) -> None:
        """Waits until no push reads in place any more."""

    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Waits until the last push has ended."""

    def _is_trained_here(self, address: str, model_name: str) -> bool:
        """Whether the current thread trains and pushes to that model."""

    def _hear_of_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Some optimizer of the process has stepped."""

    def _end_at_exit(self) -> None:
        """The process ends: waits a little for the last push."""


# The attachments of this process that are not closed.
attachments: weakref.WeakSet[Attached] = weakref.WeakSet()


def wait_unread(arrays: Iterable[Any]) -> None:
    """Waits until no attachment's push reads memory of these, torch tensors or NumPy arrays: before they are
    written."""
    ranges: list[tuple[int, int]] = []
    for array in arrays:
        if is_instance(array, "torch", "Tensor"):
            local = local_of(array)
            if _is_read_in_place(local):
                ranges.append(range_of(local))
        elif is_instance(array, "numpy", "ndarray") and array.size > 0:
            ranges.append(range_of(array))
    for attachment in list(attachments):
        if attachment._reads_in(ranges):
            attachment.wait_released()


def _is_read_in_place(local: torch.Tensor) -> bool:
    """Whether a push reads it where it lies. The host and its GPUs have no address in common."""
    is_reached = local.is_cpu or gpu.is_readable(local)
    return is_reached and not is_sparse(local) and local.data_ptr() != 0
