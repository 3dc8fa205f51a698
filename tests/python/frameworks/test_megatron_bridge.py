# SPDX-License-Identifier: Apache-2.0
"""`ema_client.megatron.EmaCallback` with the contexts of Megatron-Bridge's callbacks and an optimizer like Megatron-core's, both built by
hand: Megatron-Bridge needs a GPU."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import ema_client
import pytest
import torch
from ema_client.megatron import EmaCallback
from testing import assert_same_bits, replay


class MegatronOptimizer:
    """Trains float32 parameters; skips a step that is not finite."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.inner = torch.optim.SGD(module.parameters(), lr=0.1)
        self.is_finite = True

    def step(self) -> tuple[bool, None, None]:
        if self.is_finite:
            self.inner.step()
        self.inner.zero_grad()
        return self.is_finite, None, None


@pytest.fixture(autouse=True)
def megatron(monkeypatch) -> None:
    library = types.ModuleType("megatron.core.optimizer.optimizer")
    library.MegatronOptimizer = MegatronOptimizer
    monkeypatch.setitem(sys.modules, library.__name__, library)


class Training:
    """Calls a callback as Megatron-Bridge's training loop does."""

    def __init__(self, callback: EmaCallback, step: int = 0) -> None:
        torch.manual_seed(step)
        self.callback = callback
        self.net = torch.nn.Linear(3, 2)
        self.optimizer = MegatronOptimizer(self.net)
        self.state = types.SimpleNamespace(train_state=types.SimpleNamespace(step=step))
        self.pushed: dict[int, dict[str, torch.Tensor]] = {}

    def context(self, **more: Any) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            **{"state": self.state, "model": [self.net], "user_state": {}, **more}
        )

    def load(self, folder: object) -> None:
        self.callback.on_checkpoint_load(self.context(checkpoint_name=str(folder)))

    def start(self) -> None:
        self.callback.on_train_start(self.context(optimizer=self.optimizer))

    def step(self, is_finite: bool = True) -> None:
        self.optimizer.is_finite = is_finite
        self.net(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.state.train_state.step += 1
        weights = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.pushed[self.callback.attachment.step] = weights

    def save(self, folder: object) -> None:
        self.callback.on_checkpoint_save(self.context(checkpoint_name=str(folder)))

    def evaluated(self) -> dict[str, torch.Tensor]:
        self.callback.on_eval_start(self.context())
        weights = {name: value.clone() for name, value in self.net.state_dict().items()}
        self.callback.on_eval_end(self.context())
        return weights

    def end(self) -> None:
        self.callback.on_train_end(self.context())


@pytest.mark.one_server("a group does not list the versions of before a resume")
def test_a_training_resumes_with_its_average(server, client, model, tmp_path, caplog):
    first = Training(EmaCallback(server.url(model), half_life="3ba", evaluate_with_average=True))
    first.start()
    for is_finite in (True, False, True, True):
        first.step(is_finite)
    own = {name: value.clone() for name, value in first.net.state_dict().items()}
    assert_same_bits(client.pull(model, track="ema"), first.evaluated())
    assert_same_bits(own, first.net.state_dict())
    first.save(tmp_path)
    saved = json.loads((tmp_path / "ema_state.json").read_text())
    assert (saved["global_step"], saved["average"]["step"]) == (4, 3)
    first.step()  # Lost: the training goes on from the checkpoint.
    first.end()
    assert client.model(model).latest.step == 4

    second = Training(EmaCallback(server.url(model), half_life="3ba"), step=4)
    second.load(tmp_path)
    second.start()
    second.step()
    assert_same_bits(second.evaluated(), second.net.state_dict())
    second.end()
    versions = [entry.version for entry in client.versions(model)]
    made = {version.step: version for version in reversed(versions)}  # The first ones.
    pushes = [(made[step], first.pushed[step]) for step in (1, 2, 3)]
    pushes.append((versions[-1], second.pushed[4]))
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))
    assert "resumes at" not in caplog.text


def test_a_checkpoint_of_another_step_does_not_identify_the_average(
    server, model, tmp_path, caplog
):
    first = Training(EmaCallback(server.url(model), half_life="3ba"))
    first.start()
    first.step()
    first.save(tmp_path)
    first.end()
    second = Training(EmaCallback(server.url(model), half_life="3ba"), step=2)
    second.load(tmp_path)
    second.start()
    assert "resumes at step 2" in caplog.text
    second.end()


def test_arguments_that_attach_does_not_have_are_refused_at_once():
    with pytest.raises(TypeError, match='"half_live"'):
        EmaCallback("ema://nowhere:1/m", half_live="3ba")
    with pytest.raises(ema_client.InvalidArgumentError):
        EmaCallback("ema://nowhere:1/m", half_life="-3ba")
