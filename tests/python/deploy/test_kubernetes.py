# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes overlays as kubectl makes them: valid by Kubernetes' own schemas, safe, and with room for what they say."""

from __future__ import annotations

import os
import pathlib
import re
import shlex
import subprocess

import pytest
from manifests import (
    OVERLAYS,
    VERSIONS,
    build,
    build_with,
    environment,
    named,
    number_of_bytes,
    print_config,
)
from server_process import ServerProcess, server_binary

pytestmark = pytest.mark.framework
kubernetes_validate = pytest.importorskip("kubernetes_validate")


@pytest.fixture(
    scope="module", params=["cpu", "gpu", "cpu+tls", "group", "group-cpu", "group-cpu+tls"]
)
def objects(request: pytest.FixtureRequest, tmp_path_factory) -> dict[str, dict]:
    """Those of the server, by kind; of Services the one for clients."""
    overlay, _, component = request.param.partition("+")
    if component:
        built = build_with(tmp_path_factory.mktemp("overlay"), overlay, component)
    else:
        built = build(OVERLAYS / overlay)
    of_server = [item for item in built if item["metadata"]["name"].startswith("ema-server")]
    return {item["kind"]: item for item in reversed(of_server)} | {"all": of_server}


@pytest.fixture
def pod(objects) -> dict:
    return objects["StatefulSet"]["spec"]["template"]["spec"]


@pytest.fixture
def container(pod) -> dict:
    (only,) = pod["containers"]
    return only


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_every_object(objects, version):
    kinds = [item["kind"] for item in objects["all"]]
    assert sorted(kinds) == [
        *["NetworkPolicy", "PodDisruptionBudget", "Service", "Service"],
        *["ServiceAccount", "StatefulSet"],
    ]
    for item in objects["all"]:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_schemas_refuse_what_is_misspelt(objects):
    item = objects["Service"]
    wrong = item | {"spec": item["spec"] | {"selectors": {}}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_what_selects_the_pod_does(objects):
    spec = objects["StatefulSet"]["spec"]
    labels = spec["template"]["metadata"]["labels"].items()
    services = [item for item in objects["all"] if item["kind"] == "Service"]
    selectors = [service["spec"]["selector"] for service in services]
    selectors += [
        spec["selector"]["matchLabels"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    assert all(selector and selector.items() <= labels for selector in selectors)
    headless = [item for item in services if item["spec"].get("clusterIP") == "None"]
    assert [item["metadata"]["name"] for item in headless] == [spec["serviceName"]]


def test_clients_need_one_label_to_connect(objects):
    clients, prometheus, *_ = objects["NetworkPolicy"]["spec"]["ingress"]
    has_label = {"key": "ema.dev/client", "operator": "In", "values": ["true"]}
    assert clients["from"] == [{"podSelector": {"matchExpressions": [has_label]}}]
    assert [list(peer) for peer in prometheus["from"]] == [["namespaceSelector"]]


def test_services_say_what_is_spoken(objects, container):
    expected = "https" if "EMA_TLS_CERT" in environment(container) else "kubernetes.io/h2c"
    for service in (item for item in objects["all"] if item["kind"] == "Service"):
        said = {port["name"]: port["appProtocol"] for port in service["spec"]["ports"]}
        assert said == {"grpc": expected, "http": "http"}


def test_probes_ask_the_health_service(objects, container):
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container[name]
        assert not {"tcpSocket", "httpGet"} & probe.keys()
        if "EMA_TLS_CERT" in environment(container):
            address = environment(container)["EMA_LISTEN"].split(",")[1]
            assert "grpc" not in probe
            command = probe["exec"]["command"]
            assert command == ["/usr/local/bin/emactl", "health", "--server", address]
        else:
            assert probe["grpc"]["port"] == ports["grpc"]


def test_the_pod_has_no_rights(pod, container):
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "runAsGroup": 65532,
        "fsGroup": 65532,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {
        mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")
    }
    assert writable == {"/data", "/tmp"}


def test_the_paths_of_secrets_are_mounted(pod, container):
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    volumes = {volume["name"] for volume in pod["volumes"]} | {"data"}
    assert mounts.keys() == volumes
    for name, value in environment(container).items():
        if value.startswith("/") and name != "EMA_DATA_DIR":
            assert any(value.startswith(f"{path}/") for path in mounts.values()), name
    secrets = [volume["secret"] for volume in pod["volumes"] if "secret" in volume]
    # Nobody but the pod's group, which is the server's, reads them.
    assert secrets and all(secret["defaultMode"] == 0o440 for secret in secrets)


def test_there_is_time_to_drain(pod, container):
    help_text = subprocess.run([server_binary(), "--help"], capture_output=True, text=True).stdout
    grace = re.search(r"--drain-grace DURATION=(\d+)s", help_text)
    assert grace is not None
    delay = re.fullmatch(r"(\d+)s", environment(container)["EMA_DRAIN_DELAY"])
    assert delay is not None
    assert pod["terminationGracePeriodSeconds"] > int(delay[1]) + int(grace[1]) + 60


@pytest.mark.parametrize(("overlay", "checkpoint_bytes"), [("cpu", 2.8e9), ("gpu", 24e9)])
def test_the_claim_has_room_for_what_the_overlay_is_for(overlay, checkpoint_bytes):
    """Three checkpoints, one being written, and a label. The formula's models, without snapshots."""
    spec = named(build(OVERLAYS / overlay), "StatefulSet", "ema-server")["spec"]
    (claim,) = spec["volumeClaimTemplates"]
    storage = number_of_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert storage > 1.1 * 5 * checkpoint_bytes
    seconds = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds > 30 + 2 * checkpoint_bytes / 125e6


def write_gpu_server(folder: pathlib.Path, limit_bytes: int) -> pathlib.Path:
    """A program that is the server with a GPU in host memory, in a pod of this limit."""
    runtime = server_binary().parents[1] / "tests/testutil/fake_cudart/libcudart.so.13"
    if not runtime.exists():
        pytest.skip(f"no {runtime}: the release build with tests makes it where CUDA's compiler is")
    if os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < limit_bytes:
        pytest.skip("this machine has less memory than the pod may take")
    # As a container finds its control group's limit, of version 2 and of version 1.
    groups = folder / "cgroup"
    (groups / "memory").mkdir(parents=True)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        (groups / name).write_text(str(limit_bytes))
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount.append('mount --bind "$0" /sys/fs/cgroup && exec "$@"')
    command = [*mount, str(groups)]
    if subprocess.run([*command, "true"], capture_output=True).returncode != 0:
        pytest.skip("no namespaces: unshare --mount does not work here")
    script = folder / "ema-server"
    command += ["env", f"LD_PRELOAD={runtime}", str(server_binary())]
    script.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    script.chmod(0o755)
    return script


def test_the_limit_is_what_the_server_says_it_may_take(container, tmp_path, monkeypatch):
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    limit_bytes = number_of_bytes(resources["limits"]["memory"])
    variables = environment(container)
    if variables["EMA_DEVICE"] != "cpu":
        monkeypatch.setenv("EMA_SERVER_BIN", str(write_gpu_server(tmp_path, limit_bytes)))
    monkeypatch.setenv("EMA_MEMORY_BYTES", variables["EMA_MEMORY_BYTES"])
    with ServerProcess(tmp_path, "--device", variables["EMA_DEVICE"]) as server:
        said = re.search(r" memory at_most_bytes=(\d+) .* files_and_casts=(\d+) ", server.log())
    assert said is not None
    # Files and casts have a part of what is left.
    needed_bytes = int(said[1]) - int(said[2])
    assert 1.05 < limit_bytes / needed_bytes < 1.2


@pytest.fixture(scope="module")
def with_edge(tmp_path_factory) -> list[dict]:
    return build_with(tmp_path_factory.mktemp("overlay"), "cpu", "edge")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_the_edge(with_edge, version):
    for item in with_edge:
        kubernetes_validate.validate(item, version, strict=True)


def test_the_edge_reaches_the_server_and_clients_reach_the_edge(with_edge):
    pod = named(with_edge, "Deployment", "ema-edge")["spec"]["template"]
    labels = pod["metadata"]["labels"]
    service = named(with_edge, "Service", "ema-edge")["spec"]
    policy = named(with_edge, "NetworkPolicy", "ema-edge")["spec"]
    assert service["selector"].items() <= labels.items()
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    # What the server's policy asks of clients.
    assert labels["ema.dev/client"] == "true"
    # Otherwise all clients have the address of a node, and share its limits.
    assert service["externalTrafficPolicy"] == "Local"
    (container,) = pod["spec"]["containers"]
    server, _, port = environment(container)["EMA_EDGE_SERVER"].partition(":")
    ports = named(with_edge, "Service", server)["spec"]["ports"]
    assert int(port) in [item["port"] for item in ports]


def test_the_server_behind_the_edge_accepts_its_options(with_edge):
    pod = named(with_edge, "StatefulSet", "ema-server")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert "max-connections = 2048" in print_config(environment(container))


def test_the_edge_has_no_rights_and_its_key_where_haproxy_looks(with_edge):
    pod = named(with_edge, "Deployment", "ema-edge")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 65532
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    certificate = pathlib.PurePath(environment(container)["EMA_EDGE_CERT"])
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    paths = {item["key"]: item["path"] for item in volume["secret"]["items"]}
    assert str(certificate.parent) == mount["mountPath"]
    assert paths == {"tls.crt": certificate.name, "tls.key": certificate.name + ".key"}
