# SPDX-License-Identifier: Apache-2.0
"""The composer preset and compute_ema beside MosaicML Composer, which runs in an environment of its own.

Agreement is as in test_libraries.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from libraries import UPDATES, Agreement, Net, Tensors, floats, run_ours
from library_process import LibraryProcess, library_process
from ours import Timed, make_ours  # noqa: F401

pytestmark = pytest.mark.framework


COMPOSER = {
    "defaults": {},
    "interval": {"half_life": "10ba", "update_interval": "3ba"},
    "start": {"half_life": "10ba", "update_interval": "3ba", "ema_start": "5ba"},
    "smoothing": {"smoothing": 0.9, "half_life": None, "update_interval": "2ba"},
    "duration": {"half_life": "20ba", "ema_start": "0.1dur"},
    "epochs": {"half_life": "3ep", "epoch_batches": 10},
    "epoch-start": {
        "half_life": "6ep",
        "update_interval": "2ep",
        "ema_start": "3ep",
        "epoch_batches": 10,
    },
}


@pytest.fixture(scope="module")
def composer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LibraryProcess]:
    with library_process("composer", tmp_path_factory.mktemp("composer")) as process:
        yield process


@pytest.mark.parametrize("options", COMPOSER.values(), ids=COMPOSER.keys())
def test_composer(options, make_ours, composer):
    """Its average is made anew at the start; then one smoothing, whatever the gaps."""
    arguments = {name: value for name, value in options.items() if name != "epoch_batches"}
    model = Net()
    ours = make_ours(model, {"preset": "composer", **arguments})
    timed = Timed(ours, options.get("epoch_batches", 10**9))
    steps = run_ours(timed, model, updates=UPDATES)
    agreement = Agreement()
    updates = 0
    for step, (after, weight) in zip(steps, composer.run("algorithm", steps, options)):
        if step.n == 1 and weight is None:
            assert (
                step.weight == 1
            )  # The first push; Composer has the weights from before training.
            continue
        assert step.weight == (None if weight is None else np.float32(weight)), step.n
        if weight is None or step.before is None:
            continue
        updates += 1
        agreement.add(step, floats(after), weight)
    print(f"{updates} updates; {agreement}")
    assert updates >= UPDATES // (10 * 2 if "epoch_batches" in options else 3) - 5
    agreement.check()


@pytest.mark.parametrize("options", [{}, {"smoothing": 0.9}], ids=["default", "0.9"])
def test_compute_ema(options, composer):
    """Composer's function and ours on the same models; integers are copied, where Composer's cut off."""
    model, ema_model = Net(), Net()

    class Functional:
        def push(self, n: int) -> float | None:
            ema_client.compute_ema(model, ema_model, **options)
            return float(np.float32(1 - options.get("smoothing", 0.99)))

        def pull(self) -> Tensors:
            return {name: t.detach().clone() for name, t in ema_model.state_dict().items()}

    steps = run_ours(Functional(), model, updates=UPDATES)
    agreement = Agreement()
    name = "norm.num_batches_tracked"
    theirs = composer.run("function", steps, options)
    for step, (after, weight) in zip(steps[1:], theirs[1:]):
        agreement.add(step, floats(after), weight)
        assert step.after[name] == step.n
        assert after[name] < step.n
    print(agreement)
    agreement.check()
