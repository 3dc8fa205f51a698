# SPDX-License-Identifier: Apache-2.0
"""_ema.fold_many: the kernel on arrays of this process, and what it refuses."""

from __future__ import annotations

from typing import Any

import ema_client
import numpy as np
import pytest
import torch
from ema_client import _ema

WEIGHT = 1e-3
SIZES = [0, 1, 7, 1000, 300_001, 600_000]


def reference(ema: np.ndarray, param: Any, weight: float = WEIGHT) -> np.ndarray:
    value = np.asarray(param, np.float32)
    difference = (value - ema).astype(np.float64)
    return (ema + np.float64(np.float32(weight)) * difference).astype(np.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_updates_torch_tensors_in_place(dtype: str) -> None:
    torch.manual_seed(1)
    params = [torch.randn(size).to(getattr(torch, dtype)) for size in SIZES]
    emas = [torch.randn(size) for size in SIZES]
    addresses = [ema.data_ptr() for ema in emas]
    expected = [reference(e.numpy(), p.float()) for e, p in zip(emas, params)]
    _ema.fold_many(emas, params, WEIGHT)
    assert [ema.data_ptr() for ema in emas] == addresses
    for ema, value in zip(emas, expected):
        # The reference rounds twice where the kernel rounds once.
        np.testing.assert_array_max_ulp(ema.numpy(), value, maxulp=1)


def test_takes_numpy_arrays_and_parameters_and_arrays_read_before(rng: np.random.Generator) -> None:
    start = rng.standard_normal((3, 5), np.float32)
    value = rng.standard_normal((3, 5), np.float32)
    emas = [start.copy() for _ in range(4)]
    bits = torch.from_numpy(value).bfloat16()
    params = [
        value,
        torch.nn.Parameter(torch.from_numpy(value)),
        value.reshape(15),
        _ema.Array("bits", bits.view(torch.uint16), "bfloat16"),
    ]
    _ema.fold_many(emas, tuple(params), WEIGHT)
    for ema in emas[:3]:
        np.testing.assert_array_max_ulp(ema, reference(start, value), maxulp=1)
    np.testing.assert_array_max_ulp(emas[3], reference(start, bits.float()), maxulp=1)


def test_takes_a_module_whose_parameters_require_gradients() -> None:
    model, average = torch.nn.Linear(40, 30), torch.nn.Linear(40, 30)
    expected = [p.detach().clone() for p in model.parameters()]
    _ema.fold_many(list(average.parameters()), list(model.parameters()), 1)
    assert all(torch.equal(a, e) for a, e in zip(average.parameters(), expected))


def test_a_weight_of_one_is_a_copy(rng: np.random.Generator) -> None:
    param = rng.standard_normal(1000)
    ema = np.full(1000, np.nan, np.float32)
    wide = np.full(1000, np.nan)
    _ema.fold_many([ema, wide], [param, param], 1)
    np.testing.assert_array_equal(ema, param.astype(np.float32))
    np.testing.assert_array_equal(wide, param)


def test_float64_averages_keep_what_float32_drops() -> None:
    param, start = np.full(1000, 1.01, np.float32), np.ones(1000, np.float32)
    plain, wide = start.copy(), start.astype(np.float64)
    exact = wide.copy()
    for _ in range(2000):
        _ema.fold_many([plain, wide], [param, param], 1e-6)
        exact += 1e-6 * (param - exact)
    np.testing.assert_array_equal(plain, start)  # It never moved.
    np.testing.assert_allclose(wide, exact, rtol=1e-13)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_mean_with_earlier_weights(rng: np.random.Generator, dtype: Any) -> None:
    params = [rng.standard_normal(size) for size in SIZES]
    earlier = [[rng.standard_normal(size).astype(dtype) for size in SIZES] for _ in range(3)]
    means = [np.full(size, np.nan, dtype) for size in SIZES]
    _ema.fold_many(means, params, 0.25, earlier=earlier)
    for mean, param, *others in zip(means, params, *earlier):
        newest = param.astype(dtype).astype(np.float64)
        differences = sum(other.astype(np.float64) - newest for other in others)
        np.testing.assert_array_equal(mean, (newest + differences / 4).astype(dtype))
    ema = np.zeros(4, np.float32)
    for wrong, message in (
        ([[]], "earlier: expected 1 arrays in each list"),
        ([[np.zeros(5, np.float32)]], r"earlier\[0\]: expected 4 elements of float32"),
        ([[np.zeros(4)]], r"earlier\[0\]: expected 4 elements of float32"),
        ([[ema]] * 16, "earlier: expected at most 15 lists, found 16"),
    ):
        with pytest.raises(ema_client.InvalidArgumentError, match=message):
            _ema.fold_many([ema], [GOOD], 0.5, earlier=wrong)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_number_of_threads_changes_no_bit(rng: np.random.Generator, dtype: Any) -> None:
    params = [rng.standard_normal(size, np.float32) for size in SIZES * 2]
    starts = [rng.standard_normal(size, dtype) for size in SIZES * 2]
    results = []
    for threads in (1, 2, 7, 0):
        emas = [start.copy() for start in starts]
        _ema.fold_many(emas, params, WEIGHT, threads)
        results.append(b"".join(array.tobytes() for array in emas))
    assert len(set(results)) == 1


def test_an_average_that_is_its_own_weights_stays(rng: np.random.Generator) -> None:
    ema = rng.standard_normal(5000, np.float32)
    before = ema.copy()
    _ema.fold_many([ema], [ema], 0.3)
    np.testing.assert_array_equal(ema, before)


def _read_only() -> np.ndarray:
    array = np.zeros(4, np.float32)
    array.flags.writeable = False
    return array


GOOD = np.zeros(4, np.float32)


@pytest.mark.parametrize(
    ("ema", "param", "message"),
    [
        (np.zeros(4, np.int32), GOOD, r"emas\[1\]: expected float32 or float64, found int32"),
        (torch.zeros(4).half(), GOOD, r"emas\[1\]: expected float32 or float64, found float16"),
        (np.zeros(5, np.float32), GOOD, r"emas\[1\]: expected 4 .* params\[1\] .* found 5"),
        (_read_only(), GOOD, r"emas\[1\]: expected a writable array, found a read-only"),
        (np.zeros((4, 4), np.float32)[:, 0], GOOD, r"emas\[1\].*contiguous"),
        (torch.zeros(4, 4)[:, 0], GOOD, r"emas\[1\].*contiguous"),
        (torch.zeros(4, device="meta"), GOOD, r"emas\[1\]"),
        ([0.0] * 4, GOOD, r"emas\[1\].*list"),
        (np.zeros(4, np.float32), np.zeros(4, np.int64), r"params\[1\]: .*, found int64"),
        (np.zeros(4, np.float32), torch.zeros(4).to_sparse(), r"params\[1\]"),
        (np.zeros(4, np.float32), torch.zeros(4, 4).t()[:2], r"params\[1\].*contiguous"),
    ],
)
def test_a_wrong_array_is_named_and_nothing_changes(ema: Any, param: Any, message: str) -> None:
    first = np.zeros(4, np.float32)
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        _ema.fold_many([first, ema], [np.ones(4, np.float32), param], 0.5)
    assert not first.any()


def test_memory_given_twice_is_refused() -> None:
    shared = np.zeros(10, np.float32)
    param = np.ones(6, np.float32)
    with pytest.raises(ema_client.InvalidArgumentError, match=r"emas\[\d\] and emas\[\d\] share"):
        _ema.fold_many([shared[:6], shared[4:]], [param, param], 0.5)
    wide = np.zeros(10)
    with pytest.raises(ema_client.InvalidArgumentError, match=r"share memory"):
        _ema.fold_many([wide[:6], wide[5:9].view(np.float32)[:6]], [param, param], 0.5)
    assert not shared.any()


def test_other_arguments_are_checked() -> None:
    ema = np.zeros(4, np.float32)
    for weight in (-0.1, 1.1, float("nan")):
        with pytest.raises(ema_client.InvalidArgumentError, match="update_weight: expected 0 to 1"):
            _ema.fold_many([ema], [GOOD], weight)
    with pytest.raises(ema_client.InvalidArgumentError, match="params: expected 1 arrays"):
        _ema.fold_many([ema], [], 0.5)
    with pytest.raises(ema_client.InvalidArgumentError, match="threads: expected 0 or more"):
        _ema.fold_many([ema], [GOOD], 0.5, threads=-1)
    _ema.fold_many([], [], 0.5)
