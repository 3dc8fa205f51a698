# SPDX-License-Identifier: Apache-2.0
"""The ranks of a distributed training, or the single rank of any other."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any, TypeVar

from ema_client._errors import InvalidArgumentError

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's rank, and exchange of small objects between all ranks.

    All but `alone` and `current` are collective: every rank must call them, in the same order.
    """

    rank: int
    world_size: int
    group: Any  # A torch.distributed process group; None: the default one.

    @classmethod
    def alone(cls) -> Ranks:
        return cls(rank=0, world_size=1, group=None)

    @classmethod
    def current(cls, group: Any = None) -> Ranks:
        """The ranks of the group; None: of the default group, or this rank alone if there is none.

        Raises:
            InvalidArgumentError: this rank is not in the group.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return cls.alone()
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidArgumentError("process_group: this rank is not in it")
        return cls(rank=rank, world_size=dist.get_world_size(group), group=group)

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        values = [value]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def gather_or_raise(self, failure: Exception | None, item: Item) -> list[Item]:
        """The items of all ranks. If ranks have failed, raises the failure of the first of them on
        all ranks; the others add its rank to the text."""
        outcomes: list[tuple[Exception | None, Item]] = self.gather((_portable(failure), item))
        for rank, (failed, _) in enumerate(outcomes):
            if failed is not None:
                if rank != self.rank:
                    _name(rank, failed)
                raise failed
        return [of_rank for _, of_rank in outcomes]


def _name(rank: int, error: Exception) -> None:
    """Puts the rank before the error's text, unless an earlier exchange has put one there."""
    text = error.args[0] if error.args else None
    if isinstance(text, str) and not re.match(r"rank \d+: ", text):
        error.args = (f"rank {rank}: {text}", *error.args[1:])


def _portable(error: Exception | None) -> Exception | None:
    """The error, or a RuntimeError that describes it if it cannot be sent to another rank."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
