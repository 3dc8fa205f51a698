# SPDX-License-Identifier: Apache-2.0
"""Weights that a push reads in place, copies of others, and what was written all the same meanwhile."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client import gpu
from ema_client._client.pieces import BoxCache, Held, HeldWeights, dtensor_type, local_of
from ema_client._client.unread import attachments
from ema_client._errors import DeadlineExceededError
from ema_client._model.optimizers import parameter_ids
from ema_client._model.torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# For copies of what may change before the next step, on each rank.
_COPY_BYTES = 64 << 20


# Follows the warning of written weights where the training goes on.
WRITTEN_SINCE = (
    "; copied before each push from now on, or waited for. The average has the weights as "
    "optimizer.step() leaves them: if what is written after it (clipping) belongs to the step, attach with "
    "None as the optimizer, and call after_step() after that"
)


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
        self._boxes = BoxCache()
        # What is read in place until the next step.
        self._in_place = _InPlace()
        # Of the storages of what was taken last: the first byte, and the one behind the last, of each.
        self._memory: list[int] = []
        # What was taken last may change before the next step: its push must be waited for at once.
        self.must_wait = False

    def take(self, tensors: NamedTensors, names: Collection[str]) -> HeldWeights:
        """Those of `names`, for a push that starts now."""
        import torch

        optimized = None if self._optimizers is None else parameter_ids(self._optimizers)
        held = self._boxes.held
        copied = {
            name: held(name, buffer) for name, buffer in tensors.buffers.items() if name in names
        }
        # Only of a whole push: the copies may find no memory.
        self._in_place = _InPlace()
        self.must_wait = False
        plain = torch.nn.Parameter
        weights = HeldWeights(
            (name, parameter.detach() if type(parameter) is plain else held(name, parameter))
            for name, parameter in tensors.parameters.items()
            if name in names
        )
        in_place = _InPlace()
        for name, value in weights.items():
            parameter = tensors.parameters[name]
            # Somebody else may change it, without asking us: another optimizer, or the forward pass
            # (a key encoder that follows the model). Without an optimizer, whoever calls
            # `after_step` sees to it that nothing does.
            is_foreign = optimized is not None and id(parameter) not in optimized
            if not is_foreign and name not in self._written:
                in_place.names.append(name)
                in_place.parameters.append(parameter)
            elif name in self._frozen:
                self.must_wait = True
            else:
                copied[name] = value
        copied_bytes = sum(map(_bytes_of, copied.values()))
        copied_bytes += sum(map(_bytes_of, filter(_is_put_in_order, weights.values())))
        self.must_wait |= copied_bytes > _COPY_BYTES
        for name, value in copied.items():
            weights[name] = value if self.must_wait else _copy_of(value)
        in_place.mark([_local_of(weights[name]) for name in in_place.names])
        self._in_place = in_place
        self._memory = _ema.storage_ends(list(map(_local_of, weights.values())), gpu.reads_cuda())
        return weights

    def are_in(self, ranges: Iterable[tuple[int, int]]) -> bool:
        """Whether a storage of what was taken last has a byte in one of these ranges of addresses."""
        ours = [(begin, end, 0) for begin, end in zip(self._memory[::2], self._memory[1::2])]
        theirs = [(begin, end, 1) for begin, end in ranges]
        # How far those of ours and of theirs go that begin no later.
        ends = [0, 0]
        for begin, end, whose in sorted(ours + theirs):
            if begin < ends[1 - whose]:
                return True
            ends[whose] = max(ends[whose], end)
        return False

    def unmark(self) -> None:
        """From now on they may be written, as far as `take_written` is concerned."""
        self._in_place = _InPlace()

    def take_written(self) -> list[str]:
        """To be called when the weights may be written: the names of those that have been before."""
        in_place, self._in_place = self._in_place, _InPlace()
        written = in_place.written()
        self._written.update(written)
        return written


class _InPlace:
    """Parameters that are read in place."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.parameters: list[torch.Tensor] = []
        # Share their memory, and keep it where a parameter gets another one meanwhile.
        self._memories: list[torch.Tensor] = []
        # When the push began.
        self._writes: list[int | None] = []
        self._samples: list[int] = []

    def mark(self, memories: list[torch.Tensor]) -> None:
        """To be called when the push begins."""
        self._memories = memories
        self._writes = _ema.write_counts(self.parameters, dtensor_type())
        self._samples = _ema.sample_words(memories)

    def written(self) -> list[str]:
        """The names of those that have been written since."""
        writes = _ema.write_counts(self.parameters, dtensor_type())
        samples = _ema.sample_words(self._memories)
        if writes == self._writes and samples == self._samples:
            return []
        before = zip(self._writes, self._samples)
        return [
            name for name, mark, now in zip(self.names, before, zip(writes, samples)) if mark != now
        ]


def _copy_of(value: torch.Tensor | Held) -> torch.Tensor | Held:
    if isinstance(value, Held):
        return Held(value.local.clone(), value.offsets)
    return value.clone()


def _local_of(value: torch.Tensor | Held) -> torch.Tensor:
    return value.local if isinstance(value, Held) else value


def _bytes_of(value: torch.Tensor | Held) -> int:
    local = _local_of(value)
    return int(local.numel() * local.element_size())


def _is_put_in_order(value: torch.Tensor | Held) -> bool:
    """Whether `arrays.read` copies it."""
    local = _local_of(value)
    return bool(local.is_neg()) or (not local.is_contiguous() and gpu.is_readable(local))


def memory_of(storage: torch.UntypedStorage) -> tuple[int, int]:
    """The addresses of its first byte, and of the one behind its last."""
    begin = storage.data_ptr()
    return begin, begin + storage.nbytes()


def wait_pushed(address: str, model_name: str, timeout_s: float | None) -> None:
    """Waits until what this thread trains and pushes to that model is a version, so that the newest one is
    of its last step: `timeout_s` at most (None: that of `attach`), then a warning says that it may not be.
    """
    for attachment in list(attachments):
        if attachment._is_trained_here(address, model_name):
            try:
                attachment.wait_pushed(timeout_s=timeout_s)
            except DeadlineExceededError as error:
                _logger.warning(
                    'model "%s": the newest version is of an earlier step than %d: %s',
                    model_name,
                    attachment.step,
                    error,
                )


def checksums_of(tensors: Mapping[str, torch.Tensor | Held]) -> list[int]:
    """Of what this rank has of each."""
    return checksums(map(_local_of, tensors.values()))


class WatchedWeights:
    """Tells which of some weights have been written since."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, torch.Tensor | Held] = {}
        self._sums: list[int] = []

    def watch(self, tensors: Mapping[str, torch.Tensor | Held]) -> None:
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
