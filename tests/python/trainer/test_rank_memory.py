# SPDX-License-Identifier: Apache-2.0
"""What a rank's pushes take of its host's memory: nothing that grows with the model."""

from __future__ import annotations

import subprocess
import sys

import pytest
from server_process import ServerProcess
from testing import SUPPORT

MIB = 1 << 20
# Fixed rings, and what the process itself takes.
MOST = 64 * MIB + 16 * MIB


def memory_of(url: str, count: int, elements: int, buffer_elements: int) -> int:
    command = [sys.executable, SUPPORT / "memory_rank.py", url]
    sizes = map(str, (count, elements, buffer_elements))
    result = subprocess.run([*command, *sizes], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    taken, pushes, sent_bytes = map(int, result.stdout.split())
    assert (pushes, sent_bytes) == (4, 4 * 4 * (count * elements + buffer_elements))
    return taken


@pytest.mark.slow
@pytest.mark.parametrize("lane", ["on", "off"])
@pytest.mark.parametrize("count, elements", [(1, 64 * MIB), (1024, MIB // 16)], ids=["one", "many"])
def test_trained_weights_take_none(tmp_path, model, lane, count, elements):
    with ServerProcess(tmp_path, "--same-host-lane", lane) as server:
        assert memory_of(server.url(model), count, elements, 1) < MOST


@pytest.mark.slow
def test_copies_of_buffers_take_as_much_as_these(server, model):
    """And are seen: 48 MiB."""
    assert 48 * MIB <= memory_of(server.url(model), 4, MIB, 12 * MIB) < MOST
