# SPDX-License-Identifier: Apache-2.0
"""The names and types of keyword arguments that functions pass on, for type checkers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypedDict


class _OfPresets(TypedDict, total=False):
    # The arguments of presets that are parameters of no function that passes presets on.
    accumulator_dtype: Any
    allow_different_devices: bool
    avg_fn: Any
    base_decay: float
    beta: float
    coerce_dtype: bool
    debias: bool
    ema_model: Any
    exclude_buffers: bool
    final_decay: float
    foreach: bool
    forward_method_names: Iterable[str]
    frozen: bool
    gamma: float | None
    halflife_Mimg: float
    ignore_names: Iterable[str]
    ignore_startswith_names: Iterable[str]
    include_online_model: bool
    interval: int
    inv_gamma: float
    kind: str
    lazy_init_ema: bool
    max_value: float | None
    min_decay: float
    min_value: float | None
    model_cls: Any
    model_config: Any
    momentum: float
    move_ema_to_online_device: bool
    multi_avg_fn: Any
    param_or_buffer_names_no_ema: Iterable[str]
    power: float
    rampup_ratio: float | None
    sigma_rel: float | None
    std: float | None
    stds: Iterable[float] | None
    step: bool
    step_size: float | None
    stochastic_rounding: bool
    stochastic_rounding_seed: int
    tau: float
    update_after_step: int
    update_buffers: bool
    update_every: int
    update_model_with_ema_beta: float
    update_model_with_ema_every: int | None
    update_period: int | None
    updates: int
    use_ema_warmup: bool
    use_foreach: bool
    use_num_updates: bool
    use_warmup: bool
    version: str
    warmup_gamma: float
    warmup_power: float


class _OfTracks(_OfPresets, total=False):
    # Fields of a Track that no function with a schedule has as parameters of its own.
    age_offset: float | None
    before_start: str | None
    copy: bool | None
    count_offset: float | None
    decays: Mapping[str, float] | str | None
    decays_shape: str | None
    exp_ramp: float | None
    ema_end: str | None
    interval_phase: int | None
    max_decay: float | None
    mean_of_last: int | None
    ramp: float | None
    ramp_ratio: float | None
    uniform: bool | None
    zero_init: str | None


class PresetArguments(_OfPresets, total=False):
    """The arguments of `Track.preset`."""

    decay: float | None
    device: Any
    dtype: Any
    ema_start: str
    half_life: str | None
    smoothing: float | None
    update_interval: str | None
    use_buffers: bool


class TrackArguments(_OfTracks, total=False):
    """What `attach` and `LocalEMA` take beside the parameters of their own: fields of a `Track`, or
    the arguments of a preset."""

    decay: float | None
    device: Any
    use_buffers: bool


class CallbackTrackArguments(_OfTracks, total=False):
    """What a callback with `decay`, `device` and `use_buffers` of its own takes for the schedule."""

    ema_start: str | None
    half_life: str | None
    preset: Any
    smoothing: float | None
    update_interval: str | None
