# SPDX-License-Identifier: Apache-2.0
"""What a push is of, and what all pushes of an attachment go by."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from ema_client._client.pieces import Held
from ema_client._client.types import TimeLike
from ema_client._model.torch_model import NamedTensors
from ema_client._trainer.away import OnError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class PushOptions:
    """What pushes go by, as `attach` was asked."""

    model_name: str
    tensors_of: Callable[[], NamedTensors]
    is_alone: bool  # There is one rank.
    time_of: Callable[[int], TimeLike] | None
    max_wait_s: float
    timeout_s: float
    on_error: OnError
    max_outage_s: float
    check: bool


@dataclasses.dataclass(frozen=True)
class Push:
    """What is pushed at a step, so that it can be pushed again while the weights are the same."""

    step: int
    time: dict[str, float]
    weights: dict[str, torch.Tensor | Held]
    frozen_changed: bool
