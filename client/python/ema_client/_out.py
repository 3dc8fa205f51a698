# SPDX-License-Identifier: Apache-2.0
"""Arrays of the caller's that pulled values are written into: all of them, or none."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from ema_client._arrays import check_names, check_shapes, is_instance, range_of, strides_of
from ema_client._errors import InvalidArgumentError

# What NumPy may do to pulled values that go into an array of another dtype.
_CASTING: Literal["same_kind"] = "same_kind"
# How many places NumPy tries to find one that two arrays share.
_MOST_TRIES: Any = 10_000


def check_writable(what: str, targets: Mapping[str, Any]) -> None:
    """InvalidArgumentError: some of these, torch tensors or NumPy arrays, cannot be written; lists them.

    Others are let pass: `copy_into` refuses them.
    """
    problems = [
        f"{name}: {problem}" for name, target in targets.items() if (problem := _problem(target))
    ]
    if problems:
        raise InvalidArgumentError(
            f"{what}: cannot be written: {'; '.join(problems)}", reason="BAD_LAYOUT"
        )


def check_castable(what: str, *, values: Mapping[str, Any], targets: Mapping[str, Any]) -> None:
    """InvalidArgumentError: some of the targets, torch tensors or NumPy arrays, have dtypes that cannot
    hold what is there for them by the same names, such as int8 for averages; lists them."""
    wrong = [
        f"{name}: {target.dtype} for {values[name].dtype}"
        for name, target in targets.items()
        if not _can_cast(values[name], target)
    ]
    if wrong:
        raise InvalidArgumentError(f"{what}: wrong dtypes: {'; '.join(wrong)}", reason="BAD_LAYOUT")


def copy_into(
    out: Mapping[str, Any], tensors: Mapping[str, Any], aliases: Mapping[str, str]
) -> None:
    """Writes `tensors` into the arrays of `out`, which `check_writable` has let pass, in place, casting
    to their dtypes.

    Nothing is written if a name or a shape does not match, a dtype cannot be cast, or an array shares
    memory with another, unless it is the same under another name.

    Args:
        aliases: further names, by which `out` may have a tensor, too, and the first ones.
    """
    check_names("out", expected=tensors, given=[name for name in out if name not in aliases])
    is_torch = all(is_instance(tensor, "torch", "Tensor") for tensor in tensors.values())
    kind = ("torch", "Tensor") if is_torch else ("numpy", "ndarray")
    wrong = [name for name in out if not is_instance(out[name], *kind)]
    if wrong:
        _refuse(f"not a {'.'.join(kind)}: {', '.join(wrong)}")
    values = {name: tensors[aliases.get(name, name)] for name in out}
    check_shapes("out", expected=values, given=out)
    check_castable("out", values=values, targets=out)
    # Names that are tied in `out`, too, once.
    apart = {
        (
            aliases.get(name, name),
            *_place("", target)[:3],
            str(target.dtype),
            strides_of(target),
        ): name
        for name, target in out.items()
    }
    _check_apart({name: out[name] for name in apart.values()})
    for name in apart.values():
        tensor = values[name]
        if is_torch:
            import torch

            with torch.no_grad():
                out[name].copy_(tensor)
        else:
            import numpy

            numpy.copyto(out[name], tensor, casting=_CASTING)


def _can_cast(tensor: Any, target: Any) -> bool:
    if is_instance(tensor, "torch", "Tensor"):
        import torch

        # copy_ makes zeros of averages, or True; of integers a mask.
        is_mask = target.dtype == torch.bool and not (
            tensor.is_floating_point() or tensor.is_complex()
        )
        return is_mask or torch.can_cast(tensor.dtype, target.dtype)
    import numpy

    return bool(numpy.can_cast(tensor.dtype, target.dtype, casting=_CASTING))


def _problem(target: Any) -> str | None:
    """Why it cannot be written. None: it can, or is no torch tensor or NumPy array."""
    if is_instance(target, "torch", "Tensor"):
        import torch

        if target.is_inference() and not torch.is_inference_mode_enabled():
            return "an inference tensor, outside torch.inference_mode()"
        if target.layout != torch.strided:
            return f"its layout is {target.layout}"
        if target.is_meta:
            return "on the meta device, where it has no memory"
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
    """Whether several elements lie at one place; also of the few that are nested in such a way that it
    is not plain to see."""
    if 0 in shape:
        return False
    end = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape) if n > 1):
        if stride <= end:
            return True
        end += stride * (extent - 1)
    return False


class _Place(NamedTuple):
    """Where an array lies."""

    device: str
    begin: int
    end: int  # Behind its last byte.
    name: str
    array: Any


def _check_apart(out: Mapping[str, Any]) -> None:
    """InvalidArgumentError: two of them share memory."""
    places = sorted(
        (_place(name, target) for name, target in out.items() if 0 not in target.shape),
        key=lambda place: place[:3],
    )
    pairs: list[str] = []
    open_places: list[_Place] = []
    for place in places:
        open_places = [
            before
            for before in open_places
            if before.device == place.device and before.end > place.begin
        ]
        pairs += [
            f"{before.name} and {place.name}"
            for before in open_places
            if _share(before.array, place.array)
        ]
        open_places.append(place)
    if pairs:
        _refuse(f"share memory, and can have one value only: {', '.join(pairs)}")


def _place(name: str, target: Any) -> _Place:
    device = str(target.device) if is_instance(target, "torch", "Tensor") else "cpu"
    return _Place(device, *range_of(target), name, target)


def _share(one: Any, other: Any) -> bool:
    """Whether two arrays, whose ranges of memory meet, have a byte in common. What cannot be found out
    in time (columns of one matrix are) counts as apart."""
    if importlib.util.find_spec("numpy") is None:
        return bool(one.data_ptr() == other.data_ptr())
    import numpy

    try:
        return bool(numpy.shares_memory(_outline(one), _outline(other), max_work=_MOST_TRIES))
    except RuntimeError:  # numpy.exceptions.TooHardError
        return False


class _Outline:
    """A tensor's memory as NumPy sees it, which does not touch it: it may be a GPU's."""

    def __init__(self, tensor: Any) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "typestr": f"|V{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
        }


def _outline(array: Any) -> Any:
    import numpy

    if is_instance(array, "numpy", "ndarray"):
        return array
    return numpy.asarray(_Outline(array))


def _refuse(message: str) -> None:
    raise InvalidArgumentError(f"out: {message}", reason="BAD_LAYOUT")
