# SPDX-License-Identifier: Apache-2.0
"""Clients that want all slots for streams do not keep others out."""

from __future__ import annotations

import subprocess
import sys

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess
from slot_hog import CALLS
from testing import SUPPORT, started, wait_for

OWNER = "owner-0d0f6f0c0b3a4a8c"
HOGS = ["hostile-51e3a0b2c7d84f60", "hostile-6f1d2c70b4e94b0f"]
# Larger than the window of a call, so that a pull that is not read stays open.
WEIGHTS = {"w": np.ones(1 << 18, np.float32)}


def streams_in_use(client: ema_client.Client, kind: str) -> int:
    name = {"pulls": "pull_streams", "pushes": "push_streams"}[kind]
    return client.server_info().limits[name].in_use or 0


@pytest.mark.parametrize("kind", CALLS)
def test_a_pair_works_beside_two_hogs(tmp_path, kind):
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"trainer {token}\n" for token in (OWNER, *HOGS)))
    # So long that the time-out of stalled streams helps nobody.
    options = ("--auth-tokens", str(tokens), "--stream-timeout", "3600s")
    arguments = {"token": OWNER, "timeout_s": 60, "same_host_lane": False}
    with (
        ServerProcess(tmp_path, *options) as server,
        ema_client.Client(server.address, **arguments) as client,
    ):
        # So many that the pulls of the hogs, which pin versions, leave some.
        client.create_model("pair", WEIGHTS, tracks={"ema": "10ba"}, max_pinned_versions=16)
        with client.open_run("pair") as run:
            run.push(step=1, weights=WEIGHTS)
            hog = [sys.executable, SUPPORT / "slot_hog.py", kind, server.port, *HOGS]
            with started([*hog, "--seconds", 600, "--pause", 0.2], stdout=subprocess.PIPE) as (
                process,
            ):
                wait_for(lambda: streams_in_use(client, kind) == CALLS[kind], "all are in use")
                for step in range(2, 12):
                    assert run.push(step=step, weights=WEIGHTS).step == step
                    client.pull("pair", track="ema", framework="numpy")
                assert process.poll() is None
        assert server.is_running(), server.log()
