# SPDX-License-Identifier: Apache-2.0
"""What is done to checkpoint_victim (tests/fault/): lives of a checkpoint store on a real disk."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from server_process import ROOT
from system_calls import FILE_CALLS, Point, attach, read_points

VICTIM = pathlib.Path(
    os.environ.get("EMA_CHECKPOINT_VICTIM_BIN")
    or ROOT / "build/release/tests/fault/checkpoint_victim"
)


@dataclasses.dataclass(frozen=True)
class State:
    """What a victim has in memory at its end, and on the disk if it has only recovered."""

    version: int
    step: int
    restored_from: int
    digest: str
    incarnation: int = dataclasses.field(compare=False)
    corrupt: int = dataclasses.field(compare=False)
    # Versions; and the labels with theirs ("best:2").
    checkpoints: frozenset[str] = dataclasses.field(compare=False)
    labels: frozenset[str] = dataclasses.field(compare=False)


def state_of(output: str) -> State:
    match = re.search(
        r"version=(\d+) step=(\d+) from=(\d+) digest=(\w+) incarnation=(\d+) corrupt=(\d+)",
        output,
    )
    assert match, output
    version, step, restored_from, digest, incarnation, corrupt = match.groups()
    on_disk = [
        frozenset(filter(None, text.split(",")))
        for what in ("checkpoints", "labels")
        for text in re.findall(rf"{what}=(\S*)", output) or [""]
    ]
    return State(
        *(int(version), int(step), int(restored_from), digest),
        *(int(incarnation), int(corrupt), *on_disk),
    )


@dataclasses.dataclass(frozen=True)
class End:
    """Of a life."""

    code: int  # -9: killed.
    output: str

    @property
    def is_done(self) -> bool:
        """What it was to do was answered with OK."""
        return "done\n" in self.output


class _Victim:
    """The process that forks lives. For one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [str(VICTIM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __del__(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _start(self, data: pathlib.Path, mode: str, how: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{mode} {data} {how}\n")
        self._process.stdin.flush()

    def _read_until(self, beginning: str) -> str:
        """What it prints before a line that begins so, and that line."""
        assert self._process.stdout is not None
        output = ""
        while True:
            line = self._process.stdout.readline()
            assert line, f"no {beginning} after {output!r}"
            output += line
            if line.startswith(beginning):
                return output
            assert not line.startswith("ended="), output

    def _end(self) -> End:
        output = self._read_until("ended=")
        return End(int(output.rsplit("=", 1)[1]), output)

    def live(self, data: pathlib.Path, mode: str) -> End:
        self._start(data, mode, "go")
        return self._end()

    def live_traced(self, data: pathlib.Path, mode: str, options: Sequence[str], log: str) -> End:
        self._start(data, mode, "stop")
        pid = int(self._read_until("marked=").rsplit("=", 1)[1])
        # It says so before it stops; a SIGCONT in between would be lost.
        while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.001)
        strace = attach(pid, FILE_CALLS, *options, log=log)
        os.kill(pid, signal.SIGCONT)
        end = self._end()
        strace.communicate()
        return end


_of_thread = threading.local()


def _victim() -> _Victim:
    if not hasattr(_of_thread, "victim"):
        _of_thread.victim = _Victim()
    return _of_thread.victim


def live(data: pathlib.Path, mode: str) -> State:
    """A life that comes to its end."""
    end = _victim().live(data, mode)
    assert end.code == 0, end
    return state_of(end.output)


def live_traced(
    data: pathlib.Path, mode: str, *options: str, log: pathlib.Path | str = "/dev/null"
) -> End:
    """A life with strace beside it from the mark on."""
    return _victim().live_traced(data, mode, options, str(log))


def checkpoints(data: pathlib.Path) -> list[pathlib.Path]:
    return sorted(data.glob("models/m/checkpoints/step-*"))


def damage(file: pathlib.Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    mode: str
    # What was lived before.
    lives: tuple[str, ...]
    # The versions that it begins and ends with; 0: none.
    before: int
    after: int
    # What must be tested at the least: fewer points mean that the test does not see what happens.
    least_points: int
    # The newest checkpoint is damaged, and a save and a removal were under way.
    after_accident: bool = False
    # After an error another thread saves, too, and may meet the next one.
    has_helper: bool = False


SAVES = 3 * ("save",)  # Two checkpoints are kept.
CASES = [
    Case("the first save", "save", (), 0, 1, 60),
    Case("a save", "save", SAVES[:1], 1, 2, 50),
    Case("a save that removes an old checkpoint", "save", SAVES[:2], 2, 3, 70),
    Case("a save that is kept for good", "keep", SAVES[:1], 1, 2, 50),
    Case("an automatic save", "auto", SAVES[:2], 2, 3, 70, has_helper=True),
    Case("deleting a model", "delete", SAVES[:2], 2, 0, 4),
    Case("deleting a checkpoint", "remove", SAVES[:2], 2, 2, 10),
    Case("the first start", "recover", (), 0, 0, 15),
    Case("recovery", "recover", SAVES[:2], 2, 2, 40),
    Case("recovery after an accident", "recover", SAVES, 2, 2, 60, after_accident=True),
    Case("a rollback to a checkpoint", "rollback", SAVES, 3, 4, 80, has_helper=True),
    Case("a rollback in memory", "undo", SAVES[:1], 1, 4, 50, has_helper=True),
    Case("a label for a checkpoint", "label", SAVES[:2], 2, 2, 6),
    Case("a label that is taken away", "unlabel", ("save", "score"), 2, 2, 6),
    # Of versions 2 (which has the label), 3 and 4 only the last stays.
    Case("a better score", "score", ("save", "score", "save", "save"), 4, 5, 80),
]


@dataclasses.dataclass(frozen=True)
class Expected:
    """Of a case; as lives that nothing disturbs have it."""

    before: State
    after: State
    # What comes of these when training goes on.
    next: dict[State, State]

    def check(self, found: State, is_done: bool, removes: bool = True) -> None:
        """Fails if that may not be found. `is_done`: it was answered with OK. `removes`: also old checkpoints, which
        an OK does not promise."""
        allowed = [self.after] if is_done else [self.before, self.after]
        assert found in allowed, f"found {found}, expected {allowed}"
        labels = [state.labels for state in allowed]
        assert found.labels in labels, f"found {found.labels}, expected {labels}"
        if is_done and removes:
            assert found.checkpoints == self.after.checkpoints, found
        both = self.before.checkpoints, self.after.checkpoints
        assert both[0] & both[1] <= found.checkpoints <= both[0] | both[1], found


def prepare(data: pathlib.Path, case: Case) -> Expected:
    """Fills `data`."""
    data.mkdir()
    for mode in case.lives:
        live(data, mode)
    if case.after_accident:
        folder = data / "models/m/checkpoints"
        (folder / ".tmp-step-000000000099-version-1-9" / "tracks").mkdir(parents=True)
        shutil.copytree(checkpoints(data)[0], folder / ".tmp-removed")
        (data / ".tmp-INCARNATION").write_text("1")
        damage(checkpoints(data)[-1] / "manifest.json")
    states = []
    following = {}
    for modes in ((), (case.mode,)):
        reference = data.with_name(f"reference-{len(modes)}")
        shutil.copytree(data, reference)
        lived = [live(reference, mode) for mode in modes]
        state = live(reference, "recover")
        assert lived in ([], [state]), "what was in memory is not what is loaded"
        following[state] = live(reference, "save")
        assert live(reference, "recover") == following[state]
        states.append(state)
    before, after = states
    assert (before.version, after.version) == (case.before, case.after)
    return Expected(before, after, following)


def all_points(template: pathlib.Path, case: Case, folder: pathlib.Path) -> list[Point]:
    """Every file call of the case, from its mark on."""
    whole = folder / "whole"
    shutil.copytree(template, whole)
    end = live_traced(whole, case.mode, log=folder / "log")
    assert end.code == 0 and end.is_done, end
    points = read_points(folder / "log")
    assert len(points) >= case.least_points, len(points)
    return points
