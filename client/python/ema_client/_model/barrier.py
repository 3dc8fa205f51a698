# SPDX-License-Identifier: Apache-2.0
"""Barriers of all ranks of a process group, which end after a time limit and report the absent ranks.

They use the group's store. A collective of PyTorch waits for the group's own timeout, and does not say
which rank is missing.
"""

from __future__ import annotations

import json
import time
import weakref
from typing import Any

# The pauses between two polls of the outcome of a barrier, in seconds.
_FIRST_PAUSE_S = 0.001
_MOST_PAUSE_S = 0.1
# How long a rank waits for an outcome that another rank has begun to write.
_WRITING_S = 5.0

# The number of the next barrier, by process group.
_next: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def missing_ranks(
    group: Any, rank: int, world_size: int, call: str, timeout_s: float
) -> dict[int, str]:
    """Waits until all ranks of the group have called this with an equal `call`.

    Returns:
        The absent ranks: those that had not called it when the first of the others had waited for
        `timeout_s`; each with the `call` that it made instead, or "". Empty: all ranks have called it. All
        that wait get the same. An absent rank that calls this later takes part in the next barrier.
    """
    import torch.distributed as dist

    root = dist.distributed_c10d._get_process_group_store(group)
    if root is None:  # Only MPI's backend has no store.
        return {}
    while True:
        number = _next.get(group, 0)
        _next[group] = number + 1
        absent = _hold(_store_of(root, number), rank, world_size, call, timeout_s)
        if rank not in absent:
            break
    if not absent and number > 0:
        # All ranks have come to this barrier, so they have seen the outcome of the one before.
        before = _store_of(root, number - 1)
        before.delete_key(_key(rank))
        if rank == 0:
            for key in (f"arrived in {call}", "ends", "outcome"):
                before.delete_key(key)
    return absent


def _hold(store: Any, rank: int, world_size: int, call: str, timeout_s: float) -> dict[int, str]:
    store.set(_key(rank), call)
    if store.add(f"arrived in {call}", 1) == world_size:
        _end(store, {})
    deadline = time.monotonic() + timeout_s
    absent: dict[int, str] = {}
    pause_s = _FIRST_PAUSE_S
    while not store.check(["outcome"]):
        late_s = time.monotonic() - deadline
        if late_s >= 0 and not absent:
            absent = _absent_now(store, world_size, call)
            _end(store, absent)
        if late_s >= _WRITING_S:
            return absent
        time.sleep(min(pause_s, max(-late_s, _FIRST_PAUSE_S)))
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
    outcome = json.loads(store.get("outcome"))
    return {int(key): its_call for key, its_call in outcome.items()}


def _end(store: Any, absent: dict[int, str]) -> None:
    """Sets the outcome, unless another rank has."""
    if store.add("ends", 1) == 1:
        store.set("outcome", json.dumps(absent))


def _absent_now(store: Any, world_size: int, call: str) -> dict[int, str]:
    calls = {
        rank: store.get(_key(rank)).decode() if store.check([_key(rank)]) else ""
        for rank in range(world_size)
    }
    return {rank: its_call for rank, its_call in calls.items() if its_call != call}


def _key(rank: int) -> str:
    return f"call of rank {rank}"


def _store_of(root: Any, number: int) -> Any:
    import torch.distributed as dist

    return dist.distributed_c10d.PrefixStore(f"ema_client/{number}", root)
