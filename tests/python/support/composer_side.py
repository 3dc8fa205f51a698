# SPDX-License-Identifier: Apache-2.0
"""Composer's EMA in its own environment, for test_composer.py.

Kind "algorithm" drives composer.algorithms.EMA by events as Composer's trainer does, "function"
calls compute_ema.
"""

from __future__ import annotations

from typing import Any

import torch
from composer.algorithms.ema import EMA, compute_ema
from composer.core import Event, State
from composer.devices import DeviceCPU
from composer.loggers import Logger
from libraries import UPDATES, Library, Net
from library_process import serve_jobs


class Algorithm:
    """EMA on the events of a training in which an epoch has `epoch_batches` batches."""

    def __init__(self, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
        self._epoch_batches = arguments.pop("epoch_batches", 10**9)
        self._ema = EMA(**arguments)
        self._state = State(
            model=model,
            rank_zero_seed=0,
            run_name="side",
            device=DeviceCPU(),
            max_duration=f"{UPDATES}ba",
        )
        self._logger = Logger(self._state, [])
        self._send(Event.INIT)

    def _send(self, event: Event) -> bool:
        matches = self._ema.match(event, self._state)
        if matches:
            self._ema.apply(event, self._state, self._logger)
        return matches

    def tensors(self) -> dict[str, torch.Tensor]:
        parameters = self._ema.ema_model
        assert parameters is not None
        return {**parameters.named_parameters_dict, **parameters.named_buffers_dict}

    def update(self, n: int) -> float | None:
        had_started = self._ema.ema_started
        self._send(Event.BATCH_START)
        self._state.timestamp = self._state.timestamp.to_next_batch()
        updated = self._send(Event.BATCH_END)
        if n % self._epoch_batches == 0:
            self._state.timestamp = self._state.timestamp.to_next_epoch()
            updated |= self._send(Event.EPOCH_END)
        if self._ema.ema_started and not had_started:
            return 1.0
        return 1 - self._ema.smoothing if updated else None


class Function:
    """compute_ema, called for each update."""

    def __init__(self, model: torch.nn.Module, arguments: dict[str, Any]) -> None:
        self._model = model
        self._ema_model = Net()
        self._arguments = arguments

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._ema_model.state_dict())

    def update(self, n: int) -> float | None:
        compute_ema(self._model, self._ema_model, **self._arguments)
        return 1 - self._arguments.get("smoothing", 0.99)


def make_library(kind: str, model: torch.nn.Module, arguments: dict[str, Any]) -> Library:
    make = {"algorithm": Algorithm, "function": Function}[kind]
    return make(model, arguments)


if __name__ == "__main__":
    serve_jobs(make_library)
