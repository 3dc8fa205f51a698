# SPDX-License-Identifier: Apache-2.0
"""Weights that a push reads in place: who waits before writing them, and who did not."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client import _ema, _gpu
from ema_client._arrays import is_instance, is_sparse, range_of
from ema_client._optimizers import parameter_ids
from ema_client._pieces import local_of, writes_of
from ema_client._torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch

    from ema_client._attachment import Attachment


# Attachments that push.
live: weakref.WeakSet[Attachment] = weakref.WeakSet()

# For copies of what may change before the next step, on each rank.
_COPY_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Push:
    """What is pushed at a step, so that it can be pushed again while the weights are the same."""

    step: int
    time: dict[str, float]
    weights: dict[str, torch.Tensor]
    frozen_changed: bool


class PushedWeights:
    """What is pushed: parameters in place, copies of what may change before the next step.

    Where these would take more than 64 MiB, and where some of it is frozen, which is seldom pushed, all
    is read in place, and `must_wait` is true. What lies on a GPU in another order than the server's is
    copied in any case when its push starts, and counts.

    Notices a parameter that somebody writes all the same while a push reads it, such as a forward that
    normalises weights, and copies it from then on, or waits: by PyTorch's count of writes, and, in host
    memory, by 64 words of it, since writes through `.data` are not counted. Of those, it misses what
    leaves these words as they are, and on a GPU all, replays of CUDA graphs among them.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        frozen: Collection[str],
    ) -> None:
        """`frozen`: names of parameters that are seldom pushed."""
        self._optimizers = optimizers
        self._frozen = frozen
        self._written: set[str] = set()
        # What is read in place until the next step.
        self._in_place: list[_InPlace] = []
        # Of the storages of what was taken last.
        self._memory: set[tuple[int, int]] = set()
        # What was taken last may change before the next step: its push must be waited for at once.
        self.must_wait = False

    def take(self, tensors: NamedTensors, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Those of `names`, for a push that starts now."""
        optimized = None if self._optimizers is None else parameter_ids(self._optimizers)
        weights: dict[str, torch.Tensor] = {}
        copied = {name: buffer for name, buffer in tensors.buffers.items() if name in names}
        in_place: list[_InPlace] = []
        # Only of a whole push: the copies may find no memory.
        self._in_place = []
        self.must_wait = False
        for name, parameter in tensors.parameters.items():
            if name not in names:
                continue
            weights[name] = parameter.detach()
            # Somebody else may change it, without asking us: another optimizer, or the forward pass
            # (a key encoder that follows the model). Without an optimizer, whoever calls
            # `after_step` sees to it that nothing does.
            is_foreign = optimized is not None and id(parameter) not in optimized
            if not is_foreign and name not in self._written:
                in_place.append(_InPlace(name, parameter, weights[name]))
            elif name in self._frozen:
                self.must_wait = True
            else:
                copied[name] = parameter
        copied_bytes = sum(map(_bytes_here, copied.values()))
        copied_bytes += sum(map(_bytes_here, filter(_is_put_in_order, weights.values())))
        self.must_wait |= copied_bytes > _COPY_BYTES
        for name, tensor in copied.items():
            weights[name] = tensor.detach() if self.must_wait else tensor.detach().clone()
        for one, sample in zip(in_place, _samples(in_place)):
            one.sample = sample
        self._in_place = in_place
        self._memory = {
            memory_of(local.untyped_storage())
            for local in map(local_of, weights.values())
            if _is_read_in_place(local)
        }
        return weights

    def are_in(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether a storage of what was taken last has a byte in one of these ranges of addresses."""
        ours = [(begin, end, 0) for begin, end in self._memory]
        theirs = [(begin, end, 1) for begin, end in ranges]
        # How far those of ours and of theirs go that begin no later.
        ends = [0, 0]
        for begin, end, whose in sorted(ours + theirs):
            if begin < ends[1 - whose]:
                return True
            ends[whose] = max(ends[whose], end)
        return False

    def take_written(self) -> list[str]:
        """To be called when the weights may be written: the names of those that have been before."""
        in_place, self._in_place = self._in_place, []
        written = [
            one.name
            for one, sample in zip(in_place, _samples(in_place))
            if one.is_counted() or sample != one.sample
        ]
        self._written.update(written)
        return written


class _InPlace:
    """A parameter that is read in place."""

    __slots__ = ("name", "sample", "_parameter", "_writes", "_local", "_end")

    def __init__(self, name: str, parameter: torch.Tensor, memory: torch.Tensor) -> None:
        """`memory`: shares its memory, and keeps it where the parameter gets another one meanwhile."""
        self.name = name
        self.sample = 0  # Of its words, when the push began.
        self._parameter = parameter
        # Of what is made in inference mode PyTorch counts no writes.
        self._writes = None if parameter.is_inference() else writes_of(parameter)
        # What has words to compare: none elsewhere than in host memory, or with gaps between them.
        local = local_of(memory)
        has_words = local.is_cpu and (local.is_contiguous() or _is_dense(local))
        self._local = local if has_words else None
        self._end = (local.storage_offset() + local.numel()) * local.element_size()

    def is_counted(self) -> bool:
        """Whether PyTorch has counted a write."""
        return self._writes is not None and writes_of(self._parameter) != self._writes

    def place(self) -> tuple[int, int]:
        """Address and bytes of its words, as they are now: share_memory and resize_ give the storage
        itself other memory, or less."""
        if self._local is None or self._local.untyped_storage().nbytes() < self._end:
            return 0, 0
        address = self._local.data_ptr()
        # A wrapper of other tensors, which the parameter has become, has no address.
        return address, self._local.nbytes if address != 0 else 0


def _is_dense(tensor: torch.Tensor) -> bool:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return last == tensor.numel() - 1


def _samples(in_place: Sequence[_InPlace]) -> list[int]:
    return _ema.sample_words([one.place() for one in in_place])


def _bytes_here(tensor: torch.Tensor) -> int:
    local = local_of(tensor)
    return int(local.numel() * local.element_size())


def _is_put_in_order(tensor: torch.Tensor) -> bool:
    """Whether `_arrays.read` copies it."""
    local = local_of(tensor)
    return bool(local.is_neg()) or (_gpu.is_readable(local) and not local.is_contiguous())


def memory_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The addresses of its first byte, and of the one behind its last."""
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _is_read_in_place(local: torch.Tensor) -> bool:
    """Whether a push reads it where it lies. The host and its GPUs have no address in common."""
    is_reached = local.is_cpu or _gpu.is_readable(local)
    return is_reached and not is_sparse(local) and local.data_ptr() != 0


def wait_unread(arrays: Iterable[Any]) -> None:
    """Waits until no attachment's push reads memory of these, torch tensors or NumPy arrays: before they
    are written."""
    ranges: list[tuple[int, int]] = []
    for array in arrays:
        if is_instance(array, "torch", "Tensor"):
            local = local_of(array)
            if _is_read_in_place(local):
                ranges.append(range_of(local))
        elif is_instance(array, "numpy", "ndarray") and array.size > 0:
            ranges.append(range_of(array))
    for attachment in list(live):
        if attachment._weights.are_in(ranges):
            attachment.wait_released()


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of what this rank has of each."""
    return checksums(map(local_of, tensors.values()))


class WatchedWeights:
    """Tells which of some weights have been written since."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._sums: list[int] = []

    def watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._sums = tensors, checksums_of(tensors)

    def moved(self) -> list[str]:
        """The names of those that have. Watches nothing any more."""
        sums = checksums_of(self._tensors)
        moved = [
            name for name, before, now in zip(self._tensors, self._sums, sums) if now != before
        ]
        self._tensors, self._sums = {}, []
        return moved


class BeforeLoad:
    """A hook that lets a module's load_state_dict call `wait`, a method, while its object lives.

    A module that is copied or pickled takes its hooks along: theirs wait for nothing, and need no
    ema_client where they are loaded.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = weakref.WeakMethod(wait)

    def __call__(self, *_: Any) -> None:
        wait = self._wait()
        if wait is not None:
            wait()

    def __reduce__(self) -> tuple[Any, ...]:
        # A builtin that takes any arguments, and does nothing.
        return functools.partial, (Exception,)
