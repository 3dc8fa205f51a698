# SPDX-License-Identifier: Apache-2.0
"""Protects weights while a push reads them: waits, copies, and detects writes that did not wait.

Also has the decorator for the methods of `Attachment` that hooks and other threads call.
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar

from ema_client._client import gpu
from ema_client._client.pieces import BoxCache, Held, HeldWeights, object_of, writes_of
from ema_client._model.optimizers import parameter_ids, with_contained
from ema_client._model.torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch

# The most that a push copies on each rank. If it would copy more, the training waits for the push.
_COPY_BYTES = 64 << 20

# Follows the warning that names the written weights, unless the next step raises.
WRITTEN_HINT = (
    "; from now on they are copied before each push, or the step waits. The average holds the weights as "
    "optimizer.step() left them. To average what is written after it (clipping), attach with None as the "
    "optimizer, and call after_step() after the write. If an optimizer that attach() did not get has written "
    "them, its steps are not averaged: call attach() again with it"
)


class PushedWeights:
    """The weights of one push: parameters that are read in place, and copies.

    Copied are buffers, parameters that the optimizers do not hold, and parameters that were written
    during an earlier push. If the copies would need more than 64 MiB, or include frozen parameters, they
    are read in place, too, and `must_wait` is true. The 64 MiB include the copies that the engine makes of
    weights on a GPU that are not in row-major order.

    Writes to what is read in place are detected by PyTorch's version counters. These miss writes through
    `.data` and replays of CUDA graphs; `checks` also compares checksums.

    For the training thread; any thread may read `in_place`.
    """

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        frozen: Collection[str],
        *,
        checks: bool,
    ) -> None:
        """`optimizers`: None: the caller counts the steps. `frozen`: names of frozen parameters."""
        self._optimizers = None if optimizers is None else with_contained(optimizers)
        self._frozen = frozen
        self._checks = checks
        # Names of parameters that were written during a push.
        self._written: set[str] = set()
        self._boxes = BoxCache()
        # The caller must wait for this push before it returns to the training.
        self.must_wait = False
        # Tensors that the push reads in place. They keep their memory.
        self.in_place: list[torch.Tensor] = []
        # Parameters among these that may not be written until `take_written`, and their version counters.
        self._guarded: dict[str, torch.nn.Parameter] = {}
        self._versions: list[int | None] = []
        # With `checks`: everything that is pushed, and its checksums.
        self._checked: HeldWeights = HeldWeights()
        self._sums: list[int] = []

    def take(self, tensors: NamedTensors, names: Collection[str]) -> HeldWeights:
        """The tensors of `names`, for a push that starts now."""
        import torch

        optimized = None if self._optimizers is None else parameter_ids(self._optimizers)
        # If a copy fails for lack of memory, nothing is guarded.
        self._stop_guarding()
        self.must_wait = False
        held = self._boxes.held
        plain = torch.nn.Parameter
        weights = HeldWeights(
            (name, parameter.detach() if type(parameter) is plain else held(name, parameter))
            for name, parameter in tensors.parameters.items()
            if name in names
        )
        guarded: dict[str, torch.nn.Parameter] = {}
        copied = {
            name: held(name, buffer.to(tensors.buffer_dtypes.get(name, buffer.dtype)))
            for name, buffer in tensors.buffers.items()
            if name in names
        }
        for name, value in weights.items():
            parameter = tensors.parameters[name]
            # Another optimizer, or the forward of a model with a momentum encoder, may write a parameter
            # that the optimizers do not hold. Without optimizers, the caller of after_step() must wait.
            is_foreign = optimized is not None and id(object_of(parameter)) not in optimized
            if not is_foreign and name not in self._written:
                guarded[name] = parameter
            elif name in self._frozen:  # Seldom pushed, so waiting costs less than the memory.
                self.must_wait = True
            else:
                copied[name] = value
        copied_bytes = sum(map(_bytes_of, copied.values()))
        copied_bytes += sum(map(_bytes_of, filter(_is_reordered, weights.values())))
        self.must_wait |= copied_bytes > _COPY_BYTES
        for name, value in copied.items():
            weights[name] = value if self.must_wait else _copy_of(value)
        self.in_place = [
            _local_of(value)
            for name, value in weights.items()
            if self.must_wait or name not in copied
        ]
        self._guarded, self._versions = guarded, _versions_of(guarded)
        if self._checks:
            self._checked, self._sums = weights, _checksums_of(weights)
        return weights

    def take_written(self) -> tuple[list[str], list[str]]:
        """The names of guarded weights that were written since `take`, by the version counters and by the
        checksums. Called before the weights may be written: later writes are not reported."""
        versions = _versions_of(self._guarded)
        counted = [
            name
            for name, before, now in zip(self._guarded, self._versions, versions)
            if now != before
        ]
        sums = _checksums_of(self._checked)
        differing = [
            name for name, before, now in zip(self._checked, self._sums, sums) if now != before
        ]
        self._stop_guarding()
        self._written.update(counted)
        return counted, differing

    def release(self) -> None:
        """No push reads the weights any more."""
        self._stop_guarding()
        self.in_place = []

    def _stop_guarding(self) -> None:
        self._guarded, self._versions = {}, []
        self._checked, self._sums = HeldWeights(), []


def _versions_of(parameters: dict[str, torch.nn.Parameter]) -> list[int | None]:
    """PyTorch's version counters; None: a tensor that was created in inference mode has none."""
    return [None if one.is_inference() else writes_of(one) for one in parameters.values()]


def _checksums_of(weights: HeldWeights) -> list[int]:
    return checksums(map(_local_of, weights.values()))


def _copy_of(value: torch.Tensor | Held) -> torch.Tensor | Held:
    if isinstance(value, Held):
        return Held(value.local.clone(), value.offsets)
    return value.clone()


def _local_of(value: torch.Tensor | Held) -> torch.Tensor:
    return value.local if isinstance(value, Held) else value


def _bytes_of(value: torch.Tensor | Held) -> int:
    local = _local_of(value)
    return int(local.numel() * local.element_size())


def _is_reordered(value: torch.Tensor | Held) -> bool:
    """Whether `arrays.read` makes a copy in row-major order."""
    local = _local_of(value)
    return bool(local.is_neg()) or (not local.is_contiguous() and gpu.is_readable(local))


class BeforeLoad:
    """A hook: before a module's load_state_dict it calls `wait`, a bound method, if its object still lives.

    Copying or pickling a module copies its hooks. A copied hook does nothing, and can be unpickled
    without ema_client.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = weakref.WeakMethod(wait)

    def __call__(self, *_: Any) -> None:
        wait = self._wait()
        if wait is not None:
            wait()

    def __reduce__(self) -> tuple[Any, ...]:
        # functools.partial(Exception) accepts any arguments and has no effect.
        return functools.partial, (Exception,)


class Locked(Protocol):
    """An object with `synchronized` methods.

    Attributes:
        _lock: used only in the process `_pid`. In a forked child a missing thread may hold it.
    """

    _lock: threading.RLock
    _pid: int


Owner = TypeVar("Owner", bound=Locked)
Given = ParamSpec("Given")
Result = TypeVar("Result")


def synchronized(
    method: Callable[Concatenate[Owner, Given], Result],
) -> Callable[Concatenate[Owner, Given], Result]:
    """A method that one thread at a time may run, and that `keep_uncompiled` finds."""

    @functools.wraps(method)
    def locked(self: Owner, /, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        if os.getpid() != self._pid:
            return method(self, *args, **kwargs)
        with self._lock:
            return method(self, *args, **kwargs)

    setattr(locked, "_is_entrance", True)
    return locked


@functools.cache
def keep_uncompiled(owner: type[Any]) -> None:
    """Excludes the `synchronized` methods of a class from torch.compile, which would replay them with the step
    numbers of the traced call. Cannot be done in `synchronized`: importing ema_client must not import torch.
    """
    import torch

    for name, method in list(vars(owner).items()):
        if getattr(method, "_is_entrance", False):
            setattr(owner, name, torch.compiler.disable(method))  # type: ignore[no-untyped-call]
