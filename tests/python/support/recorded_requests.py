# SPDX-License-Identifier: Apache-2.0
"""A valid request of every RPC, for a model that is made for them."""

from __future__ import annotations

import functools
import itertools
import secrets
import sys
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
from google_crc32c import value as crc32c
from server_process import ROOT

sys.path.insert(0, str(ROOT / "proto"))
types = grpc.protos("ema/v1/types.proto")
ema, services = grpc.protos_and_services("ema/v1/ema_service.proto")
errors = grpc.protos("ema/v1/error.proto")

SERVICE = ema.DESCRIPTOR.services_by_name["EmaService"]
SHAPE = [4, 3]
DATA = np.arange(12, dtype=np.float32).tobytes() + np.arange(2, dtype=np.int64).tobytes()

Messages = list[Any]


class AuthorizedStub:
    """The service's stub, whose calls carry a token."""

    def __init__(self, channel: Any, token: str) -> None:
        self._stub = services.EmaServiceStub(channel)
        self._metadata = (("authorization", f"Bearer {token}"),)

    def __getattr__(self, rpc: str) -> Callable[..., Any]:
        return functools.partial(getattr(self._stub, rpc), metadata=self._metadata)


def make_manifest() -> Any:
    weight = types.TensorSpec(
        name="layer.weight", dtype=types.DTYPE_FLOAT32, shape=SHAPE, aliases=["head.weight"]
    )
    count = types.TensorSpec(name="count", dtype=types.DTYPE_INT64, shape=[2], is_buffer=True)
    return types.Manifest(tensors=[weight, count])


def make_tracks() -> list[Any]:
    rule = types.TensorRule(
        pattern="layer.*", action=types.TENSOR_ACTION_AVERAGE, schedule={"half_life": "3ba"}
    )
    return [
        types.Track(name="ema", schedule={"half_life": "2ba"}, tensor_rules=[rule]),
        types.Track(name="raw", schedule={"copy": "true"}),
        types.Track(name="mean", schedule={"mean_of_last": "3", "update_interval": "1ba"}),
        types.Track(name="wide", schedule={"sigma_rel": "0.1"}, snapshot_interval="1ba"),
    ]


class Recording:
    """Makes a model with a run, a version, a checkpoint, a label and a file; then the requests that belong to it."""

    def __init__(self, stub: Any, model: str) -> None:
        self._stub = stub
        self.model = model
        self._launch_id = secrets.token_hex(8)
        self._steps = itertools.count(1)
        created = stub.CreateModel(self._create(model), timeout=60)
        self._manifest_digest = created.model.manifest_digest
        self._run = stub.OpenRun(self._open(), timeout=60)
        self._version = stub.Push(iter(self.messages("Push")), timeout=60).version
        request = ema.CreateCheckpointRequest(model=model, label="kept")
        self._checkpoint = stub.CreateCheckpoint(request, timeout=60).checkpoint
        stub.AttachFile(self.messages("AttachFile")[0], timeout=60)

    def messages(self, rpc: str) -> Messages:
        """The messages of a call that the server accepts. KeyError: the RPC has no recording."""
        recorded = RECORDINGS[rpc](self)
        return recorded if isinstance(recorded, list) else [recorded]

    def _create(self, model: str) -> Any:
        return ema.CreateModelRequest(
            model=model,
            manifest=make_manifest(),
            tracks=make_tracks(),
            max_pinned_versions=2,
            non_finite=types.NON_FINITE_POLICY_REJECT,
        )

    def _open(self) -> Any:
        layout = types.RankLayout(
            shards=[
                types.Shard(tensor_index=0, offsets=[0, 0], extents=SHAPE),
                types.Shard(tensor_index=1, offsets=[0], extents=[2]),
            ]
        )
        return ema.OpenRunRequest(
            model=self.model,
            launch_id=self._launch_id,
            world_size=1,
            layout=layout,
            manifest_digest=self._manifest_digest,
        )

    def _push(self) -> Messages:
        step = next(self._steps)
        header = ema.PushHeader(
            model=self.model,
            run_epoch=self._run.run_epoch,
            layout_digest=self._run.layout_digest,
            step=step,
            time=types.TrainingTime(batch=step, progress=0.5),
        )
        half = len(DATA) // 2 // 4 * 4
        chunks = [
            ema.PushChunk(offset=at, crc32c=crc32c(data), data=data)
            for at, data in ((0, DATA[:half]), (half, DATA[half:]))
        ]
        commit = ema.PushCommit(chunk_count=len(chunks), total_bytes=len(DATA), digest=crc32c(DATA))
        return [
            ema.PushRequest(header=header),
            *(ema.PushRequest(chunk=chunk) for chunk in chunks),
            ema.PushRequest(commit=commit),
        ]

    def _pull(self) -> Any:
        selection = types.Selection(
            tensors=["cou*"],
            slices=[types.TensorSlice(tensor="layer.weight", offsets=[1, 0], extents=[2, 3])],
            dtype=types.DTYPE_FLOAT16,
        )
        return ema.PullRequest(
            model=self.model, track="ema", version=self._version.version, selection=selection
        )

    def _query(self) -> Any:
        epoch = self._run.run_epoch
        return ema.QueryPushRequest(model=self.model, run_epoch=epoch, step=1)

    def _score(self) -> Any:
        version = self._version.version
        return ema.ReportMetricRequest(model=self.model, version=version, value=0.5)


# By RPC: its request or its messages. They are accepted in this order.
RECORDINGS: dict[str, Callable[[Recording], Any]] = {
    "CreateModel": lambda made: made._create(made.model + "-new"),
    "GetModel": lambda made: ema.GetModelRequest(model=made.model),
    "ListModels": lambda made: ema.ListModelsRequest(),
    "UpdateModel": lambda made: ema.UpdateModelRequest(
        model=made.model,
        put_tracks=[types.Track(name="more", schedule={"half_life": "5ba"})],
        remove_tracks=["none"],
        pause_tracks=["raw"],
        resume_tracks=["raw"],
    ),
    "AttachFile": lambda made: ema.AttachFileRequest(
        model=made.model, name="config.json", total_bytes=2, data=b"{}"
    ),
    "GetAttachedFile": lambda made: ema.GetAttachedFileRequest(
        model=made.model, name="config.json"
    ),
    "OpenRun": Recording._open,
    "Push": Recording._push,
    "QueryPush": Recording._query,
    "Pull": Recording._pull,
    "GetLane": lambda made: ema.GetLaneRequest(),
    "Watch": lambda made: ema.WatchRequest(model=made.model, after_version=0),
    "ListVersions": lambda made: ema.ListVersionsRequest(model=made.model),
    "GetStatistics": lambda made: ema.GetStatisticsRequest(model=made.model, tracks=["ema"]),
    "CreateCheckpoint": lambda made: ema.CreateCheckpointRequest(model=made.model, label="again"),
    "GetCheckpoint": lambda made: ema.GetCheckpointRequest(
        model=made.model, checkpoint=made._checkpoint
    ),
    "ListCheckpoints": lambda made: ema.ListCheckpointsRequest(model=made.model),
    "DeleteCheckpoint": lambda made: ema.DeleteCheckpointRequest(
        model=made.model, checkpoint="none"
    ),
    "SetLabel": lambda made: ema.SetLabelRequest(model=made.model, label="stable"),
    "ReportMetric": Recording._score,
    "Synthesize": lambda made: ema.SynthesizeRequest(
        model=made.model, name="made", sigma_rel=0.1, tracks=["wide"]
    ),
    "GetServerInfo": lambda made: ema.GetServerInfoRequest(),
    "GetGroup": lambda made: ema.GetGroupRequest(),
    "RecoverModel": lambda made: ema.RecoverModelRequest(model=made.model),
    "RebalanceModel": lambda made: ema.RebalanceModelRequest(model=made.model, without=["ema-1"]),
    "RestoreCheckpoint": lambda made: ema.RestoreCheckpointRequest(model=made.model, label="kept"),
    "DeleteModel": lambda made: ema.DeleteModelRequest(
        model=made.model + "-new", confirm_model=made.model + "-new", purge=True
    ),
    "SetLogLevel": lambda made: ema.SetLogLevelRequest(level="info"),
    "Drain": lambda made: ema.DrainRequest(),
}
