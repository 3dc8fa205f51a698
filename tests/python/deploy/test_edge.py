# SPDX-License-Identifier: Apache-2.0
"""The proxy of deploy/edge, by HAProxy itself: clients work through it, and HTTP/2 floods do not reach the server."""

from __future__ import annotations

import contextlib
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
import torch
from edge import TOKEN, Edge, Pair, find_haproxy, resident_bytes
from http2_flood import KINDS
from testing import SUPPORT, started, wait_for

pytestmark = pytest.mark.skipif(
    find_haproxy() is None, reason="no haproxy: deploy/setup.sh --all installs it"
)
FLOOD = SUPPORT / "http2_flood.py"
MIB = 1 << 20


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Edge]:
    with Edge(tmp_path_factory.mktemp("edge")) as running:
        yield running


@contextlib.contextmanager
def flood(edge: Edge, kind: str, source: str, connections: int = 4) -> Iterator[None]:
    """A flood in a process of its own, from an address of its own, for as long as the body takes."""
    command = [sys.executable, FLOOD, kind, edge.address, "--tls", "--source", source]
    command += ["--connections", str(connections), "--seconds", "600"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "flooding\n"
            yield
            assert process.poll() is None, "the flood ended by itself"
        finally:
            process.kill()


def test_a_trainer_and_an_evaluator_work_through_the_edge(edge, monkeypatch):
    monkeypatch.setenv("EMA_TLS_CA", str(edge.ca_file))
    monkeypatch.setenv("EMA_TOKEN", TOKEN)
    url = f"emas://{edge.address}/net"
    net = torch.nn.Linear(300, 200)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ema = ema_client.attach(net, optimizer, url, half_life="2ba")
    for _ in range(5):
        net(torch.ones(1, 300)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    ema.close()
    assert ema.stats.skipped == 0
    pulled = ema_client.pull(url, track="ema")
    assert pulled.version.step == 5
    with edge.client() as client:
        watch = client.watch("net", after=0, timeout_s=20)
        assert [next(watch).step for _ in range(5)] == [1, 2, 3, 4, 5]
    with edge.direct_client() as client:
        direct = client.pull("net", track="ema")
    assert torch.equal(torch.as_tensor(direct["weight"]), torch.as_tensor(pulled["weight"]))


def test_the_server_checks_the_token(edge):
    with edge.client(token="wrong-0123456789abcdef") as client:
        with pytest.raises(ema_client.EmaError, match="token"):
            client.models()


def call(edge: Edge, path: str, metadata: tuple[tuple[str, str], ...] = ()):
    """The error of a call by another gRPC than ours."""
    grpc = pytest.importorskip("grpc")
    credentials = grpc.ssl_channel_credentials(edge.ca_file.read_bytes())
    with grpc.secure_channel(edge.address, credentials) as channel:
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(path)(b"", timeout=20, metadata=metadata)
    return raised.value.code().name, raised.value.details()


@pytest.mark.parametrize(
    "path", ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/metrics", "/"]
)
def test_other_paths_are_refused(edge, path):
    assert call(edge, path)[0] == "UNIMPLEMENTED"


def test_large_headers_are_refused(edge):
    code, details = call(edge, "/ema.v1.EmaService/ListModels", (("x-large", "y" * 5000),))
    assert (code, details) == ("RESOURCE_EXHAUSTED", "edge: more than 4 KiB of headers")


def test_a_health_check_passes_without_a_token(edge):
    grpc = pytest.importorskip("grpc")
    credentials = grpc.ssl_channel_credentials(edge.ca_file.read_bytes())
    with grpc.secure_channel(edge.address, credentials) as channel:
        assert channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=20) == b"\x08\x01"


def connect(edge: Edge, source: str) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=str(edge.ca_file))
    context.set_alpn_protocols(["h2"])
    host, port = edge.address.split(":")
    plain = socket.create_connection((host, int(port)), 5, (source, 0))
    return context.wrap_socket(plain, server_hostname=host)


def is_refused(edge: Edge, source: str) -> bool:
    try:
        connect(edge, source).close()
    except OSError:
        return True
    return False


def test_an_address_has_64_connections(edge):
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(connect(edge, "127.0.2.1"))
        assert is_refused(edge, "127.0.2.1")
        assert not is_refused(edge, "127.0.2.2")


def test_a_connection_without_a_whole_request_is_closed(edge):
    with connect(edge, "127.0.2.3") as slow:
        slow.settimeout(20)
        slow.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        # The start of a HEADERS frame.
        slow.sendall(b"\x00\x00\x40\x01\x04\x00\x00\x00\x01\x83")
        began = time.monotonic()
        while slow.recv(4096):
            pass
        assert time.monotonic() - began < 15


def test_resets_get_their_address_refused(edge):
    with flood(edge, "resets", "127.0.2.4"):
        wait_for(lambda: is_refused(edge, "127.0.2.4"), "the address of the flood is refused")
        assert not is_refused(edge, "127.0.2.5")


def test_clients_show_a_certificate_and_the_server_is_reached_over_tls(tmp_path):
    with Edge(tmp_path, all_options=True) as edge:
        own = ema_client.Tls(
            ca_file=str(edge.ca_file),
            certificate_file=str(edge.ca_file),
            key_file=str(edge.key_file),
        )
        with edge.client(tls=own) as client:
            assert client.models() == ()
        with edge.client(timeout_s=3) as client:
            with pytest.raises(ema_client.EmaError):
                client.models()


PULLS = """
import sys, ema_client
tls = ema_client.Tls(ca_file=sys.argv[2])
with ema_client.Client(sys.argv[1], tls=tls, token=sys.argv[3], same_host_lane=False) as client:
    while True:
        client.pull("stalled", track="ema", framework="numpy")
        print("pulled", flush=True)
"""


def test_a_stopped_reader_does_not_stall_another_client(edge):
    weights = {"w": np.ones(16_000_000, np.float32)}
    url = f"emas://{edge.address}"
    command = [sys.executable, "-c", PULLS, url, edge.ca_file, TOKEN]
    with edge.client(timeout_s=25) as client:
        client.create_model("stalled", weights, tracks={"ema": "2ba"})
        with client.open_run("stalled") as run:
            run.push(step=1, weights=weights)
        with started(command, stdout=subprocess.PIPE, text=True) as (reader,):
            assert reader.stdout.readline() == "pulled\n"
            reader.send_signal(signal.SIGSTOP)
            # Below the server's --stream-timeout, which would end the pull of the stopped reader.
            for _ in range(3):
                assert client.pull("stalled", track="ema").version.step == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_pair_works_and_memory_is_bounded_while_every_flood_runs(tmp_path):
    with Edge(tmp_path) as edge, edge.client() as trainer, edge.client() as evaluator:
        pair = Pair(trainer, evaluator, 64)
        with pair:
            time.sleep(5)
        pids = {"server": edge.server.pid, "edge": edge.pid}
        before = {name: resident_bytes(pid) for name, pid in pids.items()}
        for number, kind in enumerate(KINDS):
            with flood(edge, kind, f"127.0.1.{number + 1}"), pair:
                time.sleep(3)
                wait_for(lambda: pair.pushes >= 2 and pair.pulls >= 2, f"the pair works: {kind}")
        grown = {name: resident_bytes(pids[name]) - size for name, size in before.items()}
        pair.close()
        # Without the edge, 50,000 resets alone grow the server by about 400 MiB.
        assert grown["server"] < 150 * MIB and grown["edge"] < 150 * MIB, grown
        assert edge.server.is_running()
