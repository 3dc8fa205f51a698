# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folders, and saved ones, as Hugging Face Transformers read them."""

from __future__ import annotations

import ema_client
import pytest
import torch
from server_process import ServerProcess

pytestmark = pytest.mark.framework

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")


@pytest.mark.parametrize("how", ["python", "emactl", "other config"])
def test_from_pretrained_reads_what_is_saved(server, client, emactl, tmp_path, model, how):
    config = transformers.BertConfig(
        num_hidden_layers=1,
        num_attention_heads=2,
        hidden_size=16,
        intermediate_size=32,
        vocab_size=40,
    )
    torch.manual_seed(3)
    module = transformers.BertModel(config)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    described = tmp_path / "described"
    module.save_pretrained(described)
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "an", "average"])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")
    tokenizer.save_pretrained(described)
    with ema_client.attach(
        module,
        optimizer,
        server.url(model),
        tracks={"ema": "2ba"},
        files=None if how == "other config" else described,
    ):
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.arange(12).reshape(2, 6)).pooler_output.sum().backward()
            optimizer.step()
    folder = tmp_path / "saved"
    if how == "emactl":
        assert emactl("pull", model, "--track", "ema", "-o", f"{folder}/").returncode == 0
    else:
        files = described if how == "other config" else None
        client.save(model, f"{folder}/", track="ema", files=files)

    read, info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    assert isinstance(read, transformers.BertModel)
    text = "an average is an average"
    beside = transformers.AutoTokenizer.from_pretrained(folder)
    assert beside(text).input_ids == tokenizer(text).input_ids == [1, 2, 0, 1, 2]
    average = client.pull(model, track="ema")
    state = read.state_dict()
    assert {
        name: torch.equal(state[name], value) for name, value in average.items()
    } == dict.fromkeys(state, True)
    assert not torch.equal(state["pooler.dense.weight"], module.pooler.dense.weight)


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
