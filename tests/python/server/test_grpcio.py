# SPDX-License-Identifier: Apache-2.0
"""The service by another gRPC than ours, knowing nothing but its .proto: every RPC."""

from __future__ import annotations

import secrets
import sys

import numpy as np
import pytest
from examples import run_example
from server_process import ROOT, ServerProcess
from testing import wait_for

pytestmark = pytest.mark.framework

grpc = pytest.importorskip("grpc")
crc32c = pytest.importorskip("google_crc32c").value
pytest.importorskip("grpc_tools")

sys.path.insert(0, str(ROOT / "proto"))
types = grpc.protos("ema/v1/types.proto")
ema, services = grpc.protos_and_services("ema/v1/ema_service.proto")

SERVICE = ema.DESCRIPTOR.services_by_name["EmaService"]
DATA = np.arange(6, dtype=np.float32).tobytes()


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(server.address) as channel:
        yield services.EmaServiceStub(channel)


@pytest.fixture
def manifest_digest(stub, model):
    """Of a model that was just made, with a track of which snapshots are kept."""
    schedules = {
        "ema": {"half_life": "1ba"},
        "raw": {"copy": "true"},
        "wide": {"sigma_rel": "0.1"},
    }
    tracks = [types.Track(name=name, schedule=schedule) for name, schedule in schedules.items()]
    tracks[-1].snapshot_interval = "1ba"
    spec = types.TensorSpec(name="w", dtype=types.DTYPE_FLOAT32, shape=[2, 3])
    request = ema.CreateModelRequest(
        model=model, manifest=types.Manifest(tensors=[spec]), tracks=tracks
    )
    assert stub.CreateModel(request).created
    assert not stub.CreateModel(request).created
    return stub.GetModel(ema.GetModelRequest(model=model)).manifest_digest


@pytest.fixture
def run(stub, model, manifest_digest):
    layout = types.RankLayout(shards=[types.Shard(tensor_index=0, offsets=[0, 0], extents=[2, 3])])
    opened = stub.OpenRun(
        ema.OpenRunRequest(
            model=model,
            launch_id=secrets.token_hex(8),
            world_size=1,
            layout=layout,
            manifest_digest=manifest_digest,
        )
    )
    assert opened.ready
    return opened


def push_messages(model, run, step):
    yield ema.PushRequest(
        header=ema.PushHeader(
            model=model,
            run_epoch=run.run_epoch,
            layout_digest=run.layout_digest,
            step=step,
            time=types.TrainingTime(batch=step),
        )
    )
    yield ema.PushRequest(chunk=ema.PushChunk(offset=0, crc32c=crc32c(DATA), data=DATA))
    yield ema.PushRequest(
        commit=ema.PushCommit(chunk_count=1, total_bytes=len(DATA), digest=crc32c(DATA))
    )


def call_update(stub, model, run):
    updated = stub.UpdateModel(ema.UpdateModelRequest(model=model, pause_tracks=["raw"]))
    tracks = updated.pending_tracks or updated.tracks
    assert {track.name: track.paused for track in tracks}["raw"]


def call_attach(stub, model, run):
    stub.AttachFile(
        ema.AttachFileRequest(model=model, name="config.json", total_bytes=2, data=b"{}")
    )


def call_get_attached(stub, model, run):
    call_attach(stub, model, run)
    request = ema.GetAttachedFileRequest(model=model, name="config.json")
    part = stub.GetAttachedFile(request)
    assert (part.data, part.total_bytes, part.crc32c) == (b"{}", 2, crc32c(b"{}"))
    request.offset = 2
    assert stub.GetAttachedFile(request).data == b""


def call_push(stub, model, run):
    reply = stub.Push(push_messages(model, run, 2))
    assert reply.version.version == 2 and reply.applied_step == 2


def call_query(stub, model, run):
    request = ema.QueryPushRequest(model=model, run_epoch=run.run_epoch, step=1)
    reply = stub.QueryPush(request)
    assert reply.state == ema.QueryPushResponse.STATE_COMMITTED and reply.digest == crc32c(DATA)


def call_pull(stub, model, run):
    header, chunk, trailer = stub.Pull(ema.PullRequest(model=model, track="raw"))
    assert header.header.tensors[0].spec.name == "w"
    assert (chunk.chunk.data, chunk.chunk.crc32c) == (DATA, crc32c(DATA))
    assert trailer.trailer.digest == crc32c(DATA)


def call_watch(stub, model, run):
    stream = stub.Watch(ema.WatchRequest(model=model, after_version=0))
    assert next(stream).version.step == 1
    stream.cancel()


def call_list_models(stub, model, run):
    assert model in [info.name for info in stub.ListModels(ema.ListModelsRequest()).models]


def call_list_versions(stub, model, run):
    (entry,) = stub.ListVersions(ema.ListVersionsRequest(model=model)).versions
    assert entry.available and entry.version.step == 1


def call_statistics(stub, model, run):
    record = stub.GetStatistics(ema.GetStatisticsRequest(model=model, tracks=["ema"]))
    assert record.version == 1


def call_create_checkpoint(stub, model, run):
    made = stub.CreateCheckpoint(ema.CreateCheckpointRequest(model=model))
    assert made.state == ema.Checkpoint.STATE_COMPLETE
    return made.checkpoint


def call_get_checkpoint(stub, model, run):
    name = call_create_checkpoint(stub, model, run)
    request = ema.GetCheckpointRequest(model=model, checkpoint=name)
    assert stub.GetCheckpoint(request).version == 1


def call_list_checkpoints(stub, model, run):
    name = call_create_checkpoint(stub, model, run)
    listed = stub.ListCheckpoints(ema.ListCheckpointsRequest(model=model)).checkpoints
    assert name in [checkpoint.name for checkpoint in listed]


def call_delete_checkpoint(stub, model, run):
    stub.DeleteCheckpoint(ema.DeleteCheckpointRequest(model=model, checkpoint="none"))


def call_restore(stub, model, run):
    restored = stub.RestoreCheckpoint(ema.RestoreCheckpointRequest(model=model, version=1))
    assert restored.version == 2 and restored.restored_from.version == 1


def call_set_label(stub, model, run):
    label = stub.SetLabel(ema.SetLabelRequest(model=model, label="stable"))
    assert (label.name, label.version) == ("stable", 1)


def call_metric(stub, model, run):
    request = ema.ReportMetricRequest(model=model, version=1, value=0.5)
    reply = stub.ReportMetric(request)
    assert reply.moved and reply.label.name == "best"


def call_synthesize(stub, model, run):
    call_create_checkpoint(stub, model, run)
    made = stub.Synthesize(ema.SynthesizeRequest(model=model, name="made", sigma_rel=0.1))
    assert made.version.step == 1


def call_lane(stub, model, run):
    assert stub.GetLane(ema.GetLaneRequest()).protocol > 0


def call_server_info(stub, model, run):
    info = stub.GetServerInfo(ema.GetServerInfoRequest())
    assert info.version.count(".") == 2 and info.not_serving == ""
    limits = {limit.name: limit for limit in info.limits}
    assert limits["models"].in_use >= 1


def call_group(stub, model, run):
    with pytest.raises(grpc.RpcError) as error:
        stub.GetGroup(ema.GetGroupRequest())
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def call_recover(stub, model, run):
    with pytest.raises(grpc.RpcError) as error:
        stub.RecoverModel(ema.RecoverModelRequest(model=model))
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def call_rebalance(stub, model, run):
    with pytest.raises(grpc.RpcError) as error:
        stub.RebalanceModel(ema.RebalanceModelRequest(model=model))
    assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION


def call_log_level(stub, model, run):
    reply = stub.SetLogLevel(ema.SetLogLevelRequest(level="info"))
    assert (reply.old_level, reply.level) == ("info", "info")


def call_drain(stub, model, run):
    """Of a server of its own: test_a_drain_by_call."""


def call_delete(stub, model, run):
    stub.DeleteModel(ema.DeleteModelRequest(model=model, confirm_model=model))
    with pytest.raises(grpc.RpcError) as error:
        stub.GetModel(ema.GetModelRequest(model=model))
    assert error.value.code() == grpc.StatusCode.NOT_FOUND
    assert dict(error.value.trailing_metadata())["ema-error-detail-bin"]


def called_already(stub, model, run):
    """By the fixtures."""


CALLS = {
    "CreateModel": called_already,
    "GetModel": called_already,
    "OpenRun": called_already,
    "ListModels": call_list_models,
    "UpdateModel": call_update,
    "DeleteModel": call_delete,
    "AttachFile": call_attach,
    "GetAttachedFile": call_get_attached,
    "Push": call_push,
    "QueryPush": call_query,
    "Pull": call_pull,
    "GetLane": call_lane,
    "Watch": call_watch,
    "ListVersions": call_list_versions,
    "GetStatistics": call_statistics,
    "CreateCheckpoint": call_create_checkpoint,
    "GetCheckpoint": call_get_checkpoint,
    "ListCheckpoints": call_list_checkpoints,
    "DeleteCheckpoint": call_delete_checkpoint,
    "RestoreCheckpoint": call_restore,
    "SetLabel": call_set_label,
    "ReportMetric": call_metric,
    "Synthesize": call_synthesize,
    "GetServerInfo": call_server_info,
    "GetGroup": call_group,
    "RecoverModel": call_recover,
    "RebalanceModel": call_rebalance,
    "SetLogLevel": call_log_level,
    "Drain": call_drain,
}


def test_the_table_has_every_rpc():
    assert set(CALLS) == {method.name for method in SERVICE.methods}


@pytest.mark.parametrize("method", CALLS)
def test_each_rpc(stub, model, run, method):
    assert stub.Push(push_messages(model, run, 1)).version.version == 1
    CALLS[method](stub, model, run)


def test_a_drain_by_call(tmp_path):
    with ServerProcess(tmp_path, "--drain-grace", "90s") as server:
        with grpc.insecure_channel(server.address) as channel:
            reply = services.EmaServiceStub(channel).Drain(ema.DrainRequest())
            assert reply.began and reply.grace_seconds == 90
        # A signal now would end it at once.
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0, server.log()


def test_the_example(server, model):
    assert "the average is right" in run_example("grpcio_client.py", server.address, model)
    assert "ema_client" not in (ROOT / "deploy/examples/grpcio_client.py").read_text()
