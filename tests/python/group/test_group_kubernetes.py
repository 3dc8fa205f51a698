# SPDX-License-Identifier: Apache-2.0
"""Servers that keep a model together and their records in the Kubernetes API, in place of etcd.

The API server is a fake one, tests/testutil/fake_kubernetes.py, or the one that EMA_TEST_KUBERNETES names:
"URL CA_FILE TOKEN_FILE NAMESPACE".
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import secrets
import subprocess
import sys
import urllib.request
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_process import ROOT, ServerProcess, free_port
from testing import EMACTL, started, wait_for

pytestmark = pytest.mark.slow

WEIGHTS = {f"t{i}": np.full((8, 100), i, np.float32) for i in range(4)}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/control/objects", timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.fixture
def api(tmp_path: pathlib.Path) -> Iterator[list[str]]:
    """The options of a server that uses the API server."""
    real = os.environ.get("EMA_TEST_KUBERNETES")
    if real:
        url, ca, token, namespace = real.split()
        flags = [f"--kubernetes-api={url}", f"--kubernetes-namespace={namespace}"]
        yield [*flags, f"--kubernetes-token-file={token}", f"--kubernetes-ca={ca}"]
        return
    port = free_port()
    tokens = tmp_path / "tokens"
    tokens.write_text("secret\n")
    program = ROOT / "tests/testutil/fake_kubernetes.py"
    with started([sys.executable, program, "--port", str(port), "--tokens", tokens]):
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: answers(url), f"{url} answers")
        flags = [f"--kubernetes-api={url}", "--kubernetes-namespace=ema"]
        yield [*flags, f"--kubernetes-token-file={tokens}"]


@pytest.fixture
def servers(api: list[str], tmp_path: pathlib.Path) -> Iterator[list[ServerProcess]]:
    group = f"g{secrets.token_hex(4)}"  # A real API server has the records of earlier tests.
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(2):
            address = f"127.0.0.1:{free_port()}"
            flags = ["--group", group, "--member", f"ema-{index}", "--advertise", address]
            server = ServerProcess(
                tmp_path / f"ema-{index}",
                *flags,
                "--kubernetes",
                *api,
                data_dir=tmp_path / "data",
            )
            server.start(port=int(address.split(":")[1]))
            stack.callback(server.stop)
            running.append(server)
        yield running


def push(client: ema_client.Client, steps: range) -> None:
    with client.open_run("m", timeout_s=60) as run:
        for step in steps:
            values = {name: value + np.float32(step) for name, value in WEIGHTS.items()}
            run.push(step=step, weights=values)


def pulled_step(client: ema_client.Client) -> int:
    """The step of the newest version, whose tensors must all be of that step."""
    pulled = client.pull("m", track="raw", framework="numpy", timeout_s=60)
    step = pulled.version.step
    for name, value in WEIGHTS.items():
        assert np.array_equal(pulled[name], value + np.float32(step)), (name, step)
    return step


def shown_group(server: ServerProcess) -> dict:
    done = subprocess.run(
        [EMACTL, "--server", server.address, "--json", "group"], capture_output=True, text=True
    )
    return json.loads(done.stdout)


def test_a_killed_server_takes_the_model_back_to_its_newest_checkpoint(servers):
    addresses = ",".join(server.address for server in servers)
    with ema_client.Client(addresses, timeout_s=60) as client:
        client.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        step = 0
        for server in servers:  # The home, and the other one.
            push(client, range(step + 1, step + 4))
            client.create_checkpoint("m")
            push(client, range(step + 4, step + 6))
            port = server.port
            server.kill()
            server.start(port=port)
            assert pulled_step(client) == step + 3
            step += 3
        push(client, range(step + 1, step + 3))
        assert pulled_step(client) == step + 2
        shown = shown_group(servers[0])
        assert shown["problems"] == [] and shown["registry"]["error"] == ""
        client.delete_model("m")


def test_a_stopped_server_leaves_at_once(servers):
    first, second = servers
    assert second.stop() == 0, second.log()

    def names() -> list[str]:
        return [member["name"] for member in shown_group(first)["members"]]

    wait_for(lambda: names() == ["ema-0"], lambda: f"{names()}")
