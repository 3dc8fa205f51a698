# SPDX-License-Identifier: Apache-2.0
"""Drops the packets between members of a group, and stops its processes for a while; test_group_cuts.py runs it.

Usage: cut_group.py FOLDER SEED SECONDS...
Each fault lasts SECONDS, or, with several, for one of them after the other if SEED is "all", otherwise for a random one.
The clients are threads of this process and its children, on a node of their own. Exit code 0: the group has recovered
from all faults, and what the clients were told was right.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Iterator

from group_network import Network
from group_traffic import WatchedGroup
from server_group import ServerGroup

SERVERS = 3
CLIENT, ETCD, FIRST_SERVER = 0, 1, 2


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def faults_of(
    group: WatchedGroup, network: Network
) -> dict[str, contextlib.AbstractContextManager[None]]:
    """Each can be entered once."""
    home, server = group.home, group.others()[0]
    nodes = {
        "home": FIRST_SERVER + home,
        "server": FIRST_SERVER + server,
        "etcd": ETCD,
        "client": CLIENT,
    }
    pairs = [("home", "server"), ("home", "etcd"), ("server", "etcd")]
    pairs += [("client", "home"), ("client", "server")]
    faults: dict[str, contextlib.AbstractContextManager[None]] = {}
    for one, other in pairs:
        forth, back = (nodes[one], nodes[other]), (nodes[other], nodes[one])
        faults[f"cut between {one} and {other}"] = network.cut([forth, back])
        faults[f"cut from {one} to {other}"] = network.cut([forth])
        faults[f"cut from {other} to {one}"] = network.cut([back])
    servers = group.servers
    faults["stop of home"] = stopped(servers.servers[home].pid)
    faults["stop of server"] = stopped(servers.servers[server].pid)
    faults["stop of etcd"] = stopped(servers.etcd.pid)
    return faults


def main() -> None:
    folder, seed = pathlib.Path(sys.argv[1]), sys.argv[2]
    durations = [float(word) for word in sys.argv[3:]]
    chance = random.Random(seed)
    with Network(FIRST_SERVER + SERVERS) as network:
        # Before there is another thread.
        network.enter(CLIENT)
        servers = ServerGroup(
            folder,
            SERVERS,
            *("--session-timeout", "2s", "--allow-unauthenticated"),
            places=network.places[ETCD:],
        )
        with WatchedGroup(servers) as group:
            names = list(faults_of(group, network))
            for name in chance.sample(names, len(names)):
                for seconds in durations if seed == "all" else [chance.choice(durations)]:
                    start = time.monotonic()
                    with faults_of(group, network)[name]:
                        time.sleep(seconds)
                    group.await_recovery()
                    taken = time.monotonic() - start - seconds
                    print(f"{name} for {seconds:.0f} s: recovered after {taken:.1f} s", flush=True)
            records = group.finish()
    # All processes have kept their memory, so nothing may have been taken back.
    assert len({record["incarnation"] for record in records}) == 1, records


if __name__ == "__main__":
    main()
