# SPDX-License-Identifier: Apache-2.0
"""`compute_ema`: one update of an average of modules, as Composer's function does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.out import check_fits, writing
from ema_client._client.unread import wait_unread
from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import (
    check_values_here,
    check_whole,
    named_tensors,
    non_finite,
    unwrap,
)

if TYPE_CHECKING:
    import torch


def compute_ema(
    model: torch.nn.Module, ema_model: torch.nn.Module, smoothing: float = 0.99
) -> None:
    """Moves `ema_model`'s weights towards those of `model`, in place, like Composer's function.

    Computes `ema = smoothing * ema + (1 - smoothing) * model` for floating-point parameters and
    buffers. A float64 average is computed in float64. All others are computed as on the server: in
    float32, by a fused multiply-add. Values that are infinite in both models stay so. Integer and
    bool buffers are copied. Tied tensors count once. An average that is not contiguous in host
    memory, or of less than 32 bits, is computed on a copy.

    Args:
        model: the model with the latest weights. DistributedDataParallel and torch.compile are
            unwrapped.
        ema_model: the model with the average, of the same names and shapes as `model`.
        smoothing: share of the old average that is kept, 0 to 1.

    Raises:
        InvalidArgumentError: names, shapes or dtypes do not match, smoothing is not 0 to 1, or a finite
            value is too large for the average's dtype. Nothing was changed.

    Example:
        >>> ema_model = copy.deepcopy(model)
        >>> ...
        >>> ema_client.compute_ema(model, ema_model, smoothing=0.999)
    """
    if isinstance(smoothing, (str, bool)) or not 0 <= smoothing <= 1:
        raise InvalidArgumentError(
            f"smoothing {smoothing!r}: must be 0 to 1, such as 0.99", reason="BAD_SCHEDULE"
        )
    check_whole(unwrap(model))
    check_whole(unwrap(ema_model))
    source, target = _all_names("model", model), _all_names("ema_model", ema_model)
    places = ("in ema_model", "in model")
    arrays.check_names("ema_model", expected=source, given=target, places=places)
    wrong = [
        f"{name}: {kind(target[name])} for {kind(source[name])}"
        for name in source
        if target[name].shape != source[name].shape
        or target[name].is_floating_point() != source[name].is_floating_point()
        or target[name].is_complex()
        or any(arrays.is_without_memory(tensors[name]) for tensors in (source, target))
    ]
    if wrong:
        raise InvalidArgumentError(
            f"ema_model: tensors do not match: {'; '.join(wrong)}", reason="BAD_LAYOUT"
        )

    wait_unread(target.values())
    _move(source, target, smoothing)


def _move(
    source: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor], smoothing: float
) -> None:
    """`compute_ema` for tensors that match. Raises before it changes any."""
    import torch

    # Keyed by the tensor, so that tied ones count once.
    pairs = {id(ema): (name, ema) for name, ema in target.items()}.values()
    # The kernel computes in float32, and makes NaN of an infinity that stays.
    not_float32 = {*non_finite(source), *(n for n, e in pairs if e.dtype == torch.float64)}
    in_place: list[tuple[torch.Tensor, torch.Tensor]] = []
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    # New averages, which are checked before they are cast to the dtypes of the old ones.
    values: dict[str, torch.Tensor] = {}

    def wide_param(name: str, ema: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if ema.dtype == torch.float64 else torch.float32
        param = source[name].to(ema.device, dtype)
        check_fits("model", name, source[name].detach(), param)
        return param

    def wide_average(name: str, ema: torch.Tensor) -> torch.Tensor:
        param = wide_param(name, ema)
        return ema.to(param.dtype) * smoothing + param * (1.0 - smoothing)

    with writing():
        for name, ema in pairs:
            if not ema.is_floating_point():
                continue
            if name in not_float32:
                if ema.dtype.itemsize < 4:
                    values[name] = wide_average(name, ema)
                else:
                    wide_param(name, ema)
                continue
            average = on_host(ema).float()
            fold = average, on_host(source[name])
            if average.data_ptr() == ema.data_ptr():
                in_place.append(fold)
            else:
                copied.append(fold)
                values[name] = average
        fold_all(copied, 1.0 - smoothing)
        for name, ema in pairs:
            if name in values:
                check_fits("ema_model", name, values[name].detach(), ema)
        # Nothing was changed before this line.
        fold_all(in_place, 1.0 - smoothing)
        for name, ema in pairs:
            if name in values:
                ema.copy_(values[name])
            elif not ema.is_floating_point():
                ema.copy_(source[name])
            elif name in not_float32:
                ema.copy_(wide_average(name, ema))


def fold_all(pairs: list[tuple[torch.Tensor, torch.Tensor]], weight: float) -> None:
    """Moves the first tensor of each pair towards the second one."""
    _ema.fold_many([ema for ema, _ in pairs], [param for _, param in pairs], weight)


def _all_names(what: str, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under all of their names."""
    tensors = named_tensors(unwrap(model))
    named = tensors.all()
    check_values_here(what, unwrap(model), named, may_be_meta=False)
    for name, others in tensors.aliases.items():
        named.update(dict.fromkeys(others, named[name]))
    return named


def kind(tensor: torch.Tensor) -> str:
    kind = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return f"{kind} without memory" if arrays.is_without_memory(tensor) else kind


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is contiguous in host memory, else a contiguous copy there."""
    return tensor.detach().cpu().contiguous().resolve_neg()
