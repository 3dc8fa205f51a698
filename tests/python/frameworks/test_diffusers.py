# SPDX-License-Identifier: Apache-2.0
"""Our EMAModel beside diffusers' own, in the same training."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
import threading

import ema_client
import numpy as np
import pytest
import torch
from ema_client.diffusers import EMAModel
from examples import run_example
from server_process import ServerProcess
from testing import assert_same_bits

pytestmark = pytest.mark.framework

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
Theirs = pytest.importorskip("diffusers.training_utils").EMAModel


class Trainer:
    """A small UNet and its optimizer."""

    def __init__(self, seed=0) -> None:
        torch.manual_seed(seed)
        self.unet = diffusers.UNet2DModel(
            sample_size=4,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            norm_num_groups=4,
            block_out_channels=(4, 8),
            down_block_types=("DownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "UpBlock2D"),
        )
        self.optimizer = torch.optim.AdamW(self.unet.parameters(), lr=0.01)
        self._generator = torch.Generator().manual_seed(3)

    def parameters(self):
        return self.unet.parameters()

    def step(self) -> None:
        images = torch.randn(2, 1, 4, 4, generator=self._generator)
        self.optimizer.zero_grad()
        self.unet(images, torch.tensor([1, 5])).sample.square().mean().backward()
        self.optimizer.step()

    def weights(self):
        return [parameter.detach().clone() for parameter in self.parameters()]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


def named(trainer, tensors):
    return dict(zip((name for name, _ in trainer.unet.named_parameters()), tensors))


SCHEDULES = {
    "defaults": {},
    "short": {"decay": 0.5},
    "later": {"decay": 0.9, "update_after_step": 5, "min_decay": 0.3},
    "warm-up": {"use_ema_warmup": True, "inv_gamma": 2.0, "power": 0.75, "update_after_step": 3},
    "crossed": {"decay": 0.5, "min_decay": 0.9},
}


@pytest.mark.parametrize("arguments", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("in_place", [True, False], ids=["optimizer", "alone"])
def test_decays_are_theirs_and_the_average_is_that_in_the_process(
    server, client, model, trainer, arguments, in_place
):
    theirs = Theirs(trainer.parameters(), **arguments)
    local = ema_client.LocalEMA(trainer.unet, preset={"preset": "diffusers", **arguments})
    with EMAModel(
        trainer.parameters(),
        **arguments,
        url=server.url(model),
        model=trainer.unet,
        optimizer=trainer.optimizer if in_place else None,
    ) as ema:
        for step in range(1, 25):
            trainer.step()
            for each in (theirs, ema):
                each.step(trainer.parameters())
            local.update()
            assert ema.optimization_step == theirs.optimization_step == step
            assert ema.cur_decay_value == theirs.cur_decay_value
        assert_same_bits(local.weights(), named(trainer, ema.shadow_params))
        for ours, their in zip(ema.shadow_params, theirs.shadow_params):
            torch.testing.assert_close(ours, their, rtol=1e-5, atol=1e-6)
    weights = [entry.version.tracks["ema"].update_weight for entry in client.versions(model)]
    assert weights == [np.float32(1 - theirs.get_decay(step)) for step in range(1, 25)]
    assert_same_bits(local.weights(), client.pull(model, track="ema"))


def test_every_decay_is_theirs(trainer):
    for arguments in SCHEDULES.values():
        ours = EMAModel(trainer.parameters(), **arguments)
        theirs = Theirs(trainer.parameters(), **arguments)
        for step in (*range(30), 10**3, 10**6):
            assert ours.get_decay(step) == theirs.get_decay(step), (arguments, step)


def test_it_has_their_calls_and_arguments():
    for name, theirs in inspect.getmembers(Theirs, inspect.isroutine):
        if name.startswith("_") and name != "__init__":
            continue
        own = inspect.signature(getattr(EMAModel, name)).parameters
        for parameter in inspect.signature(theirs).parameters.values():
            if parameter.kind is not parameter.VAR_KEYWORD:
                assert parameter.name in own, (name, parameter.name)
                assert own[parameter.name].kind == parameter.kind
                assert own[parameter.name].default == parameter.default, (name, parameter.name)
        places = [p for p in own.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        others = inspect.signature(theirs).parameters.values()
        assert [p.name for p in places] == [
            p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD
        ]


def test_store_copy_to_and_restore(server, model, trainer):
    ema = EMAModel(trainer.parameters(), decay=0.5, url=server.url(model), foreach=True)
    with pytest.raises(ema_client.FailedPreconditionError, match="store"):
        ema.restore(trainer.parameters())
    for _ in range(5):
        trainer.step()
        ema.step(trainer.parameters())
    ema.to("cpu")
    ema.to(dtype=torch.float32)
    ema.pin_memory()
    own, average = trainer.weights(), ema.shadow_params
    assert not torch.equal(own[0], average[0])
    ema.store(trainer.parameters())
    ema.copy_to(trainer.parameters())
    assert all(map(torch.equal, trainer.weights(), average))
    ema.restore(trainer.parameters())
    assert all(map(torch.equal, trainer.weights(), own))
    with pytest.raises(ema_client.FailedPreconditionError, match="store"):
        ema.restore(trainer.parameters())
    half = [tensor.to(torch.bfloat16) for tensor in own]
    ema.copy_to(half)
    assert all(torch.equal(h, a.to(torch.bfloat16)) for h, a in zip(half, average))
    whole = [tensor.to(torch.int8) for tensor in own]
    with pytest.raises(
        ValueError, match="parameters: wrong dtypes: .*: torch.int8 for torch.float32"
    ):
        ema.copy_to(whole)
    assert all(torch.equal(w, o.to(torch.int8)) for w, o in zip(whole, own))
    ema.close()
    with pytest.raises(ema_client.FailedPreconditionError, match="closed"):
        ema.step(trainer.parameters())
    assert all(map(torch.equal, ema.shadow_params, average))


def test_before_the_first_step_the_averages_are_the_constructors_weights(
    server, model, trainer, tmp_path
):
    def make(**options):
        unet = diffusers.UNet2DModel
        return EMAModel(
            trainer.parameters(), model_cls=unet, model_config=trainer.unet.config, **options
        )

    initial = trainer.weights()
    ema = make(url=server.url(model), model=trainer.unet)
    trainer.step()
    own = trainer.weights()
    assert not torch.equal(own[0], initial[0])
    assert all(map(torch.equal, ema.shadow_params, initial))
    ema.store(trainer.parameters())
    ema.copy_to(trainer.parameters())
    assert all(map(torch.equal, trainer.weights(), initial))
    ema.restore(trainer.parameters())
    assert all(map(torch.equal, trainer.weights(), own))
    ema.save_pretrained(tmp_path)
    folder = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, folder.parameters(), initial))
    read = EMAModel.from_pretrained(tmp_path, diffusers.UNet2DModel)
    assert all(map(torch.equal, read.shadow_params, initial))
    for state in (ema.state_dict(), read.state_dict(), Theirs(initial).state_dict()):
        loaded = make(url=server.url(model))
        loaded.load_state_dict(state)
        assert loaded.optimization_step == 0
        assert all(map(torch.equal, loaded.shadow_params, initial))
    with pytest.raises(ema_client.InvalidArgumentError, match="2 parameters are given"):
        loaded.load_state_dict({"shadow_params": initial[:2]})
    with ema:
        ema.step(trainer.parameters())
        assert "shadow_params" not in ema.state_dict()
        assert all(map(torch.equal, ema.shadow_params, own))


def test_the_next_step_waits_for_weights_that_are_read(server, client, model):
    """With the optimizer, the push goes on after step(), and the optimizer waits for it."""
    parameter = torch.nn.Parameter(torch.ones(24 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with EMAModel(
        [parameter], url=server.url(model), optimizer=optimizer, tracks={"raw": "copy"}
    ) as ema:
        ema.step([parameter])
        ema.attachment.wait_pushed()
        parameter.grad = torch.ones_like(parameter)
        server.send_signal(signal.SIGSTOP)
        waker = threading.Timer(1, server.send_signal, (signal.SIGCONT,))
        try:
            optimizer.step()
            ema.step([parameter])
            # Had step() waited, it would have given the push up by now.
            assert ema.attachment.stats.skipped == 0
            waker.start()
            optimizer.step()
            assert waker.finished.is_set()
        finally:
            server.send_signal(signal.SIGCONT)
        assert ema.attachment.wait_pushed().step == 2
        assert ema.attachment.stats.skipped == 0
    assert torch.equal(client.pull(model, track="raw")["0"], torch.zeros(24 << 20))
    assert parameter[0] == -1


def test_names(server, client, model, trainer):
    """Of the model if it is given, also for a copy of its parameters, and for a part of them."""
    names = [name for name, _ in trainer.unet.named_parameters()]
    copies = trainer.weights()
    part = [p for name, p in trainer.unet.named_parameters() if name.endswith("bias")]
    cases = {
        "positions": ((trainer.parameters(), {}), [str(place) for place in range(len(names))]),
        "copies": ((copies, {"model": trainer.unet}), names),
        "wrapped": ((copies, {"model": torch.nn.DataParallel(trainer.unet)}), names),
        "part": ((part, {"model": trainer.unet}), [n for n in names if n.endswith("bias")]),
    }
    for case, ((parameters, options), expected) in cases.items():
        name = f"{model}-{case}"
        parameters = list(parameters)
        with EMAModel(parameters, url=server.url(name), **options) as ema:
            ema.step(part if case == "part" else trainer.parameters())
            pulled = ema.shadow_params
        assert [spec.name for spec in client.model(name).tensors] == expected
        source = part if case == "part" else trainer.parameters()
        assert all(map(torch.equal, pulled, source))
    with pytest.raises(ema_client.InvalidArgumentError, match="2 parameters are given"):
        EMAModel(copies[:2], model=trainer.unet)
    with pytest.raises(ema_client.InvalidArgumentError, match="parameter 1 of"):
        EMAModel([copies[0], copies[0], *copies[2:]], model=trainer.unet)
    ema = EMAModel(trainer.parameters(), url=server.url(model))
    with pytest.raises(ema_client.InvalidArgumentError, match="2 parameters are given"):
        ema.step(copies[:2])


@pytest.mark.parametrize("kept", ["folder", "state_dict"])
def test_it_resumes(server, client, model, tmp_path, kept):
    """Gone further than what was saved, and resumed: as never interrupted."""
    never = f"{model[:60]}-never"
    arguments = {"decay": 0.9, "use_ema_warmup": True}

    def make(trainer, name, **options):
        return EMAModel(
            trainer.parameters(),
            model_cls=diffusers.UNet2DModel,
            model_config=trainer.unet.config,
            url=server.url(name),
            model=trainer.unet,
            **options,
        )

    trainer = Trainer()
    with make(trainer, never, **arguments) as other, make(trainer, model, **arguments) as ema:
        for step in range(1, 16):
            trainer.step()
            other.step(trainer.parameters())
            if step <= 12:
                ema.step(trainer.parameters())
            if step == 8:
                saved, average = ema.state_dict(), ema.shadow_params
                ema.save_pretrained(tmp_path)
        expected = other.shadow_params
    assert "shadow_params" not in saved
    assert saved["optimization_step"] == saved["ema_server"]["step"] == 8
    # The folder is one of the averages, for diffusers.
    read = diffusers.UNet2DModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, read.parameters(), average))
    assert client.model(model).latest.step == 12

    replayed = Trainer()
    if kept == "folder":
        read = EMAModel.from_pretrained(tmp_path, diffusers.UNet2DModel)
        assert all(map(torch.equal, read.shadow_params, average))
        saved = read.state_dict()
    with make(replayed, model) as ema:
        ema.load_state_dict(saved)
        assert (ema.decay, ema.use_ema_warmup, ema.optimization_step) == (0.9, True, 8)
        # Before the first step, the average is that of the state.
        assert all(map(torch.equal, ema.shadow_params, average))
        for step in range(1, 16):
            replayed.step()
            if step > 8:
                ema.step(replayed.parameters())
        assert ema.optimization_step == 15
        assert all(map(torch.equal, ema.shadow_params, expected))
        with pytest.raises(ema_client.FailedPreconditionError, match="before the first step"):
            ema.load_state_dict(saved)


def test_an_existing_average_is_refused_or_replaced(server, client, model, trainer):
    def steps(state=None, **options):
        with EMAModel(trainer.parameters(), url=server.url(model), **options) as ema:
            if state is not None:
                ema.load_state_dict(state)
            for _ in range(2):
                ema.step(trainer.parameters())
            return ema.state_dict(), client.model(model).latest.number

    assert steps()[1] == 2
    with pytest.raises(ema_client.FailedPreconditionError, match='existing="new"'):
        steps()
    state, number = steps(existing="new")
    assert number == 2
    # Whatever `existing` is, a state is resumed, or one without an average continued.
    assert steps(state, existing="new")[1] == 4
    assert steps({**state, "ema_server": None})[1] == 6


def test_states_that_are_not_ours(server, model, trainer, tmp_path):
    ema = EMAModel(trainer.parameters(), url=server.url(model))
    theirs = Theirs(trainer.parameters())
    ema.load_state_dict(theirs.state_dict())
    theirs.step(trainer.parameters())
    with pytest.raises(ema_client.InvalidArgumentError, match="ema_client.convert"):
        ema.load_state_dict(theirs.state_dict())
    state = {"optimization_step": 3, "decay": 1.5, "ema_server": None}
    with pytest.raises(ema_client.InvalidArgumentError, match="decay 1.5"):
        ema.load_state_dict(state)
    assert (ema.decay, ema.optimization_step) == (0.9999, 0)
    with pytest.raises(ema_client.InvalidArgumentError, match="state of an average"):
        ema.load_state_dict({"optimization_step": 3, "ema_server": {"format": 7}})


def test_a_server_without_a_disk(tmp_path, model, trainer, caplog):
    with ServerProcess(tmp_path) as server:
        with EMAModel(trainer.parameters(), url=server.url(model)) as ema:
            ema.step(trainer.parameters())
            assert ema.state_dict()["ema_server"] is None
            assert any("no average to resume from" in r.getMessage() for r in caplog.records)


def test_wrong_arguments_are_refused_at_once(trainer):
    parameters = list(trainer.parameters())
    with pytest.raises(TypeError, match='unexpected argument "half_life"'):
        EMAModel(parameters, half_life="4ba")
    with pytest.raises(ema_client.InvalidArgumentError, match="decay 1.5"):
        EMAModel(parameters, decay=1.5)
    with pytest.raises(ema_client.InvalidArgumentError, match="must be like ema://"):
        EMAModel(parameters, url="localhost")
    with pytest.raises(ema_client.InvalidArgumentError, match="model=module"):
        EMAModel(trainer.unet)
    with pytest.raises(ema_client.InvalidArgumentError, match="url: needed"):
        EMAModel(parameters).step(parameters)
    with pytest.raises(ema_client.InvalidArgumentError, match="model_cls"):
        EMAModel(parameters).save_pretrained("nowhere")
    with pytest.raises(ema_client.InvalidArgumentError, match="averages keep theirs"):
        EMAModel(parameters).to(dtype=torch.bfloat16)
    old = EMAModel(parameters, max_value=0.5, min_value=0.25, device="cpu")
    assert (old.decay, old.min_decay) == (0.5, 0.25)


def test_importing_it_does_not_import_diffusers():
    program = "import sys, ema_client.diffusers; sys.exit('diffusers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=100).returncode == 0


@pytest.mark.parametrize("is_there", [False, True], ids=["new folder", "their folder"])
def test_from_pretrained_reads_what_is_saved(server, client, model, trainer, tmp_path, is_there):
    described, folder = tmp_path / "described", tmp_path / "out"
    trainer.unet.save_pretrained(folder if is_there else described)
    files = None if is_there else described
    with ema_client.attach(
        trainer.unet, trainer.optimizer, server.url(model), half_life="2ba", files=files
    ):
        for _ in range(3):
            trainer.step()
    client.save(model, f"{folder}/", track="ema")
    read = diffusers.UNet2DModel.from_pretrained(folder)
    assert_same_bits(client.pull(model, track="ema"), dict(read.named_parameters()))


@pytest.mark.timeout(300)
def test_the_example(server, client, model, tmp_path):
    folder = tmp_path / "out"
    for steps in (24, 48):
        output = run_example("diffusers_train.py", server.url(model), folder)
        assert output.startswith(f"step {steps}: ")
    assert client.model(model).latest.step == 48
    averaged = diffusers.UNet2DModel.from_pretrained(folder)
    pulled = client.pull(model, track="ema")
    assert_same_bits(pulled, dict(averaged.named_parameters()))


def test_values_that_group_offloading_keeps_in_files_are_not_written(server, model, tmp_path):
    unet = Trainer().unet
    with ema_client.attach(unet, None, server.url(model)) as ema:
        ema.after_step()
    unet.enable_group_offload(
        onload_device=torch.device("cpu"),
        offload_type="leaf_level",
        offload_to_disk_path=str(tmp_path),
    )
    with pytest.raises(ema_client.InvalidArgumentError, match="before apply_group_offloading"):
        ema_client.load_into(unet, server.url(model))
