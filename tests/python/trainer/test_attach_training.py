# SPDX-License-Identifier: Apache-2.0
"""attach() beside what else a training loop does with weights and optimizers."""

from __future__ import annotations

import dataclasses
import copy
import io
import signal
import subprocess
import sys
import threading

import ema_client
import pytest
import torch
from testing import assert_same_bits, replay, step_until, wait_for


def values_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def test_two_optimizers_make_a_step_when_each_has_stepped(server, client, model):
    """As a GAN trains: the critic three times for each step of the generator."""
    module = torch.nn.ModuleDict(
        {"generator": torch.nn.Linear(5, 3), "critic": torch.nn.Linear(3, 1)}
    )
    optimizers = [torch.optim.Adam(part.parameters(), lr=0.1) for part in module.values()]
    logged = {}
    with ema_client.attach(
        module, optimizers, server.url(model), half_life="3ba", max_wait_s=300
    ) as ema:
        for step in range(1, 6):
            for optimizer in [optimizers[1]] * 3 + [optimizers[0]]:
                optimizer.zero_grad()
                module["critic"](module["generator"](torch.randn(4, 5))).square().sum().backward()
                optimizer.step()
                assert ema.step == (step if optimizer is optimizers[0] else step - 1)
            logged[step] = values_of(module)
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert [version.step for version, _ in pushes] == [1, 2, 3, 4, 5]
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))


class Clipping(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.clamp_(-0.01, 0.01)
        if parameter.isnan().any():
            raise ArithmeticError


def test_a_step_that_calls_that_of_its_base_class_is_one(server, client, model):
    # From now on PyTorch calls hooks around SGD.step(), too.
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    module = torch.nn.Linear(5, 3)
    optimizer = Clipping(module.parameters(), lr=0.1)
    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"raw": "copy"}, max_wait_s=300
    ) as ema:
        for step in range(1, 6):
            for closure in [None, lambda: None]:
                optimizer.zero_grad()
                module(torch.ones(5)).sum().backward()
                optimizer.step(closure)
            assert ema.step == 2 * step
            # One that fails in its own part, behind that of its base, does not shift the next.
            module.bias.grad.fill_(float("nan"))
            before = module.bias.detach().clone()
            with pytest.raises(ArithmeticError):
                optimizer.step()
            with torch.no_grad():
                module.bias.copy_(before)
            assert ema.step == 2 * step
        version = ema.wait_pushed()
    assert version is not None and version.step == 10
    assert_same_bits(values_of(module), client.pull(model, track="raw", version=version))


def test_optimizers_that_step_inside_backward(server, client, model):
    module = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.ReLU(), torch.nn.Linear(7, 2))
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in module.parameters()}

    def step_now(parameter: torch.nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step_now)
    logged = {}
    with ema_client.attach(
        module, list(optimizers.values()), server.url(model), half_life="3ba", max_wait_s=300
    ) as ema:
        for step in range(1, 6):
            module(torch.randn(8, 6)).square().mean().backward()
            assert ema.step == step
            logged[step] = values_of(module)
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert len(pushes) == 5
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))


def test_a_skipped_optimizer_does_not_shift_the_steps(server, client, model):
    module = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)])
    first, last = (torch.optim.SGD(part.parameters(), lr=0.1) for part in module)
    with ema_client.attach(module, [first, last], server.url(model), half_life="3ba") as ema:
        for step in range(1, 6):
            if step != 3:  # As a grad scaler does.
                first.step()
                assert ema.step == step - 1
            last.step()
            assert ema.step == step


def test_buffers_under_activation_checkpointing_are_kept(server, client, model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = torch.nn.Sequential(
        checkpoint_wrapper(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba"):
        pass
    names = {spec.name for spec in client.model(model).tensors}
    assert {"0.0.weight", "0.1.running_mean", "0.1.num_batches_tracked"} <= names


def test_only_whole_parts_of_names_are_wrappers(server, client, model):
    module = torch.nn.Module()
    module.my_orig_mod = torch.nn.Linear(3, 3)
    module.part = torch.compile(torch.nn.Linear(3, 3, bias=False), backend="eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba"):
        pass
    names = {spec.name for spec in client.model(model).tensors}
    assert names == {"my_orig_mod.weight", "my_orig_mod.bias", "part.weight"}


def test_names_that_rename_makes_equal_are_refused(server, model):
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with pytest.raises(ema_client.InvalidArgumentError, match="one name.*: bias, weight"):
        ema_client.attach(
            module, optimizer, server.url(model), rename=lambda name: name.partition(".")[2]
        )


def test_no_optimizer_is_refused(server, model):
    with pytest.raises(ema_client.InvalidArgumentError, match="optimizer: none given"):
        ema_client.attach(torch.nn.Linear(2, 2), [], server.url(model))


def test_steps_that_the_grad_scaler_skips_do_not_count(server, client, model):
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        for step in range(6):
            optimizer.zero_grad()
            scale = float("inf") if step % 3 == 1 else 1.0
            scaler.scale(module(torch.randn(2, 4)).sum() * scale).backward()
            scaler.step(optimizer)
            scaler.update()
    assert ema.step == 4
    assert [entry.version.step for entry in client.versions(model)] == [1, 2, 3, 4]


def test_accumulated_gradients_make_one_step(server, client, model):
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        for batch in range(1, 13):
            module(torch.randn(2, 4)).sum().backward()
            if batch % 4 == 0:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
    assert ema.step == 3


def test_a_compiled_model_has_its_own_names(server, client, model):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    compiled = torch.compile(module, backend="eager")
    with ema_client.attach(compiled, optimizer, server.url(model), half_life="3ba"):
        compiled(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    assert [spec.name for spec in client.model(model).tensors] == ["0.weight", "0.bias"]
    with ema_client.averaged(compiled, server.url(model)) as version:
        assert version.step == 1


@pytest.mark.parametrize("is_part", [False, True], ids=["module", "part"])
def test_load_state_dict_waits_until_nobody_reads(server, client, model, is_part):
    """While the server takes nothing, loading waits; what was pushed is what was there before."""
    module = torch.nn.ModuleDict({"part": torch.nn.Linear(4 << 10, 4 << 10)})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    target = module["part"] if is_part else module
    zeros = {name: torch.zeros_like(tensor) for name, tensor in target.state_dict().items()}
    has_loaded = threading.Event()
    waited = []

    def go_on() -> None:
        waited.append(not has_loaded.wait(1))
        server.send_signal(signal.SIGCONT)

    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"raw": "copy"}, max_wait_s=300
    ):
        before = values_of(module)
        helper = threading.Thread(target=go_on)
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()  # There are no gradients, so nothing changes.
            helper.start()
            target.load_state_dict(zeros)
            has_loaded.set()
        finally:
            has_loaded.set()
            server.send_signal(signal.SIGCONT)
            helper.join()
    assert waited == [True]
    assert_same_bits(before, client.pull(model, track="raw"))
    assert not module["part"].weight.any()


def test_check_names_what_was_written_while_it_was_pushed(server, client, model):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(
        module, optimizer, server.url(model), half_life="3ba", update_interval="2ba", check=True
    ) as ema:
        for _ in range(4):
            module(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        ema.wait_released()
        with torch.no_grad():
            module[0].weight.clamp_(-0.1, 0.1)  # As it should be.
        optimizer.step()
        optimizer.step()
        with torch.no_grad():
            module[1].weight.clamp_(-0.1, 0.1)
            module[1].bias.add_(1)
        with pytest.raises(
            ema_client.FailedPreconditionError, match=r"push of step 6 .*: 1.weight, 1.bias \[BAD"
        ):
            optimizer.step()
        optimizer.step()


def test_an_attached_module_can_be_copied_and_saved(server, model):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba"):
        optimizer.step()
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
            other.load_state_dict(module.state_dict())
            assert_same_bits(other.state_dict(), module.state_dict())


def test_a_saved_module_can_be_loaded_without_us(server, model, tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(4, 3))
    with ema_client.attach(module, None, server.url(model), half_life="3ba"):
        torch.save(module, tmp_path / "module.pt")
    program = """
import sys, torch
sys.modules["ema_client"] = None  # Cannot be imported.
module = torch.load(sys.argv[1], weights_only=False)
module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})
torch.save(module, sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", program, tmp_path / "module.pt"], check=True)
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    assert torch.equal(loaded[0].weight, module[0].weight + 1)


class Normalised(torch.nn.Module):
    """A forward that writes its weight, as forced weight normalisation does."""

    def __init__(self, others: int = 1) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(1.0, 13.0).view(3, 4))
        self.others = torch.nn.Parameter(torch.ones(others))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(1 / self.weight.norm())
        return x @ self.weight.T


def await_versions(ema: ema_client.Attachment, count: int) -> None:
    wait_for(lambda: ema.stats.pushes >= count, f"{count} versions", 30)


def warnings_of(caplog):
    return [
        record.message for record in caplog.records if "copied before each push" in record.message
    ]


def test_a_forward_that_writes_parameters_is_noticed(server, client, model, caplog):
    module = Normalised()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    logged = {}
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        for step in range(1, 6):
            module(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            logged[step] = values_of(module)
            await_versions(ema, step)
    (warning,) = warnings_of(caplog)
    assert "step 1 " in warning and ": weight; from now on" in warning
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert len(pushes) == 5
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))


def test_a_push_of_parameters_that_the_forward_writes_is_given_up(server, client, model, caplog):
    module = Normalised(24 << 20)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    logged = {}

    def step() -> None:
        module(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        logged[ema.step] = {"weight": module.weight.detach().clone()}

    with ema_client.attach(
        module, optimizer, server.url(model), half_life="3ba", max_wait_s=60
    ) as ema:
        server.send_signal(signal.SIGSTOP)
        try:
            step()  # The server takes nothing of it.
            step()
            assert ema.stats.skipped >= 1
        finally:
            server.send_signal(signal.SIGCONT)
        step_until(lambda: ema.stats.pushes >= 3, step)
    (warning,) = warnings_of(caplog)
    assert "step 1 " in warning and ": weight; from now on" in warning
    assert "push of step 1 skipped" in caplog.text and "pushing again" not in caplog.text
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert 1 not in [version.step for version, _ in pushes]
    averages = client.pull(model, track="ema", tensors=["weight"])
    assert_same_bits(replay(pushes, "ema"), averages)


def test_who_waits_before_writing_is_not_warned(server, model, caplog):
    module = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        module(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        module.load_state_dict(values_of(module))
        optimizer.step()
        ema.wait_pushed()
        with ema_client.averaged(module, server.url(model)):
            pass
        optimizer.step()
        ema.wait_released()
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)
        optimizer.step()
    assert not warnings_of(caplog)


def test_parametrizations_that_write_in_forward(server, client, model):
    """Each forward of spectral_norm moves its vectors on, while they are pushed."""
    torch.manual_seed(3)
    spectral_norm = torch.nn.utils.parametrizations.spectral_norm
    module = torch.nn.Sequential(
        spectral_norm(torch.nn.Linear(7, 33)),
        torch.nn.ReLU(),
        spectral_norm(torch.nn.Linear(33, 5)),
    )
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    tracks = {"ema": {"half_life": "9ba"}, "raw": "copy"}
    local = ema_client.LocalEMA(module, tracks=tracks)
    with ema_client.attach(module, optimizer, server.url(model), tracks=tracks) as ema:
        for _ in range(30):
            before = module[0].parametrizations.weight[0]._u.clone()
            optimizer.zero_grad()
            module(torch.randn(6, 7)).square().mean().backward()
            assert not torch.equal(before, module[0].parametrizations.weight[0]._u)
            optimizer.step()
            local.update()
        ema.close()
        assert (ema.stats.pushes, ema.stats.skipped) == (30, 0)
    for track in tracks:
        assert_same_bits(local.weights(track), client.pull(model, track=track))


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("no memory")])
def test_a_push_without_memory_is_skipped(server, client, model, monkeypatch, caplog, error):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def no_memory(*_):
        raise error

    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        optimizer.step()
        with monkeypatch.context() as patch:
            options = dataclasses.replace(ema._pusher.options, tensors_of=no_memory)
            patch.setattr(ema._pusher, "options", options)
            optimizer.step()
        optimizer.step()
        ema.close()
        assert (ema.stats.pushes, ema.stats.skipped) == (2, 1)
    assert "push of step 2 skipped" in caplog.text and "no memory" in caplog.text


def test_copies_without_memory_accuse_nobody_of_writes(server, client, model, monkeypatch, caplog):
    """A push ends while its weights are taken: what would have been read in place is forgotten."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)

    def no_memory(*_):
        raise MemoryError("no memory")

    module(torch.randn(5, 3)).square().sum().backward()
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "clone", no_memory)
            optimizer.step()
        optimizer.step()
        ema.close()
        assert (ema.stats.pushes, ema.stats.skipped) == (2, 1)
    assert "push of step 2 skipped" in caplog.text
    assert "written" not in caplog.text


def test_ctrl_c_in_close_lets_the_optimizer_and_the_server_go(server, model, monkeypatch):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ema = ema_client.attach(module, optimizer, server.url(model), half_life="3ba")

    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ema._pusher, "abandon_if_written", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ema.close()
    optimizer.step()
    assert ema.step == 0
    assert ema._pusher.engine.is_disconnected
    ema.close()
