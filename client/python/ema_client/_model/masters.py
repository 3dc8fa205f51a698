# SPDX-License-Identifier: Apache-2.0
"""The float32 masters of parameters of lower precision: the copies that the optimizer trains.

A master may be spread over ranks although each rank has the whole parameter (DeepSpeed ZeRO-1 and 2,
Megatron-core's distributed optimizer), so it is a range of the parameter's elements.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client import arrays
from ema_client._client.pieces import object_of
from ema_client._client.ranges import FlatMemory, ParameterRange
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


class MasterRange(ParameterRange):
    """Stands for a parameter of which this rank has a range of the master."""

    def writes(self) -> int:
        """Writes to the parameter itself, such as those of `averaged`, do not change the master."""
        return self.memory.writes()


def masters_of(parameters: Mapping[str, Any], optimizer: Any = None) -> dict[str, Any]:
    """The masters of trained parameters, by name; the other parameters as they are: a float32 parameter is
    its own master. `optimizer`: Megatron-core's, if it is one.

    InvalidArgumentError: a trained parameter of lower precision has no master, or it is on a disk.
    """
    found = {name: _master_of(name, one, optimizer) for name, one in parameters.items()}
    lacking = [name for name, one in found.items() if one is None]
    if lacking:
        dtype = str(parameters[lacking[0]].dtype).removeprefix("torch.")
        raise InvalidArgumentError(
            f'source "master": the optimizer keeps no float32 copies of {len(lacking)} parameters: '
            f"{arrays.some(lacking)} ({dtype}). DeepSpeed keeps them with ZeRO-1, 2 and 3, and Megatron-core "
            "with a mixed-precision optimizer, which attach() needs. Otherwise train float32 "
            'parameters, under torch.autocast; or average the rounded ones: source="parameters"',
            reason="BAD_LAYOUT",
        )
    return found


def _master_of(name: str, parameter: Any, optimizer: Any) -> Any:
    """None: there is none."""
    is_low = parameter.is_floating_point() and parameter.dtype.itemsize < 4
    if not parameter.requires_grad or not is_low:
        return parameter
    trained = object_of(parameter)
    if (zero3 := getattr(trained, "_z3_optimizer", None)) is not None:
        return _range_of_zero3(name, parameter, zero3)
    if hasattr(trained, "_hp_mapping"):
        return _range_of_deepspeed(trained)
    if hasattr(trained, "main_param"):
        return _range_of_megatron(trained, optimizer)
    return None


@dataclasses.dataclass(frozen=True)
class _DeepSpeedMemory:
    """The part of a master that this rank has with ZeRO-1, 2 or DeepSpeed's bfloat16 optimizer."""

    parameter: Any

    def tensor(self) -> torch.Tensor:
        import torch

        mapping = self.parameter._hp_mapping
        if mapping is None:  # Other ranks have the master.
            return torch.empty(0, device=self.parameter.device)
        part: torch.Tensor = mapping.hp_fragment.detach()
        return part

    def writes(self) -> int:
        return int(self.tensor()._version)


def _range_of_deepspeed(parameter: Any) -> MasterRange:
    mapping = parameter._hp_mapping
    first, count = 0, 0
    if mapping is not None:
        first, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    return _master(parameter, parameter.shape, first, _DeepSpeedMemory(parameter), 0, count)


@dataclasses.dataclass(frozen=True)
class _Zero3Memory:
    """This rank's part of the masters of a group of parameters with ZeRO-3."""

    optimizer: Any
    group: int

    def tensor(self) -> torch.Tensor:
        # DeepSpeed may move it to the CPU and back.
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[self.group].detach()
        return flat

    def writes(self) -> int:
        return int(self.tensor()._version)


def _range_of_zero3(name: str, parameter: ParameterRange, optimizer: Any) -> MasterRange:
    """`parameter`: this rank's partition, of which it has the master."""
    trained = object_of(parameter)
    group, start, _ = optimizer.grad_position[optimizer.get_param_id(trained)]
    if optimizer._swappable_optimizer_subgroup(group):
        raise InvalidArgumentError(
            f'source "master": DeepSpeed has offloaded the float32 copy of parameter "{name}" to a disk: '
            'offload the optimizer to the CPU, or not at all, or give source="parameters"',
            reason="BAD_LAYOUT",
        )
    memory = _Zero3Memory(optimizer, group)
    return _master(trained, parameter.shape, parameter.first, memory, start, parameter.count)


@dataclasses.dataclass(frozen=True)
class _MegatronMemory:
    """The part of a master that this rank has with Megatron-core."""

    parameter: Any

    def tensor(self) -> torch.Tensor:
        import torch

        main = self.parameter.main_param
        if main is None:  # Other ranks have the master.
            return torch.empty(0, device=self.parameter.device)
        flat: torch.Tensor = main.detach().view(-1)
        return flat

    def writes(self) -> int:
        return int(self.tensor()._version)


def _range_of_megatron(parameter: Any, optimizer: Any) -> MasterRange | None:
    """None: the optimizer keeps no master, or it is not known which part of it this rank has."""
    memory = _MegatronMemory(parameter)
    if not getattr(parameter, "main_param_sharded", False):
        if parameter.main_param is None:
            return None
        return _master(parameter, parameter.shape, 0, memory, 0, parameter.numel())
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one is None or one.config.use_precision_aware_optimizer:
            return None  # The masters are in the fused optimizer, perhaps in another format.
        if parameter.main_param is not None and parameter in one.model_param_gbuf_map:
            found = one._get_model_param_range_map(parameter)["param"]
            count = found.end - found.start
            return _master(parameter, parameter.shape, found.start, memory, 0, count)
    return _master(parameter, parameter.shape, 0, memory, 0, 0)


def _master(
    parameter: Any, shape: tuple[int, ...], first: int, memory: FlatMemory, start: int, count: int
) -> MasterRange:
    assert first + count <= math.prod(shape)
    return MasterRange(parameter, tuple(shape), first, memory, start, count)
