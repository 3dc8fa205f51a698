# SPDX-License-Identifier: Apache-2.0
"""`pip install ./client/python`, as the README says it, in an environment with NumPy and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tomllib

import numpy as np
import pytest
from linking import EXTENSION, assert_linked
from server_process import ROOT

CLIENT = ROOT / "client/python"

USE = """
import sys
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
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)  # It compiles the C++ client.
def test_the_client_installs_into_a_fresh_environment(server, model, tmp_path):
    def run(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(word) for word in command],
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    python = tmp_path / "venv/bin/python"
    made = run(sys.executable, "-m", "venv", tmp_path / "venv")
    assert made.returncode == 0, made.stdout
    pip = [python, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    # An isolated build downloads its tools, whatever is installed.
    tools = tomllib.loads((CLIENT / "pyproject.toml").read_text())["build-system"]["requires"]
    if run(*pip, "download", "--no-deps", "--dest", tmp_path / "tools", *tools).returncode != 0:
        pytest.skip(f"no network: pip cannot download {' '.join(tools)}")
    # What is pulled is torch's or NumPy's.
    installed = run(*pip, "install", CLIENT, f"numpy=={np.__version__}")
    assert installed.returncode == 0, installed.stdout[-5000:]
    (extension,) = (tmp_path / "venv").rglob("_ema.*.so")
    assert_linked(extension, EXTENSION)
    used = run(python, "-I", "-c", USE, server.address, model)
    assert used.returncode == 0, used.stdout
