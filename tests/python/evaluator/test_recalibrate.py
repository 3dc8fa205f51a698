# SPDX-License-Identifier: Apache-2.0
"""averaged(recalibrate=...): BatchNorm's statistics under the averaged weights."""

from __future__ import annotations

import copy

import ema_client
import pytest
import torch
from testing import assert_same_bits
from torch.optim.swa_utils import update_bn


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6, momentum=0.3)
        self.frozen_norm = torch.nn.BatchNorm1d(6)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scratch += x.mean()
        return self.frozen_norm(torch.relu(self.norm(self.first(x))))


@pytest.fixture
def net(client, model) -> Net:
    """Another net than the averaged one on the server."""
    torch.manual_seed(3)
    net = Net()
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    client.create_model(model, state, tracks={"ema": "4ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=state)
    with torch.no_grad():
        net.first.weight.mul_(3)
        net.norm.running_mean += 1
    net.train()
    net.frozen_norm.eval()
    return net


@pytest.fixture
def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [2 + torch.randn(16, 4, generator=generator) for _ in range(5)]


def expected_statistics(client, model, net, batches):
    """What torch makes of a copy that has the average."""
    twin = copy.deepcopy(net)
    twin.load_state_dict(client.pull(model, track="ema"))
    update_bn(batches, twin)
    return {name: value for name, value in twin.state_dict().items() if "norm" in name}


def statistics(net):
    return {name: value.clone() for name, value in net.state_dict().items() if "norm" in name}


def everything(net):
    return {
        name: value.detach().clone()
        for name, value in [*net.named_parameters(), *net.named_buffers()]
    }


def wrapped_in_tuples(batches):
    return [(batch, torch.zeros(16)) for batch in batches]


@pytest.mark.parametrize(
    "loader_of",
    [list, wrapped_in_tuples, iter, lambda batches: lambda model: update_bn(batches, model)],
    ids=["tensors", "tuples", "iterator", "function"],
)
def test_has_torchs_numbers_and_leaves_nothing_behind(
    server, client, model, net, batches, loader_of
):
    expected = expected_statistics(client, model, net, batches)
    own, objects = everything(net), dict(net.named_buffers())
    with ema_client.averaged(net, server.url(model), recalibrate=loader_of(batches)):
        assert_same_bits(expected, statistics(net))
        assert net.training and net.norm.training and not net.frozen_norm.training
        assert (net.norm.momentum, net.frozen_norm.momentum) == (0.3, 0.1)
        with torch.no_grad():
            net(batches[0])
    assert_same_bits(own, everything(net))
    assert all(buffer is objects[name] for name, buffer in net.named_buffers())


def test_ignored_statistics_come_back_too(server, client, model, batches):
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6))
    state = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    track = ema_client.Track(half_life="4ba", tensor_rules={"1.*": "ignore"})
    client.create_model(model, state, tracks={"ema": track, "raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=state)
    own = everything(net)
    with ema_client.averaged(net, server.url(model), recalibrate=batches):
        assert not torch.equal(net[1].running_mean, own["1.running_mean"])
    assert_same_bits(own, everything(net))


@pytest.mark.parametrize("where", ["in the loader", "in the body"])
def test_after_an_exception(server, model, net, batches, where):
    own = everything(net)

    def failing():
        yield batches[0]
        if where == "in the loader":
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        with ema_client.averaged(net, server.url(model), recalibrate=failing()):
            raise RuntimeError("in the middle")
    assert_same_bits(own, everything(net))
    assert net.norm.training and not net.frozen_norm.training
    assert net.norm.momentum == 0.3


def test_an_empty_loader_is_refused(server, model, net):
    own = everything(net)
    with pytest.raises(ema_client.InvalidArgumentError, match="no batch"):
        with ema_client.averaged(net, server.url(model), recalibrate=iter(())):
            raise AssertionError("not reached")
    assert_same_bits(own, everything(net))


def test_a_model_without_statistics(server, client, model, batches):
    net = torch.nn.Linear(4, 6)
    state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
    client.create_model(model, state, tracks={"ema": "4ba"})
    with client.open_run(model) as run:
        run.push(step=1, weights=state)
    with ema_client.averaged(net, server.url(model), recalibrate=batches) as version:
        assert version.number == 1
