# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: reads them by mapping, writes them, and saves pulls for `Client.save`."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import math
import os
import pathlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client._client.arrays import Placed
from ema_client._client.types import TensorSpec, Weights
from ema_client._errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from ema_client._argument_checks import path_from

if TYPE_CHECKING:
    import torch

# Dtypes by their names in the format.
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# The file names of transformers, and of diffusers, whose config.json has one of the keys below.
_FOLDER_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
_OF_DIFFUSERS = {"_diffusers_version", "_class_name"}
# Parts of names that torch.compile, activation checkpointing and FSDP1 add to what they wrap.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
# As in the reference implementation.
_MAX_HEADER_BYTES = 100_000_000


def unwrapped_name(name: str) -> str:
    """The name without the parts that wrappers add anywhere in it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def unwrapped_names(names: Iterable[str]) -> list[str]:
    """All names of a state_dict, as `attach` has them. InvalidArgumentError: two become the same."""
    given = list(names)
    own = [unwrapped_name(name) for name in given]
    # DistributedDataParallel and DataParallel.
    while own and all(name.startswith("module.") for name in own):
        own = [name.removeprefix("module.") for name in own]
    first: dict[str, str] = {}
    for name, its_own in zip(given, own):
        if (other := first.setdefault(its_own, name)) != name:
            raise InvalidArgumentError(
                f'"{name}" and "{other}" are both named "{its_own}" without wrappers'
            )
    return own


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, and the place of its bytes."""

    spec: TensorSpec
    path: pathlib.Path
    offset: int

    def read(self) -> Any:
        """A NumPy array that maps the file; bfloat16 as uint16."""
        import numpy

        dtype = "uint16" if self.spec.dtype == "bfloat16" else self.spec.dtype
        if math.prod(self.spec.shape) == 0:
            return numpy.zeros(self.spec.shape, dtype)
        # NumPy cannot map a scalar.
        return numpy.memmap(
            self.path, dtype, mode="r", offset=self.offset, shape=self.spec.shape or (1,)
        ).reshape(self.spec.shape)


def open_weights(path: str | os.PathLike[str]) -> list[StoredTensor]:
    """The tensors of a file, or of a Hugging Face folder, in one file or in those that its index lists,
    by the names that `attach` gives them.

    Raises:
        NotFoundError: the folder has no weights.
        InvalidArgumentError: a file is malformed, or the path is empty.
    """
    root = path_from("path", path)
    stored = _open_weights(root)
    try:
        names = unwrapped_names(tensor.spec.name for tensor in stored)
    except InvalidArgumentError as error:
        raise _malformed(root, error.args[0]) from None
    return [
        dataclasses.replace(tensor, spec=dataclasses.replace(tensor.spec, name=name))
        for tensor, name in zip(stored, names)
    ]


def _open_weights(root: pathlib.Path) -> list[StoredTensor]:
    if not root.is_dir():
        return _read_header(root)
    # First the file that `from_pretrained` of the folder's library looks for.
    first = folder_file(root, {})
    for name in (first, *(other for other in _FOLDER_FILES if other != first)):
        index = root / f"{name}.index.json"
        if index.exists():
            return _read_index(root, index)
        if (root / name).exists():
            return _read_header(root / name)
    raise NotFoundError(
        f"{root}: has neither {' nor '.join(_FOLDER_FILES)}, whole or with .index.json"
    )


def folder_file(folder: pathlib.Path, beside: Mapping[str, bytes]) -> str:
    """The name of the file in which `from_pretrained` looks for a folder's weights. It depends on config.json:
    that in `beside`, which will be written, else that in the folder."""
    config = folder / "config.json"
    text = beside.get(config.name, config.read_bytes() if config.is_file() else b"{}")
    try:
        fields = json.loads(text)
    except ValueError:  # Not a library that we know.
        fields = {}
    is_diffusers = isinstance(fields, dict) and not _OF_DIFFUSERS.isdisjoint(fields)
    return _FOLDER_FILES[is_diffusers]


def _read_index(root: pathlib.Path, index: pathlib.Path) -> list[StoredTensor]:
    try:
        weight_map: dict[str, str] = dict(json.loads(index.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise _malformed(index, f"has no weight_map: {error!r}") from None
    found = []
    for name in sorted(set(weight_map.values())):
        if pathlib.Path(name).name != name:
            raise _malformed(index, f"{name!r} is not the name of a file in this folder")
        found += [
            tensor
            for tensor in _read_header(root / name)
            if weight_map.get(tensor.spec.name) == name
        ]
    if missing := sorted(weight_map.keys() - {tensor.spec.name for tensor in found}):
        raise _malformed(index, f"not in the files: {', '.join(missing)}")
    return found


def _read_header(path: pathlib.Path) -> list[StoredTensor]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise _malformed(path, f"a header of {length} bytes")
        text = file.read(length)
    data_bytes = path.stat().st_size - 8 - length
    found = []
    try:
        for name, entry in json.loads(text).items():
            if name == "__metadata__":
                continue
            shape = tuple(int(extent) for extent in entry["shape"])
            spec = TensorSpec(name, _DTYPES[entry["dtype"]], shape)
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= data_bytes or end - begin != _length_bytes(spec):
                raise _malformed(path, f'tensor "{name}": its bytes are {begin} to {end}')
            found.append((begin, StoredTensor(spec, path, 8 + length + begin)))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise _malformed(path, f"not a safetensors file: {error!r}") from None
    return [tensor for _, tensor in sorted(found, key=lambda item: item[0])]


def _length_bytes(spec: TensorSpec) -> int:
    bits = 8 if spec.dtype == "bool" else int("".join(filter(str.isdigit, spec.dtype)))
    return math.prod(spec.shape) * bits // 8


def write(
    path: pathlib.Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes a file, renamed to `path` when it is complete. Tensors with wide elements come first."""
    import torch

    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    specs = [
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in ordered
    ]

    def flat(tensor: torch.Tensor) -> Any:
        return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data

    replace(path, itertools.chain([_header(specs, metadata)], (flat(t) for _, t in ordered)))


def write_placed(
    path: pathlib.Path, placed: Sequence[Placed], buffer: Any, metadata: Mapping[str, str]
) -> None:
    """Writes tensors of one buffer, in their order, to a file, renamed to `path` when it is complete."""
    specs = [TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape, _, _ in placed]
    data = memoryview(buffer).cast("B")
    pieces = (data[offset : offset + length] for _, _, _, offset, length in placed)
    replace(path, itertools.chain([_header(specs, metadata)], pieces))


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a file, before the bytes of the tensors. InvalidArgumentError: a dtype that the
    format does not have."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for spec in specs:
        if spec.dtype not in _NAMES:
            raise InvalidArgumentError(
                f'tensor "{spec.name}": dtype {spec.dtype}', reason="BAD_MANIFEST"
            )
        size = _length_bytes(spec)
        header[spec.name] = {
            "dtype": _NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


@dataclasses.dataclass(frozen=True)
class SaveTarget:
    """Where `Client.save` writes.

    Attributes:
        path: the file of weights.
        beside: small files for the same folder; None: `path` is not in a folder of its own.
    """

    path: pathlib.Path
    beside: Mapping[str, bytes] | None

    @classmethod
    def of(
        cls, path: str | os.PathLike[str], beside_of: Callable[[], Mapping[str, bytes]]
    ) -> SaveTarget:
        """`beside_of` returns the small files. Raises as `Client.save`."""
        folder = path_from("path", path)
        if folder.is_dir() or os.fspath(path).endswith(os.sep):
            beside = beside_of()
            file = folder / folder_file(folder, beside)
            index = file.with_name(f"{file.name}.index.json")
            if index.exists():
                raise FailedPreconditionError(
                    f"{index}: the folder has weights in pieces; use another folder, or remove them"
                )
            return cls(file, beside)
        file = replaceable(path)
        if ".safetensors" not in (file.suffix, folder.suffix):
            raise InvalidArgumentError(
                f'path "{os.fspath(path)}": must end in "/" (a folder) or in ".safetensors" (a file), or '
                "be a folder"
            )
        return cls(file, None)

    def write(self, model_name: str, weights: Weights) -> None:
        """`weights`: pulled without `out` and `device`."""
        if self.beside is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for name, data in self.beside.items():
                replace(self.path.with_name(name), [data])
        pulled = weights._pulled
        assert pulled is not None
        # As in the server's checkpoints. transformers needs "format".
        metadata = {
            "format": "pt",
            "ema.model": model_name,
            "ema.track": weights.track,
            "ema.step": str(weights.version.step),
            "ema.version": str(weights.version.number),
            "ema.incarnation": str(weights.version.incarnation),
        }
        write_placed(self.path, pulled.tensors, pulled.bytes, metadata)


def replaceable(path: str | os.PathLike[str]) -> pathlib.Path:
    """The file to write if a user names `path`: the target of links.

    Raises:
        FailedPreconditionError: `path` exists and is not a file, but a device, say, which a rename would
            replace.
    """
    named = pathlib.Path(path)
    if named.exists() and not named.is_file():
        raise FailedPreconditionError(f"{named}: exists, and is not a regular file")
    return named.resolve()


def replace(path: pathlib.Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Writes and syncs a file, then renames it to `path`, and syncs the rename."""
    # Not named by the process ID: containers that share a folder have the same IDs.
    temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(8)}")
    with temporary.open("xb") as file:
        try:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


def _sync_folder(folder: pathlib.Path) -> None:
    """Without this, a crash of the machine may undo a rename in the folder."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems (FUSE, SMB) cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _malformed(path: pathlib.Path, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{path}: {problem}")
