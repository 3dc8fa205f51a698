# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes component of read replicas."""

from __future__ import annotations

import pathlib
import re

import ema_client
import numpy as np
import pytest
from manifests import (
    FOLDER,
    VERSIONS,
    build,
    build_with,
    environment,
    named,
    number_of_bytes,
    print_config,
    yaml,
)
from server_process import ServerProcess

pytestmark = pytest.mark.framework
kubernetes_validate = pytest.importorskip("kubernetes_validate")


@pytest.fixture(scope="module", params=["cpu", "gpu", "group", "group-cpu"])
def items(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return build_with(tmp_path_factory.mktemp("overlay"), request.param, "replicas")


def pod_of(items: list[dict]) -> dict:
    return named(items, "Deployment", "ema-replica")["spec"]["template"]


def variables_of(items: list[dict]) -> dict[str, str]:
    (container,) = pod_of(items)["spec"]["containers"]
    return environment(container)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_every_object(items, version):
    for item in items:
        kubernetes_validate.validate(item, version, strict=True)


def test_replicas_reach_the_server_and_clients_reach_replicas(items):
    labels = pod_of(items)["metadata"]["labels"]
    policy = named(items, "NetworkPolicy", "ema-replica")["spec"]
    service = named(items, "Service", "ema-replica")["spec"]
    budget = named(items, "PodDisruptionBudget", "ema-replica")["spec"]
    for selector in (
        service["selector"],
        *(spec["matchLabels"] for spec in (policy["podSelector"], budget["selector"])),
    ):
        assert selector.items() <= labels.items()
    # Otherwise the connections of one client would reach replicas that have different versions.
    assert service["sessionAffinity"] == "ClientIP"
    # Both network policies admit clients with this label.
    client = {"ema.dev/client": "true"}
    assert client.items() <= labels.items()
    clients, _ = policy["ingress"]
    assert clients["from"] == [{"podSelector": {"matchLabels": client}}]

    server, dns = policy["egress"]
    (peer,) = server["to"]
    server_labels = named(items, "StatefulSet", "ema-server")["spec"]["template"]["metadata"]
    assert peer["podSelector"]["matchLabels"].items() <= server_labels["labels"].items()
    assert [port["port"] for port in dns["ports"]] == [53, 53]
    host, port = re.fullmatch(
        r"ema://([\w-]+):(\d+)/model", variables_of(items)["EMA_FOLLOW"]
    ).groups()
    assert int(port) in [each["port"] for each in named(items, "Service", host)["spec"]["ports"]]


def test_the_server_accepts_the_options(items):
    printed = print_config({"EMA_DATA_DIR": "/data"} | variables_of(items))
    assert 'follow = "ema://ema-server:50051/model"' in printed
    assert 'data-dir = ""' in printed


def test_there_is_memory_for_one_version_more_than_on_the_server(tmp_path):
    items = build_with(tmp_path, "cpu", "replicas")
    (replica,) = pod_of(items)["spec"]["containers"]
    (server,) = named(items, "StatefulSet", "ema-server")["spec"]["template"]["spec"]["containers"]
    assert environment(replica)["EMA_MEMORY_BYTES"] == environment(server)["EMA_MEMORY_BYTES"]
    limits = [number_of_bytes(each["resources"]["limits"]["memory"]) for each in (replica, server)]
    # 350 million parameters in float32, two averages.
    assert limits[0] - limits[1] > 4 * 350e6 * 2


def test_the_overlay_in_the_comment_sets_the_model(tmp_path):
    folder = FOLDER / "components/replicas"
    text = (folder / "kustomization.yaml").read_text()
    lines = re.findall(r"^#   (.*)$", text, re.M)
    overlay = yaml.safe_load("\n".join(lines).replace("MODEL", "gpt"))
    build_with(tmp_path, "cpu", "replicas")  # Writes kustomization.yaml with the paths.
    overlay |= yaml.safe_load((tmp_path / "kustomization.yaml").read_text())
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    items = build(tmp_path)
    assert variables_of(items)["EMA_FOLLOW"] == "ema://ema-server:50051/gpt"
    (container,) = pod_of(items)["spec"]["containers"]
    assert container["image"] == "registry.example.com/ema-server:0.1.0-cpu"


def test_a_replica_starts_with_the_files_of_the_secret(tmp_path: pathlib.Path):
    """The tokens of its clients, and its own token for the server."""
    trainer, evaluator, own = (
        f"{name}-0d0f6f0c0b3a4a8c" for name in ("trainer", "some", "replica")
    )
    (tmp_path / "tokens").write_text(f"trainer {trainer}\nevaluator {evaluator}\nevaluator {own}\n")
    (tmp_path / "replica-token").write_text(f"{own}\n")
    variables = variables_of(build_with(tmp_path, "cpu", "replicas"))
    paths = [
        str(tmp_path / pathlib.PurePath(variables[name]).name)
        for name in ("EMA_AUTH_TOKENS", "EMA_FOLLOW_TOKEN_FILE")
    ]
    weights = {"w": np.full(9, 2, np.float32)}
    with ServerProcess(tmp_path / "source", "--auth-tokens", paths[0]) as source:
        with ema_client.Client(source.address, token=trainer) as client:
            client.create_model("model", weights, tracks={"raw": "copy"})
            with client.open_run("model", timeout_s=60) as run:
                run.push(step=1, weights=weights)
        flags = ["--auth-tokens", paths[0], "--follow-token-file", paths[1]]
        flags += ["--follow", source.url("model")]
        with (
            ServerProcess(tmp_path / "replica", *flags) as replica,
            ema_client.Client(replica.address, token=evaluator, timeout_s=60) as client,
        ):
            assert client.pull("model", track="raw", framework="numpy").version.step == 1
