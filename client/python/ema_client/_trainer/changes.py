# SPDX-License-Identifier: Apache-2.0
"""Tensors of a model that its run does not have, because the model is not as it was attached."""

from __future__ import annotations

import logging

from ema_client._client.arrays import some
from ema_client._model.torch_model import NamedTensors

_logger = logging.getLogger(__name__)


class Changes:
    """Warns, once of each, of tensors that are new and of names that are no longer tied."""

    def __init__(self, model_name: str, tensors: NamedTensors) -> None:
        """`tensors`: as they are attached."""
        self._model_name = model_name
        self._first_names = _first_names(tensors)
        # Of which the run has nothing to push.
        self._empty = [name for name, tensor in tensors.all().items() if tensor.numel() == 0]
        self._told: set[str] = set()
        self._seen = tensors

    def look(self, tensors: NamedTensors) -> None:
        """To be called at each push."""
        self._look_at_empty(tensors)
        seen, self._seen = self._seen, tensors
        if tensors is seen or (
            tensors.parameters.keys() == seen.parameters.keys()
            and tensors.buffers.keys() == seen.buffers.keys()
            and tensors.aliases == seen.aliases
        ):
            return
        now = _first_names(tensors)
        attached = self._first_names
        self._tell(
            "not averaged, the model has got them after attach()",
            set(tensors.all()).difference(attached),
        )
        self._tell(
            "no longer tied as at attach(), the average goes on with the values of the others' tensors",
            {name for name, first in attached.items() if first not in (name, now.get(name, first))},
        )

    def _look_at_empty(self, tensors: NamedTensors) -> None:
        if self._empty:
            there = tensors.all()
            self._tell(
                "not averaged, they had no elements at attach()",
                {name for name in self._empty if name in there and there[name].numel() > 0},
            )

    def _tell(self, what: str, names: set[str]) -> None:
        names -= self._told
        self._told |= names
        if names:
            _logger.warning('model "%s": %s: %s', self._model_name, what, some(sorted(names)))


def _first_names(tensors: NamedTensors) -> dict[str, str]:
    """Of each name the one under which the tensor goes: for most, itself."""
    names = {name: name for name in tensors.all()}
    return names | {alias: first for first, aliases in tensors.aliases.items() for alias in aliases}
