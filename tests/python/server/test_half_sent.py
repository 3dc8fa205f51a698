# SPDX-License-Identifier: Apache-2.0
"""Requests that never end, and readers that accept nothing, take a bounded amount of memory."""

from __future__ import annotations

import concurrent.futures
import contextlib
import pathlib
import re
import time
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from half_sent import HalfSender
from http_pages import LISTEN, get_status, scrape, url_of, value
from server_process import ServerProcess
from testing import SERVING, check_health, wait_for

ADMIN = "admin-51e3a0b2c7d84f60"
EMA = "/ema.v1.EmaService/"
CHECK = "/grpc.health.v1.Health/Check"
MIB = 1 << 20


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
    with ServerProcess(tmp_path, *LISTEN, "--auth-tokens", str(tokens)) as process:
        yield process


@pytest.mark.slow
def test_requests_that_never_end_take_a_bounded_memory(tmp_path):
    """Nobody knows whose they are yet, so gRPC's quota bounds them: 27 MiB a push, and 512 MiB."""
    with ServerProcess(tmp_path, *LISTEN, "--max-push-streams", "1") as server:
        before = resident_bytes(server)
        with contextlib.ExitStack() as stack:
            senders = [stack.enter_context(half_sender(server)) for _ in range(4)]
            for sender in senders:
                for _ in range(40):
                    sender.begin(EMA + "GetModel")

            def advance() -> None:
                for sender in senders:
                    sender.advance(max_wait_s=0.01)

            def are_some_ended() -> bool:
                advance()
                return any(sender.ended for sender in senders)

            def is_bounded() -> bool:
                advance()
                return resident_bytes(server) - before < 700 * MIB

            wait_for(are_some_ended, "the quota is used up")
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                advance()
            # They would take 1.3 GiB for as long as they are there. A busy machine receives more
            # before gRPC has ended streams, and then gives that back.
            wait_for(is_bounded, "what is above the quota is given back")
        # Once they have gone, the server is as before.
        with ema_client.Client(server.address, timeout_s=60) as client:
            assert not client.models()


@pytest.mark.slow
def test_what_they_have_taken_goes_back_to_the_system(tmp_path):
    with ServerProcess(tmp_path) as server:
        before = resident_bytes(server)
        with half_sender(server) as sender:
            for _ in range(80):
                sender.begin(EMA + "GetModel")

            def is_sent() -> bool:
                sender.advance(max_wait_s=0.01)
                return resident_bytes(server) - before > 500 * MIB

            wait_for(is_sent, "they are there")
        wait_for(lambda: resident_bytes(server) - before < 300 * MIB, "it goes back")


def test_probes_are_answered_while_others_send_half_of_one(server):
    # From the prober's own address, which its trainers may have, too.
    with half_sender(server) as sender:
        for _ in range(15):
            for _ in range(12):
                sender.begin(CHECK, message_bytes=1000)
            sender.send_all()
            assert check_health(server.address, "") == SERVING
    with ema_client.Client(server.address, token=ADMIN, timeout_s=60) as client:
        assert not client.models()


def test_what_anybody_may_ask_is_no_error_of_the_server(server):
    grpc = pytest.importorskip("grpc", reason="grpcio is not installed: pip install grpcio")
    with pytest.raises(grpc.RpcError) as error:
        check_health(server.address, "<b>" + "x" * 120 + "\n")
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert "x\\n" in error.value.details()
    assert get_status(url_of(server))["problems"] == []


def test_a_watch_that_takes_nothing_ends_with_its_token(server, tmp_path):
    evaluator = "evaluator-0d0f6f0c0b3a4a8c"
    tokens = tmp_path / "tokens"

    def write(text: str) -> None:
        tokens.with_suffix(".new").write_text(text)
        tokens.with_suffix(".new").rename(tokens)

    def watches() -> float:
        return value(scrape(server), "ema_streams_open", kind="watch")

    def begin(sender: HalfSender) -> bool:
        """Calls until the server has learnt of the token."""
        sender.call(EMA + "Watch", b"\x0a\x01m")
        sender.advance(max_wait_s=0.1)
        return watches() > 0

    write(f"admin {ADMIN}\nevaluator {evaluator}\n")
    weights = {"w": np.zeros(10, np.float32)}
    with (
        ema_client.Client(server.address, token=ADMIN, timeout_s=60) as client,
        contextlib.closing(HalfSender(server.port, token=evaluator, takes=0)) as sender,
    ):
        client.create_model("m", weights, tracks={"ema": "1ba"})
        wait_for(lambda: begin(sender), "it watches")
        with client.open_run("m") as run:
            for step in (1, 2):
                run.push(step=step, weights=weights)
        write(f"admin {ADMIN}\n")
        wait_for(lambda: watches() == 0, "it has ended")


def test_slow_pulls_of_old_versions_leave_their_places_to_readers_of_new_ones(tmp_path):
    weights = {"w": np.zeros(25 * MIB // 4, np.float32)}
    limits = ["--stream-timeout", "3s", "--min-pull-bytes-per-second", "100M"]
    with (
        ServerProcess(tmp_path, *limits) as server,
        ema_client.Client(server.address, timeout_s=20) as client,
        contextlib.closing(HalfSender(server.port, takes=0)) as sender,
    ):
        client.create_model("m", weights, tracks={"raw": "copy"}, max_pinned_versions=2)
        pulls = set()

        def read(size: int) -> None:
            for stream in pulls:
                sender.take(stream, size)
            sender.advance(max_wait_s=0.1)

        with client.open_run("m") as run:
            for step in (1, 2):
                run.push(step=step, weights=weights)
                # A PullRequest: model, track, version.
                pulls.add(sender.call(EMA + "Pull", b"\x0a\x01m\x12\x03raw\x18" + bytes([step])))
                sender.send_all()
                read(1000)
            run.push(step=3, weights=weights)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            newest = threads.submit(client.pull, "m", track="raw", timeout_s=10)
            while not newest.done():
                # 2 MB/s each: they never stall, and end by themselves after a quarter of a minute.
                read(200_000)
                time.sleep(0.1)
        assert newest.result().version.step == 3
        sender.advance_until_ended({min(pulls)})  # Of the oldest version.


def test_a_reader_that_pins_all_versions_gives_one_to_another_reader(server, tmp_path):
    """Long before its pulls, which are never read, reach --stream-timeout."""
    evaluator = "evaluator-6d1a54be39a07c21"
    (tmp_path / "new").write_text(f"admin {ADMIN}\nevaluator {evaluator}\n")
    (tmp_path / "new").rename(tmp_path / "tokens")
    weights = {"w": np.zeros(4 * MIB, np.float32)}
    with (
        ema_client.Client(server.address, token=ADMIN, timeout_s=20) as client,
        contextlib.closing(HalfSender(server.port, token=evaluator, takes=0)) as sender,
    ):
        client.create_model("m", weights, tracks={"raw": "copy"}, max_pinned_versions=2)
        with client.open_run("m") as run:
            for step in (1, 2):
                run.push(step=step, weights=weights)

                def pins() -> bool:
                    """Calls until the server has learnt of the token."""
                    # A PullRequest: model, track, version.
                    pull = b"\x0a\x01m\x12\x03raw\x18" + bytes([step])
                    sender.call(EMA + "Pull", pull)
                    sender.advance(max_wait_s=0.1)
                    return value(scrape(server), "ema_streams_open", kind="pull") >= step

                wait_for(pins, f"version {step} is pinned")
            run.push(step=3, weights=weights)
        newest = client.pull("m", track="raw", timeout_s=5)
        assert newest.version.step == 3


def test_stalled_pulls_do_not_keep_the_server_from_saving(tmp_path):
    weights = {"w": np.zeros(MIB, np.float32)}
    # Without lanes all pulls are of one caller, who gets no pin from itself.
    flags = ["--save-every-commits", "3", "--same-host-lane", "off"]
    with (
        ServerProcess(tmp_path, *flags, data_dir=tmp_path / "data") as server,
        ema_client.Client(server.address, timeout_s=60) as client,
        contextlib.closing(HalfSender(server.port, takes=0)) as sender,
    ):
        client.create_model("m", weights, tracks={"raw": "copy"}, max_pinned_versions=2)
        with client.open_run("m") as run:
            for step in range(1, 13):
                run.push(step=step, weights=weights)
                if step <= 2:
                    # A PullRequest: model, track, version.
                    sender.call(EMA + "Pull", b"\x0a\x01m\x12\x03raw\x18" + bytes([step]))
                    sender.send_all()
                    sender.advance(max_wait_s=0.1)
        with pytest.raises(ema_client.ResourceExhaustedError, match="readers hold 2 of the 2"):
            client.pull("m", track="raw", timeout_s=0.5)
        wait_for(lambda: any(c.step >= 9 for c in client.checkpoints("m")), "it is saved")
        server.kill()
        server.start()
        with ema_client.Client(server.address, timeout_s=60) as again:
            assert again.model("m").latest.step >= 9
