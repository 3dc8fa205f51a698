# SPDX-License-Identifier: Apache-2.0
"""The ranks of a distributed training, or the single rank of any other."""

from __future__ import annotations

import dataclasses
import pickle
import re
from collections.abc import Callable
from typing import Any, TypeVar

from ema_client._client.arrays import some
from ema_client._client.timeouts import TRANSFER_TIMEOUT_S
from ema_client._errors import (
    DeadlineExceededError,
    EmaError,
    InvalidArgumentError,
    failure_of,
)
from ema_client._model.barrier import missing_ranks

Item = TypeVar("Item")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process's rank, and exchange of small objects between all ranks.

    All but `alone` and `current` are collective: every rank must call them, in the same order. They raise
    DeadlineExceededError, which names the absent ranks, if some do not.
    """

    rank: int
    world_size: int
    group: Any  # A torch.distributed process group; None: the default one.
    # The function that every rank must call, for messages.
    call: str = "a collective function of ema_client"
    # How long an exchange waits for other ranks, which may be in a transfer.
    timeout_s: float = 2 * TRANSFER_TIMEOUT_S

    @classmethod
    def alone(cls) -> Ranks:
        return cls(rank=0, world_size=1, group=None)

    @classmethod
    def current(
        cls, group: Any = None, *, call: str | None = None, timeout_s: float | None = None
    ) -> Ranks:
        """The ranks of the group; None: of the default group, or this rank alone if there is none.

        Args:
            call: the function that every rank must call, for messages.
            timeout_s: of the calls between two exchanges. An exchange waits for 600 s longer.

        Raises:
            InvalidArgumentError: this rank is not in the group.
        """
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_initialized():
            return cls.alone()
        rank = dist.get_rank(group)
        if rank < 0:
            raise InvalidArgumentError("process_group: this rank is not in it")
        ranks = cls(rank, dist.get_world_size(group), group, call or cls.call)
        if not isinstance(timeout_s, (int, float)):
            return ranks
        return dataclasses.replace(ranks, timeout_s=timeout_s + TRANSFER_TIMEOUT_S)

    def barrier(self, timeout_s: float) -> None:
        """Waits until all ranks have made the call, at most `timeout_s`."""
        self._meet(timeout_s, "not called it", "(timeout_s)")

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value."""
        if self.world_size == 1:
            return value
        import torch.distributed as dist

        self._meet_to_exchange()
        values = [value]
        source = 0 if self.group is None else dist.get_global_rank(self.group, 0)
        dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        self._meet_to_exchange()
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

    def call_or_raise(self, call: Callable[[], Item]) -> Item:
        """The result of `call` on this rank. If it fails on some ranks, raises the failure of the first of
        them on all ranks, as an EmaError."""
        failure: EmaError | None = None
        try:
            result = call()
        except Exception as raised:  # No memory, for example.
            failure = failure_of(raised)
        self.gather_or_raise(failure, None)
        return result

    def _meet_to_exchange(self) -> None:
        absence = "not called it, or not come as far in it as the others,"
        self._meet(self.timeout_s, absence, "(timeout_s, and 600 s for a transfer)")

    def _meet(self, timeout_s: float, absence: str, limit: str) -> None:
        if self.world_size == 1:
            return
        import torch.distributed as dist

        group = dist.group.WORLD if self.group is None else self.group
        absent = missing_ranks(group, self.rank, self.world_size, self.call, timeout_s)
        if not absent:
            return
        ranks: dict[str, list[str]] = {}
        for rank, its_call in absent.items():
            name = rank if self.group is None else dist.get_global_rank(self.group, rank)
            ranks.setdefault(its_call, []).append(str(name))
        problems = [
            (
                f"{_rank_text(names)} called {its_call} instead"
                if its_call
                else f"{_rank_text(names)} {absence}"
            )
            for its_call, names in ranks.items()
        ]
        raise DeadlineExceededError(
            f"{self.call} must be called on every rank; {'; '.join(problems)} within {timeout_s:g} s "
            f"{limit}"
        )


def _rank_text(names: list[str]) -> str:
    return f"rank {names[0]} has" if len(names) == 1 else f"ranks {some(names)} have"


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
