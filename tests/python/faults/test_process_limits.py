# SPDX-License-Identifier: Apache-2.0
"""Server and emactl where a process may write no long files, or make few threads, or use little memory."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Iterator

import ema_client
import numpy as np
import pytest
from server_process import ServerProcess, server_binary
from testing import EMACTL, started

WEIGHTS = {"w": np.ones(1 << 20, np.float32)}


@contextlib.contextmanager
def short_files(size: int) -> Iterator[None]:
    """Processes that are started meanwhile may not write files of more than `size` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def few_threads(count: int) -> list[str]:
    """What begins the command of a process that may have so many. Nobody counts those of root."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user without other processes")
    # A user for each count: whoever ends is counted for a moment still.
    user = ["setpriv", f"--reuid={23_000 + count}", "--clear-groups", "--inh-caps=-all"]
    return [*user, "--bounding-set=-all", "prlimit", f"--nproc={count}"]


def test_a_file_that_may_not_grow_fails_a_save_not_the_server(tmp_path):
    server = ServerProcess(tmp_path, data_dir=tmp_path / "data")
    with short_files(1_000_000):
        server.start()
    try:
        with ema_client.Client(server.address, timeout_s=60) as client:
            client.create_model("m", WEIGHTS, tracks={"raw": "copy"})
            with client.open_run("m") as run:
                run.push(step=1, weights=WEIGHTS)
            with pytest.raises(ema_client.UnavailableError, match="File too large"):
                client.create_checkpoint("m")
            assert client.pull("m", track="raw")["w"].sum() == 1 << 20
    finally:
        server.kill()


def test_emactl_moves_weights_where_files_may_not_be_long(server, tmp_path):
    command = [EMACTL, "--server", server.address]
    with short_files(1_000_000):
        bench = subprocess.run(
            [*command, "bench", "--bytes", "8M", "--rounds", "1"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert bench.returncode == 0, bench.stderr
    with ema_client.Client(server.address, timeout_s=60) as client:
        client.create_model("long", WEIGHTS, tracks={"raw": "copy"})
        with client.open_run("long") as run:
            run.push(step=1, weights=WEIGHTS)
    output = tmp_path / "w.safetensors"
    with short_files(1_000_000):
        pull = subprocess.run(
            [*command, "pull", "long", "--track", "raw", "-o", output],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert pull.returncode == 1 and "File too large" in pull.stderr, pull
    assert not list(tmp_path.iterdir())


def test_emactl_ends_where_it_can_make_no_threads(server):
    command = [*few_threads(3), EMACTL, "--server", server.address, "list"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result


@pytest.mark.parametrize(
    ("megabytes", "prefix"),
    # On one processor, the server's trial threads use their memory only after all have started. So
    # the trial succeeds, and the threads of the start do not. On a busy machine fewer threads use
    # memory at the same time, so 500 MiB can suffice.
    [(100, []), (500, []), (480, ["taskset", "--cpu-list", "0"])],
)
def test_a_server_with_too_little_address_space_says_so_and_ends(megabytes, prefix):
    limit = f"--as={megabytes << 20}"
    command = [*prefix, "prlimit", limit, str(server_binary()), "--listen", "127.0.0.1:0"]
    with started(command, stderr=subprocess.PIPE, text=True) as (process,):
        log = ""
        for line in process.stderr:
            log += line
            if " info serving " in line:
                process.terminate()
        ended = process.wait(timeout=60)
    if megabytes > 100 and " info serving " in log:
        assert ended == 0, log
    else:
        assert ended == 1 and "cannot start" in log and "ulimit -u and -v" in log, (ended, log)


@pytest.mark.parametrize("count", [1, 4, 8])
def test_a_server_that_can_make_no_threads_says_so_and_ends(count):
    command = [*few_threads(count), str(server_binary()), "--listen", "127.0.0.1:0"]
    with started(command, stderr=subprocess.PIPE, text=True) as (process,):
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1, (signal.strsignal(-process.returncode), log)
    assert "cannot start" in log and "ulimit -u" in log, log
