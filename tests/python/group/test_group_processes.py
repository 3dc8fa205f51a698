# SPDX-License-Identifier: Apache-2.0
"""A model on three servers, which are processes of their own and meet in a real etcd."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess

pytestmark = [
    pytest.mark.slow,  # A killed member comes back when its lease of 10 s has expired.
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]

WEIGHTS = {f"t{i}": np.full((64, 100), i, np.float32) for i in range(9)}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def etcd(tmp_path: pathlib.Path) -> Iterator[str]:
    client, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    command = ["etcd", "--data-dir", str(tmp_path / "etcd"), "--listen-peer-urls", peer]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client]
    with (tmp_path / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    yield client
    process.terminate()
    process.wait()


@pytest.fixture
def servers(tmp_path: pathlib.Path, etcd: str) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for member in ("ema-0", "ema-1", "ema-2"):
            port = free_port()
            process = ServerProcess(
                tmp_path / member,
                *("--group", "g", "--etcd", etcd, "--member", member),
                *("--advertise", f"127.0.0.1:{port}"),
                data_dir=tmp_path / "data",
            )
            process.start(port=port)
            stack.callback(process.stop)
            processes.append(process)
        yield processes


def push(client: ema_client.Client, steps: range) -> None:
    with client.open_run("m", timeout_s=60) as run:
        for step in steps:
            values = {name: value + np.float32(step) for name, value in WEIGHTS.items()}
            run.push(step=step, weights=values)


def pulled_step(client: ema_client.Client) -> int:
    """The step of the newest version, whose tensors must all be of that step."""
    pulled = client.pull("m", track="raw", timeout_s=60)
    step = pulled.version.step
    for name, value in WEIGHTS.items():
        assert np.array_equal(pulled[name], value + np.float32(step)), (name, step)
    return step


def test_a_killed_server_takes_the_model_back_to_its_newest_checkpoint(servers):
    addresses = ",".join(server.address for server in servers)
    with ema_client.Client(addresses, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        step = 0
        # Each of them, so the home among them.
        for server in servers:
            push(client, range(step + 1, step + 4))
            client.create_checkpoint("m")
            push(client, range(step + 4, step + 6))
            server.kill()
            server.start(port=server.port)
            assert pulled_step(client) == step + 3
            step += 3
        push(client, range(step + 1, step + 3))
        assert pulled_step(client) == step + 2


def test_a_stop_of_all_servers_loses_no_step(servers):
    addresses = ",".join(server.address for server in servers)
    with ema_client.Client(addresses, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        push(client, range(1, 8))
        average = client.pull("m", track="ema")
        with contextlib.ExitStack() as stack:
            for server in servers:
                stack.callback(server.stop)
        for server in servers:
            server.start(port=server.port)
        assert pulled_step(client) == 7
        again = client.pull("m", track="ema", timeout_s=60)
        for name in WEIGHTS:
            assert np.array_equal(again[name], average[name])
