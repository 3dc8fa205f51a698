# SPDX-License-Identifier: Apache-2.0
"""Averages as files and folders, by Client.save and by emactl."""

from __future__ import annotations

import json
import os
import stat

import ema_client
import numpy as np
import pytest
from ema_client._client import safetensors
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from testing import assert_same_bits

FILES = {
    "config.json": b'{"layers": 2}',
    "vocab.txt": b"",
    "large.json": bytes(range(256)) * 40_000,
}


@pytest.fixture
def weights(rng):
    return {
        # Between them is a gap in what is pulled, and none in a file.
        "scalar": np.float32(1.5).reshape(()),
        "mask": rng.integers(0, 2, 9).astype(np.bool_),
        "empty": np.zeros((0, 4), np.float32),
        "w": rng.standard_normal((10, 7)).astype(np.float32),
        "double": rng.standard_normal(3),
    }


@pytest.fixture
def pushed(client, model, weights):
    client.create_model(model, weights, tracks={"ema": "4ba", "raw": "copy"})
    with client.open_run(model) as run:
        for step in (1, 2):
            run.push(step=step, weights=weights)
    return weights


@pytest.fixture(params=["python", "emactl"])
def save(request, client, model, emactl):
    """Writes what is pulled to a path; returns what went wrong."""

    def by_python(path, *, slices=(), **options):
        boxes = [
            ema_client.Shard(name, tuple(begin for begin, _ in box), tuple(e - b for b, e in box))
            for name, box in slices
        ]
        try:
            client.save(model, path, slices=boxes or None, **options)
        except (ema_client.EmaError, OSError) as error:
            return str(error)
        return None

    def by_emactl(path, *, slices=(), tensors=(), files=None, **options):
        flags = [f"--tensors={name}" for name in tensors]
        flags += [f"--{name}={value}" for name, value in options.items()]
        flags += [
            f"--slice={name}[{','.join(f'{begin}:{end}' for begin, end in box)}]"
            for name, box in slices
        ]
        flags += ["--config-from", files] if files is not None else []
        result = emactl("pull", model, *flags, "-o", path)
        return None if result.returncode == 0 else result.stderr

    return by_python if request.param == "python" else by_emactl


def test_a_file(client, model, pushed, save, tmp_path):
    path = tmp_path / "out.safetensors"
    path.write_bytes(b"old")
    assert save(path, track="ema") is None
    assert os.listdir(tmp_path) == ["out.safetensors"]
    assert_same_bits(client.pull(model, track="ema", framework="numpy"), load_file(path))
    with safe_open(path, "np") as file:
        assert file.metadata() == {
            "format": "pt",
            "ema.model": model,
            "ema.track": "ema",
            "ema.step": "2",
            "ema.version": "2",
            "ema.incarnation": str(client.model(model).latest.incarnation),
        }


def test_a_part_of_it(client, model, pushed, save, tmp_path):
    path = tmp_path / "part.safetensors"
    part = {"tensors": ["mask"], "slices": [("w", [(2, 5), (1, 7)])], "dtype": "float16"}
    assert save(path, track="raw", **part) is None
    expected = {"mask": pushed["mask"], "w": pushed["w"][2:5, 1:].astype(np.float16)}
    assert_same_bits(expected, load_file(path))


def test_values_that_are_too_large_for_a_dtype(client, model, pushed, save, tmp_path):
    with client.open_run(model) as run:
        run.push(step=3, weights={**pushed, "scalar": np.float32(-1e5).reshape(())})
    path = tmp_path / "half.safetensors"
    problem = 'element 0 of tensor "scalar" is -100000, and float16 ends at 65504'
    assert problem in save(path, track="raw", dtype="float16")
    assert os.listdir(tmp_path) == []
    for overflow, written in {"saturate": -65504, "inf": -np.inf}.items():
        assert save(path, track="raw", dtype="float16", overflow=overflow) is None
        assert load_file(path)["scalar"] == written


def test_a_folder_has_the_attached_files(client, model, pushed, save, tmp_path):
    client.attach_files(model, FILES)
    assert client.attached_files(model) == FILES
    folder = tmp_path / "made" / "here"
    assert save(f"{folder}/", track="ema", version=1) is None
    got = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name: got[name] for name in FILES} == FILES
    assert got.keys() == {*FILES, "model.safetensors"}
    # Again, into the folder that is there now: by its name alone.
    client.attach_files(model, {"config.json": b"{}"})
    client.remove_attached_file(model, "vocab.txt")
    assert save(folder, track="ema") is None
    assert (folder / "config.json").read_bytes() == b"{}"
    assert {path.name for path in folder.iterdir()} == got.keys()


def test_a_folder_with_the_files_of_another(client, model, pushed, save, tmp_path):
    client.attach_files(model, FILES)
    other = tmp_path / "other"
    other.mkdir()
    save_file({"x": np.ones(2)}, other / "model.safetensors")
    (other / "config.json").write_bytes(b'{"other": 1}')
    (other / "training_args.bin").write_bytes(b"no")
    assert save(f"{tmp_path}/out/", track="raw", files=other) is None
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "out/config.json").read_bytes()) == {"other": 1}
    assert_same_bits(
        client.pull(model, track="raw", framework="numpy"),
        load_file(tmp_path / "out/model.safetensors"),
    )


def test_what_is_refused_changes_nothing(client, model, pushed, save, tmp_path):
    client.attach_files(model, {"config.json": b"{}"})
    assert "nothing" in save(f"{tmp_path}/out/", track="nothing")
    assert os.listdir(tmp_path) == []
    # Weights in pieces would be read in place of ours.
    folder = tmp_path / "pieces"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_bytes(b"{}")
    assert "in pieces" in save(folder, track="ema")
    assert os.listdir(folder) == ["model.safetensors.index.json"]


DIFFUSERS = b'{"_class_name": "UNet2DModel", "_diffusers_version": "0.30.0"}'


CONFIGS = {
    "diffusers": DIFFUSERS,
    "class": b'{"_class_name": "Ours"}',
    "transformers": b'{"architectures": ["BertModel"]}',
    "list": b"[]",
    "text": b"no JSON",
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("how", ["attached", "given", "there"])
def test_the_config_says_how_the_weights_are_called(client, model, pushed, tmp_path, config, how):
    folder = tmp_path / "out"
    folder.mkdir()
    # Which the new one takes the place of.
    (folder / "config.json").write_bytes(config if how == "there" else DIFFUSERS)
    if how == "attached":
        client.attach_files(model, {"config.json": config})
    files = {"config.json": config} if how == "given" else None
    client.save(model, folder, track="ema", files=files)
    names = {"config.json", "model.safetensors"}
    if b"_class_name" in config:
        names = {"config.json", "diffusion_pytorch_model.safetensors"}
    assert set(os.listdir(folder)) == names
    assert (folder / "config.json").read_bytes() == config


@pytest.mark.parametrize(
    "config, name",
    [(DIFFUSERS, "diffusion_pytorch_model"), (b"{}", "model")],
    ids=["diffusers", "other"],
)
def test_only_pieces_that_would_be_read_are_refused(client, model, pushed, tmp_path, config, name):
    client.attach_files(model, {"config.json": config})
    other = {"model": "diffusion_pytorch_model", "diffusion_pytorch_model": "model"}[name]
    (tmp_path / f"{other}.safetensors.index.json").write_bytes(b"{}")
    client.save(model, tmp_path, track="ema")
    (tmp_path / f"{name}.safetensors.index.json").write_bytes(b"{}")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    with pytest.raises(ema_client.FailedPreconditionError, match=f"/{name}.*in pieces"):
        client.save(model, tmp_path, track="ema")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_an_empty_path_is_not_the_working_directory(pushed, save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "must" in save("", track="ema")
    assert os.listdir(tmp_path) == []


def test_a_link_is_followed(client, model, pushed, save, tmp_path):
    (tmp_path / "run7").mkdir()
    file, link = tmp_path / "run7/averaged.safetensors", tmp_path / "latest.safetensors"
    file.write_bytes(b"old")
    link.symlink_to(file)
    assert save(link, track="ema") is None
    assert link.is_symlink() and not file.is_symlink()
    assert_same_bits(client.pull(model, track="ema", framework="numpy"), load_file(file))
    assert os.listdir(file.parent) == [file.name]


def test_a_device_is_not_replaced(model, pushed, save, tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        assert "a regular file" in save(path, track="ema")
    assert pipe.is_fifo() and link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]


def test_a_file_says_what_it_is_by_its_name(model, pushed, save, tmp_path):
    link = tmp_path / "latest"
    link.symlink_to(tmp_path / "w.safetensors")
    (tmp_path / "w.safetensors").write_bytes(b"old")
    assert save(link, track="ema") is None
    for name in ("w.pt", "w", ".safetensors"):
        refused = save(tmp_path / name, track="ema")
        assert "must end in" in refused and ".safetensors" in refused, name
    assert sorted(os.listdir(tmp_path)) == ["latest", "w.safetensors"]


def test_a_file_that_is_not_attached(client, model, pushed):
    assert client.attached_files(model) == {}
    with pytest.raises(ema_client.NotFoundError):
        client.attached_files("nobody")
    with pytest.raises(ema_client.NotFoundError, match="attached files: none") as error:
        client._client.get_attached_file(model, "config.json", 5)
    assert error.value.reason == "FILE_NOT_FOUND"


def test_a_path_that_is_neither_a_file_nor_a_folder(client, model, pushed, tmp_path):
    with pytest.raises(ema_client.InvalidArgumentError, match=r'averaged": must end in "/"'):
        client.save(model, tmp_path / "averaged", track="ema")
    assert not list(tmp_path.iterdir())


def test_a_files_name_is_on_the_disk_too(client, model, pushed, tmp_path, monkeypatch):
    there = []
    fsync = os.fsync

    def record(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        there.append(sorted(os.listdir(descriptor)) if is_folder else "file")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    client.save(model, tmp_path / "a.safetensors", track="ema")
    assert there == ["file", ["a.safetensors"]]


def test_somebody_elses_unfinished_file_is_left_alone(client, model, pushed, tmp_path):
    """Of a container, say, whose process has the same number."""
    target = tmp_path / "a.safetensors"
    others = tmp_path / f"{target.name}.tmp-{os.getpid()}"
    others.write_bytes(b"half")
    client.save(model, target, track="ema")
    assert others.read_bytes() == b"half"
    assert sorted(tmp_path.iterdir()) == [target, others]
    assert target.stat().st_mode == others.stat().st_mode
    with pytest.raises(TypeError):
        safetensors.replace(target, [b"more", None])
    assert sorted(tmp_path.iterdir()) == [target, others]
    assert safetensors.open_weights(target)
