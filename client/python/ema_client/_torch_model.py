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
        """Name, dtype and shape of each tensor; of parameters also the sum of their bits."""
        sums = dict(zip(self.parameters, bit_sums(self.parameters.values())))
        return [
            (name, f"{tensor.dtype}{list(tensor.shape)}", sums.get(name, 0))
            for name, tensor in self.all().items()
        ]


def bit_sums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The sum of each tensor's bits as integers: other values, another sum, all but surely."""
    import torch

    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    sums: list[torch.Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        word = words.get(flat.element_size(), torch.int64)
        sums.append(flat.view(word).sum(dtype=torch.int64))
    # Waits for a GPU once.
    devices = {value.device for value in sums}
    totals = {
        device: iter(torch.stack([v for v in sums if v.device == device]).tolist())
        for device in devices
    }
    return [next(totals[value.device]) for value in sums]


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
