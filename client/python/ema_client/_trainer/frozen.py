# SPDX-License-Identifier: Apache-2.0
"""Tensors of a run that are not trained: whether they are still what the server has."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client.pieces import local_of, writes_of
from ema_client._model.torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch


class FrozenTensors:
    """What this rank knows of them, for the thread that trains.

    Reads their values only where PyTorch has counted a write since the last look, they have other
    memory, or, in host memory, some of 64 words of them have changed, as by a write through `.data` (of
    a teacher that follows its student): also where a rank writes what was there, the others go by equal
    values.
    """

    def __init__(
        self,
        names: Collection[str],
        tensors: NamedTensors,
        sums: Mapping[str, int],
        *,
        always_reads: bool,
    ) -> None:
        """`sums`: checksums of `tensors`, at least of `names`. `always_reads`: finds all writes."""
        self._names = frozenset(names)
        self._always_reads = always_reads
        # Checksums of the values at the last look, and what tells that these may be others.
        self._seen = {name: (mark, sums[name]) for name, mark in _marks(self._of(tensors)).items()}

        self._digest: str | None = None  # Of `_seen`; None: not computed.

    @property
    def names(self) -> frozenset[str]:
        return self._names

    def digest(self, tensors: NamedTensors) -> str:
        """Of the values of all of them: equal for equal values."""
        self._look(self._of(tensors))
        if self._digest is None:
            self._digest = " ".join(str(self._seen[name][1]) for name in sorted(self._seen))
        return self._digest

    def _of(self, tensors: NamedTensors) -> dict[str, torch.Tensor]:
        return {name: tensors.parameters[name] for name in self._names & tensors.parameters.keys()}

    def _look(self, tensors: Mapping[str, torch.Tensor]) -> None:
        unseen: dict[str, Any] = {}
        seen: dict[str, tuple[Any, int]] = {}
        for name, mark in _marks(tensors).items():
            if name in self._seen and mark == self._seen[name][0] and not self._always_reads:
                seen[name] = self._seen[name]
            else:
                unseen[name] = mark
        if not unseen and seen.keys() == self._seen.keys():
            return
        self._digest = None
        sums = checksums(local_of(tensors[name]) for name in unseen)
        seen |= {name: (unseen[name], value) for name, value in zip(unseen, sums)}
        self._seen = seen


def _marks(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """By name what is another one when the tensor has been written, or has other memory."""
    from torch.multiprocessing.reductions import StorageWeakRef

    marks: list[object] = []
    locals_ = [local_of(tensor).detach() for tensor in tensors.values()]
    for tensor, local in zip(tensors.values(), locals_):
        if tensor.is_inference():
            marks.append(object())  # Equal to no other: PyTorch does not count its writes.
            continue
        # The reference does not keep the memory, but keeps another one from looking the same.
        memory = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
        layout = (local.storage_offset(), local.shape, local.stride(), local.dtype)
        marks.append((memory, layout, writes_of(tensor)))
    return dict(zip(tensors, zip(marks, _ema.sample_words(locals_))))
