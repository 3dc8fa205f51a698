# SPDX-License-Identifier: Apache-2.0
"""Models with PEFT's adapters: by default, only these are averaged."""

from __future__ import annotations

import copy
import logging

import ema_client
import pytest
import torch
from testing import assert_same_bits

pytestmark = pytest.mark.framework

peft = pytest.importorskip("peft", reason="peft is not installed")

ADAPTERS = {
    *("base_model.model.0.lora_A.default.weight", "base_model.model.0.lora_B.default.weight"),
    *("base_model.model.2.modules_to_save.default.weight",),
    *("base_model.model.2.modules_to_save.default.bias",),
}
WARNING = "of a model with PEFT's adapters, the average has the 4 tensors of the adapters"


def base():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def config(**options):
    return peft.LoraConfig(r=2, target_modules=["0"], init_lora_weights=False, **options)


def with_adapters():
    return peft.get_peft_model(base(), config(modules_to_save=["2"]))


def train(module, steps=3):
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    yield optimizer
    for _ in range(steps):
        optimizer.zero_grad()
        module(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()


def warnings_of(caplog):
    return [r.getMessage() for r in caplog.records if "PEFT" in r.getMessage()]


def test_only_the_adapters_are_averaged(server, client, model, caplog):
    module = with_adapters()
    before = copy.deepcopy(module.state_dict())
    local = ema_client.LocalEMA(module, decay=0.5)
    (told,) = warnings_of(caplog)
    assert WARNING in told and "4 frozen tensors" in told
    caplog.clear()
    steps = train(module, 1)
    tracks = {"raw": "copy"}
    with ema_client.attach(module, next(steps), server.url(model), decay=0.5, tracks=tracks) as ema:
        for _ in steps:
            pass
        ema.wait_pushed()
    (told,) = warnings_of(caplog)
    assert f'model "{model}": {WARNING}' in told
    local.update()
    assert {spec.name for spec in client.model(model).tensors} == ADAPTERS
    average = client.pull(model, track="ema")
    assert average.keys() == ADAPTERS == local.weights().keys()
    assert_same_bits(average, {name: module.state_dict()[name] for name in ADAPTERS})

    other = with_adapters()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    own = copy.deepcopy(other.state_dict())
    with ema_client.averaged(other, server.url(model)):
        assert_same_bits(other.state_dict(), {**own, **average})
    loaded = ema_client.load_into(other, server.url(model))
    assert set(loaded.ignored_keys) == before.keys() - ADAPTERS
    assert_same_bits(other.state_dict(), {**own, **average})


@pytest.mark.parametrize(
    "rules, expected",
    [
        ({"*": "average"}, "all"),
        ({"*modules_to_save*": "average", "*": "ignore"}, "modules_to_save"),
        ({"*lora_B*": "ignore"}, "default"),
    ],
)
def test_tensor_rules_come_first(server, client, model, caplog, rules, expected):
    module = with_adapters()
    ema_client.attach(module, None, server.url(model), tensor_rules=rules).close()
    names = {spec.name for spec in client.model(model).tensors}
    if expected == "all":
        assert names == dict(module.named_parameters()).keys()
    elif expected == "modules_to_save":
        assert names == {name for name in ADAPTERS if expected in name}
    else:
        assert names == {name for name in ADAPTERS if "lora_B" not in name}
    assert len(warnings_of(caplog)) == (expected == "default")


def test_adapters_that_are_not_active_and_what_is_trained_beside_them(server, client, model):
    module = peft.inject_adapter_in_model(config(bias="all"), base())  # As diffusers' add_adapter.
    module = peft.inject_adapter_in_model(config(), module, adapter_name="second")
    for layer in module.modules():
        if hasattr(layer, "set_adapter"):
            layer.set_adapter("second")
    module[2].bias.requires_grad_(True)
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert "0.lora_A.default.weight" in frozen
    ema_client.attach(module, None, server.url(model)).close()
    expected = {
        *(f"0.lora_{which}.{name}.weight" for which in "AB" for name in ("default", "second")),
        *(name for name, p in module.named_parameters() if p.requires_grad),
    }
    assert {spec.name for spec in client.model(model).tensors} == expected
    assert "2.bias" in expected and "0.base_layer.weight" not in expected


def test_other_models_with_frozen_parts_keep_them(server, client, model, caplog):
    module = base()
    module[0].requires_grad_(False)
    with caplog.at_level(logging.INFO):
        ema_client.attach(module, None, server.url(model)).close()
    names = {spec.name for spec in client.model(model).tensors}
    assert names == module.state_dict().keys()
    assert not warnings_of(caplog)
