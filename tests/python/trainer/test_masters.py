# SPDX-License-Identifier: Apache-2.0
"""attach(source="master") without DeepSpeed or Megatron-core, whose masters test_deepspeed.py and test_megatron.py average."""

from __future__ import annotations

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
