# SPDX-License-Identifier: Apache-2.0
"""Presets beside real libraries that run in a virtual environment of their own, build/venv-libraries.

Agreement is as in test_libraries.py, with one difference. MMDetection forms
`average * (1 - w) + weights * w`, which is more exact than our `average + w * (weights - average)` while
w is near 1: the difference of the two is rounded, and so is w. There ours may be 3 ulp from theirs, and
1.5 ulp further from float64. With a small w, as in most of a training, both are equally exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from ema_client import Track
from libraries import UPDATES, Agreement, Net, floats, run_ours
from library_process import LibraryProcess, library_process
from ours import Timed, make_ours  # noqa: F401

pytestmark = pytest.mark.framework


@dataclasses.dataclass(frozen=True)
class Case:
    """A setting of a library, and the same as a preset."""

    name: str
    library: str
    preset: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    # The library begins with the weights from before training, we with the first push.
    skip_first: bool = False


# Of each library the defaults, the same by name, and a setting that goes through the whole ramp.
CASES = [
    Case("ultralytics", "ultralytics", "ultralytics", skip_first=True),
    Case(
        "ultralytics-names",
        "ultralytics",
        "ultralytics",
        {"decay": 0.9999, "tau": 2000, "updates": 0},
        skip_first=True,
    ),
    Case("ultralytics-short", "ultralytics", "ultralytics", {"tau": 20}, skip_first=True),
    Case(
        "ultralytics-resumed",
        "ultralytics",
        "ultralytics",
        {"decay": 0.99, "tau": 100, "updates": 70},
        skip_first=True,
    ),
    # It has no default decay.
    Case("torch_ema", "torch_ema", "tensorflow", {"decay": 0.9999}, skip_first=True),
    Case("torch_ema-short", "torch_ema", "tensorflow", {"decay": 0.9}, skip_first=True),
    Case(
        "torch_ema-constant",
        "torch_ema",
        "tensorflow",
        {"decay": 0.99, "use_num_updates": False},
        skip_first=True,
    ),
    Case("mmdet", "mmengine", "mmengine"),
    Case(
        "mmdet-names",
        "mmengine",
        "mmengine",
        {"momentum": 0.0002, "gamma": 2000, "interval": 1, "update_buffers": False},
    ),
    Case("mmdet-short", "mmengine", "mmengine", {"gamma": 30, "momentum": 0.01}),
    Case("mmdet-interval", "mmengine", "mmengine", {"gamma": 50, "interval": 3}),
    Case("mmdet-buffers", "mmengine", "mmengine", {"gamma": 50, "update_buffers": True}),
    Case("mmengine", "mmengine", "mmengine", {"kind": "constant"}),
    Case(
        "mmengine-names",
        "mmengine",
        "mmengine",
        {"kind": "constant", "momentum": 0.0002, "interval": 1, "update_buffers": False},
    ),
    Case(
        "mmengine-interval",
        "mmengine",
        "mmengine",
        {"kind": "constant", "momentum": 0.1, "interval": 4, "update_buffers": True},
    ),
    Case("byol", "lightly", "byol", skip_first=True),
    Case(
        "byol-both-ends",
        "lightly",
        "byol",
        {"base_decay": 0.7, "final_decay": 0.99},
        skip_first=True,
    ),
]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LibraryProcess]:
    with library_process("libraries", tmp_path_factory.mktemp("libraries")) as process:
        yield process


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_decays_and_updates_are_the_librarys(case, make_ours, libraries):
    model = Net()
    ours = Timed(make_ours(model, {"preset": case.preset, **case.arguments}))
    steps = run_ours(ours, model, updates=UPDATES)
    is_copied = Track.preset(case.preset, **case.arguments).buffers == "copy"
    copied = set(dict(model.named_buffers())) if is_copied else set()
    agreement = Agreement()
    weights = set()
    for step, (theirs, weight) in zip(steps, libraries.run(case.library, steps, case.arguments)):
        if case.skip_first and step.n == 1:
            assert step.weight == 1
            continue
        assert step.weight == (None if weight is None else np.float32(weight)), step.n
        if weight is None:
            continue
        weights.add(step.weight)
        after = floats(theirs)
        for name in copied & after.keys():
            assert torch.equal(after.pop(name), step.params[name])
        for name in copied:
            assert torch.equal(step.after[name], step.params[name])
        if step.before is not None:
            agreement.add(step, after, weight)
    print(f"{case.name}: {len(weights)} weights; {agreement}")
    if case.name.startswith("mmdet"):
        agreement.check(most_apart=3.0, most_worse=1.5)
    else:
        agreement.check()
