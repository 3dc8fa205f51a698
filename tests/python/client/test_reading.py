# SPDX-License-Identifier: Apache-2.0
"""Parts of a track, casts, and pulls of only what has changed; by both lanes."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
import torch
from testing import assert_same_bits, numpy_of, random_weights

# With blocks of its own, so that it is sent by itself.
LARGE = 700_000
RARELY = {"half_life": "1000ba", "update_interval": "1000ba"}


@pytest.fixture(params=["shared memory", "grpc"])
def lane(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(server, lane: str) -> Iterator[ema_client.Client]:
    with ema_client.Client(server.address, timeout_s=30, same_host_lane=lane != "grpc") as result:
        yield result


@pytest.fixture
def pushed(client, model, rng):
    """What was pushed to a model with two large tensors and many small ones."""
    weights = random_weights(rng)
    weights["body"] = rng.standard_normal((LARGE // 7, 7)).astype(np.float32)
    weights["tail"] = rng.standard_normal(LARGE).astype(np.float32)
    client.create_model(
        model,
        weights,
        tracks={"ema": {"half_life": "10ba", "tensor_rules": {"tail": RARELY}}, "raw": "copy"},
    )
    with client.open_run(model) as run:
        pending = run.start_push(step=1, weights=weights)
        pending.wait()
    return weights, pending


def test_says_which_lane_was_taken(client, model, pushed, lane):
    _, pending = pushed
    assert pending.stats.lane == lane
    assert client.pull(model, track="ema").lane == lane


def test_some_tensors(client, model, pushed):
    weights, _ = pushed
    pulled = client.pull(model, track="raw", tensors=["conv.*", "count"], framework="numpy")
    assert list(pulled) == ["conv.weight", "conv.bias", "count"]
    assert_same_bits({name: weights[name] for name in pulled}, pulled)
    whole = client.pull(model, track="raw", tensors=["body"], framework="numpy")
    assert_same_bits({"body": weights["body"]}, whole)
    assert whole.received_bytes == weights["body"].nbytes


def test_boxes(client, model, pushed):
    weights, _ = pushed
    boxes = [
        ema_client.Shard("body", (1000, 2), (50_000, 3)),
        ema_client.Shard("conv.weight", (1, 0, 1, 0), (5, 2, 2, 3)),
    ]
    pulled = client.pull(model, track="raw", tensors=["mask"], slices=boxes, framework="numpy")
    assert_same_bits(
        {
            "conv.weight": weights["conv.weight"][1:6, :2, 1:, :],
            "mask": weights["mask"],
            "body": weights["body"][1000:51_000, 2:5],
        },
        pulled,
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_casts_are_torchs(client, model, pushed, dtype):
    weights, _ = pushed
    pulled = client.pull(model, track="raw", dtype=dtype, framework="torch")
    for name, value in weights.items():
        expected = torch.from_numpy(np.ascontiguousarray(value))
        if expected.is_floating_point():
            expected = expected.to(torch.float32).to(getattr(torch, dtype))
        assert pulled[name].dtype == expected.dtype, name
        assert torch.equal(pulled[name], expected.reshape(pulled[name].shape)), name


def test_refresh_fetches_what_has_changed(client, model, pushed):
    weights, _ = pushed
    kept = client.pull(model, track="ema", dtype="bfloat16", framework="torch")
    tensors = dict(kept)
    assert not client.refresh(kept)
    with client.open_run(model) as run:
        version = run.push(
            step=2, weights={name: (2 * w).astype(w.dtype) for name, w in weights.items()}
        )
    assert client.refresh(kept)
    assert kept.version.number == version.number
    assert all(kept[name] is tensor for name, tensor in tensors.items())
    fresh = client.pull(model, track="ema", dtype="bfloat16", framework="torch")
    assert_same_bits(numpy_of(fresh), numpy_of(kept))
    assert not client.refresh(kept)
    # The tail is due every thousandth step.
    assert kept.received_bytes < fresh.received_bytes - LARGE


def test_refresh_over_many_versions(client, model, pushed, rng):
    weights, _ = pushed
    kept = client.pull(model, track="ema", tensors=["body", "conv.*"], framework="numpy")
    with client.open_run(model) as run:
        for step in range(2, 9):
            for name, value in weights.items():
                if value.dtype == np.float32:
                    weights[name] = rng.standard_normal(value.shape).astype(np.float32)
            run.push(step=step, weights=weights)
            if step % 3 == 0:
                assert client.refresh(kept)
    assert client.refresh(kept)
    fresh = client.pull(model, track="ema", tensors=["body", "conv.*"], framework="numpy")
    assert_same_bits(fresh, kept)
    assert kept.version == fresh.version


def test_what_cannot_be_refreshed(client, model, pushed):
    weights, _ = pushed
    out = {name: np.zeros_like(value) for name, value in weights.items()}
    written = client.pull(model, track="raw", out=out)
    copied = copy.deepcopy(client.pull(model, track="raw"))
    for other in (written, copied):
        with pytest.raises(ema_client.InvalidArgumentError, match="memory of one pull"):
            client.refresh(other)
    kept = client.pull(model, track="raw")
    client.delete_model(model)
    with pytest.raises(ema_client.NotFoundError):
        client.refresh(kept)
    client.create_model(model, {"other": np.zeros(3, np.float32)}, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights={"other": np.zeros(3, np.float32)})
    with pytest.raises(ema_client.FailedPreconditionError, match="pull anew"):
        client.refresh(kept)


def test_bad_selections(client, model, pushed):
    with pytest.raises(ema_client.InvalidArgumentError, match='nearest name is "conv.bias"'):
        client.pull(model, track="raw", tensors=["conv.bais"])
    with pytest.raises(ema_client.InvalidArgumentError, match=r"slices: .*is not inside bool\[9\]"):
        client.pull(model, track="raw", slices=[ema_client.Shard("mask", (0,), (10,))])
    with pytest.raises(ema_client.InvalidArgumentError, match="int8"):
        client.pull(model, track="raw", dtype="int8")


def test_weights_are_sent_as_bfloat16_on_request(client, model, rng, lane):
    weights = random_weights(rng)
    weights["body"] = rng.standard_normal((LARGE // 7, 7)).astype(np.float32)
    client.create_model(model, weights, tracks={"ema": "1ba", "raw": "copy"})
    with client.open_run(model, wire_dtype="bfloat16") as run:
        pending = run.start_push(step=1, weights=weights)
        version = pending.wait()
    assert version.wire_dtype == "bfloat16"
    assert client.model(model).latest.wire_dtype == "bfloat16"
    assert pending.stats.lane == lane
    floats = sum(value.nbytes for value in weights.values() if value.dtype == np.float32)
    others = sum(value.nbytes for value in weights.values()) - floats
    assert pending.stats.total_bytes == floats // 2 + others
    pulled = client.pull(model, track="raw", framework="torch")
    for name, value in weights.items():
        expected = torch.from_numpy(np.ascontiguousarray(value)).reshape(value.shape)
        if expected.dtype == torch.float32:
            expected = expected.to(torch.bfloat16).to(torch.float32)
        assert torch.equal(pulled[name], expected), name
    with pytest.raises(ema_client.InvalidArgumentError, match="bfloat16"):
        client.open_run(model, wire_dtype="float8")
