# SPDX-License-Identifier: Apache-2.0
"""`ema.ema_model`: the averaged copy that an attachment evaluates with."""

from __future__ import annotations

import contextlib
import copy
import threading

import ema_client
import pytest
import torch
from cut_off import Way
from server_process import ServerProcess
from testing import assert_same_bits, step_until


class Net(torch.nn.Module):
    """BatchNorm, a tied weight, and a frozen one."""

    def __init__(self, frozen_count: int = 7) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 11)
        self.norm = torch.nn.BatchNorm1d(11)
        self.last = torch.nn.Linear(6, 11)
        self.last.weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.randn(frozen_count), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.first(x)) + self.last(x) + self.frozen.mean()

    def doubled(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


class Trainer:
    def __init__(self, dtype: torch.dtype = torch.float32, frozen_count: int = 7) -> None:
        torch.manual_seed(0)
        self.net = Net(frozen_count).to(dtype)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.5)
        self.x = torch.randn(8, 6, dtype=dtype)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.net(torch.randn(8, 6, dtype=self.x.dtype)).square().mean().backward()
            self.optimizer.step()


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """What is asked of the server for the copy."""
    made = []
    for name in ("pull", "refresh"):

        def record(*args, name=name, call=getattr(ema_client.Client, name), **kwargs):
            made.append(name)
            return call(*args, **kwargs)

        monkeypatch.setattr(ema_client.Client, name, record)
    return made


class Uncopied(torch.nn.Linear):
    """Copies as itself."""

    def __deepcopy__(self, memo):
        return self


def locked():
    net = torch.nn.Linear(3, 2)
    net.lock = threading.Lock()
    return net


def weight_normed():
    net = torch.nn.utils.weight_norm(torch.nn.Linear(3, 2))
    net(torch.ones(1, 3))
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(
    "make, problem",
    [
        (locked, "cannot be copied .TypeError: cannot pickle"),
        (weight_normed, "cannot be copied .RuntimeError: Only Tensors created explicitly"),
        (lambda: Uncopied(3, 2), "shares memory with the trained model: weight, bias"),
    ],
    ids=["lock", "weight_norm", "itself"],
)
def test_a_model_that_cannot_be_copied(server, model, make, problem):
    net = make()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with ema_client.attach(net, None, server.url(model), half_life="4ba") as ema:
        ema.after_step()
        with torch.no_grad():
            next(net.parameters()).add_(1)
        ema.after_step()
        own = {name: value.clone() for name, value in net.state_dict().items()}
        cure = r"with ema_client.averaged\(model, url\)"
        with pytest.raises(ema_client.FailedPreconditionError, match=f"{problem}.*{cure}"):
            ema.ema_model
        assert all(parameter.requires_grad for parameter in net.parameters())
        assert_same_bits(own, net.state_dict())
        with ema_client.averaged(net, server.url(model)):
            assert any(not torch.equal(own[name], net.state_dict()[name]) for name in before)


def test_the_trained_model_is_no_module_for_the_averages(server, model):
    net = torch.nn.Linear(3, 2)
    options = {"preset": "ema_pytorch", "ema_model": net}
    with ema_client.attach(net, None, server.url(model), **options) as ema:
        ema.after_step()
        with pytest.raises(ema_client.FailedPreconditionError, match="shares memory with the"):
            ema.ema_model


def test_is_the_average_of_this_very_step(server, model, trainer):
    local = ema_client.LocalEMA(trainer.net, half_life="4ba", update_interval="2ba")
    with ema_client.attach(
        trainer.net,
        trainer.optimizer,
        server.url(model),
        half_life="4ba",
        update_interval="2ba",
        tracks={"raw": "copy"},
    ) as ema:
        modules = set()
        for step in range(1, 20):
            trainer.step()
            local.update()
            if step % 3 == 0:
                modules.add(ema.ema_model)
                assert_same_bits(local.weights(), ema.ema_model.state_dict())
    assert len(modules) == 1
    (averaged,) = modules
    assert averaged.first.weight is averaged.last.weight
    assert not averaged.training
    assert not any(parameter.requires_grad for parameter in averaged.parameters())
    # Closing brought it to the last version.
    assert_same_bits(local.weights(), ema.ema_model.state_dict())


MODES = [torch.enable_grad, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("used_in", MODES, ids=lambda mode: mode.__name__)
@pytest.mark.parametrize("made_in", MODES, ids=lambda mode: mode.__name__)
def test_may_be_made_in_one_grad_mode_and_used_in_another(server, model, trainer, made_in, used_in):
    local = ema_client.LocalEMA(trainer.net, half_life="4ba")

    def step():
        trainer.step()
        local.update()

    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), half_life="4ba"
    ) as ema:
        step()
        with made_in():
            ema.ema_model(trainer.x)
        step()
        with used_in():
            assert_same_bits(local.weights(), ema.ema_model.state_dict())
            ema.ema_model(trainer.x)
        step()
    assert_same_bits(local.weights(), ema.ema_model.state_dict())
    # Its user may train it, too.
    ema.ema_model.requires_grad_()(trainer.x).sum().backward()


def test_is_called_as_the_attachment(server, model, trainer):
    local = ema_client.LocalEMA(trainer.net, half_life="4ba")
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), half_life="4ba"
    ) as ema:
        for _ in range(3):
            trainer.step()
            local.update()
        expected = copy.deepcopy(trainer.net).eval()
        local.copy_to(expected)
        assert torch.equal(ema(trainer.x), expected(trainer.x))
        # What a forward in train mode does to the statistics does not last.
        ema.ema_model.train()(trainer.x)
        trainer.step()
        local.update()
        assert_same_bits(local.weights(), ema.ema_model.state_dict())


def test_costs_nothing_unless_used_and_then_what_has_changed(server, model, calls):
    # With blocks of its own, so that it need not be sent with others.
    trainer = Trainer(frozen_count=700_000)
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), half_life="4ba", update_interval="5ba"
    ) as ema:
        trainer.step(7)
        assert calls == [] and ema._ema_model._copy is None
        averaged = ema.ema_model
        assert calls == ["pull"]
        weights = ema._ema_model._copy._weights
        whole = weights.received_bytes
        # One copy: the module's parameters are the pulled memory.
        for name, parameter in averaged.named_parameters():
            assert parameter.data_ptr() == weights[name].data_ptr()
        trainer.step(2)
        ema(trainer.x)
        assert calls == ["pull"], "no push has made a version"
        trainer.step(1)
        assert ema.update_ema_model().step == 10
        assert calls == ["pull", "refresh"]
        assert weights.received_bytes < whole / 2, "most is frozen"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bfloat16", "float64"])
def test_has_the_models_dtype(server, client, model, dtype):
    """What has two bytes is cast by the server; float64 here, beside the pulled bytes."""
    trainer = Trainer(dtype)
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), half_life="4ba"
    ) as ema:
        trainer.step(3)
        state = ema.ema_model.state_dict()
        pulled = ema._ema_model._copy._weights["frozen"]
        assert pulled.dtype == (dtype if dtype == torch.bfloat16 else torch.float32)
    average = client.pull(model, track="ema")
    assert average["first.weight"].dtype == torch.float32
    for name, value in average.items():
        assert state[name].dtype == trainer.net.state_dict()[name].dtype
        assert torch.equal(state[name], value.to(state[name].dtype)), name


def test_ignored_tensors_have_the_models_own_values(server, model, trainer):
    track = ema_client.Track(half_life="4ba", tensor_rules={"first.*": "ignore"})
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), tracks={"body": track, "raw": "copy"}
    ) as ema:
        for _ in range(2):
            trainer.step(2)
            assert torch.equal(ema.ema_model.first.weight, trainer.net.first.weight)
            assert not torch.equal(ema.ema_model.last.bias, trainer.net.last.bias)
        trainer.step()
        assert not torch.equal(ema._ema_model._copy.module.first.weight, trainer.net.first.weight)


def test_without_an_average(server, model, trainer):
    ema = ema_client.attach(trainer.net, trainer.optimizer, server.url(model), half_life="4ba")
    with pytest.raises(ema_client.FailedPreconditionError, match="no version yet"):
        ema(trainer.x)
    trainer.step()
    ema.close()
    with pytest.raises(ema_client.FailedPreconditionError, match="closed.*averaged"):
        ema(trainer.x)


def test_which_average_must_be_clear(server, model, trainer):
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), tracks={"a": "4ba", "b": "8ba"}
    ) as ema:
        trainer.step()
        with pytest.raises(ema_client.NotFoundError, match="a, b"):
            ema(trainer.x)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_when_the_server_is_unavailable(model, trainer, tmp_path, caplog, on_error):
    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(
            trainer.net,
            trainer.optimizer,
            server.url(model),
            half_life="4ba",
            on_error=on_error,
            timeout_s=3,
        )
        trainer.step(2)
        before = {name: value.clone() for name, value in ema.ema_model.state_dict().items()}
        trainer.step()
        assert ema.wait_pushed().step == 3
        server.kill()
        if on_error == "raise":
            with pytest.raises((ema_client.UnavailableError, ema_client.DeadlineExceededError)):
                ema(trainer.x)
        else:
            assert_same_bits(before, ema.ema_model.state_dict())
            assert any("stays at step 2" in record.message for record in caplog.records)
        ema.close()


class Counter:
    """A trainer of 8 MiB whose weights, and their average, are the number of steps; an attachment by a
    way to the server that can be held, without its shared memory."""

    def __init__(self, tmp_path, model, *, preset=None, **options):
        self.net = torch.nn.Linear(1024, 2048, bias=False)
        torch.nn.init.zeros_(self.net.weight)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=1.0)
        self.net.weight.grad = torch.full_like(self.net.weight, -1.0)
        self._stack = contextlib.ExitStack()
        server = self._stack.enter_context(ServerProcess(tmp_path, "--same-host-lane", "off"))
        self.way = self._stack.enter_context(Way(server.port))
        schedule = {"smoothing": 0.0} if preset is None else {"preset": preset}
        self.ema = ema_client.attach(
            self.net, self.optimizer, self.way.url(model), timeout_s=2, **schedule, **options
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.ema.close(timeout_s=1)
        self._stack.close()

    def step(self):
        self.optimizer.step()
        self.ema.wait_pushed(timeout_s=30)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_an_update_that_breaks_off_leaves_nothing_to_use(model, tmp_path, on_error, caplog):
    with Counter(tmp_path, model, on_error=on_error) as trainer:
        ema = trainer.ema
        trainer.step()
        kept = ema.ema_model
        trainer.step()
        trainer.way.hold_replies(after_bytes=4 << 20)
        expected, message = ema_client.FailedPreconditionError, "partly of step 1 and partly"
        if on_error == "raise":
            expected, message = ema_client.DeadlineExceededError, None
        with pytest.raises(expected, match=message):
            ema.update_ema_model()
        assert kept.weight.unique().tolist() == [1, 2], "the test tests nothing"
        assert not any("stays at" in record.message for record in caplog.records)
        for use in (lambda: ema.ema_model, lambda: ema(torch.ones(1024))):
            with pytest.raises(expected, match=message):
                use()
        # Also by who has kept it.
        for use in (
            lambda: kept(torch.ones(1024)),
            kept.state_dict,
            copy.deepcopy(kept).state_dict,
        ):
            with pytest.raises(ema_client.FailedPreconditionError, match="partly of step 1"):
                use()
        trainer.way.cut()
        trainer.way.mend()
        step_until(lambda: ema.wait_pushed().step > 3, trainer.step)
        assert ema.ema_model is kept
        newest = ema.update_ema_model().step
        assert newest == ema.version.step
        assert kept.state_dict()["weight"].unique().tolist() == [newest]
        assert kept(torch.ones(1024)).unique().tolist() == [1024 * newest]


def test_an_update_that_close_breaks_off_leaves_nothing_to_use(model, tmp_path, caplog):
    with Counter(tmp_path, model) as trainer:
        trainer.step()
        kept = trainer.ema.ema_model
        trainer.step()
        trainer.way.hold_replies(after_bytes=4 << 20)
        # Longer than the update before has taken.
        trainer.ema.close(timeout_s=3)
        assert any("partly of step 1" in record.message for record in caplog.records)
        for use in (
            lambda: trainer.ema.ema_model,
            trainer.ema.update_ema_model,
            lambda: kept(torch.ones(1024)),
        ):
            with pytest.raises(
                ema_client.FailedPreconditionError, match="partly of step 1.*averaged"
            ):
                use()


def test_close_begins_no_update_that_it_has_no_time_for(model, tmp_path, caplog):
    with Counter(tmp_path, model) as trainer:
        trainer.step()
        kept = trainer.ema.ema_model
        trainer.step()
        trainer.ema._ema_model._copy.seconds = 2.0
        trainer.way.hold_replies(after_bytes=4 << 20)
        trainer.ema.close(timeout_s=1)
        assert any("ema_model stays at step 1" in record.message for record in caplog.records)
        assert trainer.ema.update_ema_model().step == 1
        assert kept.weight.unique().tolist() == [1]


def test_a_copy_on_another_device_is_used_until_all_has_come(model, tmp_path):
    """What has been pulled lies in memory of its own there: here, of another dtype."""
    given = torch.nn.Linear(1024, 2048, bias=False, dtype=torch.float64)
    with Counter(tmp_path, model, preset=Preset(ema_model=given, beta=0.0)) as trainer:
        trainer.step()
        assert trainer.ema.update_ema_model().step == 1
        trainer.step()
        trainer.way.hold_replies(after_bytes=4 << 20)
        assert trainer.ema.update_ema_model().step == 1
        assert given(torch.ones(1024, dtype=torch.float64)).unique().tolist() == [1024]
        trainer.way.cut()
        trainer.way.mend()
        step_until(lambda: trainer.ema.wait_pushed().step > 3, trainer.step)
        assert trainer.ema.update_ema_model() == trainer.ema.version
        assert given.weight.unique().tolist() == [trainer.ema.version.step]


class Preset:
    def __new__(cls, **arguments):
        return {"preset": "ema_pytorch", "update_every": 1, "update_after_step": 0, **arguments}


@pytest.mark.parametrize("how", ["module", "function"])
def test_ema_pytorchs_own_copy_and_forwarded_methods(server, client, model, trainer, how):
    given = Net()
    with ema_client.attach(
        trainer.net,
        trainer.optimizer,
        server.url(model),
        preset=Preset(
            ema_model=given if how == "module" else lambda: given,
            forward_method_names=("doubled",),
        ),
    ) as ema:
        trainer.step(3)
        assert torch.equal(ema.doubled(trainer.x), 2 * ema(trainer.x))
        assert ema.ema_model is given
    assert_same_bits(client.pull(model, track="ema"), given.state_dict())


def test_an_average_that_is_too_large_for_its_dtype_is_named(server, model):
    net = torch.nn.Linear(2, 1, bias=False)
    given = torch.nn.Linear(2, 1, bias=False, dtype=torch.float16)
    problem = r"weight\[0, 1\] is -100000, and float16 ends at 65504"
    options = {"preset": Preset(ema_model=given, beta=0.0)}
    with ema_client.attach(net, None, server.url(model), **options) as ema:
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[1.0, -1e5]]))
        ema.after_step()
        with pytest.raises(ema_client.InvalidArgumentError, match=f"^ema_model: {problem}"):
            ema.ema_model
        with torch.no_grad():
            net.weight.fill_(2)
        ema.after_step()
        assert ema.ema_model.weight.tolist() == [[2, 2]]
        with torch.no_grad():
            net.weight.copy_(torch.tensor([[1.0, -1e5]]))
        ema.after_step()
        with pytest.raises(ema_client.EmaError, match=problem):
            ema.ema_model
        assert given.weight.isfinite().all()


@pytest.mark.parametrize("differs", ["names", "shapes"])
def test_another_modules_copy_is_refused(server, model, trainer, differs):
    given, problem = torch.nn.Linear(6, 11), "not in ema_model: first.bias"
    if differs == "shapes":
        given, problem = (
            copy.deepcopy(trainer.net),
            r"first.bias: \(3,\) in ema_model, \(11,\) in the",
        )
        given.first.bias = torch.nn.Parameter(torch.zeros(3))
    with ema_client.attach(
        trainer.net, trainer.optimizer, server.url(model), preset=Preset(ema_model=given)
    ) as ema:
        trainer.step()
        with pytest.raises(ema_client.InvalidArgumentError, match=f"^ema_model: .*{problem}"):
            ema(trainer.x)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"forward_method_names": ("twice",)}, '"twice": must be a method of the model'),
        ({"forward_method_names": ("close",)}, '"close": must be a method of the model'),
        ({"forward_method_names": "doubled"}, "must be names of methods"),
        ({"ema_model": 3}, "ema_model 3: must be a module"),
        ({"coerce_dtype": "yes"}, "coerce_dtype 'yes': must be True or False"),
    ],
    ids=["no method", "taken", "text", "no module", "no flag"],
)
def test_wrong_arguments(server, model, trainer, arguments, message):
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        ema_client.attach(
            trainer.net, trainer.optimizer, server.url(model), preset=Preset(**arguments)
        )


def test_what_has_no_numbers_is_accepted(server, model, trainer):
    ema_client.attach(
        trainer.net,
        trainer.optimizer,
        server.url(model),
        preset=Preset(
            include_online_model=False,
            allow_different_devices=True,
            use_foreach=True,
            move_ema_to_online_device=True,
            coerce_dtype=True,
            lazy_init_ema=True,
        ),
    ).close()
