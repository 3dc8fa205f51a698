# SPDX-License-Identifier: Apache-2.0
"""Parameters that are parts of a larger tensor without being DTensors: ranges of its row-major elements, or
boxes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ema_client._client.types import Shard


class FlatMemory:
    """This rank's part of parameters that are flattened and concatenated."""

    def tensor(self) -> Any:
        """Its elements, a torch tensor of one dimension, as the training has them now."""
        raise NotImplementedError

    def writes(self) -> int:
        """Grows with each write that PyTorch counts."""
        return int(self.tensor()._version)


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterPart:
    """Stands for a tensor of which this rank has a part. Has those attributes of a torch.nn.Parameter that
    are read here.

    Attributes:
        parameter: the object that optimizers hold; several parts may have the same.
        shape: of the whole tensor.
    """

    parameter: Any
    shape: tuple[int, ...]

    @property
    def local(self) -> Any:
        """The part itself, as the training has it now."""
        raise NotImplementedError

    def writes(self) -> int:
        """Grows with each write that PyTorch counts."""
        return int(self.parameter._version)

    @property
    def requires_grad(self) -> bool:
        return bool(self.parameter.requires_grad)

    @property
    def dtype(self) -> Any:
        return self.local.dtype

    @property
    def device(self) -> Any:
        return self.local.device

    @property
    def is_meta(self) -> bool:
        return bool(self.local.is_meta)

    def is_floating_point(self) -> bool:
        return bool(self.local.is_floating_point())

    def is_inference(self) -> bool:
        return bool(self.parameter.is_inference())


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterRange(ParameterPart):
    """A range of the row-major elements of a tensor or of a box in it, perhaps an empty one.

    Attributes:
        first: the index of the range's first element.
        memory: has the range, `count` elements from `start` on.
        box: the offsets and extents of the box in which the elements are counted; None: the whole tensor.
    """

    first: int
    memory: FlatMemory
    start: int
    count: int
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @property
    def local(self) -> Any:
        return self.memory.tensor()[self.start : self.start + self.count]

    def writes(self) -> int:
        return super().writes() + self.memory.writes()


@dataclasses.dataclass(frozen=True, eq=False)
class ParameterBox(ParameterPart):
    """A box of a tensor, which is a parameter or a view of it.

    Attributes:
        offsets: of the box in the tensor.
        extents, strides, start: of the view; `start` counts from the parameter's first element.
    """

    offsets: tuple[int, ...]
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    start: int

    @property
    def local(self) -> Any:
        return self.view_of(self.parameter.detach())

    def view_of(self, values: Any) -> Any:
        """The box's part of `values`, a torch tensor that is like the parameter."""
        return values.as_strided(self.extents, self.strides, values.storage_offset() + self.start)


# By the id of the module that has the parameter, and its name there.
Ranges = Mapping[int, Mapping[str, ParameterRange]]


def index_of(offsets: Sequence[int], shape: Sequence[int]) -> int:
    """The row-major index of an element of a tensor."""
    index = 0
    for offset, extent in zip(offsets, shape):
        index = index * extent + offset
    return index


def moved(shard: Shard, offsets: Sequence[int]) -> Shard:
    """A shard of a box at these offsets, as a shard of the tensor."""
    moved_offsets = tuple(a + b for a, b in zip(shard.offsets, offsets))
    return Shard(shard.name, moved_offsets, shard.extents)


def is_row_major(shape: Sequence[int], strides: Sequence[int]) -> bool:
    expected = (math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return all(n <= 1 or a == b for n, a, b in zip(shape, strides, expected)) or 0 in shape


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
