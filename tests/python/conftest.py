# SPDX-License-Identifier: Apache-2.0
"""A real server per test module, and what the tests share. With EMA_TEST_GROUP=N it is a group of N servers."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Callable, Iterator

import ema_client
import numpy as np
import pytest
import torch
from server_group import ServerGroup
from server_process import ServerProcess
from testing import EMACTL

# --session-timeout of the fixture `server`, unless the test's module sets another SESSION_TIMEOUT_S. It is long enough
# for ranks in several processes to push the same step, also on a busy machine.
SESSION_TIMEOUT_S = 10

# How many servers hold the models together. 0: one server without a group.
GROUP_SIZE = int(os.environ.get("EMA_TEST_GROUP", 0))

# The machine's cores are for the server too.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """For a group: only tests that use the fixture `server`. All others would run as they do without a group: they need
    no server, or start one of their own, because they give it options, kill or restart it, or read its log. What a
    group does then is tested in tests/group and tests/python/group.
    """
    if not GROUP_SIZE:
        return
    chosen, others = [], []
    for item in items:
        assert isinstance(item, pytest.Function)
        uses_group = "server" in item.fixturenames and not hasattr(item.module, "server")
        (chosen if uses_group else others).append(item)
        if marker := item.get_closest_marker("one_server"):
            item.add_marker(pytest.mark.skip(reason=f"not for a group: {marker.args[0]}"))
    config.hook.pytest_deselected(items=others)
    items[:] = chosen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skips a test that needs what a group cannot do yet."""
    try:
        return (yield)
    except Exception as error:
        if GROUP_SIZE and "is on a group of servers; " in str(error):
            pytest.skip(f"not yet for a group: {error}"[:200])
        raise


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess | ServerGroup]:
    """A server that keeps its checkpoints in a folder of the module's own."""
    folder = tmp_path_factory.mktemp("server")
    timeout_s = getattr(request.module, "SESSION_TIMEOUT_S", SESSION_TIMEOUT_S)
    flags = ("--session-timeout", f"{timeout_s}s", "--max-models", "1000")
    with (
        ServerGroup(folder, GROUP_SIZE, *flags)
        if GROUP_SIZE
        else ServerProcess(folder, *flags, data_dir=folder / "data")
    ) as process:
        yield process
        assert process.is_running(), process.log()
        assert process.stop() == 0, process.log()


@pytest.fixture
def client(server: ServerProcess | ServerGroup) -> Iterator[ema_client.Client]:
    with ema_client.Client(server.address, timeout_s=30) as result:
        yield result


@pytest.fixture
def emactl(server: ServerProcess | ServerGroup) -> Callable[..., subprocess.CompletedProcess[str]]:
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
