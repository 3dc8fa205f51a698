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
from ema_client._client.ranges import FlatMemory, ParameterBox, ParameterRange, is_row_major
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


class MasterRange(ParameterRange):
    """Stands for a parameter of which this rank has a range of the master."""

    def writes(self) -> int:
        """Writes to the parameter itself, such as those of `averaged`, do not change the master."""
        return self.memory.writes()


class MasterBox(ParameterBox):
    """Stands for a box of a parameter of Megatron-core of which this rank has the master."""

    @property
    def local(self) -> Any:
        return self.view_of(self.parameter.main_param.detach())

    def writes(self) -> int:
        return int(self.parameter.main_param._version)


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
        return _part_of_megatron(parameter, optimizer)
    return None


@dataclasses.dataclass(frozen=True)
class _DeepSpeedMemory(FlatMemory):
    """The part of a master that this rank has with ZeRO-1, 2 or DeepSpeed's bfloat16 optimizer."""

    parameter: Any

    def tensor(self) -> torch.Tensor:
        import torch

        mapping = self.parameter._hp_mapping
        if mapping is None:  # Other ranks have the master.
            return torch.empty(0, device=self.parameter.device)
        part: torch.Tensor = mapping.hp_fragment.detach()
        return part


def _range_of_deepspeed(parameter: Any) -> MasterRange:
    mapping = parameter._hp_mapping
    first, count = 0, 0
    if mapping is not None:
        first, count = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    return _master(parameter, parameter.shape, first, _DeepSpeedMemory(parameter), 0, count)


@dataclasses.dataclass(frozen=True)
class _Zero3Memory(FlatMemory):
    """This rank's part of the masters of a group of parameters with ZeRO-3."""

    optimizer: Any
    group: int

    def tensor(self) -> torch.Tensor:
        # DeepSpeed may move it to the CPU and back.
        flat: torch.Tensor = self.optimizer.fp32_partitioned_groups_flat[self.group].detach()
        return flat


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
class _MegatronMemory(FlatMemory):
    """The part of a master that this rank has with Megatron-core."""

    parameter: Any

    def tensor(self) -> torch.Tensor:
        import torch

        main = self.parameter.main_param
        if main is None:  # Other ranks have the master.
            return torch.empty(0, device=self.parameter.device)
        flat: torch.Tensor = main.detach().view(-1)
        return flat


def _part_of_megatron(part: Any, optimizer: Any) -> MasterRange | MasterBox | None:
    """The master of a parameter, or of a box of it. None: the optimizer keeps no master, or it is not known
    which part of it this rank has."""
    parameter = object_of(part)
    if getattr(parameter, "main_param_sharded", False):
        return _range_of_megatron(part, optimizer)
    if parameter.main_param is None:
        return None
    if isinstance(part, ParameterBox):
        return MasterBox(**vars(part))
    memory = _MegatronMemory(parameter)
    return _master(parameter, parameter.shape, 0, memory, 0, parameter.numel())


def _range_of_megatron(part: Any, optimizer: Any) -> MasterRange | None:
    """The same with the distributed optimizer, which has a range of the parameter's elements on each rank."""
    parameter = object_of(part)
    first, end = 0, 0
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        if one is None or one.config.use_precision_aware_optimizer:
            return None  # The masters are in the fused optimizer, perhaps in another format.
        if parameter.main_param is not None and parameter in one.model_param_gbuf_map:
            found = one._get_model_param_range_map(parameter)["param"]
            first, end = found.start, found.end
            break
    memory = _MegatronMemory(parameter)
    if not isinstance(part, ParameterBox):
        return _master(parameter, parameter.shape, first, memory, 0, end - first)
    if not is_row_major(part.extents, part.strides):
        return None
    # The box's elements follow each other in the parameter, and some of them are in the range.
    begin = max(first, part.start)
    count = max(0, min(end, part.start + math.prod(part.extents)) - begin)
    start, begin = (begin - first, begin - part.start) if count else (0, 0)
    box = part.offsets, part.extents
    return MasterRange(parameter, part.shape, begin, memory, start, count, box)


def _master(
    parameter: Any, shape: tuple[int, ...], first: int, memory: FlatMemory, start: int, count: int
) -> MasterRange:
    assert first + count <= math.prod(shape)
    return MasterRange(parameter, tuple(shape), first, memory, start, count)
