# SPDX-License-Identifier: Apache-2.0
"""Finds the frozen base of a model that PEFT's adapters adapt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ema_client._client.arrays import is_instance
from ema_client._client.pieces import object_of
from ema_client._model.torch_model import NamedTensors

if TYPE_CHECKING:
    import torch


def frozen_base(module: torch.nn.Module, tensors: NamedTensors) -> list[str]:
    """The parameters that PEFT has frozen, except for those of adapters that are not active now.
    Empty for any other model."""
    is_peft = False
    of_adapters: set[int] = set()
    of_base: set[int] = set()
    for part in module.modules():
        is_tuner = is_instance(part, "peft.tuners.tuners_utils", "BaseTunerLayer")
        is_tuner = is_tuner or is_instance(part, "peft.utils.other", "ModulesToSaveWrapper")
        is_peft = is_peft or is_tuner or is_instance(part, "peft.peft_model", "PeftModel")
        if is_tuner:
            of_adapters.update(map(id, part.parameters()))
        for name in ("base_layer", "original_module"):
            base = getattr(part, name, None) if is_tuner else None
            if base is not None:
                of_base.update(map(id, base.parameters()))
    if not is_peft:
        return []
    kept = of_adapters - of_base
    return [
        name for name in tensors.frozen() if id(object_of(tensors.parameters[name])) not in kept
    ]
