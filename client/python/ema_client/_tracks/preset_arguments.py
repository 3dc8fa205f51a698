# SPDX-License-Identifier: Apache-2.0
"""Lets `attach` and `LocalEMA` take a track's fields and a preset's own arguments as keyword arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from ema_client import _ema
from ema_client._errors import InvalidArgumentError
from ema_client._argument_checks import nearest_name
from ema_client._tracks.presets import argument_names
from ema_client._tracks.track import (
    SCHEDULE_NAMES,
    WHOLE_TRACK,
    TensorRules,
    TrackLike,
    decides_buffers,
    track_of,
)

# Arguments that `attach` and `LocalEMA` have, too. If the preset has one of the same name, it has
# the same meaning, and the preset gets it.
_SHARED = ("half_life", "smoothing", "update_interval", "ema_start")
#: Further fields of a schedule, which `attach` and `LocalEMA` take as keyword arguments, too.
FURTHER_NAMES = tuple(name for name in SCHEDULE_NAMES if name not in _SHARED)
# Those of FURTHER_NAMES that do not choose the rule.
_OPTIONS_OF_RULES = (
    *("before_start", "ema_end", "interval_phase", "debias", "zero_init", "power"),
    *("min_decay", "max_decay", "age_offset", "count_offset", "decays_shape"),
)
#: Arguments that make the track "ema" beside other tracks.
RULE_NAMES = ("half_life", "smoothing", "ema_start", "preset") + tuple(
    name for name in FURTHER_NAMES if name not in _OPTIONS_OF_RULES
)


@dataclasses.dataclass(frozen=True)
class EmaRule:
    """How the track "ema" averages: the arguments of `attach` with these names.

    Attributes:
        rule_fields: those of FURTHER_NAMES that are given, without a preset.
    """

    preset: str | Mapping[str, Any] | None
    half_life: str | None
    smoothing: float | None
    update_interval: str | None
    ema_start: str | None
    tensor_rules: TensorRules | None = None
    buffers: str | None = None
    dtype: Any = None
    paused: bool | None = None
    snapshot_interval: str | None = None
    rule_fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def with_arguments(self, extra: Mapping[str, Any], own_names: Collection[str]) -> EmaRule:
        """A copy with `extra` added to the preset's arguments, or without a preset to the schedule.

        Args:
            extra: keyword arguments that the calling function does not have itself.
            own_names: the names of those that it has.

        Raises:
            TypeError: an argument that neither the preset nor a schedule has, or that is given twice.
            InvalidArgumentError: there is no such preset.
        """
        preset, in_preset = self._split()
        names: Collection[str] = FURTHER_NAMES if preset is None else argument_names(preset)
        for name in extra:
            if name not in names:
                raise TypeError(_unknown(name, preset, names, own_names))
        if preset is None:
            given = {name: value for name, value in extra.items() if value is not None}
            return dataclasses.replace(self, rule_fields=given)
        shared = {name: getattr(self, name) for name in _SHARED if name in names}
        shared = {name: value for name, value in shared.items() if value is not None}
        twice = sorted(in_preset.keys() & (extra.keys() | shared.keys() | self._whole().keys()))
        if twice:
            raise TypeError(f'"{twice[0]}" is given both in preset and as an argument')
        if not extra and not shared:
            return self
        # update_interval also applies to the other tracks without their own.
        moved: dict[str, Any] = {name: None for name in shared if name != "update_interval"}
        return dataclasses.replace(
            self, preset={"preset": preset, **in_preset, **shared, **extra}, **moved
        )

    def tracks(
        self, others: Mapping[str, TrackLike] | None
    ) -> tuple[list[_ema.Track], frozenset[str]]:
        """Makes all tracks. Also returns the names of those that do not say what to do with buffers.

        InvalidArgumentError: a wrong rule, or two rules for "ema".
        """
        own = {
            "half_life": self.half_life,
            "smoothing": self.smoothing,
            "ema_start": self.ema_start,
            **self.rule_fields,
        }
        given = {name: value for name, value in own.items() if value is not None}
        whole = self._whole()
        all_tracks: dict[str, TrackLike] = {}
        if self.preset is not None:
            if self.update_interval is not None and "update_interval" not in self.preset:
                given["update_interval"] = self.update_interval
            if given:
                raise InvalidArgumentError(
                    f"preset and {' and '.join(given)} are both given: give the preset's own arguments, "
                    'such as preset="ema_pytorch", beta=0.999',
                    reason="BAD_SCHEDULE",
                )
            preset = {"preset": self.preset} if isinstance(self.preset, str) else self.preset
            all_tracks["ema"] = {**preset, **whole}
        elif not others or not given.keys() <= set(_OPTIONS_OF_RULES):
            all_tracks["ema"] = {**given, **whole}
        elif whole or given:
            name = next(iter(others))
            raise InvalidArgumentError(
                f"{' and '.join([*given, *whole])}: for the track \"ema\", which half_life, another rule, "
                "ema_start or preset make; with tracks alone, give each of these its own, such as "
                f"tracks={{{_text(name, others[name], {**given, **whole})}}}",
                reason="BAD_SCHEDULE",
            )
        if "ema" in all_tracks and others is not None and "ema" in others:
            raise InvalidArgumentError(
                f"{' and '.join(given) or 'preset'}: for the track \"ema\", which is in tracks, too; give "
                f"all of it there, such as tracks={{{_text('ema', all_tracks['ema'], {})}}}",
                reason="BAD_SCHEDULE",
            )
        all_tracks.update(others or {})
        result = [
            track_of(name, track, update_interval=self.update_interval)
            for name, track in all_tracks.items()
        ]
        return result, frozenset(
            name for name, track in all_tracks.items() if not decides_buffers(track)
        )

    def _whole(self) -> dict[str, Any]:
        """The given fields that belong to no schedule, see WHOLE_TRACK."""
        fields = {name: getattr(self, name) for name in WHOLE_TRACK}
        return {name: value for name, value in fields.items() if value is not None}

    def _split(self) -> tuple[str | None, dict[str, Any]]:
        if self.preset is None or isinstance(self.preset, str):
            return self.preset, {}
        arguments = dict(self.preset)
        return arguments.pop("preset", None), arguments


def _text(name: str, track: TrackLike, more: Mapping[str, Any]) -> str:
    """An entry of a dict of tracks, as Python code, with `more` added to the track."""
    fields = dict(track) if isinstance(track, Mapping) else {"half_life": "1000ba"}
    if isinstance(track, str):
        fields = {"copy": True} if track == "copy" else {"half_life": track}
    items = ", ".join(f'"{key}": {_literal(value)}' for key, value in {**fields, **more}.items())
    return f'"{name}": {{{items}}}'


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _unknown(
    name: str, preset: str | None, names: Collection[str], own_names: Collection[str]
) -> str:
    # A preset has its own name for smoothing, or none.
    own = [one for one in own_names if preset is None or one != "smoothing"]
    hint = nearest_name(name, [*names, *own])
    message = f'unexpected argument "{name}"; {hint}'.rstrip()
    if preset is None:
        return f'{message} a library\'s own arguments need preset, such as preset="ema_pytorch"'
    return f'{message} the preset "{preset}" has {", ".join(sorted(names))}'
