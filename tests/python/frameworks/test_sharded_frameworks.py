# SPDX-License-Identifier: Apache-2.0
"""Frameworks that shard a model by FSDP or DeepSpeed, on several ranks: the average is that of the gathered weights, bit by bit, and the
frameworks' own evaluations and checkpoints have it."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from sharded_framework_rank import SAVED, STEPS, Small, batch_of, lines
from testing import (
    SUPPORT,
    Weights,
    assert_same_bits,
    beside_python,
    exit_codes,
    replay,
    started,
)

# Importing the frameworks takes long where much else runs.
pytestmark = [pytest.mark.framework, pytest.mark.slow, pytest.mark.timeout(600)]

# By the virtual environment: the kinds of sharded_framework_rank.py.
KINDS = {
    "": [
        "hf_fsdp1",
        "hf_fsdp2",
        "accelerate_fsdp1",
        "lightning_fsdp1",
        "lightning_fsdp2",
        "lightning_ddp_fsdp1",
    ],
    "deepspeed": ["hf_zero3", "hf_zero2", "accelerate_zero3", "lightning_zero3"],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One that waits for ranks as long as it does by default: several of them share two processors."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(folder, data_dir=folder / "data") as process:
        yield process
        assert process.stop() == 0, process.log()


def run_ranks(
    library: str, world_size: int, folder: pathlib.Path, url: str, kinds: list[str]
) -> None:
    (folder / "init").unlink(missing_ok=True)
    python = beside_python(library) if library else sys.executable
    command = [python, SUPPORT / "example_rank.py", SUPPORT / "sharded_framework_rank.py"]
    commands = [[*command, rank, world_size, folder, url, *kinds] for rank in range(world_size)]
    path = [str(pathlib.Path(ema_client.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **{"PYTHONPATH": ":".join(filter(None, path)), "CUDA_VISIBLE_DEVICES": ""},
        **({"DS_ACCELERATOR": "cpu"} if library else {}),
    }
    with started(*commands, env={**os.environ, **environment}) as ranks:
        assert exit_codes(ranks, timeout_s=500) == [0] * world_size


@pytest.fixture(scope="module")
def train(server, tmp_path_factory) -> Callable[[str, str], pathlib.Path]:
    """Trains all kinds of a framework in a virtual environment, once, and returns where their logs are."""

    @functools.cache
    def run(library: str, framework: str) -> pathlib.Path:
        folder: pathlib.Path = tmp_path_factory.mktemp("ranks")
        kinds = [kind for kind in KINDS[library] if kind.startswith(framework)]
        run_ranks(library, 2, folder, server.url("m"), kinds)
        return folder

    return run


def logged(log: Weights, prefix: object) -> Weights:
    return {
        name.removeprefix(f"{prefix}/"): value
        for name, value in log.items()
        if name.startswith(f"{prefix}/")
    }


def rounded(weights: Weights, kind: str) -> Weights:
    """As the model of this kind has them."""
    if kind != "hf_zero2":
        return weights
    return {name: torch.from_numpy(one).bfloat16().float().numpy() for name, one in weights.items()}


@pytest.mark.parametrize(
    ("library", "kind"), [(library, kind) for library, kinds in KINDS.items() for kind in kinds]
)
def test_the_average_is_that_of_the_gathered_weights(client, train, library, kind):
    for name in ("transformers", "accelerate", "lightning"):
        pytest.importorskip(name, reason=f"{name} is not installed")
    framework = kind.partition("_")[0]
    folder = train(library, framework)
    steps = 2 * STEPS if framework == "lightning" else STEPS
    # At the first step, and when an update is due.
    due = [1, *range(3, steps + 1, 3)]
    # The last step after which the frameworks evaluate.
    evaluated = steps - STEPS + SAVED
    logs = [dict(np.load(folder / f"{kind}.{rank}.npz")) for rank in (0, 1)]
    model = f"m-{kind}"
    pushes = [
        (entry.version, logged(logs[0], entry.version.step)) for entry in client.versions(model)
    ]
    assert [version.step for version, _ in pushes] == due
    for step in due:
        assert_same_bits(logged(logs[0], step), logged(logs[1], step))
    moved = next(iter(pushes[0][1]))
    assert not np.array_equal(pushes[0][1][moved], pushes[-1][1][moved])
    newest = replay(pushes, "ema")
    assert_same_bits(newest, client.pull(model, track="ema"))

    until = [push for push in pushes if push[0].step <= evaluated]
    expected = rounded(replay(until, "ema"), kind)
    if framework == "accelerate":
        assert_same_bits(newest, logged(logs[1], "averaged"))
        # The second training has loaded the state that the first one has saved.
        assert_same_bits(logged(logs[1], SAVED), logged(logs[1], f"begin {SAVED}"))
    elif framework == "lightning":
        check_validated(evaluated, expected, logs[1])
        assert_same_bits(newest, logged(logs[1], "copied"))
        # The second fit and the test have resumed from a checkpoint of the first fit.
        assert_same_bits(logged(logs[1], STEPS), logged(logs[1], f"begin {STEPS}"))
        if kind != "lightning_zero3":
            of_first = [push for push in pushes if push[0].step <= STEPS]
            assert_same_bits(replay(of_first, "ema"), logged(logs[1], "tested"))
    else:
        check_saved(folder / kind / f"checkpoint-{SAVED}", SAVED, expected, logs[0])
        # The second training has resumed from it.
        assert_same_bits(logged(logs[1], SAVED), logged(logs[1], f"begin {SAVED}"))


@pytest.mark.timeout(1200)
def test_a_trainer_resumes_on_another_number_of_ranks(server, client, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    kinds = ["hf_fsdp1", "hf_fsdp2"]
    for training, world_size in (("first", 3), ("second", 2)):
        trained = [f"{kind}-{training}" for kind in kinds]
        run_ranks("", world_size, tmp_path, server.url("other"), trained)
    for kind in kinds:
        first, second = (
            dict(np.load(tmp_path / f"{kind}-{training}.0.npz")) for training in ("first", "second")
        )
        assert_same_bits(logged(first, SAVED), logged(second, f"begin {SAVED}"))
        log, model = {**first, **second}, f"other-{kind}"
        pushes = [
            (entry.version, logged(log, entry.version.step)) for entry in client.versions(model)
        ]
        assert [version.step for version, _ in pushes] == [1, 3, 6, 9]
        assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema"))


def check_saved(checkpoint: pathlib.Path, step: int, expected: Weights, log: Weights) -> None:
    """A checkpoint of the Trainer has the average, which from_pretrained reads, and with which the Trainer has evaluated."""
    import transformers

    average, info = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint / "tracks/ema", output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert isinstance(average, transformers.GPT2LMHeadModel)
    saved = {name: value.float() for name, value in average.state_dict().items()}
    assert_same_bits(expected, {name: saved[name] for name in expected})
    state = json.loads((checkpoint / "ema_state.json").read_text())
    assert (state["global_step"], state["average"]["step"]) == (step, step)
    batch = {key: torch.stack([line[key] for line in lines(8)]) for key in lines(1)[0]}

    def loss_of(model: torch.nn.Module) -> float:
        with torch.no_grad():
            return float(model.eval().float()(**batch).loss)

    loss = loss_of(average)
    tolerance = 0.02 if "zero2" in str(checkpoint) else 1e-4
    assert float(log[f"evaluated {step}"]) == pytest.approx(loss, rel=tolerance)
    own = {name: torch.from_numpy(value) for name, value in logged(log, step).items()}
    average.load_state_dict(own, strict=False)  # Tied weights have one name in the log.
    assert loss_of(average) != pytest.approx(loss, rel=2 * tolerance)


def check_validated(step: int, expected: Weights, log: Weights) -> None:
    """Lightning has validated with the average."""

    def score_of(weights: Weights) -> float:
        net = Small()
        net.load_state_dict(
            {name.removeprefix("net."): torch.from_numpy(one) for name, one in weights.items()}
        )
        with torch.no_grad():
            scores = [
                net(batch_of(index, rank)).square().mean() for index in (0, 1) for rank in (0, 1)
            ]
        return float(torch.stack(scores).mean())

    assert_same_bits(expected, logged(log, f"averaged {step}"))
    score = score_of(expected)
    assert float(log["score"]) == pytest.approx(score, rel=1e-4)
    assert score_of(logged(log, step)) != pytest.approx(score, rel=1e-2)
