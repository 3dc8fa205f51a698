# SPDX-License-Identifier: Apache-2.0
"""attach() and a model or an optimizer that is another than at the start: what is said of it."""

from __future__ import annotations

import logging
import re

import ema_client
import pytest
import torch
from testing import assert_same_bits


def trainer_of() -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def step(net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum(parameter.sum() for parameter in net.parameters()).backward()
    optimizer.step()


def warnings_of(caplog) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_tensors_that_are_added_are_named_once(server, client, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), tracks={"raw": "copy"}) as ema:
        step(net, optimizer)
        for _ in range(3):
            net.append(torch.nn.BatchNorm1d(3))
        optimizer.add_param_group({"params": list(net[1:].parameters())})
        for _ in range(3):
            step(net, optimizer)
            ema.wait_pushed()
        assert ema.stats.pushes == 4
        net.register_buffer("scale", torch.ones(2))
        step(net, optimizer)
        own = net[0].state_dict(prefix="0.")
    many, one = warnings_of(caplog)
    assert "not averaged" in many and ": 1.bias, 1.num_batches_tracked, " in many
    assert many.endswith(" and 5 more")
    assert "not averaged" in one and one.endswith(": scale")
    assert_same_bits(own, client.pull(model, track="raw"))


def test_tensors_that_are_untied_are_named_once(server, model, caplog):
    net = torch.nn.Module()
    net.a = torch.nn.Linear(2, 2, bias=False)
    net.b = torch.nn.Linear(2, 2, bias=False)
    net.b.weight = net.a.weight
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        step(net, optimizer)
        net.b.weight = torch.nn.Parameter(torch.zeros(2, 2))
        for _ in range(3):
            step(net, optimizer)
            ema.wait_pushed()
        assert ema.stats.pushes == 4
    (warning,) = warnings_of(caplog)
    assert "not averaged" in warning and warning.endswith(": b.weight")


def test_another_models_optimizer_is_refused(server, client, model):
    net, _ = trainer_of()
    _, optimizer = trainer_of()
    with pytest.raises(
        ema_client.InvalidArgumentError, match=r"holds no parameter of the model.*after_step\(\)"
    ):
        ema_client.attach(net, optimizer, server.url(model), half_life="3ba")
    assert model not in [info.name for info in client.models()]


def test_an_optimizer_that_was_made_anew_is_said_at_close(server, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step(net, optimizer)
        assert not warnings_of(caplog)
    (warning,) = warnings_of(caplog)
    assert "no step was counted" in warning


def test_an_optimizer_that_replaces_the_attached_one_is_said_at_close(server, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba"):
        step(net, optimizer)
        step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    # A push that had not read the weights when they were written is said to be skipped, too.
    (warning,) = [w for w in warnings_of(caplog) if "push of step 1 skipped" not in w]
    assert "its steps are not averaged: call attach() again with it" in warning


def test_a_resumed_run_may_have_nothing_left_to_train(server, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        step(net, optimizer)
        saved = ema.state_dict()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba", resume=saved):
        pass
    assert not warnings_of(caplog)


@pytest.mark.parametrize("how", ["dtype", "shape", "removed"])
def test_a_model_that_fits_no_more_is_not_said_to_go_on(server, model, caplog, how):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        step(net, optimizer)
        ema.wait_pushed()
        if how == "dtype":
            net.to(torch.bfloat16)
        elif how == "shape":
            net[0].weight = torch.nn.Parameter(torch.ones(5, 4))
        else:
            del net[0].bias
        step(net, optimizer)
    (warning,) = warnings_of(caplog)
    assert (
        "step 2 skipped, and no step can be pushed until the model is as it was at the start"
        in warning
    )


@pytest.mark.parametrize(
    "time", [lambda step: {"ep": step // 2}, lambda step: ema_client.TrainingTime(epoch=step // 2)]
)
def test_a_time_without_batches_has_the_step(server, client, model, time):
    net, optimizer = trainer_of()
    with ema_client.attach(
        net, optimizer, server.url(model), half_life="2ep", update_interval="2ba", time=time
    ):
        for _ in range(6):
            step(net, optimizer)
    versions = [entry.version for entry in client.versions(model)]
    assert [(one.time.batch, one.time.epoch) for one in versions] == [
        (1, 0),
        (2, 1),
        (4, 2),
        (6, 3),
    ]


def test_weights_that_are_clipped_after_the_step(server, client, model, caplog):
    """As the documentation says: counted by hand, the average has what the model uses."""
    net, optimizer = trainer_of()
    with ema_client.attach(net, None, server.url(model), tracks={"raw": "copy"}) as ema:
        for _ in range(3):
            step(net, optimizer)
            for parameter in net.parameters():
                parameter.data.clamp_(-0.01, 0.01)
            ema.after_step()
    assert_same_bits(net.state_dict(), client.pull(model, track="raw"))
    assert not warnings_of(caplog)


def test_many_names_that_were_written_are_not_all_named(server, model, caplog):
    net = torch.nn.ParameterList(torch.ones(3) for _ in range(30))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba"):
        step(net, optimizer)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.clamp_(-0.5, 0.5)
    assert re.search(r"without WaitReleased\(\) .*: 0, 1, .* and 20 more; from now on", caplog.text)


def test_a_step_that_counts_by_itself_is_not_counted_by_hand(server, model):
    net, optimizer = trainer_of()
    with ema_client.attach(net, optimizer, server.url(model), half_life="3ba") as ema:
        step(net, optimizer)
        with pytest.raises(ema_client.FailedPreconditionError, match="counted already"):
            ema.after_step()
        assert ema.step == 1


def test_no_step_is_counted_after_close(server, model):
    net, optimizer = trainer_of()
    with ema_client.attach(net, None, server.url(model), half_life="3ba") as ema:
        step(net, optimizer)
        ema.after_step()
    with pytest.raises(ema_client.FailedPreconditionError, match="the attachment is closed"):
        ema.after_step()
    assert ema.step == ema.version.step == 1
    ema.wait_released()


def test_steps_by_hand_that_are_forgotten_are_said_at_close(server, model, caplog):
    net, optimizer = trainer_of()
    with ema_client.attach(net, None, server.url(model), half_life="3ba"):
        for _ in range(9):
            step(net, optimizer)
    (warning,) = warnings_of(caplog)
    assert "after_step() must be called after each step" in warning


@pytest.mark.parametrize("how", ["trains", "raises", "by hand", "frozen"])
def test_nothing_is_said_of_what_is_right(server, model, caplog, how):
    net, optimizer = trainer_of()
    if how == "frozen":
        net.requires_grad_(False)
    ema = ema_client.attach(net, optimizer, server.url(model), half_life="3ba")
    if how == "by hand":
        ema._count_by_hand()
    if how == "raises":
        with pytest.raises(RuntimeError), ema:
            raise RuntimeError
    if how in ("trains", "frozen"):
        optimizer.step()
    ema.close()
    assert not warnings_of(caplog)
