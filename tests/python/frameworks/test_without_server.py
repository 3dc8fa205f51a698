# SPDX-License-Identifier: Apache-2.0
"""The callbacks of frameworks where EMA_MODE says that there is no server."""

from __future__ import annotations

import importlib

import pytest
import torch
from testing import assert_same_bits

pytestmark = [pytest.mark.framework, pytest.mark.filterwarnings("ignore")]

# Nothing listens there.
URL = "ema://127.0.0.1:1/m"


@pytest.fixture(params=["disabled", "local"])
def mode(request, monkeypatch):
    monkeypatch.setenv("EMA_MODE", request.param)
    return request.param


def test_lightning(tmp_path, mode):
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    averaging = importlib.import_module("ema_client.lightning").EMAWeightAveraging(URL, decay=0.5)
    weights = {}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, 1)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def on_train_batch_end(self, *_):
            weights["own"] = self.net.weight.detach().clone()

        def validation_step(self, batch, index):
            weights["validated"] = self.net.weight.detach().clone()

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    loader = torch.utils.data.DataLoader(torch.randn(16, 6), batch_size=4)
    trainer = lightning.Trainer(
        callbacks=[averaging],
        default_root_dir=tmp_path,
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader, loader)
    is_own = torch.equal(weights["validated"], weights["own"])
    assert is_own == (mode == "disabled")
    trainer.test(dataloaders=loader, ckpt_path="best")
    assert torch.equal(weights["validated"], weights["own"]) == (mode == "disabled")


def test_hugging_face(tmp_path, mode):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed, which Trainer needs")
    callback = importlib.import_module("ema_client.transformers").EmaCallback(
        URL, half_life="4ba", evaluate_with_average=True, copy_at_end=mode == "local"
    )
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    lines = torch.randint(32, (16, 8))
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            tmp_path,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=[{"input_ids": line, "labels": line} for line in lines],
        eval_dataset=[{"input_ids": line, "labels": line} for line in lines[:4]],
        callbacks=[callback],
        data_collator=transformers.default_data_collator,
    )
    trainer.train()
    own = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    with callback.averaged() as version:
        assert version.number == (0 if mode == "disabled" else 8)
        assert_same_bits(own, trainer.model.state_dict())
