# SPDX-License-Identifier: Apache-2.0
"""pull(out=...): arrays of the caller's that are written in place, or not at all."""

from __future__ import annotations

import ema_client
import numpy as np
import pytest
import torch

WEIGHTS = {"a": np.arange(4, dtype=np.float32), "b": np.arange(6, dtype=np.float32).reshape(2, 3)}


@pytest.fixture
def pushed(client, model):
    client.create_model(model, WEIGHTS, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=WEIGHTS)


def read_only() -> np.ndarray:
    array = np.ones((2, 3), np.float32)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "b",
    [np.ones((2, 3), np.int32), np.ones((3, 2), np.float32), read_only(), torch.ones(2, 3), None],
    ids=["dtype", "shape", "read-only", "framework", "name"],
)
def test_nothing_is_written_if_one_does_not_fit(client, model, pushed, b):
    out = {"a": np.ones(4, np.float32), "b": b}
    if b is None:
        del out["b"]
    with pytest.raises(ema_client.InvalidArgumentError, match="^out"):
        client.pull(model, track="raw", out=out)
    assert (out["a"] == 1).all()


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_values_are_cast(client, model, pushed, make, dtype):
    dtype = getattr(np if make is np.ones else torch, dtype)
    out = {name: make(value.shape, dtype=dtype) for name, value in WEIGHTS.items()}
    b = out["b"]
    pulled = client.pull(model, track="raw", out=out)
    assert pulled["b"] is b
    assert b.dtype == dtype
    assert np.array_equal(np.asarray(b), WEIGHTS["b"])


class Subclass(torch.Tensor):
    pass


def test_a_subclass_of_tensor_is_one(client, model, pushed):
    out = {name: torch.ones(value.shape).as_subclass(Subclass) for name, value in WEIGHTS.items()}
    client.pull(model, track="raw", out=out)
    assert np.array_equal(out["b"].numpy(), WEIGHTS["b"])


@pytest.mark.parametrize("kind", ["parameters", "their memory", "copies"])
def test_weights_that_a_push_reads_are_waited_for(server, client, model, monkeypatch, kind):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        optimizer.step()
        ema.wait_pushed()
        waits = []
        monkeypatch.setattr(ema, "wait_released", lambda: waits.append(True))
        out = {name: tensor.detach() for name, tensor in module.named_parameters()}
        if kind == "their memory":
            out = {name: tensor.numpy() for name, tensor in out.items()}
        elif kind == "copies":
            out = {name: tensor.clone() for name, tensor in out.items()}
        client.pull(model, track="raw", out=out)
    assert waits == ([] if kind == "copies" else [True])
