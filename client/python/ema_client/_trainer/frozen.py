# SPDX-License-Identifier: Apache-2.0
"""Detects changes of frozen parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ema_client._client.pieces import local_of, writes_of
from ema_client._model.torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch


class FrozenTensors:
    """The parameters that are not trained. For the training thread.

    PyTorch's version counter, or other memory, shows a write; then checksums show whether the
    values have changed, since one rank may write and restore its weights, as `averaged()` does.
    Writes through `.data` change neither counter nor memory; with `check`, checksums are always
    compared.
    """

    def __init__(
        self,
        names: Collection[str],
        tensors: NamedTensors,
        sums: Mapping[str, int],
        *,
        check: bool,
    ) -> None:
        """`sums`: checksums of `tensors`, at least of `names`."""
        self.names = frozenset(names)
        self._check = check
        self._marks = {name: mark(tensor) for name, tensor in self._of(tensors).items()}
        self._sums = {name: sums[name] for name in self._marks}

    def have_changed(self, tensors: NamedTensors) -> bool:
        """Whether the values of one of them have changed since the last call."""
        frozen = self._of(tensors)
        marks = {name: mark(tensor) for name, tensor in frozen.items()}
        written = [name for name in frozen if self._check or marks[name] != self._marks.get(name)]
        sums = dict(zip(written, checksums(local_of(frozen[name]) for name in written)))
        changed = frozen.keys() != self._marks.keys() or any(
            self._sums.get(name) != value for name, value in sums.items()
        )
        self._marks = marks
        self._sums = {name: sums.get(name, self._sums.get(name, 0)) for name in frozen}
        return changed

    def _of(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        return {name: tensors.parameters[name] for name in self.names & tensors.parameters.keys()}


def mark(tensor: torch.Tensor) -> object:
    """A value that differs after a write, or if the tensor has other memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    if tensor.is_inference():
        return object()  # PyTorch does not count its writes.
    local = local_of(tensor).detach()
    # The weak reference does not keep the memory, but is never equal to that of a new storage.
    memory = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
    return (
        memory,
        local.storage_offset(),
        local.shape,
        local.stride(),
        local.dtype,
        writes_of(tensor),
    )
