# SPDX-License-Identifier: Apache-2.0
"""Libraries that run in a virtual environment, and a process, of their own: both ends of the pipe.

The programs are `*_side.py` in this folder. They import this file, too, so it needs torch alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from libraries import Library, Net, Step, Tensors, run_theirs

# Makes the library of a kind, for a model, from its arguments.
MakeLibrary = Callable[[str, torch.nn.Module, dict[str, Any]], Library]


class LibraryProcess:
    """The test's end."""

    def __init__(self, folder: pathlib.Path, process: subprocess.Popen[str]) -> None:
        self._folder = folder
        self._process = process

    def run(
        self, kind: str, steps: list[Step], arguments: Mapping[str, Any]
    ) -> list[tuple[Tensors, float | None]]:
        """Makes the updates of `steps` with the library, each from the average that ours began with.

        Returns:
            For each update the library's average, and the weight that it applied. None: no update.
        """
        job = {"kind": kind, "arguments": dict(arguments)}
        job |= {name: str(self._folder / f"{name}.pt") for name in ("steps", "theirs")}
        torch.save([dataclasses.asdict(step) for step in steps], job["steps"])
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"
        result: list[tuple[Tensors, float | None]] = torch.load(job["theirs"])
        return result


@contextlib.contextmanager
def library_process(name: str, folder: pathlib.Path) -> Iterator[LibraryProcess]:
    """Runs NAME_side.py with the Python of build/venv-NAME. `folder` is for the files of both ends."""
    from testing import SUPPORT, beside_python, started

    with started(
        [beside_python(name), SUPPORT / f"{name}_side.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "PYTHONWARNINGS": "ignore",
            # When imported, ultralytics writes its settings, and looks for the internet.
            "YOLO_CONFIG_DIR": str(folder),
            "YOLO_OFFLINE": "true",
        },
    ) as [process]:
        yield LibraryProcess(folder, process)
        process.communicate(timeout=60)
        assert process.returncode == 0


def serve_jobs(make: MakeLibrary) -> None:
    """The other end: reads jobs from stdin, one line of JSON each, and answers "done" to each."""
    # What libraries print must not mix with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        job = json.loads(line)
        steps = [Step(**fields) for fields in torch.load(job["steps"])]
        model = Net()
        library = make(job["kind"], model, job["arguments"])
        result = [(theirs.after, theirs.weight) for theirs in run_theirs(library, model, steps)]
        torch.save(result, job["theirs"])
        print("done", file=answers, flush=True)
