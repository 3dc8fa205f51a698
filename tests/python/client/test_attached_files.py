# SPDX-License-Identifier: Apache-2.0
"""Small files that lie beside the weights in checkpoints."""

from __future__ import annotations

import json

import ema_client
import pytest
import torch
from safetensors.torch import save_file
from server_process import ServerProcess
from testing import random_weights

FILES = {"config.json": b'{"layers": 2}', "vocab.txt": b"", "tokenizer.model": bytes(range(256))}
TRACKS = {"ema": "20ba", "raw": "copy"}


def sizes(files):
    return {name: len(data) for name, data in sorted(files.items())}


def checkpoint_files(data_dir, model, checkpoint):
    """What lies beside the weights, by track."""
    tracks = data_dir / "models" / model / "checkpoints" / checkpoint / "tracks"
    return {
        track.name: {
            path.name: path.read_bytes()
            for path in track.iterdir()
            if ".safetensors" not in path.name
        }
        for track in tracks.iterdir()
    }


@pytest.fixture
def hf_folder(tmp_path):
    """As `save_pretrained` leaves one, and things that do not describe a model."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"w": torch.arange(4.0)}, folder / "model.safetensors")
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    for name in ("pytorch_model.bin", "training_args.bin", "pytorch_model.bin.index.json"):
        (folder / name).write_bytes(b"no")
    (folder / "chat_template.jinja").symlink_to(folder / "vocab.txt")
    (folder / "more.json").mkdir()
    return folder


TAKEN = {**FILES, "chat_template.jinja": b""}


def test_every_checkpoint_from_then_on_has_them_over_restarts(tmp_path, rng, model):
    data_dir = tmp_path / "data"
    # Of more than one message.
    large = rng.integers(0, 256, 10_000_000, dtype="uint8").tobytes()
    with ServerProcess(tmp_path, data_dir=data_dir) as server:
        with ema_client.Client(server.address) as client:
            client.create_model(model, random_weights(rng), tracks=TRACKS)
            with client.open_run(model) as run:
                run.push(step=1, weights=random_weights(rng))
                before = client.create_checkpoint(model)
                names = client.attach_files(model, {**FILES, "large.json": large})
                assert set(names) == {*FILES, "large.json"}
                run.push(step=2, weights=random_weights(rng))
                after = client.create_checkpoint(model)
            assert after.total_bytes >= before.total_bytes + 2 * len(large)
        assert server.stop() == 0
    assert checkpoint_files(data_dir, model, before.name) == {track: {} for track in TRACKS}
    with_files = {track: {**FILES, "large.json": large} for track in TRACKS}
    assert checkpoint_files(data_dir, model, after.name) == with_files

    with ServerProcess(tmp_path, data_dir=data_dir) as server:
        with ema_client.Client(server.address) as client:
            assert client.model(model).attached_files == sizes(with_files["ema"])
            client.remove_attached_file(model, "large.json")
            client.remove_attached_file(model, "large.json")
            client.attach_files(model, {"config.json": b"{}"})
            with client.open_run(model) as run:
                run.push(step=3, weights=random_weights(rng))
            last = client.create_checkpoint(model)
        assert server.stop() == 0
    assert checkpoint_files(data_dir, model, last.name) == {
        track: {**FILES, "config.json": b"{}"} for track in TRACKS
    }
    assert checkpoint_files(data_dir, model, after.name) == with_files


def test_a_folder_gives_what_describes_a_model(client, model, rng, hf_folder):
    client.create_model(model, random_weights(rng), tracks=TRACKS)
    assert set(client.attach_files(model, hf_folder)) == set(TAKEN)
    assert client.model(model).attached_files == sizes(TAKEN)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"../config.json": b""}, "BAD_NAME"),
        ({"model.safetensors": b""}, "BAD_NAME"),
        ({"large.json": b"x" * ((64 << 20) + 1)}, "BAD_REQUEST"),
    ],
    ids=["path", "weights", "large"],
)
def test_what_is_refused_is_named_and_changes_nothing(client, model, rng, files, reason):
    client.create_model(model, random_weights(rng), tracks=TRACKS)
    with pytest.raises(ema_client.InvalidArgumentError, match=next(iter(files))) as error:
        client.attach_files(model, files)
    assert error.value.reason == reason
    assert client.model(model).attached_files == {}
    with pytest.raises(ema_client.NotFoundError):
        client.attach_files("no-such-model", FILES)


def test_emactl_adds_shows_and_removes_them(client, emactl, model, rng, hf_folder):
    client.create_model(model, random_weights(rng), tracks=TRACKS)
    added = json.loads(emactl("--json", "files", "add", model, hf_folder).stdout)
    assert set(added["attached"]) == set(TAKEN)
    assert json.loads(emactl("--json", "describe", model).stdout)["attached_files"] == sizes(TAKEN)
    assert "tokenizer.model" in emactl("describe", model).stdout
    emactl("files", "remove", model, "tokenizer.model")
    (hf_folder / "other.txt").write_text("x")
    assert "other.txt" in emactl("files", "add", model, hf_folder / "other.txt").stdout
    left = {**TAKEN, "other.txt": b"x"}
    del left["tokenizer.model"]
    assert client.model(model).attached_files == sizes(left)
    missing = emactl("files", "add", model, hf_folder / "missing.json")
    assert missing.returncode == 3 and "missing.json" in missing.stderr


@pytest.mark.parametrize("how", ["python", "emactl"])
def test_an_import_takes_a_folders_files_along(client, emactl, model, hf_folder, how):
    if how == "python":
        client.import_weights(model, hf_folder, tracks={"ema": "10ba"})
    else:
        emactl("import", model, "--from", hf_folder, "--track", "ema=10ba")
    assert client.model(model).attached_files == sizes(TAKEN)


def test_attach_sends_them(server, client, model):
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(
        module, optimizer, f"ema://{server.address}/{model}", half_life="10ba", files=FILES
    ):
        assert client.model(model).attached_files == sizes(FILES)
