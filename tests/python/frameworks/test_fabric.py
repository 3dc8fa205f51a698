# SPDX-License-Identifier: Apache-2.0
"""attach() on what Lightning Fabric has set up."""

from __future__ import annotations

import importlib

import ema_client
import pytest
import torch
from testing import assert_same_bits

pytestmark = [
    pytest.mark.framework,
    # Of Lightning itself: advice, and what its pinned version calls of torch's.
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("compiles", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_its_wrappers_are_looked_through(server, client, model, package, compiles):
    pytest.importorskip(package, reason=f"{package} is not installed")
    fabric = importlib.import_module(package).Fabric(accelerator="cpu", devices=1)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11))
    wrapped, optimizer = fabric.setup(
        torch.compile(net, backend="eager") if compiles else net,
        torch.optim.Adam(net.parameters(), lr=0.05),
    )
    assert type(wrapped).__name__ == "_FabricModule"
    local = ema_client.LocalEMA(wrapped, half_life="4ba")
    with ema_client.attach(wrapped, optimizer, server.url(model), half_life="4ba") as ema:
        assert ema.module is net
        for step in range(1, 14):
            optimizer.zero_grad()
            fabric.backward(wrapped(torch.randn(8, 6)).square().mean())
            optimizer.step()
            local.update()
            assert ema.step == step
    average = client.pull(model, track="ema")
    assert average.keys() == net.state_dict().keys()
    assert_same_bits(local.weights(), average)
    with ema_client.averaged(wrapped, server.url(model)):
        assert_same_bits(average, net.state_dict())
