# SPDX-License-Identifier: Apache-2.0
"""The client in fresh environments with NumPy and nothing else: its wheel in every Python, and built by pip."""

from __future__ import annotations

import glob
import os
import pathlib
import shutil
import subprocess
import sys
import tomllib

import pytest
from linking import EXTENSION, assert_linked
from server_process import ROOT

CLIENT = ROOT / "client/python"

USE = """
import hashlib  # Brings the interpreter's own OpenSSL.
import sys

def libraries():
    with open("/proc/self/maps") as maps:
        return {line.split()[-1] for line in maps if ".so" in line}

before = libraries()
import ema_client
import numpy

address, model = sys.argv[1:]
assert ema_client.__file__.startswith(sys.prefix), ema_client.__file__
weights = {"w": numpy.arange(3, dtype=numpy.float32)}
with ema_client.Client(address) as client:
    client.create_model(model, weights, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)
    assert client.pull(model, track="raw")["w"].tolist() == [0, 1, 2]
print(*libraries() - before, sep="\\n")
"""


class Environment:
    """A virtual environment of `python` in `folder`."""

    def __init__(self, python: str, folder: pathlib.Path) -> None:
        self.folder = folder
        self.python = folder / "bin/python"
        made = self._run(python, "-m", "venv", folder)
        assert made.returncode == 0, made.stdout

    def _run(self, *command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            cwd=self.folder.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def pip(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return self._run(
            self.python, "-m", "pip", "--no-input", "--disable-pip-version-check", *arguments
        )

    def install(self, what: pathlib.Path, *options: str) -> pathlib.Path:
        """Installs it and NumPy; returns the client's extension."""
        installed = self.pip("install", *options, what, "numpy")
        assert installed.returncode == 0, installed.stdout[-5000:]
        (extension,) = self.folder.rglob("_ema.*.so")
        return extension

    def use(self, address: str, model: str) -> set[str]:
        """Pushes and pulls; returns the files of the libraries that this took."""
        used = self._run(self.python, "-I", "-c", USE, address, model)
        assert used.returncode == 0, used.stdout
        return set(used.stdout.split())


def find_python(version: str) -> str:
    """Skips the test if there is none on the path and none of pyenv's."""
    pyenv = os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv")
    # A shim of pyenv's is on the path for versions that are not chosen, too.
    found = [
        *glob.glob(f"{pyenv}/versions/{version}.*/bin/python"),
        shutil.which(f"python{version}"),
    ]
    for python in filter(None, found):
        if subprocess.run([python, "-c", "import ensurepip"], capture_output=True).returncode == 0:
            return python
    pytest.skip(f"there is no Python {version} here")


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13", "3.14"])
def test_the_wheel_is_for_every_python_and_brings_its_libraries(server, model, tmp_path, version):
    environment = Environment(find_python(version), tmp_path / "venv")
    if (
        environment.pip("download", "--no-deps", "--dest", tmp_path, "nanobind-backend").returncode
        != 0
    ):
        pytest.skip("no network: pip cannot download nanobind-backend")
    (wheel,) = (ROOT / "build/wheel").glob("*.whl")  # Of deploy/wheel.sh.
    assert_linked(environment.install(wheel), EXTENSION)
    libraries = {pathlib.Path(file) for file in environment.use(server.address, model)}
    for name in sorted(EXTENSION):
        files = [file for file in libraries if file.name.startswith(name)]
        assert files
        assert all(file.is_relative_to(tmp_path) for file in files), files
    texts = {text.parent.name for text in environment.folder.rglob("ema_client/licenses/*/*")}
    assert texts >= {"libabsl-dev", "libgrpc-dev", "libprotobuf-dev", "libssl-dev", "nanobind"}


@pytest.mark.slow
@pytest.mark.timeout(1800)  # It compiles the C++ client.
def test_pip_builds_the_client_from_source(server, model, tmp_path):
    environment = Environment(sys.executable, tmp_path / "venv")
    # An isolated build downloads its tools, whatever is installed.
    tools = tomllib.loads((CLIENT / "pyproject.toml").read_text())["build-system"]["requires"]
    if (
        environment.pip("download", "--no-deps", "--dest", tmp_path / "tools", *tools).returncode
        != 0
    ):
        pytest.skip(f"no network: pip cannot download {' '.join(tools)}")
    # A new folder, always of the same name: ccache knows what an earlier run has compiled in it.
    build = ROOT / "build/pip"
    shutil.rmtree(build, ignore_errors=True)
    extension = environment.install(CLIENT, f"--config-settings=build-dir={build}")
    assert_linked(extension, EXTENSION)
    environment.use(server.address, model)
