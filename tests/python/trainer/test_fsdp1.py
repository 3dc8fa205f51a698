# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallel (FSDP1) on one rank: names, writes, and what is refused. test_sharded.py has more ranks."""

from __future__ import annotations

import ema_client
import pytest
import torch
import torch.distributed as dist
from testing import assert_same_bits
from torch.distributed.fsdp import FullyShardedDataParallel


@pytest.fixture(autouse=True)
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def net_of() -> torch.nn.Sequential:
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    net[2].weight = torch.nn.Parameter(net[0].weight.detach().T.contiguous())
    return net


def wrapped(net: torch.nn.Module, use_orig_params: bool = True) -> FullyShardedDataParallel:
    device = torch.device("cpu")
    return FullyShardedDataParallel(net, device_id=device, use_orig_params=use_orig_params)


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_names_and_values_are_those_of_the_plain_model(server, client, model, use_orig_params):
    plain = net_of()
    module = wrapped(net_of(), use_orig_params)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="4ba"):
        for _ in range(3):
            module(torch.randn(5, 3)).square().mean().backward()
            optimizer.step()
    average = client.pull(model, track="ema")
    assert average.keys() == plain.state_dict().keys()
    with ema_client.averaged(module, server.url(model)):
        assert_same_bits(average, module.state_dict())
    ema_client.load_into(plain, server.url(model))
    assert_same_bits(average, plain.state_dict())
    other = wrapped(net_of(), use_orig_params)
    client.pull(model, track="ema", out=other)
    assert_same_bits(average, other.state_dict())


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_a_module_inside_a_wrapper_is_refused_with_what_to_give(server, model, use_orig_params):
    module = wrapped(net_of(), use_orig_params)
    with pytest.raises(ema_client.InvalidArgumentError, match="give that one"):
        ema_client.attach(module.module, None, server.url(model), half_life="4ba")


def test_elements_in_another_order_are_refused(server, model):
    net = torch.nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    with pytest.raises(ema_client.InvalidArgumentError, match='"weight": had strides .* row-major'):
        ema_client.attach(wrapped(net), None, server.url(model), half_life="4ba")


def test_what_needs_a_whole_model_refuses_it():
    with pytest.raises(ema_client.InvalidArgumentError, match="FSDP1.* expected a whole model"):
        ema_client.LocalEMA(wrapped(net_of()), half_life="4ba")
