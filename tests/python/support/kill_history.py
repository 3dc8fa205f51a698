# SPDX-License-Identifier: Apache-2.0
"""What clients of a server that is killed again and again have been told, and whether that was right.

Uniform fill: at step t every element pushed is c(t), so a right snapshot is constant, and equals the average of
one number. Kept outside of the server, by those who talk to it.
"""

from __future__ import annotations

import collections
import dataclasses
import threading

import ema_client
import numpy as np
from replay import fma32

# (incarnation, number): how versions are ordered.
Id = tuple[int, int]


def fill_value(step: int) -> int:
    """c(t): a small whole number, which every dtype holds."""
    return (step * 37 + 11) % 97


def fill(step: int) -> dict[str, np.ndarray]:
    """Tensors of odd sizes, all of whose elements are c(step). More of them than a test has servers."""
    value = fill_value(step)
    return {
        "wide": np.full((64, 101), value, np.float32),
        "deep": np.full((3, 5, 7, 11), value, np.float32),
        "count": np.full((19, 23), value, np.int32),
        "scalar": np.full((), value, np.float32),
        **{f"row {i}": np.full((1 + 300 * i,), value, np.float32) for i in range(6)},
    }


def id_of(version: ema_client.Version) -> Id:
    return version.incarnation, version.number


def read_values(weights: ema_client.Weights) -> tuple[set[float], set[int]]:
    """All values of the float tensors, and all of the integer tensors: one each, unless the snapshot is torn."""
    floats, counts = set(), set()
    for array in weights.values():
        values = np.unique(array)
        if array.dtype.kind == "f":
            floats.update(float(value) for value in values)
        else:
            counts.update(int(value) for value in values)
    return floats, counts


def average_after(before: float | None, step: int, weight: float) -> float:
    """The average after an update by c(step), computed as the server does. `before`: None for the first one."""
    value = np.array([fill_value(step)], np.float32)
    if before is None or weight == 1:
        return float(value[0])
    old = np.array([before], np.float32)
    return float(fma32(np.float32(weight), value - old, old)[0])


@dataclasses.dataclass(frozen=True)
class Pull:
    reader: int
    life: int | None  # Of the server; None: it ended while the pull ran.
    track: str
    id: Id
    step: int
    value: float
    acked_before: Id  # The newest acknowledged in this life before the pull began.


@dataclasses.dataclass
class Life:
    """What happened in one life of the server."""

    base: Id  # What it has loaded; (0, 0): nothing.
    incarnation: int = 0  # Of its own versions; 0: it made none that anybody was told of.
    acked: Id = (0, 0)
    is_over: bool = False  # What is answered from here on may come from the next one.
    pulls: int = 0
    versions: int = 0
    saves: int = 0

    def is_thick(self) -> bool:
        """Enough went on that its end is a test."""
        return self.pulls >= 20 and self.versions >= 3 and self.saves >= 1


class History:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._violations: list[str] = []
        self._lives: list[Life] = []
        self._pulls: list[Pull] = []
        self._steps: dict[Id, int] = {}
        self._weights: dict[Id, float] = {}
        self._durable: Id = (0, 0)

    @property
    def life(self) -> int:
        with self._lock:
            return len(self._lives) - 1

    def is_on(self, life: int) -> bool:
        with self._lock:
            return life == len(self._lives) - 1 and not self._lives[life].is_over

    def now(self) -> Life:
        """A copy of what has happened in the life that is on."""
        with self._lock:
            return dataclasses.replace(self._lives[-1])

    def count(self) -> tuple[int, int, int]:
        """Pulls, versions and saves of all lives."""
        with self._lock:
            lives = self._lives
            return (
                sum(life.pulls for life in lives),
                sum(life.versions for life in lives),
                sum(life.saves for life in lives),
            )

    def is_violated(self) -> bool:
        with self._lock:
            return bool(self._violations)

    # --- What happens ---

    def on_start(self, latest: ema_client.Version | None) -> None:
        """A life begins with what it has loaded."""
        with self._lock:
            base = (0, 0) if latest is None else id_of(latest)
            if base < self._durable:
                self._violate(f"life {len(self._lives)} begins at {base}: {self._durable} is lost")
            self._lives.append(Life(base=base, acked=base))
            if latest is not None:
                self._record(latest, None)

    def on_kill(self) -> None:
        """The life is about to end."""
        with self._lock:
            self._lives[-1].is_over = True

    def on_push(self, life: int, step: int, version: ema_client.Version) -> None:
        with self._lock:
            if version.step != step:
                self._violate(f"a push of step {step} was answered with {version}")
            self._record(version, life)
            lived = self._lives[life]
            if id_of(version) > lived.acked:
                lived.acked = id_of(version)
                lived.versions += 1

    def on_save(self, life: int, version: ema_client.Version) -> None:
        with self._lock:
            self._record(version, None)
            self._durable = max(self._durable, id_of(version))
            self._lives[life].saves += 1

    def on_pull(
        self, reader: int, life: int, track: str, acked_before: Id, weights: ema_client.Weights
    ) -> None:
        floats, counts = read_values(weights)
        version = weights.version
        with self._lock:
            is_same = life == len(self._lives) - 1 and not self._lives[life].is_over
            self._record(version, life if is_same else None)
            self._lives[life].pulls += 1
            if len(floats) != 1 or counts != {fill_value(version.step)}:
                self._violate(
                    f"torn: {track} of {id_of(version)}, step {version.step}: {floats}, {counts}"
                )
                return
            self._pulls.append(
                Pull(
                    reader,
                    life if is_same else None,
                    track,
                    id_of(version),
                    version.step,
                    floats.pop(),
                    acked_before,
                )
            )

    def on_violation(self, text: str) -> None:
        with self._lock:
            self._violate(text)

    def _violate(self, text: str) -> None:
        self._violations.append(text)

    def _record(self, version: ema_client.Version, life: int | None) -> None:
        key = id_of(version)
        weight = version.tracks["ema"].update_weight
        if self._steps.setdefault(key, version.step) != version.step:
            self._violate(f"{key} is of step {self._steps[key]} and of step {version.step}")
        if self._weights.setdefault(key, weight) != weight:
            self._violate(f"{key} has weight {self._weights[key]} and weight {weight}")
        if life is None or key <= self._lives[life].base:
            return
        lived = self._lives[life]
        if lived.incarnation == 0:
            lived.incarnation = key[0]
        before = max((other.incarnation for other in self._lives[:life]), default=0)
        if key[0] != lived.incarnation or key[0] <= before:
            self._violate(
                f"life {life} made {key} after incarnations {before}, {lived.incarnation}"
            )

    # --- The verdict ---

    def _averages(self) -> dict[Id, float]:
        """The average at each version, by the definition, from the base of each life on."""
        averages: dict[Id, float] = {}
        bases = {life.incarnation: life.base for life in self._lives}
        for key in sorted(self._steps):
            incarnation, number = key
            base = bases.get(incarnation)
            if base is None:
                self._violate(f"{key} is of no life")
                continue
            parent = base if number == base[1] + 1 else (incarnation, number - 1)
            if parent != (0, 0) and parent not in averages:
                self._violate(f"{key} comes after {parent}, of which nobody was told")
                continue
            averages[key] = average_after(
                averages.get(parent), self._steps[key], self._weights[key]
            )
        return averages

    def check(self) -> list[str]:
        """All that was not right; at most so many lines as a person reads."""
        with self._lock:
            averages = self._averages()
            last: dict[tuple[int, int], Id] = collections.defaultdict(lambda: (0, 0))
            for pull in self._pulls:
                expected = averages.get(pull.id)
                if pull.track == "raw":
                    expected = float(fill_value(pull.step))
                if pull.value != expected:
                    self._violate(f"{pull}: expected {expected}")
                if pull.life is None:
                    continue
                if pull.id < pull.acked_before:
                    self._violate(f"{pull}: older than what was acknowledged")
                if pull.id < last[pull.reader, pull.life]:
                    self._violate(f"{pull}: after {last[pull.reader, pull.life]}")
                last[pull.reader, pull.life] = pull.id
            return self._violations[:20]
