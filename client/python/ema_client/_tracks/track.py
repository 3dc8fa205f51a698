# SPDX-License-Identifier: Apache-2.0
"""How one track averages, as users write it, and as the extension module takes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Union

from ema_client import _ema
from ema_client._errors import InvalidArgumentError, NotFoundError
from ema_client._given import DECAY_NAMES, call, check_by_name, nearest_name
from ema_client._tracks import presets

#: Of a tensor rule: "average", "copy", "ignore", or a schedule: a half-life such as "200ba", the text of
#: one ("smoothing=0.9"), or a Track's fields as a dict.
RuleLike = Union[str, Mapping[str, Any]]
TensorRules = Union[Mapping[str, RuleLike], Sequence[tuple[str, RuleLike]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """How one track averages. None: the default. Without a rule: half_life "1000ba".

    One of these names the rule, which gives each update a decay `d`, the share of the old average
    that is kept; `elapsed` is the training time since the track's last update, `age` that since its
    start:

    - half_life (and, or only, ramp_ratio): `d = 2^(-elapsed / h)`, `h = min(half_life, ramp_ratio * age)`.
    - smoothing: `d = smoothing` at every update.
    - inv_gamma: `d = 1 - (1 + s / inv_gamma)^-power`, s: position (units of the interval since the
      start, less one).
    - ramp: `d = (1 + s) / (ramp + s)`.
    - sigma_rel: `d = (1 - elapsed / age)^(gamma + 1)`, the power-function profile of that width.
    - uniform: the mean of all updates since the start.
    - copy: the latest weights as they are.

    Attributes:
        half_life: training time until a contribution halves, such as "200ba" or "2ep".
        ramp_ratio: keeps the half-life short while training is young, such as 0.09 (EDM2).
        debias: of half_life: without the share of the zeros that the average began with.
        smoothing: share of the old average kept in each update, in [0, 1); never rescaled.
        zero_init: of smoothing: begins with zeros, "plain" or "debias" (without their share).
        inv_gamma, power: of the warm-up by inv_gamma; power's default is 2/3.
        ramp: of the warm-up (1 + s) / (ramp + s), such as 10.
        min_decay, max_decay: limits of a warm-up's decay; the defaults are 0 and 0.9999.
        sigma_rel: relative width of the profile, above 0 and at most 1/sqrt(12).
        age_offset: added to the time since the start, in the interval's unit; default 0.
        uniform, copy: True: this rule.
        update_interval: such as "5ba". None: one unit of the half-life, else "1ba".
        interval_phase: updates are due at interval_phase + k * update_interval.
        ema_start: when averaging starts, such as "0.1dur". None: at once.
        before_start: what the track is until then: "reinit" (its first value, replaced at the start;
            the default), "copy" (the latest weights) or "hold" (its first value, kept).
        ema_end: after this time the track does not change any more.
        tensor_rules: what to do with tensors by name or glob: {"head.*": "ignore", "bn.*": "copy"},
            or the schedule that they are averaged by in place of the track's: {"stem.*": "50ba",
            "neck.*": {"smoothing": 0.9}}; without an update_interval by the track's. The first
            that matches decides.
        buffers: what to do with floating-point buffers that no rule matches: "average" or "copy".
        compensated: keeps two float32 per element, so that small weights do not stall. Twice the memory.
        paused: pushes do not change the track.
        snapshot_interval: of sigma_rel: the server keeps a version on its disk for each such length of
            training, such as "1000ba", from which `Client.synthesize` builds averages of other
            lengths. A LocalEMA keeps none.
    """

    half_life: str | None = None
    smoothing: float | None = None
    update_interval: str | None = None
    ema_start: str | None = None
    before_start: str | None = None
    ema_end: str | None = None
    interval_phase: int | None = None
    ramp_ratio: float | None = None
    debias: bool | None = None
    zero_init: str | None = None
    inv_gamma: float | None = None
    power: float | None = None
    min_decay: float | None = None
    max_decay: float | None = None
    ramp: float | None = None
    sigma_rel: float | None = None
    age_offset: float | None = None
    uniform: bool | None = None
    copy: bool | None = None
    tensor_rules: TensorRules = ()
    buffers: str = "average"
    compensated: bool = False
    paused: bool = False
    snapshot_interval: str | None = None

    def __post_init__(self) -> None:
        # One form of the rules: equal tracks compare equal, and have a hash.
        object.__setattr__(self, "tensor_rules", _rules(self.tensor_rules))

    @property
    def is_copy(self) -> bool:
        return bool(self.copy)

    @classmethod
    def preset(cls, name: str, /, **arguments: Any) -> Track:
        """The track that averages as a library does, from that library's own arguments.

        With pushes at batch 1, 2, 3, ... the decays are those of the library's first, second, third call.
        Not as any library: integer and bool tensors are copied, tied ones averaged once, and the first
        push is the first value, unless weights from before training are pushed at batch 0 (with which timm's
        ModelEmaV2, optax.incremental_update and EDM2's TraditionalEMA begin). Besides:

        - composer: the first update, of the fresh copy with itself, leaves it as it is (there it is
          rounded). An ema_start in another unit than update_interval counts from the push that reaches
          it (there from the next epoch's end).
        - ema_pytorch: the decay is formed in float64 (there in float32). Ignored tensors are not in the
          track (there they keep the weights of the last copy).
        - karras (ema_pytorch.KarrasEMA): with update_every above 1 the profile is exact (there the decay is
          that of an update at every step).
        - diffusers: buffers, which it does not keep, are copied. While the decay is 0, weights are copied
          bit for bit.
        - timm: the decays of ModelEmaV3's `update(model, step=n)`, n = 1, 2, ..., as its trainer calls it;
          with step=False those of `update(model)`: constant from the start, whatever the warm-up. No
          stochastic rounding: averages are float32.
        - torch: those of get_ema_multi_avg_fn(decay); with kind="swa" the mean of all updates.
        - optax: of ema(debias) the share of the zeros is formed in float64 (in float32, at decay 0.9999,
          it is wrong in the fourth digit). periodic_update also takes the first push.
        - edm2: trained images are the samples ("sp"), which `time` has to count. Buffers are copied.

        Args:
            name: "composer", "ema_pytorch", "diffusers", "timm", "torch", "optax", "edm2" or "karras".
            arguments: as the library's class or function names them; its defaults count. Where it has
                two, `version="v2"` chooses timm's ModelEmaV2 (else ModelEmaV3), `kind="swa"` torch's
                mean of all updates (else get_ema_multi_avg_fn's), `kind="traditional"` EDM2's
                TraditionalEMA (else PowerFunctionEMA); optax' three are told apart by `decay`,
                `step_size` and `update_period`.

        Raises:
            InvalidArgumentError: no such preset or argument, or a value that cannot be had here.

        Example:
            >>> Track.preset("ema_pytorch", beta=0.999, update_every=1)
        """
        return Track(**presets.track_arguments(name, arguments))


def _rules(rules: object) -> tuple[tuple[str, str], ...]:
    """The rules as pairs of a pattern and an action or a schedule's text."""
    pairs = list(rules.items()) if isinstance(rules, Mapping) else rules
    if isinstance(pairs, Iterable) and not isinstance(pairs, str):
        pairs = [tuple(pair) if isinstance(pair, (tuple, list)) else pair for pair in pairs]
        if all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], (str, Mapping))
            for pair in pairs
        ):
            return tuple((pattern, _rule_text(rule)) for pattern, rule in pairs)
    raise InvalidArgumentError(
        f"tensor_rules {rules!r}: must be names or globs with average, copy, ignore or a schedule, "
        'such as {"head.*": "ignore", "bn.*": "copy", "stem.*": "50ba"}',
        reason="BAD_SCHEDULE",
    )


def _rule_text(rule: str | Mapping[str, Any]) -> str:
    if not isinstance(rule, str):
        track = _full_track(rule)
        for field in WHOLE_TRACK:
            if getattr(track, field) != getattr(_DEFAULT_TRACK, field):
                raise _bad(
                    f"tensor_rules: {field} {getattr(track, field)!r}: a rule has a schedule's fields "
                    "only, such as half_life and update_interval; this one is the whole track's"
                )
        fields = _schedule_fields(track)
        _ema.Schedule.from_fields(fields)  # Says what is wrong.
        return ", ".join(f"{name}={value}" for name, value in fields.items())
    return rule


def _rule_from(action: str, schedule: _ema.Schedule | None) -> str:
    if schedule is None:
        return action
    # Also where it is the default: without one, a rule would have its track's.
    interval = {"update_interval": schedule.update_interval} if schedule.update_interval else {}
    fields = {**schedule.to_fields(), **interval}
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _rule_tuple(pattern: str, rule: str) -> _ema.RuleTuple:
    """The rule as the extension module takes it, which says what is wrong with an action."""
    if not any(sign.isdigit() or sign == "=" for sign in rule):
        return pattern, rule, None
    try:
        return pattern, "average", _ema.Schedule.parse(rule)
    except InvalidArgumentError as error:
        raise _bad(f"tensor_rules: {pattern}: {error.args[0]}") from None


#: "copy", a half-life such as "200ba", a Track, its fields as a dict, or a library's arguments as
#: {"preset": "ema_pytorch", "beta": 0.999}, to which the fields of WHOLE_TRACK may be added.
TrackLike = Union[str, Track, Mapping[str, Any]]


# Of a Track: how a value becomes the schedule's text.
_DURATIONS = ("half_life", "update_interval", "ema_start", "ema_end")
_WORDS = ("before_start", "zero_init")
_FLAGS = ("debias", "uniform", "copy")
_NUMBERS = (
    "smoothing",
    "ramp_ratio",
    "inv_gamma",
    "power",
    "min_decay",
    "max_decay",
    "ramp",
    "sigma_rel",
    "age_offset",
)
#: Fields that are no schedule's: whichever rule a track has, by a preset or not, they say the rest.
WHOLE_TRACK = ("tensor_rules", "buffers", "compensated", "paused", "snapshot_interval")
_DEFAULT_HALF_LIFE = "1000ba"
# Fields that are of a rule other than half_life, whether or not they name it.
_OTHER_RULES = frozenset(_NUMBERS) | {"zero_init", "uniform", "copy"}
_FIELD_NAMES = tuple(field.name for field in dataclasses.fields(Track))
_DEFAULT_TRACK = Track()


def track_from(track: _ema.Track) -> Track:
    values: dict[str, Any] = {}
    for name, text in track.schedule.to_fields().items():
        if name in _NUMBERS:
            values[name] = float(text)
        elif name in _FLAGS:
            values[name] = text == "true"
        elif name == "interval_phase":
            values[name] = int(text)
        else:
            values[name] = text
    return Track(
        **values,
        tensor_rules=[
            (pattern, _rule_from(action, schedule))
            for pattern, action, schedule in track.tensor_rules
        ],
        buffers=track.buffers,
        compensated=track.compensated,
        paused=track.paused,
        snapshot_interval=track.snapshot_interval,
    )


def track_of(name: str, track: TrackLike, *, update_interval: str | None = None) -> _ema.Track:
    """The track `name` as the extension module takes it.

    Args:
        update_interval: for a track that sets none.

    Raises:
        InvalidArgumentError: a field is wrong; the message names track, field and value.
    """
    try:
        full = _full_track(track)
        if full.update_interval is None and update_interval is not None:
            full = dataclasses.replace(full, update_interval=update_interval)
        schedule = _ema.Schedule.from_fields(_schedule_fields(full))
        rules = [_rule_tuple(pattern, rule) for pattern, rule in _rules(full.tensor_rules)]
        for field in ("compensated", "paused"):
            if not isinstance(getattr(full, field), bool):
                raise _bad(f"{field} {getattr(full, field)!r}: must be True or False")
        if not isinstance(full.buffers, str):
            raise _bad(f'buffers {full.buffers!r}: must be "average" or "copy"')
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f'track "{name}": {error.args[0]}', reason=error.reason
        ) from None
    # Says the name itself.
    return call(
        _ema.Track,
        name,
        schedule,
        rules,
        full.buffers,
        full.compensated,
        full.paused,
        None if full.snapshot_interval is None else str(full.snapshot_interval),
    )


def tracks_by_name(tracks: Mapping[str, TrackLike]) -> list[_ema.Track]:
    """`track_of` each, by name."""
    check_by_name("tracks", tracks)
    return [track_of(name, track) for name, track in tracks.items()]


def _bad(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, reason="BAD_SCHEDULE")


def _full_track(track: TrackLike) -> Track:
    if isinstance(track, Track):
        return track
    if not isinstance(track, Mapping):
        # A bare number has no unit, which the parser says better.
        return Track(copy=True) if track == "copy" else Track(half_life=str(track))
    fields = dict(track)
    if "preset" in fields:
        whole = {name: fields.pop(name) for name in WHOLE_TRACK if name in fields}
        made = Track.preset(str(fields.pop("preset")), **fields)
        if "tensor_rules" in whole:
            # The preset's own (ema_pytorch's ignore_names) hold where none of these matches.
            whole["tensor_rules"] = (*_rules(whole["tensor_rules"]), *_rules(made.tensor_rules))
        return dataclasses.replace(made, **whole)
    unknown = [str(field) for field in fields if field not in _FIELD_NAMES]
    if unknown:
        raise _bad("; ".join(map(_unknown_field, unknown)))
    return Track(**fields)


def _unknown_field(field: str) -> str:
    hint = nearest_name(field, _FIELD_NAMES) or f'there are {", ".join(_FIELD_NAMES)}'
    if field in DECAY_NAMES:
        hint += ' A library\'s own arguments need preset: {"preset": "timm", "decay": 0.999}'
    return f'unknown field "{field}"; {hint}'


def _schedule_fields(track: Track) -> dict[str, str]:
    """The track's rule and times as text, from which nothing is lost."""
    fields = {}
    for field in (*_DURATIONS, *_WORDS, *_FLAGS, *_NUMBERS, "interval_phase"):
        value = getattr(track, field)
        if value is not None and not (value is False and field in _FLAGS):
            fields[field] = _text(field, value)
    if "half_life" not in fields and not fields.keys() & _OTHER_RULES:
        fields["half_life"] = _DEFAULT_HALF_LIFE
    return fields


def _text(field: str, value: Any) -> str:
    if field in _FLAGS:
        if value is True:
            return "true"
        raise _bad(f"{field} {value!r}: must be True or False")
    if field not in _NUMBERS and field != "interval_phase":
        return str(value)
    kind, what = (float, "a number") if field in _NUMBERS else (int, "a whole number")
    try:
        if not isinstance(value, (str, bool)) and kind(value) == value:
            return repr(kind(value))
    except (TypeError, ValueError, OverflowError):
        pass
    raise _bad(f"{field} {value!r}: must be {what}, such as {_EXAMPLES[field]}")


_EXAMPLES = {
    "smoothing": "0.999",
    "ramp_ratio": "0.09",
    "inv_gamma": "1.0",
    "power": "0.75",
    "min_decay": "0.0",
    "max_decay": "0.9999",
    "ramp": "10.0",
    "sigma_rel": "0.05",
    "age_offset": "1.0",
    "interval_phase": "1",
}


def only_average(where: str, are_copies: Mapping[str, bool]) -> str:
    """The track that is meant where none is named, of all by name: the only average, else "ema".

    NotFoundError: there is neither; the message begins with `where`.
    """
    averages = [name for name, is_copy in are_copies.items() if not is_copy]
    if len(averages) == 1:
        return averages[0]
    if "ema" in averages:
        return "ema"
    raise NotFoundError(
        f'{where}which track? There are {", ".join(are_copies)}', reason="TRACK_NOT_FOUND"
    )


def ignored_by(name: str, tracks: Mapping[str, Track], specs: list[_ema.Spec]) -> set[str]:
    """The names of those that the track `name` does not have. None of them, if it is not among the
    model's `tracks`: then it is synthesized, or was removed since, and older versions have it."""
    if name not in tracks:
        return set()
    actions = track_of(name, tracks[name]).actions(specs)
    return {spec[0] for spec, (action, _) in zip(specs, actions) if action == "ignore"}
