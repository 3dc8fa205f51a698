# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes overlays of a group of servers; test_kubernetes.py checks what they share with those of one server."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence

import ema_client
import numpy as np
import pytest
from http_pages import LISTEN, get, scrape, url_of, value
from manifests import (
    OVERLAYS,
    VERSIONS,
    build,
    build_with,
    environment,
    named,
    number_of_bytes,
    print_config,
    yaml,
)
from server_group import ServerGroup
from server_process import free_port
from testing import EMACTL, started, wait_for

pytestmark = pytest.mark.framework
kubernetes_validate = pytest.importorskip("kubernetes_validate")

HAS_ETCD = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")
# A checkpoint of the models that the overlays are for, in bytes.
CHECKPOINT_BYTES = {"group": 54e9, "group-cpu": 8.4e9}


@pytest.fixture(scope="module", params=["group", "group-cpu"])
def overlay(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def items(overlay: str) -> list[dict]:
    return build(OVERLAYS / overlay)


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """A group whose etcd is not part of it."""
    folder = tmp_path_factory.mktemp("overlay")
    return build_with(folder, "cpu", "group", "etcd-external")


@pytest.fixture(scope="module")
def without_etcd(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """A group that keeps its records in the Kubernetes API."""
    folder = tmp_path_factory.mktemp("overlay")
    return build_with(folder, "cpu", "group", "kubernetes-registry", namespace="space")


def pod_of(items: list[dict]) -> dict:
    return named(items, "StatefulSet", "ema-server")["spec"]["template"]["spec"]


def environment_of_pod(items: list[dict], pod: str) -> dict[str, str]:
    """The variables of the server as Kubernetes computes them for a pod of the namespace `space`."""
    fields = {"metadata.name": pod, "metadata.namespace": "space"}
    variables: dict[str, str] = {}
    (container,) = pod_of(items)["containers"]
    for variable in container["env"]:
        if "value" in variable:
            # As Kubernetes does, from the variables that come before in the list.
            text = re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], variable["value"])
        else:
            text = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        variables[variable["name"]] = text
    return variables


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_every_object(items, version):
    kinds = [item["kind"] for item in items]
    assert sorted(kinds) == [
        *["NetworkPolicy"] * 2,
        *["PodDisruptionBudget"] * 2,
        *["Service"] * 3,
        "ServiceAccount",
        *["StatefulSet"] * 2,
    ]
    for item in items:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_a_group_with_another_etcd(external, version):
    assert not [item for item in external if item["metadata"]["name"] == "ema-etcd"]
    for item in external:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_accept_a_group_without_etcd(without_etcd, version):
    names = {item["metadata"]["name"] for item in without_etcd}
    assert names == {"ema-server", "ema-server-headless"}
    for item in without_etcd:
        kubernetes_validate.validate(item, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_pods_can_copy_versions_into_memory(tmp_path, version):
    copying = build_with(tmp_path, "gpu", "group", "etcd", "copies")
    for item in copying:
        kubernetes_validate.validate(item, version, strict=True)
    printed = print_config(environment_of_pod(copying, "ema-server-1"))
    assert 'copy-dir = "/copies"' in printed
    (container,) = pod_of(copying)["containers"]
    (mount,) = [one for one in container["volumeMounts"] if one["mountPath"] == "/copies"]
    (volume,) = [one for one in pod_of(copying)["volumes"] if one["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"
    # 4.5 billion parameters on each server, as overlays/gpu/resources.yaml computes.
    assert number_of_bytes(volume["emptyDir"]["sizeLimit"]) >= 4 * 4 * 4.5e9


def test_the_server_accepts_the_options(items, external):
    """The member has the pod's name, and the headless service gives it the address that it advertises."""
    for manifests, etcd in (
        (items, [f"http://ema-etcd-{i}.ema-etcd:2379" for i in range(3)]),
        (external, ["https://etcd.example.com:2379"]),
    ):
        variables = environment_of_pod(manifests, "ema-server-1")
        printed = dict(re.findall(r"^(\S+) = (.*?)  # EMA_", print_config(variables), re.M))
        assert printed["group"] == '"ema"'
        assert printed["member"] == '"ema-server-1"'
        service = named(manifests, "Service", "ema-server-headless")
        assert printed["advertise"] == '"ema-server-1.ema-server-headless.space.svc:50051"'
        assert service["spec"]["publishNotReadyAddresses"]
        assert 50051 in [port["port"] for port in service["spec"]["ports"]]
        assert [url in printed["etcd"] for url in etcd] == [True] * len(etcd)


def test_all_pods_share_one_directory_that_outlives_the_overlay(overlay, items):
    spec = named(items, "StatefulSet", "ema-server")["spec"]
    assert spec["replicas"] == 3 and "volumeClaimTemplates" not in spec
    (name,) = [
        volume["persistentVolumeClaim"]["claimName"]
        for volume in pod_of(items)["volumes"]
        if volume["name"] == "data"
    ]
    claim = yaml.safe_load((OVERLAYS / overlay / "claim.yaml").read_text())
    for version in VERSIONS:
        kubernetes_validate.validate(claim, version, strict=True)
    assert claim["metadata"]["name"] == name
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert "PersistentVolumeClaim" not in [item["kind"] for item in items]
    # Three checkpoints, one being written, and a label.
    storage = number_of_bytes(claim["spec"]["resources"]["requests"]["storage"])
    assert storage > 1.1 * 5 * CHECKPOINT_BYTES[overlay]


def test_each_pod_has_one_gpu_or_none(overlay, items):
    (container,) = pod_of(items)["containers"]
    gpus = container["resources"]["limits"].get("nvidia.com/gpu")
    assert (gpus, environment(container)["EMA_DEVICE"]) == (
        ("1", "cuda:0") if overlay == "group" else (None, "cpu")
    )


def test_there_is_time_to_save_at_a_stop(overlay, items):
    seconds = pod_of(items)["terminationGracePeriodSeconds"]
    # The delay, the grace, and the longest time for which a stopping server waits for the homes.
    assert seconds > 5 + 25 + 600
    assert seconds > 30 + 2 * CHECKPOINT_BYTES[overlay] / 250e6


def allows(rules: Sequence[dict], side: str, labels: dict[str, str], port: str) -> bool:
    """Whether a rule of a network policy permits connections from or to pods with these labels, at this port."""
    for rule in rules:
        selectors = [peer.get("podSelector", {}).get("matchLabels") for peer in rule.get(side, [])]
        if port in [each["port"] for each in rule["ports"]] and any(
            selector and selector.items() <= labels.items() for selector in selectors
        ):
            return True
    return False


def test_the_network_permits_what_a_group_needs(items):
    policies = {
        name: named(items, "NetworkPolicy", name)["spec"] for name in ("ema-server", "ema-etcd")
    }
    labels = {
        name: named(items, "StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
        for name in policies
    }
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"].items() <= labels[name].items()
        assert [53, 53] in [[each["port"] for each in rule["ports"]] for rule in policy["egress"]]
    for source, target, port in (
        ("ema-server", "ema-server", "grpc"),
        ("ema-server", "ema-etcd", "client"),
        ("ema-etcd", "ema-etcd", "peer"),
    ):
        assert allows(policies[source]["egress"], "to", labels[target], port), (source, target)
        assert allows(policies[target]["ingress"], "from", labels[source], port), (source, target)
    client = {"ema.dev/client": "true"}
    assert not allows(policies["ema-etcd"]["ingress"], "from", client, "client")


def test_another_etcd_can_be_reached_with_the_certificate_of_a_secret(external):
    egress = named(external, "NetworkPolicy", "ema-server")["spec"]["egress"]
    assert {"ports": [{"protocol": "TCP", "port": 2379}]} in egress
    pod = pod_of(external)
    (container,) = pod["containers"]
    variables = environment(container)
    (mount,) = [mount for mount in container["volumeMounts"] if mount["name"] == "etcd"]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "etcd"]
    assert volume["secret"] == {"secretName": "ema-etcd-client", "defaultMode": 0o440}
    for option in ("CA", "CERT", "KEY"):
        path = pathlib.PurePath(variables[f"EMA_ETCD_{option}"])
        assert str(path.parent) == mount["mountPath"]


def test_a_group_without_etcd_may_use_the_kubernetes_api(without_etcd):
    variables = environment_of_pod(without_etcd, "ema-server-1")
    printed = dict(re.findall(r"^(\S+) = (.*?)  # EMA_", print_config(variables), re.M))
    assert printed["kubernetes"] == "true" and printed["group"] == '"ema"'
    pod = pod_of(without_etcd)
    assert pod["automountServiceAccountToken"] is True
    binding = named(without_etcd, "RoleBinding", "ema-server")
    (subject,) = binding["subjects"]
    account = named(without_etcd, "ServiceAccount", pod["serviceAccountName"])["metadata"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", account["name"])
    assert subject["namespace"] == account["namespace"] == "space"
    role = named(without_etcd, binding["roleRef"]["kind"], binding["roleRef"]["name"])
    verbs = ["create", "delete", "get", "list", "update", "watch"]
    assert [
        (rule["apiGroups"], rule["resources"], sorted(rule["verbs"])) for rule in role["rules"]
    ] == [([""], ["configmaps"], verbs), (["coordination.k8s.io"], ["leases"], verbs)]
    egress = named(without_etcd, "NetworkPolicy", "ema-server")["spec"]["egress"]
    assert [443, 6443] in [[each["port"] for each in rule["ports"]] for rule in egress]


# --- The etcd of the overlay, as processes of this machine ---


def commands_of_etcd(items: list[dict], folder: pathlib.Path) -> dict[str, list[str]]:
    """The command of each pod, by its client URL. Addresses and folders are replaced by those of this machine."""
    spec = named(items, "StatefulSet", "ema-etcd")["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    pods = [f"ema-etcd-{index}" for index in range(spec["replicas"])]
    ports = {(pod, port): free_port() for pod in pods for port in ("2379", "2380", "2381")}
    commands = {}
    for pod in pods:

        def local(found: re.Match[str]) -> str:
            host, port = found[1], found[2]
            return f"//127.0.0.1:{ports[pod if host == '0.0.0.0' else host, port]}"

        arguments = [argument.replace("$(POD_NAME)", pod) for argument in container["args"]]
        arguments = [
            re.sub(r"//([\w-]+|0\.0\.0\.0)(?:\.ema-etcd)?:(\d+)", local, argument)
            for argument in arguments
        ]
        (mount,) = container["volumeMounts"]
        arguments = [text.replace(mount["mountPath"], str(folder / pod)) for text in arguments]
        commands[f"http://127.0.0.1:{ports[pod, '2379']}"] = ["etcd", *arguments]
    return commands


def has_quorum(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
            return reply.status == 200
    except (urllib.error.URLError, OSError):
        return False


@HAS_ETCD
def test_two_of_the_three_etcd_suffice(items, tmp_path):
    commands = commands_of_etcd(items, tmp_path)
    assert len(commands) == 3
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started(*commands.values(), **quiet) as processes:
        for url in commands:
            wait_for(lambda: has_quorum(url), f"{url} has a quorum")
        processes[0].kill()
        for url in list(commands)[1:]:
            wait_for(lambda: has_quorum(url), f"{url} has a quorum of two")


# --- The probes, with real servers ---


@pytest.fixture
def group(tmp_path: pathlib.Path) -> Iterator[ServerGroup]:
    with ServerGroup(tmp_path, 2, *LISTEN) as running:
        yield running


@pytest.mark.slow
@HAS_ETCD
def test_probes_depend_on_neither_etcd_nor_the_other_servers(group):
    weights = {name: np.ones(9, np.float32) for name in "ab"}
    with contextlib.closing(ema_client.Client(group.address, timeout_s=60)) as client:
        client.create_model("m", weights, tracks={"raw": "copy"})
    remaining, other = group.servers
    group.etcd.stop()
    other.kill()
    wait_for(
        lambda: value(scrape(remaining), "ema_group_registry_contact_age_seconds") > 5,
        "etcd does not answer",
    )
    shown = subprocess.run([EMACTL, "--server", remaining.address, "group"], capture_output=True)
    assert shown.returncode == 1  # The group is not well, but a restart would not help.
    assert get(url_of(remaining), "/readyz")[0] == 200
    assert get(url_of(remaining), "/livez")[0] == 200
    assert subprocess.run([EMACTL, "--server", remaining.address, "health"]).returncode == 0
    group.etcd.start()  # The server leaves the group when it stops.


@HAS_ETCD
def test_the_secret_of_the_overlay_suffices_for_a_group(items, tmp_path):
    """Its two files: the tokens, and the token that the servers present to each other."""
    trainer, evaluator, own = (f"{name}-0d0f6f0c0b3a4a8c" for name in ("trainer", "some", "server"))
    (tmp_path / "tokens").write_text(f"trainer {trainer}\nevaluator {evaluator}\nserver {own}\n")
    (tmp_path / "group-token").write_text(f"{own}\n")
    (container,) = pod_of(items)["containers"]
    paths = {
        option: str(tmp_path / pathlib.PurePath(environment(container)[variable]).name)
        for option, variable in (
            ("--auth-tokens", "EMA_AUTH_TOKENS"),
            ("--group-token-file", "EMA_GROUP_TOKEN_FILE"),
        )
    }
    flags = [word for option in paths.items() for word in option]
    weights = {name: np.full(9, 2, np.float32) for name in "abc"}
    with ServerGroup(tmp_path / "group", 3, *flags) as group:
        with ema_client.Client(group.address, token=trainer, timeout_s=60) as client:
            client.create_model("m", weights, tracks={"raw": "copy"})
            with client.open_run("m", timeout_s=60) as run:
                run.push(step=1, weights=weights)
            client.create_checkpoint("m")
        with ema_client.Client(group.address, token=evaluator, timeout_s=60) as client:
            assert client.pull("m", track="raw", framework="numpy").version.step == 1
        with ema_client.Client(group.address, token=own, timeout_s=60) as client:
            with pytest.raises(ema_client.PermissionDeniedError):
                client.pull("m", track="raw", framework="numpy")
