# SPDX-License-Identifier: Apache-2.0
"""Which part of a tensor this rank has in its memory: all of it, a DTensor's local shard, another box, or
a range of its elements."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from ema_client._client.ranges import (
    ParameterBox,
    ParameterPart,
    ParameterRange,
    box_around,
    index_of,
    moved,
)
from ema_client._client.types import Shard
from ema_client._errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Piece:
    """The part of a tensor that this rank holds.

    Attributes:
        shape: of the whole tensor.
        box: the part's position in the tensor, with the tensor's name; of a range of elements, the
            smallest box that contains it.
        local: the part itself; it shares the tensor's memory. A range has one dimension.
        first: of a range, the index of its first element in the row-major order of `within`; None: the
            part is the box.
        within: of a range, the box in which its elements are counted; None: the whole tensor.
    """

    shape: tuple[int, ...]
    box: Shard
    local: Any
    first: int | None = None
    within: Shard | None = None

    @property
    def is_whole(self) -> bool:
        return self.box.extents == self.shape

    @property
    def is_empty(self) -> bool:
        return 0 in self.box.extents

    def cut(self, values: Any) -> Any:
        """The values of `local`, from `values` of the box."""
        if self.first is None:
            return values
        assert self.within is None
        start = self.first - index_of(self.box.offsets, self.shape)
        return values.reshape(-1)[start : start + self.local.numel()]


def object_of(tensor: Any) -> Any:
    """The object that a module or an optimizer has for a tensor of `named_tensors`."""
    return tensor.parameter if isinstance(tensor, ParameterPart) else tensor


def is_part(tensor: object) -> bool:
    """Whether this rank may have only a part of the tensor."""
    return isinstance(tensor, ParameterPart) or is_dtensor(tensor)


def is_dtensor(value: object) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


class Held(NamedTuple):
    """This rank's part of a DTensor, or a box or range. Used in place of a DTensor, because detaching that
    takes 20 us.

    Attributes:
        local: shares the tensor's memory, and keeps it alive.
        offsets: position of its first element in the whole tensor; of a range, one number, and of a range
            of a box also the box's offsets and extents.
    """

    local: Any
    offsets: tuple[int, ...]


class HeldWeights(dict[str, Any]):
    """Results of `BoxCache.held`, or copies, by name. No other code can replace their memory."""


def local_of(tensor: Any) -> Any:
    """This rank's part of a torch tensor: the tensor itself, a DTensor's local tensor, a box or a range.
    Fast, whereas each operation on a DTensor takes 10 us or more. `piece_of` also finds its
    position."""
    if isinstance(tensor, ParameterPart):
        return tensor.local
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def piece_of(name: str, tensor: Any) -> Piece:
    """This rank's part of `tensor`, a torch tensor or a `ParameterPart`, and its position.

    Raises:
        InvalidArgumentError: a DTensor whose values are spread as partial sums.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor, ParameterRange):
        offsets, extents = tensor.box or ((0,) * len(shape), shape)
        box = moved(box_around(name, extents, tensor.first, tensor.count), offsets)
        within = None if tensor.box is None else Shard(name, offsets, extents)
        return Piece(shape, box, tensor.local, tensor.first, within)
    if isinstance(tensor, ParameterBox):
        return Piece(shape, Shard(name, tensor.offsets, tensor.extents), tensor.local)
    if not is_dtensor(tensor):
        return Piece(shape, Shard(name, (0,) * len(shape), shape), tensor)
    local = local_of(tensor).detach()
    if tensor.device_mesh.get_coordinate() is None:  # Other ranks have it.
        return Piece(shape, Shard(name, (0,) * len(shape), (0,) * len(shape)), local)
    try:
        # torch.distributed.checkpoint calls this, too. One piece for each rank.
        (chunk,) = tensor.__create_chunk_list__()
    except (RuntimeError, ValueError) as error:
        raise InvalidArgumentError(
            f'tensor "{name}": no part of its values is on this rank: {error}', reason="BAD_LAYOUT"
        ) from error
    return Piece(shape, Shard(name, tuple(chunk.offsets), tuple(chunk.sizes)), local)


class BoxCache:
    """Caches positions from `piece_of`, which takes 20 us for each tensor: several times what the
    training thread needs to send it."""

    def __init__(self) -> None:
        # Offsets by mesh, placements and shape.
        self._offsets: dict[tuple[Any, Any, Any], tuple[int, ...]] = {}
        # By name: the last mesh, placements, shape and offsets. Comparing them is faster than a
        # lookup above.
        self._last: dict[str, tuple[Any, Any, Any, tuple[int, ...]]] = {}

    def offsets_of(self, name: str, tensor: Any) -> tuple[int, ...]:
        """The offsets of this rank's part of a DTensor. Raises as `piece_of`."""
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
        last = self._last.get(name)
        if last is not None and last[0] is mesh and last[1] is placements and last[2] == shape:
            return last[3]
        spread = mesh, placements, shape
        if spread not in self._offsets:
            self._offsets[spread] = piece_of(name, tensor).box.offsets
        self._last[name] = (*spread, self._offsets[spread])
        return self._offsets[spread]

    def held(self, name: str, tensor: Any) -> Any:
        """A tensor, or `Held`, that keeps the current memory of a torch tensor, even if that gets
        other memory. Raises as `piece_of`."""
        if isinstance(tensor, ParameterRange):
            offsets, extents = tensor.box or ((), ())
            return Held(tensor.local, (tensor.first, *offsets, *extents))
        if isinstance(tensor, ParameterBox):
            return Held(tensor.local, tensor.offsets)
        if is_dtensor(tensor):
            return Held(local_of(tensor).detach(), self.offsets_of(name, tensor))
        return tensor.detach()


def pieces_of(tensors: Mapping[str, Any]) -> dict[str, Piece]:
    """Calls `piece_of` for each tensor, by name."""
    return {name: piece_of(name, tensor) for name, tensor in tensors.items()}


def selected(pieces: Mapping[str, Piece]) -> dict[str, Any]:
    """The local parts of the tensors in the selection of `selection_of`."""
    return {
        name: piece.local for name, piece in pieces.items() if piece.is_whole or not piece.is_empty
    }


def selection_of(pieces: Mapping[str, Piece]) -> tuple[list[str], list[Shard]]:
    """The whole tensors, by name, and the boxes to pull for these pieces; no empty boxes."""
    whole = [name for name, piece in pieces.items() if piece.is_whole]
    return whole, [
        piece.box for piece in pieces.values() if not piece.is_whole and not piece.is_empty
    ]


def writes_of(tensor: Any) -> int:
    """PyTorch's version counter of a torch tensor: the number of writes, except those through `.data` and
    those of a CUDA graph's replay."""
    if isinstance(tensor, ParameterPart):
        return tensor.writes()
    # An operation on a DTensor counts in only one of these two.
    return int(tensor._version + (local_of(tensor)._version if is_dtensor(tensor) else 0))
