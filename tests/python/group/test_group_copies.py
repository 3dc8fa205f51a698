# SPDX-License-Identifier: Apache-2.0
"""Three servers that copy each other's parts of a model every second (--copy-dir), and are killed."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
from group_history import read_records
from server_group import ServerGroup
from testing import EMACTL, wait_for

# A killed member comes back when its lease of 10 s has expired.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # Where nothing else runs it takes a minute and a half.
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]

WEIGHTS = {f"t{i}": np.full((64, 100), i, np.float32) for i in range(9)}
SERVERS = 3


class CopiedGroup:
    """A group with the model "m", which has a checkpoint at step 2."""

    def __init__(self, servers: ServerGroup, client: ema_client.Client, copies: pathlib.Path):
        self.servers = servers
        self.client = client
        self.copies = copies
        self.step = 0
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        self.push(2)
        client.create_checkpoint("m")
        self.checkpoint = self.pull()

    def pull(self) -> ema_client.Weights:
        return self.client.pull("m", track="ema", framework="numpy", timeout_s=60)

    def record(self) -> dict[str, Any]:
        return read_records(self.servers.etcd.url, "m")[-1]

    def push(self, count: int) -> None:
        with self.client.open_run("m", timeout_s=60) as run:
            for _ in range(count):
                self.step += 1
                noise = np.float32(np.sin(self.step))
                run.push(step=self.step, weights={k: v + noise for k, v in WEIGHTS.items()})

    def train_and_copy(self) -> ema_client.Weights:
        """The averages of the newest version, which is copied then."""
        self.push(3)
        wait_for(lambda: (self.record().get("copy") or {}).get("step") == self.step, "a copy")
        return self.pull()

    def server_of(self, partition: int) -> int:
        """The index of the server that has that partition."""
        member = self.record()["partitions"][partition % SERVERS]["member"]
        return int(member.removeprefix("ema-"))

    def folder_of(self, partition: int) -> pathlib.Path:
        """Where that server has its copies of the model."""
        return self.copies / f"local/ema-{self.server_of(partition)}/m"

    def crash(self, *partitions: int, damage: Callable[[], object] = lambda: None) -> None:
        """Kills the servers of these partitions, runs `damage`, and starts them again."""
        killed = [self.server_of(partition) for partition in partitions]
        for index in killed:
            self.servers.servers[index].kill()
        damage()
        for index in killed:
            self.servers.start_server(index)

    def expect(self, averages: ema_client.Weights) -> None:
        """The model has returned to this version, and training continues from it."""
        found = self.pull()
        assert found.version.step == averages.version.step, self.servers.log()
        assert found.version.number == averages.version.number
        assert found.version.incarnation == averages.version.incarnation
        for name in WEIGHTS:
            assert found[name].tobytes() == averages[name].tobytes(), name
        self.step = averages.version.step
        self.push(1)
        assert self.pull().version.step == self.step

    def count(self, event: str) -> int:
        return sum(server.log_path.read_text().count(event) for server in self.servers.servers)


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[CopiedGroup]:
    copies = tmp_path / "copies"
    options = ("--copy-dir", str(copies), "--copy-every", "1s")
    with (
        ServerGroup(tmp_path, SERVERS, *options) as servers,
        ema_client.Client(servers.address, timeout_s=60) as client,
    ):
        yield CopiedGroup(servers, client, copies)


def test_after_a_crash_the_model_returns_to_its_newest_copy(group):
    averages = group.train_and_copy()
    command = [EMACTL, "--server", group.servers.address, "group", "--json"]
    shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert shown["models"][0]["copy_step"] == averages.version.step
    assert shown["models"][0]["checkpoint"]["step"] == group.checkpoint.version.step
    # Not the home, and then the home.
    for partition in (1, 0):
        group.crash(partition)
        group.expect(averages)
        averages = group.train_and_copy()
    # Two neighbours at once: each process has lost its memory, but not its directory.
    group.crash(1, 2)
    group.expect(averages)
    assert group.count("copy fetched") == 0
    assert group.count("model returns to its newest copy") >= 3
    # The checkpoint on the disk has remained the durable version.
    assert [one["step"] for one in group.record()["checkpoints"]] == [2]
    group.client.create_checkpoint("m")
    assert group.record()["checkpoints"][-1]["step"] == group.step


def test_a_lost_part_is_fetched_from_the_neighbour_and_two_lost_ones_from_the_disk(group):
    averages = group.train_and_copy()
    own = group.folder_of(1)
    group.crash(1, damage=lambda: shutil.rmtree(own))  # A lost host.
    group.expect(averages)
    assert group.count("copy fetched") >= 1

    averages = group.train_and_copy()
    (damaged,) = group.folder_of(0).glob("*/part-00000/tracks/ema/model.safetensors")

    def damage() -> None:
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)

    fetched = group.count("copy fetched")
    group.crash(0, damage=damage)
    group.expect(averages)
    assert group.count("copy fetched") > fetched

    group.train_and_copy()
    folders = [group.folder_of(2), group.folder_of(3)]
    group.crash(2, damage=lambda: [shutil.rmtree(folder) for folder in folders])
    group.expect(group.checkpoint)
    assert group.count("copy lost; model returns to its newest checkpoint") == 1
    # Copies are made again, and old ones are removed.
    group.train_and_copy()
    wait_for(
        lambda: all(len(list(group.folder_of(p).iterdir())) == 1 for p in range(SERVERS)),
        "only the newest copy is left",
    )
