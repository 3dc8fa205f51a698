# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's folders as other tools read them."""

from __future__ import annotations

import json
import pathlib

import ema_client
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from server_process import ServerProcess
from testing import Weights, assert_same_bits, random_weights

TRACKS = {"fast": "20ba", "raw": "copy"}
# So small that every track is split.
MAX_FILE_BYTES = 600


def folder_of(data_dir: pathlib.Path, model: str, track: str) -> pathlib.Path:
    (checkpoint,) = (data_dir / "models" / model / "checkpoints").glob("step-*")
    return checkpoint / "tracks" / track


@pytest.fixture
def saved(tmp_path, rng, model):
    """A function that saves a model with a server of these flags: the averages, and where they are."""

    def save(*flags: str, weights: Weights | None = None):
        data_dir = tmp_path / "data"
        with ServerProcess(tmp_path, *flags, data_dir=data_dir) as server:
            with ema_client.Client(server.address) as client:
                first = weights or random_weights(rng)
                client.create_model(model, first, tracks=TRACKS)
                with client.open_run(model) as run:
                    run.push(step=1, weights=first)
                    run.push(step=2, weights=weights or random_weights(rng))
                client.create_checkpoint(model)
                pulled = {
                    track: client.pull(model, track=track, framework="numpy") for track in TRACKS
                }
            assert server.stop() == 0
        return pulled, {track: folder_of(data_dir, model, track) for track in TRACKS}

    return save


def test_safetensors_reads_a_track(saved, model):
    pulled, folders = saved()
    for track, folder in folders.items():
        assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
        assert_same_bits(pulled[track], load_file(folder / "model.safetensors"))
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            metadata = file.metadata()
        assert metadata["format"] == "pt"
        assert metadata["ema.model"] == model
        assert metadata["ema.track"] == track
        assert metadata["ema.step"] == "2"
        assert metadata["ema.version"] == "2"
        assert metadata["ema.incarnation"] == str(pulled[track].version.incarnation)


def test_safetensors_reads_a_split_track_by_its_index(saved):
    pulled, folders = saved("--max-file-bytes", str(MAX_FILE_BYTES))
    for track, folder in folders.items():
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        places = index["weight_map"]
        assert len(set(places.values())) > 1
        assert set(places) == set(pulled[track])
        tensors = {}
        for name, file_name in places.items():
            with safe_open(folder / file_name, framework="pt") as file:
                tensors[name] = file.get_tensor(name)
        assert_same_bits(pulled[track], tensors)
        assert index["metadata"]["total_size"] == sum(
            tensor.numel() * tensor.element_size() for tensor in tensors.values()
        )
        # The files together are the track: nothing is in two, nothing is elsewhere.
        together: dict[str, torch.Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            part = load_file(path)
            assert not set(part) & set(together)
            together |= part
        assert_same_bits(pulled[track], together)


@pytest.mark.framework
def test_transformers_reads_a_track(saved):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
    )
    source = transformers.BertModel(config)
    weights = {name: np.asarray(tensor) for name, tensor in source.state_dict().items()}
    pulled, folders = saved("--max-file-bytes", "4096", weights=weights)
    for track, folder in folders.items():
        config.save_pretrained(folder)
        assert (folder / "model.safetensors.index.json").is_file()
        loaded = transformers.BertModel.from_pretrained(folder)
        assert_same_bits(pulled[track], loaded.state_dict())
