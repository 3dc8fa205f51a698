# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engine and ZeRO-3's records, built by hand: what is counted, and what is refused. test_deepspeed.py has the real
ones."""

from __future__ import annotations

import sys
import types

import ema_client
import pytest
import torch
import torch.distributed as dist
from testing import assert_same_bits


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def partition(parameter: torch.nn.Parameter, **changes: object) -> None:
    """Leaves a parameter as deepspeed.zero.Init does."""
    part = parameter.detach().flatten().clone()
    part.ds_numel, part.final_location = part.numel(), None
    for name, value in changes.items():
        setattr(part, name, value)
    parameter.ds_tensor, parameter.ds_process_group = part, None
    parameter.ds_shape, parameter.ds_numel = parameter.shape, parameter.numel()
    parameter.ds_status = types.SimpleNamespace(name="NOT_AVAILABLE")
    parameter.data = torch.empty(0)


def partitioned(**changes: object) -> torch.nn.Module:
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
    net[1].weight = torch.nn.Parameter(net[0].weight.detach().T.clone())
    for parameter in net.parameters():
        partition(parameter, **changes)
    return net


def test_tied_partitions_are_one_tensor(alone, server, client, model):
    net = partitioned()
    net[1].weight = net[0].weight
    values = {name: one.ds_tensor.view(one.ds_shape) for name, one in net.named_parameters()}
    with ema_client.attach(net, None, server.url(model)) as ema:
        ema.after_step()
    average = client.pull(model)
    assert_same_bits({**values, "1.weight": values["0.weight"]}, average)
    assert list(average.aliases.items()) == [("1.weight", "0.weight")]


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"final_location": "nvme"}, "offloaded to a disk: offload parameters to the CPU"),
        ({"ds_quant_scale": 1.0}, "quantized: turn zero_quantized_nontrainable_weights off"),
        ({"ds_numel": 1}, r"rank 0 of 1 has 1 of 6 elements.*MiCS"),
    ],
)
def test_partitions_that_cannot_be_read_are_refused(alone, server, model, changes, said):
    with pytest.raises(ema_client.InvalidArgumentError, match=f'"weight".*ZeRO-3.*{said}'):
        ema_client.attach(partitioned(**changes), None, server.url(model))


def test_what_needs_a_whole_model_refuses_partitions(alone):
    with pytest.raises(ema_client.InvalidArgumentError, match="ZeRO-3.* expected a whole model"):
        ema_client.LocalEMA(partitioned(), half_life="4ba")


class Engine(torch.nn.Module):
    """As DeepSpeed's with ZeRO-1 or 2: its optimizer steps copies, and what is not finite is skipped."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.masters = [one.detach().double().requires_grad_() for one in module.parameters()]
        self.optimizer = torch.optim.SGD(self.masters, lr=0.1)
        self.is_boundary = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def step(self) -> None:
        self.was_applied = False
        if self.is_boundary:
            self._take_model_step({})

    def _take_model_step(self, lr_kwargs: dict[str, object]) -> None:
        gradients = [one.grad.double() for one in self.module.parameters()]
        self.module.zero_grad()
        self.was_applied = all(one.isfinite().all() for one in gradients)
        if self.was_applied:
            for master, gradient in zip(self.masters, gradients):
                master.grad = gradient
            self.optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(self.masters, self.module.parameters()):
                    parameter.copy_(master)

    def was_step_applied(self) -> bool:
        return self.was_applied


@pytest.fixture
def engine(monkeypatch) -> Engine:
    library = types.ModuleType("deepspeed.runtime.engine")
    library.DeepSpeedEngine = Engine
    monkeypatch.setitem(sys.modules, library.__name__, library)
    return Engine(torch.nn.Linear(6, 2))


def train(engine: Engine, factor: float = 1.0, is_boundary: bool = True) -> None:
    engine.is_boundary = is_boundary
    (engine(torch.randn(4, 6)).square().mean() * factor).backward()
    engine.step()


@pytest.mark.parametrize("given", ["nothing", "its optimizer", "something else"])
def test_a_step_is_one_that_the_engine_has_applied(server, client, model, engine, given):
    optimizer = {"nothing": None, "its optimizer": engine.optimizer}.get(given, object())
    tracks = {"raw": "copy"}
    with ema_client.attach(engine, optimizer, server.url(model), tracks=tracks) as ema:
        train(engine, is_boundary=False)
        assert ema.step == 0
        train(engine)
        train(engine, factor=float("inf"))
        train(engine)
        assert ema.step == 2
        with pytest.raises(ema_client.FailedPreconditionError, match="remove the call"):
            ema.after_step()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    train(engine)
    assert ema.step == 2
    assert_same_bits(weights, client.pull(model, track="raw"))


def test_two_averages_follow_one_engine(server, client, model, engine):
    with ema_client.attach(engine, None, server.url(f"{model}-1"), half_life="4ba") as first:
        with ema_client.attach(engine, None, server.url(f"{model}-2"), half_life="2ba") as second:
            train(engine)
        train(engine)
    assert (first.step, second.step) == (2, 1)
    steps = {n: client.model(f"{model}-{n}").latest.step for n in (1, 2)}
    assert steps == {1: 2, 2: 1}


def test_an_error_raises_before_the_engine_changes_anything(server, client, model, engine):
    url = server.url(model)
    with ema_client.attach(engine, None, url, half_life="4ba", on_error="raise") as ema:
        train(engine)
        ema.wait_pushed()
        client.delete_model(model)
        train(engine)
        ema.wait_pushed()
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        with pytest.raises(ema_client.EmaError):
            train(engine)
        assert_same_bits(weights, engine.module.state_dict())


@pytest.mark.parametrize("mode", ["disabled", "local"])
def test_without_a_server(model, engine, mode, monkeypatch):
    monkeypatch.setenv("EMA_MODE", mode)
    with ema_client.attach(engine, None, f"ema://nowhere:1/{model}", half_life="4ba") as ema:
        train(engine)
        assert ema.step == (mode == "local")


@pytest.mark.framework
def test_lightnings_checkpoints_cannot_have_the_average_of_an_engine(engine):
    pytest.importorskip("lightning", reason="Lightning is not installed")
    from ema_client.lightning import EMAWeightAveraging

    trainer = types.SimpleNamespace(
        **{"optimizers": [engine.optimizer], "model": engine, "callbacks": []},
        **{"checkpoint_callbacks": [], "strategy": type("DeepSpeedStrategy", (), {})()},
    )
    with pytest.raises(
        ema_client.InvalidArgumentError, match="save_average=True.*DeepSpeedStrategy"
    ):
        callback = EMAWeightAveraging("ema://nowhere:1/m", save_average=True)
        callback.on_train_start(trainer, engine.module)
