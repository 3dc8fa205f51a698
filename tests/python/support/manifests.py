# SPDX-License-Identifier: Apache-2.0
"""The manifests of deploy/kubernetes as kubectl makes them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping

import pytest
from server_process import ROOT, server_binary

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "deploy/kubernetes"
OVERLAYS = FOLDER / "overlays"
# The oldest and the newest that the manifests are for.
VERSIONS = ("1.31", "1.37")
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


def build(folder: pathlib.Path) -> list[dict]:
    """What `kubectl apply -k` would send; kubectl is a wheel of deploy/requirements-all.txt."""
    kubectl = pathlib.Path(sys.executable).parent / "kubectl"
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def build_with(
    folder: pathlib.Path, overlay: str, *components: str, namespace: str = ""
) -> list[dict]:
    """An overlay with components, as a user would add them. kustomize accepts only paths relative to it."""
    root = pathlib.Path(*[".."] * len(folder.parts[1:]), *FOLDER.parts[1:])
    text = {
        "resources": [str(root / "overlays" / overlay)],
        "components": [str(root / "components" / component) for component in components],
    }
    if namespace:
        text["namespace"] = namespace
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return build(folder)


def named(items: list[dict], kind: str, name: str) -> dict:
    (found,) = [i for i in items if (i["kind"], i["metadata"]["name"]) == (kind, name)]
    return found


def environment(container: dict) -> dict[str, str]:
    """Its variables, except for those that Kubernetes computes for each pod."""
    return {
        variable["name"]: variable["value"] for variable in container["env"] if "value" in variable
    }


def print_config(variables: Mapping[str, str]) -> str:
    """What the server's --print-config prints with these variables, which must all be options that it accepts."""
    others = {name: text for name, text in os.environ.items() if not name.startswith("EMA")}
    done = subprocess.run(
        [server_binary(), "--print-config"],
        env=others | dict(variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "unknown environment variable" not in done.stderr, done.stderr
    return done.stdout


def number_of_bytes(quantity: str) -> int:
    return int(quantity[:-2]) * UNITS[quantity[-2:]]
