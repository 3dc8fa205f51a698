# SPDX-License-Identifier: Apache-2.0
"""deploy/compose.yaml as Docker Compose reads it, which a wheel of deploy/requirements-all.txt carries."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from server_process import ROOT

pytestmark = pytest.mark.framework


def read_configuration(*files: str, **environment: str) -> dict:
    compose = pathlib.Path(sys.executable).parent / "docker-compose"
    if not compose.exists():
        pytest.skip("no docker-compose: deploy/setup.sh --all installs it")
    command = [compose]
    for file in files:
        command += ["-f", ROOT / file]
    command += ["config", "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, "it warns"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def configuration() -> dict:
    return read_configuration("deploy/compose.yaml")


def test_its_services(configuration):
    services = configuration["services"]
    assert set(services) == {"server", "trainer", "evaluator", "prometheus", "grafana"}
    targets = set(re.findall(r"^FROM .* AS (\S+)$", (ROOT / "Dockerfile").read_text(), re.M))
    for name, service in services.items():
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), f"{name}: no version"
        # Reached from this machine only: nobody has to log in.
        assert all(port["host_ip"] == "127.0.0.1" for port in service.get("ports", [])), name
        if "build" in service:
            assert service["build"]["target"] in targets
            assert pathlib.Path(service["build"]["context"]) == ROOT


def test_what_is_mounted_from_here_is_here(configuration):
    mounted = [
        pathlib.Path(volume["source"])
        for service in configuration["services"].values()
        for volume in service.get("volumes", [])
        if volume["type"] == "bind"
    ]
    assert len(mounted) == 4
    assert all(path.exists() for path in mounted), mounted


def test_the_server_needs_little(configuration):
    server = configuration["services"]["server"]
    assert server["read_only"] and server["cap_drop"] == ["ALL"]
    assert server["user"] == "65532:65532"
    assert [volume["target"] for volume in server["volumes"]] == ["/data"]


def test_programs_of_the_demo_are_where_it_says(configuration):
    for name in ("trainer", "evaluator"):
        service = configuration["services"][name]
        (script,) = [word for word in service["command"] if word.endswith(".py")]
        assert (ROOT / script).is_file()
        assert service["depends_on"]["server"]["condition"] == "service_healthy"


def test_with_the_edge_only_the_edge_is_reached_from_outside():
    files = "deploy/compose.yaml", "deploy/edge/compose.yaml"
    services = read_configuration(*files, EMA_EDGE_FILES="/files")["services"]
    server, edge = services["server"], services["edge"]
    assert [port["target"] for port in server["ports"]] == [8080]
    assert [port["target"] for port in edge["ports"]] == [50051]
    # The server asks for tokens, and does not count the calls of all clients as the edge's.
    assert "EMA_ALLOW_UNAUTHENTICATED" not in server["environment"]
    assert server["environment"]["EMA_AUTH_TOKENS"] == "/etc/ema/tokens"
    assert server["environment"]["EMA_MAX_CALLS_PER_SECOND"] == "0"
    assert edge["read_only"] and edge["cap_drop"] == ["ALL"] and edge["user"] == "65532:65532"
    assert pathlib.Path(edge["build"]["context"]) == ROOT / "deploy/edge"
    assert edge["environment"]["EMA_EDGE_SERVER"] == "server:50051"
