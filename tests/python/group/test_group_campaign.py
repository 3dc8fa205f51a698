# SPDX-License-Identifier: Apache-2.0
"""kill -9 of the servers of a group, of their etcd and of trainer ranks at random, while 4 ranks push, 4 evaluators
pull and one client saves.

Nothing that was acknowledged as saved is lost, versions only go back to a checkpoint, ranks rejoin by themselves, and
every pull is one whole step. EMA_KILLS: how many kills; TEST_SEED: another choice of their moments.
"""

from __future__ import annotations

import os
import random
import shutil
import time

import pytest
from group_traffic import RANKS, WatchedGroup
from server_group import ServerGroup
from testing import CAMPAIGN_SEED, IS_CAMPAIGN

KILLS = int(os.environ.get("EMA_KILLS", 200 if IS_CAMPAIGN else 12))
# Some of the kills come before the group has recovered from the one before.
EARLY_SHARE = 0.2
# For the time limit; where nothing else runs it takes 15.
S_PER_KILL = 60

pytestmark = [
    pytest.mark.slow,
    pytest.mark.campaign,
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]


def kill_and_restart(group: WatchedGroup, kind: str, chance: random.Random) -> None:
    """Kills one process, and starts it again."""
    if kind == "rank":
        group.traffic.kill_rank(chance.randrange(RANKS))
    elif kind == "etcd":
        group.servers.etcd.kill()
        time.sleep(chance.uniform(0.1, 3.0))
        group.servers.etcd.start()
    else:
        index = group.home if kind == "home" else chance.choice(group.others())
        incarnation = group.history.acked()[0]
        group.servers.servers[index].kill()
        group.servers.start_server(index)
        group.await_event(
            lambda: group.history.acked()[0] > incarnation,
            f"a commit after the kill of ema-{index}",
        )


@pytest.mark.timeout(300 + S_PER_KILL * KILLS)
def test_nothing_durable_is_lost_by_kills(tmp_path):
    chance = random.Random(CAMPAIGN_SEED)
    count = chance.randint(3, 5)
    print(f"TEST_SEED={CAMPAIGN_SEED}: {count} servers")
    kinds: list[str] = []
    with WatchedGroup(ServerGroup(tmp_path, count, "--session-timeout", "2s")) as group:
        while len(kinds) < KILLS and not group.history.is_violated():
            time.sleep(chance.uniform(0.5, 3.0))
            kinds.append(chance.choice(["home", "server", "rank", "etcd"]))
            kill_and_restart(group, kinds[-1], chance)
            if chance.random() >= EARLY_SHARE:
                group.await_recovery()
        group.await_recovery()
        group.finish()
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
