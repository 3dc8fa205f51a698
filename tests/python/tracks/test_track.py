# SPDX-License-Identifier: Apache-2.0
"""Tracks as users write them, and as the extension module has them."""

from __future__ import annotations

import dataclasses
import math

import ema_client
import numpy as np
import pytest
from ema_client import Track, _ema
from ema_client._client.arrays import spec_of
from ema_client._tracks.track import track_from, track_of

TRACKS = [
    "200ba",
    "copy",
    Track(),
    Track(half_life="2ep", update_interval="5ba", ema_start="0.1dur", before_start="hold"),
    Track(half_life="90m", debias=True),
    Track(ramp_ratio=0.09, update_interval="1sp"),
    Track(smoothing=0.9990001, zero_init="debias"),
    Track(inv_gamma=3, power=0.7, min_decay=0.1, max_decay=0.99, interval_phase=1),
    Track(ramp=10.0, ema_start="10ba", before_start="copy", ema_end="1e6ba"),
    Track(sigma_rel=0.05),
    Track(sigma_rel=0.1, age_offset=1.0, snapshot_interval="50ep"),
    Track(uniform=True, paused=True),
    Track(mean_of_last=5, update_interval="100ba"),
    Track(copy=True, tensor_rules={"head.*": "ignore"}),
    Track(
        half_life="1ba",
        tensor_rules={"a": "ignore", "bn.*": "copy", "*": "average"},
        buffers="copy",
        dtype="float64",
    ),
    {"half_life": "3ba", "tensor_rules": {"a": "copy"}},
    {"preset": "ema_pytorch", "beta": 0.999},
]


@pytest.mark.parametrize("track", TRACKS, ids=str)
def test_there_and_back(track):
    there = track_of("ema", track)
    back = track_from(there)
    assert track_of("ema", back) == there
    if isinstance(track, Track) and track != Track():
        # But for times and numbers that can be written in more than one way.
        names = {"half_life", "ema_end"}
        for field in vars(track).keys() - names:
            assert getattr(back, field) == getattr(track, field), field


def test_what_there_is_without_a_rule():
    for nothing in (Track(dtype=None), {}, Track(dtype="float32", uniform=False)):
        assert track_from(track_of("ema", nothing)) == Track(half_life="1000ba")
    assert track_of("ema", Track(debias=True)).schedule.to_fields() == {
        "half_life": "1000ba",
        "debias": "true",
    }
    assert track_of("ema", {"ema_start": "5ba"}).schedule.to_fields()["half_life"] == "1000ba"


def test_copy():
    assert Track(copy=True).is_copy and not Track().is_copy
    assert track_from(track_of("raw", "copy")) == Track(copy=True)
    assert track_of("raw", "copy").schedule.is_copy
    assert track_from(track_of("raw", {"copy": True})).is_copy


@pytest.mark.parametrize(
    "number", [0.1, 1 / 3, 0.999999999999, math.nextafter(1, 0), 5e-324, np.float32(0.9), 0]
)
def test_numbers_keep_all_bits(number):
    schedule = track_of("ema", Track(smoothing=number)).schedule
    assert float(schedule.to_fields()["smoothing"]) == number


def test_update_interval_for_tracks_without_one():
    def interval(track):
        schedule = track_of("ema", track, update_interval="7ba").schedule
        return schedule.to_fields()["update_interval"]

    assert interval("200ba") == "7ba"
    assert interval("copy") == "7ba"
    assert interval(Track(smoothing=0.5)) == "7ba"
    assert interval({"half_life": "5ba", "update_interval": "2ba"}) == "2ba"
    assert interval({"preset": "ema_pytorch"}) == "10ba"


def test_what_is_no_schedules_goes_with_a_preset():
    given = {
        "dtype": "float64",
        "paused": True,
        "buffers": "average",
        "tensor_rules": {"a": "3ba"},
    }
    track = track_from(track_of("ema", {"preset": "torch", "decay": 0.9, **given}))
    assert track == Track(
        smoothing=0.9, **{**given, "tensor_rules": {"a": "half_life=3ba, update_interval=1ba"}}
    )
    rules = {"head.a": "copy"}
    both = {"preset": "ema_pytorch", "ignore_startswith_names": {"head."}, "tensor_rules": rules}
    assert track_from(track_of("ema", both)).tensor_rules == (
        ("head.a", "copy"),
        ("head.*", "ignore"),
    )
    kept = {"preset": "edm2", "std": 0.05, "snapshot_interval": "9sp"}
    assert track_from(track_of("ema", kept)).snapshot_interval == "9sp"


def test_decay_is_another_name_of_smoothing():
    track = Track(decay=0.9)
    assert track == Track(smoothing=0.9) and track.smoothing == 0.9
    assert dataclasses.replace(track, update_interval="5ba").smoothing == 0.9
    assert track_of("ema", {"decay": 0.9}) == track_of("ema", track)
    rules = Track(half_life="5ba", tensor_rules={"a": {"decay": 0.9}}).tensor_rules
    assert rules == Track(half_life="5ba", tensor_rules={"a": {"smoothing": 0.9}}).tensor_rules


def test_tracks_are_values():
    rules = {"head.*": "ignore", "bn.*": "copy"}
    a = Track(half_life="5ba", tensor_rules=rules)
    b = Track(half_life="5ba", tensor_rules=list(rules.items()))
    assert a == b and len({a, b}) == 1
    assert a.tensor_rules == tuple(rules.items())


BAD = {
    "bare": (5, 'half_life "5".*needs a unit.*"5ba"'),
    "two": (Track(half_life="5ba", smoothing=0.5), "half_life and smoothing"),
    "copy-too": ({"half_life": "5ba", "copy": True}, "half_life and copy"),
    "field": ({"halflife": "5ba"}, '"halflife".*"half_life"'),
    "ema_decay": (
        {"ema_decay": 0.9},
        '"ema_decay"; did you mean "decay", the share.*"timm", "decay": 0.999',
    ),
    "both": ({"decay": 0.9, "smoothing": 0.8}, "smoothing 0.8 and decay 0.9 are both given"),
    "decay-range": ({"decay": 1.5}, "smoothing 1.5"),
    "strange": ({"zzz": 1}, '"zzz".*smoothing'),
    "other-rule": (Track(half_life="5ba", power=0.5), "power.*inv_gamma"),
    "alone": (Track(power=0.5), "power.*inv_gamma"),
    "number": (Track(smoothing="0.9"), "smoothing '0.9'.*a number, such as 0.999"),
    "nan": (Track(smoothing=math.nan), "smoothing nan"),
    "range": (Track(smoothing=1), "smoothing 1.*below 1"),
    "sigma_rel": (Track(sigma_rel=0.3), "sigma_rel 0.3.*0.288"),
    "flag": (Track(uniform=1), "uniform 1.*True or False"),
    "phase": (Track(half_life="5ba", interval_phase=1.5), "interval_phase 1.5.*whole number"),
    "mean": (Track(mean_of_last=2.5), "mean_of_last 2.5.*whole number, such as 5"),
    "mean-of-one": (Track(mean_of_last=1), "mean_of_last 1: must be 2 to 16.*copy"),
    "mean-of-many": (Track(mean_of_last=17), "mean_of_last 17: must be 2 to 16"),
    "mean-rule": (
        Track(mean_of_last=5, tensor_rules={"a": "5ba"}),
        "tensor_rules: a: mean_of_last 5: must be the only schedule",
    ),
    "mean-too": ({"mean_of_last": 5, "half_life": "5ba"}, "half_life and mean_of_last"),
    "start": (Track(ema_start="-1ba"), "ema_start"),
    "before": (Track(before_start="wait"), "before_start.*reinit or copy or hold"),
    "buffers": (Track(buffers="drop"), 'buffers "drop": must be "average" or "copy" \\['),
    "action": (Track(tensor_rules={"a": "mean"}), 'tensor_rules: a "mean".*"copy" or "ignore"'),
    "dtype": ({"dtype": "bfloat16"}, 'dtype \'bfloat16\'.*"float32" or "float64"'),
    "snapshots": (Track(sigma_rel=0.1, snapshot_interval=50), 'snapshot_interval "50".*"50ba"'),
    "preset": ({"preset": "timmm"}, '"timmm".*"timm"'),
    "preset-argument": ({"preset": "timm", "decy": 0.9}, '"decy".*"decay"'),
}


@pytest.mark.parametrize("track, message", BAD.values(), ids=BAD.keys())
def test_bad_tracks_are_named(track, message):
    with pytest.raises(ema_client.InvalidArgumentError, match=f'(?s)track "e".*{message}') as error:
        track_of("e", track)
    assert error.value.reason == "BAD_SCHEDULE"


@pytest.mark.parametrize("rules", ["head", [("a",)], {"a": 1}, 3, [("a", "b", "c")]])
def test_bad_rules(rules):
    with pytest.raises(ema_client.InvalidArgumentError, match="tensor_rules.*bn"):
        Track(tensor_rules=rules)


def test_track_plans():
    track = track_of(
        "ema",
        Track(
            half_life="10ba",
            update_interval="2ba",
            tensor_rules={"head": {"smoothing": 0.5, "update_interval": "1ba"}},
        ),
    )
    state = track.next([], {"batch": 1})
    assert track.plan([], {"batch": 1}) == [(True, 1.0, False, 0.0)] * 2
    assert (state[0].update_count, state[0].averaged_count) == (1, 1)
    assert state[0].last_update == {"batch": 1}
    (due, weight, from_zero, elapsed), head = track.plan(state, {"batch": 5})
    assert (due, from_zero, elapsed) == (True, False, 4)
    assert weight == pytest.approx(1 - 2 ** (-4 / 10), rel=1e-15)
    assert head == (True, 0.5, False, 4)
    # Not due: the state stays.
    state = track.next(state, {"batch": 4})
    assert not track.plan(state, {"batch": 5})[0][0]
    after = track.next(state, {"batch": 5})
    assert after[0] == state[0] and after[1].update_count == 3
    with pytest.raises(ema_client.InvalidArgumentError, match="go back") as error:
        track.plan(state, {"batch": 3})
    assert error.value.reason == "BAD_TIME"
    again = _ema.ScheduleState.from_fields(
        state[0].update_count, state[0].averaged_count, state[0].last_update, state[0].started
    )
    assert again == state[0]


def test_actions():
    # Names, dtypes and shapes as the server gets them.
    specs = [
        spec_of("head.w", np.zeros(3, np.float32)),
        spec_of("w", np.zeros(3, np.float32)),
        spec_of("mean", np.zeros(3, np.float32), is_buffer=True),
        spec_of("count", np.zeros((), np.int64), is_buffer=True),
    ]
    rules = {"head.*": "ignore"}
    track = track_of("ema", Track(tensor_rules=rules))
    assert [a for a, _ in track.actions(specs)] == ["ignore", "average", "average", "copy"]
    track = track_of("ema", Track(tensor_rules=rules, buffers="copy"))
    assert [a for a, _ in track.actions(specs)] == ["ignore", "average", "copy", "copy"]
    with pytest.raises(
        ema_client.InvalidArgumentError, match='"hed.*" matches no tensor.*"head.w"'
    ):
        track_of("ema", Track(tensor_rules={"hed.*": "ignore"})).check(specs)


def test_times_may_have_the_underscores_of_pythons_numbers(client, model):
    fields = {"update_interval": "1_0ba", "ema_start": "1_000_000ba"}
    tracks = {
        "short": "1_000ba",
        "long": Track(half_life="1_000ba", tensor_rules={"w": "2_000ba"}, **fields),
        "kept": Track(sigma_rel=0.1, snapshot_interval="1_000ba"),
    }
    made = client.create_model(model, {"w": np.ones(2, np.float32)}, tracks=tracks).tracks
    assert made["short"].half_life == made["long"].half_life == "1000ba"
    assert (made["long"].update_interval, made["long"].ema_start) == ("10ba", "1000000ba")
    assert made["kept"].snapshot_interval == "1000ba"
    assert "2000ba" in made["long"].tensor_rules[0][1]
    with pytest.raises(ema_client.InvalidArgumentError, match="1__000ba"):
        client.create_model(f"{model}-2", {"w": np.ones(2, np.float32)}, tracks={"a": "1__000ba"})
