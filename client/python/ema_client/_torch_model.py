# SPDX-License-Identifier: Apache-2.0
"""The tensors of a torch.nn.Module, by the names that its state_dict has outside any wrapper."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ema_client import _arrays, _ema
from ema_client._errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

# torch.compile puts it before the names of what it has compiled.
_COMPILED_PREFIX = "_orig_mod."


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """Parameters (tied ones once, under the first name) and persistent buffers, by name."""

    parameters: dict[str, torch.nn.Parameter]
    buffers: dict[str, torch.Tensor]
    # The other names of tied ones, as state_dict has them.
    aliases: dict[str, tuple[str, ...]]

    def without(self, names: set[str]) -> NamedTensors:
        return NamedTensors(
            {name: value for name, value in self.parameters.items() if name not in names},
            {name: value for name, value in self.buffers.items() if name not in names},
            self.aliases,
        )

    def all(self) -> dict[str, torch.Tensor]:
        return {**self.parameters, **self.buffers}

    def frozen(self) -> list[str]:
        """Parameters that are not trained."""
        return [name for name, value in self.parameters.items() if not value.requires_grad]

    def fingerprints(self) -> list[tuple[str, str, int]]:
        """Name, dtype, shape and whether it is trained, of each tensor; of parameters also a checksum."""
        sums = dict(zip(self.parameters, checksums(self.parameters.values())))
        return [
            (
                name,
                f"{tensor.dtype}{list(tensor.shape)}"
                f"{'' if name in self.buffers or tensor.requires_grad else ', frozen'}",
                sums.get(name, 0),
            )
            for name, tensor in self.all().items()
        ]


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
        if tensor.device.type == "meta":
            continue  # Has no values.
        if tensor.device.type == "cpu":
            result[-1] = _ema.Array(
                "", tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            ).crc32c
        else:
            waiting.append((len(result) - 1, weighted_sum(tensor)))
    if waiting:
        sums = torch.stack([value.to(waiting[0][1].device) for _, value in waiting]).tolist()
        for (index, _), value in zip(waiting, sums):
            result[index] = value
    return result


def weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's words, wrapping, as a scalar on its device."""
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if data.storage_offset() % 8 != 0:
        data = data.clone()
    count = data.numel() // 8
    words = data[: count * 8].view(torch.int64)
    total = data[count * 8 :].sum(dtype=torch.int64)
    # Odd, so that no bit is lost.
    weights = torch.arange(1, 2 * min(count, _WORDS), 2, dtype=torch.int64, device=data.device)
    weights = weights * 0x9E3779B97F4A7C1
    for begin in range(0, count, _WORDS):
        piece = words[begin : begin + _WORDS]
        total = total * 3 + (piece * weights[: piece.numel()]).sum()
    return total


def check_whole(module: torch.nn.Module) -> None:
    """Refuses modules whose parameters are in pieces on several ranks."""
    for name, part in module.named_modules():
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            raise InvalidArgumentError(
                f'module "{name}": FullyShardedDataParallel is not supported yet',
                reason="BAD_LAYOUT",
            )
    for name, parameter in module.named_parameters():
        if any(cls.__name__ == "DTensor" for cls in type(parameter).__mro__):
            raise InvalidArgumentError(
                f'parameter "{name}": DTensor is not supported yet', reason="BAD_LAYOUT"
            )


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    import torch

    while True:
        if isinstance(
            module, (torch.nn.parallel.DistributedDataParallel, torch.nn.parallel.DataParallel)
        ):
            inner: object = module.module
        else:
            inner = getattr(module, "_orig_mod", None)
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def named_tensors(module: torch.nn.Module) -> NamedTensors:
    """Collects the tensors of `module`, which is not wrapped."""
    state = module.state_dict(keep_vars=True)
    parameters = {
        name.replace(_COMPILED_PREFIX, ""): parameter
        for name, parameter in module.named_parameters()
    }
    buffers = {
        name.replace(_COMPILED_PREFIX, ""): buffer
        for name, buffer in module.named_buffers()
        if name in state
    }
    first_names = {id(tensor): name for name, tensor in {**parameters, **buffers}.items()}
    aliases: dict[str, tuple[str, ...]] = {}
    for name, tensor in state.items():
        clean = name.replace(_COMPILED_PREFIX, "")
        first = first_names.get(id(tensor), clean)
        if first != clean:
            aliases[first] = (*aliases.get(first, ()), clean)
    return NamedTensors(parameters, buffers, aliases)


def specs_of(tensors: NamedTensors) -> list[_ema.Spec]:
    """What the server is told of them."""
    return [
        _arrays.spec_of(
            name, tensor, is_buffer=name in tensors.buffers, aliases=tensors.aliases.get(name, ())
        )
        for name, tensor in tensors.all().items()
    ]
