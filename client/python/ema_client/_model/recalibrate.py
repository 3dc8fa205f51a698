# SPDX-License-Identifier: Apache-2.0
"""Recomputes BatchNorm's statistics for other weights, for a `with` block."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Union

from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import unwrap, write

if TYPE_CHECKING:
    import torch

#: A loader of input tensors, or of tuples that begin with one; or a function that computes the
#: statistics.
Recalibration = Union[Iterable[Any], Callable[["torch.nn.Module"], object]]


@contextlib.contextmanager
def recalibrated(model: torch.nn.Module, how: Recalibration) -> Iterator[None]:
    """Computes the statistics, and restores all buffers afterwards, bit for bit.

    Raises:
        InvalidArgumentError: the loader is empty. The buffers are unchanged.
    """
    from torch.optim import swa_utils

    own = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    try:
        with _modes_kept(model):
            if callable(how):
                how(model)
            else:
                # Without DDP's wrapper, so that a rank can do it alone.
                swa_utils.update_bn(_at_least_one(how), unwrap(model), _device_of(model))
        yield
    finally:
        write(own)


@contextlib.contextmanager
def _modes_kept(model: torch.nn.Module) -> Iterator[None]:
    """Restores the training modes and momenta, which update_bn does not do after an exception."""
    from torch.nn.modules.batchnorm import _BatchNorm

    modes = [(module, module.training) for module in model.modules()]
    momenta = [
        (module, module.momentum) for module in model.modules() if isinstance(module, _BatchNorm)
    ]
    try:
        yield
    finally:
        for module, is_training in modes:
            module.training = is_training
        for module, momentum in momenta:
            module.momentum = momentum


def _at_least_one(loader: Iterable[Any]) -> Iterator[Any]:
    count = 0
    for batch in loader:
        count += 1
        yield batch
    if count == 0:
        # update_bn has reset the statistics already.
        raise InvalidArgumentError(
            "recalibrate: the loader has no batch; an iterator can be gone through once only"
        )


def _device_of(model: torch.nn.Module) -> torch.device | None:
    """The device that inputs must be moved to; None: they need not be moved."""
    for parameter in model.parameters():
        return None if parameter.device.type == "cpu" else parameter.device
    return None
