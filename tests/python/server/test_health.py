# SPDX-License-Identifier: Apache-2.0
"""The health check that probes and load balancers use, asked by another gRPC than ours."""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import threading

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, scrape, value
from server_process import ServerProcess
from testing import EMACTL, SERVING, check_health, wait_for

grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")


@pytest.mark.one_server("grpcio expects one address")
@pytest.mark.parametrize("service", ["", "ema.v1.EmaService", "checkpoints"])
def test_the_server_and_its_services_are_serving(server, service):
    assert check_health(server.address, service) == SERVING


@pytest.mark.one_server("grpcio expects one address")
@pytest.mark.parametrize("service", ["ema.v1.Nothing", "ema.v1", "grpc.health.v1.Health"])
def test_an_unknown_service_is_not_found(server, service):
    with pytest.raises(grpc.RpcError) as error:
        check_health(server.address, service)
    assert error.value.code() == grpc.StatusCode.NOT_FOUND


def test_without_a_data_directory_there_are_no_checkpoints(tmp_path):
    with ServerProcess(tmp_path) as server:
        assert check_health(server.address, "") == SERVING
        with pytest.raises(grpc.RpcError) as error:
            check_health(server.address, "checkpoints")
        assert error.value.code() == grpc.StatusCode.NOT_FOUND


def emactl_health(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [EMACTL, "health", "--server", address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("service", ["", "ema.v1.EmaService", "checkpoints"])
def test_emactl_says_that_it_is_serving(server, service):
    asked = emactl_health(server.address, "--service", service)
    assert (asked.returncode, asked.stdout, asked.stderr) == (0, "SERVING\n", "")
    asked = emactl_health(server.address, "--service", service, "--json")
    assert asked.returncode == 0
    assert json.loads(asked.stdout) == {"service": service, "status": "SERVING"}


def test_emactl_fails_with_1_and_nothing_else(server):
    assert emactl_health(server.address, "--service", "ema.v1.Nothing").returncode == 1
    nobody = emactl_health("127.0.0.1:1")
    assert nobody.returncode == 1 and "127.0.0.1:1" in nobody.stderr
    nobody = emactl_health("127.0.0.1:1", "--json")
    assert json.loads(nobody.stderr)["error"]["code"] == "UNAVAILABLE"


def test_emactl_asks_where_its_environment_says(server):
    environment = os.environ | {"EMA_SERVER": server.address}
    asked = subprocess.run([EMACTL, "health"], capture_output=True, env=environment, timeout=60)
    assert asked.returncode == 0, asked.stderr


def test_emactl_asks_through_a_unix_socket(tmp_path):
    path = f"unix:{tmp_path}/ema.sock"
    with ServerProcess(tmp_path, "--listen", path):
        assert emactl_health(path).returncode == 0


@pytest.mark.one_server("grpcio expects one address")
def test_nobody_can_use_up_the_probes_of_their_address(server):
    """Trainers on the host's network have the kubelet's address."""
    over = threading.Event()
    answered = [0, 0]

    def ask_again_and_again(prober: int) -> None:
        with grpc.insecure_channel(server.address) as channel:
            check = channel.unary_unary("/grpc.health.v1.Health/Check")
            while not over.is_set():
                assert check(b"", timeout=60) == SERVING
                answered[prober] += 1

    with concurrent.futures.ThreadPoolExecutor() as threads:
        probers = [threads.submit(ask_again_and_again, prober) for prober in (0, 1)]
        try:
            for _ in range(15):
                asked = emactl_health(server.address)
                assert (asked.returncode, asked.stderr) == (0, "")
        finally:
            over.set()
        for prober in probers:
            prober.result()
    assert min(answered) > 15


def test_emactl_says_that_a_draining_server_is_not_serving(tmp_path):
    weights = {"w": np.zeros(4, np.float32)}
    with ServerProcess(tmp_path, *LISTEN, "--drain-grace", "60s") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            # The drain waits for a step that one of its two ranks has begun.
            runs = [client.open_run("m", launch_id="x", rank=r, world_size=2) for r in (0, 1)]
            pushes = [runs[0].start_push(step=1, weights=weights)]
            wait_for(
                lambda: value(scrape(server), "ema_sessions_open", model="m") == 1,
                "the step is open",
            )
            os.kill(server.pid, signal.SIGTERM)
            while (asked := emactl_health(server.address)).returncode == 0:
                assert asked.stdout == "SERVING\n"
            assert (asked.returncode, asked.stdout) == (1, "NOT_SERVING\n")
            pushes.append(runs[1].start_push(step=1, weights=weights))
            assert [push.wait().step for push in pushes] == [1, 1]
