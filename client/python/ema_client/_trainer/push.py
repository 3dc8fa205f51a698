# SPDX-License-Identifier: Apache-2.0
"""The arguments of `attach` that concern pushes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

from ema_client._client.types import TimeLike
from ema_client._model.torch_model import NamedTensors

#: The default of `attach(max_outage_s=)`.
MAX_OUTAGE_S = 120.0

OnError = Literal["skip", "wait", "raise"]


@dataclasses.dataclass(frozen=True)
class PushOptions:
    """As `attach` describes them."""

    model_name: str
    tensors_of: Callable[[], NamedTensors]
    time_of: Callable[[int], TimeLike] | None
    max_wait_s: float
    timeout_s: float
    on_error: OnError
    max_outage_s: float
    check: bool
