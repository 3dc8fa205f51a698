# SPDX-License-Identifier: Apache-2.0
"""Every limit of a real server: one more is refused with a code, a reason, perhaps a hint when to come back; and metrics say all that."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, scrape, value
from server_process import ROOT, ServerProcess
from testing import wait_for

grpc = pytest.importorskip("grpc")
pytest.importorskip("grpc_tools")
pytestmark = pytest.mark.framework

sys.path.insert(0, str(ROOT / "proto"))
types = grpc.protos("ema/v1/types.proto")
ema, services = grpc.protos_and_services("ema/v1/ema_service.proto")
errors = grpc.protos("ema/v1/error.proto")

ELEMENTS = 1 << 20


class Caller:
    """Fills a server up, and asks for one more."""

    def __init__(self, server: ServerProcess, stack: contextlib.ExitStack) -> None:
        self.address = server.address
        self._stack = stack
        self.stub = self.connect()

    def connect(self) -> Any:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.insecure_channel(self.address, options)
        self._stack.enter_context(channel)
        return services.EmaServiceStub(channel)

    def create(self, model: str) -> Any:
        schedule = {"copy": "true"}
        spec = types.TensorSpec(name="w", dtype=types.DTYPE_FLOAT32, shape=[ELEMENTS])
        return self.stub.CreateModel(
            ema.CreateModelRequest(
                model=model,
                manifest=types.Manifest(tensors=[spec]),
                tracks=[types.Track(name="raw", schedule=schedule)],
            )
        ).model

    def begin_push(self, model: str, *, step: int = 1) -> Any:
        """A push of the model's only rank whose first message has been sent, and no other."""
        digest = self.create(model).manifest_digest
        layout = types.RankLayout(
            shards=[types.Shard(tensor_index=0, offsets=[0], extents=[ELEMENTS])]
        )
        run = self.stub.OpenRun(
            ema.OpenRunRequest(
                model=model,
                launch_id=secrets.token_hex(8),
                world_size=1,
                layout=layout,
                manifest_digest=digest,
            )
        )
        header = ema.PushHeader(
            model=model,
            run_epoch=run.run_epoch,
            layout_digest=run.layout_digest,
            step=step,
            time=types.TrainingTime(batch=step),
        )
        ended = threading.Event()
        self._stack.callback(ended.set)

        def messages() -> Iterator[Any]:
            yield ema.PushRequest(header=header)
            ended.wait()

        call = self.stub.Push.future(messages())
        self._stack.callback(call.cancel)
        return call

    def watch(self, model: str) -> Any:
        call = self.stub.Watch(ema.WatchRequest(model=model))
        self._stack.callback(call.cancel)
        return call

    def pull(self, model: str) -> Any:
        call = self.stub.Pull(ema.PullRequest(model=model, track="raw"))
        self._stack.callback(call.cancel)
        return call


def two_models(caller: Caller) -> None:
    caller.create("first")
    caller.create("second")


def two_sessions(caller: Caller) -> None:
    caller.begin_push("first")
    caller.create("second")
    wait_for(lambda: in_use(caller, "sessions") == 1, "the first is open")
    caller.begin_push("second").result(timeout=60)


def two_pushes(caller: Caller) -> None:
    caller.begin_push("first")
    wait_for(lambda: in_use(caller, "push_streams") == 1, "the first is open")
    caller.begin_push("second").result(timeout=60)


def two_watches(caller: Caller) -> None:
    caller.create("first")
    caller.watch("first").initial_metadata()
    next(caller.watch("first"))


def in_use(caller: Caller, name: str) -> int:
    info = caller.stub.GetServerInfo(ema.GetServerInfoRequest())
    return next(limit.in_use for limit in info.limits if limit.name == name)


@dataclasses.dataclass(frozen=True)
class Limit:
    flags: tuple[str, ...]
    exceed: Callable[[Caller], None]
    reason: str
    rpc: str  # That is refused.
    metric: str  # Of the limit.
    limit: float
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    # False: waiting cannot help.
    has_hint: bool = True


LIMITS = {
    "models": Limit(
        flags=("--max-models", "1"),
        exceed=two_models,
        reason="TOO_MANY_MODELS",
        rpc="CreateModel",
        metric="ema_models_limit",
        limit=1,
    ),
    "bytes": Limit(
        # A model takes its 4 MiB (2 + 2 pinned) times.
        flags=("--memory-bytes", "20M"),
        exceed=two_models,
        reason="MEMORY_BUDGET",
        rpc="CreateModel",
        metric="ema_memory_budget_bytes",
        limit=20 << 20,
    ),
    "bytes of one": Limit(
        flags=("--memory-bytes", "10M"),
        exceed=two_models,
        reason="MEMORY_BUDGET",
        rpc="CreateModel",
        metric="ema_memory_budget_bytes",
        limit=10 << 20,
        has_hint=False,
    ),
    "sessions": Limit(
        flags=("--max-sessions", "1"),
        exceed=two_sessions,
        reason="TOO_MANY_SESSIONS",
        rpc="Push",
        metric="ema_sessions_limit",
        limit=1,
    ),
    "push streams": Limit(
        flags=("--max-push-streams", "1"),
        exceed=two_pushes,
        reason="TOO_MANY_STREAMS",
        rpc="Push",
        metric="ema_streams_limit",
        labels={"kind": "push"},
        limit=1,
    ),
    "watches": Limit(
        flags=("--max-watch-streams", "1"),
        exceed=two_watches,
        reason="TOO_MANY_STREAMS",
        rpc="Watch",
        metric="ema_streams_limit",
        labels={"kind": "watch"},
        limit=1,
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_one_more_is_refused(tmp_path, name):
    case = LIMITS[name]
    with ServerProcess(tmp_path, *LISTEN, *case.flags) as server, contextlib.ExitStack() as stack:
        caller = Caller(server, stack)
        before = scrape(server)
        assert value(before, case.metric, **case.labels) == case.limit
        with pytest.raises(grpc.RpcError) as refused:
            case.exceed(caller)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED, refused.value
        trailers = dict(refused.value.trailing_metadata())
        detail = errors.ErrorDetail.FromString(trailers["ema-error-detail-bin"])
        assert errors.ErrorReason.Name(detail.reason) == f"ERROR_REASON_{case.reason}"
        assert (detail.retry_delay_ms > 0) == case.has_hint
        rejects = value(scrape(server), "ema_rejects_total", rpc=case.rpc, reason=case.reason)
        assert rejects == 1


def test_a_connection_more_is_closed_and_counted(tmp_path):
    """There is no call yet that could fail with a reason."""
    with (
        ServerProcess(tmp_path, *LISTEN, "--max-connections", "1") as server,
        contextlib.ExitStack() as stack,
    ):
        caller = Caller(server, stack)
        caller.create("m")
        with pytest.raises(grpc.RpcError) as refused:
            caller.connect().ListModels(ema.ListModelsRequest(), timeout=30)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        metrics = scrape(server)
        assert value(metrics, "ema_connections_limit") == 1
        assert value(metrics, "ema_connections_refused_total", reason="limit") >= 1
        caller.create("n")


def test_a_client_without_calls_keeps_its_connection(tmp_path):
    """Nobody reads from it meanwhile: only the client's kernel answers whether it is there."""
    options = (*LISTEN, "--keepalive-time", "1s", "--keepalive-timeout", "1s")
    with (
        ServerProcess(tmp_path, *options) as server,
        ema_client.Client(server.address, same_host_lane=False) as client,
    ):
        client.models()
        time.sleep(3.5)
        assert value(scrape(server), "ema_connections_open") == 1


def test_a_pull_more_is_refused(tmp_path):
    """A reader that takes nothing keeps its place for a tenth of the stream's time-out at least."""
    with (
        ServerProcess(tmp_path, *LISTEN, "--max-pull-streams", "1") as server,
        contextlib.ExitStack() as stack,
    ):
        weights = {"w": np.zeros(32 << 20, np.float32)}
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights)
        caller = Caller(server, stack)
        next(caller.pull("m"))
        with pytest.raises(grpc.RpcError) as refused:
            next(caller.pull("m"))
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        detail = errors.ErrorDetail.FromString(
            dict(refused.value.trailing_metadata())["ema-error-detail-bin"]
        )
        assert detail.reason == errors.ERROR_REASON_TOO_MANY_STREAMS and detail.retry_delay_ms > 0
        assert value(scrape(server), "ema_streams_limit", kind="pull") == 1


def test_a_watch_keeps_nothing_of_its_request(tmp_path):
    """Of fields that nobody knows it would keep 40 MiB each, for as long as it lasts."""
    with ServerProcess(tmp_path, *LISTEN) as server, contextlib.ExitStack() as stack:
        Caller(server, stack).create("m")
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        watch = channel.unary_stream("/ema.v1.EmaService/Watch")
        unknown = b"\xf8\x01\x01" * ((7 << 20) // 3)
        before = value(scrape(server), "process_resident_memory_bytes")
        for _ in range(12):
            call = watch(ema.WatchRequest(model="m").SerializeToString() + unknown)
            stack.callback(call.cancel)
            call.initial_metadata()
        after = value(scrape(server), "process_resident_memory_bytes")
        assert after - before < 200 << 20


def test_our_client_waits_for_a_session(tmp_path):
    weights = {"w": np.ones(1000, np.float32)}
    with ServerProcess(tmp_path, *LISTEN, "--max-sessions", "1") as server:
        with ema_client.Client(server.address, timeout_s=60) as client:
            for name in ("first", "second"):
                client.create_model(name, weights, tracks={"raw": "copy"})
            runs = [
                client.open_run("first", launch_id="x", rank=rank, world_size=2) for rank in (0, 1)
            ]
            other = client.open_run("second")
            open_one = runs[0].start_push(step=1, weights=weights)
            wait_for(
                lambda: value(scrape(server), "ema_sessions_open", model="first") == 1,
                "the session is open",
            )
            waiting = other.start_push(step=1, weights=weights)
            assert not waiting.wait_done(max_wait_s=0.2)
            runs[1].push(step=1, weights=weights)
            assert open_one.wait().step == 1
            assert waiting.wait().step == 1
