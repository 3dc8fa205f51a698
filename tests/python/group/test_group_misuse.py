# SPDX-License-Identifier: Apache-2.0
"""Servers of a group that are started with something wrong: each gets a clear error, and the group does not notice."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_group import EtcdProcess, ServerGroup
from server_process import ServerError, ServerProcess, free_port

pytestmark = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")

WEIGHTS = {f"t{i}": np.full((5, 7), i, np.float32) for i in range(4)}


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path_factory.mktemp("group"), 2) as running:
        yield running


def error_of(
    group: ServerGroup,
    folder: pathlib.Path,
    *,
    name: str = "local",
    member: str = "ema-9",
    data_dir: pathlib.Path | None,
) -> str:
    """The log of one more server, which must end by itself. The log escapes quotation marks."""
    address = f"127.0.0.1:{free_port()}"
    flags = ("--group", name, "--member", member, "--etcd", group.etcd.url, "--advertise", address)
    server = ServerProcess(folder / "server", *flags, data_dir=data_dir)
    try:
        with pytest.raises(ServerError, match="the server ended with 1:"):
            server.start()
    finally:
        server.kill()
    return server.log().replace('\\"', '"')


def assert_unharmed(group: ServerGroup, model: str) -> None:
    """A model can be created, pushed, saved and pulled."""
    with ema_client.Client(group.address, timeout_s=60) as client:
        client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
        with client.open_run(model) as run:
            run.push(step=3, weights=WEIGHTS)
        client.create_checkpoint(model)
        assert sorted(client.pull(model, track="raw", framework="numpy")) == sorted(WEIGHTS)


def test_a_member_name_that_another_process_has(group, tmp_path):
    log = error_of(group, tmp_path, member="ema-1", data_dir=group.data_dir)
    assert 'the data directory is used by another process of member "ema-1"' in log
    assert_unharmed(group, "m1")


def test_the_folder_of_another_group(group, tmp_path):
    before = sorted(group.data_dir.rglob("*"))
    log = error_of(group, tmp_path, name="other", data_dir=group.data_dir)
    assert 'the data directory belongs to group "local", expected "other" (--group)' in log
    assert sorted(group.data_dir.rglob("*")) == before
    assert_unharmed(group, "m2")


def test_a_folder_that_is_not_shared(group, tmp_path):
    data_dir = tmp_path / "data"
    log = error_of(group, tmp_path, data_dir=data_dir)
    assert f"--data-dir {data_dir}" in log and 'group "local"' in log
    assert_unharmed(group, "m3")


def test_a_server_without_the_folder(group, tmp_path):
    log = error_of(group, tmp_path, data_dir=None)
    assert "the other members share a data directory; give this one the same with --data-dir" in log
    assert_unharmed(group, "m4")


@pytest.fixture
def etcd_with_users(tmp_path: pathlib.Path) -> Iterator[EtcdProcess]:
    """An etcd in which the user "ema", with the password "secret", may do all that a server needs, and no more."""
    commands = """
        user add root:root
        user add ema:secret
        role add server
        role grant-permission --prefix=true server readwrite /ema/
        user grant-role root root
        user grant-role ema server
        auth enable
    """
    with EtcdProcess(tmp_path / "etcd") as etcd:
        for command in filter(None, map(str.strip, commands.splitlines())):
            subprocess.run(
                ["etcdctl", f"--endpoints={etcd.url}", *command.split()],
                check=True,
                capture_output=True,
                env={"ETCDCTL_API": "3"},
            )
        yield etcd


@pytest.mark.parametrize("password", ["secret", "wrong"])
def test_an_etcd_with_users(etcd_with_users, tmp_path, password):
    file = tmp_path / "password"
    file.write_text(password + "\n")
    port = free_port()
    flags = ["--group", "g", "--member", "a", "--advertise", f"127.0.0.1:{port}"]
    flags += ["--etcd", etcd_with_users.url, "--etcd-user", "ema", "--etcd-password-file", file]
    server = ServerProcess(tmp_path / "server", *map(str, flags), data_dir=tmp_path / "data")
    try:
        if password == "secret":
            server.start(port=port)
            with ema_client.Client(server.address, timeout_s=60) as client:
                client.create_model("m", WEIGHTS, tracks={"raw": "copy"})
                assert client.model("m").name == "m"
        else:
            with pytest.raises(ServerError, match="the server ended with 1:"):
                server.start()
            log = server.log().replace('\\"', '"')
            assert 'user "ema": ' in log and "authentication failed" in log
    finally:
        server.kill()
