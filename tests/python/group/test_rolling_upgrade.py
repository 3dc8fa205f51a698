# SPDX-License-Identifier: Apache-2.0
"""The servers of a group are restarted one after the other, as Kubernetes updates a StatefulSet, while 4 ranks push, 4
evaluators pull and one client saves."""

from __future__ import annotations

import base64
import json
import shutil
import urllib.request

import pytest
from group_traffic import WatchedGroup
from http_pages import LISTEN, get, url_of
from server_group import ServerGroup
from testing import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]

SERVERS = 3


def is_member(etcd_url: str, member: str) -> bool:
    """Whether etcd lists the process of a member."""
    key = base64.b64encode(f"/ema/local/members/{member}".encode()).decode()
    body = json.dumps({"key": key}).encode()
    with urllib.request.urlopen(f"{etcd_url}/v3/kv/range", body, timeout=30) as reply:
        return "kvs" in json.load(reply)


def restart(group: WatchedGroup, index: int) -> None:
    """Stops a server as Kubernetes does, starts it again, and waits until its probe succeeds."""
    server = group.servers.servers[index]
    assert server.stop() == 0, server.log()
    assert not is_member(group.servers.etcd.url, f"ema-{index}")
    group.servers.start_server(index)
    wait_for(lambda: get(url_of(server), "/readyz")[0] == 200, f"ema-{index} is ready")


@pytest.mark.timeout(900)  # Where nothing else runs it takes a minute.
@pytest.mark.parametrize("is_patient", [True, False])
def test_a_rolling_upgrade_loses_no_acknowledged_step(tmp_path, is_patient):
    """`is_patient`: whether the group commits steps again before the next server is stopped (minReadySeconds)."""
    flags = (*LISTEN, "--session-timeout", "2s")
    with WatchedGroup(ServerGroup(tmp_path, SERVERS, *flags)) as group:
        # The last one first. One of them is the model's home.
        for index in reversed(range(SERVERS)):
            before = group.history.counts()
            restart(group, index)
            if is_patient:
                group.await_recovery()
            print(f"ema-{index}: {group.history.counts() - before}")
        group.await_recovery()
        records = group.finish()
    assert len({record["incarnation"] for record in records}) > 1  # The restarts were noticed.
    lost = group.history.lost_pushes(records)
    assert not lost, "\n".join(lost)
