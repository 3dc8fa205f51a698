# SPDX-License-Identifier: Apache-2.0
"""What happens by default to tensors that should not be averaged.

Buffers that hold NaN or infinity (attention masks) are ignored, because the server would reject every
step. For others, a track's `buffers` and `tensor_rules` come first. Without them, buffers that a module
derives from its weights (the vectors of spectral norm, masks of pruning, ranges of quantization) are
copied. Other buffers are averaged; if they change in training, and are no running statistics, a warning
names them. Of a model with PEFT's adapters, the frozen parameters of the base are ignored.
"""

from __future__ import annotations

import glob
import logging
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Literal

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.pieces import local_of
from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import NamedTensors, checksums, non_finite
from ema_client._trainer.adapters import frozen_base
from ema_client._trainer.frozen import mark

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

#: "": a tensor has no action of its own by default.
DefaultAction = Literal["", "copy", "ignore"]

# Buffers whose names begin so are statistics, as in BatchNorm, whose mean makes sense.
_STATISTICS = "running_"


def default_actions(
    module: torch.nn.Module, tensors: NamedTensors, *, allows_non_finite: bool = False
) -> dict[str, DefaultAction]:
    """The actions for buffers: "copy" where no rule of a track decides, and "ignore" in all tracks;
    and for parameters: "ignore" where no rule decides."""
    derived = _ids_of_derived(module)
    actions: dict[str, DefaultAction] = {
        name: "copy" for name, buffer in tensors.buffers.items() if id(buffer) in derived
    }
    if not allows_non_finite:
        actions |= dict.fromkeys(non_finite(tensors.buffers), "ignore")
    actions |= dict.fromkeys(frozen_base(module, tensors), "ignore")
    return actions


def _ids_of_derived(module: torch.nn.Module) -> set[int]:
    """The ids of the buffers that PyTorch derives from a module's weights or inputs."""
    from torch.nn.utils.parametrize import ParametrizationList
    from torch.nn.utils.prune import BasePruningMethod
    from torch.nn.utils.spectral_norm import SpectralNorm

    quantization = tuple(
        cls
        for file, name in _QUANTIZATION
        if (cls := getattr(sys.modules.get(f"torch.ao.quantization.{file}"), name, None))
    )
    derived: set[int] = set()
    for part in module.modules():
        if isinstance(part, ParametrizationList):
            for parametrization in part.children():
                derived.update(map(id, parametrization.buffers()))
        if isinstance(part, quantization):
            derived.update(map(id, part.buffers()))
        for hook in part._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                names = [f"{hook.name}_u", f"{hook.name}_v"]
            elif isinstance(hook, BasePruningMethod):
                names = [f"{hook._tensor_name}_mask"]
            else:
                continue
            derived.update(id(part._buffers.get(name)) for name in names)
    return derived


_QUANTIZATION = (
    ("observer", "ObserverBase"),
    ("observer", "AffineQuantizedObserverBase"),
    ("fake_quantize", "FakeQuantizeBase"),
)


def with_default_actions(
    tracks: Iterable[_ema.Track],
    actions: Mapping[str, DefaultAction],
    undecided: Collection[str],
    specs: list[_ema.Spec],
) -> list[_ema.Track]:
    """The tracks with rules for the tensors among `specs` that have an action by default.

    `undecided`: the names of the tracks whose `buffers` was not given, by the user or a preset.
    """
    ignoring = _rules(ignored_by_default(actions, specs), actions, "ignore")
    of_base = _rules((spec[0] for spec in specs if not spec[3]), actions, "ignore")
    result = []
    for track in tracks:
        copying: list[_ema.RuleTuple] = []
        if track.name in undecided:
            copying = _rules(averaged_by_default(track, specs), actions, "copy")
        if ignoring or copying or of_base:
            track = _with_rules(track, [*ignoring, *track.tensor_rules, *copying, *of_base])
        result.append(track)
    return result


def _rules(
    names: Iterable[str], actions: Mapping[str, DefaultAction], action: DefaultAction
) -> list[_ema.RuleTuple]:
    return [(glob.escape(name), action, None) for name in names if actions.get(name) == action]


def ignored_by_default(actions: Mapping[str, DefaultAction], specs: list[_ema.Spec]) -> list[str]:
    """The buffers among `specs` that `with_default_actions` lets all tracks ignore."""
    return [spec[0] for spec in specs if spec[3] and actions.get(spec[0]) == "ignore"]


def warn_of_base(what: str, count: int, of: int) -> None:
    """Says that `count` of the `of` tensors are the frozen base of a PEFT model."""
    _logger.warning(
        "%s: of a model with PEFT's adapters, the average has the %d tensors of the adapters, and not the "
        'base, %d frozen tensors. To average the base, too: tensor_rules={"*": "average"}; to end this '
        'warning: tensor_rules={"*lora_*": "average", "*": "ignore"}, or the names of your adapters',
        what,
        of - count,
        count,
    )


def warn_of_ignored(what: str, names: list[str]) -> None:
    _logger.warning(
        "%s: buffers that hold NaN or infinity are not averaged, and stay as the module has them: %s. If "
        'they are meant to (a mask), tensor_rules={"%s": "ignore"} ends this warning; else give them '
        "finite values first",
        what,
        arrays.some(names),
        names[0],
    )


def check_parameters_finite(
    what: str, parameters: Mapping[str, torch.Tensor], tracks: Iterable[_ema.Track]
) -> None:
    """InvalidArgumentError: parameters have values that the server rejects in every step."""
    are_float32 = any(track.dtype == "float32" and not track.schedule.is_copy for track in tracks)
    names = non_finite(parameters, "float32" if are_float32 else "float64")
    if names:
        raise InvalidArgumentError(
            f"{what}: parameters hold NaN or infinity, so that the server would reject every step: "
            f"{arrays.some(names)}. Give them finite values first; or, if they are meant to hold them (a "
            f'mask), let each track ignore them: tensor_rules={{"{names[0]}": "ignore"}}',
            reason="NON_FINITE",
        )


def averaged_by_default(track: _ema.Track, specs: list[_ema.Spec]) -> list[str]:
    """The buffers that the track averages although no rule says so."""
    copying = _with_rules(track, track.tensor_rules, buffers="copy")
    return [
        spec[0]
        for spec, (action, _), (otherwise, _) in zip(
            specs, track.actions(specs), copying.actions(specs)
        )
        if action != otherwise
    ]


def _with_rules(
    track: _ema.Track, rules: list[_ema.RuleTuple], *, buffers: str | None = None
) -> _ema.Track:
    return _ema.Track(
        track.name,
        track.schedule,
        rules,
        track.buffers if buffers is None else buffers,
        track.dtype,
        track.paused,
        track.snapshot_interval,
    )


class AveragedBuffers:
    """The buffers that are averaged by default, and of which it is not known whether that makes
    sense. Warns of those that change, since the average of a constant is the constant."""

    def __init__(
        self,
        what: str,
        tensors: NamedTensors,
        tracks: Iterable[_ema.Track],
        undecided: Collection[str],
        specs: list[_ema.Spec],
    ) -> None:
        averaged = {
            name
            for track in tracks
            if track.name in undecided
            for name in averaged_by_default(track, specs)
        }
        watched = {
            name: buffer
            for name, buffer in tensors.buffers.items()
            if name in averaged and not name.rpartition(".")[2].startswith(_STATISTICS)
        }
        self._what = what
        self._marks = {name: mark(buffer) for name, buffer in watched.items()}
        self._sums = dict(zip(watched, checksums(map(local_of, watched.values()))))

    def warn_of_changes(self, tensors: NamedTensors, names: Collection[str] | None = None) -> None:
        """Warns, once for each, of the buffers whose values have changed; of `names` only."""
        current = {
            name: tensors.buffers[name]
            for name in self._marks
            if name in tensors.buffers and (names is None or name in names)
        }
        marks = {name: mark(buffer) for name, buffer in current.items()}
        written = [name for name in current if marks[name] != self._marks[name]]
        self._marks |= marks
        sums = checksums(local_of(current[name]) for name in written)
        changed = [name for name, value in zip(written, sums) if value != self._sums[name]]
        for name in changed:
            del self._marks[name]
        if changed:
            _logger.warning(
                "%s: buffers that change in training are averaged: %s. If their mean makes no sense (a "
                'mask, a unit vector), use a new model, with tensor_rules={"%s": "copy"}; with "average" '
                "there, this warning ends",
                self._what,
                arrays.some(changed),
                changed[0],
            )
