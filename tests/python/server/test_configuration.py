# SPDX-License-Identifier: Apache-2.0
"""Flags, environment and file of a real server process."""

from __future__ import annotations

import os
import pathlib
import subprocess
import tomllib

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess, server_binary
from testing import wait_for

WEIGHTS = {"w": np.ones(3, np.float32)}


def run_server(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A server that is expected to end by itself."""
    return subprocess.run(
        [str(server_binary()), *flags],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def write(folder: pathlib.Path, content: str) -> str:
    path = folder / "ema.toml"
    path.write_text(content)
    return str(path)


def test_flags_beat_the_environment_which_beats_the_file(tmp_path, monkeypatch):
    config = write(tmp_path, "max-models = 2\nkeep-last = 8\nmax-connections = 9\n")
    monkeypatch.setenv("EMA_CONFIG", config)
    monkeypatch.setenv("EMA_KEEP_LAST", "7")
    monkeypatch.setenv("EMA_MAX_CONNECTIONS", "6")
    with ServerProcess(tmp_path, "--max-connections", "5") as server:
        log = server.log()
        with ema_client.Client(server.address) as client:
            for name in ("a", "b"):
                client.create_model(name, WEIGHTS, tracks={"ema": "1ba"})
            with pytest.raises(ema_client.ResourceExhaustedError):
                client.create_model("c", WEIGHTS, tracks={"ema": "1ba"})
    assert f"config={config} " in log
    assert " max_models=2 " in log and " max_connections=5 " in log
    printed = run_server("--max-connections=5", "--print-config")
    assert printed.returncode == 0, printed.stderr
    assert "max-connections = 5  # flag\n" in printed.stdout
    assert "keep-last = 7  # EMA_KEEP_LAST\n" in printed.stdout
    assert "max-models = 2  # file\n" in printed.stdout
    assert tomllib.loads(printed.stdout)["listen"] == ["127.0.0.1:50051"]


def test_what_is_printed_is_read_back(tmp_path):
    first = run_server("--data-dir", '/d "e"\\f', "--save-every=1h30m", "--print-config")
    values = tomllib.loads(first.stdout)
    assert values["data-dir"] == '/d "e"\\f' and values["save-every"] == "1h30m"
    again = run_server("--config", write(tmp_path, first.stdout), "--print-config")
    assert again.returncode == 0, again.stderr
    assert tomllib.loads(again.stdout) == values


@pytest.mark.parametrize(
    "content, message",
    [
        ("max-modles = 3", ':1: "max-modles" is not an option; did you mean "max-models"?\n'),
        ("\nmax-models = 0", ':2: max-models: "0" is not an integer from 1 to '),
        ("device = cpu", ":1: not TOML: "),
    ],
)
def test_a_bad_file_ends_the_start(tmp_path, content, message):
    config = write(tmp_path, content)
    result = run_server("--config", config)
    assert result.returncode == 2 and result.stdout == ""
    assert config + message in result.stderr


def test_an_unknown_variable_is_warned_of(tmp_path, monkeypatch):
    monkeypatch.setenv("EMA_MAX_MODLES", "3")
    monkeypatch.setenv("EMA_TLS_CA", "/of/a/client.pem")
    with ServerProcess(tmp_path) as server:
        log = server.log()
    assert " warn unknown environment variable name=EMA_MAX_MODLES nearest=EMA_MAX_MODELS\n" in log
    assert "EMA_TLS_CA" not in log
    printed = run_server("--print-config")
    assert "unknown environment variable name=EMA_MAX_MODLES nearest=" in printed.stderr


def test_a_port_file_that_cannot_be_written_ends_the_start_before_it_serves(tmp_path):
    path = tmp_path / "none" / "port"
    result = run_server("--listen", "127.0.0.1:0", "--port-file", str(path))
    assert result.returncode == 1
    assert "cannot start" in result.stderr and str(path) in result.stderr
    assert " serving " not in result.stderr


def test_other_hosts_are_served_only_if_somebody_says_so(tmp_path):
    everywhere = ["--listen", "0.0.0.0:0", "--port-file", str(tmp_path / "port")]
    result = run_server(*everywhere)
    assert result.returncode == 2
    assert '--listen: "0.0.0.0:0" can be reached from other hosts' in result.stderr
    assert "--tls-client-ca" in result.stderr and "--allow-unauthenticated" in result.stderr
    assert not (tmp_path / "port").exists()
    with ServerProcess(tmp_path, "--listen", "0.0.0.0:0", "--allow-unauthenticated") as server:
        wait_for(lambda: " serving listen=127.0.0.1:" in server.log(), "it says so")
        assert ",0.0.0.0:" in server.log()
