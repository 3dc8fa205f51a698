# SPDX-License-Identifier: Apache-2.0
"""FullyShardedDataParallel (FSDP1): this rank's ranges of the parameters that it has flattened.

Each wrapped module has a flat parameter: its parameters' elements one behind the other, with padding, of
which each rank keeps an equal part. Between two steps, the module's own parameters are views of that part
(use_orig_params=True), or not registered at all, and while it computes they are views of gathered
memory. So they are found by FSDP1's own records, and only the rank's part is read and written.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ema_client._client.ranges import FlatMemory, ParameterRange, Ranges, is_row_major
from ema_client._client.safetensors import unwrapped_name
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class _FlatShard(FlatMemory):
    """This rank's part of a flat parameter, outside forward and backward. `part`: the wrapper."""

    part: Any

    def tensor(self) -> torch.Tensor:
        flat = self.part._handle.flat_param
        # The first forward, and the first one after the module was moved, give it its memory.
        shard: torch.Tensor = flat.detach() if self.part._is_root is None else flat._local_shard
        return shard

    def writes(self) -> int:
        """Of the optimizer's steps, and through `tensor`."""
        flat = self.part._handle.flat_param
        counted = (flat, flat._local_shard) if hasattr(flat, "_local_shard") else (flat,)
        return sum(0 if one.is_inference() else int(one._version) for one in counted)


def wrappers_in(module: torch.nn.Module) -> list[Any]:
    """The module and the modules in it that are FullyShardedDataParallel."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    return [part for part in module.modules() if isinstance(part, fsdp.FullyShardedDataParallel)]


def ranges_in(module: torch.nn.Module) -> Ranges:
    """This rank's ranges of all parameters that FSDP1 has flattened, tied ones under each name.

    InvalidArgumentError: the order of a parameter's elements is not row-major, or it was a DTensor; or
    the module is inside a wrapper that is not in it.
    """
    found: dict[int, dict[str, ParameterRange]] = {}
    wrappers = wrappers_in(module)
    for part in wrappers:
        if part._handle is None:  # All its parameters belong to wrappers inside it, or are ignored.
            continue
        flat, memory = part._handle.flat_param, _FlatShard(part)
        if part._is_root is None and part._handle._offload_params:
            # The first forward moves its values to other memory.
            problem = "is offloaded to the CPU, and no forward has run yet: run one first"
            raise _refused(flat._fqns[0], problem)
        for index, (info, place) in enumerate(zip(flat._param_infos, flat._shard_param_infos)):
            shape = tuple(flat._shapes[index])
            if flat._param_extensions[index] is not None:
                raise _refused(
                    flat._fqns[index],
                    "is a DTensor (tensor parallelism) inside FullyShardedDataParallel (FSDP1); use "
                    "torch.distributed.fsdp.fully_shard (FSDP2) with it",
                )
            if not is_row_major(shape, flat._strides[index]):
                raise _refused(
                    flat._fqns[index],
                    f"had strides {tuple(flat._strides[index])} for shape {shape} when "
                    "FullyShardedDataParallel (FSDP1) flattened it; must be row-major: wrap the model "
                    "before you convert it to channels_last, or use fully_shard (FSDP2)",
                )
            found.setdefault(id(info.module), {})[info.param_name] = ParameterRange(
                flat if flat._params is None else flat._params[index],
                shape,
                *(place.intra_param_start_idx or 0, memory),
                *(place.offset_in_shard or 0, place.numel_in_shard or 0),
            )
        for shared in flat._shared_param_infos:
            own = found[id(shared.prim_module)][shared.prim_param_name]
            found.setdefault(id(shared.module), {})[shared.param_name] = own
    _check_wrapped(module, wrappers, found)
    return found


def _check_wrapped(
    module: torch.nn.Module, wrappers: Iterable[torch.nn.Module], found: Ranges
) -> None:
    """InvalidArgumentError: parameters of the module are in the flat parameter of a wrapper outside."""
    if not any("_is_fsdp_managed_module" in part.__dict__ for part in module.modules()):
        return
    inside = {id(part) for wrapper in wrappers for part in wrapper.modules()}
    for name, part in module.named_modules():
        # Only with use_orig_params=True does the module still list its parameters. fully_shard sets
        # this attribute, too.
        is_hidden = not part.__dict__.get("_fsdp_use_orig_params", True) and id(part) not in inside
        own = found.get(id(part), {})
        for parameter_name, parameter in part._parameters.items():
            is_flattened = getattr(parameter, "_fsdp_flattened", False)
            is_flat = getattr(parameter, "_is_flat_param", False)
            is_hidden |= is_flattened and not is_flat and parameter_name not in own
        if is_hidden:
            raise _refused(
                name or type(part).__name__,
                "is inside a FullyShardedDataParallel (FSDP1) that has its parameters: give that one, "
                "the result of FullyShardedDataParallel(model)",
                what="module",
            )


def buffer_dtypes(module: torch.nn.Module) -> dict[int, torch.dtype]:
    """The dtypes that buffers have in the model's state_dict, by their ids: the first forward casts them
    to another one (MixedPrecision's buffer_dtype)."""
    dtypes: dict[int, torch.dtype] = {}
    for part in wrappers_in(module):
        for name, buffer in part.named_buffers():
            dtype = part._buffer_name_to_orig_dtype.get(unwrapped_name(name))
            if dtype is not None:
                dtypes.setdefault(id(buffer), dtype)
    return dtypes


def drop_gathered(module: torch.nn.Module) -> None:
    """Frees gathered parameters, so that the next forward gathers them again, even after an exception
    inside a forward. Does nothing inside a backward."""
    for part in wrappers_in(module):
        handle = part._handle
        if handle is None or part._is_root is None:
            continue
        from torch.distributed.fsdp._common_utils import HandleTrainingState
        from torch.distributed.fsdp._runtime_utils import _reshard

        if handle._training_state.name.startswith("BACKWARD"):
            return
        flat = handle.flat_param
        is_gathered = handle.uses_sharded_strategy and not handle.needs_unshard()
        if is_gathered or flat.data_ptr() != flat._local_shard.data_ptr():
            handle._training_state = HandleTrainingState.IDLE
            _reshard(part, handle, handle.uses_sharded_strategy)


def _refused(name: str, problem: str, *, what: str = "parameter") -> InvalidArgumentError:
    return InvalidArgumentError(f'{what} "{name}": {problem}', reason="BAD_LAYOUT")
