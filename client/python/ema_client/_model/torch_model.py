# SPDX-License-Identifier: Apache-2.0
"""The tensors of a torch.nn.Module, by the names that its state_dict has outside any wrapper."""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.out import writing
from ema_client._client.pieces import is_dtensor, is_part, local_of, object_of, pieces_of
from ema_client._client.ranges import ParameterPart, Ranges
from ema_client._client.safetensors import unwrapped_name
from ema_client._client.types import Shard
from ema_client._errors import InvalidArgumentError
from ema_client._model import engine, fsdp1, megatron, zero
from ema_client._model.masters import masters_of

if TYPE_CHECKING:
    import torch

# Modules of PyTorch that have FSDPModule, the class that `fully_shard` gives modules; PyTorch 2.5
# has only the second.
_FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Parameters (tied ones once, under the first name) and persistent buffers, by name.

    For parameters that FSDP1 has flattened or ZeRO-3 has partitioned, `parameters` has `ParameterRange`; for
    those of Megatron-core `ParameterBox`, if this rank has a part.
    """

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    # By first name: the further names of tied tensors in state_dict.
    aliases: dict[str, tuple[str, ...]]
    # Of buffers that FSDP1 may cast: the dtype that they have in state_dict.
    buffer_dtypes: dict[str, torch.dtype] = dataclasses.field(default_factory=dict)

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}

    def frozen(self) -> list[str]:
        """Parameters that are not trained."""
        return [name for name, value in self.parameters.items() if not value.requires_grad]


# Number of 8-byte words that are multiplied by their weights at a time.
_WORDS = 1 << 20


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A checksum of each tensor's bytes; different values almost certainly have different
    checksums.

    In host memory it is CRC32C. On other devices it is a sum of words, each times an odd weight
    that depends on its position, so that permutations change it; a GPU is waited for once.
    """
    import torch

    result: list[int] = []
    waiting: list[tuple[int, torch.Tensor]] = []
    for tensor in tensors:
        result.append(0)
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue  # It has no values, or the server cannot hold it.
        if arrays.is_without_memory(tensor):
            continue
        if tensor.device.type == "cpu":
            result[-1] = _ema.Array("", _bytes_of(tensor)).crc32c
        else:
            waiting.append((len(result) - 1, weighted_sum(tensor)))
    if waiting:
        sums = torch.stack([value.to(waiting[0][1].device) for _, value in waiting]).tolist()
        for (index, _), value in zip(waiting, sums):
            result[index] = value
    return result


def non_finite(tensors: Mapping[str, torch.Tensor], dtype: str = "float32") -> list[str]:
    """The tensors with values that the server rejects: NaN, infinity, or more than averages of `dtype`
    can hold. A GPU is waited for once."""
    import torch

    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        local = local_of(tensor).detach()
        if not local.is_floating_point() or local.numel() == 0 or local.is_meta:
            continue
        if arrays.has_other_dtype(tensor) or arrays.is_without_memory(tensor):
            continue
        # Reads the values once, and makes no copy; NaN stays NaN.
        found[name] = torch.linalg.vector_norm(local, torch.inf).double()
    if not found:
        return []
    device = next(iter(found.values())).device
    norms = torch.stack([norm.to(device) for norm in found.values()]).tolist()
    most = torch.finfo(getattr(torch, dtype)).max
    return [name for name, norm in zip(found, norms) if not norm <= most]


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in row-major order, as bytes."""
    import torch

    data = tensor.detach().resolve_neg().contiguous()
    # A dimension of extent 1 may have any stride and be contiguous all the same.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """A weighted sum of a tensor's words, modulo 2^64, as a scalar on its device."""
    import torch

    data = _bytes_of(tensor)
    if data.storage_offset() % 8 != 0:
        data = data.clone()
    count = data.numel() // 8
    words = data[: count * 8].view(torch.int64)
    total = data[count * 8 :].sum(dtype=torch.int64)
    # Odd, so that no bit is lost.
    weights = torch.arange(min(count, _WORDS), dtype=torch.int64, device=data.device)
    weights = (2 * weights + 1) * 0x9E3779B97F4A7C1
    for begin in range(0, count, _WORDS):
        piece = words[begin : begin + _WORDS]
        total = total * 3 + (piece * weights[: piece.numel()]).sum()
    return total


def sharding_library_of(module: torch.nn.Module) -> str | None:
    """The library that has cut the module's parameters into ranges, one for each rank; None: there is none."""
    if fsdp1.wrappers_in(module):
        return "FullyShardedDataParallel (FSDP1)"
    return "DeepSpeed ZeRO-3" if zero.has_partitions(module) else None


def check_no_ranges(module: torch.nn.Module) -> None:
    """InvalidArgumentError: this rank has only ranges of the module's parameters (FSDP1, ZeRO-3)."""
    if (cutter := sharding_library_of(module)) is not None:
        raise InvalidArgumentError(
            f"model: is sharded by {cutter}, so only a piece is here; expected a whole model: use "
            "ema_client.attach and averaged, which accept it",
            reason="BAD_LAYOUT",
        )


def check_whole(module: torch.nn.Module) -> None:
    """InvalidArgumentError: the module is sharded (DTensors, FSDP1, ZeRO-3, Megatron-core), so each rank holds
    only a piece."""
    check_no_ranges(module)
    if is_stage(module) and any(map(is_part, named_tensors(module).parameters.values())):
        raise InvalidArgumentError(
            "model: of Megatron-core, of which only a part is here; expected a whole model",
            reason="BAD_LAYOUT",
        )
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            raise InvalidArgumentError(
                f'parameter "{name}": is a DTensor, of which only a piece is here; expected a whole '
                "model",
                reason="BAD_LAYOUT",
            )


def check_values_here(
    what: str,
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    *,
    may_be_meta: bool = True,
) -> None:
    """InvalidArgumentError: the values of some of the module's `tensors` are not in its memory, but
    are put there, or written over it, for each forward; the message says how to get them back."""
    keepers = _keepers_of_values(module)
    if not may_be_meta:
        keepers = {id(one): _ON_META for one in tensors.values() if one.is_meta} | keepers
    absent = {name: keepers[id(one)] for name, one in tensors.items() if id(one) in keepers}
    if absent:
        raise InvalidArgumentError(
            f"{what}: the values of {arrays.some(list(absent))} are not in the module: "
            f"{'; '.join(dict.fromkeys(absent.values()))}",
            reason="BAD_LAYOUT",
        )


def _keepers_of_values(module: torch.nn.Module) -> dict[int, str]:
    """By the id of a tensor: what keeps its values outside the module, and how to get them back."""
    accelerate = sys.modules.get("accelerate.hooks")
    diffusers = sys.modules.get("diffusers.hooks.group_offloading")
    found: dict[int, str] = {}
    for part in module.modules() if accelerate or diffusers else ():
        hook = part.__dict__.get("_hf_hook")
        for one in getattr(hook, "hooks", (hook,)):
            if accelerate is None or not isinstance(one, accelerate.AlignDevicesHook):
                continue
            if one.offload:
                within = one.place_submodules
                buffers = part.buffers(within) if one.offload_buffers else ()
                offloaded = (*part.parameters(within), *buffers)
                found.update((id(tensor), _BY_ACCELERATE) for tensor in offloaded)
        registry = part.__dict__.get("_diffusers_hook")
        if diffusers is not None and registry is not None:
            group_hook = registry.get_hook("group_offloading")
            if group_hook is not None and group_hook.group.offload_to_disk_path is not None:
                found.update((id(t), _BY_DIFFUSERS) for t in group_hook.group.tensor_to_key)
    for parameter in module.parameters():
        if parameter.numel() == 0 and hasattr(parameter, "_orig_size"):
            found[id(parameter)] = _BY_FAIRSCALE
    return found


_ON_META = f"they are {arrays.ON_META}"
_BY_ACCELERATE = (
    "accelerate's hooks keep them and write them back at each forward; do this before you offload the "
    "model, or first call accelerate.hooks.remove_hook_from_module(model, recurse=True)"
)
_BY_DIFFUSERS = "diffusers keeps them in files; do this before apply_group_offloading()"
_BY_FAIRSCALE = (
    "fairscale keeps them in pieces that have no names or shapes; use "
    "torch.distributed.fsdp.fully_shard (FSDP2)"
)


def as_module(model: torch.nn.Module | Sequence[torch.nn.Module]) -> torch.nn.Module:
    """The model. For a list of modules, a module that has them, unwrapped; `named_tensors` gives their
    tensors the names that they have in their own modules.

    InvalidArgumentError: the list is empty, or has something else, or DeepSpeed's engine.
    """
    import torch

    if not isinstance(model, (list, tuple)):
        return model  # type: ignore[return-value]  # A Module is no Sequence.
    for part in model:
        if not isinstance(part, torch.nn.Module) or engine_of(part) is not None:
            raise InvalidArgumentError(
                f"model: a list with a {type(part).__name__}: must be a list of torch.nn.Module, or one "
                "DeepSpeed engine alone"
            )
    if not model:
        raise InvalidArgumentError("model: an empty list")
    parts = torch.nn.ModuleList(map(unwrap, model))
    setattr(parts, _IS_LIST, True)
    return parts


def first_part(module: torch.nn.Module) -> torch.nn.Module:
    """The same module for each result of `as_module` for one list."""
    return next(module.children()) if hasattr(module, _IS_LIST) else module


# An attribute of the result of `as_module` for a list.
_IS_LIST = "_ema_client_is_list"


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel, torch.compile, Lightning Fabric's wrapper,
    DeepSpeed's engine and Megatron-core's wrappers."""
    *_, inner = _unwrapping(module)
    return inner


def engine_of(module: torch.nn.Module) -> Any:
    """DeepSpeed's engine, if the module is one, perhaps inside other wrappers; else None."""
    return next(filter(engine.is_engine, _unwrapping(module)), None)


def _unwrapping(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The module, and the modules inside its wrappers, the outermost first."""
    import torch

    while True:
        yield module
        if isinstance(
            module, (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
        ):
            inner: object = module.module
        elif engine.is_engine(module) or engine.is_megatron_wrapper(module):
            inner = module.module
        elif type(module).__name__ == "_FabricModule":
            # Fabric's `module` may be inside DDP or FSDP1, whose wrapper has its parameters.
            inner = module._forward_module
        else:
            # FSDP1 has the attributes of the module inside.
            inner = module._modules.get("_orig_mod")
        if not isinstance(inner, torch.nn.Module):
            return
        module = inner


def named_tensors(
    module: torch.nn.Module, rename: Callable[[str], str] | None = None
) -> NamedTensors:
    """Collects the tensors of an unwrapped module, or of `as_module` for a list. `rename`: as for `attach`.

    Models of Megatron-core have the names of their `sharded_state_dict()`, unless `rename` is given. For others,
    names, persistence and ties are the modules' own: `state_dict()` is not asked, because hooks and
    overrides may clone, rename, add or remove entries of its result. Overrides of `named_parameters()` can
    only add parameters that no module has registered. Parameters that `fully_shard`, FSDP1 or ZeRO-3 has
    gathered are sharded again.

    Raises:
        InvalidArgumentError: part of the module is lazy without shapes; or FSDP1 or ZeRO-3 has a part
            that cannot be averaged, see `fsdp1.ranges_in` and `zero.ranges_in`; or `megatron.parts_in`.
    """
    if rename is None and is_stage(module):
        return _named_parts(module)

    def clean_name(name: str) -> str:
        name = unwrapped_name(name)
        if rename is None:
            return name.partition(".")[2] if is_list else name
        renamed = rename(name)
        if not isinstance(renamed, str):
            raise InvalidArgumentError(f'rename("{name}") gave {renamed!r}: must be a name')
        return renamed

    is_list = hasattr(module, _IS_LIST)
    shard_again(module)
    ranges = {**fsdp1.ranges_in(module), **zero.ranges_in(module)}
    own_buffers = list(_plain_class().named_buffers(module))
    for name, tensor in (*_all_parameters(module), *own_buffers):
        arrays.check_materialized(f'"{name}"', tensor, may_be_meta=True)
    parameters = [(clean_name(name), tensor) for name, tensor in _named_parameters(module, ranges)]
    listed = {id(tensor) for _, tensor in own_buffers}
    first_names = {id(tensor): name for name, tensor in parameters}
    buffers: list[tuple[str, torch.Tensor]] = []
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in _saved_tensors(module, ranges):
        name = clean_name(name)
        first = first_names.get(id(tensor))
        if first is None and id(tensor) in listed:
            first_names[id(tensor)] = name
            buffers.append((name, tensor))
        elif first is not None and first != name:
            aliases[first] = (*aliases.get(first, ()), name)
    names = [name for name, _ in (*parameters, *buffers)]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        hint = "; for a list of modules, `rename` gets names such as 1.weight" if is_list else ""
        raise InvalidArgumentError(
            f"tensors of one name, after `rename`: {', '.join(twice)}{hint}", reason="BAD_LAYOUT"
        )
    of_fsdp1 = fsdp1.buffer_dtypes(module)
    dtypes = {name: of_fsdp1[id(tensor)] for name, tensor in buffers if id(tensor) in of_fsdp1}
    return NamedTensors(dict(parameters), dict(buffers), aliases, dtypes)


def is_stage(module: torch.nn.Module) -> bool:
    """Whether the unwrapped module, or result of `as_module`, is of Megatron-core, and so perhaps a part of a
    model. False if `fully_shard` has made DTensors of its parameters."""
    parts = list(module.children()) if hasattr(module, _IS_LIST) else [module]
    return all(map(megatron.is_megatron, parts)) and not _has_fsdp2(module)


def _has_fsdp2(module: torch.nn.Module) -> bool:
    kinds = tuple(getattr(sys.modules.get(name), "FSDPModule", ()) for name in _FSDP2)
    return any(isinstance(part, kinds) for part in module.modules())


def _named_parts(module: torch.nn.Module) -> NamedTensors:
    """`named_tensors` of Megatron-core's modules."""
    parameters: dict[str, Any] = {}
    buffers: dict[str, Any] = {}
    for part in module.children() if hasattr(module, _IS_LIST) else [module]:
        ids = set(map(id, part.parameters()))
        for name, tensor in megatron.parts_in(part).items():
            if name in parameters or name in buffers:
                raise InvalidArgumentError(
                    f'tensor "{name}": is in two of the given modules', reason="BAD_LAYOUT"
                )
            (parameters if id(object_of(tensor)) in ids else buffers)[name] = tensor
    return NamedTensors(parameters, buffers, {})


def _named_parameters(module: torch.nn.Module, ranges: Ranges) -> Iterator[tuple[str, Any]]:
    """Each parameter once, under its first name."""
    if not ranges:
        yield from _all_parameters(module)
        return
    import torch

    seen: set[int] = set()
    for name, tensor in _saved_tensors(module, ranges):
        is_parameter = isinstance(tensor, (torch.nn.Parameter, ParameterPart))
        if is_parameter and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _plain_class() -> type[torch.nn.Module]:
    """torch.nn.Module, whose methods see what the overrides in a module's class may hide."""
    import torch

    return torch.nn.Module


def _all_parameters(module: torch.nn.Module) -> list[tuple[str, Any]]:
    """The parameters that the modules register, and then those that only `named_parameters()` has."""
    own = list(_plain_class().named_parameters(module))
    names = {name for name, _ in own}
    ids = {id(tensor) for _, tensor in own}
    others = [
        (name, tensor)
        for name, tensor in module.named_parameters()
        if name not in names and id(tensor) not in ids
    ]
    return own + others


def _saved_tensors(
    module: torch.nn.Module, ranges: Ranges, prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """The parameters and persistent buffers under all of their names, in the order of
    `state_dict()`."""
    own = {**module._parameters, **ranges.get(id(module), {})}
    for name, parameter in own.items():
        if parameter is not None and not getattr(parameter, "_is_flat_param", False):
            yield prefix + name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield prefix + name, buffer
    for name, part in module._modules.items():
        if part is not None:
            yield from _saved_tensors(part, ranges, f"{prefix}{name}.")


def shard_again(module: torch.nn.Module) -> None:
    """Drops gathered parameters of `fully_shard`, FSDP1 and ZeRO-3: the module has pieces until the next
    forward."""
    fsdp1.drop_gathered(module)
    zero.drop_gathered(module)
    if _has_fsdp2(module):
        # The hooks of state_dict() do it, even after an exception inside a forward; reshard() does
        # not.
        module.state_dict()


class ModelTensors:
    """The result of `named_tensors`, collected again only after the module has got other modules, parameters
    or buffers; other names for the same ones are not noticed. Collecting takes 4 us for each of them, and
    comparing 0.2 us."""

    def __init__(
        self,
        module: torch.nn.Module,
        rename: Callable[[str], str] | None = None,
        *,
        has_masters: bool = False,
        optimizer: Any = None,
    ) -> None:
        """`has_masters`: the result has the masters of parameters in their place, see `masters_of`, which needs
        `optimizer`."""
        self._module = module
        self._rename = rename
        self._has_masters = has_masters
        self._optimizer = optimizer
        self._found: NamedTensors | None = None
        self._parts: list[object] = []  # The module's parts when `_found` was set.

    def __call__(self) -> NamedTensors:
        """The same object as before if nothing has changed. Raises as `named_tensors` and `masters_of`."""
        if self._found is None or not self._is_unchanged():
            found = named_tensors(self._module, self._rename)
            if self._has_masters:
                found = dataclasses.replace(
                    found, parameters=masters_of(found.parameters, self._optimizer)
                )
            self._found = found
            self._parts = _parts_of(self._module)
        return self._found

    def _is_unchanged(self) -> bool:
        if _are_same(_parts_of(self._module), self._parts):
            return True
        # Parameters that `fully_shard` or FSDP1 has gathered are other objects.
        shard_again(self._module)
        return _are_same(_parts_of(self._module), self._parts)


def _parts_of(module: torch.nn.Module) -> list[object]:
    """The module and the modules in it, and their parameters and buffers."""
    modules: list[torch.nn.Module | None] = [module]
    tensors: list[object] = []
    for part in modules:
        if part is not None:
            modules += part._modules.values()
            tensors += part._parameters.values()
            tensors += part._buffers.values()
    return modules + tensors


def _are_same(some: list[object], others: list[object]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Writes the second tensor of each pair into the first, cast to its dtype; see `writing`."""
    with writing():
        for tensor, values in pairs:
            tensor.copy_(values)


def write_pieces(module: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Writes this rank's pieces of whole tensors into a sharded model. `weights`: has all of its tensors."""
    pieces = pieces_of(named_tensors(unwrap(module)).all())
    write(
        (piece.local, piece.cut(weights[name][_slices_of(piece.box)]))
        for name, piece in pieces.items()
        if not piece.is_empty
    )


def _slices_of(box: Shard) -> tuple[slice, ...]:
    return tuple(slice(first, first + count) for first, count in zip(box.offsets, box.extents))


def has_pieces(module: torch.nn.Module) -> bool:
    """Whether the module has DTensors, is sharded by FSDP1 or ZeRO-3, or is of Megatron-core, so that this rank
    may hold a part. The same on all ranks that hold parts of one model."""
    if sharding_library_of(module) is not None or is_stage(module):
        return True
    shard_again(module)
    return any(map(is_dtensor, (*module.parameters(), *module.buffers())))


def half_of(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """The dtype for the server's cast: that of all these floats, if it has two bytes, else None."""
    dtypes = {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors.values()
        if tensor.is_floating_point()
    }
    return dtypes.pop() if dtypes in ({"bfloat16"}, {"float16"}) else None


def specs_of(tensors: NamedTensors) -> list[_ema.Spec]:
    """The specs for the server. A tensor without memory has its type in place of a dtype."""
    specs: list[_ema.Spec] = []
    for name, tensor in tensors.all().items():
        _, dtype, shape, is_buffer, aliases = arrays.spec_of(
            name, tensor, is_buffer=name in tensors.buffers, aliases=tensors.aliases.get(name, ())
        )
        dtype = str(tensors.buffer_dtypes.get(name, dtype)).removeprefix("torch.")
        if arrays.is_without_memory(tensor):
            dtype = f"{type(local_of(tensor)).__name__} without memory"
        specs.append((name, dtype, shape, is_buffer, aliases))
    return specs
