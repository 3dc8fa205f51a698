# SPDX-License-Identifier: Apache-2.0
"""ema_client.composer.EMA beside Composer's own, each in a composer.Trainer of Composer's environment."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
import torch
from server_process import ROOT, ServerProcess
from testing import SUPPORT, assert_same_bits, beside_python, started

# Importing Composer takes long where much else runs.
pytestmark = [pytest.mark.framework, pytest.mark.timeout(300)]

# Batches an epoch as in composer_training.py.
BATCHES, EPOCHS = 6, 4

Result = dict[str, Any]
Train = Callable[..., Result]


def environment() -> dict[str, str]:
    # Also a package that is not installed where Composer is.
    path = [
        str(pathlib.Path(ema_client.__file__).parents[1]),
        *os.environ.get("PYTHONPATH", "").split(":"),
    ]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, path)), "PYTHONWARNINGS": "ignore"}


@contextlib.contextmanager
def start_training(**variables: object) -> Iterator[subprocess.Popen[str]]:
    """composer_training.py, for jobs."""
    with started(
        [beside_python("composer"), SUPPORT / "composer_training.py"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**environment(), **{name: str(value) for name, value in variables.items()}},
    ) as [process]:
        yield process


@pytest.fixture(scope="module")
def process() -> Iterator[subprocess.Popen[str]]:
    with start_training() as trainings:
        yield trainings
        trainings.communicate(timeout=60)
        assert trainings.returncode == 0


@pytest.fixture
def train(process: subprocess.Popen[str], tmp_path: pathlib.Path) -> Train:
    """Trains by Composer; see composer_training.py."""

    def run(kind: str, **job: Any) -> Result:
        assert process.stdin is not None and process.stdout is not None
        out = tmp_path / "out.pt"
        process.stdin.write(json.dumps({"kind": kind, "out": str(out), **job}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"
        result: Result = torch.load(out)
        return result

    return run


class Counted(torch.nn.Module):
    """Holds the weights of a step for a LocalEMA."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in weights.items():
            self.register_buffer(name.replace(".", "_"), value.clone())

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        for name, value in weights.items():
            getattr(self, name.replace(".", "_")).copy_(value)


def averages(
    trained: dict[int, dict[str, torch.Tensor]], options: dict[str, Any]
) -> tuple[dict[int, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """What LocalEMA makes of a training's weights: at the end of each batch, and in the end."""
    holder = Counted(trained[1])
    local = ema_client.LocalEMA(holder, preset={"preset": "composer", **options})
    by_epoch = options["half_life"] is not None and options["half_life"].endswith("ep")
    values: dict[str, torch.Tensor] = {}
    result: dict[int, dict[str, torch.Tensor]] = {}
    for batch, weights in trained.items():
        result[batch] = values
        if not by_epoch or batch % BATCHES == 0:
            holder.set(weights)
            # Composer knows the progress of a training of so many epochs at their ends only.
            progress = (batch - 1) // BATCHES / EPOCHS
            local.update({"batch": batch, "epoch": batch // BATCHES, "progress": progress})
            averaged = local.weights()
            values = {name: averaged[name.replace(".", "_")] for name in weights}
        if not by_epoch:
            result[batch] = values
    return result, values


def largest_ulps(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """How far floats are apart, in ulp of the tensor's largest."""
    return max(
        float((value - theirs[name]).abs().max()) / float(np.spacing(value.abs().max().numpy()))
        for name, value in ours.items()
        if value.is_floating_point()
    )


CASES = {
    "every-batch": ({"half_life": "4ba"}, 1),
    "interval": ({"half_life": "4ba", "update_interval": "3ba"}, 1),
    "smoothing": ({"half_life": None, "smoothing": 0.8, "update_interval": "2ba"}, 1),
    "start": ({"half_life": "4ba", "update_interval": "3ba", "ema_start": "5ba"}, 5),
    "duration": ({"half_life": "4ba", "ema_start": "0.5dur"}, 13),
    "epochs": ({"half_life": "1ep"}, 7),
}


@pytest.mark.parametrize("options, first", CASES.values(), ids=CASES.keys())
def test_evaluates_with_the_average(server, client, model, train, options, first):
    """Bit for bit LocalEMA's, at each evaluation; Composer's as near as its roundings, one more an update."""
    job = {"eval_interval": "2ba", "max_duration": f"{EPOCHS}ep"}
    theirs = train("theirs", options=options, **job)
    ours = train("ours", options={"url": server.url(model), **options}, **job)
    assert "error" not in ours, ours["error"]
    assert ours["stats"]["skipped"] == 0
    batches = range(1, BATCHES * EPOCHS + 1)
    assert list(ours["trained"]) == list(batches)
    for batch, weights in ours["trained"].items():
        assert_same_bits(theirs["trained"][batch], weights)
    expected, last = averages(ours["trained"], options)
    assert [batch for batch, _ in ours["evaluated"]] == list(batches[1::2])
    for (batch, weights), (_, their_weights) in zip(ours["evaluated"], theirs["evaluated"]):
        if batch < first:
            assert_same_bits(ours["trained"][batch], weights)
        else:
            assert_same_bits(expected[batch], weights)
        assert largest_ulps(weights, their_weights) <= len(batches)
    assert_same_bits(last, client.pull(model, track="ema"))


def test_two_ranks_evaluate_the_same(server, client, model, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with contextlib.ExitStack() as stack:
        ranks = []
        for rank in range(2):
            job = {
                "kind": "ours",
                "options": {"url": server.url(model), "half_life": "4ba", "update_interval": "2ba"},
                "eval_interval": "3ba",
                "out": str(tmp_path / f"{rank}.pt"),
            }
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
            variables |= {"NODE_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(stack.enter_context(start_training(**variables)))
            ranks[-1].stdin.write(json.dumps(job) + "\n")
            ranks[-1].stdin.flush()
        for process in ranks:
            process.communicate(timeout=100)
            assert process.returncode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert "error" not in first, first["error"]
    assert first["stats"]["skipped"] == second["stats"]["skipped"] == 0
    options = {"half_life": "4ba", "update_interval": "2ba"}
    # Statistics are rank 0's.
    expected, _ = averages(first["trained"], options)
    assert [batch for batch, _ in first["evaluated"]] == [3, 6]
    for (batch, weights), (_, others) in zip(first["evaluated"], second["evaluated"], strict=True):
        assert_same_bits(expected[batch], weights)
        assert_same_bits(weights, others)


def test_other_tracks_and_options(server, client, model, train):
    ours = train(
        "ours",
        options={
            "url": server.url(model),
            "half_life": "4ba",
            "tracks": {"raw": "copy", "slow": "3ep"},
            "wire_dtype": "bfloat16",
        },
    )
    assert "error" not in ours, ours["error"]
    info = client.model(model)
    assert set(info.tracks) == {"ema", "raw", "slow"}
    assert info.latest.wire_dtype == "bfloat16"
    assert info.latest.time.sample == 12 * 8
    assert (info.latest.time.progress, info.latest.time.epoch) == (0.5, 1)


@pytest.mark.parametrize("closes", [False, True], ids=["open", "closed"])
def test_evaluation_after_training_and_a_second_fit(server, client, model, train, closes):
    options = {"url": server.url(model), "half_life": "4ba"}
    close = ["close"] * closes
    ours = train("ours", options=options, calls=["fit", *close, "eval", "fit again", "eval"])
    assert "error" not in ours, ours["error"]
    assert ours["stats"] == {**ours["stats"], "pushes": 3 if closes else 15, "skipped": 0}
    assert client.model(model).latest.number == 15
    expected, _ = averages(ours["trained"], {"half_life": "4ba"})
    assert [batch for batch, _ in ours["evaluated"]] == [12, 15]
    for batch, weights in ours["evaluated"]:
        assert_same_bits(expected[batch], weights)


def test_a_checkpoint_brings_the_average_back(server, client, model, train, tmp_path):
    options = {"url": server.url(model), "half_life": "4ba", "update_interval": "4ba"}
    # Twelve batches; then from the checkpoint of the sixth again.
    first = train("ours", options=options, save_folder=str(tmp_path))
    assert "error" not in first, first["error"]
    average = {name: value.clone() for name, value in client.pull(model, track="ema").items()}
    path = tmp_path / "ep1-ba6-rank0.pt"
    saved = torch.load(path, weights_only=False)["state"]
    # As Composer: the averaged weights in the model, the training weights in the algorithm.
    ((name, state),) = saved["algorithms"]
    by_epoch = averages(first["trained"], {"half_life": "4ba", "update_interval": "4ba"})[0]
    assert_same_bits(by_epoch[6], saved["model"])
    own = {
        **state["ema_model"]["named_parameters_dict"],
        **state["ema_model"]["named_buffers_dict"],
    }
    offset = {"offset": torch.arange(3.0)}  # Not in the state_dict; Composer's has all buffers.
    assert_same_bits({**first["trained"][6], **offset}, own)
    assert state["ema_weights_active"]
    assert (name, state["average"]["step"]) == ("EMA", 6)
    steps = {entry.version.number: entry.version.step for entry in client.versions(model)}
    assert steps[state["average"]["version"]] == 4

    second = train(
        "ours",
        options=options,
        load_path=str(path),
        calls=["eval", "fit"],
        save_folder=str(tmp_path / "again"),
    )
    assert "error" not in second, second["error"]
    assert list(second["trained"]) == list(range(7, 13))
    assert_same_bits(first["trained"][12], second["trained"][12])
    # Evaluated with the average of the checkpoint before any training.
    ((_, evaluated),) = second["evaluated"]
    expected, _ = averages(first["trained"], {"half_life": "4ba", "update_interval": "4ba"})
    assert_same_bits(expected[6], evaluated)
    assert_same_bits(average, client.pull(model, track="ema"))


@pytest.mark.parametrize(
    "case", ["as theirs", "before ema_start", "save_average=False", "no server"]
)
def test_a_checkpoint_has_the_weights_that_composers_has(model, train, tmp_path, case):
    """Composer's own EMA, too, continues from such a checkpoint."""
    options = {"half_life": "4ba", "ema_start": "9ba" if case == "before ema_start" else "2ba"}
    folders = {kind: tmp_path / kind for kind in ("theirs", "ours")}
    job = {"save_interval": "3ba"}
    theirs = train("theirs", options=options, save_folder=str(folders["theirs"]), **job)
    with ServerProcess(tmp_path / "server", data_dir=tmp_path / "data") as server:
        ours = train(
            "ours",
            options={
                "url": server.url(model),
                **options,
                **({"save_average": False} if case == "save_average=False" else {}),
                "max_wait_s": 2,
            },
            save_folder=str(folders["ours"]),
            **({"kills": [5, server.pid]} if case == "no server" else {}),
            **job,
        )
        server.kill()
    assert "error" not in ours, ours["error"]
    # After the training, the trainer's model has its own weights.
    assert_same_bits(ours["trained"][12], ours["model"])
    saved = {
        kind: (
            torch.load(folder / "ep0-ba6-rank0.pt", weights_only=False)["state"]
            if (folder / "ep0-ba6-rank0.pt").exists()
            else torch.load(folder / "ep1-ba6-rank0.pt", weights_only=False)["state"]
        )
        for kind, folder in folders.items()
    }
    (_, state), (_, their_state) = (saved[kind]["algorithms"][0] for kind in ("ours", "theirs"))
    if case != "as theirs":
        assert_same_bits(ours["trained"][6], saved["ours"]["model"])
        assert not state["ema_weights_active"] and "ema_model" not in state
    if case in ("as theirs", "before ema_start"):
        assert largest_ulps(saved["ours"]["model"], saved["theirs"]["model"]) <= 6
        assert state["ema_weights_active"] == their_state["ema_weights_active"]
        assert state["ema_started"] == their_state["ema_started"]
    if case != "as theirs":
        return
    for part in ("named_parameters_dict", "named_buffers_dict"):
        own = {name: state["ema_model"][part][name] for name in their_state["ema_model"][part]}
        assert_same_bits(their_state["ema_model"][part], own)
    (path,) = folders["ours"].glob("ep*-ba6-rank0.pt")
    resumed = train("theirs", options=options, load_path=str(path))
    assert "error" not in resumed, resumed["error"]
    assert_same_bits(theirs["trained"][12], resumed["trained"][12])


def test_models_with_the_average(server, client, model, train):
    options = {"url": server.url(model), "half_life": "4ba"}
    before = train("ours", options=options, calls=["models"])
    assert "error" not in before, before["error"]
    # Not in the state_dict, so not averaged; Composer's class has all buffers.
    offset = {"offset": torch.arange(3.0)}
    for tensors in before["models"].values():  # The trainer's own.
        assert_same_bits({n: {**before["model"], **offset}[n] for n in tensors}, tensors)
    ours = train("ours", options=options, calls=["fit", "models"])
    assert "error" not in ours, ours["error"]
    expected = {**averages(ours["trained"], {"half_life": "4ba"})[1], **offset}
    assert_same_bits(expected, ours["models"]["ema"])
    assert set(expected) - set(ours["models"]["of"]) == {"scale"}  # Frozen, as with Composer.
    assert_same_bits({n: expected[n] for n in ours["models"]["of"]}, ours["models"]["of"])


def test_the_training_weights_during_an_evaluation(server, model, train):
    job = {"eval_interval": "4ba", "reads_training_weights": True}
    options = {"half_life": "4ba", "ema_start": "5ba"}
    theirs = train("theirs", options=options, **job)
    ours = train("ours", options={"url": server.url(model), **options}, **job)
    assert "error" not in ours, ours["error"]
    assert [batch for batch, _ in ours["training_models"]] == [8, 12]
    for (batch, weights), (_, their_weights) in zip(
        ours["training_models"], theirs["training_models"], strict=True
    ):
        assert_same_bits(ours["trained"][batch], weights)
        assert_same_bits(their_weights, weights)


def test_a_start_that_was_not_pushed_comes_with_the_next_push(server, client, model, train):
    options = {"half_life": "4ba", "update_interval": "3ba", "ema_start": "5ba"}
    ours = train(
        "ours",
        options={"url": server.url(model), **options},
        eval_interval="1ba",
        max_duration="1ep",
        spoils=5,
    )
    assert "error" not in ours, ours["error"]
    assert ours["stats"]["skipped"] == 1
    assert [entry.version.step for entry in client.versions(model)] == [1, 6]
    for batch, weights in ours["evaluated"]:
        assert_same_bits(ours["trained"][batch], weights)


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_goes_on_without_memory_for_the_swap(server, model, train, on_error):
    options = {"url": server.url(model), "half_life": "4ba", "on_error": on_error}
    ours = train("ours", options=options, eval_interval="4ba", starves=True)
    if on_error == "raise":
        assert "InternalError: OutOfMemoryError: no memory" in ours["error"]
        return
    assert "error" not in ours, ours["error"]
    assert ours["stats"]["skipped"] == 0 and len(ours["evaluated"]) >= 3
    for batch, weights in ours["evaluated"]:
        assert_same_bits(weights, ours["trained"][batch])


def test_goes_on_without_the_server(model, train, tmp_path):
    with ServerProcess(tmp_path) as server:
        ours = train(
            "ours",
            options={"url": server.url(model), "half_life": "4ba", "max_wait_s": 2},
            eval_interval="4ba",
            kills=[5, server.pid],
        )
        server.kill()
    assert "error" not in ours, ours["error"]
    assert list(ours["trained"]) == list(range(1, 13))
    assert ours["stats"]["skipped"] >= 6
    averaged, *own = [
        not torch.equal(weights["net.0.weight"], ours["trained"][batch]["net.0.weight"])
        for batch, weights in ours["evaluated"]
    ]
    assert averaged and not any(own)


@pytest.mark.parametrize("mode", ["disabled", "local"])
def test_trains_without_a_server_where_EMA_MODE_says_so(tmp_path, mode):
    job = {
        "kind": "ours",
        "options": {"url": "ema://127.0.0.1:1/m", "half_life": "4ba", "on_error": "raise"},
        "eval_interval": "3ba",
        "calls": ["fit", "models"],
        "save_folder": str(tmp_path / "saved"),
        "out": str(tmp_path / "out.pt"),
    }
    with start_training(EMA_MODE=mode) as process:
        process.communicate(json.dumps(job) + "\n", timeout=250)
        assert process.returncode == 0
    ours = torch.load(tmp_path / "out.pt")
    assert "error" not in ours, ours["error"]
    name, is_disabled = "net.0.weight", mode == "disabled"
    assert [batch for batch, _ in ours["evaluated"]] == [3, 6, 9, 12]
    for batch, weights in ours["evaluated"]:
        assert torch.equal(weights[name], ours["trained"][batch][name]) == is_disabled
    saved = torch.load(tmp_path / "saved/ep1-ba6-rank0.pt", weights_only=False)["state"]["model"]
    assert torch.equal(saved[name], ours["trained"][6][name]) == is_disabled
    assert torch.equal(ours["models"]["ema"][name], ours["model"][name]) == is_disabled


@pytest.mark.parametrize("other", ["SWA", "EMA"])
def test_other_averages_are_refused(server, model, train, other):
    ours = train("ours", options={"url": server.url(model)}, others=[other])
    assert f"cannot be combined with {other}" in ours["error"]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"smoothing": 0.9, "half_life": "4ba"}, "InvalidArgumentError.*are both given"),
        ({"half_life": "4sp"}, "InvalidArgumentError.*half_life '4sp'"),
        ({"start_step": 3}, 'TypeError.*"start_step"'),
        ({"decay": 0.9}, 'TypeError.*"decay"'),
        ({"preset_arguments": {}}, 'TypeError.*"preset_arguments"'),
        ({"on_error": "retry"}, "InvalidArgumentError.*on_error 'retry'"),
        ({"max_wait_s": "3"}, "InvalidArgumentError.*max_wait_s '3'"),
        ({"tracks": {"slow": "3"}}, "InvalidArgumentError.*slow"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_refused_at_once(server, model, train, options, message):
    ours = train("ours", options={"url": server.url(model), **options}, calls=[])
    assert re.search(message, ours["error"]), ours["error"]


def test_composers_own_checkpoint_is_refused(server, model, train, tmp_path):
    theirs = train("theirs", options={"half_life": "4ba"}, save_folder=str(tmp_path))
    assert "error" not in theirs, theirs["error"]
    ours = train(
        "ours", options={"url": server.url(model)}, load_path=str(tmp_path / "ep1-ba6-rank0.pt")
    )
    assert "the checkpoint is of Composer's own EMA" in ours["error"]


def test_a_model_that_is_further_is_refused(server, client, model, train):
    options = {"url": server.url(model), "half_life": "4ba"}
    train("ours", options=options)
    again = train("ours", options={**options, "existing": "continue"})
    assert "has step 12 already, and the trainer is at batch 0" in again["error"]


def test_an_existing_average_is_refused_or_replaced(server, client, model, train):
    options = {"url": server.url(model), "half_life": "4ba"}
    train("ours", options=options)
    again = train("ours", options=options)
    assert f'model "{model}" has the average of an earlier training, at step 12' in again["error"]
    new = train("ours", options={**options, "existing": "new"}, max_duration="1ep")
    assert "error" not in new, new["error"]
    assert client.model(model).latest.number == 6


def test_nothing_is_imported_before_it_is_asked_for():
    program = "import sys, ema_client; sys.exit('composer' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_the_example(server, model):
    result = subprocess.run(
        [beside_python("composer"), ROOT / "deploy/examples/composer_train.py", server.url(model)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout.splitlines()[-1].removeprefix("averaged: ")) < 1, result.stdout
