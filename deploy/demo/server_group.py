# SPDX-License-Identifier: Apache-2.0
"""Servers that keep models together, and the etcd in which they meet, all as processes of this machine."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from server_process import Place, ServerError, ServerProcess, free_port


class EtcdProcess:
    """An etcd of one node, with its data and log in `folder`. A context manager."""

    def __init__(self, folder: pathlib.Path, place: Place = Place()) -> None:
        self._folder = folder
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self.data_dir = folder / "data"
        self.url = f"http://{place.host}:{free_port()}"
        self._peer_url = f"http://{place.host}:{free_port()}"

    def __enter__(self) -> EtcdProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Starts etcd, and waits until it answers. Raises ServerError: it is not installed, or does not start."""
        if not shutil.which("etcd"):
            raise ServerError("etcd is not installed; Debian's package is etcd-server")
        self._folder.mkdir(parents=True, exist_ok=True)
        command = [*self._place.prefix, "etcd", "--data-dir", str(self.data_dir)]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", self._peer_url]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise ServerError(f"etcd does not answer; its log: {self._folder}/etcd.log")
            time.sleep(0.02)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class ServerGroup:
    """`count` servers, their etcd, and the data directory that they share, all in `folder`. A context manager.

    It can be used in place of a ServerProcess: clients need only an address and a model's URL.

    Args:
        flags: options of every server besides those of the group.
        first_port: the first server listens there and the others on the ports after it; 0: free ports.
        places: where etcd and the servers run, in this order; None: all on the loopback interface.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        count: int,
        *flags: str,
        first_port: int = 0,
        places: Sequence[Place] | None = None,
    ) -> None:
        place_of_etcd, *places_of_servers = places or [Place()] * (count + 1)
        self.etcd = EtcdProcess(folder / "etcd", place_of_etcd)
        self.data_dir = folder / "data"
        self.servers: list[ServerProcess] = []
        self.addresses: list[str] = []
        self._ports = [first_port + i if first_port else free_port() for i in range(count)]
        for index, (port, place) in enumerate(zip(self._ports, places_of_servers, strict=True)):
            self.addresses.append(f"{place.host}:{port}")
            options = ("--group", "local", "--member", f"ema-{index}", "--etcd", self.etcd.url)
            options += ("--advertise", self.addresses[-1])
            server = ServerProcess(
                folder / f"ema-{index}", *options, *flags, data_dir=self.data_dir, place=place
            )
            self.servers.append(server)

    @property
    def address(self) -> str:
        """The addresses of all servers, as a client expects them."""
        return ",".join(self.addresses)

    def url(self, model: str) -> str:
        return f"ema://{self.address}/{model}"

    def __enter__(self) -> ServerGroup:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all that does not run. Raises ServerError: one of them does not start; the others are stopped."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            self.etcd.start()
            for index in range(len(self.servers)):
                self.start_server(index)
            stack.pop_all()

    def start_server(self, index: int) -> None:
        self.servers[index].start(port=self._ports[index])

    def send_signal(self, number: int) -> None:
        """To all servers."""
        for server in self.servers:
            server.send_signal(number)

    def is_running(self) -> bool:
        return all(server.is_running() for server in self.servers)

    def stop(self) -> int:
        """Stops all servers at once, so that they save each model only once. Returns the exit code that is not 0."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.etcd.stop)
            for server in self.servers:
                server.request_stop()
            codes = [server.wait() for server in self.servers]
        return max(codes, key=abs)

    def log(self) -> str:
        """The end of each server's log."""
        return "\n".join(server.log() for server in self.servers)
