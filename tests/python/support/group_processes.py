# SPDX-License-Identifier: Apache-2.0
"""A group of three servers and the etcd in which they meet, each a process of its own: fixtures for test files to
import."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest
from http_pages import LISTEN
from server_process import ServerProcess

needs_etcd = pytest.mark.skipif(not shutil.which("etcd"), reason="etcd is not installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class EtcdProcess:
    """Keeps its data and its address when it is started again."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.url, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
        self._log = folder / "etcd.log"
        self._command = ["etcd", "--data-dir", str(folder / "etcd"), "--listen-peer-urls", peer]
        self._command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait()


@pytest.fixture
def etcd(tmp_path: pathlib.Path) -> Iterator[EtcdProcess]:
    process = EtcdProcess(tmp_path)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def servers(tmp_path: pathlib.Path, etcd: EtcdProcess) -> Iterator[list[ServerProcess]]:
    with contextlib.ExitStack() as stack:
        processes = []
        for member in ("ema-0", "ema-1", "ema-2"):
            port = free_port()
            process = ServerProcess(
                tmp_path / member,
                *("--group", "g", "--etcd", etcd.url, "--member", member),
                *("--advertise", f"127.0.0.1:{port}"),
                *LISTEN,
                data_dir=tmp_path / "data",
            )
            process.start(port=port)
            stack.callback(process.stop)
            processes.append(process)
        yield processes
