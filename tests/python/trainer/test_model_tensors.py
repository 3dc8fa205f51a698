# SPDX-License-Identifier: Apache-2.0
"""That a module whose parts are others is looked at anew, and that it is not where they are the same."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable

import ema_client
import pytest
import torch
from ema_client._model import torch_model
from ema_client._model.torch_model import ModelTensors, NamedTensors, named_tensors


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.second = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.second.weight = self.first.weight


def tie_no_longer(net: Net) -> None:
    net.second.weight = torch.nn.Parameter(net.first.weight.detach().clone())


def keep_a_buffer_no_longer(net: Net) -> None:
    net.norm.register_buffer("running_mean", net.norm.running_mean, persistent=False)


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
    "not kept": keep_a_buffer_no_longer,
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


def test_state_that_is_no_tensor_of_the_module_is_named(caplog):
    class Scaled(torch.nn.Linear):
        def get_extra_state(self):
            return torch.ones(1)

        def set_extra_state(self, state):
            pass

    net = torch.nn.Sequential(Scaled(2, 2), torch.nn.BatchNorm1d(2))
    ema_client.LocalEMA(net)
    assert "not averaged, because only state_dict() has them" in caplog.text
    assert "parameter or buffer: 0._extra_state; make" in caplog.text
    caplog.clear()
    ema_client.LocalEMA(Net())
    assert not caplog.text


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


def test_a_module_with_answers_of_its_own_is_asked_each_time():
    class Own(Net):
        def named_parameters(self, *args, **kwargs):
            yield from list(super().named_parameters(*args, **kwargs))[: self.count]

    net = Own()
    net.count = 1
    tensors_of = ModelTensors(net)
    assert list(tensors_of().parameters) == ["first.weight"]
    net.count = 2
    assert list(tensors_of().parameters) == ["first.weight", "first.bias"]


def test_a_compiled_script_is_asked_each_time():
    tensors_of = ModelTensors(torch.jit.script(torch.nn.Linear(2, 2)))
    assert list(tensors_of().parameters) == ["weight", "bias"]
    assert tensors_of() is not tensors_of()
