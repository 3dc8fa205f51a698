# SPDX-License-Identifier: Apache-2.0
"""A model moves to other servers of its group, while 4 ranks push, 4 evaluators pull and one client saves."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from group_history import read_records
from group_traffic import MODEL, WatchedGroup
from server_group import ServerGroup
from testing import EMACTL, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Where nothing else runs they take a minute.
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]


def emactl_group(group: WatchedGroup, *words: str) -> subprocess.CompletedProcess[str]:
    command = [EMACTL, "--server", group.servers.address, "--timeout", "60s", "group", *words]
    return subprocess.run([str(word) for word in command], capture_output=True, text=True)


def members(group: WatchedGroup) -> set[str]:
    """The servers that have a part of the model, as etcd has it."""
    record = read_records(group.servers.etcd.url, MODEL)[-1]
    return {partition["member"] for partition in record["partitions"]}


def test_no_version_is_lost_from_three_to_five_to_two_servers(tmp_path):
    with WatchedGroup(ServerGroup(tmp_path, 5, "--session-timeout", "2s")) as group:
        for without in (["ema-0", "ema-3"], [], ["ema-1", "ema-2", "ema-4"]):
            options = [word for name in without for word in ("--without", name)]
            moved = emactl_group(group, "rebalance", MODEL, *options)
            assert moved.returncode == 0, moved.stderr
            print(moved.stdout)
            group.await_recovery()
            assert members(group) == {f"ema-{index}" for index in range(5)} - set(without)
        assert emactl_group(group).returncode == 0
        records = group.finish()
    lost = group.history.lost_pushes(records)
    assert not lost, "\n".join(lost)


def test_a_server_that_does_not_come_back_is_replaced(tmp_path):
    with WatchedGroup(ServerGroup(tmp_path, 3, "--session-timeout", "2s")) as group:
        for index in (group.others()[0], group.home):
            name = f"ema-{index}"
            refused = emactl_group(group, "replace", name)
            assert refused.returncode != 0 and "runs, or its process ended" in refused.stderr
            group.servers.servers[index].kill()
            # Until its lease has ended, it counts as running.
            wait_for(
                lambda: emactl_group(group, "replace", name).returncode == 0,
                f"{name} is replaced",
                timeout_s=60,
            )
            group.await_recovery()
            assert name not in members(group)
            group.servers.start_server(index)
        group.finish()
