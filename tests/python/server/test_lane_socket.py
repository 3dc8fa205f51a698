# SPDX-License-Identifier: Apache-2.0
"""The same-host lane of a client in another container, through --lane-socket."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from server_process import ServerError, ServerProcess

# Its own network, processes and shared memory, as a container has them.
CONTAINER = ["unshare", "--map-root-user", "--net", "--pid", "--ipc", "--mount-proc", "--fork"]
CLIENT = """
import sys
import ema_client
import numpy as np

weights = {"w": np.arange(1_000_000, dtype=np.float32)}
with ema_client.Client(sys.argv[1], timeout_s=60) as client:
    client.create_model(sys.argv[2], weights, tracks={"raw": "copy"})
    with client.open_run(sys.argv[2]) as run:
        pending = run.start_push(step=1, weights=weights)
        pending.wait()
    pulled = client.pull(sys.argv[2], track="raw", framework="numpy")
    assert (pulled["w"] == weights["w"]).all()
    print(f"{pending.stats.lane}, {pulled.lane}. {pending.stats.lane_reason}", end="")
"""


@pytest.fixture
def need_namespaces():
    if subprocess.run([*CONTAINER, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces: unshare does not work here")


def lanes_of_a_container(address: str, model: str) -> str:
    """The lanes of a push and of a pull, and why the push had no better one."""
    command = [*CONTAINER, sys.executable, "-c", CLIENT, address, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("need_namespaces")
def test_containers_with_the_socket_file_share_memory_with_the_server(tmp_path, model):
    address = f"unix:{tmp_path}/ema.sock"
    lane_socket = tmp_path / "lane.sock"
    with ServerProcess(tmp_path, "--listen", address):
        lanes = lanes_of_a_container(address, model)
        assert re.fullmatch("grpc, grpc. same-host lane: connect to .*: Connection refused", lanes)
    with_socket = ("--listen", address, "--lane-socket", str(lane_socket))
    with ServerProcess(tmp_path, *with_socket) as server:
        assert lanes_of_a_container(address, model) == "shared memory, shared memory. "
        server.kill()
    # The next server replaces what a killed one leaves, and removes its own file.
    assert lane_socket.is_socket()
    with ServerProcess(tmp_path, *with_socket):
        assert lanes_of_a_container(address, model) == "shared memory, shared memory. "
    assert not lane_socket.exists()


def test_a_socket_file_that_cannot_be_made_is_named(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    for path, why in [
        (taken, "the path exists and is not a socket"),
        (tmp_path / "nowhere/lane.sock", "No such file or directory"),
    ]:
        with pytest.raises(ServerError, match=f"cannot listen on --lane-socket {path}: {why}"):
            ServerProcess(tmp_path, "--lane-socket", str(path)).start()
    assert taken.read_text() == "a file"
