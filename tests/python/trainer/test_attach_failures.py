# SPDX-License-Identifier: Apache-2.0
"""attach() where this side fails: what `check` finds, a `time` that raises, and the end of a training."""

from __future__ import annotations

import contextlib
import logging
import re
import signal
import time
import types

import ema_client
import pytest
import torch
from ema_client._callbacks import CallbackAverage
from ema_client._trainer import attachment, switch
from server_process import ServerProcess
from testing import step_until, wait_for

MOVED = "written since the push of step 1 began, without WaitReleased() (in Python wait_released()): weight"


def trainer_of(count: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net = torch.nn.Module()
    net.weight = torch.nn.Parameter(torch.ones(3))
    net.others = torch.nn.Parameter(torch.ones(count))
    net.weight.grad = torch.ones(3)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_lasting_error_of_log_statistics_is_warned_of_ever_more_rarely(tmp_path, model, caplog):
    net, optimizer = trainer_of()
    with ServerProcess(tmp_path) as server:
        url = server.url(model)
        average = CallbackAverage(url, {"max_wait_s": 1}, track=None, logs_statistics=True)
        with ema_client.attach(net, optimizer, url) as average.attachment:
            server.kill()
            caplog.clear()
            for step in range(1, 6):
                assert average.statistics(step) == {}
        said = [record.getMessage() for record in caplog.records if "log_stat" in record.msg]
    assert len(said) == 3 and "(4 times by now; the next warning is at 8)" in said[2]


def test_attach_says_at_once_that_it_waits_for_the_server(tmp_path, model, caplog):
    with ServerProcess(tmp_path) as server:
        pass
    net, optimizer = trainer_of()
    begin = time.time()
    with pytest.raises(ema_client.UnavailableError):
        ema_client.attach(net, optimizer, server.url(model), timeout_s=6)
    said = caplog.records[0]
    assert said.levelno == logging.WARNING
    assert said.created - begin < 5
    assert f"server {server.address}: " in said.getMessage()
    assert "attach() tries to reach the server for 6 s (timeout_s)" in said.getMessage()


def test_a_push_of_what_check_finds_is_given_up_before_it_raises(server, client, model):
    net, optimizer = trainer_of(24 << 20)
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", max_wait_s=60, check=True
    ) as ema:
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()  # The server takes nothing of it.
            net.weight.data.add_(1)
            with pytest.raises(ema_client.FailedPreconditionError) as raised:
                optimizer.step()
        finally:
            server.send_signal(signal.SIGCONT)
        assert MOVED in str(raised.value)
        assert (ema.step, ema.stats.skipped) == (1, 1)
        step_until(lambda: ema.stats.pushes >= 1, optimizer.step)
    assert 1 not in [entry.version.step for entry in client.versions(model)]


def test_check_finds_weights_that_were_swapped_out_and_back(server, client, model):
    """As an evaluation with another EMA library does, between two steps."""
    net, optimizer = trainer_of(24 << 20)
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", max_wait_s=60, check=True
    ) as ema:
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()  # The server takes little of it.
            own = net.others.data.clone()
            net.others.data.zero_()
        finally:
            server.send_signal(signal.SIGCONT)
        wait_for(lambda: ema._pusher.engine.is_push_done, "the push has ended")
        net.others.data.copy_(own)
        with pytest.raises(
            ema_client.FailedPreconditionError, match="some tensors, which have been restored since"
        ):
            optimizer.step()
        assert (ema.step, ema.stats.skipped) == (1, 1)
        step_until(lambda: ema.stats.pushes >= 1, optimizer.step)
    assert 1 not in [entry.version.step for entry in client.versions(model)]


@pytest.mark.parametrize("on_error", ["skip", "wait", "raise"])
def test_a_write_while_weights_are_pushed_costs_that_step(server, client, model, caplog, on_error):
    caplog.set_level(logging.INFO)
    net, optimizer = trainer_of(24 << 20)
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", max_wait_s=60, on_error=on_error
    ) as ema:
        optimizer.step()
        ema.wait_pushed()
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()  # The server takes nothing of it.
            with torch.no_grad():
                net.weight.clamp_(-0.5, 0.5)
            if on_error == "raise":
                with pytest.raises(ema_client.FailedPreconditionError, match="weight"):
                    optimizer.step()
            optimizer.step()
        finally:
            server.send_signal(signal.SIGCONT)
        ema.wait_pushed()
        optimizer.step()
        ema.wait_pushed()
        assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (4, 3, 1)
    assert (
        "written since the push of step 2 began, without WaitReleased() (in Python wait_released()): weight"
        in caplog.text
    )
    assert "attach with None as the optimizer, and call after_step()" in caplog.text
    assert "rejoined the run" not in caplog.text and "pushing again" not in caplog.text
    assert [entry.version.step for entry in client.versions(model)] == [1, 3, 4]


@pytest.mark.parametrize("count", [3, 24 << 20], ids=["its reply", "its bytes"])
def test_a_server_that_hangs_holds_the_training_for_seconds(model, tmp_path, caplog, count):
    net, optimizer = trainer_of(count)
    with ServerProcess(tmp_path) as server:
        with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
            server.send_signal(signal.SIGSTOP)
            try:
                for _ in range(10):
                    optimizer.step()
                # By default a step may wait for 30 s.
                assert ema.stats.wait_seconds < 20
                assert (ema.step, ema.stats.pushes) == (10, 0)
            finally:
                server.send_signal(signal.SIGCONT)
            step_until(lambda: ema.stats.pushes >= 2, optimizer.step)
            skipped = ema.stats.skipped
    assert "push of step" in caplog.text
    why = "the server or a rank was unavailable, and its bytes had not been sent after"
    assert (why in caplog.text) == (count > 3)
    # However many were left out without a word meanwhile.
    lost = re.findall(r"pushing again, (\d+) steps were lost", caplog.text)
    assert sum(map(int, lost)) == skipped > 0


def test_close_says_what_check_finds_in_the_last_push(server, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba", check=True):
        optimizer.step()
        net.weight.data.add_(1)
    assert MOVED in caplog.text


@pytest.mark.parametrize("what", ["hook", "options"])
def test_nothing_is_left_of_an_attach_that_fails(server, client, model, monkeypatch, what):
    net, optimizer = trainer_of()
    owner, name = {
        "hook": (torch.nn.Module, "register_load_state_dict_pre_hook"),
        "options": (switch.PresetOptions, "apply"),
    }[what]

    def fail(*_):
        raise RuntimeError("no hook")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(RuntimeError, match="no hook"):
        ema_client.attach(net, optimizer, server.url(model), half_life="3ba", on_error="raise")
    monkeypatch.undo()
    for _ in range(3):
        optimizer.step()
    assert client.model(model).latest is None
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        optimizer.step()
    assert ema.version.step == 1


@pytest.mark.filterwarnings("ignore:.*jit:DeprecationWarning")
def test_a_module_with_a_scripted_part(server, client, model):
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.jit.script(torch.nn.BatchNorm1d(2)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        net(torch.randn(4, 3)).sum().backward()
        optimizer.step()
        ema.wait_pushed()
        assert client.pull(model, track="raw").keys() == net.state_dict().keys()
        waits = []
        ema._pusher.wait_released = lambda: waits.append(True)
        net.load_state_dict(net.state_dict())
        assert waits


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_time_that_raises_costs_the_step(server, client, model, caplog, on_error):
    net, optimizer = trainer_of()

    def time_of(step: int) -> dict[str, float]:
        return {"batch": step, "epoch": 0 // (step - 2)}

    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", time=time_of, on_error=on_error
    ) as ema:
        optimizer.step()
        ema.wait_pushed()
        optimizer.step()
        if on_error == "raise":
            before = net.weight.detach().clone()
            with pytest.raises(ema_client.InternalError) as raised:
                optimizer.step()
            assert isinstance(raised.value.__cause__, ZeroDivisionError)
            assert torch.equal(net.weight, before)
        optimizer.step()
        ema.wait_pushed()
        assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (3, 2, 1)
    assert "push of step 2 skipped" in caplog.text and "ZeroDivisionError" in caplog.text
    assert [entry.version.step for entry in client.versions(model)] == [1, 3]


def test_a_push_that_has_failed_raises_before_the_weights_change(server, client, model):
    net, optimizer = trainer_of()
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", on_error="raise"
    ) as ema:
        optimizer.step()
        ema.wait_pushed()
        net.weight.grad.fill_(float("nan"))
        optimizer.step()
        # Nobody asks for its result before the next step does.
        wait_for(lambda: ema._pusher.engine.is_push_done, "the push has ended")
        with torch.no_grad():
            net.weight.fill_(7)
        with pytest.raises(ema_client.InvalidArgumentError):
            optimizer.step()
        assert torch.equal(net.weight, torch.full((3,), 7.0))
        assert (ema.step, ema.stats.skipped) == (2, 1)
        net.weight.grad.fill_(1)
        optimizer.step()
    assert [entry.version.step for entry in client.versions(model)] == [1, 3]


def test_an_exception_is_not_held_by_a_copy_that_could_be_newer(model, tmp_path):
    net, optimizer = trainer_of()
    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(net, optimizer, server.url(model), half_life="3ba", timeout_s=60)
        optimizer.step()
        ema.wait_pushed()
        assert ema.ema_model is not None
        optimizer.step()
        ema.wait_pushed()
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()
            start = time.monotonic()
            with pytest.raises(KeyError), ema:
                raise KeyError
            assert time.monotonic() - start < 30
        finally:
            server.send_signal(signal.SIGCONT)


def test_weights_that_are_not_finite_warn_less_and_less(server, client, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        net.weight.grad.fill_(float("nan"))
        for _ in range(20):
            optimizer.step()
            ema.wait_pushed()
        with torch.no_grad():
            net.weight.fill_(1)
        net.weight.grad.fill_(1)
        optimizer.step()
        ema.wait_pushed()
        assert (ema.stats.pushes, ema.stats.skipped) == (1, 20)
        net.weight.grad.fill_(float("nan"))
        optimizer.step()
    said = [
        record.getMessage() for record in caplog.records if "skipped, the average" in record.message
    ]
    assert [text.split("step ")[1].split(" ")[0] for text in said] == ["1", "2", "4", "8", "16"]
    assert "NON_FINITE" in said[0] and "8 steps by now; the next warning is at 16" in said[3]


def test_the_way_out_for_a_mask_is_one(server, client, model, caplog):
    """A buffer that is infinite for good: what the warning says to do works."""
    net, optimizer = trainer_of()
    net.register_buffer("mask", torch.zeros(3))
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        net.mask.fill_(float("-inf"))
        optimizer.step()
        ema.wait_pushed()
        assert ema.stats.skipped == 1
    (said,) = [text for text in caplog.messages if "skipped, the average" in text]
    assert '"mask" holds NaN or infinity' in said
    assert "create the model again with tracks that ignore it" in said
    client.delete_model(model)
    rules = {"mask": "ignore"}
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="3ba", tensor_rules=rules
    ) as ema:
        optimizer.step()
        ema.wait_pushed()
        assert ema.stats.skipped == 0
    assert client.pull(model, track="ema").keys() == {"weight", "others"}


def make_masked() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    net, optimizer = trainer_of()
    mask = torch.nn.Transformer.generate_square_subsequent_mask(3)
    net.register_buffer("mask", mask)
    return net, optimizer


@pytest.mark.parametrize(
    "options",
    [{}, {"buffers": "copy"}, {"tensor_rules": {"m*": "copy"}}, {"non_finite": "skip"}],
    ids=str,
)
def test_a_buffer_that_is_infinite_at_attach_is_ignored(server, client, model, caplog, options):
    net, optimizer = make_masked()
    url = server.url(model)
    with ema_client.attach(
        net, optimizer, url, half_life="3ba", tracks={"raw": "copy"}, **options
    ) as ema:
        for _ in range(3):
            optimizer.step()
        ema.wait_pushed()
        assert (ema.stats.pushes, ema.stats.skipped) == (3, 0)
    (said,) = caplog.messages
    assert "not averaged, and stay as the module has them: mask. If" in said
    assert 'tensor_rules={"mask": "ignore"}' in said
    caplog.clear()
    local = ema_client.LocalEMA(net, half_life="3ba")
    local.update()
    assert [text.partition(":")[0] for text in caplog.messages] == ["LocalEMA"]
    assert local.weights().keys() == client.pull(model, track="ema").keys() == {"weight", "others"}
    other, _ = make_masked()
    other.mask.fill_(0)
    assert ema_client.load_into(other, url, track="raw").ignored_keys == ("mask",)
    with ema_client.averaged(net, url, track="ema"), local.averaged():
        assert net.mask.isinf().any() and not other.mask.any()


def test_what_the_warning_of_an_infinite_buffer_says_to_do_ends_it(server, client, model, caplog):
    net, optimizer = make_masked()
    rules = {"mask": "ignore"}
    with ema_client.attach(net, optimizer, server.url(model), tensor_rules=rules) as ema:
        optimizer.step()
        ema.wait_pushed()
    assert not caplog.text and "mask" not in client.pull(model)
    with ema_client.attach(net, optimizer, server.url(f"{model}-allow"), non_finite="allow") as ema:
        optimizer.step()
        ema.wait_pushed()
    assert not caplog.text and client.pull(f"{model}-allow")["mask"].isinf().any()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_parameter_that_is_not_finite_at_attach_is_refused(
    server, client, model, value, is_frozen
):
    net, optimizer = trainer_of()
    bad = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=not is_frozen)
    net.register_parameter("bad", bad)
    bad.data[1] = value
    with pytest.raises(
        ema_client.InvalidArgumentError,
        match=r'NaN or infinity.* every step: bad\. .*tensor_rules={"bad": "ignore"}.*NON_FINITE',
    ):
        ema_client.attach(net, optimizer, server.url(model))
    assert model not in {info.name for info in client.models()}
    rules = {"bad": "ignore"}
    with ema_client.attach(net, optimizer, server.url(model), tensor_rules=rules) as ema:
        optimizer.step()
        ema.wait_pushed()
        assert ema.stats.skipped == 0


def test_a_time_that_raises_costs_a_switch_to_the_average(server, model, caplog):
    net, optimizer = trainer_of()
    preset = {
        "preset": "ema_pytorch",
        "update_every": 1,
        "update_after_step": 0,
        "update_model_with_ema_every": 3,
    }
    with ema_client.attach(
        net,
        optimizer,
        server.url(model),
        preset=preset,
        time=lambda step: {"batch": step // (step != 4)},
    ) as ema:
        for _ in range(5):
            optimizer.step()
            ema.wait_pushed()
        assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (5, 4, 1)
    assert (
        "step 4 continues with its own weights" in caplog.text
        and "ZeroDivisionError" in caplog.text
    )


def test_a_switch_without_memory_for_all_writes_nothing(server, model, monkeypatch, caplog):
    net, optimizer = trainer_of()
    net.others.grad = torch.ones(3)
    preset = {
        "preset": "ema_pytorch",
        "update_every": 1,
        "update_after_step": 0,
        "update_model_with_ema_every": 3,
    }

    class NoMemory:
        def to(self, *_: object) -> None:
            raise torch.OutOfMemoryError("no memory")

    pulled = {"weight": torch.zeros(3), "others": NoMemory()}
    monkeypatch.setattr(switch, "pull_on_all_ranks", lambda *_, **__: pulled)
    with ema_client.attach(net, optimizer, server.url(model), preset=preset):
        for _ in range(4):
            optimizer.step()
    assert "step 4 continues with its own weights" in caplog.text and "no memory" in caplog.text
    assert torch.equal(net.weight, net.others) and net.weight.all()


def test_all_that_close_waits_for_has_one_deadline(server, model, monkeypatch):
    """By a clock that goes on while the last push is waited for."""
    net, optimizer = trainer_of()
    ema = ema_client.attach(net, optimizer, server.url(model), half_life="3ba")
    clock = types.SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    waits = []

    class SlowEngine:
        """Whose last push has not ended when its time is nearly over."""

        def __getattr__(self, name: str) -> object:
            return getattr(engine, name)

        def end_pushes(self, timeout_s: float) -> None:
            waits.append(("push", timeout_s))
            clock.now += timeout_s - 1

        def leave(self, timeout_s: float) -> None:
            waits.append(("leave", timeout_s))
            engine.leave(timeout_s)

    engine = ema._pusher.engine
    ema._pusher.engine = SlowEngine()
    ema._ema_model._copy = object()
    monkeypatch.setattr(attachment, "time", clock)
    monkeypatch.setattr(
        ema._ema_model,
        "_bring_up_to_date",
        lambda raises, timeout_s: waits.append(("copy", timeout_s)),
    )
    ema.close(timeout_s=10)
    assert waits == [("push", 10), ("copy", 1), ("leave", 1)]


@pytest.mark.slow
@pytest.mark.parametrize("call", ["state_dict", "close"])
@pytest.mark.parametrize("fault", ["server is gone", "server hangs"])
def test_a_signal_handler_may_use_the_attachment_while_it_waits(tmp_path, model, fault, call):
    """As a scheduler's signal that makes a framework save its checkpoint."""
    net, optimizer = trainer_of(24 << 20)
    calls = []

    def on_alarm(*_: object) -> None:
        calls.append(call)
        with contextlib.suppress(ema_client.EmaError):
            getattr(ema, call)(timeout_s=0.1)

    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(
            net, optimizer, server.url(model), half_life="3ba", on_error="wait", max_outage_s=4
        )
        optimizer.step()
        ema.wait_pushed()
        if fault == "server hangs":
            server.send_signal(signal.SIGSTOP)
        else:
            server.kill()
        optimizer.step()
        before = signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.7)
        try:
            with contextlib.suppress(ema_client.EmaError):
                optimizer.step()  # Waits for the push before it.
        finally:
            signal.signal(signal.SIGALRM, before)
            if fault == "server hangs":
                server.send_signal(signal.SIGCONT)
        assert calls == [call]
        assert ema.stats.pushes >= 1
        ema.close(timeout_s=1)


def test_a_tensor_that_is_skipped_is_named_once_and_counted(server, client, model, caplog):
    net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    options = {"non_finite": "skip", "tracks": {"raw": "copy"}}
    with ema_client.attach(net, None, server.url(model), **options) as ema:
        ema.after_step()
        with torch.no_grad():
            net[1].weight[0, 0] = torch.nan
        for _ in range(3):
            ema.after_step()
        with torch.no_grad():
            net[0].bias[0] = torch.inf
        ema.after_step()
    assert ema.stats.skipped_tensors == {"1.weight": 4, "0.bias": 1}
    assert (ema.stats.pushes, ema.stats.skipped) == (5, 0)
    told = [r.getMessage() for r in caplog.records if "NaN or infinity" in r.getMessage()]
    assert len(told) == 2
    assert f'model "{model}": step 2 has NaN or infinity in 1 tensors' in told[0]
    assert "): 1.weight; stats.skipped_tensors" in told[0]
    assert "step 5" in told[1] and "): 0.bias; " in told[1]
