# SPDX-License-Identifier: Apache-2.0
"""emactl's commands about the server itself, and that all say the same version."""

from __future__ import annotations

import json
import pathlib
import re
import signal
import subprocess

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, scrape
from server_process import ServerProcess, server_binary
from testing import EMACTL, started, wait_for


def emactl(address: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [EMACTL, "--server", address, *arguments]
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=120
    )


def model_names(server: ServerProcess) -> list[str]:
    with ema_client.Client(server.address, timeout_s=30) as client:
        return [info.name for info in client.models()]


def test_version_option_call_metric_and_log_say_the_same(tmp_path):
    printed = subprocess.run(
        [server_binary(), "--version"], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    version = re.fullmatch(r"ema-server (\d+\.\d+\.\d+)\n", printed)
    assert version, printed
    with ServerProcess(tmp_path, *LISTEN) as server:
        info = json.loads(emactl(server.address, "info", "--json").stdout)
        assert info["version"] == version[1]
        (labels,) = scrape(server)["ema_build_info"]
        assert dict(labels)["version"] == version[1]
        assert f"version={version[1]} " in server.log_path.read_text()


def test_info_says_how_the_server_stands(tmp_path):
    weights = {"w": np.zeros(1 << 20, np.float32)}
    with ServerProcess(tmp_path, "--memory-bytes", "1G", "--max-models", "7") as server:
        with ema_client.Client(server.address, timeout_s=30) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
        info = json.loads(emactl(server.address, "info", "--json").stdout)
        assert info["device"].startswith("cpu") and info["serving"] and info["not_serving"] == ""
        assert info["memory"]["budget_bytes"] == 1 << 30
        assert info["memory"]["reserved_bytes"] == 16 << 20
        assert info["limits"]["models"] == {"in_use": 1, "limit": 7}
        text = emactl(server.address, "info").stdout
        assert "SERVING" in text and "16.0 MiB reserved of 1.0 GiB" in text


def test_the_log_level_changes_what_is_logged_from_here_on(tmp_path):
    with ServerProcess(tmp_path, "--log-level", "warn") as server:
        assert emactl(server.address, "log-level").stdout == "warn\n"
        changed = emactl(server.address, "log-level", "debug", "--json")
        assert json.loads(changed.stdout) == {"before": "warn", "now": "debug"}
        weights = {"w": np.zeros(4, np.float32)}
        with ema_client.Client(server.address, timeout_s=30) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=weights)
        wait_for(lambda: " debug committed " in server.log_path.read_text(), "it is logged")
        wrong = emactl(server.address, "log-level", "loud", "--json")
        assert wrong.returncode == 4
        assert "expected debug, info, warn or error" in json.loads(wrong.stderr)["error"]["message"]
        assert emactl(server.address, "log-level").stdout == "debug\n"


@pytest.fixture
def tokens(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "tokens"
    path.write_text(
        "evaluator reading-token-0001\ntrainer training-token-01\nadmin admin-token-00001\n"
    )
    path.chmod(0o600)
    return path


def test_roles(tmp_path, tokens):
    (tmp_path / "reading").write_text("reading-token-0001")
    (tmp_path / "training").write_text("training-token-01")
    (tmp_path / "ruling").write_text("admin-token-00001")
    with ServerProcess(tmp_path, "--auth-tokens", str(tokens)) as server:
        as_reader = ["--token-file", tmp_path / "reading"]
        assert emactl(server.address, "info", *as_reader).returncode == 0
        assert emactl(server.address, "info").returncode == 4
        refused = emactl(server.address, "bench", "--token-file", tmp_path / "training")
        assert "bench makes a model and deletes it, so it needs the role admin" in refused.stderr
        for command in (["log-level", "debug"], ["drain", "--yes"], ["bench", "--bytes", "1M"]):
            for who in ("reading", "training"):
                refused = emactl(server.address, *command, "--json", "--token-file", tmp_path / who)
                assert refused.returncode == 4
                assert json.loads(refused.stderr)["error"]["reason"] == "NOT_ALLOWED"
        as_admin = ["--token-file", tmp_path / "ruling"]
        listed = json.loads(emactl(server.address, "list", "--json", *as_admin).stdout)
        assert listed["models"] == []
        assert emactl(server.address, "bench", "--bytes", "1M", *as_admin).returncode == 0
        assert emactl(server.address, "drain", "--yes", *as_admin).returncode == 0
        wait_for(lambda: not server.is_running(), "the end")
        assert server.stop() == 0


@pytest.mark.parametrize("flags", [(), ("--same-host-lane", "off")])
def test_bench_measures_and_leaves_nothing(tmp_path, flags):
    data = tmp_path / "data"
    with ServerProcess(tmp_path, *flags, data_dir=data) as server:
        run = emactl(server.address, "bench", "--bytes", "24M", "--rounds", "3", "--json")
        assert run.returncode == 0, run.stderr
        measured = json.loads(run.stdout)
        assert measured["bytes"] == 24 << 20 and measured["rounds"] == 3
        for what in ("push", "pull"):
            speeds = measured[what]["gigabytes_per_second"]
            assert 0 < speeds["least"] <= speeds["median"] <= speeds["most"]
            assert measured[what]["lane"] == ("grpc" if flags else "shared memory")
        text = emactl(server.address, "bench", "--bytes", "4100", "--rounds", "1")
        assert "push to commit" in text.stdout and "GB/s" in text.stdout, text.stderr
        assert model_names(server) == []
        assert not list(data.glob("**/*emactl-bench*"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_bench_that_is_interrupted_leaves_nothing(tmp_path, sent):
    with ServerProcess(tmp_path) as server:
        command = [EMACTL, "--server", server.address, "bench", "--bytes", "4M"]
        with started([*command, "--rounds", 1_000_000], stderr=subprocess.PIPE) as [process]:
            wait_for(lambda: model_names(server) != [], "its model is there")
            process.send_signal(sent)
            assert process.wait(60) == 130
        assert model_names(server) == []


def test_bench_of_what_does_not_fit_says_so_and_leaves_nothing(tmp_path):
    with ServerProcess(tmp_path, "--memory-bytes", "8M") as server:
        run = emactl(server.address, "bench", "--bytes", "16M", "--json")
        assert run.returncode == 4
        assert json.loads(run.stderr)["error"]["reason"] == "MEMORY_BUDGET"
        assert model_names(server) == []
        # Nothing is taken of this host before it is known to have it.
        run = emactl(server.address, "bench", "--bytes", "900T", "--json")
        assert run.returncode == 4, run.stderr
        assert "--bytes: 900.0 TiB given" in json.loads(run.stderr)["error"]["message"]
        assert model_names(server) == []
        for wrong in (["--bytes", "4"], ["--bytes", "many"], ["--rounds", "0"]):
            assert emactl(server.address, "bench", *wrong).returncode == 2
