# SPDX-License-Identifier: Apache-2.0
"""Which steps of an optimizer count, and what they wait for."""

from __future__ import annotations

import collections
import copy
import inspect
import signal
import types

import ema_client
import pytest
import torch
from ema_client._model.optimizers import after_closure, unwrap_optimizers
from testing import assert_same_bits
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer


def loss_of(module: torch.nn.Module) -> torch.Tensor:
    return module(torch.randn(8, 6)).square().mean()


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(6, 11)


# Of a fused optimizer, the scaler calls step() also when there is nothing to do.
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_steps_that_a_grad_scaler_skips_do_not_count(server, client, model, module, fused):
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    local = ema_client.LocalEMA(module, half_life="4ba")
    made = 0
    with ema_client.attach(module, optimizer, server.url(model), half_life="4ba") as ema:
        for index in range(20):
            before = module.weight.detach().clone()
            is_bad = index % 3 == 1
            optimizer.zero_grad()
            scaler.scale(loss_of(module) * (float("inf") if is_bad else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert torch.equal(before, module.weight) == is_bad
            if not is_bad:
                made += 1
                local.update()
            assert ema.step == made
    assert client.model(model).latest.step == made == 13
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def torch_optimizers() -> list[type[torch.optim.Optimizer]]:
    return [
        value
        for _, value in inspect.getmembers(torch.optim, inspect.isclass)
        if issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    ]


@pytest.mark.parametrize("kind", torch_optimizers(), ids=lambda kind: kind.__name__)
def test_optimizers_of_torch_run_the_closure_before_weights_change(kind):
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = kind([parameter], lr=0.1)
    calls = []

    def closure():
        calls.append(parameter.detach().clone())
        optimizer.zero_grad()
        loss = parameter.square().sum()
        if kind is torch.optim.SparseAdam:
            parameter.grad = torch.ones(3, 3).to_sparse()
        else:
            loss.backward()
        return loss

    waits = []
    handle = optimizer.register_step_pre_hook(
        lambda *step: after_closure(*step, lambda: waits.append(len(calls)))
    )
    optimizer.step(closure)
    assert torch.equal(calls[0], torch.ones(3, 3))
    assert waits == list(range(1, len(calls) + 1))
    assert not torch.equal(parameter, torch.ones(3, 3))
    waits.clear()
    calls.clear()
    optimizer.step(closure=closure)
    assert waits == list(range(1, len(calls) + 1))
    handle.remove()


class Sharpness(torch.optim.Optimizer):
    """One that changes weights before it runs the closure, as SAM does."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {})

    def step(self, closure):
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1)
        return closure()


def test_before_other_optimizers_closures_it_waits_at_once(module):
    optimizer = Sharpness(module.parameters())
    assert after_closure(optimizer, (optimizer, lambda: 1), {}, lambda: None) is None
    adam = torch.optim.Adam(module.parameters())
    assert after_closure(adam, (adam,), {}, lambda: None) is None
    assert after_closure(adam, (adam, None), {}, lambda: None) is None


def test_a_closure_runs_while_a_push_reads_the_weights(server, client, model):
    """A server that takes nothing until the closure runs: were it waited for before, it would not come."""
    weights = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(24 << 20))})
    optimizer = torch.optim.SGD(weights.parameters(), lr=1.0)

    def closure():
        server.send_signal(signal.SIGCONT)
        assert torch.equal(weights["w"], torch.zeros(24 << 20))

    with ema_client.attach(
        weights,
        optimizer,
        server.url(model),
        tracks={"raw": "copy"},
        update_interval="10ba",
        max_wait_s=20,
    ) as ema:
        weights["w"].grad = torch.ones_like(weights["w"])
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()
            optimizer.step(closure)
        finally:
            server.send_signal(signal.SIGCONT)
    # Now that it was waited for.
    assert (ema.stats.pushes, ema.stats.skipped) == (1, 0)
    assert torch.equal(weights["w"], -torch.ones(24 << 20))
    assert torch.equal(client.pull(model, track="raw")["w"], torch.zeros(24 << 20))


@pytest.mark.parametrize("waits", [True, False], ids=["waits", "waits later"])
def test_without_an_optimizer_the_loop_counts(server, client, model, module, waits):
    local = ema_client.LocalEMA(module, half_life="4ba", update_interval="3ba")
    with ema_client.attach(
        module, None, server.url(model), half_life="4ba", update_interval="3ba"
    ) as ema:
        for _ in range(14):
            if not waits:
                ema.wait_released()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape))
            local.update()
            ema.after_step(wait_released=waits)
        latest = ema.wait_pushed()
    assert ema.step == 14
    assert latest == ema.version == client.model(model).latest
    assert [entry.version.step for entry in client.versions(model)] == [1, 3, 6, 9, 12]
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def test_what_is_no_optimizer_is_refused(server, model, module):
    with pytest.raises(ema_client.InvalidArgumentError, match="builtins.object.*torch.optim"):
        ema_client.attach(module, object(), server.url(model), half_life="4ba")


class Around(torch.optim.Optimizer):
    """Has another one, as PostLocalSGDOptimizer, and does not call Optimizer's __init__ either."""

    def __init__(self, inner) -> None:
        self.optim = inner


class Deaf(Around):
    """Takes hooks, and does not call them, as timm's Lookahead."""

    def __init__(self, inner) -> None:
        super().__init__(inner)
        self.param_groups = inner.param_groups
        self._optimizer_step_pre_hooks = collections.OrderedDict()
        self._optimizer_step_post_hooks = collections.OrderedDict()

    def step(self, closure=None):
        return self.optim.step(closure)


class Silent(torch.optim.SGD):
    """Its step() would call hooks, of which it takes none."""

    def __init__(self, inner) -> None:
        self.optim = inner


@pytest.mark.parametrize("kind", [Around, Deaf, Silent], ids=lambda kind: kind.__name__)
def test_an_optimizer_without_hooks_is_refused_before_anything_is_made(
    server, client, model, module, kind
):
    optimizer = kind(torch.optim.SGD(module.parameters(), lr=0.1))
    with pytest.raises(
        ema_client.InvalidArgumentError, match=rf"{kind.__name__}: .*after_step\(\)"
    ):
        ema_client.attach(module, optimizer, server.url(model), half_life="4ba")
    assert model not in [info.name for info in client.models()]


class Lookahead(torch.optim.SGD):
    """Changes the weights behind another optimizer's step. PyTorch puts hooks around its step()."""

    def __init__(self, inner) -> None:
        super().__init__(
            [parameter for group in inner.param_groups for parameter in group["params"]]
        )
        self.inner = inner

    def step(self, closure=None):
        self.inner.step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.mul_(0.5)


@pytest.mark.parametrize("given", ["outer", "inner"])
def test_a_step_ends_with_the_outermost_one(server, client, model, module, caplog, given):
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    outer = Lookahead(inner)
    url = server.url(model)
    with ema_client.attach(
        module, outer if given == "outer" else inner, url, tracks={"raw": "copy"}
    ) as ema:
        for step in range(1, 5):
            loss_of(module).backward()
            outer.step()
            assert ema.wait_pushed().step == ema.step == step
            assert_same_bits(module.state_dict(), client.pull(model, track="raw"))
    assert not caplog.records


def init_optim_state(optimizer: torch.optim.Optimizer) -> None:
    """As torchtitan 0.3 does it before it loads or saves a checkpoint."""
    (group,) = optimizer.param_groups
    for parameter in group["params"]:
        parameter.grad = torch.zeros_like(parameter)
    lr, group["lr"] = group["lr"], 0.0
    optimizer.step(closure=None)
    group["lr"] = lr
    optimizer.zero_grad(set_to_none=True)


def test_the_step_that_creates_an_optimizers_state_for_torchtitan_does_not_count(
    server, model, module
):
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    names = {"__name__": "torchtitan.components.optimizer.utils", "torch": torch}
    with ema_client.attach(module, optimizer, server.url(model)) as ema:
        types.FunctionType(init_optim_state.__code__, names)(optimizer)
        assert optimizer.state and ema.step == 0
        loss_of(module).backward()
        optimizer.step()
        assert ema.step == 1


class Averager(ModelAverager):
    """Averages over one process, which needs no process group."""

    def __init__(self) -> None:
        self.step = 0

    def average_parameters(self, params) -> None:
        self.step += 1


def test_a_step_inside_one_without_hooks_is_refused_before_it_changes_weights(
    server, client, model, module
):
    inner = torch.optim.SGD(module.parameters(), lr=0.1)
    outer = PostLocalSGDOptimizer(inner, Averager())
    before = copy.deepcopy(module.state_dict())
    with ema_client.attach(module, inner, server.url(model)) as ema:
        loss_of(module).backward()
        with pytest.raises(
            ema_client.InvalidArgumentError,
            match=r"SGD: .*PostLocalSGDOptimizer.*attach\(model, None, url\)",
        ):
            outer.step()
    assert ema.step == 0
    assert_same_bits(before, module.state_dict())


class Sharding:
    """As DeepSpeed's ZeRO-1 and 2: the base optimizer steps float32 partitions, from which the model's
    parameters are written."""

    def __init__(self, base) -> None:
        self.optimizer = base
        self.parameters = base.param_groups[0]["params"]
        self.masters = [
            value.detach().float().flatten().requires_grad_() for value in self.parameters
        ]
        base.param_groups[0]["params"] = self.masters

    def step(self) -> None:
        for master, parameter in zip(self.masters, self.parameters):
            master.grad = parameter.grad.float().flatten()
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters):
                parameter.copy_(master.view(parameter.shape))


@pytest.mark.parametrize("is_made", ["before attach", "after attach"])
def test_the_base_optimizer_of_master_weights_is_refused(server, client, model, is_made):
    module = torch.nn.Linear(6, 11).to(torch.bfloat16)
    base = torch.optim.SGD(module.parameters(), lr=0.1)
    refused = pytest.raises(
        ema_client.InvalidArgumentError, match=r"no parameter of the model.*DeepSpeed.*after_step"
    )
    x = torch.randn(8, 6, dtype=torch.bfloat16)
    if is_made == "before attach":
        sharding = Sharding(base)
        with refused:
            ema_client.attach(module, base, server.url(model))
    else:
        with ema_client.attach(module, base, server.url(f"{model}-refused")) as ema:
            sharding = Sharding(base)
            module(x).square().mean().backward()
            with refused:
                sharding.step()
        assert ema.step == 0
    with pytest.raises(ema_client.InvalidArgumentError, match=r"Sharding.*DeepSpeed.*after_step"):
        ema_client.attach(module, sharding, server.url(model))
    with ema_client.attach(module, None, server.url(model), tracks={"raw": "copy"}) as ema:
        module(x).square().mean().backward()
        sharding.step()
        ema.after_step()
    assert_same_bits(module.state_dict(), client.pull(model, track="raw"))


class Stepping(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def scheduled(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert "step" in vars(optimizer)
    return optimizer


@pytest.mark.parametrize(
    "made",
    [
        Sharpness,
        lambda parameters: Stepping(parameters, lr=0.1),
        lambda parameters: scheduled(Stepping(parameters, lr=0.1)),
        lambda parameters: copy.deepcopy(Stepping(parameters, lr=0.1)),
        *torch_optimizers(),
    ],
    ids=lambda made: getattr(made, "__name__", ""),
)
def test_optimizers_that_call_hooks_are_taken(made):
    optimizer = made([torch.nn.Parameter(torch.ones(3, 3))])
    assert unwrap_optimizers(optimizer) == [optimizer]


def test_an_optimizer_given_twice_is_one(server, model, module):
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizers = [optimizer, optimizer]
    with ema_client.attach(module, optimizers, server.url(model), half_life="4ba") as ema:
        for step in range(1, 4):
            loss_of(module).backward()
            optimizer.step()
            assert ema.step == step


def test_a_part_of_an_attached_model_is_not_averaged_while_it_is_read(server, client, model):
    """averaged() on a submodule waits for the push of the whole, which reads it in place."""
    whole = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.Linear(600, 600))
    part = whole[0]
    part_model = f"{model}-part"
    state = {name: torch.zeros_like(tensor) for name, tensor in part.state_dict().items()}
    client.create_model(part_model, state, tracks={"ema": "4ba"})
    with client.open_run(part_model) as run:
        run.push(step=1, weights=state)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    with ema_client.attach(whole, optimizer, server.url(model), tracks={"raw": "copy"}):
        for _ in range(6):
            optimizer.zero_grad()
            whole(torch.randn(3, 600)).square().mean().backward()
            optimizer.step()
            with ema_client.averaged(part, server.url(part_model)):
                assert not part.weight.any()
    assert_same_bits(whole.state_dict(), client.pull(model, track="raw"))
