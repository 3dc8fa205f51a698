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


def test_a_server_that_is_missing_for_too_long_is_replaced_without_a_command(tmp_path):
    options = ("--session-timeout", "2s", "--max-registry-outage", "10s", "--replace-after", "20s")
    with WatchedGroup(ServerGroup(tmp_path, 3, *options)) as group:
        stopped, lost = group.others()[0], group.home
        # The key of this one is missing for a moment only.
        group.servers.servers[stopped].kill()
        group.servers.start_server(stopped)
        group.await_recovery()
        assert len(members(group)) == 3
        group.servers.servers[lost].kill()
        wait_for(lambda: len(members(group)) == 2, f"ema-{lost} is replaced", timeout_s=120)
        assert f"ema-{lost}" not in members(group)
        group.await_recovery()
        overview = emactl_group(group)
        assert f'member "ema-{lost}" was replaced' in overview.stdout
        # It has no part of the model, and is a server like the others.
        group.servers.start_server(lost)
        group.await_recovery()
        assert len(members(group)) == 2
        assert emactl_group(group).returncode == 0
        moved = emactl_group(group, "rebalance", MODEL)
        assert moved.returncode == 0, moved.stderr
        group.await_recovery()
        assert len(members(group)) == 3
        group.finish()
    logs = [server.log_path.read_text() for server in group.servers.servers]
    assert "".join(logs).count("lost members replaced") == 1
