# SPDX-License-Identifier: Apache-2.0
"""Converts arrays of any framework for the extension module, and pulled bytes to arrays."""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ema_client import _ema
from ema_client._client import gpu
from ema_client._client.pieces import BoxCache, Held, HeldWeights, is_dtensor, local_of
from ema_client._client.types import TensorSpec
from ema_client._errors import InvalidArgumentError
from ema_client._argument_checks import check_by_name, check_text

Framework = Literal["auto", "torch", "numpy"]
# (name, dtype, shape, offset, length_bytes)
Placed = tuple[str, str, Sequence[int], int, int]
# kDLCPU
_DLPACK_CPU = 1
# The dtypes that the server can hold.
DTYPES = (
    *("float32", "float16", "bfloat16", "float64"),
    *("int8", "int16", "int32", "int64", "uint8", "bool"),
)
ON_META = "on the meta device; first give the model memory (model.to_empty(device=...)) and values"
# The most names that a message lists.
_NAMED = 10


def is_instance(value: object, module: str, name: str) -> bool:
    # A value of a framework that has not been imported cannot exist.
    framework = sys.modules.get(module)
    return framework is not None and isinstance(value, getattr(framework, name))


def check_materialized(what: str, value: Any, *, may_be_meta: bool = False) -> None:
    """InvalidArgumentError: a torch tensor of a lazy module without a shape, or on the meta device."""
    if is_instance(value, "torch.nn.parameter", "UninitializedTensorMixin"):
        raise InvalidArgumentError(
            f"{what}: belongs to a lazy module, and has no shape yet; run a forward first (in training, "
            "before you create the optimizer)",
            reason="BAD_LAYOUT",
        )
    if not may_be_meta and is_instance(value, "torch", "Tensor") and value.is_meta:
        raise InvalidArgumentError(f"{what}: {ON_META}", reason="BAD_LAYOUT")


def read(name: str, value: Any, boxes: BoxCache | None = None) -> _ema.Array:
    """Reads `value` in place; of a DTensor, this rank's part. It is copied first if it is neither
    in host memory nor on an NVIDIA GPU; if it is not contiguous, unless it is a torch tensor in
    host memory; or if PyTorch has yet to negate it (the `imag` of a `conj()`)."""
    check_text("tensor name", name)
    check_materialized(f'"{name}"', value)
    dtype = ""
    offsets: tuple[int, ...] | None = None
    if is_dtensor(value):
        value = (boxes or BoxCache()).held(name, value)
    if isinstance(value, Held):
        value, offsets = value.local, value.offsets
    if is_instance(value, "torch", "Tensor"):
        value = value.detach()
        if is_without_memory(value):
            raise InvalidArgumentError(
                f'array "{name}": a {type(value).__name__} without memory of its own'
            )
        value = value.resolve_neg()
        if gpu.is_readable(value):
            # Not value.__dlpack__(), which rejects tensors on a GPU other than the current one.
            value = sys.modules["torch"].utils.dlpack.to_dlpack(value.contiguous())
        else:
            value = value.cpu()
    elif hasattr(value, "block_until_ready"):
        value = _jax_on_host(value)
    if is_instance(value, "numpy", "ndarray") or is_instance(value, "numpy", "generic"):
        numpy = sys.modules["numpy"]
        value = numpy.asarray(value, order="C")
        if not value.dtype.isnative:
            raise InvalidArgumentError(
                f'array "{name}": dtype "{value.dtype.str}" has another byte order than this machine; '
                'give array.astype(array.dtype.newbyteorder("="))'
            )
        if value.dtype.name == "bfloat16":
            # ml_dtypes; NumPy itself has no name for it that DLPack or the buffer protocol knows.
            dtype = "bfloat16"
            value = value.view(numpy.uint16)
    return _ema.Array(name, value, dtype, offsets, may_have_strides=True)


def _jax_on_host(value: Any) -> Any:
    """The JAX array itself; or a copy in host memory, if it is elsewhere or on several devices."""
    value.block_until_ready()
    if len(value.sharding.device_set) == 1 and value.__dlpack_device__()[0] == _DLPACK_CPU:
        return value
    return sys.modules["numpy"].asarray(value)


def read_all(weights: Mapping[str, Any], boxes: BoxCache) -> list[_ema.Array]:
    """Like `read` for each array, but takes a tenth of the time for ordinary torch tensors."""
    check_by_name("weights", weights)
    if not isinstance(weights, HeldWeights):
        weights = {
            name: boxes.held(name, value) if is_dtensor(value) else value
            for name, value in weights.items()
        }
    torch = sys.modules.get("torch")
    if torch is None:
        return [read(name, value) for name, value in weights.items()]
    arrays = _ema.read_tensors(
        list(weights),
        [value.local if isinstance(value, Held) else value for value in weights.values()],
        [value.offsets if isinstance(value, Held) else None for value in weights.values()],
        (torch.Tensor, torch.nn.Parameter),
        isinstance(weights, HeldWeights),
    )
    return [
        read(name, weights[name]) if array is None else array
        for name, array in zip(weights, arrays)
    ]


def spec_of(
    name: str, value: Any, *, is_buffer: bool = False, aliases: Sequence[str] = ()
) -> _ema.Spec:
    """The spec that the server gets of a tensor; does not read the elements."""
    check_text("tensor name", name)
    check_materialized(f'"{name}"', value, may_be_meta=True)
    if isinstance(value, TensorSpec):
        return name, value.dtype, value.shape, value.is_buffer, value.aliases
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return name, _dtype_of(value), tuple(value.shape), is_buffer, aliases
    return (*read(name, value).spec[:3], is_buffer, aliases)


def has_other_dtype(value: Any) -> bool:
    """Whether the server cannot hold the dtype: complex numbers, float8, unsigned integers of more
    than a byte, sparse tensors."""
    return _dtype_of(value) not in DTYPES


def is_sparse(value: Any) -> bool:
    """Whether `value` is a torch tensor whose layout is not strided."""
    return (
        is_instance(value, "torch", "Tensor") and value.layout is not sys.modules["torch"].strided
    )


def is_without_memory(tensor: Any) -> bool:
    """Whether a torch tensor has elements on this rank, but no memory for them: a wrapper of other
    tensors (torchao's float8 weights), or a tensor whose storage was freed. False for sparse
    tensors, and on `meta`."""
    local = local_of(tensor)
    if is_sparse(local) or local.is_meta:
        return False
    return bool(local.numel() > 0 and local.data_ptr() == 0)


def _dtype_of(value: Any) -> str:
    """The dtype's name; of a sparse tensor the layout's name, which no dtype has."""
    return str(value.layout if is_sparse(value) else value.dtype).removeprefix("torch.")


def stack_like(value: Any, count: int) -> Any:
    """A torch tensor or NumPy array of shape [count, *value.shape]; only [0] is filled."""
    if is_instance(value, "torch", "Tensor"):
        stacked = value.new_empty((count, *value.shape))
    else:
        stacked = sys.modules["numpy"].empty((count, *value.shape), value.dtype)
    stacked[0] = value
    return stacked


def check_names(
    what: str, *, expected: Iterable[str], given: Iterable[str], places: tuple[str, str]
) -> None:
    """Raises InvalidArgumentError that lists missing and unexpected names, up to ten of each.
    `places`: where the given and where the expected ones are, such as "in the module"."""
    expected, given = list(expected), list(given)
    missing = sorted(set(expected) - set(given))
    unexpected = sorted(set(given) - set(expected))
    if not missing and not unexpected:
        return
    parts = [
        f"not {place}: {some(names)}"
        for place, names in zip(places, (missing, unexpected))
        if names
    ]
    raise InvalidArgumentError(
        f"{what}: names do not match; {'; '.join(parts)}", reason="BAD_LAYOUT"
    )


def check_shapes(
    what: str,
    *,
    expected: Mapping[str, Any],
    given: Mapping[str, Any],
    places: tuple[str, str],
) -> None:
    """Raises InvalidArgumentError that lists the arrays of `given` with unexpected shapes. `places`:
    as for `check_names`."""
    wrong = [
        f"{name}: {tuple(value.shape)} {places[0]}, {tuple(expected[name].shape)} {places[1]}"
        for name, value in given.items()
        if tuple(value.shape) != tuple(expected[name].shape)
    ]
    if wrong:
        raise InvalidArgumentError(
            f"{what}: shapes do not match; {'; '.join(wrong)}", reason="BAD_LAYOUT"
        )


def some(names: Sequence[str]) -> str:
    """The first ten names, and the number of further ones."""
    text = ", ".join(names[:_NAMED])
    return text if len(names) <= _NAMED else f"{text} and {len(names) - _NAMED} more"


def choose_framework(framework: Framework) -> Literal["torch", "numpy"]:
    """Resolves "auto". Raises InvalidArgumentError for an unknown framework."""
    if framework == "auto":
        return "torch" if importlib.util.find_spec("torch") is not None else "numpy"
    if framework not in ("torch", "numpy"):
        raise InvalidArgumentError(f'framework {framework!r}: must be "auto", "torch" or "numpy"')
    return framework


def build(placed: Sequence[Placed], buffer: Any, *, framework: Framework) -> dict[str, Any]:
    """Tensors that share the pulled buffer: nothing is copied."""
    if choose_framework(framework) == "torch":
        return _build_torch(placed, buffer)
    return _build_numpy(placed, buffer)


def _build_torch(placed: Sequence[Placed], buffer: Any) -> dict[str, Any]:
    import torch

    tensors: dict[str, Any] = {}
    # The caller may use the tensors in any grad mode.
    with torch.inference_mode(False):
        for name, dtype_name, shape, offset, length_bytes in placed:
            dtype = getattr(torch, dtype_name)
            if length_bytes == 0:
                tensors[name] = torch.empty(tuple(shape), dtype=dtype, device="cpu")
            else:
                flat = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset)
                tensors[name] = flat.view(tuple(shape))
    return tensors


def copies_on(device: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of torch tensors, which the caller may use in any grad mode."""
    import torch

    with torch.inference_mode(False):
        return {name: value.to(device, copy=True) for name, value in tensors.items()}


def _build_numpy(placed: Sequence[Placed], buffer: Any) -> dict[str, Any]:
    import numpy

    tensors: dict[str, Any] = {}
    for name, dtype_name, shape, offset, length_bytes in placed:
        dtype = _bfloat16() if dtype_name == "bfloat16" else numpy.dtype(dtype_name)
        if length_bytes == 0:
            tensors[name] = numpy.empty(tuple(shape), dtype=dtype)
        else:
            flat = numpy.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=offset)
            tensors[name] = flat.reshape(tuple(shape))
    return tensors


def _bfloat16() -> Any:
    if importlib.util.find_spec("ml_dtypes") is None:
        raise ImportError(
            "NumPy has no bfloat16 of its own: install ml_dtypes, or pull with framework='torch'"
        )
    return importlib.import_module("ml_dtypes").bfloat16
