# SPDX-License-Identifier: Apache-2.0
"""Pulls by the trainer's step: which version it is, and what is said when there is none."""

from __future__ import annotations

import json

import ema_client
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from server_process import ServerProcess
from testing import assert_same_bits, random_weights

TRACKS = {"fast": "20ba", "raw": "copy"}


@pytest.fixture
def push(client, model, rng):
    """Pushes these steps in a run of their own; what "fast" was at each."""
    client.create_model(model, random_weights(rng), tracks=TRACKS)

    def run_of(*steps):
        held = {}
        with client.open_run(model) as run:
            for step in steps:
                run.push(step=step, weights=random_weights(rng))
                held[step] = client.pull(model, track="fast", framework="numpy")
        return held

    return run_of


def by_step(client, model, step, **options):
    return client.pull(model, track="fast", step=step, framework="numpy", **options)


def reason_of(error):
    return error.value.reason, str(error.value)


def test_a_step_is_its_version_in_memory_or_on_the_disk(client, model, push):
    held = push(0, 10, 20)
    client.create_checkpoint(model, version=held[20].version)
    held |= push(*range(30, 100, 10))
    assert by_step(client, model, 90).version == held[90].version
    pullable = [entry.available for entry in client.versions(model)]
    assert pullable[2] and not pullable[3], "out of memory by now, and on the disk or not"
    stored = by_step(client, model, 20)
    assert stored.version == held[20].version
    assert_same_bits(held[20], stored)
    # Not the newest: a step 0 is as good as another.
    with pytest.raises(ema_client.OutOfRangeError) as error:
        by_step(client, model, 0)
    reason, message = reason_of(error)
    assert reason == "VERSION_NOT_KEPT"
    assert f'model "{model}": no version of step 0 is in memory or on the disk' in message
    assert "step 20 (version 3)" in message and "step 90 (version 10)" in message


def test_the_first_version_may_be_of_step_0(client, model, push):
    held = push(0)
    first = by_step(client, model, 0)
    assert first.version == held[0].version
    assert_same_bits(held[0], first)


def test_what_is_no_step_or_no_step_yet_is_refused(client, model, push):
    with pytest.raises(ema_client.FailedPreconditionError) as nothing:
        by_step(client, model, 10)
    assert nothing.value.reason == "NO_VERSION"
    push(10)
    with pytest.raises(ema_client.OutOfRangeError) as early:
        by_step(client, model, 11)
    reason, message = reason_of(early)
    assert reason == "VERSION_NOT_YET"
    assert "step 11 is not committed yet; the newest is step 10 (version 1)" in message
    for wrong, expected in (
        ({"version": 1}, "version: 1 given with step: 10: expected one of these"),
        ({"version": "best"}, 'label: "best" given with step: 10: expected one of these'),
    ):
        with pytest.raises(ema_client.InvalidArgumentError, match=expected):
            by_step(client, model, 10, **wrong)
    with pytest.raises(ema_client.InvalidArgumentError, match="step: -1 given, expected 0 or more"):
        by_step(client, model, -1)


@pytest.mark.one_server("a rollback of a group makes no new version")
def test_after_a_rollback_a_step_is_that_of_todays_training(client, model, push):
    before = push(10, 20, 30, 40)
    for step in (30, 40):
        client.create_checkpoint(model, version=before[step].version)
    restored = client.restore(model, version=before[30].version)
    assert by_step(client, model, 30).version == restored
    assert_same_bits(before[30], by_step(client, model, 30))
    with pytest.raises(ema_client.OutOfRangeError) as error:
        by_step(client, model, 40)
    assert error.value.reason == "VERSION_NOT_YET", "another training was there once"

    after = push(40, 50)
    again = by_step(client, model, 40)
    assert again.version == after[40].version
    assert_same_bits(after[40], again)
    push(*range(60, 90, 10))
    # The old one is on the disk; today's is nowhere any more.
    assert_same_bits(before[40], client.pull(model, track="fast", version=before[40].version))
    with pytest.raises(ema_client.OutOfRangeError) as gone:
        by_step(client, model, 40)
    reason, message = reason_of(gone)
    assert reason == "VERSION_NOT_KEPT"
    assert "step 30 (version 5)" in message and "step 40" not in message.split("there are")[1]
    # What restoring it has made was saved with it.
    assert_same_bits(before[30], by_step(client, model, 30))


def test_everything_that_reads_a_version_takes_a_step(client, server, model, tmp_path):
    module = torch.nn.Linear(3, 2)
    weights = dict(module.named_parameters())
    client.create_model(model, weights, tracks={"ema": "20ba", "raw": "copy"})
    with client.open_run(model) as run:
        for step in (1, 2):
            with torch.no_grad():
                module.weight.fill_(step)
            run.push(step=step, weights=weights)
            if step == 1:
                client.create_checkpoint(model)
        for step in (3, 4, 5, 6):
            with torch.no_grad():
                module.weight.fill_(step)
            run.push(step=step, weights=weights)
    url = f"ema://{server.address}/{model}"
    with ema_client.averaged(module, url, track="raw", step=1) as version:
        assert version.step == 1 and module.weight[0, 0] == 1
    assert module.weight[0, 0] == 6
    empty = torch.nn.Linear(3, 2)
    loaded = ema_client.load_into(empty, url, track="raw", step=1)
    assert loaded.version.step == 1 and empty.weight[0, 0] == 1
    assert ema_client.pull(url, track="raw", step=1)["weight"][0, 0] == 1
    out = {name: torch.empty_like(value) for name, value in weights.items()}
    assert client.pull(model, track="raw", step=1, out=out).version.step == 1
    assert out["weight"][0, 0] == 1
    stacked = client.pull_stacked(model, tracks=["raw", "ema"], step=1)
    assert stacked.version.step == 1 and stacked["weight"].shape == (2, 2, 3)
    assert client.save(model, tmp_path / "one.safetensors", track="raw", step=1).step == 1
    assert load_file(tmp_path / "one.safetensors")["weight"][0, 0] == 1
    refreshed = client.pull(model, track="raw", step=1)
    assert client.refresh(refreshed) and refreshed["weight"][0, 0] == 6


def test_an_average_that_was_built_for_a_step_is_of_that_one(client, model, rng):
    track = ema_client.Track(sigma_rel=0.1, update_interval="1ba", snapshot_interval="1ba")
    client.create_model(model, random_weights(rng), tracks={"wide": track})
    with client.open_run(model) as run:
        for step in range(1, 9):
            version = run.push(step=step, weights=random_weights(rng))
            client.create_checkpoint(model, version=version)
    client.synthesize(model, result="narrow", sigma_rel=0.08, step=6)
    assert client.pull(model, track="narrow", step=6).version.step == 6
    with pytest.raises(ema_client.OutOfRangeError) as error:
        client.pull(model, track="narrow", step=8)
    reason, message = reason_of(error)
    assert reason == "VERSION_NOT_KEPT"
    assert 'step: 8 given, but "narrow" has been built for step 6' in message


def test_emactl_pulls_a_step(emactl, client, model, push, tmp_path):
    held = push(0, 10)
    path = tmp_path / "out.safetensors"
    pull = ["pull", model, "--track", "fast", "-o", path]
    result = emactl("--json", *pull, "--step", 10)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["version"]["step"] == 10
    assert_same_bits(held[10], load_file(path))
    early = emactl("--json", *pull, "--step", 99)
    assert early.returncode == 3
    assert json.loads(early.stderr)["error"]["reason"] == "VERSION_NOT_YET"
    assert emactl(*pull, "--step", 10, "--version", 2).returncode == 2
    assert emactl(*pull, "--step", -1).returncode == 2


def test_a_version_that_is_gone_is_refused_with_those_in_memory(model, tmp_path):
    """The server lists them itself if it has a data directory."""
    weights = {"w": np.ones(3, np.float32)}
    with ServerProcess(tmp_path) as server, ema_client.Client(server.address) as client:
        client.create_model(model, weights, tracks={"ema": "4ba"})
        with client.open_run(model) as run:
            gone = run.push(step=1, weights=weights)
            for step in range(2, 9):
                run.push(step=step, weights=weights)
        for call in (
            lambda: client.pull(model, version=1),
            lambda: client.pull(model, version=gone),
            lambda: client.statistics(model, version=1),
        ):
            with pytest.raises(ema_client.OutOfRangeError, match="; versions in memory: 6, 7, 8 "):
                call()
