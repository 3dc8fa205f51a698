# SPDX-License-Identifier: Apache-2.0
"""Presets against traces that the libraries have left (reference/ema-semantics.md, 3.4), without them."""

from __future__ import annotations

import dataclasses
import itertools
import math

import ema_client
import numpy as np
import pytest
import torch
from ema_client import Track

TRACES = {
    # Copy first.
    "torch": (
        {"preset": "torch", "decay": 0.9},
        "1 1.1 1.29 1.561 1.9049 2.31441 2.782969 3.304672",
    ),
    "timm": ({"preset": "timm", "decay": 0.9}, "1 1.1 1.29 1.561 1.9049 2.31441 2.782969 3.304672"),
    "ema_pytorch": (
        {"preset": "ema_pytorch", "update_every": 1, "update_after_step": 0},
        "1 1.629961 2.288607 2.967774 3.662785 4.370619 5.089165 5.816874",
    ),
    "ema_pytorch-after": (
        {"preset": "ema_pytorch", "update_every": 1, "update_after_step": 3},
        "1 2 3 4 4.629961 5.288607 5.967774 6.662785",
    ),
    "ema_pytorch-every": (
        {"preset": "ema_pytorch", "update_every": 2, "update_after_step": 3},
        "1 1 3 3 4.259921 4.259921 5.347322 5.347322",
    ),
    # The call at t = 4 averages, though no call has copied since t = 0: 1 + 2^(-2/3) * 4.
    "ema_pytorch-skips-the-last-copy": (
        {"preset": "ema_pytorch", "update_every": 4, "update_after_step": 3},
        "1 1 1 1 3.519842 3.519842 3.519842 3.519842",
    ),
    "ema_pytorch-frozen": (
        {"preset": "ema_pytorch", "update_every": 2, "update_after_step": 3, "beta": 1},
        "1 1 3 3 3 3 3 3",
    ),
    "diffusers-warmup": (
        {"preset": "diffusers", "use_ema_warmup": True},
        "1 1.629961 2.288607 2.967774 3.662785 4.370619 5.089165 5.816874",
    ),
    "timm-warmup": (
        {"preset": "timm", "use_warmup": True},
        "1 1.629961 2.288607 2.967774 3.662785 4.370619 5.089165 5.816874",
    ),
    "diffusers": (
        {"preset": "diffusers"},
        "1 1.818182 2.704545 3.601399 4.5005 5.4002 6.300087 7.200041",
    ),
    "diffusers-after": (
        {"preset": "diffusers", "update_after_step": 3},
        "1 2 3 4 4.818182 5.704545 6.601399 7.5005",
    ),
    "composer": (
        {"preset": "composer", "half_life": "10ba", "update_interval": "1ba"},
        "1 1.066967 1.196416 1.384164 1.626306 1.919199 2.259445 2.643873",
    ),
    "composer-interval": (
        {"preset": "composer", "half_life": "10ba", "update_interval": "3ba"},
        "1 1 1.375495 1.375495 1.375495 2.243735 2.243735 2.243735",
    ),
    "edm2": (
        {"preset": "edm2", "std": 0.1},
        "1 1.99592 2.959812 3.893965 4.81182 5.720485 6.623578 7.523067",
    ),
    "swa": ({"preset": "torch", "kind": "swa"}, "1 1.5 2 2.5 3 3.5 4 4.5"),
    "optax": (
        {"preset": "optax", "decay": 0.9},
        "1 1.526316 2.070111 2.631288 3.209714 3.805218 4.417593 5.046601",
    ),
}
# The weights from before training, 0, are pushed at batch 0.
TRACES_FROM_ZERO = {
    "timm-v2": (
        {"preset": "timm", "version": "v2", "decay": 0.9},
        ".1 .29 .561 .9049 1.31441 1.782969 2.304672 2.874205",
    ),
    "optax": (
        {"preset": "optax", "step_size": 0.1},
        ".1 .29 .561 .9049 1.31441 1.782969 2.304672 2.874205",
    ),
    "composer": (
        {"preset": "composer", "half_life": "10ba"},
        "1 1.066967 1.196416 1.384164 1.626306 1.919199 2.259445 2.643873",
    ),
    "composer-start": (
        {
            "preset": "composer",
            "half_life": "10ba",
            "update_interval": "3ba",
            "ema_start": "5ba",
        },
        "0 0 0 0 5 5.187748 5.187748 5.187748",
    ),
}


def trace(preset, *, first: int) -> list[float]:
    model = torch.nn.Linear(1, 1, bias=False)
    ema = ema_client.LocalEMA(model, preset=preset)
    values = []
    for n in range(first, 9):
        with torch.no_grad():
            model.weight.fill_(n)
        ema.update({"batch": n, "sample": n})
        if n > 0:
            values.append(float(ema.weights()["weight"]))
    return values


@pytest.mark.parametrize("preset, expected", TRACES.values(), ids=TRACES.keys())
def test_traces(preset, expected):
    assert trace(preset, first=1) == pytest.approx(
        [float(value) for value in expected.split()], abs=1e-6
    )


@pytest.mark.parametrize("preset, expected", TRACES_FROM_ZERO.values(), ids=TRACES_FROM_ZERO.keys())
def test_traces_from_the_weights_before_training(preset, expected):
    assert trace(preset, first=0) == pytest.approx(
        [float(value) for value in expected.split()], abs=1e-6
    )


# Decays as the libraries' sources write them, at batch n of 40, and the first n that is pushed.
FORMULAS = {
    "ultralytics": (
        {"preset": "ultralytics", "tau": 5.0},
        lambda n: 0.9999 * (1 - math.exp(-n / 5)),
        0,
    ),
    "ultralytics-resumed": (
        {"preset": "ultralytics", "tau": 5, "updates": 7},
        lambda n: 0.9999 * (1 - math.exp(-(n + 7) / 5)),
        0,
    ),
    "tensorflow": (
        {"preset": "tensorflow", "decay": 0.6},
        lambda n: min(0.6, (1 + n) / (10 + n)),
        0,
    ),
    "tensorflow-constant": (
        {"preset": "tensorflow", "decay": 0.6, "use_num_updates": False},
        lambda n: 0.6,
        0,
    ),
    # Its momentum at call `steps`, from 0, is (1 - m) * exp(-(1 + steps) / gamma) + m; call 0 copies.
    "mmengine": (
        {"preset": "mmengine", "gamma": 5, "momentum": 0.01},
        lambda n: 1 - (0.99 * math.exp(-n / 5) + 0.01),
        1,
    ),
    "mmengine-constant": (
        {"preset": "mmengine", "kind": "constant", "momentum": 0.01},
        lambda n: 0.99,
        1,
    ),
    "byol": (
        {"preset": "byol", "base_decay": 0.7},
        lambda n: 1 - (1 - 0.7) * (math.cos(math.pi * n / 40) + 1) / 2,
        0,
    ),
    "mean-teacher": (
        {"inv_gamma": 1, "power": 1, "max_decay": 0.9, "count_offset": 1},
        lambda n: min(1 - 1 / (n + 1), 0.9),
        0,
    ),
    "table": (
        {"decays": {"10ba": 0.2, "20ba": 0.7, "30ba": 0.6}},
        lambda n: float(np.interp(n, [10, 20, 30], [0.2, 0.7, 0.6])),
        0,
    ),
}


@pytest.mark.parametrize("track, decay, first", FORMULAS.values(), ids=FORMULAS.keys())
def test_decays_are_those_of_the_formulas(track, decay, first):
    model = torch.nn.Linear(1, 1, bias=False)
    ema = ema_client.LocalEMA(model, tracks={"ema": track})
    expected = float(first)
    for n in range(first, 41):
        with torch.no_grad():
            model.weight.fill_(n)
        ema.update({"batch": n, "dur": n / 40})
        if n > first:
            expected = decay(n) * expected + (1 - decay(n)) * n
        assert float(ema.weights()["weight"]) == pytest.approx(expected, rel=1e-5, abs=1e-6), n


def test_default_first_average_of_ema_pytorch():
    """Copies at t = 0, 10, ..., 100; the first average is at t = 110 with this decay."""
    ema = ema_client.LocalEMA(torch.nn.Linear(1, 1), preset="ema_pytorch")
    weights = {}
    for n in range(1, 122):
        record = ema.update()["ema"]
        if record.updated:
            weights[n - 1] = record.update_weight
    assert list(weights) == list(range(0, 121, 10))
    assert [weights[t] for t in range(0, 101, 10)] == [1.0] * 11
    assert 1 - weights[110] == pytest.approx(0.797819992, abs=1e-7)
    assert 1 - weights[120] == pytest.approx(0.868622658, abs=1e-7)


def test_names_that_ema_pytorch_treats_apart():
    track = Track.preset(
        "ema_pytorch",
        ignore_names={"b", "a*"},
        ignore_startswith_names=["head."],
        param_or_buffer_names_no_ema={"bn.running_mean"},
    )
    assert track.tensor_rules == (
        ("a\\*", "ignore"),
        ("b", "ignore"),
        ("head.*", "ignore"),
        ("bn.running_mean", "copy"),
    )


def test_buffers_are_those_of_the_library():
    assert Track.preset("torch").buffers == "copy"
    assert Track.preset("torch", use_buffers=True).buffers == "average"
    assert Track.preset("timm").buffers == "average"
    assert Track.preset("timm", exclude_buffers=True).buffers == "copy"
    assert Track.preset("diffusers").buffers == "copy"
    assert Track.preset("edm2", std=0.05).buffers == "copy"
    assert Track.preset("ema_pytorch").buffers == "average"
    assert Track.preset("composer").buffers == "average"


def test_composer_computes_one_smoothing():
    assert Track.preset("composer").smoothing == 2 ** -(1 / 1000)
    assert Track.preset("composer").update_interval == "1ba"
    interval = Track.preset("composer", half_life="6ep", update_interval="2ep")
    assert (interval.smoothing, interval.update_interval) == (2 ** -(2 / 6), "2ep")
    given = Track.preset("composer", half_life=None, smoothing=0.97)
    assert (given.smoothing, given.update_interval) == (0.97, "1ba")
    assert Track.preset("composer", smoothing=0.97) == given
    assert Track.preset("composer", half_life="3e2BA") == Track.preset(
        "composer", half_life="300ba"
    )


BAD = {
    "preset": ("tim", {}, 'no preset "tim".*"timm"'),
    "name": ("ema_pytorch", {"bet": 0.9}, '"bet".*"beta".*update_after_step'),
    "other-name": ("timm", {"version": "v2", "use_warmup": True}, "use_warmup.*decay"),
    "text": ("diffusers", {"decay": "0.9"}, "decay '0.9'.*a number.*0.9999"),
    "nan": ("diffusers", {"decay": float("nan")}, "decay nan"),
    "range": ("torch", {"decay": 1.0}, "decay 1.0.*below 1.*0.999"),
    "negative": ("timm", {"min_decay": -0.1, "use_warmup": True}, "min_decay -0.1.*0 to 1"),
    "power": ("ema_pytorch", {"power": 0}, "power 0.*above 0.*0.75"),
    "count": ("ema_pytorch", {"update_every": 0}, "update_every 0.*whole number, 1 or more.*10"),
    "fraction": ("diffusers", {"update_after_step": 1.5}, "update_after_step 1.5"),
    "flag": ("diffusers", {"use_ema_warmup": 1}, "use_ema_warmup 1.*True or False"),
    "device": ("timm", {"device": "cuda"}, "device 'cuda'.*does nothing here"),
    "foreach": ("diffusers", {"foreach": True}, "foreach True.*default False"),
    "average-function": ("torch", {"avg_fn": max}, "avg_fn: a function.*decay=0.999, .*kind="),
    "function": ("torch", {"multi_avg_fn": max}, "multi_avg_fn: a function.*half_life="),
    "swa-function": ("torch", {"kind": "swa", "avg_fn": max}, "avg_fn: a function"),
    "other-decay": ("ema_pytorch", {"decay": 0.9}, 'did you mean "beta", the share'),
    "names": ("ema_pytorch", {"ignore_names": "head"}, "ignore_names 'head'.*set of names"),
    "kind": ("torch", {"kind": "sma"}, "kind 'sma'.*'ema' or 'swa'"),
    "swa-decay": ("torch", {"kind": "swa", "decay": 0.9}, '"decay"'),
    "optax-none": ("optax", {}, "decay.*step_size.*update_period"),
    "optax-two": ("optax", {"decay": 0.9, "step_size": 0.1}, "decay and step_size given"),
    "optax-debias": ("optax", {"step_size": 0.1, "debias": False}, "debias.*belongs to decay"),
    "edm2-none": ("edm2", {}, "0 given.*std=0.05"),
    "edm2-two": ("edm2", {"stds": [0.05, 0.1]}, "2 given.*a track for each"),
    "edm2-frozen": ("edm2", {"rampup_ratio": None}, "averages nothing"),
    "edm2-images": ("edm2", {"halflife_Mimg": 1.5e-7}, "halflife_Mimg.*whole images"),
    "karras-none": ("karras", {}, "sigma_rel or gamma.*sigma_rel=0.05"),
    "karras-both": ("karras", {"sigma_rel": 0.1, "gamma": 1.0}, "either"),
    "composer-zero": ("composer", {"half_life": "0ba"}, "half_life '0ba'.*\"1000ba\""),
    "composer-infinite": ("composer", {"half_life": "infba"}, "half_life 'infba'"),
    "composer-negative": ("composer", {"half_life": "-5ba"}, "half_life '-5ba'"),
    "composer-bare": ("composer", {"half_life": "5"}, "half_life '5'"),
    "composer-unit": ("composer", {"half_life": "5sp"}, "half_life '5sp'.*ba or ep"),
    "composer-interval": ("composer", {"update_interval": "0ba"}, "update_interval '0ba'"),
    "composer-units": (
        "composer",
        {"half_life": "5ba", "update_interval": "1ep"},
        'different units.*"1ba"',
    ),
    "composer-both": ("composer", {"half_life": "5ba", "smoothing": 0.9}, "both given"),
    "composer-none": ("composer", {"half_life": None}, "half_life or smoothing"),
    "composer-smoothing": ("composer", {"smoothing": 1.0}, "smoothing 1.0.*below 1"),
}


@pytest.mark.parametrize("name, arguments, message", BAD.values(), ids=BAD.keys())
def test_bad_arguments(name, arguments, message):
    with pytest.raises(ema_client.InvalidArgumentError, match=message) as error:
        Track.preset(name, **arguments)
    assert error.value.reason == "BAD_SCHEDULE"


@pytest.mark.parametrize("start", ["5", "-1ba", "2dur", "soon"])
def test_a_start_is_read_as_everywhere(start):
    with pytest.raises(ema_client.InvalidArgumentError, match="ema_start"):
        ema_client.LocalEMA(
            torch.nn.Linear(1, 1), preset={"preset": "composer", "ema_start": start}
        )


def test_what_has_no_numbers_is_accepted_at_its_default():
    plain = Track.preset("timm")
    assert Track.preset("timm", device=None, foreach=True, stochastic_rounding=True) == plain
    assert Track.preset("timm", dtype=torch.float64) == dataclasses.replace(plain, dtype="float64")
    assert Track.preset("optax", decay=0.5, accumulator_dtype=None).smoothing == 0.5


def test_limits_that_cross():
    """torch.clamp gives the upper one, max(min()) the lower one."""
    assert Track.preset("ema_pytorch", beta=0.5, min_value=0.9).min_decay == 0.5
    assert Track.preset("diffusers", decay=0.5, min_decay=0.9).max_decay == 0.9


def test_weights_of_all_presets_are_shares():
    model = torch.nn.Linear(1, 1)
    presets = [preset for preset, _ in itertools.chain(TRACES.values(), TRACES_FROM_ZERO.values())]
    ema = ema_client.LocalEMA(model, tracks={f"t{i}": preset for i, preset in enumerate(presets)})
    for n in range(1, 2000):
        for record in ema.update({"batch": n, "sample": n}).values():
            assert 0 <= record.update_weight <= 1


@pytest.mark.parametrize(
    "options, batches_per_epoch, batch, plain, composer",
    [
        ({"half_life": "10ba", "update_interval": "3ba"}, 1, 3, 1.2589, 1.3755),
        ({"half_life": "2ep"}, 4, 4, 1.8787, 4.0),
    ],
    ids=["batches", "epochs"],
)
def test_the_composer_preset_starts_otherwise_than_no_preset(
    options, batches_per_epoch, batch, plain, composer
):
    """The table in schedules.md; its last column is also what Composer gives."""
    for preset, expected in ((None, plain), ("composer", composer)):
        model = torch.nn.Linear(1, 1, bias=False)
        local = ema_client.LocalEMA(model, preset=preset, **options)
        for n in range(1, batch + 1):
            torch.nn.init.constant_(model.weight, n)
            local.update({"batch": n, "epoch": n // batches_per_epoch})
        assert local.weights()["weight"].item() == pytest.approx(expected, abs=5e-5)
