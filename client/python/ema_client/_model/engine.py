# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine: which of its calls are steps of the training.

`engine.step()` may only accumulate gradients, and the optimizers inside the engine step copies of the
parameters, which are written and gathered afterwards. `_take_model_step` performs exactly one complete
step. `engine.step()` calls it when a batch is complete; the pipeline engine calls it, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def is_engine(module: object) -> bool:
    """Whether the object is a DeepSpeedEngine."""
    deepspeed = sys.modules.get("deepspeed.runtime.engine")
    return deepspeed is not None and isinstance(module, deepspeed.DeepSpeedEngine)


class StepHook:
    """Calls functions before and after each step of an engine, until it is removed."""

    def __init__(self, engine: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        """`before`: an exception prevents the step. `after`: is not called if the step has changed nothing,
        because gradients were not finite."""
        self._before = before
        self._after = after
        self._hooks = _hooks_of(engine)
        self._hooks.append(self)

    def remove(self) -> None:
        """May be called again."""
        if self in self._hooks:
            self._hooks.remove(self)


def _hooks_of(engine: Any) -> list[StepHook]:
    """The engine's hooks: those that are in this list when a step begins are called."""
    hooks: list[StepHook] = engine.__dict__.setdefault("_ema_client_hooks", [])
    if hasattr(engine._take_model_step, "_is_hooked"):
        return hooks
    take_step = engine._take_model_step

    def take_hooked_step(*args: Any, **kwargs: Any) -> Any:
        for hook in list(hooks):
            hook._before()
        result = take_step(*args, **kwargs)
        if engine.was_step_applied():
            for hook in list(hooks):
                hook._after()
        return result

    setattr(take_hooked_step, "_is_hooked", True)
    engine._take_model_step = take_hooked_step
    return hooks
