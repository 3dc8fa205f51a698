# SPDX-License-Identifier: Apache-2.0
"""attach(source="master") without DeepSpeed, whose masters test_deepspeed.py averages; Megatron-core's optimizers are built by hand."""

from __future__ import annotations

import sys
import types

import ema_client
import pytest
import torch
from testing import assert_same_bits


def test_a_float32_parameter_is_its_own_master(server, client, model):
    net = torch.nn.Linear(3, 2)
    net.register_parameter("frozen", torch.nn.Parameter(torch.ones(3).bfloat16(), False))
    with ema_client.attach(
        net, None, server.url(model), tracks={"raw": "copy"}, source="master"
    ) as ema:
        ema.after_step()
    assert_same_bits(net.state_dict(), client.pull(model, track="raw", framework="torch"))


def test_parameters_without_masters_are_named(server, model):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3).bfloat16())
    said = r"no float32 copies of 2 parameters: 1.weight, 1.bias \(bfloat16\).*source=.parameters"
    with pytest.raises(ema_client.InvalidArgumentError, match=said):
        ema_client.attach(net, None, server.url(model), source="master")


def test_a_preset_that_writes_averages_to_the_model_is_refused(server, model):
    with pytest.raises(ema_client.InvalidArgumentError, match="would overwrite them"):
        ema_client.attach(
            torch.nn.Linear(3, 2),
            None,
            server.url(model),
            source="master",
            preset="ema_pytorch",
            update_model_with_ema_every=4,
        )


def test_masters_need_a_server(model, monkeypatch):
    monkeypatch.setenv("EMA_MODE", "local")
    with pytest.raises(ema_client.FailedPreconditionError, match="source=.master.*needs a server"):
        ema_client.attach(torch.nn.Linear(3, 2), None, f"ema://nowhere:1/{model}", source="master")


class MegatronOptimizer:
    """Megatron-core's distributed optimizer on one rank, or with `is_sharded` False its other one."""

    def __init__(self, module: torch.nn.Module, *, is_sharded: bool, is_precise: bool) -> None:
        self.config = types.SimpleNamespace(use_precision_aware_optimizer=is_precise)
        self.model_param_gbuf_map = dict.fromkeys(module.parameters())
        self.parameters = list(module.parameters())
        self.is_finite = True
        for parameter in self.parameters:
            main = parameter.detach().float()
            parameter.main_param = main.flatten().clone() if is_sharded else main.clone()
            parameter.main_param_sharded = is_sharded

    def _get_model_param_range_map(self, parameter: torch.nn.Parameter) -> dict[str, object]:
        return {"param": types.SimpleNamespace(start=0, end=parameter.numel())}

    def step(self) -> tuple[bool, None, None]:
        if self.is_finite:
            for parameter in self.parameters:
                parameter.main_param += 1e-3
                parameter.data.copy_(parameter.main_param.view(parameter.shape))
        return self.is_finite, None, None


@pytest.fixture
def megatron(monkeypatch) -> None:
    library = types.ModuleType("megatron.core.optimizer.optimizer")
    library.MegatronOptimizer = MegatronOptimizer
    monkeypatch.setitem(sys.modules, library.__name__, library)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_masters_of_megatron_after_each_step_that_it_has_made(
    server, client, model, megatron, is_sharded
):
    net = torch.nn.Linear(3, 2).bfloat16()
    optimizer = MegatronOptimizer(net, is_sharded=is_sharded, is_precise=False)
    tracks = {"raw": "copy"}
    with ema_client.attach(
        net, optimizer, server.url(model), tracks=tracks, source="master"
    ) as ema:
        for optimizer.is_finite in (True, False, True):
            optimizer.step()
        assert ema.step == 2
        with ema_client.averaged(net, server.url(model), track="raw"):
            net.weight.data.zero_()
    masters = {name: one.main_param.view(one.shape) for name, one in net.named_parameters()}
    assert not torch.equal(masters["weight"], masters["weight"].bfloat16().float())
    assert_same_bits(masters, client.pull(model, track="raw"))
    optimizer.step()
    assert ema.step == 2


@pytest.mark.parametrize("lacks", ["the optimizer", "masters of its own"])
def test_masters_of_megatron_that_cannot_be_read_are_refused(server, model, megatron, lacks):
    net = torch.nn.Linear(3, 2).bfloat16()
    optimizer = MegatronOptimizer(net, is_sharded=True, is_precise=lacks != "the optimizer")
    given = None if lacks == "the optimizer" else optimizer
    with pytest.raises(ema_client.InvalidArgumentError, match="no float32 copies of 2 parameters"):
        ema_client.attach(net, given, server.url(model), source="master")
