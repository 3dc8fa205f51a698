# SPDX-License-Identifier: Apache-2.0
"""Which tensors of a module are averaged, copied and ignored, and that changes of them are noticed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import ema_client
import pytest
import torch
from ema_client import Track
from ema_client._model import torch_model
from ema_client._model.torch_model import ModelTensors, NamedTensors, named_tensors
from testing import assert_same_bits
from torch.ao.quantization import FakeQuantize
from torch.nn.utils import parametrizations, prune, spectral_norm


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.second.weight = self.first.weight


def tie_no_longer(net: Net) -> None:
    net.second.weight = torch.nn.Parameter(net.first.weight.detach().clone())


CHANGES: dict[str, Callable[[Net], object]] = {
    "a parameter more": lambda net: net.register_parameter(
        "new", torch.nn.Parameter(torch.ones(1))
    ),
    "a parameter less": lambda net: delattr(net, "first"),
    "another module": lambda net: setattr(net, "first", copy.deepcopy(net.first)),
    "a module more": lambda net: net.add_module("new", torch.nn.Linear(1, 1)),
    "a name": lambda net: net.add_module("new", net._modules.pop("first")),
    "a buffer more": lambda net: net.register_buffer("new", torch.ones(1)),
    "another buffer": lambda net: setattr(net.norm, "running_mean", torch.ones(2)),
    "a parametrization": lambda net: torch.nn.utils.parametrizations.weight_norm(net.second),
    "not tied": tie_no_longer,
}


def ids(tensors: NamedTensors) -> tuple[dict[str, int], dict[str, int], dict[str, tuple[str, ...]]]:
    return (
        {name: id(tensor) for name, tensor in tensors.parameters.items()},
        {name: id(tensor) for name, tensor in tensors.buffers.items()},
        tensors.aliases,
    )


def clone(module: object, state: dict[str, torch.Tensor], *_: object) -> None:
    state.update({name: value.clone() for name, value in state.items()})


def rename(module: object, state: dict[str, torch.Tensor], *_: object) -> None:
    for name in list(state):
        state[f"old.{name}"] = state.pop(name)


def drop(module: object, state: dict[str, torch.Tensor], *_: object) -> None:
    del state["norm.running_var"]


def save_doubled(self: Net, destination: dict[str, torch.Tensor], prefix: str, _: bool) -> None:
    destination.update({f"{prefix}{name}": 2 * one for name, one in self.named_parameters()})


STATES: dict[str, Callable[[Net], object]] = {
    "cloned": lambda net: net.register_state_dict_post_hook(clone),
    "renamed": lambda net: net.register_state_dict_post_hook(rename),
    "dropped": lambda net: net.register_state_dict_post_hook(drop),
    "state_dict": lambda net: setattr(net, "state_dict", lambda **_: {}),
    "_save_to_state_dict": lambda net: setattr(
        net, "_save_to_state_dict", types.MethodType(save_doubled, net)
    ),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_names_do_not_depend_on_what_state_dict_returns(change):
    net = Net()
    before = ids(named_tensors(net))
    assert list(before[1]) == [f"norm.{name}" for name, _ in net.norm.named_buffers()]
    assert before[2] == {"first.weight": ("second.weight",)}
    change(net)
    assert ids(named_tensors(net)) == before


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_module_that_has_changed_is_looked_at_anew(change):
    net = Net()
    tensors_of = ModelTensors(net)
    before = ids(tensors_of())
    change(net)
    assert ids(tensors_of()) == ids(named_tensors(net)) != before
    assert tensors_of() is tensors_of()


def test_a_module_whose_values_have_changed_is_not(monkeypatch):
    net = Net()
    tensors_of = ModelTensors(net, rename=lambda name: f"x.{name}")
    found = tensors_of()
    assert set(found.parameters) >= {"x.first.weight", "x.norm.bias"}

    def refuse(*_: object) -> None:
        raise AssertionError("looked at anew")

    monkeypatch.setattr(torch_model, "named_tensors", refuse)
    net.norm(net.first(torch.ones(3, 2))).sum().backward()
    net.first.weight.data = torch.zeros(2, 2)
    net.first.half().requires_grad_(False)
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    assert tensors_of() is found
    assert found.parameters["x.first.weight"] is net.first.weight


def test_tensors_of_a_compiled_script_are_found():
    tensors_of = ModelTensors(torch.jit.script(torch.nn.Linear(2, 2)))
    assert list(tensors_of().parameters) == ["weight", "bias"]


class Vectors(torch.nn.Module):
    """A constant, a codebook as of vector quantization, and statistics under the usual name."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("constant", "codebook", "running_scale"):
            self.register_buffer(name, torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codebook.mul_(0.5)
        self.running_scale.mul_(0.5)
        return x * self.constant


def make_derived() -> torch.nn.Module:
    net = torch.nn.Sequential(
        parametrizations.spectral_norm(torch.nn.Linear(3, 3)),
        spectral_norm(torch.nn.Linear(3, 3)),
        prune.random_unstructured(torch.nn.Linear(3, 3), "weight", 4),
        parametrizations.orthogonal(torch.nn.Linear(3, 3)),
        FakeQuantize(),
        torch.nn.BatchNorm1d(3),
    )
    net(torch.randn(4, 3))  # Before it, the ranges of the quantization are infinite.
    return net


DERIVED = [
    "0.parametrizations.weight.0._u",
    "0.parametrizations.weight.0._v",
    "1.weight_u",
    "1.weight_v",
    "2.weight_mask",
    "3.parametrizations.weight.0.base",
    *("4.scale", "4.activation_post_process.eps"),
    *("4.activation_post_process.min_val", "4.activation_post_process.max_val"),
]


def train_with_average(net: torch.nn.Module, url: str, **options: object) -> ema_client.LocalEMA:
    """Three steps that move all weights, masks included, with an average here and on the server."""
    local = ema_client.LocalEMA(net, **options)
    with ema_client.attach(net, None, url, **options) as ema:
        for _ in range(3):
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.add_(torch.randn_like(parameter))
                net[2].weight_mask.copy_(1 - net[2].weight_mask)
            net(torch.randn(4, 3))
            ema.after_step()
            ema.wait_pushed()
            local.update()
    return local


def test_buffers_that_are_derived_are_copied(server, client, model, caplog):
    torch.manual_seed(0)
    net = make_derived()
    local = train_with_average(net, server.url(model), half_life="4ba")
    average, state = client.pull(model), net.state_dict()
    assert_same_bits(average, local.weights())
    assert_same_bits({name: average[name] for name in DERIVED}, {n: state[n] for n in DERIVED})
    for name in ("0.bias", "5.running_mean", "5.running_var"):
        assert not torch.equal(average[name], state[name])
    assert client.model(model).tracks["ema"].tensor_rules == tuple(
        (name, "copy") for name in DERIVED
    )
    assert not caplog.text
    with ema_client.attach(net, None, server.url(model), half_life="4ba", existing="continue"):
        pass  # The same tracks.


@pytest.mark.parametrize(
    "options",
    [
        {"half_life": "4ba", "buffers": "average"},
        {"tracks": {"ema": Track(half_life="4ba", buffers="average")}},
        {"half_life": "4ba", "tensor_rules": {"*": "average"}},
        {"preset": "timm", "decay": 0.5},
        {"preset": "composer", "half_life": "4ba"},
    ],
    ids=str,
)
def test_who_says_what_to_do_with_buffers_is_obeyed(server, client, model, caplog, options):
    net = make_derived()
    local = train_with_average(net, server.url(model), **options)
    average = client.pull(model)
    assert_same_bits(average, local.weights())
    assert not torch.equal(average["2.weight_mask"], net[2].weight_mask)
    assert client.model(model).tracks["ema"].tensor_rules in ((), (("*", "average"),))
    assert not caplog.text


@pytest.mark.parametrize("rule", [None, "copy", "average"])
def test_another_buffer_that_changes_is_named_once(server, client, model, caplog, rule):
    net = torch.nn.Sequential(Vectors(), torch.nn.BatchNorm1d(3))
    rules = None if rule is None else {"0.codebook": rule}
    options = {"half_life": "4ba", "tensor_rules": rules, "tracks": {"raw": "copy"}}
    local = ema_client.LocalEMA(net, **options)
    with ema_client.attach(net, None, server.url(model), **options) as ema:
        for _ in range(3):
            net(torch.randn(4, 3))
            ema.after_step()
            ema.wait_pushed()
            local.update()
    said = [f"{what}: buffers that change" for what in (f'model "{model}"', "LocalEMA")]
    assert [text.split(" in training")[0] for text in caplog.messages] == ([] if rule else said)
    for text in caplog.messages:
        assert "averaged: 0.codebook. If" in text and '{"0.codebook": "copy"}' in text
