# SPDX-License-Identifier: Apache-2.0
"""A real server per test module, and what the tests share."""

from __future__ import annotations

import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_process import ServerProcess
from testing import EMACTL

# Short, so that tests of ranks that die do not wait long.
SESSION_TIMEOUT_S = 2

# The machine's cores are for the server too.
torch.set_num_threads(1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that keeps its checkpoints in a folder of the module's own."""
    folder = tmp_path_factory.mktemp("server")
    with ServerProcess(
        folder,
        *("--session-timeout", f"{SESSION_TIMEOUT_S}s", "--max-models", "1000"),
        data_dir=folder / "data",
    ) as process:
        yield process
        assert process.is_running(), process.log()
        assert process.stop() == 0, process.log()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[ema_client.Client]:
    with ema_client.Client(server.address, timeout_s=30) as result:
        yield result


@pytest.fixture
def emactl(server: ServerProcess) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs emactl with arguments, against the server."""

    def run(*arguments: object, address: str = server.address) -> subprocess.CompletedProcess[str]:
        command = [EMACTL, "--server", address, "--timeout", "5s", *arguments]
        return subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=60
        )

    return run


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A model's name that no other test of the module uses."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:100].strip("-")


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20240607)


@pytest.fixture
def logs(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder
