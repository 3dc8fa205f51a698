# SPDX-License-Identifier: Apache-2.0
"""deploy/compose.yaml and compose.group.yaml as Docker Compose reads them, which is a wheel of
deploy/requirements-all.txt."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from manifests import print_config
from server_process import ROOT

pytestmark = pytest.mark.framework
yaml = pytest.importorskip("yaml")

# The servers of each file.
SERVERS = {"compose.yaml": ["server"], "compose.group.yaml": ["ema-0", "ema-1", "ema-2"]}


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


@pytest.fixture(scope="module", params=SERVERS)
def file(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def configuration(file: str) -> dict:
    return read_configuration(f"deploy/{file}")


def test_its_services(file, configuration):
    services = configuration["services"]
    beside = {"trainer", "evaluator", "prometheus", "grafana"}
    beside |= {"etcd"} if file == "compose.group.yaml" else set()
    assert set(services) == {*SERVERS[file], *beside}
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


def test_the_server_needs_little(file, configuration):
    for name in SERVERS[file]:
        server = configuration["services"][name]
        assert server["read_only"] and server["cap_drop"] == ["ALL"]
        assert server["user"] == "65532:65532"
        assert [volume["target"] for volume in server["volumes"]] == ["/data"]


def test_programs_of_the_demo_are_where_it_says(file, configuration):
    for name in ("trainer", "evaluator"):
        service = configuration["services"][name]
        (script,) = [word for word in service["command"] if word.endswith(".py")]
        assert (ROOT / script).is_file()
        conditions = {other: each["condition"] for other, each in service["depends_on"].items()}
        assert conditions == dict.fromkeys(SERVERS[file], "service_healthy")
        (url,) = [word for word in service["command"] if word.startswith("ema://")]
        assert url == f"ema://{','.join(f'{name}:50051' for name in SERVERS[file])}/digits"


def test_prometheus_scrapes_the_servers(file, configuration):
    (path,) = [
        volume["source"]
        for volume in configuration["services"]["prometheus"]["volumes"]
        if volume["target"] == "/etc/prometheus/prometheus.yml"
    ]
    (job,) = yaml.safe_load(pathlib.Path(path).read_text())["scrape_configs"]
    # alerts.yml expects this name.
    assert job["job_name"] == "ema-server"
    (static,) = job["static_configs"]
    assert static["targets"] == [f"{name}:8080" for name in SERVERS[file]]


def test_a_replica_follows_the_servers(file):
    variables = {"COMPOSE_PROFILES": "replica"}
    replica = read_configuration(f"deploy/{file}", **variables)["services"]["replica"]
    addresses = ",".join(f"{name}:50051" for name in SERVERS[file])
    printed = print_config({"EMA_DATA_DIR": "/data"} | replica["environment"])
    assert f'follow = "ema://{addresses}/digits"' in printed
    assert 'data-dir = ""' in printed and "volumes" not in replica
    assert replica["read_only"] and replica["cap_drop"] == ["ALL"]
    assert all(port["host_ip"] == "127.0.0.1" for port in replica["ports"])


def test_the_servers_of_the_group_are_its_members():
    services = read_configuration("deploy/compose.group.yaml")["services"]
    etcd = services["etcd"]["command"]
    published = set()
    for name in SERVERS["compose.group.yaml"]:
        server = services[name]
        variables = server["environment"]
        # The container reaches the others by their names, and the volume is shared.
        assert (variables["EMA_MEMBER"], variables["EMA_ADVERTISE"]) == (name, f"{name}:50051")
        assert f"--advertise-client-urls={variables['EMA_ETCD']}" in etcd
        assert server["depends_on"]["etcd"]["condition"] == "service_healthy"
        assert [volume["source"] for volume in server["volumes"]] == ["data"]
        # Clients outside cannot use the names, so only the status pages are published.
        (port,) = server["ports"]
        assert port["target"] == 8080
        published.add(port["published"])
        printed = print_config({"EMA_DATA_DIR": "/data"} | variables)
        assert f'member = "{name}"' in printed
    assert len(published) == 3


def test_with_the_edge_only_the_edge_is_reached_from_outside():
    files = "deploy/compose.yaml", "deploy/edge/compose.yaml"
    services = read_configuration(*files, EMA_EDGE_FILES="/files")["services"]
    server, edge = services["server"], services["edge"]
    assert [port["target"] for port in server["ports"]] == [8080]
    assert [port["target"] for port in edge["ports"]] == [50051]
    # The server asks for tokens, and accepts as many connections as the edge may need.
    assert "EMA_ALLOW_UNAUTHENTICATED" not in server["environment"]
    assert server["environment"]["EMA_AUTH_TOKENS"] == "/etc/ema/tokens"
    assert "max-connections = 2048" in print_config(server["environment"])
    assert edge["read_only"] and edge["cap_drop"] == ["ALL"] and edge["user"] == "65532:65532"
    assert pathlib.Path(edge["build"]["context"]) == ROOT / "deploy/edge"
    assert edge["environment"]["EMA_EDGE_SERVER"] == "server:50051"
