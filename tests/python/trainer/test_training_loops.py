# SPDX-License-Identifier: Apache-2.0
"""Training loops of plain PyTorch: a few dozen steps, and each version bit for bit as in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import ema_client
import pytest
import torch
from testing import assert_same_bits

STEPS = 30
SCHEDULE = {"half_life": "8ba", "update_interval": "4ba"}
# A loop over a trainer's steps: what it yields is whether the optimizer has changed the weights.
Loop = Callable[["Trainer"], Iterator[bool]]


class Net(torch.nn.Module):
    """Statistics, a weight that is tied, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(7, 13)
        self.norm = torch.nn.BatchNorm1d(13)
        self.middle = torch.nn.Linear(13, 13)
        self.middle.requires_grad_(False)
        self.second = torch.nn.Linear(13, 7)
        self.last = torch.nn.Linear(7, 13, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.middle(torch.relu(self.norm(self.first(x)))))
        return self.last(x)


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(2)
        self.module = Net()
        trained = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.02)
        self.model: torch.nn.Module = self.module
        self._generator = torch.Generator().manual_seed(3)

    def loss(self) -> torch.Tensor:
        x = torch.randn(8, 7, generator=self._generator)
        return self.model(x).float().square().mean()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.module.state_dict().items()}


def plain(trainer: Trainer) -> Iterator[bool]:
    while True:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        trainer.optimizer.step()
        yield True


def compiled(trainer: Trainer) -> Iterator[bool]:
    """Forward and backward are traced; what their code would be compiled to does not matter to us."""
    trainer.model = torch.compile(trainer.module, backend="aot_eager")
    return plain(trainer)


def mixed_precision(trainer: Trainer) -> Iterator[bool]:
    """Every fifth step has gradients that are not finite, and is skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    batch = 0
    while True:
        batch += 1
        is_bad = batch % 5 == 2
        trainer.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = trainer.loss()
        scaler.scale(loss * float("inf") if is_bad else loss).backward()
        scaler.unscale_(trainer.optimizer)
        torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), 1.0)
        scaler.step(trainer.optimizer)
        scaler.update()
        yield not is_bad


def accumulated(trainer: Trainer) -> Iterator[bool]:
    batch = 0
    while True:
        batch += 1
        (trainer.loss() / 3).backward()
        if batch % 3 == 0:
            torch.nn.utils.clip_grad_norm_(trainer.module.parameters(), 0.1)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
        yield batch % 3 == 0


LOOPS = [plain, compiled, mixed_precision, accumulated]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_each_version_is_that_in_the_process(server, client, model, loop: Loop):
    trainer = Trainer()
    local = ema_client.LocalEMA(trainer.module, **SCHEDULE)
    expected: dict[int, dict[str, torch.Tensor]] = {}
    made = 0
    steps = loop(trainer)
    with ema_client.attach(
        trainer.model, trainer.optimizer, server.url(model), **SCHEDULE, max_wait_s=300
    ) as ema:
        while made < STEPS:
            before = trainer.weights()
            if next(steps):
                made += 1
                local.update()
                expected[made] = local.weights()
                assert not torch.equal(before["first.weight"], trainer.module.first.weight)
            assert ema.step == made
            version = ema.wait_pushed()
            if version is not None and version.step == made:
                pulled = client.pull(model, track="ema", version=version)
                assert pulled["last.weight"] is pulled["first.weight"]
                assert_same_bits(expected[made], pulled)
    assert [entry.version.step for entry in client.versions(model)] == [1, *range(4, STEPS, 4)]
    names = {spec.name for spec in client.model(model).tensors}
    assert names == {name for name in trainer.module.state_dict() if name != "last.weight"}


def train_step(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad()
    trainer.loss().backward()
    trainer.optimizer.step()


def compiled_optimizer(trainer: Trainer, backend: str) -> Callable[[], None]:
    """PyTorch's recipe: the optimizer's step by itself."""
    optimizer_step = torch.compile(trainer.optimizer.step, backend=backend)

    def step() -> None:
        trainer.optimizer.zero_grad()
        trainer.loss().backward()
        optimizer_step()

    return step


def compiled_train_step(trainer: Trainer, backend: str) -> Callable[[], None]:
    return torch.compile(lambda: train_step(trainer), backend=backend)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "compile_step", [compiled_optimizer, compiled_train_step], ids=lambda make: make.__name__
)
def test_compiled_steps_call_our_hooks(server, client, model, caplog, compile_step, backend):
    """Nothing waits for a push but what the hooks wait for."""
    torch._dynamo.reset()
    trainer = Trainer()
    local = ema_client.LocalEMA(trainer.module, half_life="8ba")
    step = compile_step(trainer, backend)
    with ema_client.attach(
        trainer.module, trainer.optimizer, server.url(model), half_life="8ba", max_wait_s=300
    ) as ema:
        for made in range(1, STEPS + 1):
            step()
            local.update()
            assert ema.step == made
    check_all_pushed(client, model, ema, local, caplog)


def test_steps_counted_by_hand_in_compiled_code(server, client, model, caplog):
    torch._dynamo.reset()
    trainer = Trainer()
    local = ema_client.LocalEMA(trainer.module, half_life="8ba")
    with ema_client.attach(
        trainer.module, None, server.url(model), half_life="8ba", max_wait_s=300
    ) as ema:

        def step() -> None:
            train_step(trainer)
            ema.after_step()

        step = torch.compile(step, backend="eager")
        for _ in range(STEPS):
            step()
            local.update()
    check_all_pushed(client, model, ema, local, caplog)


def check_all_pushed(client, model, ema, local, caplog) -> None:
    assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (STEPS, STEPS, 0)
    assert_same_bits(local.weights(), client.pull(model, track="ema"))
    assert "written since" not in caplog.text
