# SPDX-License-Identifier: Apache-2.0
"""deploy/group.sh: a group of servers on this machine."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Sequence

import ema_client
import numpy as np
import pytest
from server_process import ROOT, free_port
from testing import wait_for

pytestmark = pytest.mark.slow

# What deploy/group.sh runs, in another folder than build/group. A shell that runs the tests in the background
# makes them ignore SIGINT, so the handler is set again.
SERVE = """
import pathlib, signal, sys, run_group
signal.signal(signal.SIGINT, signal.default_int_handler)
run_group.serve(2, pathlib.Path(sys.argv[1]), int(sys.argv[2]))
"""


def start(command: Sequence[object], log: pathlib.Path) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "deploy/demo"), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(word) for word in command], env=environment, stdout=output, stderr=output
        )


def test_models_outlive_ctrl_c(tmp_path):
    command = [sys.executable, "-c", SERVE, tmp_path / "group", free_port()]
    for is_first in (True, False):
        log = tmp_path / "log"
        process = start(command, log)
        try:
            found = wait_for(
                lambda: re.search(r"use ema://(\S+)/MODEL", log.read_text()) or process.poll(),
                lambda: log.read_text(),
            )
            assert isinstance(found, re.Match), log.read_text()
            with ema_client.Client(found[1], timeout_s=60) as client:
                if is_first:
                    weights = {name: np.ones(9, np.float32) for name in "ab"}
                    client.create_model("m", weights, tracks={"raw": "copy"})
                    with client.open_run("m") as run:
                        run.push(step=7, weights=weights)
                assert client.pull("m", track="raw", framework="numpy").version.step == 7
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()


@pytest.mark.timeout(600)  # group.sh builds first what has changed.
def test_the_demo_trains_while_a_server_is_killed(tmp_path):
    log = tmp_path / "log"
    process = start([ROOT / "deploy/group.sh", "2", "--demo"], log)
    try:
        assert process.wait() == 0, log.read_text()
    finally:
        process.kill()
    lines = log.read_text().splitlines()
    assert lines[-1] == "group: ok"
    rows = [
        re.search(r"(\d+) +(\d+) +(\d+) +step (\d+) +([\d.]+)% +([\d.]+)%$", line) for line in lines
    ]
    all_run, killed, all_run_again = [[float(cell) for cell in row.groups()] for row in rows if row]
    for _, committed, skipped, _, _, _ in (all_run, all_run_again):
        assert (committed, skipped) == (30, 0)
    assert killed[2] > 0
    # The average continues, and is good.
    assert all_run[3] < killed[3] < all_run_again[3]
    assert all_run_again[4] > 90
