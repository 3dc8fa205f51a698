# SPDX-License-Identifier: Apache-2.0
"""Every C++ file includes only what its layer may know, and no Python modules import each other."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest
from server_process import ROOT

VALUES = {"include", "server/base"}
SHARED = VALUES | {"proto", "server/wire", "server/kernel", "server/format"}
# For each layer those whose headers its files may include, besides its own.
ALLOWED: dict[str, set[str]] = {
    "server/base": set(),
    "include": {"server/base"},
    "server/wire": VALUES | {"proto"},
    "server/kernel": VALUES,
    "server/device": VALUES | {"server/kernel"},
    "server/core": VALUES | {"server/kernel", "server/device"},
    "server/registry": VALUES | {"proto"},
    "server/format": VALUES | {"server/core"},
    "server/group": VALUES
    | {
        "proto",
        "server/wire",
        "server/format",
        "server/core",
        "server/registry",
        "server/checkpoint",
        "server/rpc",
    },
    "server/checkpoint": VALUES | {"server/format", "server/core", "server/kernel"},
    "server/rpc": VALUES | {"proto", "server/wire", "server/core"},
    "server/follow": VALUES | {"server/device", "server/core"},
    "server/ops": VALUES | {"server/core", "server/device"},
    "client/cpp/transport": SHARED | {"client/cpp"},
    "client/cpp/gpu": SHARED | {"client/cpp", "client/cpp/transport"},
    "client/cpp/pull": SHARED | {"client/cpp", "client/cpp/transport"},
    "client/cpp/push": SHARED | {"client/cpp", "client/cpp/transport", "client/cpp/gpu"},
    "client/cpp/group": SHARED
    | {
        "client/cpp",
        "client/cpp/transport",
        "client/cpp/gpu",
        "client/cpp/pull",
        "client/cpp/push",
    },
    "client/cpp/trainer": SHARED
    | {"client/cpp", "client/cpp/transport", "client/cpp/gpu", "client/cpp/push"},
    "client/cpp": SHARED | {"client/cpp/transport"},
    "client/cli": SHARED | {"client/cpp/transport", "client/cpp/trainer"},
    "client/python": SHARED | {"client/cpp/transport", "client/cpp/push", "client/cpp/trainer"},
}
# Libraries that stay inside some layers.
LIBRARIES = {
    "grpc": {
        "proto",
        "server/wire",
        "server/registry",
        "server/group",
        "server/rpc",
        "client/cpp",
        "client/cli",
        "client/python",
    },
    "torch": {"server/device"},
    "ATen": {"server/device"},
    "c10": {"server/device"},
    "spdlog": {"server/ops"},
    "nlohmann": {
        "server/ops",
        "server/format",
        "server/checkpoint",
        "server/registry",
        "client/cli",
    },
    "curl": {"server/registry"},
}
# Header-only code that the trainers compile with their own LibTorch.
FOR_LIBTORCH = {"include/ema/torch.h", "include/ema/internal/torch_writes.h"}


def layer_of(path: str) -> str:
    """The layer of a file, or of what an #include names."""
    if path.startswith(("ema/v1/", "etcd/", "grpc/health/", "proto/")):
        return "proto"
    if path.startswith(("ema/", "include/")):
        return "include"
    parts = path.split("/")
    depth = 3 if path.startswith("client/cpp/") and len(parts) > 3 else 2
    return "/".join(parts[:depth]) if len(parts) > 2 else parts[0]


def sources() -> Iterator[pathlib.Path]:
    for folder in ("include", "server", "client"):
        for pattern in ("*.h", "*.cc", "*.cu", "*.cuh"):
            yield from (ROOT / folder).rglob(pattern)


def includes(path: pathlib.Path, form: str) -> list[str]:
    return re.findall(rf"^#include {form}", path.read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def files() -> dict[str, pathlib.Path]:
    found = {str(path.relative_to(ROOT)): path for path in sources()}
    assert len(found) > 300
    return found


def test_includes_point_down_only(files):
    wrong = []
    for name, path in files.items():
        layer = layer_of(name)
        if layer == "server":  # main.cc and server.cc put the layers together.
            continue
        for included in includes(path, r'"([^"]+)"'):
            if not included.startswith(("ema/", "etcd/", "grpc/", "server/", "client/")):
                continue
            of = layer_of(included)
            if of != layer and of not in ALLOWED[layer]:
                wrong.append(f"{name} includes {included}")
    assert not wrong


def test_libraries_stay_in_their_layers(files):
    wrong = []
    for name, path in files.items():
        layer = layer_of(name)
        for included in includes(path, r"<([^>]+)>"):
            library = re.split(r"[/+]", included)[0]
            allowed = LIBRARIES.get(library)
            if allowed is None or name in FOR_LIBTORCH or layer == "server":
                continue
            if layer not in allowed and not layer.startswith("client/cpp"):
                wrong.append(f"{name} includes {included}")
    assert not wrong


def imports_of(name: str, path: pathlib.Path, modules: dict[str, pathlib.Path]) -> set[str]:
    """The other modules of the package that a module imports, also inside functions or for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in modules else node.module)
    # The package itself is imported for its extension module, `_ema`.
    return (found & modules.keys()) - {name, "ema_client"}


def test_python_modules_import_each_other_in_one_direction_only():
    root = ROOT / "client/python"
    modules = {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (root / "ema_client").rglob("*.py")
    }
    edges = {name: imports_of(name, path, modules) for name, path in modules.items()}
    assert sum(map(len, edges.values())) > 100
    # Modules that import no others are removed until none is left, or only circles.
    while free := [name for name, imported in edges.items() if not imported]:
        for name in free:
            del edges[name]
        for imported in edges.values():
            imported.difference_update(free)
    assert not edges
