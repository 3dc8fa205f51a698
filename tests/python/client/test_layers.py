# SPDX-License-Identifier: Apache-2.0
"""The client's folders are layers: none imports what is above it."""

from __future__ import annotations

import ast
import pathlib

import ema_client

PACKAGE = pathlib.Path(ema_client.__file__).parent
# From the bottom to the top. The public modules may import all of them.
LAYERS = [
    {"_ema", "_errors", "_argument_checks", "_logging"},
    {"_tracks"},
    {"_client"},
    {"_model"},
    {"_trainer"},
    {"_evaluator", "_compute_ema"},
    {"_local", "_callbacks"},
    {"_without_server"},
]
# Of a module that is given as `out` the tensors have to be found; attach() may need no server.
EXCEPTIONS = {
    ("_client/pull_arguments.py", "_model"),
    ("_trainer/attach.py", "_without_server"),
}


def layer_of(part):
    (found,) = (index for index, layer in enumerate(LAYERS) if part in layer)
    return found


def imported_by(path):
    """The parts of the package that a module imports, inside of functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "ema_client":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("ema_client."):
            yield node.module.split(".")[1]


def test_imports_go_down():
    upward = set()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE)
        part = name.parts[0].removesuffix(".py")
        if part != "__init__" and part.startswith("_"):
            upward |= {
                (str(name), other)
                for other in imported_by(path)
                if layer_of(other) > layer_of(part)
            }
    assert upward == EXCEPTIONS
