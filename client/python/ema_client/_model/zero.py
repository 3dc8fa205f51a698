# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed ZeRO-3: this rank's range of each parameter.

DeepSpeed keeps an equal part of the flattened parameter on each rank, with padding behind the last element:
`ds_tensor`. The module's own parameter is empty, except while a forward or backward uses it, or if it is so
small that it stays gathered between steps. So only `ds_tensor` is read and written.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ema_client._client.ranges import FlatMemory, ParameterRange, Ranges
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class _Partition(FlatMemory):
    """This rank's part of a parameter, and the padding behind it."""

    parameter: Any

    def tensor(self) -> torch.Tensor:
        # Each step may give it other memory.
        part: torch.Tensor = self.parameter.ds_tensor.detach()
        return part

    def writes(self) -> int:
        """Counts writes through `tensor` and through deepspeed.zero.GatheredParameters. Writes by optimizer
        steps are not counted."""
        return int(self.parameter.ds_tensor._version)


def has_partitions(module: torch.nn.Module) -> bool:
    """Whether ZeRO-3 has partitioned parameters of the module."""
    return next(_partitioned(module), None) is not None


def ranges_in(module: torch.nn.Module) -> Ranges:
    """This rank's ranges of all parameters that ZeRO-3 has partitioned; tied ones are the same object.

    InvalidArgumentError: a part is on a disk, or quantized, or not an equal share of the parameter.
    """
    made: dict[int, ParameterRange] = {}
    found: dict[int, dict[str, ParameterRange]] = {}
    for part, name, parameter in _partitioned(module):
        if id(parameter) not in made:
            made[id(parameter)] = _range_of(name, parameter)
        found.setdefault(id(part), {})[name] = made[id(parameter)]
    return found


def drop_gathered(module: torch.nn.Module) -> None:
    """Frees gathered parameters, so that the next forward gathers them again, even after an exception
    inside a forward."""
    for _, _, parameter in _partitioned(module):
        if parameter.ds_status.name == "AVAILABLE":
            parameter.ds_active_sub_modules.clear()
            parameter.partition()
        # Of hpZ (zero_hpz_partition_size): a second copy, from which the next forward would gather.
        parameter.ds_secondary_tensor = None


def _partitioned(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, Any]]:
    """The partitioned parameters, tied ones under each name."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if getattr(parameter, "ds_tensor", None) is not None:
                yield part, name, parameter


def _range_of(name: str, parameter: Any) -> ParameterRange:
    import torch.distributed as dist

    group, part = parameter.ds_process_group, parameter.ds_tensor
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    numel, share = int(parameter.ds_numel), int(part.ds_numel)
    problem = ""
    if part.final_location == "nvme":
        problem = "is offloaded to a disk: offload parameters to the CPU, or not at all"
    elif hasattr(part, "ds_quant_scale"):
        problem = "is quantized: turn zero_quantized_nontrainable_weights off"
    elif rank < 0 or share != math.ceil(numel / world_size):
        problem = (
            f"rank {rank} of {world_size} has {share} of {numel} elements, which is no equal share, as with "
            "MiCS (mics_shard_size): use ZeRO-3 without it"
        )
    if problem:
        raise InvalidArgumentError(
            f'parameter "{name}", which DeepSpeed ZeRO-3 has partitioned: {problem}',
            reason="BAD_LAYOUT",
        )
    first = min(rank * share, numel)
    return ParameterRange(
        parameter,
        tuple(parameter.ds_shape),
        *(first, _Partition(parameter)),
        *(0, min(share, numel - first)),
    )
