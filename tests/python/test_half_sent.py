# SPDX-License-Identifier: Apache-2.0
"""Requests that never end take a bounded amount of memory, and none of callers who may not call."""

from __future__ import annotations

import contextlib
import pathlib
import re
from collections.abc import Iterator

import ema_client
import pytest
from half_sent import HalfSender
from http_pages import LISTEN, scrape, value, wait_for
from server_process import ServerProcess

ADMIN = "admin-51e3a0b2c7d84f60"
EMA = "/ema.v1.EmaService/"
CHECK = "/grpc.health.v1.Health/Check"
MIB = 1 << 20


def methods() -> list[str]:
    proto = pathlib.Path(__file__).parents[2] / "proto/ema/v1/ema_service.proto"
    return re.findall(r"^  rpc (\w+)\(", proto.read_text(), re.MULTILINE)


def resident_bytes(server: ServerProcess) -> int:
    status = pathlib.Path(f"/proc/{server.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) << 10


@contextlib.contextmanager
def half_sender(server: ServerProcess, token: str = "") -> Iterator[HalfSender]:
    with contextlib.closing(HalfSender(server.port, token=token)) as sender:
        yield sender


@pytest.fixture
def server(tmp_path: pathlib.Path) -> Iterator[ServerProcess]:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"admin {ADMIN}\n")
    flags = ["--auth-tokens", str(tokens), "--max-arriving-requests", "4"]
    with ServerProcess(tmp_path, *LISTEN, *flags) as process:
        yield process


def test_whoever_has_no_token_is_refused_before_the_message_is_there(server):
    with half_sender(server) as sender:
        for method in methods():
            stream = sender.begin(EMA + method)
            sender.advance_until_ended({stream})
        before = resident_bytes(server)
        sender.advance_until_ended({sender.begin(EMA + "GetModel") for _ in range(500)})
        assert resident_bytes(server) - before < 100 * MIB


def test_requests_that_arrive_have_so_many_places(server):
    with half_sender(server, ADMIN) as sender:
        before = resident_bytes(server)
        first = {sender.begin(EMA + method) for method in ("GetModel", "Pull", "Watch", "OpenRun")}
        wait_for(
            lambda: sender.advance(max_wait_s=0.01)
            and value(scrape(server), "ema_streams_open", kind="request") == 4,
            "they have begun",
        )
        more = {sender.begin(EMA + "GetModel") for _ in range(200)}
        sender.advance_until_ended(more)
        assert resident_bytes(server) - before < (4 * 9 + 32) * MIB
        metrics = scrape(server)
        assert value(metrics, "ema_streams_limit", kind="request") == 4
        refused = value(metrics, "ema_rejects_total", rpc="GetModel", reason="TOO_MANY_STREAMS")
        assert refused >= 196  # Four may have waited until others had stalled for long.
        assert len(first) == 4
    # The places are free again.
    with ema_client.Client(server.address, token=ADMIN, timeout_s=60) as client:
        assert not client.models()


def test_those_that_stall_are_ended(tmp_path):
    with ServerProcess(tmp_path, "--stream-timeout", "300ms") as server:
        with half_sender(server) as sender:
            sender.advance_until_ended({sender.begin(EMA + "CreateModel")})
            sender.advance_until_ended({sender.begin(CHECK)})


def test_probes_are_answered_while_others_send_half_of_one(server):
    with half_sender(server) as sender, ema_client.Client(server.address, token=ADMIN) as client:
        for _ in range(20):
            sender.begin(CHECK)
            sender.advance(max_wait_s=0.0)
        ended = sender.ended
        wait_for(
            lambda: sender.advance(max_wait_s=0.01) and len(ended) >= 12,
            "there are eight places",
        )
        assert not client.models()
