# SPDX-License-Identifier: Apache-2.0
"""The only checkpoint of a model is corrupt at the start: no new average silently takes its place."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess

import ema_client
import pytest
import torch
from server_process import ServerProcess
from testing import EMACTL, step_until, wait_for


class Training:
    """A model of one layer, and its optimizer."""

    def __init__(self) -> None:
        self.net = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)

    def attach(self, url: str) -> ema_client.Attachment:
        return ema_client.attach(self.net, self.optimizer, url, half_life="3ba")

    def step(self) -> None:
        self.net(torch.ones(1, 3)).sum().backward()
        self.optimizer.step()


def corrupt_the_only_checkpoint(data: pathlib.Path, model: str) -> str:
    """Changes its last byte of weights; its name."""
    (checkpoint,) = (data / "models" / model / "checkpoints").glob("step-*")
    (weights,) = checkpoint.glob("tracks/*/model.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return checkpoint.name


def run_command_of(message: str, address: str) -> subprocess.CompletedProcess[str]:
    """Runs the emactl command that the message gives, as it stands there."""
    found = re.search(r"`emactl ([^`]+)`", message)
    assert found is not None, message
    command = [str(EMACTL), "--server", address, *shlex.split(found[1])]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def train_and_corrupt(server: ServerProcess, data: pathlib.Path, model: str) -> str:
    """Saves step 2 of a training, kills the server, and starts it with a corrupt checkpoint."""
    training = Training()
    with training.attach(server.url(model)) as ema:
        for _ in range(2):
            training.step()
        ema.wait_pushed()
        with ema_client.Client(server.address) as client:
            client.create_checkpoint(model)
    server.kill()
    name = corrupt_the_only_checkpoint(data, model)
    server.start(port=server.port)
    return name


def test_attach_is_refused_until_the_model_is_deleted(tmp_path, model):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data) as server:
        name = train_and_corrupt(server, data, model)
        training = Training()
        for start in range(2):
            with pytest.raises(ema_client.FailedPreconditionError) as error:
                training.attach(server.url(model))
            assert error.value.reason == "ALL_CHECKPOINTS_CORRUPT"
            assert f'model "{model}"' in str(error.value)
            assert f"count 1, newest .corrupt-{name}, step 2" in str(error.value)
            with ema_client.Client(server.address) as client:
                assert not client.models()
                with pytest.raises(ema_client.NotFoundError, match="every checkpoint is corrupt"):
                    client.model(model)
            assert f"model not loaded model={model}" in server.log()
            if start == 0:
                server.kill()
                server.start(port=server.port)
        deleted = run_command_of(str(error.value), server.address)
        assert (deleted.returncode, deleted.stdout) == (0, f"deleted {model}\n"), deleted.stderr
        assert len(list(data.glob(f"models/.deleted-*-{model}/checkpoints/.corrupt-{name}"))) == 1
        with training.attach(server.url(model)) as ema:
            training.step()
            assert ema.wait_pushed() is not None
        assert server.stop() == 0
        # A restart does not find the deleted checkpoints.
        server.start()
        with ema_client.Client(server.address) as client:
            assert client.model(model).latest.step == 1


def test_running_training_warns_and_goes_on_after_the_deletion(tmp_path, model, caplog):
    data = tmp_path / "data"
    training = Training()
    with ServerProcess(tmp_path, data_dir=data) as server:
        with training.attach(server.url(model)) as ema:
            training.step()
            ema.wait_pushed()
            with ema_client.Client(server.address) as client:
                client.create_checkpoint(model)
            server.kill()
            corrupt_the_only_checkpoint(data, model)
            server.start(port=server.port)

            def warnings() -> list[str]:
                mended = "pushes will not resume until this is fixed"
                return [line for line in caplog.messages if mended in line]

            step_until(lambda: ema.stats.skipped > 0, training.step)
            wait_for(warnings, "the warning")
            assert "every checkpoint is corrupt" in warnings()[0]
            pushes = ema.stats.pushes
            with ema_client.Client(server.address) as client:
                client.delete_model(model)
            step_until(lambda: ema.stats.pushes > pushes, training.step)
            assert len(warnings()) == 1
        assert server.stop() == 0
