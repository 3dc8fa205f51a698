# SPDX-License-Identifier: Apache-2.0
"""emactl --json: every command prints JSON, and so do errors; `tracks`, `verify`, and what the server is."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import subprocess

import ema_client
import numpy as np
import pytest
from safetensors.numpy import save_file
from server_process import ServerProcess
from testing import EMACTL

WEIGHTS = {"w": np.arange(6, dtype=np.float32)}


@dataclasses.dataclass
class World:
    """A model with three versions, of which the first two are on the disk; and files."""

    model: str
    folder: pathlib.Path
    data_dir: pathlib.Path
    checkpoint: str
    older_checkpoint: str


@pytest.fixture
def world(server, client, model, tmp_path):
    wide = ema_client.Track(sigma_rel=0.1, update_interval="1ba", snapshot_interval="1ba")
    client.create_model(model, WEIGHTS, tracks={"fast": "20ba", "raw": "copy", "wide": wide})
    with client.open_run(model) as run:
        for step in (1, 2, 3):
            version = run.push(step=step, weights=WEIGHTS)
            if step == 1:
                older = client.create_checkpoint(model, version=version)
            if step == 2:
                saved = client.create_checkpoint(model, version=version, label="good")
    client.set_label(model, "newest")
    save_file(WEIGHTS, tmp_path / "w.safetensors")
    (tmp_path / "config.json").write_text("{}")
    client.attach_files(model, {"notes.json": b"{}"})
    return World(model, tmp_path, server.data_dir, saved.name, older.name)


# What each is called with; of a model of its own.
COMMANDS = {
    "create": lambda w: [w.model + "-2", "--from", w.folder / "w.safetensors", "--track", "a=copy"],
    "import": lambda w: [w.model + "-2", "--from", w.folder / "w.safetensors", "--track", "a=5ba"],
    "update": lambda w: [w.model, "--pause", "fast"],
    "list": lambda w: [],
    "describe": lambda w: [w.model],
    "tracks": lambda w: [w.model],
    "versions": lambda w: [w.model],
    "statistics": lambda w: [w.model],
    "watch": lambda w: [w.model, "--after", 0, "--count", 2],
    "pull": lambda w: [w.model, "--track", "fast", "--step", 2, "-o", w.folder / "out.safetensors"],
    "checkpoint create": lambda w: [w.model],
    "checkpoint list": lambda w: [w.model],
    "checkpoint show": lambda w: [w.model, w.checkpoint],
    "checkpoint delete": lambda w: [w.model, w.older_checkpoint],
    "checkpoint verify": lambda w: [w.data_dir],
    "checkpoint copy": lambda w: [
        w.data_dir / "models" / w.model / "checkpoints" / w.checkpoint,
        w.folder / "copy",
    ],
    "files add": lambda w: [w.model, w.folder / "config.json"],
    "files remove": lambda w: [w.model, "notes.json"],
    "rollback": lambda w: [w.model, "--to", "good", "--yes"],
    "label set": lambda w: [w.model, "stable"],
    "label remove": lambda w: [w.model, "newest"],
    "label list": lambda w: [w.model],
    "metric": lambda w: [w.model, "--version", 3, "--value", 0.5],
    "synthesize": lambda w: [w.model, "--name", "narrow", "--sigma-rel", 0.08],
    "delete": lambda w: [w.model, "--confirm", w.model],
    "health": lambda w: [],
    "info": lambda w: [],
    "group": lambda w: [],
    "group recover": lambda w: [w.model],
    "group rebalance": lambda w: [w.model],
    "group replace": lambda w: ["ema-1"],
    "log-level": lambda w: [],
    "drain": lambda w: ["--yes"],
    "bench": lambda w: ["--bytes", "1M", "--rounds", 1],
    "explain": lambda w: ["--half-life", "100ba"],
}
WITHOUT_A_SERVER = {"checkpoint verify", "checkpoint copy", "explain"}


def emactl(address, *arguments, timeout="20s"):
    words = [EMACTL, "--server", address, "--timeout", timeout, *arguments]
    return subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60)


def commands_of(*family):
    """The names that the help lists, and in families those of theirs."""
    text = emactl("127.0.0.1:1", *family, "--help").stdout
    _, _, listed = text.partition("Subcommands:")
    names = re.findall(r"^  ([a-z-]+)  ", listed, re.MULTILINE)
    for name in names:
        within = list(commands_of(*family, name))
        yield from within or [" ".join((*family, name))]


def test_every_command_is_in_the_table():
    # `group` is a command and a family.
    assert set(commands_of()) == COMMANDS.keys() - {"group"}


# Which the server is not in: see tests/python/group.
OF_A_GROUP = {name for name in COMMANDS if name.split()[0] == "group"}


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - OF_A_GROUP - {"drain"}))
def test_prints_json_and_nothing_else(server, world, command):
    result = emactl(server.address, "--json", *command.split(), *COMMANDS[command](world))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    documents = result.stdout.splitlines() if command == "watch" else [result.stdout]
    for document in documents:
        assert isinstance(json.loads(document), dict)


def test_drain_prints_json(tmp_path):
    with ServerProcess(tmp_path) as server:
        result = emactl(server.address, "--json", "drain", "--yes")
        assert json.loads(result.stdout)["began"] is True


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in WITHOUT_A_SERVER])
def test_an_error_is_json(world, command):
    arguments = ["--json", *command.split(), *COMMANDS[command](world)]
    result = emactl("127.0.0.1:1", *arguments, timeout="100ms")
    assert result.returncode == (1 if command in ("health", "group") else 5), result.stderr
    assert result.stdout == ""
    error = json.loads(result.stderr)["error"]
    assert error.keys() == {"code", "reason", "message"} and error["message"]


def test_so_is_an_error_of_the_command_line():
    for words in (
        ["--json", "pull"],
        ["nothing", "--json"],
        ["--json", "--timeout", "soon", "list"],
    ):
        result = emactl("127.0.0.1:1", *words)
        assert result.returncode == 2
        error = json.loads(result.stderr)["error"]
        assert error["code"] == "INVALID_ARGUMENT" and error["message"], error
        assert result.stdout == ""


def test_tracks_say_how_they_stand(server, client, world):
    client.statistics(world.model)
    client.update_model(world.model, tracks={"later": "copy"}, pause=["fast"], remove=["raw"])
    got = json.loads(emactl(server.address, "--json", "tracks", world.model).stdout)
    assert (got["model"], got["version"], got["step"]) == (world.model, 3, 3)
    by_name = {track["name"]: track for track in got["tracks"]}
    assert by_name.keys() == {"fast", "raw", "wide", "later"}
    fast, raw, wide, later = (by_name[name] for name in ("fast", "raw", "wide", "later"))
    assert fast["schedule"]["half_life"] == "20ba" and fast["kept_as"] == "float32"
    assert (fast["update_count"], raw["update_count"], later["update_count"]) == (3, 3, 0)
    assert fast["state"] == "active, changed by the next commit"
    assert raw["state"] == "active, removed by the next commit" and raw["kept_as"] == "as pushed"
    assert later["state"] == "from the next commit on" and later["update_weight"] is None
    assert (wide["snapshot_interval"], wide["update_interval"]) == ("1ba", "1ba")
    assert wide["norm"] == pytest.approx(float(np.linalg.norm(WEIGHTS["w"])))
    assert wide["distance"] == pytest.approx(0, abs=1e-6)
    assert raw["norm"] is None and 0 < fast["update_weight"] < 1
    text = emactl(server.address, "tracks", world.model).stdout
    assert "version 3, step 3" in text and "half_life=20ba" in text
    assert emactl(server.address, "tracks", "none").returncode == 3


def test_verify_takes_a_data_directory_and_names_what_is_damaged(tmp_path, rng):
    data_dir = tmp_path / "data"
    with ServerProcess(tmp_path, data_dir=data_dir) as server:
        with ema_client.Client(server.address, timeout_s=30) as client:
            for name in ("a", "b"):
                client.create_model(name, WEIGHTS, tracks={"ema": "5ba", "raw": "copy"})
                with client.open_run(name) as run:
                    run.push(step=1, weights=WEIGHTS)
                client.create_checkpoint(name)
        whole = emactl(server.address, "--json", "checkpoint", "verify", data_dir)
        assert whole.returncode == 0, whole.stderr
        rows = json.loads(whole.stdout)["verified"]
        assert [(row["checkpoint"].split("/")[0], row["track"], row["ok"]) for row in rows] == [
            ("a", "ema", True),
            ("a", "raw", True),
            ("b", "ema", True),
            ("b", "raw", True),
        ]
        assert server.stop() == 0
    (damaged,) = (data_dir / "models" / "b").glob("checkpoints/*/tracks/ema/model.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    for path in (data_dir, data_dir / "models" / "b" / "checkpoints", damaged.parents[2]):
        result = emactl("127.0.0.1:1", "checkpoint", "verify", path)
        assert result.returncode == 1, result.stdout
        assert 'track "ema": tensor "w"' in result.stderr, result.stderr
    assert emactl("127.0.0.1:1", "checkpoint", "verify", tmp_path / "none").returncode == 3


def test_server_info(server, client, world):
    info = client.server_info()
    assert info == client.server_info()
    printed = json.loads(emactl(server.address, "--json", "info").stdout)
    assert (info.version, info.device) == (printed["version"], printed["device"])
    assert info.incarnation == printed["incarnation"] > 0
    assert info.is_serving and info.not_serving == ""
    assert 0 < info.memory_reserved_bytes <= info.memory_budget_bytes
    assert info.memory_reserved_bytes == printed["memory"]["reserved_bytes"]
    assert info.limits["models"].in_use >= 1
