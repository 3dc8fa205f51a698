# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's Trainer with our callback, beside an average in the process."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import shutil

import ema_client
import pytest
import safetensors.torch
import torch
from ema_client._model.ranks import Ranks
from examples import run_example
from server_process import ServerProcess
from testing import assert_same_bits

pytestmark = pytest.mark.framework

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
EmaCallback = pytest.importorskip("ema_client.transformers").EmaCallback

SAMPLES = 40


def make_model():
    config = transformers.GPT2Config(
        **{"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8},
        **{"bos_token_id": 0, "eos_token_id": 0},
        **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def make_data(count=SAMPLES):
    generator = torch.Generator().manual_seed(7)
    lines = torch.randint(32, (count, 8), generator=generator)
    return [{"input_ids": line, "labels": line} for line in lines]


class Recorder(transformers.TrainerCallback):
    """Averages in the process, after each step; notes what evaluations see."""

    def __init__(self, **schedule) -> None:
        self._schedule = schedule
        self._local = None
        self.own = {}
        self.averages = {}
        self.evaluated = {}
        # The same for every batch.
        self.seen = {}

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self._local = ema_client.LocalEMA(model, **self._schedule)

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self._local.update({"batch": state.global_step})
        self.own[state.global_step] = weights_of(model)
        self.averages[state.global_step] = self._local.weights()

    def on_prediction_step(self, args, state, control, model=None, **kwargs):
        self.evaluated[state.global_step] = weights_of(model)
        self.seen.setdefault(state.global_step, []).append(self.evaluated[state.global_step])


def weights_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def make_trainer(folder, *callbacks, data=None, processing_class=None, **options):
    arguments = transformers.TrainingArguments(
        folder,
        **{
            **{"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.01},
            **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True},
            **options,
        },
    )
    return transformers.Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=make_data(),
        eval_dataset=make_data(8) if data is None else data,
        callbacks=list(callbacks),
        processing_class=processing_class,
        data_collator=transformers.default_data_collator,
    )


def steps_of(client, model):
    return [entry.version.step for entry in client.versions(model)]


def test_the_average_is_that_in_the_process(server, client, model, tmp_path):
    schedule = {"half_life": "4ba", "update_interval": "3ba"}
    # First, so that its steps end before ours begin to evaluate.
    recorder = Recorder(**schedule)
    callback = EmaCallback(server.url(model), **schedule, tracks={"raw": "copy"})
    trainer = make_trainer(
        tmp_path, recorder, callback, gradient_accumulation_steps=2, num_train_epochs=6
    )
    trainer.train()
    assert trainer.state.global_step == 30
    assert steps_of(client, model) == [1, *range(3, 31, 3)]
    assert callback.attachment is None
    names = recorder.averages[30].keys()
    assert "lm_head.weight" in names and "transformer.wte.weight" in names
    assert_same_bits(recorder.averages[30], client.pull(model, track="ema"))
    assert_same_bits(recorder.own[30], client.pull(model, track="raw"))


def test_the_preset_of_an_ema_pytorch_user_and_switch_ema(server, client, model, tmp_path):
    schedule = {"update_every": 1, "update_after_step": 0, "use_foreach": True}
    callback = EmaCallback(
        server.url(model),
        preset="ema_pytorch",
        **schedule,
        update_model_with_ema_every=19,  # At the 20th call, which is the last step.
        tracks={"raw": "copy"},
    )
    trainer = make_trainer(tmp_path, callback)
    trainer.train()
    assert trainer.state.global_step == 20
    written = trainer.model.state_dict()
    assert_same_bits(client.pull(model, track="ema"), written)
    pushed = client.pull(model, track="raw")
    assert not torch.equal(pushed["lm_head.weight"], written["lm_head.weight"])


@pytest.mark.parametrize("averages", [True, False], ids=["average", "own weights"])
def test_evaluations_of_the_training(server, client, model, tmp_path, averages):
    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=averages)
    trainer = make_trainer(
        tmp_path,
        recorder,
        callback,
        eval_strategy="steps",
        eval_steps=5,
        save_strategy="steps",
        save_steps=5,
    )
    trainer.train()
    assert recorder.evaluated.keys() == {5, 10, 15, 20}
    for step, evaluated in recorder.evaluated.items():
        assert_same_bits((recorder.averages if averages else recorder.own)[step], evaluated)
        # A checkpoint has the trainer's own weights.
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert_same_bits(recorder.own[step], saved.state_dict())
    # All went on with its own weights.
    assert_same_bits(recorder.own[20], trainer.model.state_dict())
    with callback.averaged() as version:
        assert version.step == 20
        trainer.evaluate()
    assert_same_bits(recorder.averages[20], recorder.evaluated[20])
    assert_same_bits(recorder.own[20], trainer.model.state_dict())


def test_before_the_average_starts_evaluations_have_own_weights(server, model, tmp_path, caplog):
    recorder = Recorder(half_life="4ba", ema_start="12ba")
    callback = EmaCallback(
        server.url(model), half_life="4ba", ema_start="12ba", evaluate_with_average=True
    )
    trainer = make_trainer(tmp_path, recorder, callback, eval_strategy="steps", eval_steps=5)
    trainer.train()
    for step, evaluated in recorder.evaluated.items():
        assert_same_bits((recorder.own if step < 12 else recorder.averages)[step], evaluated)
    said = [r.getMessage() for r in caplog.records if "begins at its ema_start, 12ba" in r.message]
    assert len(said) == 1


def test_averaged_has_the_callbacks_options(server, client, model, tmp_path, monkeypatch):
    """During a training it is the version of the last push, whatever has been committed since."""
    asked = []
    pull = ema_client.Client.pull
    monkeypatch.setattr(
        ema_client.Client,
        "pull",
        lambda self, *args, **kwargs: asked.append((self._transfer_timeout_s, kwargs["version"]))
        or pull(self, *args, **kwargs),
    )
    callback = EmaCallback(
        server.url(model), half_life="4ba", rename=lambda name: f"gpt.{name}", timeout_s=17
    )
    inside = []

    class Evaluates(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                with callback.averaged() as version:
                    inside.append(version)

    trainer = make_trainer(tmp_path, callback, Evaluates())
    trainer.train()
    with callback.averaged() as version:
        averaged = weights_of(trainer.model)
    assert (inside[0].step, version.step) == (5, 20)
    (timeout_s, pulled), (same_s, _) = asked
    assert (timeout_s, same_s) == (17, 17) and pulled.step == 5
    average = client.pull(model, track="ema", version=version)
    assert_same_bits(averaged, {name.removeprefix("gpt."): average[name] for name in average})


def test_evaluations_at_the_ends_of_epochs(server, client, model, tmp_path):
    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    trainer = make_trainer(
        tmp_path,
        recorder,
        callback,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
    )
    trainer.train()
    assert recorder.evaluated.keys() == {10, 20}
    for step, evaluated in recorder.evaluated.items():
        assert_same_bits(recorder.averages[step], evaluated)
    # The last push read the weights before the trainer loaded the best ones over them.
    assert_same_bits(recorder.averages[20], client.pull(model, track="ema"))


@pytest.mark.parametrize("copies", [True, False], ids=["average", "own weights"])
@pytest.mark.parametrize("best", [None, 5, 10], ids="best {}".format)
def test_what_the_model_has_after_the_training(server, model, tmp_path, caplog, best, copies):
    """The averages, if so asked: of the best checkpoint, if the trainer has loaded that."""

    class Metrics(transformers.TrainerCallback):
        """As if one evaluation were better than all others."""

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step != best)

    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(
        server.url(model),
        half_life="4ba",
        evaluate_with_average=True,
        copy_at_end=copies,
        keep_resumable=2,
        max_pinned_versions=1,
    )
    trainer = make_trainer(
        tmp_path,
        recorder,
        callback,
        Metrics(),
        **{"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5},
        load_best_model_at_end=best is not None,
        metric_for_best_model="loss",
    )
    trainer.train()
    # The server has deleted the average of step 5.
    has_average = copies and best != 5
    expected = (recorder.averages if has_average else recorder.own)[best or 20]
    assert_same_bits(expected, trainer.model.state_dict())
    said = [record.getMessage() for record in caplog.records]
    assert any("copy_at_end=True" in text for text in said) == (best is not None and not copies)
    assert any("not their average: " in text for text in said) == (copies and best == 5)


def test_several_sets_to_evaluate_on(server, model, tmp_path):
    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    data = {"one": make_data(4), "other": make_data(8)}
    steps = {"eval_strategy": "steps", "eval_steps": 5}
    trainer = make_trainer(tmp_path, recorder, callback, data=data, **steps)
    trainer.train()
    # All batches of a step: of the first set, and of the other one.
    assert [len(recorder.seen[step]) for step in (5, 10, 15, 20)] == [2] * 4
    for step, seen in recorder.seen.items():
        for evaluated in seen:
            assert_same_bits(recorder.averages[step], evaluated)
    assert_same_bits(recorder.own[20], trainer.model.state_dict())


class Evaluates(transformers.TrainerCallback):
    """Evaluates and predicts by itself, or sets off an evaluation, at the ends of steps and epochs."""

    def __init__(self, how) -> None:
        self.how = how
        self.trainer = None
        self.is_busy = False

    def on_step_end(self, args, state, control, **kwargs):
        return self.evaluate(control) if state.global_step == 7 else control

    def on_epoch_end(self, args, state, control, **kwargs):
        return self.evaluate(control)

    def on_evaluate(self, args, state, control, **kwargs):
        if self.how == "in an evaluation" and not self.is_busy:
            self.is_busy = True
            self.trainer.evaluate(make_data(8), metric_key_prefix="nested")
            self.is_busy = False

    def evaluate(self, control):
        # An evaluation sets the trainer's own should_evaluate to False.
        control = copy.copy(control)
        if self.how == "evaluate":
            self.trainer.evaluate(make_data(8), metric_key_prefix="train")
        elif self.how == "predict":
            self.trainer.predict(make_data(8))
        elif self.how == "fails":
            with contextlib.suppress(Exception):
                self.trainer.evaluate(["no batch"])
        elif self.how == "should_evaluate":
            control.should_evaluate = True
        return control


@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(
    "how", ["evaluate", "predict", "should_evaluate", "in an evaluation", "fails"]
)
def test_evaluations_that_another_callback_starts(server, model, tmp_path, how, place):
    """Every evaluation has the average, and every checkpoint the raw weights."""
    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    other = Evaluates(how)
    callbacks = [other, callback] if place == "before" else [callback, other]
    trainer = make_trainer(
        tmp_path,
        recorder,
        *callbacks,
        **{"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True},
    )
    other.trainer = trainer
    trainer.train()
    seen_at = {10, 20} if how in ("in an evaluation", "fails") else {7, 10, 20}
    assert recorder.seen.keys() == seen_at
    twice = how in ("evaluate", "predict", "in an evaluation")
    assert len(recorder.seen[20]) == 1 + twice
    for step, seen in recorder.seen.items():
        for evaluated in seen:
            assert_same_bits(recorder.averages[step], evaluated)
    for step in (10, 20):
        saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"checkpoint-{step}")
        assert_same_bits(recorder.own[step], saved.state_dict())


def test_an_evaluation_before_the_first_step_has_own_weights(server, model, tmp_path):
    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(
        server.url(model), half_life="4ba", evaluate_with_average=True, on_error="raise"
    )
    steps = {"eval_strategy": "steps", "eval_steps": 5, "eval_on_start": True}
    trainer = make_trainer(tmp_path, recorder, callback, **steps)
    before = weights_of(trainer.model)
    trainer.train()
    assert_same_bits(before, recorder.evaluated.pop(0))
    for step, evaluated in recorder.evaluated.items():
        assert_same_bits(recorder.averages[step], evaluated)


def test_a_trainer_that_evaluates_in_its_own_way_is_refused(server, model, tmp_path):
    class Own(transformers.Trainer):
        def evaluate(self, *args, **kwargs):
            self.callback_handler.on_evaluate(self.args, self.state, self.control, {})
            return {}

    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    trainer = make_trainer(tmp_path, callback, eval_strategy="steps", eval_steps=5)
    trainer.__class__ = Own
    with pytest.raises(ema_client.InvalidArgumentError, match="did not call .*evaluation_loop"):
        trainer.train()
    callback.close()
    assert "eval" not in vars(trainer.optimizer)


def test_a_checkpoint_has_the_average_beside_the_raw_weights(server, client, model, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    recorder = Recorder(half_life="4ba", ema_start="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", ema_start="4ba")
    # Of an earlier training.
    stale = tmp_path / "checkpoint-3/tracks/ema/model.safetensors"
    stale.parent.mkdir(parents=True)
    stale.touch()
    saving = {"save_strategy": "steps", "save_steps": 3, "max_steps": 9}
    trainer = make_trainer(tmp_path, recorder, callback, processing_class=tokenizer, **saving)
    trainer.train()
    for step in (6, 9):
        folder = tmp_path / f"checkpoint-{step}"
        raw = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert_same_bits(recorder.own[step], raw.state_dict())
        average = transformers.AutoModelForCausalLM.from_pretrained(folder / "tracks/ema")
        assert_same_bits(recorder.averages[step], average.state_dict())
        vocabulary = transformers.AutoTokenizer.from_pretrained(folder / "tracks/ema").get_vocab()
        assert vocabulary == {"a": 0, "b": 1}
        state = json.loads((folder / "ema_state.json").read_text())["average"]
        assert_same_bits(client.pull(model, version=state), client.pull(model, step=step))
    # Its average had not begun.
    assert not stale.exists()
    assert_same_bits(recorder.own[9], trainer.model.state_dict())

    without = EmaCallback(server.url(model), half_life="4ba", ema_start="4ba", save_average=False)
    make_trainer(tmp_path, without, **saving).train(
        resume_from_checkpoint=str(folder.parent / "checkpoint-6")
    )
    assert not (folder / "tracks").exists() and (folder / "ema_state.json").exists()


def test_a_model_that_is_not_of_transformers(server, client, model, tmp_path):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 1)

        def forward(self, input_ids, labels):
            return {"loss": self.linear(input_ids.float()).square().mean()}

    callback = EmaCallback(server.url(model), half_life="4ba")
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=3, max_steps=3)
    trainer = transformers.Trainer(
        model=Plain(),
        args=trainer.args,
        train_dataset=make_data(),
        callbacks=[callback],
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    saved = safetensors.torch.load_file(tmp_path / "checkpoint-3/tracks/ema/model.safetensors")
    assert_same_bits(client.pull(model, track="ema"), saved)


@pytest.mark.parametrize("best", [5, 10])
def test_averaged_after_the_training_is_of_the_loaded_checkpoint(server, model, tmp_path, best):
    class Metrics(transformers.TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_loss"] = float(state.global_step != best)

    recorder = Recorder(half_life="4ba")
    callback = EmaCallback(
        server.url(model), half_life="4ba", evaluate_with_average=True, max_pinned_versions=1
    )
    trainer = make_trainer(
        tmp_path,
        recorder,
        callback,
        Metrics(),
        **{"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5},
        load_best_model_at_end=True,
        metric_for_best_model="loss",
    )
    trainer.train()
    assert_same_bits(recorder.own[best], trainer.model.state_dict())
    with callback.averaged() as version:
        assert version.step == best
        assert_same_bits(recorder.averages[best], trainer.model.state_dict())


def test_a_training_resumes_with_its_average(server, client, model, tmp_path, caplog):
    """Gone further than its checkpoint, and resumed: as never interrupted."""
    options = {"half_life": "4ba", "update_interval": "3ba"}
    saving = {"save_strategy": "steps", "save_steps": 8, "num_train_epochs": 3}
    never = f"{model[:60]}-never"
    make_trainer(tmp_path / "never", EmaCallback(server.url(never), **options), **saving).train()
    make_trainer(tmp_path / "killed", EmaCallback(server.url(model), **options), **saving).train()
    folder = tmp_path / "killed/checkpoint-16"
    state = json.loads((folder / "ema_state.json").read_text())
    assert state["global_step"] == state["average"]["step"] == 16
    records = [entry.version for entry in client.versions(model)]
    assert [one.step for one in records if one.number == state["average"]["version"]] == [15]
    assert client.model(model).latest.step == 30

    callback = EmaCallback(server.url(model), **options)
    make_trainer(tmp_path / "killed", callback, **saving).train(resume_from_checkpoint=str(folder))
    assert_same_bits(client.pull(never, track="ema"), client.pull(model, track="ema"))
    counts = [client.model(name).latest.tracks["ema"].update_count for name in (never, model)]
    assert counts == [11, 11]

    # From a folder elsewhere: named, or it says that it has found nothing.
    moved = tmp_path / "moved"
    folder.rename(moved)
    caplog.set_level(logging.WARNING)
    callback = EmaCallback(server.url(model), resume_from_checkpoint=moved, **options)
    make_trainer(tmp_path / "other", callback, **saving).train(resume_from_checkpoint=str(moved))
    assert_same_bits(client.pull(never, track="ema"), client.pull(model, track="ema"))
    assert not any("there is no ema_state.json" in r.getMessage() for r in caplog.records)
    callback = EmaCallback(server.url(model), **options)
    make_trainer(tmp_path / "third", callback, **saving).train(resume_from_checkpoint=str(moved))
    assert any("there is no ema_state.json of that step" in r.getMessage() for r in caplog.records)
    assert client.model(model).latest.step == 42


def test_an_existing_average_is_refused_or_replaced(server, client, model, tmp_path):
    """Also by a callback with existing="new", a training that resumes continues the average."""

    def train(max_steps, resumes=None, **options):
        callback = EmaCallback(server.url(model), half_life="4ba", **options)
        saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": max_steps}
        try:
            make_trainer(tmp_path, callback, **saving).train(resume_from_checkpoint=resumes)
        finally:
            callback.close()
        return client.model(model).latest.number

    assert train(8) == 8
    with pytest.raises(ema_client.FailedPreconditionError, match='existing="new"'):
        train(8)
    assert train(4, existing="new") == 4
    assert train(8, resumes=str(tmp_path / "checkpoint-4"), existing="new") == 8
    (tmp_path / "checkpoint-8/ema_state.json").unlink()
    assert train(12, resumes=str(tmp_path / "checkpoint-8"), existing="new") == 12


def test_a_training_resumes_from_its_last_checkpoint(server, client, model, tmp_path, caplog):
    """As the trainer's arguments may ask, which name no folder then."""
    for max_steps, resumes in ((8, None), (16, True)):
        trainer = make_trainer(
            tmp_path,
            EmaCallback(server.url(model), half_life="4ba"),
            **{"save_strategy": "steps", "save_steps": 4, "max_steps": max_steps},
            resume_from_checkpoint=resumes,
        )
        trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    assert client.model(model).latest.tracks["ema"].update_count == 16
    assert not any("there is no ema_state.json" in r.getMessage() for r in caplog.records)


def test_what_rank_0_cannot_read_raises_on_all_ranks(tmp_path, monkeypatch):
    passed_on = []
    monkeypatch.setattr(
        Ranks, "gather", lambda self, value: [*passed_on, passed_on.append(value) or value]
    )
    trainer = make_trainer(tmp_path)
    trainer.state.global_step = 4
    # A list is no folder.
    callback = EmaCallback("ema://host:1/m", half_life="4ba", resume_from_checkpoint=["folder"])
    for rank, said in ((0, "^"), (1, "^rank 0: ")):
        monkeypatch.setattr(Ranks, "current", lambda group, rank=rank: Ranks(rank, 2, group))
        with pytest.raises(TypeError, match=said + ".*list"):
            callback._saved(trainer.args, trainer.state)


def test_from_pretrained_reads_the_servers_checkpoints(tmp_path, model):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words))
    data_dir = tmp_path / "data"
    with ServerProcess(tmp_path / "server", data_dir=data_dir) as server:
        callback = EmaCallback(server.url(model), half_life="4ba")
        trainer = make_trainer(tmp_path / "out", callback, processing_class=tokenizer, max_steps=5)
        trainer.train()
        with ema_client.Client(server.address) as client:
            checkpoint = client.create_checkpoint(model)
            pulled = client.pull(model, track="ema")
    folder = data_dir / "models" / model / "checkpoints" / checkpoint.name / "tracks/ema"
    read = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert read.config.architectures == ["GPT2LMHeadModel"]
    assert_same_bits(pulled, read.state_dict())
    assert transformers.AutoTokenizer.from_pretrained(folder).get_vocab() == {"a": 0, "b": 1}
    assert (folder / "generation_config.json").exists()


def test_a_generation_config_that_cannot_be_saved_is_left_out(server, model, tmp_path, caplog):
    callback = EmaCallback(server.url(model), half_life="4ba")
    trainer = make_trainer(tmp_path, callback, max_steps=2)
    trainer.model.generation_config.temperature = 0.5  # Without do_sample.
    trainer.train()
    assert trainer.state.global_step == 2
    assert "no generation_config.json: GenerationConfig is invalid" in caplog.text
    (tmp_path / "average").mkdir()
    with ema_client.Client(server.address) as client:
        client.save(model, tmp_path / "average", track="ema")
    assert (tmp_path / "average/config.json").exists()
    assert not (tmp_path / "average/generation_config.json").exists()


def test_epochs_and_shares_of_the_training_are_times(server, client, model, tmp_path):
    callback = EmaCallback(
        server.url(model),
        half_life="2ep",
        update_interval="1ep",
        tracks={"late": {"smoothing": 0.5, "ema_start": "0.5dur", "update_interval": "1ba"}},
        files={},
    )
    make_trainer(tmp_path, callback, num_train_epochs=3, gradient_accumulation_steps=3).train()
    versions = [entry.version for entry in client.versions(model)]
    updates = {
        track: [version.step for version in versions if version.tracks[track].updated]
        for track in ("ema", "late")
    }
    # 10 batches an epoch are 4 steps.
    assert updates["ema"] == [1, 4, 8, 12]
    starts = [
        v.step for v in versions if v.tracks["late"].updated and v.tracks["late"].update_weight == 1
    ]
    assert starts == [1, 6]


@pytest.mark.parametrize("schedule", [{}, {"tracks": {"b": "9ba", "copy": "copy"}}], ids=str)
def test_the_distance_between_raw_and_averaged_weights_is_logged(
    server, client, model, tmp_path, schedule
):
    class Reporter(transformers.TrainerCallback):
        """Called before ours, as those of TensorBoard and W&B."""

        def __init__(self) -> None:
            self.logged = []

        def on_log(self, args, state, control, logs, **kwargs):
            self.logged.append((state.global_step, dict(logs)))

    reporter = Reporter()
    callback = EmaCallback(server.url(model), **schedule, log_statistics=True, on_error="wait")
    trainer = make_trainer(
        tmp_path, reporter, callback, logging_steps=5, eval_strategy="steps", eval_steps=5
    )
    trainer.train()
    track = "b" if schedule else "ema"
    logged = [(step, logs) for step, logs in reporter.logged if f"{track}_distance" in logs]
    assert [step for step, _ in logged] == [5, 10, 15, 20]
    computed = {
        (version.version.statistics[track].norm, version.version.statistics[track].distance)
        for version in client.versions(model)
        if track in version.version.statistics
    }
    assert {(logs[f"{track}_norm"], logs[f"{track}_distance"]) for _, logs in logged} <= computed
    assert all(logs[f"{track}_distance"] > 0 for _, logs in logged)
    kept = [entry for entry in trainer.state.log_history if f"{track}_distance" in entry]
    assert [entry["step"] for entry in kept] == [5, 10, 15, 20]
    assert client.model(model).tracks.keys() == ({"b", "copy"} if schedule else {"ema", "raw"})
    if not schedule:
        assert client.model(model).tracks["ema"].half_life == "1000ba"


def test_the_name_of_the_copy_track_that_is_added():
    with pytest.raises(ema_client.InvalidArgumentError, match='copy track "raw".*another name'):
        EmaCallback("ema://h/m", tracks={"raw": "5ba"}, log_statistics=True)


def test_a_server_without_a_disk(tmp_path, model, caplog):
    with ServerProcess(tmp_path / "server") as server:
        saving = {"save_strategy": "epoch", "num_train_epochs": 1}
        callback = EmaCallback(server.url(model), half_life="4ba")
        make_trainer(tmp_path / "out", callback, **saving).train()
        assert any("no average to resume from" in r.getMessage() for r in caplog.records)
        assert not (tmp_path / "out/checkpoint-10/ema_state.json").exists()
        options = {"half_life": "4ba", "on_error": "raise", "existing": "continue"}
        strict = EmaCallback(server.url(model), **options)
        make_trainer(tmp_path / "out", strict, **saving).train()


def test_an_exception_in_an_evaluation(server, model, tmp_path):
    class Failing(Recorder):
        def on_prediction_step(self, *arguments, **options):
            super().on_prediction_step(*arguments, **options)
            raise RuntimeError("in the middle")

    recorder = Failing(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    trainer = make_trainer(tmp_path, recorder, callback, eval_strategy="steps", eval_steps=5)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    assert_same_bits(recorder.averages[5], trainer.model.state_dict())
    callback.close()
    assert_same_bits(recorder.own[5], trainer.model.state_dict())


def test_a_training_that_begins_again_with_smaller_batches_goes_on(server, client, model, tmp_path):
    class OutOfMemory(transformers.TrainerCallback):
        tries = 0

        def on_train_begin(self, args, state, control, **kwargs):
            self.tries += 1

        def on_step_begin(self, args, state, control, **kwargs):
            if self.tries == 1 and state.global_step == 2:
                raise RuntimeError("CUDA out of memory.")

    callback = EmaCallback(server.url(model), half_life="4ba", tracks={"raw": "copy"})
    trainer = make_trainer(tmp_path, OutOfMemory(), callback, auto_find_batch_size=True)
    trainer.train()
    assert steps_of(client, model) == [*range(1, 2 + trainer.state.global_step + 1)]
    assert_same_bits(weights_of(trainer.model), client.pull(model, track="raw"))


def test_a_training_resumes_after_an_exception_in_an_evaluation(server, model, tmp_path):
    """From the weights of its checkpoint, not from those that the training before put aside."""

    class Failing(Recorder):
        def on_prediction_step(self, args, state, control, **kwargs):
            if state.global_step == 10 and not self.begun:
                raise RuntimeError("in the middle")

        begun = None

        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if self.begun is None and state.global_step == 5 and self.own.keys() >= {10}:
                self.begun = weights_of(model)

    recorder = Failing(half_life="4ba")
    callback = EmaCallback(server.url(model), half_life="4ba", evaluate_with_average=True)
    steps = {"eval_strategy": "steps", "eval_steps": 5, "save_strategy": "steps", "save_steps": 5}
    trainer = make_trainer(tmp_path, recorder, callback, **steps)
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same_bits(recorder.own[5], recorder.begun)


def test_wrong_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match='unexpected argument "halflife"'):
        EmaCallback("ema://localhost/m", halflife="4ba")
    with pytest.raises(TypeError, match='unexpected argument "resume"'):
        EmaCallback("ema://localhost/m", resume={})
    with pytest.raises(ema_client.InvalidArgumentError, match="must be like ema://"):
        EmaCallback("localhost/m")
    with pytest.raises(ema_client.InvalidArgumentError, match="1000"):
        EmaCallback("ema://localhost/m", half_life="1000")
    with pytest.raises(ema_client.InvalidArgumentError, match="max_wait_s -1"):
        EmaCallback("ema://localhost/m", max_wait_s=-1)
    with pytest.raises(ema_client.InvalidArgumentError, match="update_model_with_ema_every 0"):
        EmaCallback("ema://localhost/m", preset="ema_pytorch", update_model_with_ema_every=0)
    EmaCallback("ema://localhost/m", preset="ema_pytorch", beta=0.9)
    with pytest.raises(TypeError, match='"bta"; did you mean "beta"'):
        EmaCallback("ema://localhost/m", preset="ema_pytorch", bta=0.9)
    with pytest.raises(ema_client.FailedPreconditionError, match="no training has begun"):
        with EmaCallback("ema://localhost/m").averaged():
            raise AssertionError("not reached")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks, steps", [(1, 32), (2, 16)])
def test_the_example(server, client, model, tmp_path, ranks, steps):
    """Again after its last checkpoint is lost: it makes the last epoch anew, and the same average."""
    output = run_example("transformers_train.py", server.url(model), tmp_path, ranks=ranks)
    assert output.startswith(f"step {steps}: ")
    latest = client.model(model).latest
    assert latest.step == latest.number == steps
    shutil.rmtree(tmp_path / f"checkpoint-{steps}")
    again = run_example("transformers_train.py", server.url(model), tmp_path, ranks=ranks)
    assert again == output
    assert client.model(model).latest.tracks["ema"].update_count == steps
    assert client.model(model).latest.number > steps
