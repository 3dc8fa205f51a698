# SPDX-License-Identifier: Apache-2.0
"""Checkpoints, labels, scores and rollback, by the Python client and emactl."""

from __future__ import annotations

import json
import time

import ema_client
import numpy as np
import pytest
from safetensors.numpy import load_file
from server_process import ServerProcess
from testing import assert_same_bits, random_weights, wait_for

TRACKS = {"fast": "20ba", "raw": "copy"}


@pytest.fixture
def versions(client, model, rng):
    """Versions 1 to 6 of a model, and what their tracks hold."""
    client.create_model(model, random_weights(rng), tracks=TRACKS)
    pushed = []
    with client.open_run(model) as run:
        for step in range(10, 70, 10):
            version = run.push(step=step, weights=random_weights(rng))
            pushed.append((version, pull_all(client, model)))
    return pushed


def pull_all(client, model, version=0):
    return {
        track: client.pull(model, track=track, version=version, framework="numpy")
        for track in TRACKS
    }


def assert_same_tracks(expected, got):
    for track in TRACKS:
        assert_same_bits(expected[track], got[track])


def test_what_was_saved_is_listed_shown_and_deleted(client, model, rng, versions):
    first = client.create_checkpoint(model)
    assert (first.version, first.state) == (versions[-1][0], "complete")
    again = client.create_checkpoint(model, version=first.version)
    assert again.name == first.name, "it is there already"
    with client.open_run(model) as run:
        run.push(step=100, weights=random_weights(rng))
    second = client.create_checkpoint(model, label="stable")

    listed = client.checkpoints(model)
    assert [c.name for c in listed] == [second.name, first.name]
    assert client.checkpoint(model, second.name) == listed[0]
    newest = listed[0]
    assert (newest.number, newest.step) == (7, 100)
    assert newest.incarnation == second.version.incarnation
    assert (newest.state, newest.is_partial, newest.problem) == ("complete", False, "")
    assert sorted(newest.tracks) == sorted(TRACKS)
    assert newest.labels == ("stable",)
    assert newest.total_bytes == second.total_bytes > 0
    assert abs(newest.commit_time - time.time()) < 300

    with pytest.raises(ema_client.FailedPreconditionError) as error:
        client.delete_checkpoint(model, second.name)
    assert error.value.reason == "CHECKPOINT_IN_USE"
    client.delete_checkpoint(model, first.name)
    client.delete_checkpoint(model, first.name)
    assert [c.name for c in client.checkpoints(model)] == [second.name]
    with pytest.raises(ema_client.NotFoundError) as missing:
        client.checkpoint(model, first.name)
    assert missing.value.reason == "CHECKPOINT_NOT_FOUND"


def test_a_save_without_waiting_tells_when_it_is_done(client, model, versions):
    saving = client.create_checkpoint(model, wait=False)
    assert saving.version == versions[-1][0]
    wait_for(lambda: client.checkpoint(model, saving.name).state != "saving", "the save has ended")
    assert client.checkpoint(model, saving.name).state == "complete"


def test_a_part_of_the_tracks(client, model, versions):
    saved = client.create_checkpoint(model, tracks=["fast"])
    info = client.checkpoint(model, saved.name)
    assert (info.tracks, info.is_partial) == (("fast",), True)
    with pytest.raises(ema_client.NotFoundError) as error:
        client.create_checkpoint(model, tracks=["nothing"])
    assert error.value.reason == "TRACK_NOT_FOUND"


def test_a_part_is_read_when_it_has_left_memory(client, model, rng, versions):
    version, held = versions[-1]
    client.create_checkpoint(model, version=version, tracks=["fast"])
    with client.open_run(model) as run:
        for step in range(100, 200, 10):
            run.push(step=step, weights=random_weights(rng))
    for named in ({"version": version}, {"version": version.number}, {"step": version.step}):
        got = client.pull(model, track="fast", framework="numpy", **named)
        assert got.version == version
        assert_same_bits(held["fast"], got)
        with pytest.raises(ema_client.OutOfRangeError, match="saved only with .*: fast") as error:
            client.pull(model, track="raw", **named)
        assert error.value.reason == "VERSION_NOT_KEPT"
    # Whoever reads a label's version, or goes back to it, may want any track.
    for call in (
        lambda: client.set_label(model, "stable", version=version),
        lambda: client.report_metric(model, version, 0.5),
        lambda: client.restore(model, version=version),
    ):
        with pytest.raises(ema_client.FailedPreconditionError, match="some tracks") as refused:
            call()
        assert refused.value.reason == "PARTIAL_CHECKPOINT"
    assert not client.versions(model)[version.number - 1].available, "not all of it"


def test_labels_move_and_go(client, model, rng, versions):
    label = client.set_label(model, "stable")
    assert (label.number, label.step, label.metric) == (6, 60, None)
    assert client.labels(model) == {"stable": label}
    with client.open_run(model) as run:
        version = run.push(step=100, weights=random_weights(rng))
    assert client.set_label(model, "stable", version=version).number == 7
    assert client.set_label(model, "other", version=7).number == 7
    client.remove_label(model, "stable")
    client.remove_label(model, "stable")
    assert list(client.labels(model)) == ["other"]


def test_a_pull_by_label_reads_what_is_only_on_the_disk(client, model, rng, versions):
    version, held = versions[-1]
    client.set_label(model, "stable")
    with client.open_run(model) as run:
        for step in range(100, 200, 10):
            run.push(step=step, weights=random_weights(rng))
    pullable = [entry.available for entry in client.versions(model)]
    assert pullable[5] and not pullable[4], "out of memory by now, and on the disk or not"
    for named in ("stable", version, version.number):
        got = pull_all(client, model, named)
        assert_same_tracks(held, got)
        assert got["raw"].version == version
    with pytest.raises(ema_client.NotFoundError) as error:
        client.pull(model, track="raw", version="nothing")
    assert error.value.reason == "LABEL_NOT_FOUND"


def test_the_best_score_has_the_label(client, model, rng, versions):
    client.create_model(f"{model}-2", {"w": np.ones(3, np.float32)}, tracks=TRACKS)
    moved = []
    with client.open_run(f"{model}-2") as run:
        for step, loss in enumerate([3.0, 2.0, 2.5, 2.0, 1.0], 1):
            version = run.push(step=step, weights={"w": np.full(3, step, np.float32)})
            result = client.report_metric(f"{model}-2", version, loss, lower_is_better=True)
            moved.append(result.moved)
    assert moved == [True, True, False, False, True]
    best = client.labels(f"{model}-2")["best"]
    assert (best.number, best.metric, best.lower_is_better) == (5, 1.0, True)
    pulled = client.pull(f"{model}-2", track="raw", version="best", framework="numpy")
    assert pulled["w"][0] == 5
    with pytest.raises(ema_client.InvalidArgumentError):
        client.report_metric(f"{model}-2", version, 0.5)
    with pytest.raises(ema_client.InvalidArgumentError):
        client.report_metric(f"{model}-2", version, float("nan"), lower_is_better=True)


@pytest.mark.one_server("a rollback of a group makes no new version")
@pytest.mark.parametrize("to", ["number", "record", "label"])
def test_restore_makes_a_new_version_of_an_old_one(client, model, rng, versions, to):
    version, held = versions[-1]
    client.set_label(model, "good")
    with client.open_run(model) as run:
        for step in range(100, 200, 10):
            last = run.push(step=step, weights=random_weights(rng))
        where = {
            "number": {"version": version.number},
            "record": {"version": version},
            "label": {"label": "good"},
        }[to]
        restored = client.restore(model, **where)
        assert restored.restored_from == (version.number, version.incarnation)
        assert restored.step == version.step
        assert (restored.incarnation, restored.number) > (last.incarnation, last.number)
        assert client.model(model).latest == restored
        assert_same_tracks(held, pull_all(client, model))
        with pytest.raises(ema_client.AbortedError) as error:
            run.push(step=300, weights=random_weights(rng))
        assert error.value.reason == "FENCED"
    with client.open_run(model) as run:
        assert run.push(step=61, weights=random_weights(rng)).number == restored.number + 1


def test_restore_refuses_what_it_cannot_do(client, model, versions):
    with pytest.raises(ema_client.InvalidArgumentError, match="give either version or label"):
        client.restore(model)
    with pytest.raises(ema_client.InvalidArgumentError, match="give either version or label"):
        client.restore(model, version=1, label="best")
    with pytest.raises(ema_client.OutOfRangeError) as kept:
        client.restore(model, version=99)
    assert kept.value.reason in ("VERSION_NOT_KEPT", "VERSION_NOT_YET")
    with pytest.raises(ema_client.NotFoundError) as label:
        client.restore(model, label="nothing")
    assert label.value.reason == "LABEL_NOT_FOUND"


@pytest.mark.one_server("a rollback of a group makes no new version")
def test_open_run_resumes_at_a_step_or_says_what_there_is(client, model, rng, versions):
    client.create_checkpoint(model, label="resume-60")
    with client.open_run(model) as run:
        run.push(step=70, weights=random_weights(rng))
    with client.open_run(model, resume=60) as run:
        latest = run.latest
        assert latest is not None and latest.restored_from is not None
        assert (latest.step, latest.restored_from[0]) == (60, 6)
        assert_same_tracks(versions[-1][1], pull_all(client, model))
    before = client.model(model)
    with pytest.raises(ema_client.FailedPreconditionError) as error:
        client.open_run(model, resume=33)
    assert error.value.reason == "RESUME_MISMATCH"
    assert "60" in str(error.value)
    assert client.model(model) == before
    point = ema_client.ResumePoint(65, (latest.number, latest.incarnation))
    with client.open_run(model, resume=point) as run:
        assert run.latest == latest


def test_labels_and_checkpoints_outlive_a_restart(tmp_path, model, rng):
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, random_weights(rng), tracks=TRACKS)
            with client.open_run(model) as run:
                for step in (1, 2, 3):
                    version = run.push(step=step, weights=random_weights(rng))
                    client.report_metric(model, version, -step)
            held = pull_all(client, model, "best")
            before = client.checkpoints(model), client.labels(model)
        server.kill()
        server.start()
        with ema_client.Client(server.address) as client:
            assert client.labels(model) == before[1]
            assert {c.name for c in before[0]} == {c.name for c in client.checkpoints(model)}
            assert_same_tracks(held, pull_all(client, model, "best"))
            assert not client.report_metric(model, held["raw"].version, -5).moved
        assert server.stop() == 0


def json_of(result):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_emactl_does_all_of_it(emactl, client, model, rng, versions, tmp_path):
    version, held = versions[-1]
    saved = json_of(emactl("--json", "checkpoint", "create", model, "--label", "stable"))
    assert (saved["state"], saved["version"]["version"]) == ("complete", 6)
    shown = json_of(emactl("--json", "checkpoint", "show", model, saved["checkpoint"]))
    assert (shown["labels"], shown["step"]) == (["stable"], 60)
    assert saved["checkpoint"] in emactl("checkpoint", "list", model).stdout
    assert "stable" in emactl("label", "list", model).stdout
    assert emactl("checkpoint", "delete", model, saved["checkpoint"]).returncode == 4

    scored = json_of(
        emactl("--json", "metric", model, "--version", "6", "--value", "0.5", "--lower-is-better")
    )
    assert (scored["moved"], scored["label"]["label"], scored["label"]["metric"]) == (
        True,
        "best",
        0.5,
    )
    assert emactl("label", "set", model, "mine", "--version", "6").returncode == 0
    assert emactl("label", "remove", model, "mine").returncode == 0
    labels = json_of(emactl("--json", "label", "list", model))["labels"]
    assert [label["label"] for label in labels] == ["best", "stable"]

    with client.open_run(model) as run:
        for step in range(100, 200, 10):
            run.push(step=step, weights=random_weights(rng))
    out = tmp_path / "out.safetensors"
    for named in ("stable", "6"):
        result = emactl("pull", model, "--track", "fast", "--version", named, "-o", out)
        assert result.returncode == 0, result.stderr
        assert_same_bits(held["fast"], load_file(out))
    assert emactl("pull", model, "--track", "fast", "--version", "0", "-o", out).returncode == 2
    assert emactl("pull", model, "--track", "fast", "--version", "none", "-o", out).returncode == 3


@pytest.mark.one_server("a rollback of a group makes no new version")
def test_emactl_rolls_back(emactl, client, model, rng, versions):
    version, held = versions[-1]
    client.create_checkpoint(model, label="stable")
    with client.open_run(model) as run:
        run.push(step=70, weights=random_weights(rng))
    assert emactl("rollback", model, "--to", "stable").returncode == 2, "it wants --yes"
    back = json_of(emactl("--json", "rollback", model, "--to", "stable", "--yes"))
    assert back["restored_from"] == {"version": 6, "incarnation": version.incarnation}
    assert_same_tracks(held, pull_all(client, model))
    assert emactl("rollback", model, "--to", "nothing", "--yes").returncode == 3
