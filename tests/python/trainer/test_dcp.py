# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of torch.distributed.checkpoint (DCP), which calls optimizer.step() to initialize states."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import ema_client
import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_training import HALF_LIFE, SAVED_STEP, AppState, make_net, make_optimizer, train
from server_process import ServerProcess
from testing import SUPPORT, assert_same_bits, exit_codes, started
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.optim import _NamedOptimizer

STEPS = 30


@pytest.fixture
def net() -> torch.nn.Module:
    return make_net(seed=0)


def messages(caplog) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name.startswith("ema_client")
    ]


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_checkpoint_before_the_first_step_counts_no_step(server, client, model, net, name):
    optimizer = make_optimizer(name, net)
    with ema_client.attach(net, optimizer, server.url(model)) as ema:
        AppState(net, optimizer).state_dict()
        assert ema.step == 0
        assert ema.state_dict()["version"] == 0
    assert client.model(model).latest is None


def test_checkpoints_of_stateless_optimizer_count_no_steps(
    server, client, model, net, tmp_path, caplog
):
    optimizer = make_optimizer("SGD", net)
    local = ema_client.LocalEMA(net, half_life=HALF_LIFE)
    with ema_client.attach(net, optimizer, server.url(model), half_life=HALF_LIFE) as ema:
        for step in range(1, STEPS + 1):
            train(net, optimizer, [step])
            local.update()
            if step % 10 == 0:
                state = {"app": AppState(net, optimizer), "ema": ema}
                dcp.save(state, checkpoint_id=tmp_path / str(step))
            assert ema.step == step
    assert (ema.stats.pushes, ema.stats.skipped) == (STEPS, 0)
    assert messages(caplog) == []
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def test_first_step_with_zero_learning_rate_counts(server, model, net):
    optimizer = make_optimizer("SGD", net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    with ema_client.attach(net, optimizer, server.url(model)) as ema:
        for step in range(1, 4):
            train(net, optimizer, [step])
            scheduler.step()
            assert ema.step == step


class Container(torch.optim.Optimizer, Stateful):
    """Has one optimizer for each part of a model, as torchtitan's OptimizersContainer. `in_backward`: they
    step in hooks of backward, as those of its OptimizersInBackwardContainer."""

    def __init__(self, parts: list[torch.nn.Module], *, in_backward: bool = False) -> None:
        self.parts = parts
        self.optimizers = [make_optimizer("SGD", part) for part in parts]
        parameters = [parameter for part in parts for parameter in part.parameters()]
        torch.optim.Optimizer.__init__(self, parameters, {"lr": 0.05})
        self.in_backward = in_backward
        if in_backward:
            for part, optimizer in zip(parts, self.optimizers):
                # Backward computes the gradient of the weight last.
                part.weight.register_post_accumulate_grad_hook(self.end_of(part, optimizer))

    @staticmethod
    def end_of(part, optimizer):
        def step_when_complete(_):
            if all(parameter.grad is not None for parameter in part.parameters()):
                optimizer.step()
                optimizer.zero_grad()

        for parameter in part.parameters():
            if parameter is not part.weight:
                parameter.register_post_accumulate_grad_hook(step_when_complete)
        return step_when_complete

    def step(self, *args, **kwargs):
        for optimizer in () if self.in_backward else self.optimizers:
            optimizer.step(*args, **kwargs)

    def zero_grad(self, *args, **kwargs):
        for optimizer in () if self.in_backward else self.optimizers:
            optimizer.zero_grad(*args, **kwargs)

    def state_dict(self):
        for part, optimizer in zip(self.parts, self.optimizers):
            get_optimizer_state_dict(part, optimizer)
        return {}


@pytest.mark.parametrize("in_backward", [False, True], ids=["one step", "in backward"])
@pytest.mark.parametrize("is_scheduled", [False, True], ids=["plain", "scheduled"])
@pytest.mark.parametrize("given", ["container", "contained", "both"])
def test_container_of_optimizers_counts_once(
    server, client, model, net, caplog, given, is_scheduled, in_backward
):
    container = Container([net[0], net[2]], in_backward=in_backward)
    optimizers = {
        "container": container,
        "contained": container.optimizers,
        "both": [container, *container.optimizers],
    }
    if is_scheduled:  # The scheduler puts a function of its own around step().
        for optimizer in container.optimizers:
            torch.optim.lr_scheduler.StepLR(optimizer, 1)
    local = ema_client.LocalEMA(net, half_life=HALF_LIFE)
    url = server.url(model)
    with ema_client.attach(net, optimizers[given], url, half_life=HALF_LIFE) as ema:
        for step in range(1, 6):
            container.state_dict()
            assert ema.step == step - 1
            net(torch.randn(8, 16)).square().mean().backward()
            container.step()
            container.zero_grad()
            local.update()
            assert ema.step == step
    assert (ema.stats.pushes, ema.stats.skipped) == (5, 0)
    assert messages(caplog) == []
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapper", "wrapped"])
def test_named_optimizers_state_initialization_counts_no_step(server, model, net, is_wrapped):
    named = _NamedOptimizer(net.named_parameters(), torch.optim.SGD, lr=0.05)
    given = named if is_wrapped else named._optimizer
    with ema_client.attach(net, given, server.url(model)) as ema:
        for step in range(1, 4):
            named.init_state()
            net(torch.ones(1, 16)).sum().backward()
            assert ema.step == step - 1
            named.step()
            assert ema.step == step


def test_checkpoint_leaves_a_push_error_to_the_next_step(server, model, net):
    optimizer = make_optimizer("SGD", net)
    with ema_client.attach(net, optimizer, server.url(model), on_error="raise") as ema:
        with torch.no_grad():
            net[0].bias[0] = float("nan")
        train(net, optimizer, [1])
        ema.wait_pushed()
        get_optimizer_state_dict(net, optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.05
        with pytest.raises(ema_client.InvalidArgumentError):
            optimizer.step()


@dataclasses.dataclass(frozen=True)
class Saved:
    """A training of two ranks that ended one step after its checkpoint."""

    optimizer: str
    url: str
    checkpoint: pathlib.Path


@pytest.fixture(scope="module", params=["SGD", "AdamW"])
def saved(request, server: ServerProcess, tmp_path_factory) -> Saved:
    folder = tmp_path_factory.mktemp("ranks")
    url = server.url(f"saved-{request.param}")
    program = [sys.executable, SUPPORT / "dcp_training.py", request.param]
    with started(*([*program, rank, 2, folder, url] for rank in range(2))) as ranks:
        assert exit_codes(ranks) == [0, 0]
    return Saved(request.param, url, folder / "checkpoint")


@pytest.mark.parametrize(
    "order", ["loaded before attach", "loaded after attach", "loaded with the average"]
)
def test_training_saved_by_two_ranks_resumes_on_one_bit_for_bit(saved, client, caplog, order):
    net = make_net(seed=1)
    optimizer = make_optimizer(saved.optimizer, net)
    app = AppState(net, optimizer)
    resume = None
    if order != "loaded with the average":
        resume = json.loads((saved.checkpoint / "ema.json").read_text())
    if order == "loaded before attach":
        dcp.load({"app": app}, checkpoint_id=saved.checkpoint)
    with ema_client.attach(
        net, optimizer, saved.url, half_life=HALF_LIFE, resume=resume, existing="continue"
    ) as ema:
        if order == "loaded after attach":
            dcp.load({"app": app}, checkpoint_id=saved.checkpoint)
        elif order == "loaded with the average":
            dcp.load({"app": app, "ema": ema}, checkpoint_id=saved.checkpoint)
        assert ema.step == SAVED_STEP
        train(net, optimizer, range(SAVED_STEP + 1, STEPS + 1))
        assert ema.step == STEPS
    assert messages(caplog) == []

    uninterrupted = make_net(seed=0)
    optimizer = make_optimizer(saved.optimizer, uninterrupted)
    local = ema_client.LocalEMA(uninterrupted, half_life=HALF_LIFE)
    for step in range(1, STEPS + 1):
        train(uninterrupted, optimizer, [step])
        local.update()
    assert_same_bits(uninterrupted.state_dict(), net.state_dict())
    model_name = saved.url.rpartition("/")[2]
    assert_same_bits(local.weights(), client.pull(model_name, track="ema"))
