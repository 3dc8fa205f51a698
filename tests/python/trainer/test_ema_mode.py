# SPDX-License-Identifier: Apache-2.0
"""EMA_MODE: trainings without a server, with averages in their own process or with none."""

from __future__ import annotations

import subprocess
import sys

import ema_client
import pytest
import torch
from ema_client._client.mode import current_mode
from testing import assert_same_bits, exit_codes, started

# Nothing listens there.
URL = "ema://127.0.0.1:1/"


@pytest.fixture
def local(monkeypatch):
    monkeypatch.setenv("EMA_MODE", "local")


@pytest.fixture
def disabled(monkeypatch):
    monkeypatch.setenv("EMA_MODE", "disabled")


def trainer_of() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def step(net, optimizer):
    optimizer.zero_grad()
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


def weights_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


@pytest.mark.parametrize("value", ["", "server"])
def test_by_default_averages_are_on_a_server(server, client, model, monkeypatch, value):
    monkeypatch.setenv("EMA_MODE", value)
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model)):
        step(net, optimizer)
    assert client.model(model).latest.step == 1


def test_another_value_is_refused(model, monkeypatch):
    monkeypatch.setenv("EMA_MODE", "offline")
    net, optimizer = trainer_of()
    expected = '^EMA_MODE=offline: must be "server" .*"local" .*"disabled"'
    with pytest.raises(ema_client.InvalidArgumentError, match=expected):
        ema_client.attach(net, optimizer, URL + model)
    with pytest.raises(ema_client.InvalidArgumentError, match=expected):
        ema_client.Client("127.0.0.1:1")


@pytest.mark.parametrize("mode", ["local", "disabled"])
def test_the_arguments_are_checked_as_with_a_server(model, monkeypatch, mode):
    monkeypatch.setenv("EMA_MODE", mode)
    net, optimizer = trainer_of()
    for error, wrong in [
        (ema_client.InvalidArgumentError, {"half_life": "much"}),
        (ema_client.InvalidArgumentError, {"on_error": "ignore"}),
        (TypeError, {"half_live": "3ba"}),
    ]:
        with pytest.raises(error):
            ema_client.attach(net, optimizer, URL + model, **wrong)
    with pytest.raises(ema_client.InvalidArgumentError, match="url"):
        ema_client.attach(net, optimizer, "127.0.0.1:1")


@pytest.mark.parametrize("mode", ["local", "disabled"])
def test_calls_that_need_a_server_name_the_mode(model, monkeypatch, mode):
    monkeypatch.setenv("EMA_MODE", mode)
    for call in [
        lambda: ema_client.Client("127.0.0.1:1"),
        lambda: ema_client.pull(URL + model),
        lambda: next(ema_client.watch(URL + model)),
    ]:
        with pytest.raises(
            ema_client.FailedPreconditionError, match=f"^EMA_MODE={mode}: "
        ) as raised:
            call()
        assert raised.value.reason == "NO_DATA_DIR"


def test_a_disabled_attachment_does_nothing(model, disabled, caplog):
    net, optimizer = trainer_of()
    url = URL + model
    with ema_client.attach(net, optimizer, url, half_life="3ba", resume={"format": 1}) as ema:
        ema.load_state_dict({"format": 1})
        before = weights_of(net)
        step(net, optimizer)
        ema.wait_released()
        ema.after_step()
        own = weights_of(net)
        assert not torch.equal(before["0.weight"], own["0.weight"])
        assert ema.wait_pushed() is None and ema.version is None
        assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (0, 0, 0)
        assert ema.state_dict() is None
        for _ in range(2):
            with ema_client.averaged(net, url) as version:
                assert version.number == 0
                assert_same_bits(own, net.state_dict())
        loaded = ema_client.load_into(net, url)
        assert set(loaded.ignored_keys) == own.keys()
        assert_same_bits(own, net.state_dict())
        assert ema.ema_model is not net and not ema.ema_model.training
        step(net, optimizer)
        copied = ema.ema_model.state_dict()
        assert_same_bits(net.state_dict(), copied)
        assert net.training and net[0].weight.requires_grad
        assert ema.update_ema_model().number == 0
        assert "step=0" in repr(ema)
    said = [text for text in caplog.messages if "EMA_MODE=disabled" in text]
    assert said[0] == f'model "{model}": EMA_MODE=disabled: nothing is averaged'
    assert sum("keep their own weights" in text for text in said) == 1
    assert not any("no step was counted" in text for text in caplog.messages)


def test_local_averages_are_those_of_a_server(server, model, monkeypatch):
    """Of every step, bit for bit, and with all tracks."""
    options = {
        "half_life": "3ba",
        "tracks": {"raw": "copy", "slow": "9ba"},
        "update_interval": "2ba",
    }

    def train(url):
        torch.manual_seed(1)
        net, optimizer = trainer_of()
        seen = []
        with ema_client.attach(net, optimizer, url, **options) as ema:
            for _ in range(5):
                step(net, optimizer)
                own = weights_of(net)
                for track in ("ema", "raw", "slow"):
                    with ema_client.averaged(net, url, track=track) as version:
                        seen.append((version.number, version.step, weights_of(net)))
                assert_same_bits(own, net.state_dict())
            assert ema.version.step == version.step and ema.stats.pushes == version.number
            seen.append((0, ema.step, weights_of(ema.ema_model)))
        with ema_client.averaged(net, url):  # After the training, too.
            seen.append((0, 0, weights_of(net)))
        seen.append((0, 0, dict(ema_client.pull(url, track="slow"))))
        seen.append((0, 0, weights_of(ema.ema_model)))
        ema_client.load_into(net, url, track="raw")
        seen.append((0, 0, weights_of(net)))
        return seen

    expected = train(server.url(model))
    monkeypatch.setenv("EMA_MODE", "local")
    got = train(URL + model)
    assert [entry[:2] for entry in got] == [entry[:2] for entry in expected]
    for (*_, theirs), (*_, ours) in zip(expected, got, strict=True):
        assert_same_bits(theirs, ours)


def test_local_switch_ema_writes_the_average_back(model, local):
    net, optimizer = trainer_of()
    preset = {"preset": "ema_pytorch", "update_every": 1, "update_after_step": 0}
    with ema_client.attach(
        net, optimizer, URL + model, preset=preset, update_model_with_ema_every=2
    ):
        for _ in range(3):
            step(net, optimizer)
        assert_same_bits(ema_client.pull(URL + model), net.state_dict())


def test_what_a_local_average_lacks(model, local, caplog):
    net, optimizer = trainer_of()
    url = URL + model
    needs = "^EMA_MODE=local: .* needs a server"
    for name, value in [("resume", {"format": 1}), ("rename", lambda name: name)]:
        with pytest.raises(ema_client.FailedPreconditionError, match=needs):
            ema_client.attach(net, optimizer, url, **{name: value})
    with ema_client.attach(net, optimizer, url, half_life="3ba") as ema:
        with pytest.raises(ema_client.FailedPreconditionError, match="has no version yet"):
            ema_client.pull(url)
        for _ in range(2):
            step(net, optimizer)
        with pytest.raises(ema_client.FailedPreconditionError, match="version 1 .*the newest is"):
            ema_client.pull(url, version=1)
        with pytest.raises(ema_client.FailedPreconditionError, match="step 1 "):
            ema_client.load_into(net, url, step=1)
        with pytest.raises(ema_client.FailedPreconditionError, match=needs):
            ema_client.pull(url, version="best")
        with pytest.raises(ema_client.NotFoundError, match='no track "fast"'):
            ema_client.pull(url, track="fast")
        assert ema.state_dict() is None
    assert "has no average to resume from: EMA_MODE=local: labels() needs a server" in caplog.text


def test_a_local_time_that_goes_back_raises_before_the_next_step(model, local):
    net, optimizer = trainer_of()
    times = iter([0, 0, 5, 4])
    with ema_client.attach(
        net, optimizer, URL + model, half_life="3ep", time=lambda _: {"epoch": next(times)}
    ):
        for _ in range(2):
            step(net, optimizer)
        with pytest.raises(ema_client.InvalidArgumentError):
            for _ in range(3):
                step(net, optimizer)


RANK = """
import sys
import ema_client, torch
import torch.distributed as dist

rank, init_file, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
net = torch.nn.Linear(3, 2)
try:
    ema_client.attach(net, None, url).close()
    print("attached")
except ema_client.FailedPreconditionError as error:
    print(error)
"""


@pytest.mark.parametrize("mode", ["local", "disabled"])
def test_several_ranks(model, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("EMA_MODE", mode)
    command = [sys.executable, "-c", RANK]
    with started(
        *([*command, rank, tmp_path / "init", URL + model] for rank in range(2)),
        stdout=subprocess.PIPE,
        text=True,
    ) as ranks:
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert exit_codes(ranks) == [0, 0]
    expected = "EMA_MODE=local: a training of 2 ranks" if mode == "local" else "attached"
    assert all(text.startswith(expected) for text in said), said


def test_the_mode_is_that_of_the_environment(monkeypatch):
    for value in ("local", "disabled"):
        monkeypatch.setenv("EMA_MODE", value)
        assert current_mode() == value
    monkeypatch.delenv("EMA_MODE")
    assert current_mode() == "server"
