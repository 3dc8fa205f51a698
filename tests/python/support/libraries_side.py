# SPDX-License-Identifier: Apache-2.0
"""The averages of ultralytics, torch_ema, MMEngine, MMDetection and lightly, for test_venv_libraries.py."""

from __future__ import annotations

import copy
import functools
import importlib.util
import pathlib
from typing import Any

import torch
from libraries import UPDATES, Library, Tensors
from library_process import serve_jobs


class Ultralytics:
    def __init__(self, model: torch.nn.Module, **arguments: Any) -> None:
        from ultralytics.utils.torch_utils import ModelEMA

        self._model = model
        self._ema = ModelEMA(model, **arguments)

    def tensors(self) -> Tensors:
        return dict(self._ema.ema.state_dict())

    def update(self, n: int) -> float | None:
        self._ema.update(self._model)
        return 1 - float(self._ema.decay(self._ema.updates))


class TorchEma:
    def __init__(self, model: torch.nn.Module, **arguments: Any) -> None:
        from torch_ema import ExponentialMovingAverage

        self._names = [name for name, _ in model.named_parameters()]
        # Its average goes from 0 towards 1 by exactly the weight that the library applies.
        self._probe = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self._parameters = [*model.parameters(), self._probe]
        self._ema = ExponentialMovingAverage(self._parameters, **arguments)

    def tensors(self) -> Tensors:
        return dict(zip(self._names, self._ema.shadow_params))

    def update(self, n: int) -> float | None:
        average = self._ema.shadow_params[-1]
        with torch.no_grad():
            average.zero_()
            self._probe.fill_(1)
        self._ema.update(self._parameters)
        return float(average)


class MMEngine:
    """The class of MMEngine with a constant decay, or MMDetection's with an exponential ramp."""

    def __init__(self, model: torch.nn.Module, kind: str = "exp", **arguments: Any) -> None:
        from mmengine.model import ExponentialMovingAverage

        make = exp_momentum_ema() if kind == "exp" else ExponentialMovingAverage
        self._model = model
        self._ema = make(model, **arguments)

    def tensors(self) -> Tensors:
        return dict(self._ema.module.state_dict())

    def update(self, n: int) -> float | None:
        steps = int(self._ema.steps)
        self._ema.update_parameters(self._model)
        if steps == 0:
            return 1.0
        if steps % self._ema.interval != 0:
            return None
        # From 0 towards 1 the average goes by exactly the weight.
        probe = torch.zeros((), dtype=torch.float64)
        self._ema.avg_func(probe, torch.ones_like(probe), steps)
        return float(probe)


@functools.cache
def exp_momentum_ema() -> Any:
    """MMDetection's class, from its file: its package imports operators that mmcv-lite does not have.
    It registers the class, which MMEngine accepts once.
    """
    import mmdet

    file = pathlib.Path(mmdet.__file__).parent / "models/layers/ema.py"
    spec = importlib.util.spec_from_file_location("mmdet_ema", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ExpMomentumEMA


class Lightly:
    """BYOL's average as lightly's examples write it, whose cosine goes from step 0 to UPDATES."""

    def __init__(
        self, model: torch.nn.Module, base_decay: float = 0.996, final_decay: float = 1.0
    ) -> None:
        self._model, self._average = model, copy.deepcopy(model)
        self._decays = base_decay, final_decay

    def tensors(self) -> Tensors:
        return dict(self._average.named_parameters())

    def update(self, n: int) -> float | None:
        from lightly.models.utils import update_momentum
        from lightly.utils.scheduler import cosine_schedule

        # Its schedule reaches the final value at the last of `max_steps` steps, counted from 0.
        decay = cosine_schedule(n, UPDATES + 1, *self._decays)
        update_momentum(self._model, self._average, decay)
        return 1 - decay


LIBRARIES = {
    "ultralytics": Ultralytics,
    "torch_ema": TorchEma,
    "mmengine": MMEngine,
    "lightly": Lightly,
}


def make_library(kind: str, model: torch.nn.Module, arguments: dict[str, Any]) -> Library:
    make: Any = LIBRARIES[kind]
    result: Library = make(model, **arguments)
    return result


if __name__ == "__main__":
    serve_jobs(make_library)
