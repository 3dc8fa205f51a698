# SPDX-License-Identifier: Apache-2.0
"""Trainings with composer.Trainer in its own environment, for test_composer_training.py.

Takes jobs from stdin, a line of JSON each (see `do`), saves what happened and says "done".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import composer.algorithms
import torch
from composer import Callback, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from ema_client import composer as ema_composer
from ema_client.composer import EMA
from torch.utils.data import DataLoader, TensorDataset

BATCHES = 6


class Model(ComposerModel):
    """Float and integer statistics, a frozen weight, and a buffer that is not in its state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
        )
        self.scale = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("offset", torch.arange(3.0), persistent=False)

    def forward(self, batch):
        return self.net(batch[0]) * self.scale.mean() + self.offset.sum()

    def loss(self, outputs, batch):
        return (outputs - batch[1]).square().mean()

    def eval_forward(self, batch, outputs=None):
        return self(batch)

    def get_metrics(self, is_train=False):
        return {}

    def update_metric(self, batch, outputs, metric) -> None:
        raise AssertionError("there are no metrics")


class Recorder(Callback):
    """The weights after each batch, and in each evaluation. Kills a process after a batch, and spoils what is
    pushed after another one."""

    def __init__(
        self, kills: tuple[int, int] | None, spoils: int | None, reads_training_weights: bool
    ) -> None:
        self._kills = kills
        self._spoils = spoils
        self._reads_training_weights = reads_training_weights
        self._mean = torch.zeros(0)
        self.trained: dict[int, dict[str, torch.Tensor]] = {}
        self.evaluated: list[tuple[int, dict[str, torch.Tensor]]] = []
        # In evaluations with the average: what get_training_model() writes into another model.
        self.training_models: list[tuple[int, dict[str, torch.Tensor]]] = []

    def before_forward(self, state, logger) -> None:
        # Composer counts a batch at its end.
        if state.timestamp.batch.value + 1 == self._spoils:
            running_mean = state.model.net[1].running_mean
            self._mean = running_mean.clone()
            running_mean[0] = torch.nan

    def batch_end(self, state, logger) -> None:
        if state.timestamp.batch.value == self._spoils:
            state.model.net[1].running_mean.copy_(self._mean)
        self.trained[state.timestamp.batch.value] = weights_of(state.model)
        if self._kills is not None and self._kills[0] == state.timestamp.batch.value:
            os.kill(self._kills[1], signal.SIGKILL)

    def eval_start(self, state, logger) -> None:
        self.evaluated.append((state.timestamp.batch.value, weights_of(state.model)))
        algorithm = state.algorithms[0]
        if self._reads_training_weights and algorithm.ema_weights_active:
            training_model = algorithm.get_training_model(Model())
            self.training_models.append((state.timestamp.batch.value, weights_of(training_model)))

    def eval_end(self, state, logger) -> None:
        batch = state.timestamp.batch.value
        if batch in self.trained:
            for name, value in weights_of(state.model).items():
                assert torch.equal(value, self.trained[batch][name]), name


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    module = getattr(model, "module", model)
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """Of a module, or of Composer's EMAParameters."""
    return {
        name: value.detach().clone()
        for name, value in (*model.named_parameters(), *model.named_buffers())
    }


def no_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("no memory")


def loader() -> DataLoader:
    x = torch.randn(8 * BATCHES, 4, generator=torch.Generator().manual_seed(2))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    # Each rank has a part of it.
    sampler = dist.get_sampler(data) if dist.get_world_size() > 1 else None
    return DataLoader(data, batch_size=8, sampler=sampler)


def train(job: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Model()
    recorder = Recorder(
        job.get("kills"), job.get("spoils"), job.get("reads_training_weights", False)
    )
    algorithm = {"ours": EMA, "theirs": composer.algorithms.EMA}[job["kind"]](**job["options"])
    others = [getattr(composer.algorithms, name)() for name in job.get("others", ())]
    trainer = Trainer(
        model=model,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5),
        train_dataloader=loader(),
        eval_dataloader=loader() if job.get("eval_interval") else None,
        eval_interval=job.get("eval_interval") or 0,
        max_duration=job.get("max_duration", "2ep"),
        algorithms=[algorithm, *others],
        callbacks=[recorder],
        device="cpu",
        progress_bar=False,
        save_folder=job.get("save_folder"),
        save_interval=job.get("save_interval", "1ep"),
        load_path=job.get("load_path"),
        run_name="run",
    )
    swapped = ema_composer.swapped
    models: dict[str, Any] = {}
    try:
        if job.get("starves"):
            ema_composer.swapped = no_memory
        for call in job.get("calls", ["fit"]):
            if call == "fit again":
                trainer.fit(duration="3ba")
            elif call == "close":
                algorithm.close()
            elif call == "models":
                models = {"of": algorithm.ema_model, "ema": algorithm.get_ema_model(Model())}
            else:
                getattr(trainer, call)(*([loader()] if call == "eval" else []))
        result = {"trained": recorder.trained, "evaluated": recorder.evaluated}
        result["training_models"] = recorder.training_models
        result["model"] = weights_of(model)
        result["models"] = {name: tensors_of(one) for name, one in models.items()}
        if job["kind"] == "ours":
            result["stats"] = vars(algorithm.attachment.stats) if algorithm.attachment else None
            algorithm.close()
        return result
    finally:
        ema_composer.swapped = swapped
        trainer.close()


def do(job: dict[str, Any]) -> None:
    """Saves to job["out"] what `train` returns, or the error."""
    try:
        result = train(job)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}"}
    torch.save(result, job["out"])


def main() -> None:
    # Composer's loggers shall not write where the answers go.
    answers, sys.stdout = sys.stdout, sys.stderr
    torch.set_num_threads(1)
    for line in sys.stdin:
        do(json.loads(line))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
