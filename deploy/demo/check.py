# SPDX-License-Identifier: Apache-2.0
"""Checks what was served against what was trained, bit for bit."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

import ema_client
import numpy as np
from replay import Array, Replay, differing_bits, half_life_weight


class CheckError(RuntimeError):
    """Something is not as it must be."""


def check_averages(
    out: pathlib.Path,
    records: list[ema_client.Version],
    half_lives: Mapping[str, float],
    copies: list[str],
) -> dict[str, Any]:
    """Replays all tracks from the trainer's log and compares every version that was pulled.

    The weights of the replay come from the logged steps and `half_lives` (in steps, by track), not from the
    records, which must have them bit for bit. Every track is due at every step that the trainer pushes.

    Returns how many tensors were compared, and each average's largest error against float64.
    Raises CheckError: a bit differs, or a record or a log is missing.
    """
    replays = {track: Replay() for track in half_lives}
    compared = 0
    versions_compared = 0
    last_checked = 0
    for index, record in enumerate(records):
        if record.number != index + 1:
            raise CheckError(f"the record of version {index + 1} is missing")
        log = load(out / "trainer_log" / f"{record.step:06d}.npz")
        for track, replay in replays.items():
            weight = 1.0
            if index > 0:
                elapsed = record.step - records[index - 1].step
                weight = float(half_life_weight(elapsed, half_lives[track]))
            applied = record.tracks[track]
            if not applied.updated or applied.update_weight != weight:
                raise CheckError(
                    f"version {record.number}, track {track}: step {record.step} must have the weight {weight!r}; "
                    f"the server's record is {applied}"
                )
            replay.update(weight, log)
        pulled_file = out / "pulled" / f"{record.number:06d}.npz"
        if not pulled_file.exists():
            continue
        pulled = load(pulled_file)
        for track in [*half_lives, *copies]:
            expected = log if track in copies else replays[track].average
            got = {
                name.removeprefix(f"{track}/"): array
                for name, array in pulled.items()
                if name.startswith(f"{track}/")
            }
            problems = differing_bits(expected, got)
            if problems:
                raise CheckError(
                    f"version {record.number}, track {track} is not what was trained: {problems[0]} "
                    f"(and {len(problems) - 1} more tensors)"
                )
            compared += len(got)
        versions_compared += 1
        last_checked = record.number
    if last_checked != len(records):
        raise CheckError(f"the last version is {len(records)}; pulled was only {last_checked}")
    return {
        "versions": len(records),
        "versions_compared": versions_compared,
        "tensors_compared": compared,
        "float64_error": {track: replay.error_ulps() for track, replay in replays.items()},
    }


def check_shares(out: pathlib.Path, *, pushes: int, tensor_bytes: int) -> list[dict[str, Any]]:
    """Each rank must have sent about half of the bytes, once. Returns what the ranks said."""
    ranks: list[dict[str, Any]] = [
        json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)
    ]
    total = sum(rank["sent_bytes"] for rank in ranks)
    if total < pushes * tensor_bytes:
        raise CheckError(f"{total} bytes sent for {pushes} pushes of {tensor_bytes}")
    for rank in ranks:
        if rank["skipped"]:
            raise CheckError(f"rank {rank['rank']} skipped {rank['skipped']} pushes")
        share = rank["sent_bytes"] / total
        if not 0.45 < share < 0.55:
            raise CheckError(f"rank {rank['rank']} sent {share:.0%} of the bytes, not half")
    return ranks


def check_file(path: pathlib.Path, expected: dict[str, Array]) -> None:
    """The safetensors file, read by another library than ours, must hold what was pulled."""
    from safetensors.torch import load_file

    got = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    problems = differing_bits(expected, got)
    if problems:
        raise CheckError(f"{path}: {problems[0]}")


def load(path: pathlib.Path) -> dict[str, Array]:
    if not path.exists():
        raise CheckError(f"{path} is missing: was that step trained?")
    with np.load(path) as arrays:
        return dict(arrays)
