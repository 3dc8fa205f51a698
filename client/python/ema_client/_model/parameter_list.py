# SPDX-License-Identifier: Apache-2.0
"""Parameters that come as a list, as diffusers passes them: their names, and a module that holds them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import named_tensors, unwrap

if TYPE_CHECKING:
    import torch


def names_of(parameters: Sequence[torch.Tensor], model: torch.nn.Module | None) -> list[str]:
    """The parameters' names in `model`: theirs if it has them, else those of its own in the same order.

    Without a model their places: "0", "1", and so on.

    Raises:
        InvalidArgumentError: the model has neither these parameters nor as many of the same shapes.
    """
    if model is None:
        return [str(place) for place in range(len(parameters))]
    named = named_tensors(unwrap(model)).parameters
    names = {id(parameter): name for name, parameter in named.items()}
    if all(id(parameter) in names for parameter in parameters):
        return [names[id(parameter)] for parameter in parameters]
    check_shapes_by_place("model's parameters", shapes_of(named.values()), parameters)
    return list(named)


def shapes_of(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in parameters]


def check_shapes_by_place(
    whose: str, expected: Sequence[tuple[int, ...]], given: Sequence[torch.Tensor]
) -> None:
    """Raises InvalidArgumentError if the given ones differ in number or shapes from the expected."""
    if len(expected) != len(given):
        raise InvalidArgumentError(
            f"{len(given)} parameters are given, the {whose} are {len(expected)}",
            reason="BAD_LAYOUT",
        )
    for place, (shape, other) in enumerate(zip(expected, shapes_of(given))):
        if shape != other:
            raise InvalidArgumentError(
                f"parameter {place} of {len(given)} is {other}, of the {whose} {shape}",
                reason="BAD_LAYOUT",
            )


def hold(root: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Puts the parameters into an empty module, or in place of those that it holds, by name."""
    import torch

    for name, parameter in parameters.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        # Also of tensors that are no torch.nn.Parameter.
        owner._parameters[leaf] = parameter  # type: ignore[assignment]
