# SPDX-License-Identifier: Apache-2.0
"""Composer's EMA in its own environment, for test_libraries.py.

Takes jobs from stdin, a line of JSON each: reads the steps that ours took, does each with Composer from
the average that ours began with, writes what Composer made of them, and says "done". Kind "algorithm"
drives composer.algorithms.EMA by events as its trainer does, "function" calls compute_ema.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from composer.algorithms.ema import EMA, compute_ema
from composer.core import Event, State
from composer.devices import DeviceCPU
from composer.loggers import Logger
from libraries import Net, Step, run_theirs


class Algorithm:
    """EMA on the events of a training in which an epoch has `epoch_batches` batches."""

    def __init__(self, model: torch.nn.Module, options: dict[str, Any], updates: int) -> None:
        self._epoch_batches = options.pop("epoch_batches", 10**9)
        self._ema = EMA(**options)
        self._state = State(
            model=model,
            rank_zero_seed=0,
            run_name="side",
            device=DeviceCPU(),
            max_duration=f"{updates}ba",
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
    def __init__(self, model: torch.nn.Module, options: dict[str, Any]) -> None:
        self._model = model
        self._ema_model = Net()
        self._options = options

    def tensors(self) -> dict[str, torch.Tensor]:
        return dict(self._ema_model.state_dict())

    def update(self, n: int) -> float | None:
        compute_ema(self._model, self._ema_model, **self._options)
        return 1 - self._options.get("smoothing", 0.99)


def do(job: dict[str, Any]) -> None:
    steps = [Step(**fields) for fields in torch.load(job["steps"])]
    model = Net()
    if job["kind"] == "algorithm":
        library: Algorithm | Function = Algorithm(model, job["options"], len(steps))
    else:
        library = Function(model, job["options"])
    result = [(theirs.after, theirs.weight) for theirs in run_theirs(library, model, steps)]
    torch.save(result, job["theirs"])


def main() -> None:
    # Composer's loggers shall not write where the answers go.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        do(json.loads(line))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
