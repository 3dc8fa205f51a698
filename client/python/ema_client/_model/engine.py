# SPDX-License-Identifier: Apache-2.0
"""Engines: objects with a call that is a whole step of the training, in place of an optimizer's step().

DeepSpeed: `engine.step()` may only accumulate gradients, and the optimizers inside the engine step copies of
the parameters, which are written and gathered afterwards. `_take_model_step` performs exactly one complete
step. `engine.step()` calls it when a batch is complete; the pipeline engine calls it, too.

Megatron-core: its optimizers are no torch.optim.Optimizer. `step()` steps one of float32 copies, the masters,
and then writes the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ema_client._client.arrays import is_instance


def is_engine(module: object) -> bool:
    """Whether the object is a DeepSpeedEngine."""
    return is_instance(module, "deepspeed.runtime.engine", "DeepSpeedEngine")


def is_megatron_optimizer(optimizer: object) -> bool:
    """Whether the object is an optimizer of Megatron-core."""
    return is_instance(optimizer, "megatron.core.optimizer.optimizer", "MegatronOptimizer")


def is_megatron_wrapper(module: object) -> bool:
    """Whether the object is Megatron-core's DistributedDataParallel or Float16Module."""
    core = "megatron.core"
    is_ddp = is_instance(module, f"{core}.distributed.data_parallel_base", "_BaseDataParallel")
    return is_ddp or is_instance(module, f"{core}.transformer.module", "Float16Module")


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
    name = "step" if is_megatron_optimizer(engine) else "_take_model_step"
    take_step = getattr(engine, name)
    if hasattr(take_step, "_is_hooked"):
        return hooks

    def take_hooked_step(*args: Any, **kwargs: Any) -> Any:
        for hook in list(hooks):
            hook._before()
        result = take_step(*args, **kwargs)
        # Megatron-core returns whether it has stepped, the gradients' norm and their zeros.
        if result[0] if name == "step" else engine.was_step_applied():
            for hook in list(hooks):
                hook._after()
        return result

    setattr(take_hooked_step, "_is_hooked", True)
    setattr(engine, name, take_hooked_step)
    return hooks
