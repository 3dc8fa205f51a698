# SPDX-License-Identifier: Apache-2.0
"""pull(out=...): arrays of the caller's that are written in place, or not at all."""

from __future__ import annotations

import ema_client
import numpy as np
import pytest
import torch
from ema_client._client.out import saturated
from ema_client._client.unread import wait_unread
from safetensors.torch import save_file
from testing import wait_for
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

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


UNWRITABLE = {
    "read-only": (read_only, "read-only"),
    "expanded": (lambda: torch.ones(2, 1).expand(2, 3), "at one place"),
    "expanded-numpy": (
        lambda: np.lib.stride_tricks.as_strided(np.ones(3, np.float32), (2, 3), (0, 4)),
        "at one place",
    ),
    "overlapping": (lambda: torch.ones(4).as_strided((2, 3), (1, 1)), "at one place"),
    "meta": (lambda: torch.ones(2, 3, device="meta"), "meta device"),
    "sparse": (lambda: torch.ones(2, 3).to_sparse(), "layout is torch.sparse"),
}


@pytest.mark.parametrize("what", UNWRITABLE)
def test_nothing_is_written_or_sent_if_one_cannot_be(client, model, pushed, what):
    make, problem = UNWRITABLE[what]
    b = make()
    a = np.ones(4, np.float32) if isinstance(b, np.ndarray) else torch.ones(4)
    received = []
    with pytest.raises(ema_client.InvalidArgumentError, match=f"^out: .* b: .*{problem}"):
        client.pull(model, track="raw", out={"a": a, "b": b}, on_progress=received.append)
    assert (a == 1).all()
    assert not received


def test_all_that_cannot_be_written_are_listed(client, model, pushed):
    out = {"a": torch.ones(1).expand(4), "b": torch.ones(2, 3, device="meta")}
    with pytest.raises(ema_client.InvalidArgumentError, match="a: several .* b: on the meta"):
        client.pull(model, track="raw", out=out)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_inference_tensors_are_written_in_any_mode(client, model, pushed, mode):
    with torch.inference_mode():
        out = {name: torch.ones(value.shape) for name, value in WEIGHTS.items()}
    with mode():
        client.pull(model, track="raw", out=out)
    assert np.array_equal(out["b"].numpy(), WEIGHTS["b"])


@pytest.mark.parametrize("device", [None, "cpu"])
def test_tensors_pulled_in_inference_mode_can_be_trained(client, model, pushed, device):
    with torch.inference_mode():
        pulled = client.pull(model, track="raw", device=device)
    pulled["b"].requires_grad_().square().sum().backward()
    assert torch.equal(pulled["b"].grad, 2 * pulled["b"])


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_arrays_that_are_one_are_refused(client, model, pushed, make):
    memory = make(9, dtype=getattr(np if make is np.ones else torch, "float32"))
    out = {"a": memory[:4], "b": memory[:6].reshape(2, 3)}
    with pytest.raises(ema_client.InvalidArgumentError, match="^out: share memory.* a and b"):
        client.pull(model, track="raw", out=out)
    assert (memory == 1).all()


@pytest.mark.parametrize("make", [np.ones, torch.ones], ids=["numpy", "torch"])
def test_arrays_may_lie_between_each_other(client, model, make):
    """As the parts of a fused matrix do."""
    weights = {
        "left": np.arange(6, dtype=np.float32).reshape(2, 3),
        "right": np.arange(6, 14, dtype=np.float32).reshape(2, 4),
    }
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    fused = make((2, 7), dtype=getattr(np if make is np.ones else torch, "float32"))
    client.pull(model, track="raw", out={"left": fused[:, :3], "right": fused[:, 3:]})
    assert np.array_equal(np.asarray(fused), np.hstack([weights["left"], weights["right"]]))


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
        self.last = torch.nn.Linear(3, 2, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)


def test_a_module_is_written(server, client, model):
    net, other = Tied(), torch.compile(Tied(), backend="eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), tracks={"raw": "copy"}):
        optimizer.step()
    weight = other.first.weight
    pulled = client.pull(model, track="raw", out=other)
    assert other.first.weight is weight and pulled["first.weight"] is weight
    for name, value in net.state_dict().items():
        assert torch.equal(value, pulled[name]) and torch.equal(
            other.state_dict()[f"_orig_mod.{name}"], value
        )


@pytest.mark.parametrize("known", ["first.weight", "last.weight"])
@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_a_tied_module_is_written_from_a_file_with_one_name(
    client, model, tmp_path, known, is_sharded
):
    weights = {**Tied().state_dict(), known: torch.arange(6.0).reshape(2, 3)}
    del weights[{"first.weight": "last.weight", "last.weight": "first.weight"}[known]]
    save_file(weights, tmp_path / "net.safetensors")
    client.import_weights(model, tmp_path / "net.safetensors", tracks={"raw": "copy"}, step=5)
    net = Tied()
    weight = net.first.weight
    if is_sharded:
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
            pulled = client.pull(model, track="raw", out=net)
            weight = net.first.weight.full_tensor()
        finally:
            torch.distributed.destroy_process_group()
    else:
        pulled = client.pull(model, track="raw", out=net)
    assert pulled.keys() == weights.keys()
    assert torch.equal(weight, weights[known])


def test_a_name_too_many_is_refused_even_if_its_array_is_another_ones(client, model, pushed):
    a = np.ones(4, np.float32)
    out = {"a": a, "b": np.ones((2, 3), np.float32), "c": a}
    with pytest.raises(ema_client.InvalidArgumentError, match="not on the server: c"):
        client.pull(model, track="raw", out=out)
    assert (a == 1).all()


@pytest.fixture
def tied(server, client, model):
    """What is pushed of a model with a tied tensor."""
    net = Tied()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), tracks={"raw": "copy"}):
        optimizer.step()
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("is_numpy", [False, True], ids=["torch", "numpy"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
def test_other_names_of_a_tensor_are_written_too(client, model, tied, is_numpy, is_tied):
    out = {name: torch.zeros_like(value) for name, value in tied.items()}
    if is_tied:
        out["last.weight"] = out["first.weight"].view(2, 3)
    if is_numpy:
        out = {name: value.numpy() for name, value in out.items()}
    pulled = client.pull(model, track="raw", out=out)
    assert pulled.keys() == tied.keys()
    for name, value in tied.items():
        assert pulled[name] is out[name]
        assert torch.equal(torch.as_tensor(out[name]), value), name


@pytest.mark.parametrize(
    "other, problem",
    [
        (
            torch.zeros(3, 2),
            r"^out: shapes .* last.weight: \(3, 2\) in out, \(2, 3\) on the server",
        ),
        (torch.zeros(2, 1).expand(2, 3), "last.weight: several"),
        (torch.zeros(2, 3, device="meta"), "last.weight: on the meta"),
        (np.zeros((2, 3), np.float32), "not a numpy.ndarray"),
    ],
    ids=["shape", "expanded", "meta", "framework"],
)
def test_another_name_that_does_not_fit_is_refused(client, model, tied, other, problem):
    out = {name: torch.zeros_like(value) for name, value in tied.items()}
    with pytest.raises(ema_client.InvalidArgumentError, match=problem):
        client.pull(model, track="raw", out={**out, "last.weight": other})
    assert all((value == 0).all() for value in out.values())


@pytest.mark.parametrize("out", [[np.ones(4)], 5])
def test_what_is_no_mapping_or_module_is_named(client, model, pushed, out):
    with pytest.raises(ema_client.InvalidArgumentError, match="out of type (list|int): must be"):
        client.pull(model, track="raw", out=out)


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
        # wait_pushed() would end the reading in place.
        wait_for(lambda: ema.version is not None, "a version")
        waits = []
        monkeypatch.setattr(ema, "wait_released", lambda: waits.append(True))
        out = {name: tensor.detach() for name, tensor in module.named_parameters()}
        if kind == "their memory":
            out = {name: tensor.numpy() for name, tensor in out.items()}
        elif kind == "copies":
            out = {name: tensor.clone() for name, tensor in out.items()}
        client.pull(model, track="raw", out=out)
    assert waits == ([] if kind == "copies" else [True])


# What is written, and whether it waits for a push of `weight`.
WRITTEN = {
    "a view": (lambda weight: weight.detach()[1:], True),
    "a part of a view": (lambda weight: weight.detach().view(-1)[5:6], True),
    "a NumPy array": (lambda weight: weight.detach().numpy()[:, ::-1], True),
    "another tensor": (lambda weight: torch.ones(3), False),
    "meta": (lambda weight: torch.ones(3, device="meta"), False),
    "sparse": (lambda weight: torch.ones(3).to_sparse(), False),
    "compressed": (lambda weight: torch.ones(3, 3).to_sparse_csr(), False),
}


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("what", WRITTEN)
def test_memory_is_what_counts(server, model, monkeypatch, what):
    make, is_read = WRITTEN[what]
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        optimizer.step()
        waits = []
        monkeypatch.setattr(ema, "wait_released", lambda: waits.append(True))
        wait_unread([make(module.weight)])
    assert waits == ([True] if is_read else [])


@pytest.mark.parametrize("make", [np.zeros, torch.zeros], ids=["numpy", "torch"])
def test_values_that_are_too_large_for_a_dtype_are_named(client, model, make):
    weights = {"w": np.array([[1, -1e5], [2, 3]], np.float32)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    half = np.float16 if make is np.zeros else torch.float16
    out = {"w": make((2, 2), dtype=half)}
    with pytest.raises(ema_client.InvalidArgumentError, match=r"w\[0, 1\] is -100000, and float16"):
        client.pull(model, out=out, track="raw")
    assert not out["w"].any()
    client.pull(model, out=out, track="raw", overflow="saturate")
    assert out["w"].tolist() == [[1, -65504], [2, 3]]
    client.pull(model, out=out, track="raw", overflow="inf")
    assert out["w"][0, 1] == -np.inf
    values = weights["w"] if make is np.zeros else torch.from_numpy(weights["w"])
    values[0, 0] = np.inf  # Not finite before the cast.
    assert saturated(values, out["w"]).tolist() == [[np.inf, -65504], [2, 3]]
    # The same where the server casts.
    with pytest.raises(ema_client.InvalidArgumentError, match='element 1 of tensor "w" is -100000'):
        client.pull(model, track="raw", dtype="float16")
    pulled = client.pull(model, track="raw", dtype="float16", overflow="saturate")
    assert pulled["w"].tolist() == [[1, -65504], [2, 3]]
    assert client.pull(model, track="raw", dtype="bfloat16")["w"].isfinite().all()
