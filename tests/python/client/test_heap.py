# SPDX-License-Identifier: Apache-2.0
"""What the client does to the heap of its process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from server_process import ServerProcess
from testing import SUPPORT


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with ServerProcess(tmp_path_factory.mktemp("server"), "--same-host-lane", "off") as process:
        yield process


def test_freed_tensors_of_a_trainer_go_back_to_the_system(server, model):
    """As without a client, which must not change malloc's bounds: freed blocks would stay in the heap."""
    # Bounds that are set from outside would be tested instead.
    environment = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "GLIBC_"))}
    result = subprocess.run(
        [sys.executable, SUPPORT / "heap_rank.py", server.url(model)],
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) > 5.5
