# SPDX-License-Identifier: Apache-2.0
"""Kills a program at a chosen system call, or lets the call fail, with strace."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

# Everything by which a program touches files. "?": not on every machine.
FILE_CALLS = """
    open openat creat close read pread64 preadv write writev pwrite64 pwritev fsync fdatasync sync_file_range
    rename renameat renameat2 unlink unlinkat rmdir mkdir mkdirat ftruncate fallocate link linkat symlink
    symlinkat flock fcntl getdents getdents64 stat lstat fstat newfstatat statx statfs fstatfs access faccessat
    faccessat2 lseek copy_file_range sendfile
""".split()


@dataclasses.dataclass(frozen=True)
class Point:
    """The `number`-th call of `name` that a thread makes from when strace comes to it; strace counts each name by
    itself."""

    name: str
    number: int
    # As strace showed it, for a person.
    text: str = dataclasses.field(compare=False, default="")


def why_no_strace() -> str:
    """Why strace cannot be used here; empty: it can."""
    if shutil.which("strace") is None:
        return "strace is not installed"
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True, text=True)
    return "" if tried.returncode == 0 else f"strace cannot trace here: {tried.stderr.strip()}"


def attach(
    pid: int, calls: Sequence[str], *options: str, log: str = "/dev/null"
) -> subprocess.Popen[str]:
    """Traces those calls of all threads of a process from now on. Ends when the process does."""
    # "?": not every machine has every call.
    trace = "trace=" + ",".join(f"?{name}" for name in calls)
    strace = ["strace", "-f", "-o", log, "-e", trace, *options, "-p", str(pid)]
    process = subprocess.Popen(strace, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    line = process.stderr.readline()
    assert "attached" in line, line
    return process


def kill_at(point: Point) -> tuple[str, str]:
    """For `attach`: the process is killed as it enters that call."""
    return "-e", f"inject=?{point.name}:signal=KILL:when={point.number}"


def fail_at(point: Point, error: str) -> tuple[str, str]:
    """For `attach`: the call does nothing and fails with `error` ("EIO")."""
    return "-e", f"inject=?{point.name}:error={error}:when={point.number}"


def read_points(log: pathlib.Path) -> list[Point]:
    """Every call in the log of the one thread that touches files, in their order."""
    calls = []
    for line in log.read_text().splitlines():
        match = re.match(r"(\d+ +)?(\w+)\((.*)", line)
        if match:
            calls.append(match.groups())
        else:
            assert "exited" in line or "killed" in line or "---" in line, line
    # Or a count would not say which call is meant.
    threads = {thread for thread, name, text in calls if is_of_data(name, text)}
    assert len(threads) <= 1, f"{len(threads)} threads touched files"
    counts: collections.Counter[str] = collections.Counter()
    points = []
    for thread, name, text in calls:
        if thread in threads:
            counts[name] += 1
            points.append(Point(name, counts[name], text))
    return points


def is_of_data(name: str, text: str) -> bool:
    """A call that is not of the words that the program says."""
    return not (name == "write" and text.startswith("1,"))


def for_each(points: Iterable[Point], check: Callable[[Point, int], None]) -> tuple[int, list[str]]:
    """Calls check(point, its number) on all cores, each point only when a core is free for it.

    Returns how many points were checked, and what went wrong where.
    """
    numbered = enumerate(points)
    mutex = threading.Lock()
    checked = 0
    problems = []

    def check_points() -> None:
        nonlocal checked
        while True:
            with mutex:
                number, point = next(numbered, (0, None))
            if point is None:
                return
            try:
                check(point, number)
            except Exception as error:
                problems.append(f"{point}: {error}")
            with mutex:
                checked += 1

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in range(os.cpu_count() or 1):
            pool.submit(check_points)
    return checked, problems


def write_killed_binary(script: pathlib.Path, binary: pathlib.Path, point: Point) -> None:
    """A program that is `binary`, killed at that call."""
    inject = f"inject=?{point.name}:signal=KILL:when={point.number}"
    # -D: the process is the binary's, and strace is beside it.
    script.write_text(
        f"#!/bin/sh\nexec strace -D -f -o /dev/null -e 'trace=?{point.name}' -e '{inject}' {binary} \"$@\"\n"
    )
    script.chmod(0o755)
