# SPDX-License-Identifier: Apache-2.0
"""Checks and converts the arguments of `Client.pull`, before it calls the server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Union

from ema_client._client.state import version_id
from ema_client._client.types import ModelInfo, Shard, Version, VersionLike
from ema_client._errors import InvalidArgumentError
from ema_client._argument_checks import is_whole, name_of_dtype, names_from
from ema_client._tracks.track import only_average

if TYPE_CHECKING:
    import torch

#: Arrays by name, or a module, for its parameters and buffers.
OutLike = Union[Mapping[str, Any], "torch.nn.Module"]

#: "float32", "float16" or "bfloat16", or a framework's dtype of that name.
DtypeLike = Any

_DTYPES = ("float32", "float16", "bfloat16")


def selection_from(
    tensors: str | Collection[str] | None, slices: Shard | Collection[Shard] | None
) -> tuple[list[str], list[Shard]]:
    """Names or patterns, and boxes; two empty lists: everything.

    Raises:
        InvalidArgumentError: an empty selection, or an item that is not a name or a box.
    """
    if tensors is None and slices is None:
        return [], []
    names = names_from("tensors", tensors)
    boxes = [slices] if isinstance(slices, Shard) else list(slices or ())
    for name in names:
        if not isinstance(name, str):
            raise InvalidArgumentError(f"tensors: {name!r}: must be a tensor's name, or a pattern")
    for box in boxes:
        if not isinstance(box, Shard):
            raise InvalidArgumentError(f"slices: {box!r}: must be an ema_client.Shard")
    if not names and not boxes:
        given = tensors if tensors is not None else slices
        what = "tensors" if tensors is not None else "slices"
        raise InvalidArgumentError(f"{what} {given!r}: selects nothing; None is for everything")
    return names, boxes


def check_version(version: VersionLike | None, model_name: str) -> None:
    """InvalidArgumentError: not a version; or an empty label, as from a variable that is not set,
    which must not mean the newest version; or a saved state without a version, or of another model.
    """
    if isinstance(version, Mapping):
        version_id(version, of=model_name)
        return
    is_one = bool(version) if isinstance(version, str) else isinstance(version, Version)
    if not is_one and version is not None and not is_whole(version):
        raise InvalidArgumentError(
            f"version {version!r}: must be a number, a record, or a label such as "
            '"best", or what Attachment.state_dict() has returned; None is the newest'
        )


def only_average_of(info: ModelInfo) -> str:
    """The default track of a model; see `only_average`."""
    return only_average(
        f'model "{info.name}": ', {name: track.is_copy for name, track in info.tracks.items()}
    )


def dtype_name(dtype: Any) -> str | None:
    """The server's name of a dtype, given by that name or as PyTorch's, NumPy's or JAX's."""
    if dtype is None:
        return None
    name = name_of_dtype(dtype)
    if name not in _DTYPES:
        raise InvalidArgumentError(
            f"dtype {dtype!r}: must be {', '.join(_DTYPES[:-1])} or {_DTYPES[-1]}"
        )
    return name


def check_device(device: Any) -> None:
    """InvalidArgumentError: PyTorch has no such device here."""
    import torch

    try:
        torch.empty(0, device=device)
    except Exception as error:  # Which one depends on the device, and on how PyTorch was built.
        raise InvalidArgumentError(f"device {device!r}: cannot be used here: {error}") from error


def targets_of(out: OutLike, names_there: Callable[[], Collection[str]]) -> Mapping[str, Any]:
    """The arrays to write, by name. A module's tied tensors get the names that the model has for
    them.

    `names_there` returns the names of the model's tensors; it is called only if there are tied
    tensors.
    """
    if isinstance(out, Mapping):
        return out
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(out, torch.nn.Module):
        raise InvalidArgumentError(
            f"out of type {type(out).__name__}: must be arrays by name, or a torch.nn.Module"
        )
    # Imported here, since it is needed only for modules.
    from ema_client._model.torch_model import check_values_here, named_tensors, unwrap

    named = named_tensors(unwrap(out))
    targets = named.all()
    check_values_here("out", unwrap(out), targets)
    there = names_there() if named.aliases else ()
    for name, others in named.aliases.items():
        tensor = targets.pop(name)
        known = [one for one in (name, *others) if one in there]
        targets.update(dict.fromkeys(known or [name], tensor))
    return targets
