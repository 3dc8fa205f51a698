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

# Wrappers that change no weights themselves, and may omit a step: module, class, and the attribute that
# has the optimizer.
_WRAPPERS = {
    ("accelerate.optimizer", "AcceleratedOptimizer"): "optimizer",
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"): "optimizer",
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"): "optimizer",
    ("lightning.fabric.wrappers", "_FabricOptimizer"): "optimizer",
    ("lightning_fabric.wrappers", "_FabricOptimizer"): "optimizer",
    ("torch.distributed.optim.named_optimizer", "_NamedOptimizer"): "_optimizer",
    ("torchft.optim", "OptimizerWrapper"): "optim",
}

# Functions that make an optimizer without state create it, by a step that trains nothing: module and
# function. torch.distributed.checkpoint and torchtitan set gradients and learning rates to 0 (pytorch#164929).
# SGD without momentum never has a state, so this may happen at each checkpoint.
_STATE_INITIALIZERS = {
    ("torch.distributed.checkpoint.state_dict", "_init_optim_state"),
    ("torch.distributed.optim.named_optimizer", "init_state"),
    ("torchtitan.components.optimizer.utils", "init_optim_state"),
}

# What to do about an optimizer whose steps cannot be counted.
_COUNT_BY_HAND = "use attach(model, None, url), and call after_step() after each step"


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
    """The optimizer inside its wrappers, whose step() may do nothing."""
    import torch

    inner = optimizer
    while (attribute := _inner_attribute(inner)) is not None:
        inner = getattr(inner, attribute)
    if not isinstance(inner, torch.optim.Optimizer):
        raise InvalidArgumentError(
            f"optimizer of type {_type_name(inner)}: must be a torch.optim.Optimizer, or accelerate's or "
            "Lightning's wrapper of one; with DeepSpeed, give its engine as the model; for others, "
            f"{_COUNT_BY_HAND}"
        )
    if not calls_hooks(inner):
        raise InvalidArgumentError(
            f"optimizer of type {_type_name(inner)}: calls no hooks around its steps: {_COUNT_BY_HAND}"
        )
    return inner


def _inner_attribute(optimizer: object) -> str | None:
    """The name of a wrapper's attribute that has the optimizer; None: not a wrapper."""
    for cls in type(optimizer).__mro__:
        if (cls.__module__, cls.__name__) in _WRAPPERS:
            return _WRAPPERS[cls.__module__, cls.__name__]
    return None


def _type_name(optimizer: object) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def calls_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks can be registered on the optimizer, and its step() calls them."""
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError:  # Its __init__ did not call Optimizer's.
        return False
    # PyTorch marks a step() that calls hooks. timm's Lookahead accepts hooks, and does not call them.
    return bool(getattr(type(optimizer).step, "hooked", False))


def with_contained(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """The optimizers, and those in their attributes, which torchtitan's container and PyTorch's
    ZeroRedundancyOptimizer step."""
    import torch

    found: dict[int, torch.optim.Optimizer] = {}
    waiting: list[object] = list(optimizers)
    while waiting:
        value = waiting.pop(0)
        if isinstance(value, torch.optim.Optimizer):
            if id(value) not in found:
                found[id(value)] = value
                waiting.extend(vars(value).values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(one for one in value if isinstance(one, torch.optim.Optimizer))
        elif type(value) is dict:
            waiting.extend(one for one in value.values() if isinstance(one, torch.optim.Optimizer))
    return list(found.values())


def parameter_ids(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The ids of the parameters that the optimizers change."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def check_held(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Iterable[torch.nn.Parameter]
) -> None:
    """InvalidArgumentError: some of the parameters are trained, but none is held by these optimizers, so
    their values may change after the optimizers' steps."""
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if trained and trained.isdisjoint(parameter_ids(optimizers)):
        raise InvalidArgumentError(
            "optimizer: holds no parameter of the model. Either it was created for another model, or before "
            "the model was sharded: give the optimizer that holds the model's parameters. Or it trains "
            "copies, which are written to the model after its step: with DeepSpeed, give its engine as the "
            f"model; with other mixed precision, {_COUNT_BY_HAND}, when the model's parameters have their new "
            "values"
        )


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
    # A part of another step(): of an optimizer that contains this one, or of the same. PyTorch calls the
    # hooks around the step() of each class, and so around super().step(), if an optimizer of the base class
    # was ever created.
    NESTED = enum.auto()
    # See _STATE_INITIALIZERS.
    STATE_INITIALIZATION = enum.auto()


def current_step(
    optimizer: torch.optim.Optimizer,
) -> tuple[StepKind, torch.optim.Optimizer]:
    """Why the step() that runs the current hook was called, and the optimizer of the outermost step().

    Decides by the functions on the call stack. Learning rates and gradients do not show it: a learning
    rate is also 0 in the first step of a warm-up, and gradients may be 0 on some ranks only.
    """
    import torch

    hooked = _hooked_step()
    calls = 0
    outermost = optimizer
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code is hooked or code.co_name == "step":
            owner = frame.f_locals.get("self")
            if isinstance(owner, torch.optim.Optimizer) and _inner_attribute(owner) is None:
                # Between two calls of the hooks, the stack also has the step() that they are around.
                calls += code is hooked or owner is not outermost
                outermost = owner
        elif (frame.f_globals.get("__name__"), code.co_name) in _STATE_INITIALIZERS:
            return StepKind.STATE_INITIALIZATION, outermost
        frame = frame.f_back
    return (StepKind.NESTED if calls > 1 else StepKind.TRAINING), outermost


def check_counted(optimizer: torch.optim.Optimizer, outermost: torch.optim.Optimizer) -> None:
    """InvalidArgumentError: the outermost optimizer's step(), which calls that of `optimizer`, calls no hooks,
    so its end cannot be seen."""
    if not calls_hooks(outermost):
        raise InvalidArgumentError(
            f"optimizer of type {_type_name(optimizer)}: its step() is called by that of "
            f"{_type_name(outermost)}, which may change the weights after it and calls no hooks: "
            f"{_COUNT_BY_HAND}"
        )


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
