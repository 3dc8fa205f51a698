# SPDX-License-Identifier: Apache-2.0
"""Trainers that go on from checkpoints of their own."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time

import ema_client
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from resuming_trainer import TRACKS
from server_process import ServerProcess
from testing import SUPPORT, assert_same_bits, exit_codes, started

STEPS = 60


class Trainer:
    """A small model and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.1)

    def step(self, count=1) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.module(torch.ones(2, 4)).square().sum().backward()
            self.optimizer.step()

    def attach(self, server, model, **options):
        options.setdefault("half_life", "4ba")
        return ema_client.attach(self.module, self.optimizer, server.url(model), **options)


@pytest.fixture
def trainer():
    return Trainer()


def run_trainer(server, model, folder, *, ranks=1, save_every=11, until=None):
    """Runs it to its end, or kills all ranks after step `until`. The exit codes."""
    folder.mkdir(exist_ok=True)
    init_file = folder / "init"
    init_file.unlink(missing_ok=True)
    commands = [
        [
            *[sys.executable, SUPPORT / "resuming_trainer.py", server.url(model)],
            *[folder / f"{rank}.pt", STEPS, save_every],
            *([rank, ranks, init_file] if ranks > 1 else []),
        ]
        for rank in range(ranks)
    ]
    with started(*commands, stdout=subprocess.PIPE, text=True) as processes:
        assert processes[0].stdout is not None
        for line in processes[0].stdout:
            if int(line) == until:
                for process in processes:
                    process.kill()
        return exit_codes(processes, 60)


def tracks_of(client, model):
    return {track: client.pull(model, track=track, framework="numpy") for track in TRACKS}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "killed, ranks", [("trainer", 1), ("trainer and server", 1), ("trainer and server", 2)]
)
def test_killed_and_resumed_is_bit_for_bit_as_never_killed(tmp_path, model, killed, ranks):
    with (
        ServerProcess(tmp_path, data_dir=tmp_path / "data") as server,
        ema_client.Client(server.address) as client,
    ):
        never = f"{model}-never"
        codes = run_trainer(server, never, tmp_path / "never", ranks=ranks, save_every=STEPS + 1)
        assert codes == [0] * ranks
        expected = tracks_of(client, never)
        # Twice, at odd places: after steps that no checkpoint of the trainer has.
        for until in (25, 47):
            codes = run_trainer(server, model, tmp_path / "killed", ranks=ranks, until=until)
            assert codes == [-signal.SIGKILL] * ranks
            if killed != "trainer":
                server.kill()
                server.start(port=server.port)
        assert run_trainer(server, model, tmp_path / "killed", ranks=ranks) == [0] * ranks
        got = tracks_of(client, model)
        for track in TRACKS:
            assert got[track].version.step == expected[track].version.step == STEPS
            assert_same_bits(expected[track], got[track])
        counts = [
            {name: track.update_count for name, track in weights["raw"].version.tracks.items()}
            for weights in (expected, got)
        ]
        assert counts[0] == counts[1]
        assert server.stop() == 0


@pytest.mark.slow
def test_all_ranks_are_refused(server, client, model, tmp_path):
    assert run_trainer(server, model, tmp_path / "first", ranks=2) == [0, 0]
    before = client.model(model)
    assert run_trainer(server, model, tmp_path / "second", ranks=2) == [1, 1]
    assert client.model(model) == before


@pytest.mark.slow
def test_ranks_that_disagree_change_nothing(server, client, model, tmp_path):
    assert run_trainer(server, model, tmp_path, ranks=2) == [0, 0]
    before = client.model(model)
    assert before.latest is not None and before.latest.step == STEPS
    saved = torch.load(tmp_path / "1.pt", weights_only=True)
    saved["ema"]["step"] += 1
    torch.save(saved, tmp_path / "1.pt")
    assert 0 not in run_trainer(server, model, tmp_path, ranks=2)
    assert client.model(model) == before


def test_a_state_is_plain_says_where_it_stands_and_is_durable(server, client, model, trainer):
    with trainer.attach(server, model, update_interval="5ba") as ema:
        assert ema.state_dict()["version"] == 0
        trainer.step(7)
        state = ema.state_dict()
    assert json.loads(json.dumps(state)) == state
    latest = client.model(model).latest
    assert latest is not None
    assert state["format"] == 1 and state["model"] == model
    assert state["step"] == 7 == ema.step and latest.step == 5
    assert (state["version"], state["incarnation"]) == (latest.number, latest.incarnation)
    ((name, label),) = client.labels(model).items()
    assert name == f"resume-7-{latest.incarnation}-{latest.number}"
    assert (label.number, label.incarnation, label.step) == (latest.number, latest.incarnation, 5)
    assert [(c.state, c.labels) for c in client.checkpoints(model)] == [("complete", (name,))]


def test_a_saved_state_is_a_version(server, client, model, trainer):
    """Wherever a version is an argument, after many newer ones."""
    with trainer.attach(server, model, update_interval="5ba", max_pinned_versions=2) as ema:
        before = ema.state_dict()
        trainer.step(7)
        state = ema.state_dict()
        expected = client.pull(model, track="ema")
        trainer.step(30)
    url = server.url(model)
    assert client.model(model).latest.step == 35
    pulled = ema_client.pull(url, version=state)
    assert pulled.version.step == 5
    assert_same_bits(expected, pulled)
    with ema_client.averaged(trainer.module, url, version=state) as version:
        assert version == pulled.version
        assert_same_bits(expected, trainer.module.state_dict())
    module = torch.nn.Linear(4, 3)
    assert ema_client.load_into(module, url, version=state).version == pulled.version
    assert_same_bits(expected, module.state_dict())
    assert client.set_label(model, "stable", version=state).step == 5
    assert client.report_metric(model, state, 0.5).label.step == 5
    assert client.restore(model, version=state).step == 5
    other = {**state, "model": "other"}
    for wrong, problem in (
        (other, f'of model "other", expected one of model "{model}"'),
        (before, f'at step 0 model "{model}" had no version yet'),
        ({}, "format None"),
    ):
        for read in (
            lambda: ema_client.pull(url, version=wrong),
            lambda: ema_client.load_into(module, url, version=wrong),
            lambda: client.restore(model, version=wrong),
        ):
            with pytest.raises(
                ema_client.InvalidArgumentError, match="state of an average"
            ) as error:
                read()
            assert problem in str(error.value)


def steps_of(labels):
    return sorted("-".join(label.split("-")[:2]) for label in labels)


def test_the_server_keeps_the_newest_of_what_was_saved(server, client, model, trainer):
    with trainer.attach(server, model, keep_resumable=2) as ema:
        client_labels = []
        for _ in range(4):
            trainer.step()
            ema.state_dict()
            client_labels.append(steps_of(client.labels(model)))
        client.set_label(model, "resume-mine")
        trainer.step()
        ema.state_dict()
    assert client_labels == [
        ["resume-1"],
        ["resume-1", "resume-2"],
        ["resume-2", "resume-3"],
        ["resume-3", "resume-4"],
    ]
    assert steps_of(client.labels(model)) == ["resume-4", "resume-5", "resume-mine"]


def test_a_template_of_what_is_loaded_takes_no_place(server, client, model, trainer, tmp_path):
    """dcp.load asks for a state, and overwrites it with that of the checkpoint."""
    with trainer.attach(server, model, keep_resumable=2) as ema:
        for folder in ("1", "2"):
            trainer.step()
            dcp.save({"ema": ema}, checkpoint_id=tmp_path / folder)
        trainer.step()
    options = {"keep_resumable": 2, "existing": "continue"}
    for folder in ("1", "2", "1"):
        with trainer.attach(server, model, **options) as ema:
            dcp.load({"ema": ema}, checkpoint_id=tmp_path / folder)
            assert ema.step == int(folder)
            assert steps_of(client.labels(model)) == ["resume-1", "resume-2"]
            trainer.step()
    with trainer.attach(server, model, **options) as ema:
        assert ema.state_dict()["step"] == 2
        ema.load_state_dict(None)  # Of a checkpoint that an outage has left without.
        assert steps_of(client.labels(model)) == ["resume-1", "resume-2"]


def test_a_trainer_that_makes_no_step_can_be_resumed(server, client, model, trainer):
    with trainer.attach(server, model, keep_resumable=1) as ema:
        trainer.step()
        ema.state_dict()
        trainer.step()
    options = {"keep_resumable": 1, "existing": "continue"}
    with trainer.attach(server, model, **options) as ema:
        state = ema.state_dict()
    assert steps_of(client.labels(model)) == ["resume-1", "resume-2"]
    with trainer.attach(server, model, **options) as ema:
        trainer.step(3)
    with trainer.attach(server, model, resume=state, **options) as ema:
        assert ema.step == 2
        trainer.step()
        ema.state_dict()
    assert steps_of(client.labels(model)) == ["resume-3"]


def progress_of(steps):
    return lambda step: {"dur": step / steps}


TIMES = {
    "an extended training": (
        "0.5dur",
        progress_of(10),
        progress_of(20),
        r"0[.\d]+dur is before .* 0.5dur",
    ),
    "a clock that began anew": (
        "30sec",
        lambda step: {"sec": 100 + step},
        lambda step: {"sec": step},
        r"\dsec is before .* 105sec",
    ),
    "other epochs": (
        "3ep",
        lambda step: {"ep": step},
        lambda step: {"ep": step // 2},
        r"\dep is before .* 5ep",
    ),
}


@pytest.mark.parametrize("half_life, before, after, problem", TIMES.values(), ids=TIMES.keys())
def test_a_time_that_a_track_cannot_go_on_from_is_explained(
    server, client, model, trainer, caplog, half_life, before, after, problem
):
    """It costs pushes, and stops no training: the time may catch up."""
    tracks = {"raw": "copy", "ema": half_life}
    options = dict(half_life=None, tracks=tracks, on_error="skip")
    with trainer.attach(server, model, time=before, **options) as ema:
        trainer.step(5)
        state = ema.state_dict()
    message = f'track "ema": training time {problem}.*batches, or a time \\(in Python attach\\(time=\\)\\)'
    for resume in ({"resume": state}, {"existing": "continue"}):
        caplog.clear()
        with trainer.attach(server, model, time=after, **options, **resume) as ema:
            trainer.step(2)
            assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (7, 0, 2)
        assert re.search(message, caplog.text)
    with trainer.attach(server, model, time=before, resume=state, **options) as ema:
        trainer.step()
    assert (ema.stats.pushes, client.model(model).latest.step) == (1, 6)


def test_starts_and_ends_may_go_back_with_a_training_that_is_extended(
    server, client, model, trainer
):
    ends = {"smoothing": 0.5, "ema_start": "0.2dur", "ema_end": "0.4dur"}
    options = {"tracks": {"ends": ends}, "ema_start": "0.3dur"}
    with trainer.attach(server, model, time=progress_of(10), **options) as ema:
        trainer.step(5)
        state = ema.state_dict()
    with trainer.attach(server, model, time=progress_of(20), resume=state, **options) as ema:
        trainer.step(4)
    assert (ema.stats.pushes, ema.stats.skipped) == (4, 0)
    updated = {
        entry.version.step
        for entry in client.versions(model)
        if entry.version.tracks["ends"].updated
    }
    assert updated == {1, 2, 3, 4, 6, 7, 8}


def test_a_count_of_what_is_loaded_after_attach(server, client, model, trainer):
    """A model that is there is attached to first, by who loads a checkpoint by dcp.load."""
    counted = {"sp": 0}

    def step():
        counted["sp"] += 8
        trainer.step()

    options = {"half_life": "80sp", "time": lambda step: dict(counted)}
    with trainer.attach(server, model, **options) as ema:
        for _ in range(3):
            step()
        state = ema.state_dict()
    counted["sp"] = 0
    with trainer.attach(server, model, existing="continue", **options) as ema:
        ema.load_state_dict(state)
        counted["sp"] = 24
        for _ in range(2):
            step()
    assert (ema.step, ema.stats.pushes, ema.stats.skipped) == (5, 2, 0)


@pytest.mark.parametrize("start_step", [None, 0])
def test_a_run_that_has_not_passed_the_last_step_goes_on(
    server, client, model, trainer, start_step
):
    with trainer.attach(server, model) as ema:
        trainer.step(3)
    with trainer.attach(server, model, start_step=start_step, existing="continue") as ema:
        trainer.step(5)
    assert (ema.stats.pushes, ema.stats.skipped) == ((5, 0) if start_step is None else (2, 2))


@pytest.mark.one_server("a rollback in a group makes no new version")
@pytest.mark.parametrize("how", ["attach", "load_state_dict"])
def test_the_model_goes_back_to_where_the_trainer_stands(server, client, model, trainer, how):
    with trainer.attach(server, model) as ema:
        trainer.step(3)
        # Earlier clients wrote more.
        state = {**ema.state_dict(), "launch_id": "x", "version_step": 3}
        average = client.pull(model, track="ema", framework="numpy")
        trainer.step(4)
    saved = client.model(model).latest
    assert saved is not None and saved.step == 7
    resumed = Trainer()
    if how == "attach":
        ema = resumed.attach(server, model, resume=state)
    else:
        ema = resumed.attach(server, model, existing="continue")
        assert ema.step == 7
        ema.load_state_dict(state)
    with ema:
        assert ema.step == 3
        back = client.pull(model, track="ema", framework="numpy")
        assert_same_bits(average, back)
        assert back.version.step == 3
        assert back.version.restored_from == (state["version"], state["incarnation"])
        assert (back.version.incarnation, back.version.number) > (saved.incarnation, saved.number)
        resumed.step()
        assert ema.state_dict()["version"] == ema.version.number and ema.version.step == 4
        with pytest.raises(ema_client.FailedPreconditionError, match="before the first step"):
            ema.load_state_dict(state)


def test_a_trainer_that_stands_where_the_model_stands_makes_no_version(
    server, client, model, trainer
):
    with trainer.attach(server, model) as ema:
        trainer.step(3)
        state = ema.state_dict()
    with trainer.attach(server, model, resume=state):
        latest = client.model(model).latest
        assert latest is not None
        assert (latest.number, latest.incarnation) == (state["version"], state["incarnation"])


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"model": "other"}, 'of model "other"'),
        ({"format": 2}, "format 2, but this client reads format 1; use a newer client"),
        ({"format": None}, "format None"),
        ({"step": "3"}, "step '3': expected int"),
        ({"version": None}, "version None: expected int"),
        ({"step": 10**20}, f"step {10**20}: expected less than 2**63"),
    ],
)
def test_a_state_that_is_not_ours_is_refused(server, model, trainer, change, problem):
    with trainer.attach(server, model) as ema:
        trainer.step()
        state = {
            **{"format": 1, "model": model, "step": 1, "version": 1, "incarnation": 1},
            **change,
        }
        trainer.attach(server, f"{model}-2").close()
        with pytest.raises(ema_client.InvalidArgumentError, match="state of an average") as error:
            ema_client.attach(
                trainer.module, trainer.optimizer, server.url(model), half_life="4ba", resume=state
            )
        assert problem in str(error.value)
        # Nobody was fenced.
        trainer.step()
        assert ema.stats.skipped == 0


@pytest.mark.parametrize("how", ["default", "error", "start_step", "other tracks"])
def test_an_existing_average_is_refused(server, client, model, trainer, how):
    with trainer.attach(server, model) as ema:
        trainer.step(2)
        ema.wait_pushed()
        before = client.model(model)
        options = {
            "default": {},
            "error": {"existing": "error"},
            "start_step": {"start_step": 2},
            "other tracks": {"half_life": "5ba", "files": {"config.json": b"{}"}},
        }[how]
        with pytest.raises(ema_client.FailedPreconditionError) as error:
            Trainer().attach(server, model, **options)
        assert error.value.reason == "RESUME_MISMATCH"
        for text in (
            model,
            "step 2",
            "version 2",
            'existing="continue"',
            'existing="new"',
            "resume=",
        ):
            assert text in str(error.value)
        # Nothing has changed, and the earlier run still pushes.
        assert client.model(model) == before
        trainer.step()
    assert (ema.stats.pushes, ema.stats.skipped) == (3, 0)


@pytest.mark.parametrize("how", ["continue", "resume", "load_state_dict", "import"])
def test_an_existing_average_is_continued(server, client, model, trainer, tmp_path, caplog, how):
    state = None
    if how == "import":
        path = tmp_path / "model.safetensors"
        safetensors.torch.save_file(trainer.module.state_dict(), path)
        client.import_weights(model, path, tracks={"ema": "4ba"}, step=2)
    else:
        with trainer.attach(server, model) as ema:
            trainer.step(2)
            state = ema.state_dict()
    options = {"resume": {"resume": state}, "import": {}}.get(how, {"existing": "continue"})
    with trainer.attach(server, model, **options) as ema:
        if how == "load_state_dict":
            ema.load_state_dict(state)
        trainer.step(2)
    assert not caplog.records
    assert client.model(model).latest.step == 4


@pytest.mark.parametrize("options", [{}, {"half_life": "5ba"}], ids=["same", "other tracks"])
def test_a_new_average_keeps_the_old_checkpoints(tmp_path, model, trainer, options):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data) as server:
        with trainer.attach(server, model) as ema:
            trainer.step(2)
            ema.state_dict()
        with trainer.attach(server, model, existing="new", **options) as ema:
            assert ema.step == 0 and ema.version is None
            trainer.step()
            version = ema.wait_pushed()
        assert (version.number, version.step) == (1, 1)
        (kept,) = data.glob(f"models/.deleted-*-{model}/checkpoints/step-*")
        assert "step-000000000002-" in kept.name
        assert server.stop() == 0


@pytest.mark.parametrize("existing", [None, "new", "continue"])
@pytest.mark.parametrize("change", ["tracks", "tensors"])
def test_a_model_without_a_version_is_created_again(
    server, client, model, trainer, caplog, existing, change
):
    trainer.attach(server, model).close()
    caplog.clear()
    if change == "tensors":
        trainer = Trainer()
        trainer.module = torch.nn.Linear(4, 5)
        trainer.optimizer = torch.optim.SGD(trainer.module.parameters(), lr=0.1)
    options = {"half_life": "5ba" if change == "tracks" else "4ba", "existing": existing}
    if existing == "continue":
        with pytest.raises(ema_client.AlreadyExistsError, match='existing="new"'):
            trainer.attach(server, model, **options)
        return
    with trainer.attach(server, model, **options):
        trainer.step()
    assert client.model(model).latest.number == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f'model "{model}": created again, since it has other tensors')


def test_an_equal_model_without_a_version_is_used(server, client, model, trainer):
    trainer.attach(server, model).close()
    epoch = client.model(model).run_epoch
    trainer.attach(server, model, existing="new").close()
    assert client.model(model).run_epoch == epoch + 1


def test_a_version_that_is_gone_is_named_and_nothing_changes(server, client, model, trainer):
    with trainer.attach(server, model) as ema:
        trainer.step(3)
        state = ema.state_dict()
    before = client.model(model)
    for wrong in ({"version": 99}, {"step": 2}):
        with pytest.raises(ema_client.EmaError) as error:
            trainer.attach(server, model, resume={**state, **wrong})
        assert error.value.reason in ("RESUME_MISMATCH", "VERSION_NOT_KEPT")
    assert client.model(model) == before


def test_a_state_from_before_the_first_version(server, client, model, trainer):
    with trainer.attach(server, model) as ema:
        state = ema.state_dict()
    with trainer.attach(server, model, resume=state):
        trainer.step()
    with pytest.raises(ema_client.FailedPreconditionError, match="before the first version"):
        trainer.attach(server, model, resume=state)


def test_a_model_that_is_gone_is_not_made_anew(server, client, model, trainer):
    with trainer.attach(server, model) as ema:
        trainer.step()
        state = ema.state_dict()
    client.delete_model(model)
    with pytest.raises(ema_client.NotFoundError):
        trainer.attach(server, model, resume=state)
    assert model not in [info.name for info in client.models()]


def test_arguments_that_contradict_each_other(server, model, trainer):
    with pytest.raises(ema_client.InvalidArgumentError, match="start_step 5"):
        trainer.attach(server, model, start_step=5, resume={"format": 1})
    with pytest.raises(ema_client.InvalidArgumentError, match="keep_resumable 0"):
        trainer.attach(server, model, keep_resumable=0)
    for existing in ("error", "new"):
        with pytest.raises(
            ema_client.InvalidArgumentError, match=f'existing "{existing}" and resume'
        ):
            trainer.attach(server, model, existing=existing, resume={"format": 1})


@pytest.mark.parametrize("on_error", ["skip", "raise", "wait"])
def test_a_server_without_a_data_directory_fails_no_training(
    tmp_path, model, trainer, caplog, on_error
):
    with ServerProcess(tmp_path) as server:
        with trainer.attach(server, model, on_error=on_error) as ema:
            assert ema.state_dict()["version"] == 0
            (at_attach,) = [record.getMessage() for record in caplog.records]
            assert "without --data-dir" in at_attach and "state_dict() returns None" in at_attach
            trainer.step()
            assert ema.state_dict() is None
            with ema_client.Client(server.address) as client:
                result = client.report_metric(model, ema.wait_pushed(), 0.5)
            assert (result.label, result.moved) == (None, False)
            _, of_state, of_score = [record.getMessage() for record in caplog.records]
            assert "step 1 has no average to resume from" in of_state
            assert "the score 0.5 has no effect" in of_score
        assert server.stop() == 0


def test_a_server_that_got_a_data_directory_keeps_states(tmp_path, model, trainer):
    with ServerProcess(tmp_path) as server:
        ema = trainer.attach(server, model, on_error="wait")
        server.kill()
        server.data_dir = tmp_path / "data"
        server.start(port=server.port)
        trainer.step()
        assert ema.state_dict()["step"] == 1
        ema.close()


UNAVAILABLE = (ema_client.UnavailableError, ema_client.DeadlineExceededError)


@pytest.mark.parametrize("on_error", ["skip", "raise", "wait"])
@pytest.mark.parametrize("is_known", [False, True], ids=["not known", "known"])
def test_an_unavailable_server(tmp_path, model, trainer, caplog, on_error, is_known):
    """Costs the trainer's checkpoint its average, or raises."""
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with trainer.attach(server, model, on_error=on_error, max_outage_s=2) as ema:
            trainer.step()
            ema.state_dict()
            server.kill()
            if is_known:
                trainer.step()
                with contextlib.suppress(*UNAVAILABLE):
                    trainer.step()
                with contextlib.suppress(*UNAVAILABLE):
                    trainer.step()
            start = time.monotonic()
            if on_error == "skip":
                assert ema.state_dict(timeout_s=30 if is_known else 1) is None
            else:
                with pytest.raises(UNAVAILABLE, match="is unavailable"):
                    ema.state_dict(timeout_s=1)
            assert time.monotonic() - start < 10
    said = f"checkpoint of step {ema.step} has no average to resume from"
    assert (said in caplog.text) == (on_error == "skip")
    if on_error == "skip":
        assert "is unavailable" in caplog.text[caplog.text.index(said) :]


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_a_server_that_cannot_write_is_not_unavailable(tmp_path, model, trainer, caplog, on_error):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data) as server:
        with trainer.attach(server, model, on_error=on_error) as ema:
            trainer.step()
            ema.wait_pushed()
            data.rename(tmp_path / "elsewhere")
            if on_error == "skip":
                assert ema.state_dict() is None
                said = caplog.text
                assert "step 1 has no average to resume from" in said
            else:
                with pytest.raises(ema_client.UnavailableError) as error:
                    ema.state_dict()
                said = str(error.value)
            assert "data directory is missing" in said and "STORE_READ_ONLY" in said
            assert "is unavailable" not in said


def test_a_state_that_was_not_saved_resumes_nothing(server, client, model, trainer):
    with trainer.attach(server, model, resume=None) as ema:
        ema.load_state_dict(None)
        trainer.step()
    assert client.model(model).latest.step == 1


def test_a_push_that_has_ended_needs_no_time(server, model, trainer):
    with trainer.attach(server, model) as ema:
        trainer.step()
        version = ema.wait_pushed()
        assert ema.state_dict(timeout_s=0)["version"] == version.number


def test_a_trainer_that_was_overtaken_has_no_average(server, model, trainer):
    other = Trainer()
    with trainer.attach(server, model) as ema:
        trainer.step()
        with other.attach(server, model):
            other.step()
        with pytest.raises(
            ema_client.AbortedError, match="Another trainer of .* has taken over"
        ) as error:
            ema.state_dict()
        assert error.value.reason == "FENCED"
