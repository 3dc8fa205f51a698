# SPDX-License-Identifier: Apache-2.0
"""The server's arithmetic once more, in NumPy and independent of its kernels: for checks bit by bit.

The average is `ema = fma(weight, param - ema, ema)` in float32; weight 1 copies. NumPy has no fused
multiply-add, but the product of two float32 is exact in float64, and a sum rounded to odd there rounds to
float32 as if it had been rounded once (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums",
2008).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def fma32(a: np.float32, x: Array, y: Array) -> Array:
    """float32(a * x + y), rounded once."""
    product = np.float64(a) * x.astype(np.float64)
    y = y.astype(np.float64)
    total = product + y
    # TwoSum (Knuth): total + error is the sum, exactly.
    y_part = total - product
    error = (product - (total - y_part)) + (y - y_part)
    # Inexact and even: the odd neighbour is on the error's side.
    bits = total.view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    away_from_zero = (error > 0) == (total > 0)
    odd = np.where(inexact_even, bits + np.where(away_from_zero, 1, -1), bits)
    return odd.view(np.float64).astype(np.float32)


def half_life_weight(elapsed: float, half_life: float) -> np.float32:
    """What an update `elapsed` after the one before is worth: 1 - 2^(-elapsed / half_life)."""
    return np.float32(-np.expm1(-np.log(2) * elapsed / half_life))


class Replay:
    """One averaged track, replayed from the pushed tensors and the weights that the server applied."""

    def __init__(self) -> None:
        self.average: dict[str, Array] = {}  # As the server computes it.
        self.exact: dict[str, Array] = {}  # In float64.

    def update(self, weight: float, params: Mapping[str, Array]) -> None:
        """Applies an update. Tensors that are not floats are copied."""
        for name, param in params.items():
            if param.dtype.kind != "f":
                self.average[name] = param.copy()
                self.exact[name] = param.copy()
                continue
            new = param.astype(np.float32)
            wide = param.astype(np.float64)
            if weight == 1 or name not in self.average:
                self.average[name] = new.copy()
                self.exact[name] = wide.copy()
            else:
                old = self.average[name]
                self.average[name] = fma32(np.float32(weight), new - old, old)
                self.exact[name] += np.float64(weight) * (wide - self.exact[name])

    def error_ulps(self) -> float:
        """Largest |error| against float64, in units of 2^-24 x the tensor's largest |weight|."""
        worst = 0.0
        for name, average in self.average.items():
            if average.dtype.kind != "f" or average.size == 0:
                continue
            scale = float(np.abs(self.exact[name]).max()) * 2.0**-24
            error = float(np.abs(average.astype(np.float64) - self.exact[name]).max())
            if error > 0:
                worst = max(worst, error / scale if scale > 0 else np.inf)
        return worst


def differing_bits(expected: Mapping[str, Array], got: Mapping[str, Array]) -> list[str]:
    """Says for each tensor that is not the same bit for bit where it differs first."""
    problems = [f"{name}: missing" for name in expected if name not in got]
    problems += [f"{name}: unexpected" for name in got if name not in expected]
    for name in expected:
        if name not in got:
            continue
        a, b = expected[name], got[name]
        if a.dtype != b.dtype or a.shape != b.shape:
            problems.append(f"{name}: {b.dtype}{b.shape}, expected {a.dtype}{a.shape}")
            continue
        raw = f"u{a.dtype.itemsize}"
        differ = np.atleast_1d(a).reshape(-1).view(raw) != np.atleast_1d(b).reshape(-1).view(raw)
        count = int(differ.sum())
        if count:
            at = int(differ.argmax())
            problems.append(
                f"{name}: {count} of {a.size} elements differ, first [{at}]: "
                f"{b.reshape(-1)[at]!r}, expected {a.reshape(-1)[at]!r}"
            )
    return problems
