# SPDX-License-Identifier: Apache-2.0
"""Steps of optimizers that an attachment was not given, on the weights that it pushes."""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ema_client._client.unread import attachments
from ema_client._model.optimizers import StepKind, parameter_ids, step_kind
from ema_client._trainer.entrances import uncompiled

if TYPE_CHECKING:
    import torch


class Uncounted:
    """Knows them, as it is told of all steps in the process."""

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer] | None, module: torch.nn.Module
    ) -> None:
        """`optimizers`: that are counted; None: steps are counted by hand, whoever makes them."""
        self._optimizers = optimizers
        self._counted = set(map(id, optimizers or ()))
        self._module = module
        # Parameters that are ours, by their ids; empty: to be looked up.
        self._ours: set[int] = set()
        # Optimizers that change none of these, and how many parameters they had then: a training may
        # have one for each parameter.
        self._strangers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        # Others' steps since the last of ours, by their ids.
        self._counts: collections.Counter[int] = collections.Counter()
        self._is_done = False
        # There has been one.
        self.has_any = False

    def hear(self, optimizer: torch.optim.Optimizer) -> bool:
        """Takes note of a step. Whether it is to be said that it does not count: once, and of one that
        steps twice while none of ours does. An optimizer that wraps another steps when that does.
        """
        if id(optimizer) in self._counted:
            self._counts.clear()
        elif self._is_done or not self._changes_ours(optimizer):
            return False
        elif step_kind(optimizer) is StepKind.TRAINING:
            self.has_any = True
            self._counts[id(optimizer)] += 1
            is_second = self._counts[id(optimizer)] == 2
            # By hand there is nothing else to know.
            self._is_done = is_second or self._optimizers is None
            return is_second
        return False

    def _changes_ours(self, optimizer: torch.optim.Optimizer) -> bool:
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if self._strangers.get(optimizer) == count:
            return False
        if not self._ours and self._optimizers is None:
            self._ours = {id(one) for one in self._module.parameters() if one.requires_grad}
        elif not self._ours:
            self._ours = parameter_ids(self._optimizers or ())
        ours = self._ours
        if any(not ours.isdisjoint(map(id, group["params"])) for group in optimizer.param_groups):
            return True
        self._strangers[optimizer] = count
        return False


# PyTorch's handle of the one hook, while there are attachments.
_handle: Any = None
_lock = threading.Lock()


def listen() -> None:
    """To be called when an attachment was opened or closed."""
    global _handle
    from torch.optim.optimizer import register_optimizer_step_post_hook

    with _lock:
        if attachments and _handle is None:
            _handle = register_optimizer_step_post_hook(uncompiled(_after_any_step))
        elif not attachments and _handle is not None:
            _handle.remove()
            _handle = None


def _after_any_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for attachment in list(attachments):
        attachment._hear_of_step(optimizer)
