# SPDX-License-Identifier: Apache-2.0
"""emactl as a process: its output, its files and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess

import ema_client
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from testing import EMACTL, assert_same_bits, started, wait_for

WEIGHTS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(3, dtype=np.float64) / 3,
    "n": np.array(7, np.int64),
}


@pytest.fixture
def made(emactl, model, tmp_path):
    """A model that emactl has made."""
    save_file(WEIGHTS, tmp_path / "weights.safetensors")
    result = emactl(
        *["create", model, "--from", tmp_path / "weights.safetensors"],
        *["--track", "fast=20ba", "--track", "slow=smoothing=0.75,update_interval=2ba"],
        *["--track", "raw=copy"],
    )
    assert result.returncode == 0, result.stderr
    return model


@pytest.fixture
def pushed(client, made):
    with client.open_run(made) as run:
        for step in (1, 2, 3):
            run.push(step=step, weights=WEIGHTS)
    return made


def test_create_makes_what_was_asked_for(client, made):
    info = client.model(made)
    # In the file's order, which safetensors chooses.
    assert {spec.name: (spec.dtype, spec.shape) for spec in info.tensors} == {
        name: (str(array.dtype), array.shape) for name, array in WEIGHTS.items()
    }
    assert info.tracks["fast"] == ema_client.Track(half_life="20ba")
    assert info.tracks["slow"] == ema_client.Track(smoothing=0.75, update_interval="2ba")
    assert info.tracks["raw"].is_copy


def test_list_and_describe(emactl, pushed):
    models = json.loads(emactl("--json", "list").stdout)["models"]
    assert pushed in [model["name"] for model in models]
    assert pushed in emactl("list").stdout

    described = json.loads(emactl("--json", "describe", pushed).stdout)
    assert described["name"] == pushed
    assert {tensor["name"] for tensor in described["tensors"]} == {"a", "b", "n"}
    assert {track["name"] for track in described["tracks"]} == {"fast", "slow", "raw"}
    assert described["latest"]["step"] == 3
    text = emactl("describe", pushed).stdout
    assert "float32[2, 3]" in text and "20ba" in text


def test_watch_prints_every_commit(emactl, pushed):
    result = emactl("--json", "watch", pushed, "--after", "1", "--count", "2")
    assert result.returncode == 0, result.stderr
    versions = [json.loads(line) for line in result.stdout.splitlines()]
    assert [version["version"] for version in versions] == [2, 3]
    assert len(emactl("watch", pushed, "--after", "1", "--count", "2").stdout.splitlines()) >= 2


def test_statistics(emactl, pushed):
    norm = sum(np.sum(np.square(WEIGHTS[name], dtype=np.float64)) for name in ("a", "b")) ** 0.5
    got = json.loads(emactl("--json", "statistics", pushed, "--version", "2").stdout)
    assert got["version"] == 2
    by_track = {track["track"]: track for track in got["statistics"]}
    assert by_track.keys() == {"fast", "slow"}
    for track in by_track.values():
        assert track["norm"] == pytest.approx(norm)
        assert track["distance"] == pytest.approx(0, abs=1e-7)
    text = emactl("statistics", pushed, "--track", "slow").stdout
    assert "version 3, step 3" in text and "NORM" in text and "slow" in text
    assert "fast" not in text
    assert emactl("statistics", pushed, "--version", "99").returncode == 3
    assert emactl("statistics", pushed, "--track", "raw").returncode == 4


@pytest.mark.parametrize("track", ["fast", "raw"])
def test_pull_writes_a_file_that_others_read(emactl, client, pushed, tmp_path, track):
    path = tmp_path / "out.safetensors"
    result = emactl("pull", pushed, "--track", track, "-o", path)
    assert result.returncode == 0, result.stderr
    assert_same_bits(client.pull(pushed, track=track, framework="numpy"), load_file(path))
    assert os.listdir(tmp_path) == sorted(["out.safetensors", "weights.safetensors"])


def test_versions_shows_the_newest(emactl, client, made):
    with client.open_run(made) as run:
        for step in range(1, 24):
            run.push(step=step, weights=WEIGHTS)

    def steps(*arguments):
        lines = emactl("versions", made, *arguments).stdout.splitlines()
        return [int(line.split()[1]) for line in lines[1:] if line[0] != "("], lines[-1]

    shown, note = steps()
    assert shown == [*range(4, 24)]
    assert note == "(3 earlier versions are not shown; --last 0 shows all)"
    assert steps("--last", "2") == ([22, 23], note.replace("3", "21"))
    for more in ("0", "23", "99"):
        assert steps("--last", more)[0] == [*range(1, 24)]
        assert "not shown" not in steps("--last", more)[1]
    # A program gets them all, unless it asks for less.
    for more, count in ([], 23), (["--last", "5"], 5):
        listed = json.loads(emactl("--json", "versions", made, *more).stdout)
        assert [version["step"] for version in listed["versions"]] == [*range(24 - count, 24)]
        assert listed["earlier_count"] == 23 - count
    assert emactl("versions", made, "--last", "-1").returncode == 2


def test_a_missing_confirmation_is_shown_with_the_whole_command(emactl, client, server, pushed):
    begin = f"emactl --server {server.address} --timeout 5s"
    for words, confirmation in [
        (["delete", pushed], f"--confirm {pushed}"),
        (["delete", "--purge", "a b"], "--confirm 'a b'"),
        (["rollback", pushed, "--to", "1"], "--yes"),
        (["drain"], "--yes"),
    ]:
        refused = emactl(*words)
        assert refused.returncode == 2
        command = " ".join([begin, *words, confirmation]).replace("--purge a b", "--purge 'a b'")
        assert f"{words[0]} needs a confirmation: {command}\n" in refused.stderr
    assert client.model(pushed).latest.number == 3
    assert "model is required" in emactl("delete").stderr
    error = json.loads(emactl("--json", "delete", pushed).stderr)["error"]
    assert error["message"].endswith(f"--json delete {pushed} --confirm {pushed}")


def test_version_is_that_of_the_program(emactl):
    asked = emactl("--version")
    assert asked.returncode == 0
    assert re.fullmatch(r"emactl \d+\.\d+\.\d+\n", asked.stdout)
    # Behind a command it would be taken for success.
    refused = emactl("list", "--version")
    assert refused.returncode == 2 and "list has no option --version" in refused.stderr


def test_delete_and_checkpoint(emactl, client, pushed):
    assert emactl("checkpoint", "create", pushed).returncode == 0
    assert emactl("delete", pushed, "--confirm", "another").returncode == 4
    assert emactl("delete", pushed, "--confirm", pushed).returncode == 0
    assert pushed not in [info.name for info in client.models()]


@pytest.mark.parametrize(
    "command",
    [
        ["delete", "{}-2", "--confirm", "{}-2"],
        ["checkpoint", "delete", "{}", "step-000000000001-version-1-1"],
        ["label", "remove", "{}", "typo"],
        ["files", "remove", "{}", "typo"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_what_is_not_there_is_not_removed(emactl, pushed, command):
    result = emactl(*(word.format(pushed) for word in command))
    assert result.returncode == 3, result.stderr
    assert result.stdout == ""


def test_models_that_have_gone_can_be_purged(emactl, pushed):
    assert emactl("checkpoint", "create", pushed).returncode == 0
    for more in ([], ["--purge"]):
        assert emactl("delete", pushed, "--confirm", pushed, *more).returncode == 0


@pytest.mark.parametrize("step", ["-3", "1.5", "0x10", "010", "9223372036854775808"])
def test_numbers_that_are_none(emactl, pushed, step):
    result = emactl("pull", pushed, "--track", "raw", "--step", step, "-o", "unused")
    assert result.returncode == 2
    assert f"--step: {step} given, expected a whole number, 0 or more" in result.stderr


def test_exit_codes(emactl, pushed, tmp_path):
    out = tmp_path / "x.safetensors"
    assert emactl().returncode == 2
    assert emactl("frobnicate").returncode == 2
    for words, problem in [
        (["lst"], 'emactl has no command "lst"; did you mean "list"?'),
        (["checkpoint", "crate"], 'checkpoint has no command "crate"; did you mean "create"?'),
        (["--frob"], "unknown option --frob"),
    ]:
        refused = emactl(*words)
        assert refused.returncode == 2 and problem in refused.stderr, refused.stderr
    assert emactl("list", "--timeout", "0s").returncode == 2
    assert emactl("describe", "nobody").returncode == 3
    assert emactl("pull", pushed, "--track", "nothing", "-o", out).returncode == 3
    assert emactl("pull", pushed, "--track", "raw", "--version", "99", "-o", out).returncode == 3
    assert not out.exists()
    weights = tmp_path / "weights.safetensors"
    assert emactl("create", pushed, "--from", weights, "--track", "fast=21ba").returncode == 4
    assert emactl("create", "m", "--from", tmp_path / "none", "--track", "f=1ba").returncode == 3
    too_long = tmp_path / ("x" * 300)
    assert emactl("create", "m", "--from", too_long, "--track", "f=1ba").returncode == 1
    assert emactl("pull", pushed, "--track", "raw", "-o", f"{too_long}/").returncode == 1
    assert emactl("pull", pushed, "--track", "raw", "--dtype", "f", "-o", out).returncode == 2
    away = emactl("list", address="127.0.0.1:1")
    assert away.returncode == 5
    waits, ends = away.stderr.splitlines()
    assert waits.endswith("cannot connect: Connection refused; retrying until --timeout ends")
    assert ends.endswith("cannot connect: Connection refused [UNAVAILABLE]")


def test_a_repeatable_option_takes_one_value(emactl, pushed, tmp_path):
    out = tmp_path / "x.safetensors"
    result = emactl("pull", "--tensors", "a", "--tensors", "b", pushed, "--track", "raw", "-o", out)
    assert result.returncode == 0, result.stderr
    assert set(load_file(out)) == {"a", "b"}


def test_a_number_is_no_label(emactl, pushed):
    refused = emactl("label", "set", pushed, "7")
    assert refused.returncode == 2 and "must not be a number" in refused.stderr


def test_a_label_is_no_number(emactl, pushed):
    for words in (["label", "set", pushed, "new"], ["checkpoint", "create", pushed]):
        refused = emactl(*words, "--version", "best")
        assert refused.returncode == 2
        assert "best given, expected a whole number" in refused.stderr
        assert "emactl label list MODEL" in refused.stderr


def test_dtypes_that_are_none(emactl, pushed):
    for dtype in ("fp16", "float64", "int8"):
        refused = emactl("pull", pushed, "--track", "raw", "--dtype", dtype, "-o", "unused")
        assert refused.returncode == 2
        assert f"{dtype} given, expected float32, float16 or bfloat16" in refused.stderr


def test_a_folder_that_is_not_there_is_named(emactl, pushed, tmp_path):
    missing = tmp_path / "missing"
    for words in (
        ["files", "add", pushed, missing],
        ["pull", pushed, "--track", "raw", "--config-from", missing, "-o", f"{tmp_path}/out/"],
    ):
        refused = emactl(*words)
        assert refused.returncode == 3
        assert f"{missing}: there is no such file or folder" in refused.stderr


def test_versions_of_another_life(emactl, client, pushed, tmp_path):
    mine = client.model(pushed).latest.incarnation
    of = ["--version", "1", "--incarnation"]
    assert emactl("statistics", pushed, *of, str(mine)).returncode == 0
    assert emactl("statistics", pushed, *of, str(mine + 1)).returncode == 3
    out = tmp_path / "x.safetensors"
    assert emactl("pull", pushed, "--track", "raw", *of, str(mine), "-o", out).returncode == 0
    watched = emactl(
        "watch", pushed, "--after", "99", "--incarnation", str(mine - 1), "--count", "1"
    )
    assert "version 1 " in watched.stdout, watched.stderr
    of = ["--version", "best", "--incarnation", str(mine)]
    assert emactl("pull", pushed, "--track", "raw", *of, "-o", out).returncode == 4


@pytest.mark.parametrize(
    "track, problem",
    [
        ("fast=0ba", 'half_life "0ba": must be finite and above 0'),
        ("fast=inf", 'half_life "inf": a time is a finite number and a unit'),
        ("fast=-1ba", 'half_life "-1ba": a time must not be negative'),
        ("fast=1000", 'half_life "1000": a time needs a unit'),
        ("fast", "must be NAME=RULE"),
        ("fast=20ba,2ba", 'field "2ba": must be name=value'),
        ("fast=smoothing=x", 'smoothing "x": must be'),
        ("fast=smoothing=1", "smoothing 1: must be 0 or more and below 1"),
        ("a b=20ba", 'track "a b": a name must be'),
    ],
)
def test_a_track_that_is_wrong_is_named_and_makes_no_model(
    emactl, client, made, tmp_path, track, problem
):
    weights = tmp_path / "weights.safetensors"
    result = emactl("create", "new", "--from", weights, "--track", track)
    assert result.returncode == 2
    assert f"--track {track}: {problem}" in result.stderr
    assert "examples: raw=copy; fast=200ba" in result.stderr
    assert "new" not in [info.name for info in client.models()]


def test_errors_as_json(emactl):
    result = emactl("--json", "describe", "nobody")
    error = json.loads(result.stderr)["error"]
    assert error["reason"] == "MODEL_NOT_FOUND"
    assert error["code"] == "NOT_FOUND"
    assert "nobody" in error["message"]


def test_ctrl_c_ends_a_watch(server, pushed):
    command = [EMACTL, "--server", server.address, "watch", pushed, "--after", "2"]
    with started(command, stdout=subprocess.PIPE, text=True) as [process]:
        assert process.stdout is not None
        assert "step 3" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


@pytest.mark.parametrize("command", [["list"], ["--json", "list"], ["explain", "--half-life=9ba"]])
def test_output_that_cannot_be_written_is_an_error(emactl, pushed, server, command):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [EMACTL, "--server", server.address, *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert "cannot write to the standard output" in done.stderr


def test_a_watch_ends_when_its_output_cannot_be_written(server, pushed):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [EMACTL, "--server", server.address, "watch", pushed, "--after", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=10,
        )
    assert done.returncode == 1
    assert "cannot write to the standard output" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--server", "nonsense:x"],
        ["--token-file", "/no/such/file"],
        ["--timeout", "never"],
        ["--unknown"],
    ],
    ids=["address", "token", "timeout", "flag"],
)
def test_health_has_two_exit_codes_only(arguments):
    for command, code in (("health", 1), ("list", 2)):
        done = subprocess.run([EMACTL, command, *arguments], capture_output=True, timeout=60)
        assert done.returncode == code, done.stderr


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_pull_that_is_interrupted_leaves_no_file(client, server, model, tmp_path, sent):
    # More than the memory of a lane, and than sockets take.
    weights = {"w": np.zeros(64 << 20, np.float32)}
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    out = tmp_path / "out"
    out.mkdir()
    command = [EMACTL, "--server", server.address, "pull", model, "--track", "raw"]
    # Where these tests run under nohup it would ignore a SIGHUP, as it should.
    process = subprocess.Popen(
        [*command, "-o", out / "w.safetensors"],
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: list(out.iterdir()), "its temporary file is there")
        server.send_signal(signal.SIGSTOP)
        process.send_signal(sent)
        # As a terminal that is closed does.
        if sent == signal.SIGHUP:
            process.send_signal(sent)
        assert process.wait(60) == 130
    finally:
        server.send_signal(signal.SIGCONT)
    assert list(out.iterdir()) == []
    client.delete_model(model)


def test_an_output_that_is_closed_is_an_error_and_no_socket_takes_its_place(server):
    done = subprocess.run(
        ["bash", "-c", 'exec "$@" >&-', "bash", EMACTL, "--server", server.address, "list"],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "cannot write to the standard output" in done.stderr
