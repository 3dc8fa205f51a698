# SPDX-License-Identifier: Apache-2.0
"""Mutants of valid requests of every RPC: each gets a documented answer, and nothing else is affected.

A campaign sends 200,000 of them. Without it, a sample whose seed is printed.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("google_crc32c")
pytest.importorskip("grpc_tools")

from edge import resident_bytes
from hostile_calls import METHODS, HostileCaller, attack, delete_models
from http_pages import LISTEN, scrape, value
from recorded_requests import RECORDINGS, AuthorizedStub, Recording, ema
from server_process import ServerProcess
from testing import CAMPAIGN_SEED, IS_CAMPAIGN, sample

pytestmark = pytest.mark.framework

REQUESTS = int(os.environ.get("EMA_MUTANTS", 200_000))
SAMPLE_S = 25
CALLERS = 4
# Mutants for one model; then it may be in any state, so another one is made.
MUTANTS = 50
ROUNDS = REQUESTS // (CALLERS * MUTANTS)

# An admin of the models whose names begin so, and of no other.
LIMITED = "hostile-51e3a0b2c7d84f60"
OWNER = "owner-0d0f6f0c0b3a4a8c"
# Only an admin of all models may call these.
SERVER_RPCS = {"SetLogLevel", "Drain"}
# Only a server of a group can answer these.
GROUP_RPCS = {"GetGroup", "RecoverModel", "RebalanceModel"}

# With a small budget, so that the formula is small, too.
OPTIONS = ("--memory-bytes", "256M", "--max-push-streams", "8", "--max-pull-streams", "8")
OPTIONS += ("--max-models", "40", "--session-timeout", "10s")


class Target:
    """A server, and a model that no hostile caller may change."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self._channel = grpc.insecure_channel(server.address)
        recording = Recording(self.stub(OWNER), "sentinel")
        self._request = ema.PullRequest(model=recording.model, track="ema")
        self._sentinel = self._pull()
        metrics = scrape(server)
        self.max_bytes = sum(metrics["ema_memory_formula_bytes"].values())
        self.max_bytes += value(metrics, "ema_memory_budget_bytes")
        self.peak_bytes = 0

    def stub(self, token: str) -> Any:
        return AuthorizedStub(self._channel, token)

    def _pull(self) -> list[bytes]:
        replies = self.stub(OWNER).Pull(self._request, timeout=60)
        return [reply.SerializeToString(deterministic=True) for reply in replies]

    def check(self) -> None:
        """The server runs, its memory is within the formula, and the sentinel is as it was."""
        assert self.server.is_running(), self.server.log()
        self.peak_bytes = max(self.peak_bytes, resident_bytes(self.server.pid))
        assert self.peak_bytes <= self.max_bytes
        assert self._pull() == self._sentinel

    def close(self) -> None:
        self._channel.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("server")
    tokens = folder / "tokens"
    tokens.write_text(f"admin {LIMITED} hostile*\nadmin {OWNER}\n")
    options = (*LISTEN, *OPTIONS, "--auth-tokens", str(tokens))
    with ServerProcess(folder, *options, data_dir=folder / "data") as server:
        running = Target(server)
        yield running
        running.close()
        assert server.is_running(), server.log()
        assert server.stop() == 0, server.log()


def test_every_rpc_is_recorded():
    assert set(RECORDINGS) == set(METHODS)


def test_recorded_requests_are_accepted(target):
    """So a mutant gets as far as its change lets it."""
    recording = Recording(target.stub(LIMITED), "hostile-recorded")
    with HostileCaller(target.server.address, LIMITED) as caller:
        for rpc in RECORDINGS:
            messages = [message.SerializeToString() for message in recording.messages(rpc)]
            if rpc in SERVER_RPCS:
                assert caller.call(rpc, messages).code == "PERMISSION_DENIED"
                continue
            answer = caller.call(rpc, messages)
            expected = "FAILED_PRECONDITION" if rpc in GROUP_RPCS else "OK"
            assert answer.code == expected, f"{rpc}: {answer}"
    delete_models(target.stub(LIMITED), recording.model)


def attack_once(target: Target, number: int) -> tuple[Counter[str], dict[str, str]]:
    seed = f"{CAMPAIGN_SEED}-{number}"
    prefix = f"hostile-{number % CALLERS}-"
    return attack(target.server.address, LIMITED, OWNER, prefix=prefix, seed=seed, count=MUTANTS)


@pytest.mark.campaign
@pytest.mark.timeout(600 + (REQUESTS // 4 if IS_CAMPAIGN else 0))
def test_mutants_get_documented_answers(target):
    codes: Counter[str] = Counter()
    faults: dict[str, str] = {}
    with concurrent.futures.ThreadPoolExecutor(CALLERS) as pool:
        for round_number in sample(range(ROUNDS), SAMPLE_S):
            numbers = [round_number * CALLERS + caller for caller in range(CALLERS)]
            for part, found in pool.map(functools.partial(attack_once, target), numbers):
                codes += part
                faults = found | faults
            target.check()
    print(f"{codes.total()} requests: {dict(codes)}")
    print(f"{target.peak_bytes >> 20} MiB at most; the formula: {target.max_bytes / 2**20:.0f} MiB")
    assert not faults, "\n".join(f"{fault}: {example}" for fault, example in faults.items())
    # A test whose requests are all rejected at the first look would show nothing.
    assert {name.split()[1] for name in codes} >= {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
