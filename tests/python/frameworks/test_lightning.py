# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer with our callback, beside an average in the process and Lightning's own."""

from __future__ import annotations

import csv
import importlib
import logging
import pickle
import subprocess
import sys

import ema_client
import pytest
import torch
from ema_client._model.optimizers import unwrap_optimizers
from examples import run_example
from server_process import ServerProcess
from testing import assert_same_bits

pytestmark = [
    pytest.mark.framework,
    # Of Lightning itself: advice, and what its pinned version calls of torch's.
    pytest.mark.filterwarnings("ignore"),
]

lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
pytorch_lightning = pytest.importorskip("pytorch_lightning", reason="it is not installed")
# After both, so that it is a callback of both.
EMAWeightAveraging = importlib.import_module("ema_client.lightning").EMAWeightAveraging

BATCHES = 10


def make_module(package=lightning, fails_in_validation=False, optimizers=1, bad_batches=()):
    """A small module that logs what it is validated and tested with."""

    class Module(package.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11))
            self.automatic_optimization = optimizers == 1
            self.validated = []
            self.tested = []

        def weights(self):
            return {name: tensor.clone() for name, tensor in self.state_dict().items()}

        def training_step(self, batch, index):
            loss = self.net(batch[0]).square().mean()
            return loss * float("inf") if index in bad_batches else loss

        def validation_step(self, batch, index):
            if index == 0:
                self.validated.append(self.weights())
            if fails_in_validation and not self.trainer.sanity_checking:
                raise RuntimeError("in the middle")

        def test_step(self, batch, index):
            self.tested.append(self.weights())

        def configure_optimizers(self):
            made = [torch.optim.Adam(self.parameters(), lr=0.05) for _ in range(optimizers)]
            return made if optimizers != 1 else made[0]

    return Module()


class Recorder(lightning.Callback):
    """Averages in the process, after each step of the optimizer."""

    def __init__(self, **schedule) -> None:
        self._schedule = schedule
        self._local = None
        self.steps = 0
        self.weights = {}

    def on_train_start(self, trainer, pl_module):
        self._local = ema_client.LocalEMA(pl_module, **self._schedule)

    def on_train_batch_end(self, trainer, pl_module, *_):
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self._local.update({"batch": self.steps, "epoch": self._epoch(trainer)})
            self.weights = self._local.weights("ema")

    def _epoch(self, trainer):
        return trainer.current_epoch + trainer.is_last_batch


def loader(count=BATCHES):
    generator = torch.Generator().manual_seed(5)
    data = torch.utils.data.TensorDataset(torch.randn(8 * count, 6, generator=generator))
    return torch.utils.data.DataLoader(data, batch_size=8)


def make_trainer(*callbacks, package=lightning, **options):
    options = {
        **{"max_epochs": 3, "accelerator": "cpu", "logger": False},
        **{"enable_checkpointing": False, "enable_progress_bar": False},
        **{"enable_model_summary": False, "num_sanity_val_steps": 1},
        **options,
    }
    return package.Trainer(callbacks=list(callbacks), **options)


def steps_of(client, model):
    return [entry.version.step for entry in client.versions(model)]


@pytest.mark.parametrize(
    "package", [lightning, pytorch_lightning], ids=lambda package: package.__name__
)
def test_the_average_is_that_in_the_process(server, client, model, package):
    recorder = Recorder(smoothing=0.9, update_interval="1ba")
    trainer = make_trainer(
        EMAWeightAveraging(server.url(model), decay=0.9),
        recorder,
        package=package,
        accumulate_grad_batches=3,
        max_epochs=8,
    )
    module = make_module(package)
    trainer.fit(module, loader())
    assert trainer.global_step == recorder.steps == 32
    assert steps_of(client, model) == list(range(1, 33))
    pulled = client.pull(model, track="ema")
    assert_same_bits(recorder.weights, pulled)
    assert_same_bits(pulled, module.state_dict())


SCHEDULES = {
    "defaults": ({}, {"smoothing": 0.999}),
    "every 3": (
        {"decay": 0.9, "update_every_n_steps": 3},
        {"smoothing": 0.9, "update_interval": "3ba", "interval_phase": 1},
    ),
    "from 4": (
        {"decay": 0.9, "update_starting_at_step": 4},
        {"smoothing": 0.9, "update_interval": "1ba", "ema_start": "5ba"},
    ),
    "every 3 from 4, buffers copied": (
        {
            **{"decay": 0.8, "use_buffers": False},
            **{"update_every_n_steps": 3, "update_starting_at_step": 4},
        },
        {
            **{"smoothing": 0.8, "buffers": "copy", "ema_start": "7ba"},
            **{"update_interval": "3ba", "interval_phase": 1},
        },
    ),
    "epochs from 1": (
        {"decay": 0.9, "update_every_n_steps": 0, "update_starting_at_epoch": 1},
        {"smoothing": 0.9, "update_interval": "1ep", "ema_start": "2ep"},
    ),
}


class Theirs(lightning.callbacks.EMAWeightAveraging):
    """Lightning's own; notes when it updates, and leaves the module alone."""

    def __init__(self, **arguments) -> None:
        super().__init__(**{"decay": 0.999, **arguments})
        self.updates = []

    def should_update(self, step_idx=None, epoch_idx=None):
        updates = super().should_update(step_idx, epoch_idx)
        if updates:
            self.updates.append(step_idx if epoch_idx is None else (epoch_idx + 1) * BATCHES - 1)
        return updates

    def on_train_end(self, trainer, pl_module):
        pass

    def tensors(self):
        return self._average_model.module.state_dict()


@pytest.mark.parametrize("theirs, ours", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_updates_are_those_of_lightnings_own(server, client, model, theirs, ours):
    own = Theirs(**theirs)
    recorder = Recorder(tracks={"ema": ema_client.Track(**ours)})
    callback = EMAWeightAveraging(
        server.url(model), **theirs, copy_at_end=False, save_average=False
    )
    make_trainer(callback, own, recorder).fit(make_module(), loader())
    # The first push of ours stands for the weights from before training, which Lightning begins with.
    first, start = own.updates[0], [] if own.updates[0] == 0 else [1]
    assert steps_of(client, model) == start + [step + 1 for step in own.updates]
    weights = {
        entry.version.step - 1: entry.version.tracks["ema"].update_weight
        for entry in client.versions(model)
    }
    assert weights[first] == 1
    decay = torch.tensor(1 - theirs.get("decay", 0.999)).item()
    assert all(weights[step] == decay for step in own.updates[1:])
    pulled = client.pull(model, track="ema")
    assert_same_bits(recorder.weights, pulled)
    for name, tensor in own.tensors().items():
        if tensor.is_floating_point():
            torch.testing.assert_close(pulled[name], tensor, rtol=1e-5, atol=1e-6)


def test_an_epoch_alone_says_from_when_steps_are_averaged(server, client, model, caplog):
    callback = EMAWeightAveraging(server.url(model), decay=0.9, update_starting_at_epoch=1)
    (warning,) = caplog.messages
    assert "averages the steps after the beginning of that epoch. Lightning's callback" in warning
    recorder = Recorder(smoothing=0.9, update_interval="1ba", ema_start="1ep")
    make_trainer(callback, recorder).fit(make_module(), loader())
    weights = {
        entry.version.step: entry.version.tracks["ema"].update_weight
        for entry in client.versions(model)
    }
    # Epoch 0 ends with step 10.
    decay = pytest.approx(0.1, rel=1e-6)
    assert weights == {1: 1, 10: 1, **{step: decay for step in range(11, 31)}}
    assert_same_bits(recorder.weights, client.pull(model, track="ema"))


def test_attachs_own_arguments(server, client, model):
    """Epochs and shares of the training are times, too."""
    callback = EMAWeightAveraging(
        server.url(model),
        half_life="2ep",
        update_interval="1ep",
        tracks={"late": {"smoothing": 0.5, "ema_start": "0.5dur"}, "raw": "copy"},
        copy_at_end=False,
    )
    module = make_module()
    make_trainer(callback).fit(module, loader())
    versions = [entry.version for entry in client.versions(model)]
    updates = {
        track: [version.step for version in versions if version.tracks[track].updated]
        for track in ("ema", "late")
    }
    assert updates["ema"] == [1, 10, 20, 30]
    starts = [
        v.step for v in versions if v.tracks["late"].updated and v.tracks["late"].update_weight == 1
    ]
    assert starts[-1] == 15
    assert_same_bits(module.state_dict(), client.pull(model, track="raw"))


@pytest.mark.parametrize("schedule", [{}, {"decay": 0.9}, {"half_life": "20ba"}], ids=str)
def test_what_is_no_schedules_goes_with_either(server, client, model, schedule):
    callback = EMAWeightAveraging(server.url(model), **schedule, dtype="float64")
    make_trainer(callback, max_epochs=1).fit(make_module(), loader())
    assert client.model(model).tracks["ema"].dtype == "float64"


def test_the_preset_of_an_ema_pytorch_user_and_switch_ema(server, client, model):
    callback = EMAWeightAveraging(
        server.url(model),
        preset="ema_pytorch",
        update_every=1,
        update_after_step=0,
        include_online_model=False,
        update_model_with_ema_every=29,  # At the 30th call, which is the last step.
        tracks={"raw": "copy"},
        copy_at_end=False,
    )
    module = make_module()
    trainer = make_trainer(callback)
    trainer.fit(module, loader())
    assert trainer.global_step == 30
    written = module.state_dict()
    assert_same_bits(client.pull(model, track="ema"), written)
    pushed = client.pull(model, track="raw")
    assert not torch.equal(pushed["net.0.weight"], written["net.0.weight"])


@pytest.mark.parametrize("validates", [True, False], ids=["average", "own weights"])
def test_validation_and_test_have_averaged_weights(server, client, model, validates):
    class Averages(lightning.Callback):
        """What must be in the model: the newest average, or the model's own weights."""

        def __init__(self) -> None:
            self.expected = []
            self.own = []

        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.is_last_batch:
                self.own.append(pl_module.weights())
                callback.attachment.wait_pushed()
                pulled = client.pull(model, track="ema")
                self.expected.append(pulled if validates else pl_module.weights())

    module = make_module()
    averages = Averages()
    callback = EMAWeightAveraging(
        server.url(model), decay=0.9, validate_with_average=validates, copy_at_end=False
    )
    trainer = make_trainer(averages, callback)
    own = averages.own
    trainer.fit(module, loader(), loader(2))
    sanity, *validated = module.validated
    assert len(validated) == len(averages.expected) == 3
    for expected, got in zip(averages.expected, validated):
        assert_same_bits(expected, got)
    assert not torch.equal(sanity["net.0.weight"], validated[0]["net.0.weight"])
    # The model's own came back: bit for bit what the last step had left.
    assert_same_bits(own[-1], module.weights())
    assert callback.attachment is None

    trainer.test(module, loader(1), verbose=False)
    assert_same_bits(client.pull(model, track="ema") if validates else own[-1], module.tested[0])
    assert_same_bits(own[-1], module.weights())
    trainer.validate(module, loader(1), verbose=False)
    assert_same_bits(module.tested[0], module.validated[-1])


@pytest.mark.parametrize(
    "arguments, start",
    [
        ({"decay": 0.9, "update_starting_at_step": 100}, "101ba"),
        ({"half_life": "4ba", "ema_start": "0.7dur"}, "0.7dur"),
        ({"preset": "ema_pytorch"}, "100ba"),
    ],
    ids=str,
)
def test_before_the_average_starts_the_model_has_its_own_weights(
    server, model, caplog, arguments, start
):
    module = make_module()
    callback = EMAWeightAveraging(server.url(model), **arguments)
    own = []
    module.on_validation_start = lambda: own.append(module.weights())
    module.on_train_epoch_end = lambda: setattr(trainer, "should_stop", len(own) == 2)
    trainer = make_trainer(callback, num_sanity_val_steps=0, max_epochs=20)
    trainer.fit(module, loader(), loader(1))
    assert len(own) == 2
    for expected, got in zip(own, module.validated):
        assert_same_bits(expected, got)
    assert_same_bits(own[-1], module.weights())
    said = [record.getMessage() for record in caplog.records if start in record.getMessage()]
    why = f"own weights: the average begins at its ema_start, {start}"
    assert said == [f"evaluating the trainer's {why}", f"the model keeps its {why}"]


def test_an_exception_in_a_validation_gives_the_weights_back(server, client, model):
    module = make_module(fails_in_validation=True)
    callback = EMAWeightAveraging(server.url(model), decay=0.9, existing="continue")
    own = []
    module.on_validation_start = lambda: own.append(module.weights())
    with pytest.raises(RuntimeError, match="in the middle"):
        make_trainer(callback).fit(module, loader(), loader(1))
    assert_same_bits(own[-1], module.weights())
    assert not torch.equal(module.validated[-1]["net.0.weight"], own[-1]["net.0.weight"])
    # Callbacks that save a checkpoint now have what it resumes from.
    assert callback.state_dict()["step"] == BATCHES
    # The next fit attaches anew.
    make_trainer(callback, max_epochs=1).fit(make_module(), loader())
    assert steps_of(client, model)[-1] == 2 * BATCHES


def test_a_fit_resumes_with_its_average(server, client, model, tmp_path):
    """Interrupted, gone further than its checkpoint, and resumed: as never interrupted."""

    def fit(name, epochs, ckpt_path=None):
        callback = EMAWeightAveraging(
            server.url(name), decay=0.9, update_every_n_steps=3, copy_at_end=False
        )
        saver = lightning.callbacks.ModelCheckpoint(
            tmp_path / name, save_top_k=-1, filename="{epoch}"
        )
        module = make_module()
        trainer = make_trainer(callback, saver, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(module, loader(), ckpt_path=ckpt_path)
        return module.weights()

    never = f"{model[:60]}-never"
    expected = fit(never, 4)
    fit(model, 3)
    assert client.model(model).latest.step == 28
    got = fit(model, 4, ckpt_path=tmp_path / model / "epoch=1.ckpt")
    assert_same_bits(expected, got)
    assert_same_bits(client.pull(never, track="ema"), client.pull(model, track="ema"))
    latest = client.model(model).latest
    assert latest.step == 40
    counts = [client.model(name).latest.tracks["ema"].update_count for name in (never, model)]
    assert counts == [14, 14]


class Counter(lightning.LightningModule):
    """Its weight is the number of steps; it logs what it is validated, tested and asked with."""

    def __init__(self, best=8) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.best = best
        self.seen = []

    def training_step(self, batch, index):
        return -self.weight.sum()

    def validation_step(self, batch, index):
        self.seen.append(self.weight.item())
        self.log("distance", float(abs(self.trainer.global_step - self.best)))

    def test_step(self, batch, index):
        self.seen.append(self.weight.item())

    def predict_step(self, batch, index):
        self.seen.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)


def counted(step):
    """The average of `Counter` with decay 0.5, which begins at step 1."""
    average = 1.0
    for weight in range(2, step + 1):
        average += 0.5 * (weight - average)
    return average


def fit_counter(url, folder, *callbacks, saver=None, steps=16, ckpt_path=None, **options):
    """Steps to 16, validated and saved every 4, the best at step 8."""
    callback = EMAWeightAveraging(url, decay=0.5, **options)
    saver = saver or lightning.callbacks.ModelCheckpoint(
        folder, "{step}", monitor="distance", save_top_k=-1, save_last=True
    )
    trainer = make_trainer(
        *callbacks, callback, saver, max_epochs=steps // 4, enable_checkpointing=True
    )
    module = Counter()
    trainer.fit(module, loader(4), loader(1), ckpt_path=ckpt_path)
    return callback, trainer, module


@pytest.mark.parametrize("saves", [None, False], ids=["average in the file", "raw in the file"])
@pytest.mark.parametrize("call", ["test", "validate", "predict"])
def test_ckpt_path_uses_the_average_of_that_checkpoint(
    server, client, model, tmp_path, call, saves
):
    callback, trainer, module = fit_counter(server.url(model), tmp_path, save_average=saves)
    other = make_trainer(EMAWeightAveraging(server.url(model), decay=0.5))
    for one, path, step in (
        (trainer, "best", 8),
        (trainer, "last", 16),
        (trainer, tmp_path / "step=12.ckpt", 12),
        (other, tmp_path / "step=4.ckpt", 4),
        (trainer, None, 16),
    ):
        module = Counter() if one is other else module
        getattr(one, call)(module, loader(1), ckpt_path=path)
        assert module.seen[-1] == counted(step), path
        checkpoint = torch.load(tmp_path / f"step={step}.ckpt")
        if saves is None:
            assert checkpoint["average_in_state_dict"] == {
                **{"model": model, "track": "ema", "step": step, "version": step},
            }
            assert checkpoint["state_dict"]["weight"].item() == counted(step)
            assert checkpoint["current_model_state"]["weight"].item() == step
        else:
            assert checkpoint["state_dict"]["weight"].item() == step
            assert "average_in_state_dict" not in checkpoint
        state = checkpoint["callbacks"][callback.state_key]
        assert ema_client.pull(server.url(model), version=state)["weight"].item() == counted(step)
    # A later fit does not go on from what a test has loaded.
    trainer.test(module, loader(1), ckpt_path="best")
    trainer.fit_loop.max_epochs = 5
    trainer.fit(module, loader(4), loader(1))
    assert client.model(model).latest.tracks["ema"].update_count == 20


def test_a_checkpoint_has_the_average_and_a_fit_resumes_with_raw_weights(
    server, client, model, tmp_path
):
    class Saves(lightning.Callback):
        """In the middle of a validation, when the average is in the model, or before and after."""

        def on_validation_batch_start(self, trainer, *_):
            self.save(trainer, "start")

        def on_validation_epoch_end(self, trainer, *_):
            self.save(trainer, "epoch_end")

        def on_validation_end(self, trainer, *_):
            self.save(trainer, "end")

        def save(self, trainer, when):
            if not trainer.sanity_checking:
                trainer.save_checkpoint(tmp_path / f"{self.name}-{when}-{trainer.global_step}.ckpt")

    before, behind = Saves(), Saves()
    before.name, behind.name = "before", "behind"
    for saves in (True, False):
        url = f"{server.url(model)[:-1]}{int(saves)}"
        callback = EMAWeightAveraging(url, decay=0.5, save_average=saves)
        trainer = make_trainer(before, callback, behind, max_epochs=2)
        trainer.fit(Counter(), loader(4), loader(1))
        for name in ("before", "behind"):
            for when in ("start", "epoch_end", "end"):
                path = tmp_path / f"{name}-{when}-4.ckpt"
                checkpoint = torch.load(path)
                raw = checkpoint["current_model_state" if saves else "state_dict"]
                assert raw["weight"].item() == 4, path
                assert ("current_model_state" in checkpoint) == saves
                read = Counter.load_from_checkpoint(path)
                assert read.weight.item() == (counted(4) if saves else 4), path
        callback, trainer, module = fit_counter(
            url, tmp_path / str(saves), ckpt_path=path, steps=12, copy_at_end=False
        )
        assert module.weight.item() == 12
        assert ema_client.pull(url)["weight"].item() == counted(12)


@pytest.mark.parametrize("path, step", [("best", 8), ("last", 16)])
def test_a_fit_resumes_from_the_best_or_last_checkpoint(
    server, client, model, tmp_path, path, step
):
    callback, trainer, module = fit_counter(server.url(model), tmp_path)
    trainer.fit_loop.max_epochs = step // 4 + 1
    trainer.fit(module, loader(4), loader(1), ckpt_path=path)
    assert trainer.global_step == client.model(model).latest.step == step + 4
    average = ema_client.pull(server.url(model))["weight"].item()
    assert average == module.weight.item() == counted(step + 4)
    assert client.model(model).latest.tracks["ema"].update_count == step + 4


def test_a_checkpoint_that_is_saved_after_the_fit(server, model, tmp_path):
    callback, trainer, module = fit_counter(server.url(model), tmp_path, steps=8)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    fit_counter(server.url(model), tmp_path / "more", steps=4, existing="continue")
    trainer.test(module, loader(1), ckpt_path=tmp_path / "after.ckpt")
    assert module.seen[-1] == counted(8)


def test_a_checkpoint_that_says_nothing_of_its_average(server, model, tmp_path, caplog):
    saver = lightning.callbacks.ModelCheckpoint(tmp_path, "{step}", save_weights_only=True)
    callback, trainer, module = fit_counter(server.url(model), tmp_path, saver=saver, steps=8)
    assert "save_weights_only=True) saves raw weights" in caplog.text
    path = tmp_path / "step=8.ckpt"
    for call in (trainer.test, trainer.validate, trainer.predict):
        with pytest.raises(ema_client.InvalidArgumentError, match="nor identifies one.*=False"):
            call(module, loader(1), ckpt_path=path)
    without = EMAWeightAveraging(server.url(model), validate_with_average=False)
    make_trainer(without).test(module, loader(1), ckpt_path=path)
    assert module.seen[-1] == 8


def test_a_checkpoint_whose_average_is_gone_is_not_tested_with_other_weights(
    server, model, tmp_path
):
    callback, trainer, module = fit_counter(
        server.url(model), tmp_path, save_average=False, keep_resumable=1, max_pinned_versions=1
    )
    with pytest.raises(ema_client.OutOfRangeError, match="version 4 "):
        trainer.test(module, loader(1), ckpt_path=tmp_path / "step=4.ckpt")


def test_before_the_average_starts_a_checkpoint_has_raw_weights(server, model, tmp_path):
    callback, trainer, module = fit_counter(server.url(model), tmp_path, update_starting_at_step=10)
    checkpoint = torch.load(tmp_path / "step=8.ckpt")
    assert checkpoint["state_dict"]["weight"].item() == 8
    assert "average_in_state_dict" not in checkpoint
    trainer.test(module, loader(1), ckpt_path=tmp_path / "step=8.ckpt")
    assert module.seen[-1] == 8
    checkpoint = torch.load(tmp_path / "step=12.ckpt")
    assert checkpoint["current_model_state"]["weight"].item() == 12
    assert checkpoint["state_dict"]["weight"].item() < 12


def test_lightnings_own_callback_beside_ours_is_refused(server, model):
    callback = EMAWeightAveraging(server.url(model), decay=0.5)
    with pytest.raises(ema_client.InvalidArgumentError, match="Theirs puts .*save_average=False"):
        make_trainer(Theirs(), callback).fit(make_module(), loader())


def test_an_existing_average_is_refused_or_replaced(server, client, model, tmp_path, caplog):
    """Also by a callback with existing="new", a fit that resumes continues the average."""

    def fit(epochs, ckpt_path=None, **options):
        callback = EMAWeightAveraging(server.url(model), decay=0.9, **options)
        saver = lightning.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, filename="{epoch}")
        trainer = make_trainer(callback, saver, max_epochs=epochs, enable_checkpointing=True)
        trainer.fit(make_module(), loader(), ckpt_path=ckpt_path)
        return client.model(model).latest.number

    assert fit(1) == BATCHES
    with pytest.raises(ema_client.FailedPreconditionError, match='existing="new"'):
        fit(1)
    assert fit(1, existing="new") == BATCHES
    saved = max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert fit(2, ckpt_path=saved, existing="new") == 2 * BATCHES
    # A checkpoint from an outage of the server has no state of the average.
    checkpoint = torch.load(saved, weights_only=False)
    del checkpoint["callbacks"][f"ema_client.EMAWeightAveraging({model})"]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    caplog.clear()
    assert fit(2, ckpt_path=tmp_path / "without.ckpt") == 3 * BATCHES
    assert any("does not say which average" in record.getMessage() for record in caplog.records)


def test_a_checkpoint_of_a_server_without_a_disk(tmp_path, model, caplog):
    with ServerProcess(tmp_path / "server") as server:

        def fit(**options):
            saver = lightning.callbacks.ModelCheckpoint(tmp_path / "saved")
            callback = EMAWeightAveraging(server.url(model), decay=0.9, **options)
            trainer = make_trainer(callback, saver, max_epochs=1, enable_checkpointing=True)
            trainer.fit(make_module(), loader())

        fit()
        assert any("no average to resume from" in record.message for record in caplog.records)
        assert any((tmp_path / "saved").iterdir())
        fit(on_error="raise", existing="continue")


def test_without_the_server_the_model_is_validated_as_it_is(tmp_path, model, caplog):
    caplog.set_level(logging.WARNING)
    with ServerProcess(tmp_path) as server:
        module = make_module()

        class Killer(lightning.Callback):
            def on_train_batch_end(self, trainer, pl_module, outputs, batch, index):
                if trainer.global_step == 5:
                    server.kill()

        callback = EMAWeightAveraging(server.url(model), decay=0.9, max_wait_s=2, timeout_s=2)
        own = []
        module.on_validation_start = lambda: own.append(module.weights())
        make_trainer(callback, Killer(), max_epochs=1, num_sanity_val_steps=0).fit(
            module, loader(), loader(1)
        )
    assert_same_bits(own[0], module.validated[0])
    assert_same_bits(own[0], module.weights())
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert "evaluating the trainer's own weights" in messages
    assert "the model keeps its own weights" in messages


def test_steps_that_amp_skips_do_not_count(server, client, model):
    precision = lightning.plugins.MixedPrecision(
        "16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=8.0)
    )
    callback = EMAWeightAveraging(server.url(model), decay=0.9, copy_at_end=False)
    trainer = make_trainer(callback, plugins=[precision], max_epochs=2)
    module = make_module(bad_batches=(2, 5))
    trainer.fit(module, loader())
    assert trainer.global_step == 2 * BATCHES
    assert steps_of(client, model) == list(range(1, 2 * BATCHES - 4 + 1))


def test_forward_and_backward_run_while_a_push_reads_the_weights(server, client, model):
    """They run inside optimizer.step(closure) here: the push must be waited for after them."""
    order = []
    module = make_module()
    training_step = module.training_step

    def logged_step(batch):
        order.append("forward")
        return training_step(batch, 0)

    module.training_step = logged_step
    callback = EMAWeightAveraging(server.url(model), decay=0.9, copy_at_end=False)

    class Watcher(lightning.Callback):
        def on_train_start(self, trainer, pl_module):
            pusher = callback.attachment._pusher
            wait = pusher.wait_released
            pusher.wait_released = lambda: (order.append("wait"), wait())

    make_trainer(callback, Watcher(), max_steps=3).fit(module, loader())
    assert order == ["forward", "wait"] * 3


@pytest.mark.parametrize(
    "schedule", [{"decay": 0.9}, {"half_life": "4ba", "update_interval": "3ba"}], ids=str
)
def test_the_distance_between_raw_and_averaged_weights_is_logged(
    server, client, model, tmp_path, schedule
):
    logger = lightning.loggers.CSVLogger(tmp_path)
    callback = EMAWeightAveraging(
        server.url(model), **schedule, log_statistics=True, on_error="wait", tracks={"b": "9ba"}
    )
    trainer = make_trainer(
        callback, logger=logger, log_every_n_steps=5, accumulate_grad_batches=2, max_epochs=6
    )
    trainer.fit(make_module(), loader(), loader(2))
    with open(logger.experiment.metrics_file_path) as file:
        rows = [row for row in csv.DictReader(file) if row["ema_distance"]]
    # Lightning counts from 0.
    assert [int(row["step"]) + 1 for row in rows] == list(range(5, 31, 5))
    made = [entry.version for entry in client.versions(model)]
    assert ("b" in made[-1].tracks) and made[-1].tracks["raw"].updated
    # The copy track makes no further pushes.
    interval = schedule.get("update_interval")  # None: "1ba".
    assert client.model(model).tracks["raw"].update_interval == interval
    computed = {
        (numbers.norm, numbers.distance)
        for version in made
        for track, numbers in version.statistics.items()
        if track == "ema"
    }
    assert {(float(row["ema_norm"]), float(row["ema_distance"])) for row in rows} <= computed
    assert all(float(row["b_distance"]) > 0 for row in rows)


def test_several_optimizers_are_refused(server, model):
    callback = EMAWeightAveraging(server.url(model), decay=0.9)
    with pytest.raises(ema_client.InvalidArgumentError, match="2 optimizers"):
        make_trainer(callback).fit(make_module(optimizers=2), loader())


@pytest.mark.parametrize(
    "arguments, problem",
    [
        ({"decay": 1.5}, "decay 1.5: must be"),
        ({"device": "cpu"}, "device 'cpu': does nothing here"),
        ({"decay": 0.9, "half_life": "20ba"}, "decay and half_life are both given"),
        ({"update_every_n_steps": 3, "preset": "diffusers"}, "update_every_n_steps and preset"),
        ({"update_every_n_steps": -1}, "update_every_n_steps -1: must be a whole number"),
        ({"update_every_n_steps": 0}, "averages nothing"),
        (
            {"update_starting_at_epoch": 5, "update_starting_at_step": 3},
            "update_starting_at_epoch 5 and update_starting_at_step 3 are both given",
        ),
        ({"update_starting_at_step": 1.5}, "update_starting_at_step 1.5"),
        ({"decay": 0.9, "tracks": {"ema": "copy"}}, 'the track "ema", which is in tracks too'),
        ({"half_life": "1000"}, "1000"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(arguments, problem):
    with pytest.raises(ema_client.InvalidArgumentError) as error:
        EMAWeightAveraging("ema://localhost/m", **arguments)
    assert problem in str(error.value)


def test_arguments_that_attach_has_not_are_refused_at_once():
    with pytest.raises(TypeError, match='unexpected argument "halflife".*half_life'):
        EMAWeightAveraging("ema://localhost/m", halflife="20ba")
    with pytest.raises(ema_client.InvalidArgumentError, match="must be like ema://"):
        EMAWeightAveraging("localhost", decay=0.9)


def test_a_pickled_callback_averages(server, client, model):
    """As in the processes of ddp_spawn."""
    averaging = pickle.loads(pickle.dumps(EMAWeightAveraging(server.url(model), decay=0.5)))
    make_trainer(averaging).fit(make_module(), loader())
    assert steps_of(client, model) == [*range(1, 3 * BATCHES + 1)]


def test_each_model_has_its_own_state():
    keys = {EMAWeightAveraging(f"ema://localhost/{name}").state_key for name in "ab"}
    assert len(keys) == 2


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_one_package_alone_is_enough(package):
    program = f"""
import sys
import {package} as package
from ema_client.lightning import EMAWeightAveraging
callback = EMAWeightAveraging("ema://localhost/m")
assert isinstance(callback, package.Callback)
assert package.Trainer(callbacks=callback, logger=False).callbacks[0] is callback
print([name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules])
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == str([package])


TWO_RANKS = """
import sys
import lightning.pytorch, torch
from ema_client.lightning import EMAWeightAveraging

class Module(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11))
        self.validated = None
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, index):
        self.validated = {name: tensor.clone() for name, tensor in self.state_dict().items()}
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

torch.manual_seed(0)
batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(80, 6)), 8)
module = Module()
trainer = lightning.pytorch.Trainer(
    accelerator="cpu", devices=2, strategy="ddp", max_epochs=2, logger=False,
    callbacks=[
        EMAWeightAveraging(sys.argv[1], decay=0.9),
        lightning.pytorch.callbacks.ModelCheckpoint(sys.argv[2], "saved"),
    ],
)
trainer.fit(module, batches, batches)
torch.save([module.validated, module.state_dict()], f"{sys.argv[2]}/{trainer.global_rank}.pt")
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks(server, client, model, tmp_path):
    (tmp_path / "program.py").write_text(TWO_RANKS)
    command = [sys.executable, tmp_path / "program.py", server.url(model), tmp_path]
    subprocess.run(command, check=True, timeout=250)
    # 5 batches a rank and epoch.
    assert steps_of(client, model) == list(range(1, 11))
    pulled = client.pull(model, track="ema")
    for rank in (0, 1):
        for weights in torch.load(tmp_path / f"{rank}.pt"):
            assert_same_bits(pulled, weights)
    saved = torch.load(tmp_path / "saved.ckpt")
    assert_same_bits(pulled, saved["state_dict"])
    assert not torch.equal(pulled["net.0.weight"], saved["current_model_state"]["net.0.weight"])


@pytest.mark.parametrize(
    "package", [lightning, pytorch_lightning], ids=lambda package: package.__name__
)
def test_lightnings_wrapper_of_an_optimizer(package):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    assert unwrap_optimizers(package.core.optimizer.LightningOptimizer(optimizer))[0] is optimizer


def test_manual_optimization(server, client, model):
    module = make_module()
    module.automatic_optimization = False

    def training_step(batch):
        optimizer = module.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            module.manual_backward(module.net(batch[0]).square().mean())
            optimizer.step()

    module.training_step = training_step
    callback = EMAWeightAveraging(server.url(model), decay=0.9, tracks={"raw": "copy"})
    own = []
    module.on_train_end = lambda: own.append(module.weights())
    make_trainer(callback, max_epochs=1).fit(module, loader())
    assert steps_of(client, model) == list(range(1, 2 * BATCHES + 1))
    assert_same_bits(own[0], client.pull(model, track="raw"))


@pytest.mark.timeout(300)
def test_the_example(server, client, model):
    assert run_example("lightning_train.py", server.url(model)).startswith("step 32: ")
    assert client.model(model).latest.step == 32
