# SPDX-License-Identifier: Apache-2.0
"""Runs commanded_rank.py: a training whose ranks do what the test says, when it says it."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import ema_client
import numpy as np
from replay import half_life_weight
from testing import Weights, assert_same_bits, replay, wait_for

HERE = pathlib.Path(__file__).parent
HALF_LIFE = 4
PATIENCE_S = 60.0


class Rank:
    """One process, in a session of its own."""

    def __init__(
        self, kind: str, rank: int, world_size: int, folder: pathlib.Path, url: str, options: Any
    ) -> None:
        self.rank = rank
        self._folder = folder
        options = {"half_life": f"{HALF_LIFE}ba", **options}
        command = [sys.executable, HERE / "commanded_rank.py", kind, str(rank), str(world_size)]
        with self._errors.open("ab") as errors:
            self.process = subprocess.Popen(
                [*command, folder, url, json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )

    @property
    def _errors(self) -> pathlib.Path:
        return self._folder / f"{self.rank}.err"

    def log(self) -> str:
        return self._errors.read_text(errors="replace")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())
        self.process.stdin.flush()

    def answers(self, within_s: float) -> bool:
        """Whether an answer, or the end, comes."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            return bool(selector.select(within_s))

    def answer(self) -> dict[str, Any]:
        if not self.answers(PATIENCE_S):
            self.fail_hanging()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"rank {self.rank} has ended: {self.log()}"
        return dict(json.loads(line))

    def fail_hanging(self) -> NoReturn:
        """Fails with where it hangs."""
        self.send(signal.SIGUSR1)
        self.answers(1)
        raise AssertionError(f"rank {self.rank} hangs: {self.log()}")

    def do(self, command: str = "step") -> dict[str, Any]:
        self.tell(command)
        return self.answer()

    def await_log(self, text: str) -> None:
        wait_for(lambda: text in self.log(), f"rank {self.rank} says {text!r}", PATIENCE_S)

    def await_stats(self, **expected: int) -> None:
        """Until what it answers has these values."""
        wait_for(
            lambda: expected.items() <= self.do("stats").items(),
            lambda: f"rank {self.rank}: {self.do('stats')}, not {expected}",
            PATIENCE_S,
        )

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Its exit code. Nothing that it has started may be left."""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.fail_hanging()
        wait_for(
            lambda: not is_alive(self.process.pid),
            f"rank {self.rank} leaves no process",
            PATIENCE_S,
        )
        return code

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def is_alive(group: int) -> bool:
    """Whether a process of this group is there, zombies included."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def running(
    kind: str,
    urls: Sequence[str],
    folder: pathlib.Path,
    **options: Any,
) -> Iterator[list[Rank]]:
    """A rank for each URL, attached. Those that have not ended by then are killed."""
    folder.mkdir(exist_ok=True)
    (folder / "init").unlink(missing_ok=True)
    ranks: list[Rank] = []
    try:
        for rank, url in enumerate(urls):
            ranks.append(Rank(kind, rank, len(urls), folder, url, options))
        for each in ranks:
            each.answer()
        yield ranks
    finally:
        for each in ranks:
            each.kill()


def do_all(ranks: Sequence[Rank], command: str = "step") -> list[dict[str, Any]]:
    for rank in ranks:
        rank.tell(command)
    return [rank.answer() for rank in ranks]


def end_all(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.tell("end")
    assert [rank.wait() for rank in ranks] == [0] * len(ranks)


def logged(folder: pathlib.Path) -> dict[int, Weights]:
    """Rank 0's weights after each step."""
    steps: dict[int, Weights] = {}
    for key, value in np.load(folder / "0.npz").items():
        step, _, name = key.partition("/")
        steps.setdefault(int(step), {})[name] = value
    return steps


def check_average(
    versions: Sequence[ema_client.Version], weights: dict[int, Weights], average: Weights
) -> None:
    """The average is what the steps of `versions` make, each with the weight that its distance is worth."""
    for before, version in zip(versions, versions[1:]):
        record = version.tracks["ema"]
        assert record.elapsed == version.step - before.step
        assert np.float32(record.update_weight) == half_life_weight(record.elapsed, HALF_LIFE)
    pushes = [(version, weights[version.step]) for version in versions]
    assert_same_bits(replay(pushes, "ema"), average)
