# SPDX-License-Identifier: Apache-2.0
"""attach() on what accelerate has prepared."""

from __future__ import annotations

import ema_client
import pytest
import torch
from examples import run_example
from testing import assert_same_bits
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

pytestmark = pytest.mark.framework

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@pytest.fixture(autouse=True)
def no_accelerator_of_before():
    """accelerate keeps one state for a process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def test_steps_are_the_optimizers_not_the_batches(server, client, model):
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3)
    net = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11))
    prepared, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.05))
    assert isinstance(optimizer, accelerate.optimizer.AcceleratedOptimizer)
    local = ema_client.LocalEMA(net, half_life="4ba", update_interval="2ba")
    with ema_client.attach(
        prepared, optimizer, server.url(model), half_life="4ba", update_interval="2ba"
    ) as ema:
        for batch in range(78):
            with accelerator.accumulate(prepared):
                accelerator.backward(prepared(torch.randn(8, 6)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if batch % 3 == 2:
                local.update()
            assert ema.step == local.batch == (batch + 1) // 3
    assert [entry.version.step for entry in client.versions(model)] == [1, *range(2, 27, 2)]
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def test_steps_that_its_scaler_skips_do_not_count(server, client, model):
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(6, 2)
    # What accelerate makes of an optimizer with mixed_precision="fp16", for which it needs a GPU.
    optimizer = accelerate.optimizer.AcceleratedOptimizer(
        torch.optim.Adam(net.parameters(), lr=0.05), scaler=torch.amp.GradScaler("cpu")
    )
    local = ema_client.LocalEMA(net, half_life="4ba")
    made = 0
    with ema_client.attach(
        accelerator.prepare(net), optimizer, server.url(model), half_life="4ba"
    ) as ema:
        for index in range(40):
            loss = net(torch.randn(8, 6)).square().mean()
            optimizer.zero_grad()
            optimizer.scaler.scale(loss * float("inf") if index % 4 == 1 else loss).backward()
            optimizer.step()
            assert optimizer.step_was_skipped == (index % 4 == 1)
            if not optimizer.step_was_skipped:
                local.update()
                made += 1
            assert ema.step == made
    assert made == 30
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def test_checkpoint_of_a_fresh_optimizer_counts_no_step(server, model):
    accelerator = accelerate.Accelerator(cpu=True)
    net = torch.nn.Linear(6, 2)
    prepared, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters()))
    with ema_client.attach(prepared, optimizer, server.url(model)) as ema:
        get_optimizer_state_dict(net, optimizer)
        assert ema.step == 0
        accelerator.backward(prepared(torch.ones(1, 6)).sum())
        optimizer.step()
        assert ema.step == 1


def make_net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11), torch.nn.ReLU())


def offload(net: torch.nn.Module, how: str, folder: str) -> None:
    cpu = torch.device("cpu")
    if how == "cpu_offload":
        accelerate.cpu_offload(net, execution_device=cpu)
    elif how == "cpu_offload with buffers":
        accelerate.cpu_offload(net, execution_device=cpu, offload_buffers=True)
    elif how == "disk_offload":
        accelerate.disk_offload(net, folder, execution_device=cpu)
    else:
        places = {"0": "disk", "1": "cpu", "2": "cpu"}
        accelerate.dispatch_model(net, places, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize(
    "how", ["cpu_offload", "cpu_offload with buffers", "disk_offload", "dispatch_model"]
)
def test_values_that_its_hooks_keep_are_not_written(server, client, model, tmp_path, how):
    torch.manual_seed(0)
    url = server.url(model)
    trained, net = make_net(), make_net()
    with ema_client.attach(trained, None, url) as ema:
        ema.after_step()
    x = torch.randn(3, 6)
    expected, before = trained.eval()(x), net.eval()(x)
    offload(net, how, str(tmp_path))

    def averaged() -> None:
        with ema_client.averaged(net, url):
            raise AssertionError("not reached")

    for use in (
        lambda: ema_client.load_into(net, url),
        lambda: ema_client.load_into(net, url, strict=False),
        averaged,
        lambda: client.pull(model, out=net),
        lambda: ema_client.compute_ema(trained, net),
        lambda: ema_client.attach(net, None, server.url(f"{model}-other")),
        lambda: ema_client.LocalEMA(net),
    ):
        with pytest.raises(
            ema_client.InvalidArgumentError,
            match=r"the values of 0.weight.* accelerate's hooks keep them .* "
            r"accelerate.hooks.remove_hook_from_module\(model, recurse=True\)",
        ):
            use()
        assert torch.equal(net(x), before)
    accelerate.hooks.remove_hook_from_module(net, recurse=True)
    ema_client.load_into(net, url)
    offload(net, how, str(tmp_path / "again"))
    assert torch.equal(net(x), expected)


def test_tensors_that_its_hooks_keep_may_be_ignored(server, client, model):
    net = make_net()
    accelerate.cpu_offload(net[0], execution_device=torch.device("cpu"))
    url = server.url(model)
    with ema_client.attach(net, None, url, tensor_rules={"0.*": "ignore"}) as ema:
        ema.after_step()
    net[1].weight.data.fill_(3)
    assert ema_client.load_into(net, url).ignored_keys == ("0.bias", "0.weight")
    assert torch.equal(net[1].weight, torch.ones(11))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks, steps", [(1, 32), (2, 16)])
def test_the_example(server, client, model, ranks, steps):
    output = run_example("accelerate_train.py", server.url(model), ranks=ranks)
    assert output.startswith(f"step {steps}: ")
    latest = client.model(model).latest
    assert (latest.step, latest.number) == (steps, steps)
