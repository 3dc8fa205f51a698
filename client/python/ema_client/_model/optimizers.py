# SPDX-License-Identifier: Apache-2.0
"""Optimizers: inside their wrappers, and which calls of step() are steps of the training."""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# Wrappers, by module and class. They change no weights themselves, and may omit a step.
_WRAPPERS = {
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"),
}


def unwrap_optimizers(optimizers: object) -> list[torch.optim.Optimizer]:
    """The optimizers inside their wrappers, each once.

    Raises:
        InvalidArgumentError: no optimizer is given, or an object that is not a torch.optim.Optimizer, or
            one that calls no hooks.
    """
    given = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    if not given:
        raise InvalidArgumentError("optimizer: none given")
    return list({id(one): one for one in map(_unwrap, given)}.values())


def _unwrap(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of accelerate and Lightning, whose step() may do nothing."""
    import torch

    inner = optimizer
    while any((cls.__module__, cls.__name__) in _WRAPPERS for cls in type(inner).__mro__):
        inner = getattr(inner, "optimizer")
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer of type {type(inner).__module__}.{type(inner).__qualname__}: must be a "
            "torch.optim.Optimizer, or accelerate's or Lightning's wrapper of one"
        )
    try:
        inner.register_step_pre_hook(lambda *_: None).remove()
        # PyTorch marks a step() that calls hooks. timm's Lookahead accepts hooks, and does not call them.
        calls_hooks = getattr(type(inner).step, "hooked", False)
    except AttributeError:  # Its __init__ did not call Optimizer's.
        calls_hooks = False
    if not calls_hooks:
        raise InvalidArgumentError(
            f"optimizer of type {type(inner).__module__}.{type(inner).__qualname__}: calls no hooks "
            "around its steps: use attach(model, None, url), and call after_step() after each step"
        )
    return inner


def parameter_ids(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """The ids of the parameters that the optimizers change."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def hold_none_of(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[torch.nn.Parameter]
) -> bool:
    """Whether some of the parameters are trained, but none by these optimizers."""
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return bool(trained) and trained.isdisjoint(parameter_ids(optimizers))


@functools.cache
def _hooked_step() -> CodeType | None:
    """The code of the function that PyTorch wraps around the step() of a class, and that calls the hooks."""
    import torch

    wrap: Callable[..., Any] | None = getattr(torch.optim.Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda: None), "__code__", None)


class StepKind(enum.Enum):
    """Why an optimizer's step() was called."""

    # A step of the training.
    TRAINING = enum.auto()
    # A call inside another step() of the same optimizer. PyTorch calls the hooks around the step() of each
    # class, and so around super().step(), if an optimizer of the base class was ever created.
    NESTED = enum.auto()
    # torch.distributed.checkpoint.state_dict makes an optimizer without state create it, by a step with
    # gradients and learning rates of 0 (pytorch#164929). SGD without momentum never has a state, so this
    # may happen at each checkpoint.
    STATE_INITIALIZATION = enum.auto()


def step_kind(optimizer: torch.optim.Optimizer) -> StepKind:
    """Why the step() that runs the current hook was called.

    Decides by the functions on the call stack. Learning rates and gradients would not tell: a learning rate
    is also 0 in the first step of a warm-up, and gradients may be 0 on some ranks only.
    """
    hooked = _hooked_step()
    steps = 0
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is hooked:
            steps += frame.f_locals.get("self") is optimizer
            if steps == 2:
                return StepKind.NESTED
        elif (
            code.co_name == "_init_optim_state"
            and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict"
        ):
            return StepKind.STATE_INITIALIZATION
        frame = frame.f_back
    return StepKind.TRAINING


def was_skipped(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that has just ended changed nothing, because gradients were not finite.

    A torch.amp.GradScaler does not call step() of most optimizers then. A fused optimizer decides in its
    kernel, by `found_inf`, an attribute that the scaler sets for the time of the step. On a GPU, reading it
    waits for the step.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def after_closure(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of step(), with a closure that runs forward and backward, and then calls `wait`.

    None: there is no closure, or the optimizer may change weights before it calls the closure. PyTorch's
    optimizers call it first; others (SAM) may not.
    """
    if not f"{type(optimizer).__module__}.".startswith("torch.optim."):
        return None
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        return None

    def closure_then_wait() -> Any:
        result = closure()
        wait()
        return result

    if len(args) > 1:
        return (args[0], closure_then_wait, *args[2:]), kwargs
    return args, {**kwargs, "closure": closure_then_wait}
