# SPDX-License-Identifier: Apache-2.0
"""Runs the scripts of deploy/examples, as their users do."""

from __future__ import annotations

import os
import subprocess
import sys

from server_process import ROOT
from testing import SUPPORT


def run_example(name: str, *arguments: object, ranks: int = 1, torchrun: bool | None = None) -> str:
    """The last line that the script prints; it must end well. By torchrun, if it has several ranks."""
    command = [sys.executable]
    if ranks > 1 if torchrun is None else torchrun:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command.append(str(SUPPORT / "example_rank.py"))
    result = subprocess.run(
        [*command, ROOT / "deploy/examples" / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=250,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            # accelerate's ranks find each other only on GPUs, unless told so.
            "ACCELERATE_USE_CPU": "true",
        },
    )
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    assert lines, result.stderr
    return lines[-1]
