# SPDX-License-Identifier: Apache-2.0
"""A bit is flipped in every kind of byte of a data directory: a restarted server never serves it.

Either it starts from the checkpoint before and sets the damaged one aside, or the byte means nothing to it (a
lock's text, an empty file), or it says what is wrong.
"""

from __future__ import annotations

import dataclasses
import pathlib
import struct
from collections.abc import Callable

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess

SIZE = 3000


def weights_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"w": rng.standard_normal(SIZE).astype(np.float32), "count": np.array(step, np.int64)}


def save_two(client: ema_client.Client, model: str) -> None:
    """Checkpoints of steps 1 and 2."""
    client.create_model(model, weights_of(1), tracks={"ema": "2ba", "raw": "copy"})
    with client.open_run(model) as run:
        for step in (1, 2):
            run.push(step=step, weights=weights_of(step))
            client.create_checkpoint(model)


@dataclasses.dataclass(frozen=True)
class Flip:
    name: str
    # In the model's folder; {new}: the newest checkpoint, {old}: the one before.
    file: str
    # Which byte of the file's content.
    at: Callable[[bytes], int]
    # The step that is served afterwards.
    step: int
    # The checkpoint is set aside.
    is_corrupt: bool = False


def header_length(content: bytes) -> int:
    return int(struct.unpack("<Q", content[:8])[0])


def of_text(text: str) -> Callable[[bytes], int]:
    """The byte after `text`."""
    return lambda content: content.index(text.encode()) + len(text)


TRACK = "checkpoints/{new}/tracks/raw/model.safetensors"
MANIFEST = "checkpoints/{new}/manifest.json"
LATEST = "checkpoints/LATEST"

FLIPS = [
    Flip("the length of the header", TRACK, lambda _: 0, 1, True),
    Flip("the high byte of the length", TRACK, lambda _: 7, 1, True),
    Flip("a name in the header", TRACK, of_text('{"'), 1, True),
    Flip("an offset in the header", TRACK, of_text('"data_offsets":['), 1, True),
    Flip("the metadata in the header", TRACK, of_text('"ema.step":"'), 1, True),
    Flip("the padding of the header", TRACK, lambda c: 8 + header_length(c) - 1, 1, True),
    Flip("the first byte of the data", TRACK, lambda c: 8 + header_length(c), 1, True),
    Flip("a byte in the middle", TRACK, lambda c: len(c) // 2, 1, True),
    Flip("the last byte of the data", TRACK, lambda c: len(c) - 1, 1, True),
    Flip("another track", TRACK.replace("raw", "ema"), lambda c: len(c) // 2, 1, True),
    Flip("the manifest's first byte", MANIFEST, lambda _: 0, 1, True),
    Flip("the manifest's middle", MANIFEST, lambda c: len(c) // 2, 1, True),
    Flip("the manifest's last byte", MANIFEST, lambda c: len(c.rstrip()) - 1, 1, True),
    Flip("the step in the manifest", MANIFEST, of_text('"step":'), 1, True),
    # Names say the order, too: the newest is found without it.
    Flip("the name in LATEST", LATEST, of_text("step-"), 2),
    Flip("the checksum in LATEST", LATEST, lambda c: len(c.rstrip()) - 1, 2),
    # Not looked at as long as the newest is good.
    Flip("the checkpoint before", TRACK.replace("new", "old"), lambda c: len(c) // 2, 2),
]


def checkpoints(data: pathlib.Path, model: str) -> list[str]:
    return sorted(path.name for path in data.glob(f"models/{model}/checkpoints/step-*"))


def flip_bit(file: pathlib.Path, at: Callable[[bytes], int], bit: int) -> None:
    content = bytearray(file.read_bytes())
    content[at(bytes(content))] ^= 1 << bit
    file.write_bytes(content)


def problem_of(client: ema_client.Client, model: str, flip: Flip) -> str:
    """What the server serves that it should not; empty: nothing."""
    pulled = client.pull(model, track="raw", framework="numpy")
    if pulled.version.step != flip.step:
        return f"{flip.name}: step {pulled.version.step}, expected {flip.step}"
    for name, value in weights_of(flip.step).items():
        if not (pulled[name] == value).all():
            return f"{flip.name}: {name} is not what was pushed"
    return ""


# Each in a model of its own, so that one server starts from all of them.
@pytest.mark.parametrize("bit", [0, 6])
def test_a_flipped_bit_is_never_served(tmp_path, bit):
    data = tmp_path / "data"
    models = {f"m-{number}": flip for number, flip in enumerate(FLIPS)}
    aside = {}
    with ServerProcess(tmp_path, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            for model in models:
                save_two(client, model)
        server.kill()
        for model, flip in models.items():
            old, new = checkpoints(data, model)
            flip_bit(data / "models" / model / flip.file.format(old=old, new=new), flip.at, bit)
            aside[model] = [f".corrupt-{new}"] if flip.is_corrupt else []
        # The second start finds the same, with nothing left to set aside.
        for _ in range(2):
            server.start()
            with ema_client.Client(server.address) as client:
                problems = [problem_of(client, model, flip) for model, flip in models.items()]
            assert not any(problems), "\n".join(filter(None, problems))
            for model in models:
                found = data.glob(f"models/{model}/checkpoints/.corrupt-*")
                assert [path.name for path in found] == aside[model], models[model].name
            server.kill()
        log = server.log_path.read_text()
        for model in models:
            for name in aside[model]:
                checkpoint = name.removeprefix(".corrupt-")
                assert f"checkpoint set aside model={model} checkpoint={checkpoint} " in log


@pytest.mark.parametrize("name", ["INCARNATION", "LOCK"])
def test_lives_are_told_apart_whatever_the_files_say(tmp_path, name):
    data = tmp_path / "data"
    incarnations = []
    with ServerProcess(tmp_path, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            save_two(client, "m")
        for step in (10, 11):
            server.kill()
            flip_bit(data / name, lambda _: 0, 6)
            server.start()
            with ema_client.Client(server.address) as client, client.open_run("m") as run:
                loaded = run.latest
                assert loaded is not None and loaded.step == 2
                version = run.push(step=step, weights=weights_of(step))
                incarnations += [loaded.incarnation, version.incarnation]
        server.kill()
    assert incarnations[0] == incarnations[2] < incarnations[1] < incarnations[3]


def test_a_kept_checkpoint_stays_kept_whatever_its_keep_file_holds(tmp_path):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            save_two(client, "m")
            kept = data / "models/m/checkpoints" / checkpoints(data, "m")[0]
            (kept / "KEEP").write_bytes(b"\x00\xff")
            with client.open_run("m") as run:
                for step in range(10, 15):
                    run.push(step=step, weights=weights_of(step))
                    client.create_checkpoint("m")
    assert (kept / "manifest.json").exists()


def test_every_checkpoint_damaged_means_that_nothing_is_served(tmp_path):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data) as server:
        with ema_client.Client(server.address) as client:
            save_two(client, "m")
        server.kill()
        names = checkpoints(data, "m")
        for name in names:
            manifest = data / "models/m/checkpoints" / name / "manifest.json"
            manifest.write_bytes(manifest.read_bytes()[:-20])
        server.start()
        with ema_client.Client(server.address) as client:
            with pytest.raises(ema_client.NotFoundError):
                client.pull("m", track="raw", framework="numpy")
        for name in names:
            assert f"checkpoint={name} " in server.log()
    aside = sorted(path.name for path in data.glob("models/m/checkpoints/.corrupt-*"))
    assert aside == [f".corrupt-{name}" for name in names]
