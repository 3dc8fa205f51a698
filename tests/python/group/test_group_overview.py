# SPDX-License-Identifier: Apache-2.0
"""What `emactl group`, the metrics and the status page say about a group whose servers and etcd come and go."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, get_status, scrape, url_of, value
from server_group import EtcdProcess, ServerGroup
from server_process import ServerProcess, free_port
from testing import EMACTL, wait_for

# A killed member comes back when its lease of 10 s has expired.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed"),
]

WEIGHTS = {f"t{i}": np.full((64, 100), i, np.float32) for i in range(9)}


def group(server: ServerProcess, *options: str) -> subprocess.CompletedProcess[str]:
    command = [EMACTL, "--server", server.address, *options, "group"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def described(server: ServerProcess) -> dict[str, Any]:
    return json.loads(group(server, "--json").stdout)


def wait_until(server: ServerProcess, *words: str, code: int) -> str:
    """What `emactl group` prints at the server, once it has these words and this exit code."""
    last = ""

    def has_them() -> bool:
        nonlocal last
        shown = group(server)
        last = f"{shown.returncode}\n{shown.stdout}{shown.stderr}"
        return shown.returncode == code and all(word in shown.stdout for word in words)

    wait_for(has_them, lambda: last)
    return last


@pytest.fixture
def running(tmp_path: pathlib.Path) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path, 3, *LISTEN) as started:
        yield started


@pytest.fixture
def servers(running: ServerGroup) -> list[ServerProcess]:
    return running.servers


@pytest.fixture
def client(running):
    """Of a group with a model that has been pushed and saved."""
    with ema_client.Client(running.address, timeout_s=60) as connected:
        connected.create_model("m", WEIGHTS, tracks={"ema": "4ba", "raw": "copy"})
        with connected.open_run("m", timeout_s=60) as run:
            run.push(step=7, weights=WEIGHTS)
        connected.create_checkpoint("m")
        yield connected


def test_a_group_that_is_well(servers, client):
    for server in servers:
        wait_until(server, "All is well.", "step 7", "serving", code=0)
        shown = described(server)
        assert shown["is_well"] and shown["problems"] == [] and shown["last_incident"] is None
        assert [member["name"] for member in shown["members"]] == ["ema-0", "ema-1", "ema-2"]
        for member, other in zip(shown["members"], servers, strict=True):
            assert member["address"] == other.address and member["device"] == "cpu"
            assert member["missing_seconds"] is None and len(member["boot"]) == 32
            assert 0 < member["memory_reserved_bytes"] < member["memory_budget_bytes"]
        (model,) = shown["models"]
        assert model["state"] == "serving" and sorted(model["members"]) == [
            "ema-0",
            "ema-1",
            "ema-2",
        ]
        assert model["checkpoint"] == {
            "incarnation": model["incarnation"],
            "version": 1,
            "step": 7,
        }
        progress = model["progress"]
        assert (progress["version"], progress["step"], progress["durable_step"]) == (1, 7, 7)
        assert progress["round"] >= 2 and 0 <= progress["checkpoint_age_seconds"] < 60


def test_metrics_and_status_page_of_a_group(servers, client):
    metrics = [scrape(server) for server in servers]
    homes = [of_one for of_one in metrics if "ema_group_round" in of_one]
    assert len(homes) == 1
    assert value(homes[0], "ema_group_round", model="m") >= 2
    assert 0 <= value(homes[0], "ema_group_checkpoint_age_seconds", model="m") < 60
    for of_one in metrics:
        assert value(of_one, "ema_group_members") == 3
        assert value(of_one, "ema_group_registry_contact_age_seconds") < 10
        assert value(of_one, "ema_group_incarnation", model="m") > 1.7e15
        assert value(of_one, "ema_group_degraded_seconds", model="m") == 0
        assert value(of_one, "ema_group_checkpoint_returns_total", model="m") == 0
        assert 0 < value(of_one, "ema_group_commit_wait_seconds_total", model="m") < 10
    shown = get_status(url_of(servers[0]))["group"]
    assert shown["name"] == "local" and shown["member"] == "ema-0" and shown["problems"] == []
    assert [member["name"] for member in shown["members"]] == ["ema-0", "ema-1", "ema-2"]
    assert [(model["name"], model["checkpoint_step"]) for model in shown["models"]] == [("m", 7)]


def test_etcd_is_unavailable(running, servers, client):
    etcd = running.etcd
    etcd.stop()
    for server in servers:
        # The tables are still there, and pushes continue.
        wait_until(server, "UNUSABLE", etcd.url, "ema-2", "serving", "step 7", code=1)
    with client.open_run("m", timeout_s=60) as run:
        run.push(step=8, weights=WEIGHTS)
    shown = described(servers[0])
    assert shown["models"][0]["progress"]["step"] == 8
    assert (
        shown["registry"]["error"] and "the registry has been unusable for" in shown["problems"][0]
    )
    assert value(scrape(servers[0]), "ema_group_registry_contact_age_seconds") > 0
    etcd.start()
    for server in servers:
        wait_until(server, "All is well.", code=0)


def test_a_server_is_killed_and_comes_back(running, servers, client):
    wait_until(servers[0], "All is well.", code=0)
    home = described(servers[0])["models"][0]["members"][0]
    names = ("ema-0", "ema-1", "ema-2")
    # Not the home, so that the others still know the model's progress.
    killed = next(i for i, name in enumerate(names) if name != home)
    other = servers[(killed + 1) % 3]
    servers[killed].kill()
    wait_until(other, f'member "{names[killed]}" does not answer', code=1)
    text = wait_until(other, "missing for", "degraded", f'"{names[killed]}"', code=1)
    assert "emactl: group" in text and "last incident" in text
    assert described(other)["models"][0]["progress"]["step"] == 7
    metrics = scrape(other)
    assert value(metrics, "ema_group_members") == 2
    wait_for(lambda: value(scrape(other), "ema_group_degraded_seconds", model="m") > 0, "degraded")
    running.start_server(killed)
    text = wait_until(other, "All is well.", code=0)
    assert f'member "{names[killed]}" has restarted' in text
    assert 'model "m" returned to version 1 (step 7)' in text
    # A partition learns of the first round by its next message to the home.
    wait_for(lambda: value(scrape(other), "ema_group_degraded_seconds", model="m") == 0, "joined")


def test_the_home_is_killed(servers, client):
    wait_until(servers[0], "All is well.", code=0)
    names = ("ema-0", "ema-1", "ema-2")
    home = names.index(described(servers[0])["models"][0]["members"][0])
    other = servers[(home + 1) % 3]
    servers[home].kill()
    text = wait_until(other, "does not answer", code=1)
    assert f'its home, member "{names[home]}", does not answer' in text
    assert described(other)["models"][0]["progress"] is None


def test_a_token_shows_the_models_that_it_may_read(tmp_path):
    trainer, evaluator, own = (f"{name}-0d0f6f0c0b3a4a8c" for name in ("all", "some", "server"))
    tokens, own_token = tmp_path / "tokens", tmp_path / "own"
    tokens.write_text(f"trainer {trainer}\nevaluator {evaluator} m\nserver {own}\n")
    own_token.write_text(own)
    with EtcdProcess(tmp_path / "etcd") as etcd, contextlib.ExitStack() as stack:
        port = free_port()
        flags = ["--group", "g", "--etcd", etcd.url, "--member", "a"]
        flags += ["--advertise", f"127.0.0.1:{port}"]
        flags += ["--auth-tokens", str(tokens), "--group-token-file", str(own_token)]
        server = ServerProcess(tmp_path / "server", *flags)
        server.start(port=port)
        stack.callback(server.stop)
        with ema_client.Client(server.address, token=trainer) as connected:
            for model in ("m", "other"):
                connected.create_model(model, WEIGHTS, tracks={"ema": "4ba"})
        for token, models in ((trainer, ["m", "other"]), (evaluator, ["m"])):
            (tmp_path / "token").write_text(token)
            shown = json.loads(group(server, "--json", "--token-file", tmp_path / "token").stdout)
            assert [model["name"] for model in shown["models"]] == models


def test_a_server_of_no_group(tmp_path):
    with ServerProcess(tmp_path) as server:
        shown = group(server)
        assert shown.returncode == 1 and "does not belong to a group" in shown.stderr
    shown = group(server, "--timeout", "1s")
    assert shown.returncode == 1 and shown.stdout == ""
