# SPDX-License-Identifier: Apache-2.0
"""The checker itself: its float32 fused multiply-add against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from replay import Replay, differing_bits, fma32


def exact_fma32(a: float, x: float, y: float) -> np.float32:
    """a * x + y rounded once to the nearest float32, ties to even."""
    value = Fraction(a) * Fraction(x) + Fraction(y)
    guess = np.float32(float(value))
    around = [
        np.nextafter(guess, np.float32(-np.inf)),
        guess,
        np.nextafter(guess, np.float32(np.inf)),
    ]
    around = [c for c in around if np.isfinite(c)]
    best = min(abs(Fraction(float(c)) - value) for c in around)
    nearest = [c for c in around if abs(Fraction(float(c)) - value) == best]
    return min(nearest, key=lambda c: int(c.view(np.int32)) & 1)


@pytest.mark.parametrize("spread", [0, 10, 30, 120])
def test_fma32_is_rounded_once(spread):
    rng = np.random.default_rng(spread)

    def values(n):
        exponents = rng.integers(-spread, spread + 1, n)
        return np.ldexp(rng.uniform(-2, 2, n), exponents).astype(np.float32)

    for a in values(20):
        x, y = values(100), values(100)
        # Cancellation, and ties between two float32.
        with np.errstate(over="ignore"):
            y[:30] = np.nan_to_num(-(a * x[:30]))
            x[30:60] = np.float32(1 + 2**-23)
            got = fma32(a, x, y)
        for i in range(len(x)):
            if np.isfinite(got[i]):
                expected = exact_fma32(float(a), float(x[i]), float(y[i]))
                assert got[i] == expected, (a, x[i], y[i])


def test_one_bit_is_seen():
    a = {"w": np.ones((2, 3), np.float32)}
    b = {"w": a["w"].copy()}
    assert differing_bits(a, b) == []
    b["w"][1, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert "1 of 6" in differing_bits(a, b)[0]
    b["w"][1, 2] = 1
    b["x"] = b["w"]
    assert differing_bits(a, b) == ["x: unexpected"]
    assert differing_bits({"z": np.zeros(1, np.float32)}, {"z": -np.zeros(1, np.float32)})


def test_replay_knows_its_error():
    replay = Replay()
    replay.update(1.0, {"w": np.array([1.0], np.float32), "n": np.array(3)})
    assert replay.error_ulps() == 0
    replay.update(0.1, {"w": np.array([2.0], np.float32), "n": np.array(4)})
    assert replay.average["n"] == 4
    assert 0 < replay.error_ulps() < 2
