# SPDX-License-Identifier: Apache-2.0
"""Models with tensors that no track can have: complex numbers, float8, unsigned integers, sparse ones; and
those that cannot have what a track has."""

from __future__ import annotations

import ema_client
import pytest
import torch
from testing import assert_same_bits

DTYPES = [torch.complex64, torch.float8_e4m3fn, torch.uint16]


def net_of(dtype: torch.dtype) -> torch.nn.Module:
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.ones(3))
    net.register_buffer("freqs", torch.arange(4.0).to(dtype))
    net.phase = torch.nn.Parameter(torch.ones(2).to(dtype), requires_grad=False)
    return net


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_named(server, client, model, dtype):
    net = net_of(dtype)
    optimizer = torch.optim.SGD([net.weight], lr=0.1)
    name = str(dtype).removeprefix("torch.")
    with pytest.raises(
        ema_client.InvalidArgumentError, match=f"averaged: phase: {name}, freqs: {name}; must be"
    ) as raised:
        ema_client.attach(net, optimizer, server.url(model), half_life="3ba")
    assert raised.value.reason == "BAD_MANIFEST"
    with pytest.raises(ema_client.InvalidArgumentError, match=f'tensor "phase": dtype "{name}"'):
        client.create_model(model, dict(net.named_parameters()), tracks={"ema": "3ba"})
    assert model not in [one.name for one in client.models()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_all_tracks_ignore_them_the_rest_is_averaged(server, client, model, dtype):
    net = net_of(dtype)
    optimizer = torch.optim.SGD([net.weight], lr=0.1)
    track = {"half_life": "3ba", "tensor_rules": {"freqs": "ignore", "ph*": "ignore"}}
    url = server.url(model)
    own = net.freqs.clone()
    with ema_client.attach(net, optimizer, url, tracks={"ema": track}, check=True) as ema:
        for _ in range(3):
            net.weight.grad = torch.ones(3)
            optimizer.step()
        assert torch.equal(ema.ema_model.freqs.view(torch.uint8), own.view(torch.uint8))
        assert ema.stats.pushes == 3
    average = client.pull(model, track="ema")
    assert list(average) == ["weight"]
    with ema_client.averaged(net, url):
        assert torch.equal(net.weight, average["weight"])
        assert torch.equal(net.freqs.view(torch.uint8), own.view(torch.uint8))
    other = net_of(dtype)
    loaded = ema_client.load_into(other, url)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())
    assert torch.equal(other.weight, average["weight"])


def sparse_net(of_parameter: bool) -> torch.nn.Module:
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.ones(3))
    mask = torch.eye(3).to_sparse()
    if of_parameter:
        net.mask = torch.nn.Parameter(mask, requires_grad=False)
    else:
        net.register_buffer("mask", mask)
    return net


@pytest.mark.parametrize("of_parameter", [False, True], ids=["buffer", "parameter"])
def test_sparse_ones_are_named_or_ignored(server, client, model, of_parameter):
    net = sparse_net(of_parameter)
    optimizer = torch.optim.SGD([net.weight], lr=0.1)
    url = server.url(model)
    with pytest.raises(ema_client.InvalidArgumentError, match="averaged: mask: sparse_coo; must"):
        ema_client.attach(net, optimizer, url, half_life="3ba")
    with pytest.raises(ema_client.InvalidArgumentError, match='"mask": dtype "sparse_coo"'):
        client.create_model(model, net.state_dict(), tracks={"ema": "3ba"})
    track = {"half_life": "3ba", "tensor_rules": {"mask": "ignore"}}
    with ema_client.attach(net, optimizer, url, tracks={"ema": track}, check=True) as ema:
        for _ in range(3):
            net.weight.grad = torch.ones(3)
            optimizer.step()
            if not of_parameter:  # Which PyTorch cannot copy.
                assert torch.equal(ema.ema_model.mask.to_dense(), torch.eye(3))
        ema.wait_pushed()
        assert ema.stats.pushes == 3
        client.pull(model, track="ema", out={"weight": torch.zeros(3)})
    average = client.pull(model, track="ema")
    assert list(average) == ["weight"]
    with ema_client.averaged(net, url):
        assert torch.equal(net.weight, average["weight"])
    loaded = ema_client.load_into(sparse_net(of_parameter), url)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())


@pytest.mark.parametrize("of_parameter", [False, True], ids=["buffer", "parameter"])
def test_a_local_average_has_none_of_what_all_tracks_ignore(of_parameter):
    net = sparse_net(of_parameter)
    net.register_buffer("freqs", torch.arange(4.0).to(torch.complex64))
    ignore = {"mask": "ignore", "freqs": "ignore"}
    tracks = {"ema": {"half_life": "3ba", "tensor_rules": ignore}}
    with pytest.raises(ema_client.InvalidArgumentError, match="cannot be averaged: .*sparse_coo"):
        ema_client.LocalEMA(net, tracks={**tracks, "all": "3ba"})
    ema = ema_client.LocalEMA(net, tracks=tracks)
    ema.update()
    with torch.no_grad():
        net.weight += 1
    with ema.averaged():
        assert torch.equal(net.weight, torch.ones(3))
        assert torch.equal(net.mask.to_dense(), torch.eye(3))
    assert torch.equal(net.weight, torch.full((3,), 2.0))


def wrapped_net() -> torch.nn.Module:
    """One parameter is made of two others, as a float8 weight is of its values and scales."""
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    net = torch.nn.Linear(4, 4)
    pair = two_tensor.TwoTensor(torch.ones(4, 4), torch.ones(4, 4))
    net.weight = torch.nn.Parameter(pair)
    return net


def test_wrappers_of_tensors_are_named_or_ignored(server, client, model):
    net = wrapped_net()
    url = server.url(model)
    with pytest.raises(
        ema_client.InvalidArgumentError, match="averaged: weight: TwoTensor without memory; must"
    ) as raised:
        ema_client.attach(net, None, url, half_life="3ba")
    assert raised.value.reason == "BAD_MANIFEST"
    with pytest.raises(ema_client.InvalidArgumentError, match="weight: TwoTensor without memory"):
        ema_client.LocalEMA(net)
    with pytest.raises(ema_client.InvalidArgumentError, match="weight: .* without memory for"):
        ema_client.compute_ema(torch.nn.Linear(4, 4), net)
    track = {"half_life": "3ba", "tensor_rules": {"weight": "ignore"}}
    with ema_client.attach(net, None, url, tracks={"ema": track}, check=True) as ema:
        ema.after_step()
        ema.wait_pushed()
        assert ema.stats.pushes == 1
    assert list(client.pull(model, track="ema")) == ["bias"]
    with ema_client.averaged(net, url):
        pass
    loaded = ema_client.load_into(wrapped_net(), url)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ((), ())


def test_a_parameter_that_becomes_a_wrapper_costs_its_steps(server, model, caplog):
    net = torch.nn.Linear(4, 4)
    with ema_client.attach(net, None, server.url(model), half_life="3ba") as ema:
        ema.after_step()
        plain, net.weight = net.weight, wrapped_net().weight
        ema.after_step()
        assert 'array "weight": a TwoTensor without memory' in caplog.text
        net.weight = plain
        ema.after_step()
    assert (ema.stats.pushes, ema.stats.skipped) == (2, 1)


def test_a_wrapper_cannot_be_pushed(client, model):
    client.create_model(model, {"weight": torch.zeros(4, 4)}, tracks={"ema": "3ba"})
    with client.open_run(model) as run:
        with pytest.raises(ema_client.InvalidArgumentError, match='"weight": a TwoTensor without'):
            run.push(step=1, weights={"weight": wrapped_net().weight})


@pytest.mark.parametrize("has_dense", ["parameter", "buffer"])
def test_what_is_yet_to_be_negated_has_its_sign(server, client, model, has_dense):
    """PyTorch gives the imaginary part of conjugates as their memory and a bit that says: negate it."""
    net = torch.nn.Module()
    of_conjugates = torch.complex(torch.zeros(4), torch.arange(1.0, 5)).conj().imag.detach()
    assert of_conjugates.is_neg()
    expected = [-1.0, -2.0, -3.0, -4.0]
    assert of_conjugates.tolist() == expected
    net.weight = torch.nn.Parameter(of_conjugates)
    dense = torch._neg_view(torch.ones(2))
    if has_dense == "parameter":
        net.dense = torch.nn.Parameter(dense)
    else:
        net.register_buffer("dense", dense)
    assert net.weight.is_neg() and net.dense.is_neg()
    with ema_client.attach(net, None, server.url(model), half_life="3ba", check=True) as ema:
        ema.after_step()
    assert ema.stats.pushes == 1
    average = client.pull(model, track="ema")
    assert (average["weight"].tolist(), average["dense"].tolist()) == (expected, [-1, -1])

    local = ema_client.LocalEMA(net)
    local.update()
    weights = local.weights()
    assert (weights["weight"].tolist(), weights["dense"].tolist()) == (expected, [-1, -1])
    other = torch.nn.Module()
    other.weight = torch.nn.Parameter(torch.zeros(4))
    other.register_buffer("dense", torch.zeros(2))
    ema_client.compute_ema(net, other, smoothing=0.0)
    assert (other.weight.tolist(), other.dense.tolist()) == (expected, [-1, -1])


def counted(weight: torch.Tensor) -> torch.nn.Module:
    """With what an integer is copied to."""
    net = torch.nn.Module()
    net.bias = torch.nn.Parameter(torch.zeros(2))
    net.weight = torch.nn.Parameter(weight, requires_grad=False)
    net.register_buffer("count", torch.tensor(0, dtype=torch.int32))
    return net


def into_averaged(net, url, rename=None):
    with ema_client.averaged(net, url, rename=rename):
        pytest.fail("the averages are in it")


INTO = {
    "load_into": lambda client, url, net: ema_client.load_into(net, url),
    "load_into, a part": lambda client, url, net: ema_client.load_into(net, url, rename=str),
    "averaged": lambda client, url, net: into_averaged(net, url),
    "averaged, a part": lambda client, url, net: into_averaged(net, url, rename=str),
    "pull": lambda client, url, net: client.pull(url.split("/")[-1], track="ema", out=net),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("into", INTO)
def test_averages_are_not_cast_to_integers(server, client, model, into, dtype):
    weights = {"bias": torch.ones(2), "weight": torch.full((2,), 0.5), "count": torch.tensor(7)}
    client.create_model(model, weights, tracks={"ema": "3ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    url = server.url(model)
    net = counted(torch.ones(2, dtype=dtype))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(
        ema_client.InvalidArgumentError, match=f"wrong dtypes: weight: {dtype} for torch.float32 "
    ) as raised:
        INTO[into](client, url, net)
    assert raised.value.reason == "BAD_LAYOUT"
    assert_same_bits(before, net.state_dict())
    other = counted(torch.ones(2, dtype=torch.bfloat16))
    ema_client.load_into(other, url)
    assert (other.count.item(), other.weight.tolist()) == (7, [0.5, 0.5])


def test_a_meta_model_with_a_wrong_dtype_stays_there(server, client, model):
    weights = {"bias": torch.ones(2), "weight": torch.ones(2), "count": torch.tensor(7)}
    client.create_model(model, weights, tracks={"ema": "3ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    net = counted(torch.ones(2, dtype=torch.int8)).to("meta")
    with pytest.raises(ema_client.InvalidArgumentError, match="weight: torch.int8 for"):
        ema_client.load_into(net, server.url(model))
    assert all(tensor.is_meta for tensor in net.state_dict().values())
