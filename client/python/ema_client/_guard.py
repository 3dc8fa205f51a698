# SPDX-License-Identifier: Apache-2.0
"""Weights that a push reads in place: who waits before writing them, and who did not."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from ema_client._optimizers import parameter_ids
from ema_client._pieces import pieces_of
from ema_client._torch_model import NamedTensors, checksums

if TYPE_CHECKING:
    import torch


def weights_to_push(
    tensors: NamedTensors,
    names: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer] | None,
) -> dict[str, torch.Tensor]:
    """Those of `names`: parameters in place, copies of what may change before the next step."""
    optimized = None if optimizers is None else parameter_ids(optimizers)
    weights: dict[str, torch.Tensor] = {}
    for name, parameter in tensors.parameters.items():
        if name in names:
            weights[name] = parameter.detach()
            # Somebody else may change it, without asking us: another optimizer, or the forward pass (a
            # key encoder that follows the model). Without an optimizer, whoever calls `after_step`
            # sees to it that nothing does.
            if optimized is not None and id(parameter) not in optimized:
                weights[name] = weights[name].clone()
    for name, buffer in tensors.buffers.items():
        if name in names:
            weights[name] = buffer.detach().clone()
    return weights


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

    def take_written(self) -> list[str]:
        """Their names; watches nothing any more."""
        sums = checksums_of(self._tensors)
        written = [
            name for name, before, now in zip(self._tensors, self._sums, sums) if now != before
        ]
        self._tensors, self._sums = {}, []
        return written


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
