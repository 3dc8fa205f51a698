# SPDX-License-Identifier: Apache-2.0
"""Megatron-core's models: which part of a whole tensor each parameter is.

With tensor, pipeline and expert parallelism, parameters do not say this themselves, but `sharded_state_dict`
does, from which Megatron-core makes its distributed checkpoints: for each tensor a name, the shape of the
whole tensor, and the position of this rank's part. The names are those of the whole model. Of the first layer
of a gated MLP, whose two halves are in one parameter, each half is a tensor: linear_fc1.weight_w and _v.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ema_client._client.arrays import is_instance, some
from ema_client._client.ranges import ParameterBox
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# Each tensor of each layer and expert gets a name of its own.
_METADATA = {"singleton_local_shards": True, "non_homogeneous_layers": True}


def is_megatron(module: torch.nn.Module) -> bool:
    """Whether the unwrapped module is Megatron-core's."""
    return is_instance(module, "megatron.core.transformer.module", "MegatronModule")


def parts_in(module: torch.nn.Module) -> dict[str, Any]:
    """The parameters and persistent buffers of a MegatronModule, by their names in the whole model: the
    objects themselves if they are whole, else a `ParameterBox`.

    InvalidArgumentError: the module's `sharded_state_dict` does not say what a parameter is a part of.
    """
    own = [*module.named_parameters(), *module.named_buffers()]
    # Parameters may be parts of one storage, so they are found by their addresses.
    by_address = sorted((tensor.data_ptr(), name, tensor) for name, tensor in own if tensor.numel())
    addresses = [address for address, _, _ in by_address]
    found: dict[str, Any] = {}
    covered = dict.fromkeys((name for name, _ in module.named_parameters()), 0)
    for part in _sharded_tensors(module):
        index = bisect.bisect_right(addresses, part.data.data_ptr()) - 1
        address, name, tensor = by_address[max(index, 0)]
        start, rest = divmod(part.data.data_ptr() - address, tensor.element_size())
        if rest or not 0 <= start < tensor.numel() or part.data.dtype != tensor.dtype:
            continue  # A copy. If a parameter is nowhere else, it is named below.
        if part.key in found:
            raise _refused(part.key, "sharded_state_dict() has two parts of this name")
        covered[name] = covered.get(name, 0) + part.data.numel()
        ones = (1,) * part.prepend_axis_num
        box = ParameterBox(
            parameter=tensor,
            shape=tuple(part.global_shape),
            offsets=tuple(part.global_offset),
            extents=(*ones, *part.data.shape),
            strides=(*ones, *part.data.stride()),
            start=start,
        )
        is_itself = start == 0 and tuple(tensor.shape) == box.shape == box.extents
        found[part.key] = tensor if is_itself else box
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    lacking = [name for name, count in sizes.items() if covered[name] != count]
    if lacking:
        raise _refused(
            some(lacking), "sharded_state_dict() does not have all of its elements in place"
        )
    return found


def _sharded_tensors(module: Any) -> Iterator[Any]:
    """Its parts that are tensors, each as Megatron-core's ShardedTensor, with this rank's values in `data`."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = module.sharded_state_dict(metadata=dict(_METADATA))
    apply_factories(state)
    for value in nested_values(state):
        if isinstance(value, ShardedTensor) and value.data is not None and value.data.numel():
            yield value


def _refused(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f'tensor "{name}" of a model of Megatron-core: {problem}; give `rename`, and the tensors are those of '
        "each rank, under the names that it gives",
        reason="BAD_LAYOUT",
    )
