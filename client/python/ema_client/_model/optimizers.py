# SPDX-License-Identifier: Apache-2.0
"""Optimizers in wrappers, and which calls of step() are steps of the training."""

from __future__ import annotations

import collections
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# Wrappers that change no weights themselves, and may leave a step out: by module and class.
_WRAPPERS = {
    ("accelerate.optimizer", "AcceleratedOptimizer"),
    ("lightning.pytorch.core.optimizer", "LightningOptimizer"),
    ("pytorch_lightning.core.optimizer", "LightningOptimizer"),
    ("lightning.fabric.wrappers", "_FabricOptimizer"),
    ("lightning_fabric.wrappers", "_FabricOptimizer"),
}


def unwrap_optimizers(optimizers: object) -> list[torch.optim.Optimizer]:
    """One optimizer, or several, without wrappers, each once.

    Raises:
        InvalidArgumentError: there is none, or one that is none of PyTorch's, or takes no hooks.
    """
    given = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
    if not given:
        raise InvalidArgumentError("optimizer: none given")
    return list({id(one): one for one in map(_unwrap, given)}.values())


def _unwrap(optimizer: object) -> torch.optim.Optimizer:
    """The optimizer inside accelerate's and Lightning's wrappers, whose step() may do nothing."""
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
        # PyTorch's mark of a step() that calls hooks: some (timm's Lookahead) take them and do not.
        calls_hooks = getattr(type(inner).step, "hooked", False)
    except AttributeError:  # Its __init__ has not called Optimizer's.
        calls_hooks = False
    if not calls_hooks:
        raise InvalidArgumentError(
            f"optimizer of type {type(inner).__module__}.{type(inner).__qualname__}: takes no hooks "
            "around its steps: attach(model, None, url), and call after_step() after each step"
        )
    return inner


def parameter_ids(optimizers: Sequence[torch.optim.Optimizer]) -> set[int]:
    """Of the parameters that they change."""
    return {
        id(parameter)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def hold_none_of(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[torch.nn.Parameter]
) -> bool:
    """Whether some of these are trained, but none by these optimizers."""
    trained = {id(parameter) for parameter in parameters if parameter.requires_grad}
    return bool(trained) and trained.isdisjoint(parameter_ids(optimizers))


class OutOfTurn:
    """Notices optimizers that step inside backward, of one parameter each, and not all each time, as where
    an expert is not used: no one of them tells how many steps there were.

    Others, such as a GAN's, may well step more often than the one that ends a step.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Two may well take turns of their own.
        self._watches = len(optimizers) > 2 and all(
            sum(len(group["params"]) for group in optimizer.param_groups) == 1
            for optimizer in optimizers
        )
        self._counts: collections.Counter[int | None] = collections.Counter()

    def count(self, optimizer: int, closing: int | None) -> bool:
        """Whether this one is ahead of that which ends steps, or of some that have not stepped at all;
        said once."""
        if not self._watches:
            return False
        self._counts[optimizer] += 1
        # By two: within a step the order may vary.
        is_ahead = self._counts[optimizer] > self._counts[closing] + 1
        self._watches = not is_ahead
        return is_ahead


@functools.cache
def _hooked_step() -> CodeType | None:
    """What PyTorch puts around the step() of a class, and calls hooks in."""
    import torch

    wrap: Callable[..., Any] | None = getattr(torch.optim.Optimizer, "profile_hook_step", None)
    return None if wrap is None else getattr(wrap(lambda: None), "__code__", None)


class StepKind(enum.Enum):
    """Why an optimizer's step() was called."""

    # It is a step of the training.
    TRAINING = enum.auto()
    # It is a part of another step() of the same optimizer. PyTorch calls hooks around the step() of each
    # class: also around that of a base class which super().step() has called, if any optimizer of the base
    # class itself was ever made.
    NESTED = enum.auto()
    # torch.distributed.checkpoint.state_dict lets an optimizer that has no state create it, by a step with
    # gradients and learning rates of 0 (pytorch#164929). SGD without momentum never has a state, so this may
    # happen at each checkpoint.
    STATE_INITIALIZATION = enum.auto()


def step_kind(optimizer: torch.optim.Optimizer) -> StepKind:
    """Why the step() was called that runs the current hook.

    Decides by the functions on the call stack. Learning rates are also 0 in the first step of a warm-up,
    and gradients may be 0 on some ranks only, which would then count other steps than the rest.
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

    Of most optimizers a torch.amp.GradScaler does not call step() then. Fused ones find it out in
    their kernel, from `found_inf`, which the scaler lends them for the time of the step; of these, a
    step on a GPU is waited for here.
    """
    found = getattr(optimizer, "found_inf", None)
    return found is not None and bool(found.item())


def after_closure(
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wait: Callable[[], None],
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a step() that runs forward and backward itself, with `wait` called after these.

    None: there is no closure, or it is not known that the weights do not change before it has run:
    PyTorch's optimizers begin with it, others (SAM) may not.
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
