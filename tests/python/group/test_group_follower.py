# SPDX-License-Identifier: Apache-2.0
"""A read replica of a model whose tensors are on several servers."""

from __future__ import annotations

import shutil

import ema_client
import numpy as np
import pytest
from server_group import ServerGroup
from server_process import ServerProcess
from testing import assert_same_bits, wait_for

pytestmark = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")

WEIGHTS = {f"t{i}": np.full((40, 10 + i), i, np.float32) for i in range(9)}


def push(there: ema_client.Client, here: ema_client.Client, steps: range) -> None:
    """Pushes the steps. The follower `here` has each of them as the group has it."""
    with there.open_run("m", timeout_s=60) as run:
        for step in steps:
            weights = {name: value + np.float32(step) for name, value in WEIGHTS.items()}
            pushed = run.push(step=step, weights=weights)
            assert here.wait_for("m", step=step, timeout_s=60) == pushed
            for track in ("ema", "raw"):
                expected = there.pull("m", track=track, framework="numpy")
                got = here.pull("m", track=track, framework="numpy")
                assert got.version == expected.version
                assert_same_bits(expected, got)


def test_a_follower_has_the_versions_of_the_whole_model(tmp_path):
    with (
        ServerGroup(tmp_path / "group", 3) as group,
        ServerProcess(tmp_path / "follower", "--follow", f"ema://{group.address}/m") as follower,
        ema_client.Client(group.address, timeout_s=60) as there,
        ema_client.Client(follower.address, timeout_s=60) as here,
    ):
        there.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        push(there, here, range(1, 6))
        assert here.model("m").tensors == there.model("m").tensors


# A killed member comes back when its lease of 10 s has expired.
@pytest.mark.slow
def test_a_follower_returns_with_the_group_to_its_newest_checkpoint(tmp_path):
    with (
        ServerGroup(tmp_path / "group", 3) as group,
        ServerProcess(tmp_path / "follower", "--follow", f"ema://{group.address}/m") as follower,
        ema_client.Client(group.address, timeout_s=60) as there,
        ema_client.Client(follower.address, timeout_s=60) as here,
    ):
        there.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        push(there, here, range(1, 4))
        there.create_checkpoint("m")
        push(there, here, range(4, 6))
        group.servers[1].kill()
        assert here.pull("m", track="raw").version.step == 5
        group.start_server(1)
        wait_for(lambda: here.model("m").latest.step == 3, "the follower returns, too")
        push(there, here, range(4, 7))
