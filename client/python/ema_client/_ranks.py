# SPDX-License-Identifier: Apache-2.0
"""The ranks of a distributed training, or the one of another."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which rank this is, and small objects passed between all of them.

    `broadcast` and `gather` are collective: every rank must call them, in the same order.
    """

    rank: int
    world_size: int
    group: Any  # A torch.distributed process group; None: the default one.

    @classmethod
    def current(cls, group: Any = None) -> Ranks:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return cls(rank=0, world_size=1, group=None)
        return cls(rank=dist.get_rank(group), world_size=dist.get_world_size(group), group=group)

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
