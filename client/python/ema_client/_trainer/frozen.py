# SPDX-License-Identifier: Apache-2.0
"""Detects writes to frozen parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ema_client._client.pieces import local_of, writes_of
from ema_client._model.torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch


class FrozenTensors:
    """The parameters that are not trained. For the training thread.

    A write is detected by PyTorch's version counter, or because the parameter has other memory. Writes
    through `.data` change neither; with `check`, a checksum finds them.
    """

    def __init__(self, names: Collection[str], tensors: NamedTensors, *, check: bool) -> None:
        """`tensors`: as the first push will find them, if nothing is written before."""
        self.names = frozenset(names)
        self._check = check
        self._marks = self._marks_of(tensors)

    def have_changed(self, tensors: NamedTensors) -> bool:
        """Whether one of them may have been written since the last call."""
        marks = self._marks_of(tensors)
        changed = marks != self._marks
        self._marks = marks
        return changed

    def _marks_of(self, tensors: NamedTensors) -> dict[str, object]:
        frozen = {
            name: tensors.parameters[name] for name in self.names & tensors.parameters.keys()
        }
        sums = checksums(map(local_of, frozen.values())) if self._check else [0] * len(frozen)
        return {
            name: (_mark(tensor), checksum)
            for (name, tensor), checksum in zip(frozen.items(), sums)
        }


def _mark(tensor: torch.Tensor) -> object:
    """Something that is unequal after a write, or when the tensor has other memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    if tensor.is_inference():
        return object()  # PyTorch does not count its writes.
    local = local_of(tensor).detach()
    # The reference does not keep the memory, but keeps another storage from looking the same.
    memory = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return memory, local.storage_offset(), local.shape, local.stride(), local.dtype, writes_of(tensor)
