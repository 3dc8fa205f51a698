# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folders as Hugging Face Transformers read them."""

from __future__ import annotations

import ema_client
import pytest
import torch
from server_process import ServerProcess

pytestmark = pytest.mark.framework

transformers = pytest.importorskip("transformers")


@pytest.mark.parametrize("flags", [[], ["--max-file-bytes", "20000"]], ids=["one file", "split"])
def test_from_pretrained_reads_each_track(tmp_path, model, flags):
    # Output and input embeddings are one tensor.
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=32, tie_word_embeddings=True
    )
    torch.manual_seed(3)
    module = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.save_pretrained(tmp_path / "described")
    data_dir = tmp_path / "data"
    tokens = torch.arange(20).reshape(2, 10)
    with ServerProcess(tmp_path, *flags, data_dir=data_dir) as server:
        with ema_client.Client(server.address) as client:
            with ema_client.attach(
                module,
                optimizer,
                f"ema://{server.address}/{model}",
                tracks={"ema": "2ba", "raw": "copy"},
                files=tmp_path / "described",
            ):
                for _ in range(3):
                    optimizer.zero_grad()
                    module(tokens, labels=tokens).loss.backward()
                    optimizer.step()
            checkpoint = client.create_checkpoint(model)
            pulled = {track: client.pull(model, track=track) for track in ("ema", "raw")}
        assert server.stop() == 0

    tracks = data_dir / "models" / model / "checkpoints" / checkpoint.name / "tracks"
    module.eval()
    with torch.no_grad():
        expected = module(tokens).logits
    for track, weights in pulled.items():
        read, info = transformers.GPT2LMHeadModel.from_pretrained(
            tracks / track, output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"], (track, info)
        state = read.state_dict()
        for name, value in weights.items():
            assert torch.equal(torch.as_tensor(value), state[name]), (track, name)
        with torch.no_grad():
            logits = read.eval()(tokens).logits
        assert torch.equal(logits, expected) == (track == "raw")
