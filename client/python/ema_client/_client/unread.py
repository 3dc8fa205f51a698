# SPDX-License-Identifier: Apache-2.0
"""Waits for pushes that read memory in place, before that memory is written."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from ema_client._client.arrays import is_instance, is_sparse, is_without_memory
from ema_client._client.pieces import local_of

if TYPE_CHECKING:
    import torch


class Attached(Protocol):
    """The part of `Attachment` that is used here, below it."""

    def _tensors_in_place(self) -> Iterable[torch.Tensor]:
        """Tensors that a push may be reading in place."""

    def wait_released(self) -> None:
        """Waits until no push reads the weights in place."""


# The attachments of this process that are not closed.
attachments: weakref.WeakSet[Attached] = weakref.WeakSet()


def wait_unread(arrays: Iterable[Any]) -> None:
    """Waits until no push reads the memory of these torch tensors or NumPy arrays. Called before they are
    written."""
    written = set(map(_storage_of, arrays))
    for attachment in list(attachments):
        read = map(_storage_of, attachment._tensors_in_place())
        # A NumPy array may share the memory of any tensor.
        if None in written or not written.isdisjoint(read):
            attachment.wait_released()


def _storage_of(array: Any) -> int | None:
    """The address of a torch tensor's storage; 0: it has none here. None: not a torch tensor."""
    if not is_instance(array, "torch", "Tensor"):
        return None
    local = local_of(array)
    if is_sparse(local) or is_without_memory(local):
        return 0
    return int(local.untyped_storage().data_ptr())
