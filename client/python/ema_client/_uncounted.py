# SPDX-License-Identifier: Apache-2.0
"""Whether weights are trained by somebody whose steps an attachment does not count."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ema_client._optimizers import parameter_ids
from ema_client._pieces import writes_of
from ema_client._torch_model import write_calls

if TYPE_CHECKING:
    import torch

# Parameters that are looked at after each step, which takes 20 to 60 us.
_SAMPLED = 64
# More writes than so many steps have made, to most of them, and than this package has made, tell of steps
# that are not counted. Fewer may be those of load_state_dict, or of clipping after the step; those to a
# few, of forwards that normalise these.
_STEPS = 50
# So often a checkpoint may be loaded before a training that has nothing left to do.
_LOADS = 4


class Uncounted:
    """Compares PyTorch's count of writes to some trained parameters with what a step adds to it."""

    def __init__(
        self,
        optimizers: Sequence[torch.optim.Optimizer] | None,
        parameters: Iterable[torch.nn.Parameter],
    ) -> None:
        """`optimizers`: that change them; None: nobody knows who does."""
        held = None if optimizers is None else parameter_ids(optimizers)
        trained = [
            parameter
            for parameter in parameters
            if parameter.requires_grad and not parameter.is_inference()
            if held is None or id(parameter) in held
        ]
        self._parameters = trained[:: -(-len(trained) // _SAMPLED) or 1]
        self._writes = self._count()
        self._own = write_calls()
        # That a step has added to each, and what came before it.
        self._most = [0] * len(self._parameters)
        self._has_told = False

    def count_step(self) -> None:
        """A step has been counted."""
        writes = self._count()
        self._most = list(map(max, self._most, map(operator.sub, writes, self._writes)))
        self._writes = writes
        self._own = write_calls()
        self._has_told = False

    def has_others(self) -> bool:
        """Whether there have been steps of others since; said once."""
        if self._has_told:
            return False
        own = write_calls() - self._own
        stepped = [
            now - before - own > _STEPS * most
            for now, before, most in zip(self._count(), self._writes, self._most)
            if most > 0
        ]
        self._has_told = any(stepped) and 2 * sum(stepped) >= len(stepped)
        return self._has_told

    def have_changed(self) -> bool:
        """Whether somebody may have trained since the last step, or from the beginning."""
        return sum(self._count()) - sum(self._writes) > _LOADS * len(self._parameters)

    def _count(self) -> list[int]:
        return list(map(writes_of, self._parameters))
