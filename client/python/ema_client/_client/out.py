# SPDX-License-Identifier: Apache-2.0
"""Writes pulled values into arrays of the caller: into all of them, or none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from ema_client._client.arrays import (
    ON_META,
    check_materialized,
    check_names,
    check_shapes,
    is_instance,
    some,
)
from ema_client._client.types import Overflow
from ema_client._errors import InvalidArgumentError

# The casts that NumPy may apply to values that are written into an array of another dtype.
_CASTING: Literal["same_kind"] = "same_kind"


def check_writable(what: str, targets: Mapping[str, Any]) -> None:
    """InvalidArgumentError: some of these torch tensors or NumPy arrays cannot be written; the
    message lists them.

    Other types are not checked here: `write_arrays` rejects them.
    """
    problems: dict[str, list[str]] = {}
    for name, target in targets.items():
        check_materialized(f'"{name}"', target, may_be_meta=True)
        if problem := _problem(target):
            problems.setdefault(problem, []).append(name)
    if problems:
        texts = [f"{some(names)}: {problem}" for problem, names in problems.items()]
        raise InvalidArgumentError(
            f"{what}: cannot be written: {'; '.join(texts)}", reason="BAD_LAYOUT"
        )


def check_castable(
    what: str,
    *,
    values: Mapping[str, Any],
    targets: Mapping[str, Any],
    overflow: Overflow = "error",
) -> None:
    """InvalidArgumentError: some of the targets, torch tensors or NumPy arrays, have dtypes that
    cannot hold the values of the same names, such as int8 for averages; the message lists them. Or,
    if `overflow` is "error", a finite value is too large for its target's dtype; the message names
    the first."""
    wrong = [
        f"{name}: {target.dtype} for {values[name].dtype}"
        for name, target in targets.items()
        if not _can_cast(values[name], target)
    ]
    if wrong:
        raise InvalidArgumentError(f"{what}: wrong dtypes: {'; '.join(wrong)}", reason="BAD_LAYOUT")
    if overflow == "error":
        for name, target in targets.items():
            check_fits(what, name, values[name], target)


@contextlib.contextmanager
def writing() -> Iterator[None]:
    """For a block that writes torch tensors of the caller, who may have any grad mode, and may have
    created the tensors in any. Drops what `torch.autocast` and `torch.nn.utils.parametrize.cached` have
    computed from the previous values.
    """
    import torch

    try:
        # Outside inference mode, PyTorch does not write tensors that were created in it.
        with torch.inference_mode():
            yield
    finally:
        torch.clear_autocast_cache()
        getattr(torch.nn.utils.parametrize, "_cache", {}).clear()


def write_arrays(
    out: Mapping[str, Any],
    tensors: Mapping[str, Any],
    aliases: Mapping[str, str],
    overflow: Overflow = "error",
) -> None:
    """Writes `tensors` in place into the arrays of `out`, cast to their dtypes. REQUIRES: these
    have passed `check_writable`.

    Nothing is written if a name or a shape does not match, a dtype cannot be cast, a value is too
    large for a dtype (see `Overflow`), or two tensors have the same array.

    Args:
        aliases: from further names of tensors, which `out` may use, to the first ones.
    """
    places = ("in out", "on the server")
    check_names(
        "out",
        expected=tensors,
        given=[name for name in out if name not in aliases],
        places=places,
    )
    is_torch = all(is_instance(tensor, "torch", "Tensor") for tensor in tensors.values())
    kind = ("torch", "Tensor") if is_torch else ("numpy", "ndarray")
    wrong = [name for name in out if not is_instance(out[name], *kind)]
    if wrong:
        _refuse(f"not a {'.'.join(kind)}: {', '.join(wrong)}")
    values = {name: tensors[aliases.get(name, name)] for name in out}
    check_shapes("out", expected=values, given=out, places=places)
    check_castable("out", values=values, targets=out, overflow=overflow)
    _check_apart(out, aliases)
    for name, tensor in values.items():
        if overflow == "saturate":
            tensor = saturated(tensor, out[name])
        if is_torch:
            with writing():
                out[name].copy_(tensor)
        else:
            import numpy

            with numpy.errstate(over="ignore"):
                numpy.copyto(out[name], tensor, casting=_CASTING)


def _can_cast(tensor: Any, target: Any) -> bool:
    if is_instance(tensor, "torch", "Tensor"):
        import torch

        # From integers, a cast to bool makes a mask. From averages, copy_ would make zeros or True.
        is_mask = target.dtype == torch.bool and not (
            tensor.is_floating_point() or tensor.is_complex()
        )
        return is_mask or torch.can_cast(tensor.dtype, target.dtype)
    import numpy

    return bool(numpy.can_cast(tensor.dtype, target.dtype, casting=_CASTING))


def saturated(tensor: Any, target: Any) -> Any:
    """The tensor, with the target's largest values in place of finite ones that are larger."""
    largest = _largest_if_narrower(tensor, target)
    if largest is None:
        return tensor
    clipped = tensor.clip(-largest, largest)
    if is_instance(tensor, "torch", "Tensor"):
        return clipped.where(tensor.isfinite(), tensor)
    import numpy

    return numpy.where(numpy.isfinite(tensor), clipped, tensor)


def _largest_if_narrower(tensor: Any, target: Any) -> float | None:
    """The largest finite value of the target's dtype, if both are floats and the tensor's dtype
    has larger ones."""
    here: float | None
    there: float | None
    if is_instance(tensor, "torch", "Tensor"):
        import torch

        if not (tensor.is_floating_point() and target.is_floating_point()):
            return None
        if target.dtype.itemsize == 1:  # Most float8 have no infinity.
            return None
        here, there = torch.finfo(target.dtype).max, torch.finfo(tensor.dtype).max
    else:
        here, there = _largest(target.dtype), _largest(tensor.dtype)
    if here is None or there is None or here >= there:
        return None
    return here


def _largest(dtype: Any) -> float | None:
    """The largest finite value of a NumPy dtype; None: not a float of at least two bytes."""
    import numpy

    if dtype.kind == "f":
        return float(numpy.finfo(dtype).max)
    if dtype.name == "bfloat16":  # Of ml_dtypes.
        return float.fromhex("0x1.fep127")
    return None


def check_fits(what: str, name: str, tensor: Any, target: Any) -> None:
    """InvalidArgumentError: a finite value of `tensor` becomes infinite in the target's dtype."""
    largest = _largest_if_narrower(tensor, target)
    if largest is None or 0 in tensor.shape:
        return
    if is_instance(tensor, "torch", "Tensor"):
        overflows = tensor.to(target.dtype).isinf().logical_and_(~tensor.isinf())
        index = overflows.nonzero()[0].tolist() if overflows.any() else None
    else:
        import numpy

        with numpy.errstate(over="ignore"):
            overflows = numpy.isinf(tensor.astype(target.dtype)) & ~numpy.isinf(tensor)
        index = numpy.argwhere(overflows)[0].tolist() if overflows.any() else None
    if index is not None:
        dtype = str(target.dtype).removeprefix("torch.")
        raise InvalidArgumentError(
            f"{what}: {name}{index} is {float(tensor[tuple(index)]):g}, and {dtype} ends at "
            f"{largest:g}: must have a wider dtype"
        )


def _problem(target: Any) -> str | None:
    """Why `target` cannot be written. None: it can, or it is not a torch tensor or NumPy array."""
    if is_instance(target, "torch", "Tensor"):
        import torch

        if target.layout != torch.strided:
            return f"its layout is {target.layout}"
        if target.is_meta:
            return ON_META
        strides: Sequence[int] = target.stride()
    elif is_instance(target, "numpy", "ndarray"):
        if not target.flags.writeable:
            return "read-only"
        strides = target.strides
    else:
        return None
    if _overlaps_itself(target.shape, strides):
        return "several of its elements lie at one place (an expanded array)"
    return None


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements share memory. Also True for a few nested layouts in which they do not."""
    if 0 in shape:
        return False
    end = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape) if n > 1):
        if stride <= end:
            return True
        end += stride * (extent - 1)
    return False


def _check_apart(out: Mapping[str, Any], first_names: Mapping[str, str]) -> None:
    """InvalidArgumentError: two arrays, of different tensors, begin at the same byte. Other
    overlaps are not detected; such arrays get values of both tensors."""
    owners: dict[tuple[str, int], str] = {}
    pairs: list[str] = []
    for name, target in out.items():
        if 0 in target.shape:
            continue
        if is_instance(target, "torch", "Tensor"):
            place = str(target.device), target.data_ptr()
        else:
            place = "cpu", target.ctypes.data
        other = owners.setdefault(place, name)
        if first_names.get(other, other) != first_names.get(name, name):
            pairs.append(f"{other} and {name}")
    if pairs:
        _refuse(f"share memory, and can have one value only: {', '.join(pairs)}")


def _refuse(message: str) -> None:
    raise InvalidArgumentError(f"out: {message}", reason="BAD_LAYOUT")
