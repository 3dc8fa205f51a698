# SPDX-License-Identifier: Apache-2.0
"""Tracks in the form that users write, and in the form that the extension module takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Union

from ema_client import _ema
from ema_client._errors import InvalidArgumentError, NotFoundError
from ema_client._argument_checks import DECAY_NAMES, check_by_name, name_of_dtype, nearest_name
from ema_client._tracks import presets
from ema_client._tracks.typed_arguments import PresetArguments

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: A tensor rule: "average", "copy", "ignore", or a schedule: a half-life such as "200ba", a
#: schedule's text ("smoothing=0.9"), or a Track's fields as a dict.
RuleLike = Union[str, Mapping[str, Any]]
TensorRules = Union[Mapping[str, RuleLike], Sequence[tuple[str, RuleLike]]]


class _Default(str):
    """The default of a field, which is equal to the same value given by a user, but distinguishable."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Track:
    """How one track averages. A field that is None has its default. The default rule is half_life
    "1000ba".

    One of these fields chooses the rule, which gives each update a decay `d`: the share of the old
    average that is kept. `elapsed` is the training time since the track's last update, and `age`
    the time since its start:

    - half_life, ramp_ratio, or both: `d = 2^(-elapsed / h)`, where `h` is the smaller of half_life
      and ramp_ratio * age.
    - smoothing, or by its other name decay: `d = smoothing` at every update.
    - inv_gamma: `d = 1 - (1 + n / inv_gamma)^-power`, where `n` is the time since the start, in the
      unit of the interval, minus one, plus count_offset.
    - ramp: `d = (1 + n) / (ramp + n)`.
    - exp_ramp: `d = max_decay * (1 - exp(-n / exp_ramp))`.
    - decays: `d` at points of the training time, and between them.
    - sigma_rel: `d = (1 - elapsed / age)^(gamma + 1)`, the power-function profile of that width.
    - uniform: the mean of all updates since the start.
    - mean_of_last: the mean of this number of last updates, of all while there are fewer (LAWA).
    - copy: the latest weights as they are.

    Attributes:
        half_life: training time until a contribution halves, such as "200ba" or "2ep".
        ramp_ratio: keeps the half-life short while training is young, such as 0.09 (EDM2).
        debias: with half_life: the average begins with zeros, and their share is removed.
        smoothing: share of the old average kept in each update, in [0, 1); never rescaled. The
            argument `decay` sets it, too.
        zero_init: with smoothing: the average begins with zeros: "plain", or "debias" (their share
            is removed).
        inv_gamma, power: of the warm-up by inv_gamma; power's default is 2/3.
        ramp: of the warm-up `(1 + n) / (ramp + n)`, such as 10.
        exp_ramp: of the warm-up with exp, such as 2000.
        min_decay, max_decay: limits of a warm-up's decay; the defaults are 0 and 0.9999.
        count_offset: added to `n` of a warm-up: 1 for libraries whose first update, of the weights
            from before training, has `n` = 1; default 0.
        decays: decays by training time, such as {"0ba": 0.9, "1000ba": 0.999} or
            "0dur:0.996 1dur:1"; constant before the first and after the last.
        decays_shape: between them: "linear" (the default) or "cosine" (BYOL, DINO).
        sigma_rel: relative width of the profile, above 0 and at most 1/sqrt(12).
        age_offset: added to the time since the start, in the interval's unit; default 0.
        uniform, copy: True selects this rule.
        mean_of_last: 2 to 16, such as 5. The server keeps that many copies of the weights in each
            version. Tensor rules cannot have schedules then.
        update_interval: such as "5ba". None: one unit of the half-life, else "1ba".
        interval_phase: updates are due at interval_phase + k * update_interval.
        ema_start: when averaging starts, such as "0.1dur". None: at once.
        before_start: the track's values until then: "reinit" (its first value, replaced at the
            start; the default), "copy" (the latest weights) or "hold" (its first value, kept).
        ema_end: after this time the track does not change any more.
        tensor_rules: what to do with tensors by name or glob: {"head.*": "ignore", "bn.*": "copy"},
            or a schedule that replaces the track's: {"stem.*": "50ba"} or {"neck.*": {"smoothing":
            0.9}}. A schedule without an update_interval has the track's. The first rule that
            matches applies.
        buffers: what to do with floating-point buffers that no rule matches: "average" or "copy".
            If it is not given, `attach` and `LocalEMA` copy those that PyTorch derives from the
            weights (spectral norm, pruning, parametrizations, quantization), by rules that they add
            to the track, and average the others.
        dtype: in which the averages are kept: "float32" (the default) or "float64", which takes
            twice the memory and does not round small updates away. Use it for long half-lives with an
            update at every step, and for float64 models. A dtype of PyTorch, NumPy or JAX is accepted.
        paused: pushes do not change the track.
        snapshot_interval: with sigma_rel: the server keeps a version on its disk for each interval
            of this length, such as "1000ba". `Client.synthesize` builds averages of other lengths
            from them. A LocalEMA keeps none.
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
    exp_ramp: float | None = None
    count_offset: float | None = None
    decays: Mapping[str, float] | str | None = None
    decays_shape: str | None = None
    sigma_rel: float | None = None
    age_offset: float | None = None
    uniform: bool | None = None
    mean_of_last: int | None = None
    copy: bool | None = None
    tensor_rules: TensorRules = ()
    buffers: str = _Default("average")
    dtype: Any = "float32"
    paused: bool = False
    snapshot_interval: str | None = None
    decay: dataclasses.InitVar[float | None] = None

    def __post_init__(self, decay: float | None) -> None:
        if decay is not None:
            if self.smoothing is not None:
                raise _bad(
                    f"smoothing {self.smoothing!r} and decay {decay!r} are both given, and are two names "
                    f"of one field: give one, such as decay={decay!r}"
                )
            object.__setattr__(self, "smoothing", decay)
        # One form of the decays and the rules: equal tracks compare equal, and have a hash.
        if isinstance(self.decays, Mapping):
            points = (f"{time}:{value}" for time, value in self.decays.items())
            object.__setattr__(self, "decays", " ".join(points))
        object.__setattr__(self, "tensor_rules", _rules(self.tensor_rules))
        dtype = "float32" if self.dtype is None else name_of_dtype(self.dtype)
        if dtype not in ("float32", "float64"):
            raise _bad(f'dtype {self.dtype!r}: must be "float32" or "float64"')
        object.__setattr__(self, "dtype", dtype)

    @property
    def is_copy(self) -> bool:
        return bool(self.copy)

    @classmethod
    def preset(cls, name: str, /, **arguments: Unpack[PresetArguments]) -> Track:
        """The track that averages as a library does, from that library's own arguments.

        With pushes at batch 1, 2, 3, ... the decays are those of the library's first, second, third
        call. Differences from every library: integer and bool tensors are copied, tied ones are
        averaged once, and the average begins with the weights of the first push. timm's ModelEmaV2,
        optax.incremental_update, EDM2's TraditionalEMA, ultralytics, tensorflow and byol begin with
        the weights from before training: for the same average, push these at batch 0. Further
        differences:

        - composer: the first update averages two equal values, so the average does not change (in
          Composer, rounding may change it). An ema_start in another unit than update_interval counts
          from the push that reaches it (in Composer from the end of the next epoch).
        - ema_pytorch: the decay is computed in float64 (in the library in float32). Ignored tensors
          are not in the track (in the library they keep the weights of the last copy).
        - karras (ema_pytorch.KarrasEMA): with update_every above 1 the profile is exact (in the
          library the decay is that of an update at every step).
        - diffusers: buffers, which the library does not keep, are copied. While the decay is 0,
          weights are copied bit for bit.
        - timm: the decays of ModelEmaV3's `update(model, step=n)`, n = 1, 2, ..., as its trainer calls it;
          with step=False those of `update(model)`: constant from the start, whatever the warm-up. No
          stochastic rounding; without `dtype` the averages are float32.
        - torch: the decays of get_ema_multi_avg_fn(decay); with kind="swa" the mean of all updates.
        - optax: for ema(debias), the share of the zeros is computed in float64 (in float32, at
          decay 0.9999, its fourth digit is wrong). periodic_update also takes the first push.
        - edm2: the library counts trained images; `time` must count them as "sp". Buffers are copied.
        - ultralytics: ModelEMA. tensorflow: the decay of tf.train.ExponentialMovingAverage with
          num_updates, of torch_ema and of LitEma, whose `num_updates` is 1 at batch 1.
        - mmengine: MMDetection's ExpMomentumEMA, a subclass of MMEngine's; with kind="constant"
          MMEngine's ExponentialMovingAverage.
        - byol: the cosine of BYOL and DINO from base_decay to final_decay. `time` must count "dur",
          the share of the whole training.

        Args:
            name: "composer", "ema_pytorch", "diffusers", "timm", "torch", "optax", "edm2", "karras",
                "ultralytics", "tensorflow", "mmengine" or "byol".
            arguments: under the names and with the defaults of the library's class or function. If
                a library has several, `version="v2"` selects timm's ModelEmaV2 (else ModelEmaV3),
                `kind="swa"` torch's mean of all updates (else get_ema_multi_avg_fn's),
                `kind="traditional"` EDM2's TraditionalEMA (else PowerFunctionEMA); `decay`,
                `step_size` or `update_period` selects one of optax' three.

        Raises:
            InvalidArgumentError: no such preset or argument, or a value that is not supported here.

        Example:
            >>> Track.preset("ema_pytorch", beta=0.999, update_every=1)
        """
        # Buffers, too, as the library does.
        return Track(**{"buffers": "average", **presets.track_arguments(name, arguments)})


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
        _ema.Schedule.from_fields(fields)  # Raises if a field is wrong.
        return ", ".join(f"{name}={value}" for name, value in fields.items())
    return rule


def _rule_from(action: str, schedule: _ema.Schedule | None) -> str:
    if schedule is None:
        return action
    # Even the default: without an update_interval, the rule would get the track's.
    interval = {"update_interval": schedule.update_interval} if schedule.update_interval else {}
    fields = {**schedule.to_fields(), **interval}
    return ", ".join(f"{name}={value}" for name, value in fields.items())


def _rule_tuple(pattern: str, rule: str) -> _ema.RuleTuple:
    """The rule in the form that the extension module takes, which itself rejects a wrong action."""
    if not any(sign.isdigit() or sign == "=" for sign in rule):
        return pattern, rule, None
    try:
        return pattern, "average", _ema.Schedule.parse(rule)
    except InvalidArgumentError as error:
        raise _bad(f"tensor_rules: {pattern}: {error.args[0]}") from None


#: "copy", a half-life such as "200ba", a Track, its fields as a dict, or a library's arguments as
#: {"preset": "ema_pytorch", "beta": 0.999}, to which the fields of WHOLE_TRACK may be added.
TrackLike = Union[str, Track, Mapping[str, Any]]


# The fields of a schedule, by the way in which a value becomes text.
_DURATIONS = ("half_life", "update_interval", "ema_start", "ema_end")
_WORDS = ("before_start", "zero_init", "decays", "decays_shape")
_FLAGS = ("debias", "uniform", "copy")
# Numbers, each with an example for errors.
_WHOLE_NUMBERS = {"interval_phase": "1", "mean_of_last": "5"}
_NUMBERS = {
    "smoothing": "0.999",
    "ramp_ratio": "0.09",
    "inv_gamma": "1.0",
    "power": "0.75",
    "min_decay": "0.0",
    "max_decay": "0.9999",
    "ramp": "10.0",
    "exp_ramp": "2000.0",
    "count_offset": "1.0",
    "sigma_rel": "0.05",
    "age_offset": "1.0",
}
#: Fields of a Track that are not part of its schedule; tracks of any rule or preset have them.
WHOLE_TRACK = ("tensor_rules", "buffers", "dtype", "paused", "snapshot_interval")
_DEFAULT_HALF_LIFE = "1000ba"
# Fields of rules other than half_life, including those that do not choose the rule.
_OTHER_RULES = frozenset(_NUMBERS) | {
    "zero_init",
    "decays",
    "decays_shape",
    "uniform",
    "mean_of_last",
    "copy",
}
_FIELD_NAMES = (*(field.name for field in dataclasses.fields(Track)), "decay")
#: The arguments of a Track that are part of its schedule.
SCHEDULE_NAMES = tuple(name for name in _FIELD_NAMES if name not in WHOLE_TRACK)
_DEFAULT_TRACK = Track()


def track_from(track: _ema.Track) -> Track:
    values: dict[str, Any] = {}
    for name, text in track.schedule.to_fields().items():
        if name in _NUMBERS:
            values[name] = float(text)
        elif name in _FLAGS:
            values[name] = text == "true"
        elif name in _WHOLE_NUMBERS:
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
        dtype=track.dtype,
        paused=track.paused,
        snapshot_interval=track.snapshot_interval,
    )


def track_of(name: str, track: TrackLike, *, update_interval: str | None = None) -> _ema.Track:
    """The track `name` in the form that the extension module takes.

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
        if not isinstance(full.paused, bool):
            raise _bad(f"paused {full.paused!r}: must be True or False")
        if not isinstance(full.buffers, str):
            raise _bad(f'buffers {full.buffers!r}: must be "average" or "copy"')
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f'track "{name}": {error.args[0]}', reason=error.reason
        ) from None
    # This constructor's errors name the track already.
    return _ema.Track(
        name,
        schedule,
        rules,
        full.buffers,
        full.dtype,
        full.paused,
        (None if full.snapshot_interval is None else str(full.snapshot_interval)),
    )


def decides_buffers(track: TrackLike) -> bool:
    """Whether the track says what to do with buffers. REQUIRES: `track_of` accepts it."""
    return not isinstance(_full_track(track).buffers, _Default)


def tracks_by_name(tracks: Mapping[str, TrackLike]) -> list[_ema.Track]:
    """Calls `track_of` for each of the tracks."""
    check_by_name("tracks", tracks)
    return [track_of(name, track) for name, track in tracks.items()]


def _bad(message: str) -> InvalidArgumentError:
    return InvalidArgumentError(message, reason="BAD_SCHEDULE")


def _full_track(track: TrackLike) -> Track:
    if isinstance(track, Track):
        return track
    if not isinstance(track, Mapping):
        # A number without a unit goes to the parser, too: its error is the clearest.
        return Track(copy=True) if track == "copy" else Track(half_life=str(track))
    fields = dict(track)
    if "preset" in fields:
        whole = {name: fields.pop(name) for name in WHOLE_TRACK if name in fields}
        made = Track.preset(str(fields.pop("preset")), **fields)
        if "tensor_rules" in whole:
            # The preset's own rules (ema_pytorch's ignore_names) apply where none of these matches.
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
    """The track's rule and times as text, without loss of precision."""
    fields = {}
    for field in (*_DURATIONS, *_WORDS, *_FLAGS, *_NUMBERS, *_WHOLE_NUMBERS):
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
    if field not in _NUMBERS and field not in _WHOLE_NUMBERS:
        return str(value)
    kind, what = (float, "a number") if field in _NUMBERS else (int, "a whole number")
    try:
        if not isinstance(value, (str, bool)) and kind(value) == value:
            return repr(kind(value))
    except (TypeError, ValueError, OverflowError):
        pass
    example = (_NUMBERS | _WHOLE_NUMBERS)[field]
    raise _bad(f"{field} {value!r}: must be {what}, such as {example}")


def only_average(where: str, are_copies: Mapping[str, bool]) -> str:
    """The default track: the only one that is not a copy, else "ema". `are_copies`: all tracks, by
    name.

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
    """The names of the specs that the track `name` ignores. Empty if the model's `tracks` do not
    have it: then it is synthesized, or was removed, and older versions have it."""
    if name not in tracks:
        return set()
    actions = track_of(name, tracks[name]).actions(specs)
    return {spec[0] for spec, (action, _) in zip(specs, actions) if action == "ignore"}
