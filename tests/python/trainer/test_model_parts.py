# SPDX-License-Identifier: Apache-2.0
"""A list of modules as one model: torchtitan's model parts, Megatron's virtual pipeline stages."""

from __future__ import annotations

import ema_client
import pytest
import torch
from testing import assert_same_bits


class Part(torch.nn.Module):
    """Layers of a whole model, under their names there."""

    def __init__(self, *layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleDict({str(layer): torch.nn.Linear(5, 5) for layer in layers})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        return x


def train(parts: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> None:
    x = torch.ones(3, 5)
    for part in parts:
        x = part(x)
    x.square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def sgd(parts: list[torch.nn.Module]) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]


def values_of(parts: list[torch.nn.Module]) -> dict[str, torch.Tensor]:
    return {name: one.clone() for part in parts for name, one in part.state_dict().items()}


def test_the_parts_have_the_names_of_the_whole_model(server, client, model):
    parts = [Part(0, 2), torch.compile(Part(1, 3), backend="eager")]
    url = server.url(model)
    optimizers = sgd(parts)
    with ema_client.attach(parts, optimizers, url, half_life="4ba", tracks={"raw": "copy"}) as ema:
        train(parts, optimizers)
        assert ema.step == 1
        pushed = values_of([parts[0], parts[1]._orig_mod])
        assert sorted(pushed) == sorted(
            f"layers.{n}.{kind}" for n in range(4) for kind in ("weight", "bias")
        )
        ema.wait_pushed()
        assert_same_bits(pushed, client.pull(model, track="raw"))
        assert_same_bits(pushed, values_of(list(ema.ema_model)))
    train(parts, optimizers)
    own = values_of(parts)
    with ema_client.averaged(parts, url, track="raw"):
        with ema_client.averaged(parts, url, track="raw"):
            assert_same_bits(pushed, values_of([parts[0], parts[1]._orig_mod]))
    assert_same_bits(own, values_of(parts))
    others = (Part(0), Part(1, 2, 3))
    ema_client.load_into(others, url, track="raw")
    assert_same_bits(pushed, values_of(others))
    whole = Part(3, 2, 1, 0)
    ema_client.load_into(whole, url, track="raw")
    assert_same_bits(pushed, values_of([whole]))


def test_equal_names_need_rename_which_gets_the_index_of_the_part(server, client, model):
    parts = [Part(0), Part(0)]
    url = server.url(model)
    with pytest.raises(
        ema_client.InvalidArgumentError, match=r"layers.0.weight; for a list.*1.weight"
    ):
        ema_client.attach(parts, None, url)

    def rename(name: str) -> str:
        part, _, rest = name.partition(".")
        return rest.replace("layers.0", f"layers.{part}")

    with ema_client.attach(parts, None, url, rename=rename, tracks={"raw": "copy"}) as ema:
        ema.after_step()
    average = client.pull(model, track="raw")
    expected = {f"layers.{n}.weight": part.layers["0"].weight for n, part in enumerate(parts)}
    assert_same_bits(expected, {name: average[name] for name in expected})


@pytest.mark.parametrize("parts", [[], [Part(0), 5]])
def test_a_list_of_something_else_is_refused(server, model, parts):
    with pytest.raises(ema_client.InvalidArgumentError, match="model: a.* list"):
        ema_client.attach(parts, None, server.url(model))
    with pytest.raises(ema_client.InvalidArgumentError, match="model: a.* list"):
        ema_client.load_into(parts, server.url(model))


def test_a_list_without_a_server(model, monkeypatch):
    monkeypatch.setenv("EMA_MODE", "disabled")
    parts = [Part(0), Part(1)]
    with ema_client.attach(parts, sgd(parts), f"ema://nowhere:1/{model}") as ema:
        assert ema.step == 0
