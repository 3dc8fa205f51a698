# SPDX-License-Identifier: Apache-2.0
"""Who has which part of a model, and what each rank pushes of it.

Ranks need not have the same tensors: with FSDP2 and tensor parallel each has a box of each tensor,
with pipeline and expert parallel other tensors than the others. What several ranks have, they split.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterable, Mapping, Sequence

from ema_client import _ema
from ema_client._errors import InvalidArgumentError
from ema_client._pieces import piece_of
from ema_client._ranks import Ranks
from ema_client._torch_model import NamedTensors, checksums, specs_of
from ema_client._types import Shard


@dataclasses.dataclass(frozen=True)
class Holding:
    """A box of a tensor that a rank has.

    Attributes:
        spec: of the whole tensor.
        box: may be empty.
        is_frozen: it is not trained.
        checksum: of a parameter's values in the box; 0 of buffers, which may differ by rank.
    """

    spec: _ema.Spec
    box: Shard
    is_frozen: bool
    checksum: int

    @property
    def name(self) -> str:
        return self.spec[0]

    @property
    def is_buffer(self) -> bool:
        return self.spec[3]

    @property
    def kind(self) -> str:
        """What all ranks must agree on, whichever box they have."""
        kind = f"{self.spec[1]}{list(self.spec[2])}"
        if self.is_buffer:
            kind += ", a buffer"
        return f"{kind}, frozen" if self.is_frozen else kind


def holdings_of(tensors: NamedTensors) -> list[Holding]:
    """What this rank has, in the model's order."""
    pieces = {name: piece_of(name, tensor) for name, tensor in tensors.all().items()}
    parameters = [pieces[name].local for name in tensors.parameters]
    sums = dict(zip(tensors.parameters, checksums(parameters)))
    frozen = set(tensors.frozen())
    return [
        Holding(spec, pieces[spec[0]].box, spec[0] in frozen, sums.get(spec[0], 0))
        for spec in specs_of(tensors)
    ]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The whole model, and this rank's part of the work.

    Attributes:
        specs: of all ranks' tensors, rank 0's first.
        frozen: names of those that are not trained.
        groups: ranks that have the same boxes, and these; each box is in one group.
    """

    specs: list[_ema.Spec]
    frozen: list[str]
    groups: dict[tuple[int, ...], list[Shard]]

    @classmethod
    def exchange(cls, ranks: Ranks, own: Sequence[Holding]) -> Layout:
        """Collective: what all ranks have. Raises on all of them if they do not fit together.

        Raises:
            InvalidArgumentError: BAD_LAYOUT: a tensor differs between ranks in dtype, shape or
                whether it is trained; or a box that several ranks have, in its values.
        """
        digests = ranks.gather(_digest(own))
        if len(set(digests)) == 1:
            # Replicas (data parallel): nothing else needs to be sent.
            return cls.of({tuple(range(ranks.world_size)): own})
        every: list[Sequence[Holding]] = ranks.gather(list(own))
        return cls.of({(rank,): held for rank, held in enumerate(every)})

    @classmethod
    def of(cls, held: Mapping[tuple[int, ...], Sequence[Holding]]) -> Layout:
        """`held`: what each of these ranks has, by ascending ranks."""
        first: dict[str, tuple[int, Holding]] = {}
        holders: dict[Shard, tuple[list[tuple[int, ...]], Holding]] = {}
        for ranks, holdings in held.items():
            for own in holdings:
                rank, other = first.setdefault(own.name, (ranks[0], own))
                if own.kind != other.kind:
                    raise InvalidArgumentError(
                        f'tensor "{own.name}": {own.kind} on rank {ranks[0]}, {other.kind} on rank '
                        f"{rank}",
                        reason="BAD_LAYOUT",
                    )
                if 0 in own.box.extents and 0 not in own.spec[2]:
                    continue
                of_box, other = holders.setdefault(own.box, ([], own))
                if own.checksum != other.checksum:
                    raise InvalidArgumentError(
                        f'tensor "{own.name}" ({own.kind}): rank {ranks[0]} has other values than rank '
                        f"{of_box[0][0]}, and both have the same part of it. Parts of a model that have "
                        "the same names on several ranks (experts) need `rename`",
                        reason="BAD_LAYOUT",
                    )
                of_box.append(ranks)
        groups: dict[tuple[tuple[int, ...], ...], list[Shard]] = {}
        for box, (of_box, _) in holders.items():
            groups.setdefault(tuple(of_box), []).append(box)
        return cls(
            specs=[own.spec for _, own in first.values()],
            frozen=[name for name, (_, own) in first.items() if own.is_frozen],
            groups={
                tuple(itertools.chain.from_iterable(ranks)): boxes
                for ranks, boxes in groups.items()
            },
        )

    def without(self, names: set[str]) -> Layout:
        """The same but for these tensors."""
        return Layout(
            [spec for spec in self.specs if spec[0] not in names],
            [name for name in self.frozen if name not in names],
            {
                ranks: [box for box in boxes if box.name not in names]
                for ranks, boxes in self.groups.items()
            },
        )

    def shards(self, rank: int) -> list[Shard]:
        """What `rank` pushes: of each group that it is in an even share; buffers, which may differ,
        come from the group's first rank."""
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


def _digest(holdings: Iterable[Holding]) -> str:
    return hashlib.sha256(repr(list(holdings)).encode()).hexdigest()
