# SPDX-License-Identifier: Apache-2.0
"""The tensors of a torch.nn.Module, by the names that its state_dict has outside any wrapper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.pieces import is_dtensor, local_of
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# What torch.compile and activation checkpointing put into the names of what they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module"}

# Where the class is that `fully_shard` makes modules of, if it has been imported; PyTorch 2.5 has only the
# second.
_FSDP2 = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Parameters (tied ones once, under the first name) and persistent buffers, by name."""

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    # The other names of tied ones, as state_dict has them.
    aliases: dict[str, tuple[str, ...]]

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}

    def frozen(self) -> list[str]:
        """Parameters that are not trained."""
        return [name for name, value in self.parameters.items() if not value.requires_grad]


# A module that overrides one of these must be asked for its tensors every time.
_LISTING_METHODS = (
    *("state_dict", "_save_to_state_dict"),
    *("named_parameters", "named_buffers", "named_modules", "_named_members"),
)

# Words of 8 bytes that are multiplied with their weights at a time.
_WORDS = 1 << 20


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A checksum of each tensor's bytes: other values, another sum, all but surely.

    In host memory CRC32C. Elsewhere a sum of words, each times an odd weight by its place, so that it
    sees permutations; a GPU is waited for once.
    """
    import torch

    result: list[int] = []
    waiting: list[tuple[int, torch.Tensor]] = []
    for tensor in tensors:
        result.append(0)
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            continue  # Has no values, or none that a server can hold.
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


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements in row-major order, as bytes."""
    import torch

    data = tensor.detach().resolve_neg().contiguous()
    # A dimension of extent 1 may have any stride and be contiguous all the same.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, wrapping, as a scalar on its device."""
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


def check_no_dtensor(module: torch.nn.Module) -> None:
    """Refuses modules of which every rank has only a piece."""
    for name, parameter in module.named_parameters():
        if is_dtensor(parameter):
            raise InvalidArgumentError(
                f'parameter "{name}": is a DTensor, of which only a piece is here; expected a whole '
                "model",
                reason="BAD_LAYOUT",
            )


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel, torch.compile and Lightning Fabric's."""
    import torch

    while True:
        if isinstance(
            module, (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
        ):
            inner: object = module.module
        elif type(module).__name__ == "_FabricModule":
            # What Fabric calls its module may be without DDP or FSDP1.
            inner = module._forward_module
        else:
            inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def named_tensors(
    module: torch.nn.Module, rename: Callable[[str], str] | None = None
) -> NamedTensors:
    """Collects the tensors of `module`, which is not wrapped. `rename`: as for `attach`.

    Parameters that `fully_shard` has gathered are sharded again.

    Raises:
        InvalidArgumentError: part of the module is FSDP1's.
    """

    def clean_name(name: str) -> str:
        name = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        if rename is None:
            return name
        renamed = rename(name)
        if not isinstance(renamed, str):
            raise InvalidArgumentError(f'rename("{name}") gave {renamed!r}: must be a name')
        return renamed

    _refuse_fsdp1(module)
    shard_again(module)
    state = module.state_dict(keep_vars=True)
    # By identity: wrappers clean the names of the state, but not of buffers.
    kept = set(map(id, state.values()))
    of_parameters = [(clean_name(name), tensor) for name, tensor in module.named_parameters()]
    of_buffers = [
        (clean_name(name), tensor) for name, tensor in module.named_buffers() if id(tensor) in kept
    ]
    parameters, buffers = dict(of_parameters), dict(of_buffers)
    names = [name for name, _ in [*of_parameters, *of_buffers]]
    if len(set(names)) != len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidArgumentError(
            f"tensors of one name, after `rename`: {', '.join(twice)}", reason="BAD_LAYOUT"
        )
    first_names = {id(tensor): name for name, tensor in {**parameters, **buffers}.items()}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        clean = clean_name(name)
        first = first_names.get(id(tensor), clean)
        if first != clean:
            aliases[first] = (*aliases.get(first, ()), clean)
    return NamedTensors(parameters, buffers, aliases)


def shard_again(module: torch.nn.Module) -> None:
    """Drops what `fully_shard` has gathered: parameters are this rank's pieces, until the next forward."""
    kinds = tuple(getattr(sys.modules.get(name), "FSDPModule", ()) for name in _FSDP2)
    if any(isinstance(part, kinds) for part in module.modules()):
        # Its hooks do it, also in the middle of a forward that an exception has ended: reshard() does not.
        module.state_dict()


class ModelTensors:
    """The result of `named_tensors`, collected again only after the module has got other modules, parameters
    or buffers. Collecting takes 4 us for each of them, and comparing 0.1 us."""

    def __init__(self, module: torch.nn.Module, rename: Callable[[str], str] | None = None) -> None:
        self._module = module
        self._rename = rename
        self._found: NamedTensors | None = None
        # The modules, parameters and buffers that were found. None: they cannot be compared.
        self._structure: list[object] | None = None

    def __call__(self) -> NamedTensors:
        """The same object as before if nothing has changed. Raises as `named_tensors`."""
        if self._found is None or not self._is_unchanged():
            self._found = named_tensors(self._module, self._rename)
            self._structure = None
            if all(map(_lists_as_pytorch, set(map(type, self._module.modules())))):
                self._structure = _ema.structure_of(self._module)
        return self._found

    def _is_unchanged(self) -> bool:
        if self._structure is None:
            return False
        if not _ema.has_structure(self._module, self._structure):
            # Parameters that `fully_shard` has gathered are other objects.
            shard_again(self._module)
            return _ema.has_structure(self._module, self._structure)
        return True


def _lists_as_pytorch(cls: type) -> bool:
    """Whether PyTorch's own methods list the tensors of a module of this class."""
    return all(
        next(base for base in cls.__mro__ if name in vars(base)).__module__.partition(".")[0]
        == "torch"
        for name in _LISTING_METHODS
    )


def write(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Into the first of each pair the values of the second, cast to its dtype."""
    import torch

    with torch.no_grad():
        for tensor, values in pairs:
            tensor.copy_(values)


def has_pieces(module: torch.nn.Module) -> bool:
    """Whether some of its tensors are DTensors, of which this rank may have a part. Of ranks that have
    parts of one model, all find the same."""
    shard_again(module)
    return any(map(is_dtensor, (*module.parameters(), *module.buffers())))


def half_of(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """What the server shall cast floats to: the dtype of all of them, if it is of two bytes."""
    dtypes = {
        str(tensor.dtype).removeprefix("torch.")
        for tensor in tensors.values()
        if tensor.is_floating_point()
    }
    return dtypes.pop() if dtypes in ({"bfloat16"}, {"float16"}) else None


def _refuse_fsdp1(module: torch.nn.Module) -> None:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, part in module.named_modules():
        if isinstance(part, fsdp.FullyShardedDataParallel):
            raise InvalidArgumentError(
                f'module "{name}": FullyShardedDataParallel (FSDP1) keeps its parameters in flat pieces '
                "that have no names or shapes; use torch.distributed.fsdp.fully_shard (FSDP2)",
                reason="BAD_LAYOUT",
            )


def specs_of(tensors: NamedTensors) -> list[_ema.Spec]:
    """What the server is told of them; in the place of a dtype, of what has no memory, its type."""
    specs: list[_ema.Spec] = []
    for name, tensor in tensors.all().items():
        _, dtype, shape, is_buffer, aliases = arrays.spec_of(
            name, tensor, is_buffer=name in tensors.buffers, aliases=tensors.aliases.get(name, ())
        )
        if arrays.is_without_memory(tensor):
            dtype = f"{type(local_of(tensor)).__name__} without memory"
        specs.append((name, dtype, shape, is_buffer, aliases))
    return specs
