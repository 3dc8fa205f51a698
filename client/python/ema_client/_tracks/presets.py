# SPDX-License-Identifier: Apache-2.0
"""Presets: make the track that averages as a library does, from the library's own arguments.

A preset is a function with the arguments of the library's class or function, under its names and
with its defaults. Arguments that have nothing to do with the numbers (devices, fused kernels) are
accepted at their default only. `Track.preset` documents the differences from the libraries.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ema_client._errors import InvalidArgumentError
from ema_client._argument_checks import nearest_name
from ema_client._tracks.rule_checks import (
    check_above_zero,
    check_count,
    check_default,
    check_flag,
    check_no_functions,
    check_number,
    refuse,
)

# Returns the arguments of the Track.
_Preset = Callable[..., dict[str, Any]]
# The default of arguments for which None is a value.
UNSET: Any = object()
_COMPOSER_LENGTH = re.compile(r"\s*([0-9.]+(?:e\+?[0-9]+)?)(iter|ep|ba|sp|tok|dur|sec)\s*", re.I)


def _composer(
    *,
    half_life: str | None = UNSET,
    smoothing: float | None = None,
    ema_start: str = "0.0dur",
    update_interval: str | None = None,
) -> dict[str, Any]:
    """composer.algorithms.EMA: one decay, `2^-(update_interval / half_life)`, that is never rescaled.

    The average starts again, from the weights, at the first update event at or after `ema_start`,
    but not before the end of batch 1 (of epoch 1, if update_interval is in epochs). `smoothing`
    alone does not need half_life=None.
    """
    if half_life is UNSET:
        half_life = "1000ba" if smoothing is None else None
    if half_life is not None and smoothing is not None:
        refuse(
            f"half_life {half_life!r} and smoothing {smoothing!r} are both given: give one, such as "
            'half_life="1000ba"'
        )
    if half_life is not None:
        length, unit = _composer_length("half_life", half_life)
        interval, interval_unit = _composer_length(
            "update_interval", f"1{unit}" if update_interval is None else update_interval
        )
        if unit != interval_unit:
            refuse(
                f"half_life {half_life!r} and update_interval {update_interval!r} have different "
                f'units, which Composer refuses: give both in one, such as update_interval="1{unit}"; '
                "a plain half_life, without the preset, may have another unit than its interval"
            )
        smoothing = 2 ** -(interval / length)
    elif smoothing is not None:
        interval, interval_unit = _composer_length(
            "update_interval", "1ba" if update_interval is None else update_interval
        )
        smoothing = check_number("smoothing", smoothing, "0.99", below=1)
    else:
        refuse('half_life or smoothing is needed, such as half_life="1000ba"')
    start = _COMPOSER_LENGTH.fullmatch(str(ema_start))
    if start is not None and _float(start[1]) == 0:
        ema_start = f"1{interval_unit}"
    return dict(
        smoothing=smoothing, update_interval=f"{interval}{interval_unit}", ema_start=ema_start
    )


def _composer_length(name: str, text: object) -> tuple[int, str]:
    match = _COMPOSER_LENGTH.fullmatch(text) if isinstance(text, str) else None
    value = math.nan if match is None else _float(match[1])
    unit = "" if match is None else match[2].lower()
    if unit not in ("ba", "ep") or not value >= 1 or value != math.floor(value):
        refuse(
            f"{name} {text!r}: must be a whole number, 1 or more, of ba or ep, such as "
            f'"{"1000ba" if name == "half_life" else "1ba"}"'
        )
    return int(value), unit


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def ema_pytorch(
    *,
    beta: float = 0.9999,
    update_after_step: int = 100,
    update_every: int = 10,
    inv_gamma: float = 1.0,
    power: float = 2 / 3,
    min_value: float = 0.0,
    param_or_buffer_names_no_ema: Iterable[str] = (),
    ignore_names: Iterable[str] = (),
    ignore_startswith_names: Iterable[str] = (),
    ema_model: Any = None,
    include_online_model: bool = True,
    allow_different_devices: bool = False,
    use_foreach: bool = False,
    update_model_with_ema_every: int | None = None,
    update_model_with_ema_beta: float = 0.0,
    forward_method_names: Iterable[str] = (),
    move_ema_to_online_device: bool = False,
    coerce_dtype: bool = False,
    lazy_init_ema: bool = False,
) -> dict[str, Any]:
    """ema_pytorch.EMA: copies up to update_after_step, then a warm-up by inv_gamma and power.

    `attach` handles the arguments that are not about the average; here they must have their
    defaults.
    """
    check_default(
        ema_model=(ema_model, None),
        include_online_model=(include_online_model, True),
        allow_different_devices=(allow_different_devices, False),
        use_foreach=(use_foreach, False),
        update_model_with_ema_every=(update_model_with_ema_every, None),
        update_model_with_ema_beta=(update_model_with_ema_beta, 0.0),
        forward_method_names=(tuple(forward_method_names), ()),
        move_ema_to_online_device=(move_ema_to_online_device, False),
        coerce_dtype=(coerce_dtype, False),
        lazy_init_ema=(lazy_init_ema, False),
    )
    after = check_count("update_after_step", update_after_step, "100", least=0)
    interval = f"{check_count('update_every', update_every, '10')}ba"
    beta = check_number("beta", beta, "0.9999")
    rules = _name_rules(param_or_buffer_names_no_ema, ignore_names, ignore_startswith_names)
    if beta == 1:
        # Frozen: after the copies up to update_after_step, the average does not change.
        return dict(
            smoothing=0.0,
            update_interval=interval,
            interval_phase=1,
            ema_end=f"{after + 1}ba",
            tensor_rules=rules,
        )
    return dict(
        inv_gamma=check_above_zero("inv_gamma", inv_gamma, "1.0"),
        power=check_above_zero("power", power, "0.75"),
        # As torch.clamp: if the limits cross, the upper one is used.
        min_decay=min(check_number("min_value", min_value, "0.0"), beta),
        max_decay=beta,
        update_interval=interval,
        interval_phase=1,
        ema_start=f"{after}ba" if after else None,
        before_start="copy" if after else None,
        tensor_rules=rules,
    )


def _name_rules(
    copied: Iterable[str], ignored: Iterable[str], ignored_prefixes: Iterable[str]
) -> tuple[tuple[str, str], ...]:
    rules = []
    # Sorted below, because sets have no order, and equal rules must make equal tracks.
    for name, values, suffix, action in (
        ("ignore_names", ignored, "", "ignore"),
        ("ignore_startswith_names", ignored_prefixes, "*", "ignore"),
        ("param_or_buffer_names_no_ema", copied, "", "copy"),
    ):
        names = [] if isinstance(values, str) else list(values)
        if isinstance(values, str) or not all(isinstance(value, str) for value in names):
            refuse(f'{name} {values!r}: must be a set of names, such as {{"head.weight"}}')
        for value in sorted(names):
            rules.append((re.sub(r"([*?\[\\])", r"\\\1", value) + suffix, action))
    return tuple(rules)


def _karras(
    *,
    sigma_rel: float | None = None,
    gamma: float | None = None,
    ema_model: Any = None,
    update_every: int = 100,
    frozen: bool = False,
    param_or_buffer_names_no_ema: Iterable[str] = (),
    ignore_names: Iterable[str] = (),
    ignore_startswith_names: Iterable[str] = (),
    allow_different_devices: bool = False,
    move_ema_to_online_device: bool = False,
) -> dict[str, Any]:
    """ema_pytorch.KarrasEMA: the power-function profile of width sigma_rel (or exponent gamma).

    As in ema_pytorch, the decay at call n is the profile's at step n + 1, with e as the time since
    the previous update: (1 - e / (batch + 1))^(gamma + 1).
    """
    check_default(
        ema_model=(ema_model, None),
        frozen=(frozen, False),
        allow_different_devices=(allow_different_devices, False),
        move_ema_to_online_device=(move_ema_to_online_device, False),
    )
    if (sigma_rel is None) == (gamma is None):
        refuse("either sigma_rel or gamma is needed, such as sigma_rel=0.05")
    if gamma is not None:
        exponent = check_number("gamma", gamma, "6.94", most=math.inf)
        sigma_rel = math.sqrt((exponent + 1) / ((exponent + 2) ** 2 * (exponent + 3)))
    return dict(
        sigma_rel=check_above_zero("sigma_rel", sigma_rel, "0.05"),
        age_offset=1,
        update_interval=f"{check_count('update_every', update_every, '100')}ba",
        interval_phase=1,
        tensor_rules=_name_rules(
            param_or_buffer_names_no_ema, ignore_names, ignore_startswith_names
        ),
    )


def _diffusers(
    *,
    decay: float = 0.9999,
    min_decay: float = 0.0,
    update_after_step: int = 0,
    use_ema_warmup: bool = False,
    inv_gamma: float = 1.0,
    power: float = 2 / 3,
    foreach: bool = False,
    model_cls: Any = None,
    model_config: Any = None,
    max_value: float | None = None,
    min_value: float | None = None,
    device: Any = None,
) -> dict[str, Any]:
    """diffusers.training_utils.EMAModel: decay (1 + s) / (10 + s), or the warm-up by inv_gamma and power."""
    check_default(
        foreach=(foreach, False),
        model_cls=(model_cls, None),
        model_config=(model_config, None),
        device=(device, None),
    )
    # max_value and min_value are their older names.
    decay = check_number("decay", decay if max_value is None else max_value, "0.9999")
    min_decay = check_number("min_decay", min_decay if min_value is None else min_value, "0.0")
    after = check_count("update_after_step", update_after_step, "0", least=0)
    warm_up: dict[str, float] = {"ramp": 10.0}
    if check_flag("use_ema_warmup", use_ema_warmup):
        warm_up = _inverse_gamma("inv_gamma", inv_gamma, "power", power)
    return _warmed_up(warm_up, decay, min_decay, after, buffers="copy")


def _inverse_gamma(
    gamma_name: str, inv_gamma: float, power_name: str, power: float
) -> dict[str, float]:
    return {
        "inv_gamma": check_above_zero(gamma_name, inv_gamma, "1.0"),
        "power": check_above_zero(power_name, power, "0.75"),
    }


def _warmed_up(
    rule: Mapping[str, Any], decay: float, min_decay: float, after: int, *, buffers: str
) -> dict[str, Any]:
    return dict(
        **rule,
        min_decay=min_decay,
        # As max(min(d, decay), min_decay): if the limits cross, the lower one is used.
        max_decay=max(decay, min_decay),
        update_interval="1ba",
        ema_start=f"{after}ba" if after else None,
        before_start="copy" if after else None,
        buffers=buffers,
    )


def _timm_v2(*, decay: float = 0.9999, device: Any = None) -> dict[str, Any]:
    """timm.utils.ModelEmaV2: a constant decay."""
    check_default(device=(device, None))
    return dict(smoothing=check_number("decay", decay, "0.9999", below=1), update_interval="1ba")


def _timm_v3(
    *,
    decay: float = 0.9999,
    min_decay: float = 0.0,
    update_after_step: int = 0,
    use_warmup: bool = False,
    warmup_gamma: float = 1.0,
    warmup_power: float = 2 / 3,
    device: Any = None,
    dtype: Any = None,
    stochastic_rounding: bool = True,
    stochastic_rounding_seed: int = 0,
    foreach: bool = True,
    exclude_buffers: bool = False,
    step: bool = True,
) -> dict[str, Any]:
    """timm.utils.ModelEmaV3, updated as `update(model, step=n)`, n = 1, 2, ..., as timm's trainer does.

    With step=False it is updated as `update(model)`: a constant decay from the start, whatever the
    warm-up.
    """
    check_default(
        device=(device, None),
        stochastic_rounding=(stochastic_rounding, True),
        stochastic_rounding_seed=(stochastic_rounding_seed, 0),
        foreach=(foreach, True),
    )
    buffers = "copy" if check_flag("exclude_buffers", exclude_buffers) else "average"
    after = check_count("update_after_step", update_after_step, "0", least=0)
    if check_flag("use_warmup", use_warmup) and check_flag("step", step):
        fields = _warmed_up(
            _inverse_gamma("warmup_gamma", warmup_gamma, "warmup_power", warmup_power),
            check_number("decay", decay, "0.9999"),
            check_number("min_decay", min_decay, "0.0"),
            after,
            buffers=buffers,
        )
    else:
        fields = dict(
            smoothing=check_number("decay", decay, "0.9999", below=1),
            update_interval="1ba",
            # The call at s = 0 is the last copy.
            ema_start=f"{after + 1}ba" if step else None,
            before_start="copy" if step else None,
            buffers=buffers,
        )
    return {**fields, "dtype": dtype}


def _torch_ema(
    *,
    decay: float = 0.999,
    use_buffers: bool = False,
    device: Any = None,
    avg_fn: Any = None,
    multi_avg_fn: Any = None,
) -> dict[str, Any]:
    """torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay)."""
    check_default(device=(device, None))
    check_no_functions(avg_fn=avg_fn, multi_avg_fn=multi_avg_fn)
    return dict(
        smoothing=check_number("decay", decay, "0.999", below=1),
        update_interval="1ba",
        buffers="average" if check_flag("use_buffers", use_buffers) else "copy",
    )


def _torch_swa(
    *,
    use_buffers: bool = False,
    device: Any = None,
    avg_fn: Any = None,
    multi_avg_fn: Any = None,
) -> dict[str, Any]:
    """torch.optim.swa_utils.AveragedModel as it is: the mean of all updates."""
    check_default(device=(device, None))
    check_no_functions(avg_fn=avg_fn, multi_avg_fn=multi_avg_fn)
    return dict(
        uniform=True,
        update_interval="1ba",
        buffers="average" if check_flag("use_buffers", use_buffers) else "copy",
    )


def _optax(
    *,
    decay: float | None = None,
    debias: bool = True,
    accumulator_dtype: Any = None,
    step_size: float | None = None,
    update_period: int | None = None,
) -> dict[str, Any]:
    """optax.ema(decay, debias), or incremental_update(step_size), or periodic_update(update_period)."""
    given = {"decay": decay, "step_size": step_size, "update_period": update_period}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        refuse(
            f"{' and '.join(names) or 'no argument'} given: give one of decay (ema), step_size "
            "(incremental_update) and update_period (periodic_update), such as decay=0.999"
        )
    check_default(accumulator_dtype=(accumulator_dtype, None))
    if decay is None and debias is not True:
        refuse(f"debias {debias!r}: belongs to decay, such as decay=0.999, debias=False")
    if decay is not None:
        return dict(
            smoothing=check_number("decay", decay, "0.999", below=1),
            zero_init="debias" if check_flag("debias", debias) else "plain",
            update_interval="1ba",
        )
    if step_size is not None:
        size = check_number("step_size", step_size, "0.001")
        return dict(
            smoothing=1 - check_above_zero("step_size", size, "0.001"), update_interval="1ba"
        )
    return dict(
        copy=True, update_interval=f"{check_count('update_period', update_period, '100')}ba"
    )


def _edm2_power(*, std: float | None = None, stds: Iterable[float] | None = None) -> dict[str, Any]:
    """EDM2's PowerFunctionEMA, one track for each std; trained images are the samples (sp)."""
    if std is not None and stds is not None:
        refuse("std and stds are both given: give one, such as std=0.05")
    values = list(stds) if stds is not None else [] if std is None else [std]
    if len(values) != 1:
        refuse(
            f"stds: {len(values)} given; a track has one, such as std=0.05: make a track for each"
        )
    return dict(
        sigma_rel=check_above_zero("std", values[0], "0.05"), update_interval="1sp", buffers="copy"
    )


def _edm2_traditional(
    *, halflife_Mimg: float = math.inf, rampup_ratio: float | None = 0.09
) -> dict[str, Any]:
    """EDM2's TraditionalEMA: a half-life in millions of images (the samples, sp), ramped up."""
    half_life = None
    if halflife_Mimg != math.inf:
        images = check_above_zero("halflife_Mimg", halflife_Mimg, "0.5") * 1e6
        if abs(images - round(images)) > 1e-9 * images:
            refuse(f"halflife_Mimg {halflife_Mimg!r}: must be whole images, such as 0.5")
        half_life = f"{round(images)}sp"
    elif rampup_ratio is None:
        refuse("halflife_Mimg inf without a rampup_ratio averages nothing: give one, such as 0.5")
    return dict(
        half_life=half_life,
        ramp_ratio=(
            None if rampup_ratio is None else check_above_zero("rampup_ratio", rampup_ratio, "0.09")
        ),
        update_interval="1sp",
        buffers="copy",
    )


def _ultralytics(*, decay: float = 0.9999, tau: float = 2000, updates: int = 0) -> dict[str, Any]:
    """ultralytics.utils.torch_utils.ModelEMA: decay * (1 - exp(-n / tau))."""
    return dict(
        exp_ramp=check_above_zero("tau", tau, "2000"),
        max_decay=check_number("decay", decay, "0.9999"),
        count_offset=1 + check_count("updates", updates, "0", least=0),
        update_interval="1ba",
    )


def _tensorflow(*, decay: float = 0.9999, use_num_updates: bool = True) -> dict[str, Any]:
    """min(decay, (1 + n) / (10 + n)), n = 1, 2, ...; the arguments are torch_ema's."""
    decay = check_number("decay", decay, "0.9999", below=1)
    if not check_flag("use_num_updates", use_num_updates):
        return dict(smoothing=decay, update_interval="1ba", buffers="copy")
    return dict(ramp=10.0, max_decay=decay, count_offset=1, update_interval="1ba", buffers="copy")


def _mmengine(
    *,
    momentum: float = 0.0002,
    gamma: float = 2000,
    interval: int = 1,
    device: Any = None,
    update_buffers: bool = False,
) -> dict[str, Any]:
    """MMDetection's ExpMomentumEMA: 1 - momentum at the end, by (1 - exp(-n / gamma))."""
    return dict(
        exp_ramp=check_above_zero("gamma", gamma, "2000"),
        max_decay=1 - check_number("momentum", momentum, "0.0002"),
        count_offset=1,
        **_mmengine_updates(interval, device, update_buffers),
    )


def _mmengine_constant(
    *,
    momentum: float = 0.0002,
    interval: int = 1,
    device: Any = None,
    update_buffers: bool = False,
) -> dict[str, Any]:
    """mmengine.model.ExponentialMovingAverage: a constant decay of 1 - momentum."""
    return dict(
        smoothing=1
        - check_above_zero("momentum", check_number("momentum", momentum, "0.0002"), "0.0002"),
        **_mmengine_updates(interval, device, update_buffers),
    )


def _mmengine_updates(interval: int, device: Any, update_buffers: bool) -> dict[str, Any]:
    check_default(device=(device, None))
    return dict(
        update_interval=f"{check_count('interval', interval, '1')}ba",
        interval_phase=1,
        buffers="average" if check_flag("update_buffers", update_buffers) else "copy",
    )


def _byol(*, base_decay: float = 0.996, final_decay: float = 1.0) -> dict[str, Any]:
    """1 - (1 - base_decay) * (cos(pi * k / K) + 1) / 2 at step k of K, as BYOL and DINO."""
    base = check_number("base_decay", base_decay, "0.996")
    final = check_number("final_decay", final_decay, "1.0")
    return dict(
        decays=f"0dur:{base!r} 1dur:{final!r}", decays_shape="cosine", update_interval="1ba"
    )


_PRESETS: dict[str, _Preset] = {
    "byol": _byol,
    "tensorflow": _tensorflow,
    "ultralytics": _ultralytics,
    "composer": _composer,
    "ema_pytorch": ema_pytorch,
    "diffusers": _diffusers,
    "optax": _optax,
    "karras": _karras,
}
# By preset: the argument that selects a variant, its default, and the variants.
_VARIANTS: dict[str, tuple[str, str, dict[str, _Preset]]] = {
    "mmengine": ("kind", "exp", {"exp": _mmengine, "constant": _mmengine_constant}),
    "timm": ("version", "v3", {"v2": _timm_v2, "v3": _timm_v3}),
    "torch": ("kind", "ema", {"ema": _torch_ema, "swa": _torch_swa}),
    "edm2": ("kind", "power", {"power": _edm2_power, "traditional": _edm2_traditional}),
}
_NAMES = sorted([*_PRESETS, *_VARIANTS])


def track_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the Track of preset `name`. InvalidArgumentError: no such preset or
    argument, or a bad value."""
    _check_preset(name)
    rest = dict(arguments)
    try:
        function = _function(name, rest)
        _check_names(function, rest)
        return function(**rest)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f'preset "{name}": {error.args[0]}', reason=error.reason
        ) from None


def argument_names(name: str) -> set[str]:
    """The names of all arguments of preset `name`. InvalidArgumentError: no such preset."""
    _check_preset(name)
    choice, _, functions = _VARIANTS.get(name, ("", "", {}))
    names = {choice} if choice else set()
    for function in functions.values() if choice else (_PRESETS[name],):
        names.update(inspect.signature(function).parameters)
    return names


def _check_preset(name: str) -> None:
    if name not in _NAMES:
        nearest = difflib.get_close_matches(str(name), _NAMES, n=1)
        hint = f'; did you mean "{nearest[0]}"? There' if nearest else "; there"
        refuse(f'there is no preset "{name}"{hint} are {", ".join(_NAMES)}')


def _function(name: str, arguments: dict[str, Any]) -> _Preset:
    """The preset's function. Removes the argument that selects the variant from `arguments`."""
    if name not in _VARIANTS:
        return _PRESETS[name]
    choice, default, functions = _VARIANTS[name]
    if name == "edm2" and {"halflife_Mimg", "rampup_ratio"} & arguments.keys():
        default = "traditional"
    chosen = arguments.pop(choice, default)
    if chosen not in functions:
        refuse(
            f'{choice} {chosen!r}: must be {" or ".join(map(repr, functions))}, such as {default!r}'
        )
    return functions[chosen]


def _check_names(function: _Preset, arguments: Mapping[str, Any]) -> None:
    names = list(inspect.signature(function).parameters)
    problems = []
    for unknown in sorted(map(str, arguments.keys() - names)):
        hint = nearest_name(unknown, names)
        problems.append(f'unknown argument "{unknown}"' + (f", {hint}" if hint else ""))
    if problems:
        refuse(f"{'; '.join(problems)} There are {', '.join(names)}")
