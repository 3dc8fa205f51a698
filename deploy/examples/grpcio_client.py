# SPDX-License-Identifier: Apache-2.0
"""Pushes two steps and pulls the average, with grpcio and the .proto alone: what a client in any language does.

The stubs are made at run time; other languages run protoc on proto/ema/v1/ema_service.proto.

Usage: grpcio_client.py host:50051 MODEL
"""

from __future__ import annotations

import pathlib
import secrets
import sys
from collections.abc import Iterator

import google_crc32c
import grpc
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "proto"))
types = grpc.protos("ema/v1/types.proto")
ema, services = grpc.protos_and_services("ema/v1/ema_service.proto")

CHUNK_BYTES = 1 << 20
SHAPES = {"weight": (600, 700), "bias": (700,)}  # All float32.


def weights_at(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


def push_messages(model: str, run, step: int, data: bytes) -> Iterator:
    """Header, chunks, commit: without the last one nothing is applied, however the stream ends."""
    header = ema.PushHeader(model=model, run_epoch=run.run_epoch, layout_digest=run.layout_digest)
    header.step = header.time.batch = step
    yield ema.PushRequest(header=header)
    starts = range(0, len(data), CHUNK_BYTES)
    for start in starts:
        part = data[start : start + CHUNK_BYTES]
        chunk = ema.PushChunk(offset=start, crc32c=google_crc32c.value(part), data=part)
        yield ema.PushRequest(chunk=chunk)
    digest = google_crc32c.value(data)
    commit = ema.PushCommit(chunk_count=len(starts), total_bytes=len(data), digest=digest)
    yield ema.PushRequest(commit=commit)


def pull(stub, model: str, track: str) -> dict[str, np.ndarray]:
    header, trailer, data = None, None, bytearray()
    for message in stub.Pull(ema.PullRequest(model=model, track=track)):
        if message.HasField("header"):
            header = message.header
        elif message.HasField("chunk"):
            assert message.chunk.crc32c == google_crc32c.value(message.chunk.data)
            data += message.chunk.data  # They come in order.
        else:
            trailer = message.trailer
    # Without a trailer the pull is not complete.
    assert trailer is not None and trailer.digest == google_crc32c.value(bytes(data))
    result = {}
    for tensor in header.tensors:
        flat = np.frombuffer(data, np.float32, tensor.length_bytes // 4, tensor.offset)
        result[tensor.spec.name] = flat.reshape(tensor.spec.shape)
    return result


def main(address: str, model: str) -> None:
    specs = [
        types.TensorSpec(name=name, dtype=types.DTYPE_FLOAT32, shape=shape)
        for name, shape in SHAPES.items()
    ]
    shards = [
        types.Shard(tensor_index=index, offsets=[0] * len(spec.shape), extents=spec.shape)
        for index, spec in enumerate(specs)
    ]
    tracks = [types.Track(name="ema", schedule={"half_life": "1ba"})]
    with grpc.insecure_channel(address) as channel:
        stub = services.EmaServiceStub(channel)
        manifest = types.Manifest(tensors=specs)
        stub.DeleteModel(ema.DeleteModelRequest(model=model, confirm_model=model))
        made = stub.CreateModel(
            ema.CreateModelRequest(model=model, manifest=manifest, tracks=tracks)
        )
        opening = ema.OpenRunRequest(model=model, launch_id=secrets.token_hex(16), world_size=1)
        opening.layout.shards.extend(shards)
        opening.manifest_digest = made.model.manifest_digest
        run = stub.OpenRun(opening)
        for step in (1, 2):
            data = b"".join(array.tobytes() for array in weights_at(step).values())
            reply = stub.Push(push_messages(model, run, step, data))
        pulled = pull(stub, model, "ema")
    first, second = weights_at(1), weights_at(2)  # One half-life apart.
    for name in SHAPES:
        expected = first[name] + np.float32(0.5) * (second[name] - first[name])
        assert np.array_equal(pulled[name], expected), name
    print(f"version {reply.version.version}, step {reply.applied_step}: the average is right")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
