# SPDX-License-Identifier: Apache-2.0
"""Other libraries' averages beside ours: what test_libraries.py, test_composer.py and test_venv_libraries.py share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
# A training time, by unit.
Time = Mapping[str, float]

# Of each comparison.
UPDATES = 300


class Net(torch.nn.Module):
    """A small model with float and integer buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(7, 13)
        self.norm = torch.nn.BatchNorm1d(13)
        self.scale = torch.nn.Parameter(torch.ones(()))


def randomize(model: torch.nn.Module, generator: torch.Generator) -> None:
    """New weights, as a training that jumps: of many sizes, a few the same as before."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                values = torch.randn(tensor.shape, generator=generator)
                exponents = torch.randint(-6, 7, tensor.shape, generator=generator)
                stays = torch.rand(tensor.shape, generator=generator) < 0.1
                tensor.copy_(torch.where(stays, tensor, torch.ldexp(values, exponents)))
            else:
                tensor += 1


def values_of(model: torch.nn.Module) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


class Ours(Protocol):
    """Our average of a model, as LocalEMA or a server keeps it."""

    def push(self, n: int) -> float | None:
        """Takes the model's weights at batch n; gives the weight applied. None: not due."""

    def pull(self) -> Tensors: ...


@dataclasses.dataclass(frozen=True)
class Step:
    """One update of ours."""

    n: int
    params: Tensors
    before: Tensors | None
    after: Tensors
    weight: float | None


def run_ours(
    ours: Ours, model: torch.nn.Module, *, updates: int, seed: int = 20240607
) -> list[Step]:
    generator = torch.Generator().manual_seed(seed)
    steps = []
    before = None
    for n in range(1, updates + 1):
        randomize(model, generator)
        weight = ours.push(n)
        after = ours.pull()
        steps.append(Step(n, values_of(model), before, after, weight))
        before = after
    return steps


class Library(Protocol):
    """A library's average of a model."""

    def tensors(self) -> Tensors:
        """Its averages, to be written to."""

    def update(self, n: int) -> float | None:
        """Its call n for the model's weights; gives the weight that it applied. None: none."""


@dataclasses.dataclass(frozen=True)
class Theirs:
    """One update of a library, from the same average as ours."""

    after: Tensors
    weight: float | None


def run_theirs(library: Library, model: torch.nn.Module, steps: list[Step]) -> Iterator[Theirs]:
    """The same updates by the library, each from the average that ours began with."""
    for step in steps:
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(step.params[name])
            for name, tensor in library.tensors().items():
                if step.before is not None and name in step.before and tensor.is_floating_point():
                    tensor.copy_(step.before[name])
        weight = library.update(step.n)
        yield Theirs({name: t.detach().clone() for name, t in library.tensors().items()}, weight)


@dataclasses.dataclass
class Agreement:
    """How far ours and theirs are apart: in ulp of the larger operand, over all updates."""

    apart: float = 0.0
    ours_from_exact: float = 0.0
    theirs_from_exact: float = 0.0

    def add(self, step: Step, theirs: Mapping[str, Any], exact_weight: float) -> None:
        assert step.before is not None
        for name, their in theirs.items():
            ema = step.before[name].double().numpy()
            param = step.params[name].double().numpy()
            ours = step.after[name].double().numpy()
            other = torch.as_tensor(their).double().numpy()
            exact = ema + exact_weight * (param - ema)
            larger = np.maximum(np.abs(ema), np.abs(param)).astype(np.float32)
            ulp = np.spacing(larger).astype(np.float64)
            ours_error = np.abs(ours - exact) / ulp
            theirs_error = np.abs(other - exact) / ulp
            self.apart = max(self.apart, float((np.abs(ours - other) / ulp).max()))
            self.ours_from_exact = max(self.ours_from_exact, float(ours_error.max()))
            self.theirs_from_exact = max(self.theirs_from_exact, float(theirs_error.max()))

    def check(self, *, most_apart: float = 2.0, most_worse: float = 1.0) -> None:
        assert self.apart <= most_apart, self
        assert self.ours_from_exact <= self.theirs_from_exact + most_worse, self


def float_names(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.is_floating_point()]


def floats(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
