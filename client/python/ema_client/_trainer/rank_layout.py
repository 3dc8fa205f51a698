# SPDX-License-Identifier: Apache-2.0
"""Which rank holds which part of a model, and what each rank pushes.

Ranks need not hold the same tensors: with FSDP2 and tensor parallelism each holds a box of each
tensor, with FSDP1 and ZeRO-3 a range of its row-major elements, with pipeline and expert parallelism different
tensors. Ranks that hold the same box or range push even shares of it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence

from ema_client import _ema
from ema_client._client.pieces import Piece, piece_of
from ema_client._client.ranges import boxes_of_range, moved
from ema_client._client.types import Shard
from ema_client._errors import InvalidArgumentError
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import NamedTensors, checksums, specs_of
from ema_client._trainer.buffers import DefaultAction


@dataclasses.dataclass(frozen=True)
class TensorProperties:
    """The properties of a tensor that do not depend on a rank's box.

    Attributes:
        spec: of the whole tensor.
        is_frozen: it is not trained.
        default_action: may differ between ranks.
        is_range: ranks hold ranges of its row-major elements, which are boxes of one dimension here.
        is_in_box: these ranges are of boxes: further dimensions say where such a box is.
    """

    spec: _ema.Spec
    is_frozen: bool
    default_action: DefaultAction = ""
    is_range: bool = False
    is_in_box: bool = False

    @property
    def dims(self) -> int:
        """Dimensions of the boxes."""
        dims = len(self.spec[2])
        if not self.is_range:
            return dims
        return 1 + dims if self.is_in_box else 1

    def shards_of(self, box: Sequence[int]) -> list[Shard]:
        """The shards that offsets and extents of a box stand for."""
        name, _, shape, *_ = self.spec
        offsets, extents = tuple(box[: self.dims]), tuple(box[self.dims :])
        if not self.is_range:
            return [Shard(name, offsets, extents)]
        if not self.is_in_box:
            return boxes_of_range(name, shape, *box)
        boxes = boxes_of_range(name, extents[1:], offsets[0], extents[0])
        return [moved(one, offsets[1:]) for one in boxes]

    def __str__(self) -> str:
        """The properties that must be equal on all ranks."""
        _, dtype, shape, is_buffer, _ = self.spec
        kind = f"{dtype}{list(shape)}"
        if is_buffer:
            kind += ", a buffer"
        if self.is_range:
            kind += ", in ranges of boxes" if self.is_in_box else ", in ranges of elements"
        return f"{kind}, frozen" if self.is_frozen else kind


@dataclasses.dataclass(frozen=True)
class HeldBox:
    """A box or range of a tensor that a rank holds.

    Attributes:
        box: may be empty.
        checksum: of a parameter's values in the box; 0 of buffers, which may differ by rank.
    """

    kind: TensorProperties
    box: Shard
    checksum: int

    @property
    def name(self) -> str:
        return self.box.name


@dataclasses.dataclass(frozen=True)
class RankBoxes:
    """The boxes of one or several ranks that hold the same ones.

    Attributes:
        ranks: ascending.
        kinds: a digest of the kinds of their tensors.
        numbers: for each of these tensors the box's offsets, its extents and the checksum. Flat,
            because each rank gets those of all ranks.
    """

    ranks: tuple[int, ...]
    kinds: str
    numbers: array[int]

    @classmethod
    def of(cls, ranks: tuple[int, ...], kinds: str, held: Iterable[HeldBox]) -> RankBoxes:
        numbers = array("q")
        for own in held:
            numbers.extend((*own.box.offsets, *own.box.extents, own.checksum))
        return cls(ranks, kinds, numbers)


def held_boxes_of(
    tensors: NamedTensors, default_actions: Mapping[str, DefaultAction]
) -> list[HeldBox]:
    """The boxes that this rank holds, in the model's order."""
    pieces = {name: piece_of(name, tensor) for name, tensor in tensors.all().items()}
    parameters = [pieces[name].local for name in tensors.parameters]
    sums = dict(zip(tensors.parameters, checksums(parameters)))
    frozen = set(tensors.frozen())

    def holding(spec: _ema.Spec, piece: Piece) -> HeldBox:
        name, box = spec[0], piece.box
        if piece.first is not None:
            within = piece.within or Shard(name, (), ())
            count = piece.local.numel()
            box = Shard(name, (piece.first, *within.offsets), (count, *within.extents))
        kind = TensorProperties(
            spec,
            name in frozen,
            default_actions.get(name, ""),
            is_range=piece.first is not None,
            is_in_box=piece.within is not None,
        )
        return HeldBox(kind, box, sums.get(name, 0))

    return [holding(spec, pieces[spec[0]]) for spec in specs_of(tensors)]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The whole model, and this rank's part of the work.

    Attributes:
        specs: of all ranks' tensors, rank 0's first.
        frozen: names of those that are not trained.
        groups: for each set of ranks that hold the same boxes and include this rank: these boxes.
            Each box is in one group.
        default_actions: of the tensors that have one on any rank.
    """

    specs: list[_ema.Spec]
    frozen: list[str]
    groups: dict[tuple[int, ...], list[Shard]]
    default_actions: dict[str, DefaultAction]

    @classmethod
    def exchange(cls, ranks: Ranks, own: Sequence[HeldBox]) -> Layout:
        """Exchanges the holdings of all ranks. Collective; raises on all of them if they do not fit
        together.

        Raises:
            InvalidArgumentError: BAD_LAYOUT: a tensor differs between ranks in dtype, shape or
                whether it is trained; or ranks hold the same box with different values.
        """
        kinds = [held.kind for held in own]
        digest = _digest(kinds)
        boxes = RankBoxes.of((ranks.rank,), digest, own)
        digests = ranks.gather((digest, _digest([*boxes.numbers])))
        if len(set(digests)) == 1:
            # Replicas (data parallel): nothing else needs to be sent.
            replicas = dataclasses.replace(boxes, ranks=tuple(range(ranks.world_size)))
            return cls.of({digest: kinds}, [replicas], ranks.rank)
        of_kinds = [of_rank for of_rank, _ in digests]
        # In a large job most ranks hold the same tensors: only the first such rank sends the list.
        is_first = of_kinds.index(digest) == ranks.rank
        told: list[list[TensorProperties] | None] = ranks.gather(kinds if is_first else None)
        tables = {
            of_kinds[rank]: of_rank for rank, of_rank in enumerate(told) if of_rank is not None
        }
        return cls.of(tables, ranks.gather(boxes), ranks.rank)

    @classmethod
    def of(
        cls, tables: Mapping[str, Sequence[TensorProperties]], held: Sequence[RankBoxes], rank: int
    ) -> Layout:
        """`tables`: tensors, by digest. `held`: the boxes of all ranks, by ascending ranks."""
        sharing: dict[str, list[int]] = {}  # Indices into `held`, by the digest of their table.
        for index, boxes in enumerate(held):
            sharing.setdefault(boxes.kinds, []).append(index)
        first: dict[str, tuple[int, TensorProperties]] = {}
        actions: dict[str, DefaultAction] = {}
        places: dict[str, list[tuple[str, int]]] = {}  # Each tensor's place in `numbers`, by table.
        for digest, indexes in sharing.items():
            at = 0
            for kind in tables[digest]:
                name = kind.spec[0]
                of_first, other = first.setdefault(name, (held[indexes[0]].ranks[0], kind))
                if str(kind) != str(other):
                    raise InvalidArgumentError(
                        f'tensor "{name}": {kind} on rank {held[indexes[0]].ranks[0]}, {other} on rank '
                        f"{of_first}",
                        reason="BAD_LAYOUT",
                    )
                if kind.default_action and actions.get(name) != "ignore":
                    actions[name] = kind.default_action
                places.setdefault(name, []).append((digest, at))
                at += 2 * kind.dims + 1
        groups: dict[tuple[int, ...], list[Shard]] = {}
        for name, (_, kind) in first.items():
            holders = [
                (held[index].ranks, held[index].numbers[at : at + 2 * kind.dims + 1])
                for index, at in sorted(
                    (index, at) for digest, at in places[name] for index in sharing[digest]
                )
            ]
            for box, ranks in _by_box(kind, holders).items():
                if rank in ranks:
                    groups.setdefault(tuple(ranks), []).extend(kind.shards_of(box))
        return cls(
            specs=[kind.spec for _, kind in first.values()],
            frozen=[name for name, (_, kind) in first.items() if kind.is_frozen],
            groups=groups,
            default_actions=actions,
        )

    def without(self, names: set[str]) -> Layout:
        """A copy without these tensors."""
        return Layout(
            [spec for spec in self.specs if spec[0] not in names],
            [name for name in self.frozen if name not in names],
            {
                ranks: [box for box in boxes if box.name not in names]
                for ranks, boxes in self.groups.items()
            },
            self.default_actions,
        )

    def shards(self, rank: int) -> list[Shard]:
        """The shards that `rank` pushes: an even share of each of its groups. Buffers may differ
        between ranks: a group's first rank pushes them."""
        index = {spec[0]: i for i, spec in enumerate(self.specs)}
        buffers = [spec[0] for spec in self.specs if spec[3]]
        shards: list[Shard] = []
        for ranks, boxes in self.groups.items():
            if rank not in ranks:
                continue
            share, _ = _ema.even_share(
                self.specs,
                buffers,
                self.frozen,
                ranks.index(rank),
                len(ranks),
                [(index[box.name], box.offsets, box.extents) for box in boxes],
            )
            shards += [
                Shard(self.specs[i][0], tuple(offsets), tuple(extents))
                for i, offsets, extents in share
            ]
        return shards


def _by_box(
    kind: TensorProperties, holders: Iterable[tuple[tuple[int, ...], array[int]]]
) -> dict[tuple[int, ...], list[int]]:
    """The ranks that hold each box of a tensor. InvalidArgumentError: with different values."""
    name, _, shape, *_ = kind.spec
    found: dict[tuple[int, ...], tuple[int, list[int]]] = {}
    for ranks, numbers in holders:
        *box, checksum = numbers
        if 0 in box[kind.dims :] and 0 not in shape:
            continue
        expected, of_box = found.setdefault(tuple(box), (checksum, []))
        if checksum != expected:
            raise InvalidArgumentError(
                f'tensor "{name}" ({kind}): rank {ranks[0]} has other values than rank {of_box[0]}, and '
                "both have the same part of it. Parts of a model that have the same names on several "
                "ranks (experts) need `rename`",
                reason="BAD_LAYOUT",
            )
        of_box.extend(ranks)
    return {box: of_box for box, (_, of_box) in found.items()}


def _digest(items: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(items)).encode()).hexdigest()
