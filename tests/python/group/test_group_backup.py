# SPDX-License-Identifier: Apache-2.0
"""An etcd that is restored from an old backup: the servers lose no checkpoint, and say what to do."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_group import EtcdProcess, ServerGroup
from testing import EMACTL, assert_same_bits, wait_for

# The backup has the keys of the members, which expire 10 s after the restart of etcd.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("etcdctl"), reason="etcdctl is not installed"),
]


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path / "group", 2) as running:
        yield running


def etcdctl(*arguments: object) -> None:
    command = ["etcdctl", *map(str, arguments)]
    subprocess.run(command, check=True, capture_output=True, env={"ETCDCTL_API": "3"})


def save_backup(etcd: EtcdProcess, file: pathlib.Path) -> None:
    etcdctl(f"--endpoints={etcd.url}", "snapshot", "save", file)


def restore_backup(group: ServerGroup, file: pathlib.Path) -> None:
    """Stops the group, and starts it again on the backup."""
    assert group.stop() == 0, group.log()
    shutil.rmtree(group.etcd.data_dir)
    etcdctl("snapshot", "restore", file, "--data-dir", group.etcd.data_dir)
    group.start()


def weights(value: float) -> dict[str, np.ndarray]:
    return {f"t{i}": np.full((5, 7), value + i, np.float32) for i in range(4)}


def push_and_save(client: ema_client.Client, step: int) -> None:
    with client.open_run("m", timeout_s=60) as run:
        run.push(step=step, weights=weights(step))
    client.create_checkpoint("m")


def create(client: ema_client.Client) -> None:
    client.create_model("m", weights(0), tracks={"raw": "copy"})


def checkpoints(group: ServerGroup) -> list[str]:
    return sorted(path.name for path in (group.data_dir / "models/m/checkpoints").iterdir())


def error_of(client: ema_client.Client) -> str:
    """Of a trainer, which creates the model and then asks for it."""
    try:
        create(client)
        client.model("m")
        client.pull("m", track="raw", framework="numpy")
    except ema_client.EmaError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("backup_is_from_before", ["the model", "the save", "a restart"])
def test_a_registry_from_an_old_backup(group, tmp_path, backup_is_from_before):
    file = tmp_path / "backup"
    with ema_client.Client(group.address, timeout_s=30) as client:
        if backup_is_from_before == "the model":
            save_backup(group.etcd, file)
        create(client)
        push_and_save(client, step=1)
        if backup_is_from_before != "the model":
            save_backup(group.etcd, file)
        if backup_is_from_before == "a restart":
            assert group.stop() == 0, group.log()
            group.start()
        push_and_save(client, step=2)
        expected = client.pull("m", track="raw", framework="numpy")
    before = checkpoints(group)

    restore_backup(group, file)
    with ema_client.Client(group.address, timeout_s=5) as client:
        last = ""

        def names_the_way_out() -> bool:
            nonlocal last
            last = error_of(client)
            return "emactl group recover" in last

        wait_for(names_the_way_out, lambda: f"{last}\n{group.log()}")
        assert checkpoints(group) == before
        command = [EMACTL, "--server", group.address, "group", "recover", "m"]
        subprocess.run(command, check=True, timeout=60)
        wait_for(lambda: not error_of(client), lambda: error_of(client))
        found = client.pull("m", track="raw", framework="numpy")
        assert found.version == expected.version
        assert_same_bits(expected, found)
