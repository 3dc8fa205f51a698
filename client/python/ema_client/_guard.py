# SPDX-License-Identifier: Apache-2.0
"""Weights that a push reads in place: who waits before writing them, and who did not."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from ema_client._errors import FailedPreconditionError
from ema_client._optimizers import parameter_ids
from ema_client._pieces import is_dtensor, pieces_of
from ema_client._torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Push:
    """What is pushed at a step, so that it can be pushed again while the weights are the same."""

    step: int
    time: dict[str, float]
    weights: dict[str, torch.Tensor]
    frozen_changed: bool


class PushedWeights:
    """What is pushed: parameters in place, copies of what may change before the next step.

    Notices a parameter that somebody writes all the same while a push reads it, such as a forward that
    normalises weights, and copies it from then on. Not through `.data`, nor replays of a CUDA graph:
    these PyTorch does not count.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer] | None) -> None:
        self._optimizers = optimizers
        self._written: set[str] = set()
        # What is read in place, and PyTorch's count of writes to it then.
        self._in_place: dict[str, tuple[torch.Tensor, int]] = {}

    def take(self, tensors: NamedTensors, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Those of `names`, for a push that starts now."""
        optimized = None if self._optimizers is None else parameter_ids(self._optimizers)
        weights: dict[str, torch.Tensor] = {}
        self._in_place = {}
        for name, parameter in tensors.parameters.items():
            if name in names:
                weights[name] = parameter.detach()
                # Somebody else may change it, without asking us: another optimizer, or the forward pass
                # (a key encoder that follows the model). Without an optimizer, whoever calls
                # `after_step` sees to it that nothing does.
                is_foreign = optimized is not None and id(parameter) not in optimized
                if is_foreign or name in self._written:
                    weights[name] = weights[name].clone()
                elif not parameter.is_inference():
                    self._in_place[name] = parameter, _writes(parameter)
        for name, buffer in tensors.buffers.items():
            if name in names:
                weights[name] = buffer.detach().clone()
        return weights

    def release(self) -> list[str]:
        """To be called when the weights may be written: the names of those that have been before."""
        written = [
            name for name, (tensor, before) in self._in_place.items() if _writes(tensor) != before
        ]
        self._in_place = {}
        self._written.update(written)
        return written


def _writes(tensor: torch.Tensor) -> int:
    # Of a DTensor each operation counts in one of the two.
    local = tensor._local_tensor._version if is_dtensor(tensor) else 0  # type: ignore[attr-defined]
    return tensor._version + local


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> list[int]:
    """Of what this rank has of each."""
    return checksums(piece.local for piece in pieces_of(tensors).values())


class WatchedWeights:
    """Tells which of some weights have been written since."""

    def __init__(self) -> None:
        self._tensors: Mapping[str, torch.Tensor] = {}
        self._sums: list[int] = []

    def watch(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors, self._sums = tensors, checksums_of(tensors)

    def check(self, model_name: str, step: int) -> None:
        """FailedPreconditionError: some have, after `step`. Watches nothing any more."""
        sums = checksums_of(self._tensors)
        written = [
            name for name, before, now in zip(self._tensors, self._sums, sums) if now != before
        ]
        self._tensors, self._sums = {}, []
        if written:
            raise FailedPreconditionError(
                f'model "{model_name}": written while they were pushed at step {step}, without '
                f"wait_released(): {', '.join(written)}",
                reason="BAD_REQUEST",
            )


class BeforeLoad:
    """A hook that lets a module's load_state_dict call `wait`, a method, while its object lives.

    A module that is copied or pickled takes its hooks along: theirs wait for nothing.
    """

    def __init__(self, wait: Callable[[], None] | None = None) -> None:
        self._wait = None if wait is None else WeakMethod(wait)

    def __call__(self, *_: Any) -> None:
        wait = None if self._wait is None else self._wait()
        if wait is not None:
            wait()

    def __reduce__(self) -> tuple[type[BeforeLoad], tuple[()]]:
        return BeforeLoad, ()
