# SPDX-License-Identifier: Apache-2.0
"""Parameters of which this rank has a range of the row-major elements, in place of a box."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ema_client._client.types import Shard


class FlatMemory(Protocol):
    """This rank's part of parameters that are flattened and concatenated."""

    def tensor(self) -> Any:
        """Its elements, a torch tensor of one dimension, as the training has them now."""

    def writes(self) -> int:
        """Grows with each write that PyTorch counts."""


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterRange:
    """Stands for a parameter of which this rank has a range of its row-major elements, perhaps an empty
    one. Has those attributes of a torch.nn.Parameter that are read here.

    Attributes:
        parameter: the object that optimizers hold; several ranges may have the same.
        shape: of the whole parameter.
        first: the index of the range's first element in the parameter.
        memory: has the range, `count` elements from `start` on.
    """

    parameter: Any
    shape: tuple[int, ...]
    first: int
    memory: FlatMemory
    start: int
    count: int

    @property
    def local(self) -> Any:
        return self.memory.tensor()[self.start : self.start + self.count]

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    @property
    def dtype(self) -> Any:
        return self.memory.tensor().dtype

    @property
    def device(self) -> Any:
        return self.memory.tensor().device

    @property
    def is_meta(self) -> bool:
        return bool(self.memory.tensor().is_meta)

    def is_floating_point(self) -> bool:
        return bool(self.memory.tensor().is_floating_point())

    def is_inference(self) -> bool:
        return bool(self.parameter.is_inference())

    def writes(self) -> int:
        """Grows with each write that PyTorch counts."""
        return int(self.parameter._version) + self.memory.writes()


# By the id of the module that has the parameter, and its name there.
Ranges = Mapping[int, Mapping[str, ParameterRange]]


def index_of(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major index of an element of a tensor."""
    index = 0
    for offset, extent in zip(offsets, shape):
        index = index * extent + offset
    return index


def boxes_of_range(name: str, shape: Sequence[int], first: int, count: int) -> list[Shard]:
    """The boxes that a range of a tensor's row-major elements consists of, in their order: at most
    2 x dimensions - 1, each as large as it can be, and contiguous in the tensor."""
    boxes: list[Shard] = []
    end = first + count
    while first < end:
        # Its slabs along `dim` have `size` elements each.
        dim, size = 0, math.prod(shape[1:])
        while first % size != 0 or end - first < size:
            dim += 1
            size //= shape[dim]
        offsets = _position(first, shape[: dim + 1], size)
        extent = min(shape[dim] - offsets[-1], (end - first) // size) if shape else 1
        rest = len(shape) - dim - 1
        boxes.append(
            Shard(
                name,
                (*offsets, *(0,) * rest),
                (*(1,) * dim, extent, *shape[dim + 1 :]) if shape else (),
            )
        )
        first += extent * size
    return boxes


def _position(index: int, shape: Sequence[int], size: int = 1) -> tuple[int, ...]:
    """The offsets of the row-major element `index`, if an element of `shape` is `size` of them."""
    offsets: list[int] = []
    index //= size
    for extent in reversed(shape):
        offsets.append(index % extent)
        index //= extent
    return tuple(reversed(offsets))


def box_around(name: str, shape: tuple[int, ...], first: int, count: int) -> Shard:
    """The smallest box that contains a range of a tensor's row-major elements."""
    if count == 0:
        return Shard(name, (0,) * len(shape), (0,) * len(shape))
    begin, last = _position(first, shape), _position(first + count - 1, shape)
    # Before `dim`, both have the same offsets; after it, the range has all.
    dim = next((i for i in range(len(shape)) if begin[i] != last[i]), len(shape) - 1)
    rest = shape[dim + 1 :]
    return Shard(
        name,
        (*begin[: dim + 1], *(0,) * len(rest)),
        (*(b - a + 1 for a, b in zip(begin[: dim + 1], last)), *rest),
    )
