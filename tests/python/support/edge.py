# SPDX-License-Identifier: Apache-2.0
"""deploy/edge/haproxy.cfg in front of a server, with a certificate made for it, and a pair of clients that uses it."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import socket
import subprocess
import threading
import time

import ema_client
import numpy as np
from server_process import ROOT, ServerError, ServerProcess, free_port

CONFIGURATION = ROOT / "deploy/edge/haproxy.cfg"
TOKEN = "trainer-6f1d2c70b4e94b0f"


def find_haproxy() -> str | None:
    return shutil.which("haproxy", path=os.environ["PATH"] + ":/usr/sbin")


def resident_bytes(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


class Edge:
    """A server that asks for tokens, and HAProxy in front of it. A context manager."""

    def __init__(self, folder: pathlib.Path, *, all_options: bool = False) -> None:
        """`all_options`: clients need a certificate, and the edge reaches the server over TLS."""
        self._folder = folder
        self._all_options = all_options
        self.ca_file, self.key_file = folder / "edge.pem", folder / "edge.pem.key"
        self.token_file = folder / "tokens"
        self.token_file.write_text(f"trainer {TOKEN}\n")
        # The options that deploy/docs/edge.md names.
        options = ["--auth-tokens", str(self.token_file), "--max-connections", "2048"]
        if all_options:
            options += ["--tls-cert", str(self.ca_file), "--tls-key", str(self.key_file)]
        self.server = ServerProcess(folder / "server", *options)
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{free_port()}"

    def _environment(self) -> dict[str, str]:
        variables = {
            "EMA_EDGE_LISTEN": self.address,
            "EMA_EDGE_SERVER": self.server.address,
            "EMA_EDGE_CERT": str(self.ca_file),
        }
        if self._all_options:
            variables["EMA_EDGE_CLIENT_CA"] = str(self.ca_file)
            variables["EMA_EDGE_SERVER_CA"] = str(self.ca_file)
        return os.environ | variables

    def __enter__(self) -> Edge:
        haproxy = find_haproxy()
        assert haproxy is not None
        request = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=edge"
        )
        request += " -addext subjectAltName=IP:127.0.0.1"
        command = [*request.split(), "-out", self.ca_file, "-keyout", self.key_file]
        subprocess.run(command, check=True, capture_output=True)
        self.server.start()
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [haproxy, "-db", "-f", CONFIGURATION],
                env=self._environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait_until_it_listens()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.wait(30)
        self.server.stop()

    def _wait_until_it_listens(self) -> None:
        assert self._process is not None
        host, port = self.address.split(":")
        deadline = time.monotonic() + 30
        while True:
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise ServerError(f"HAProxy does not listen: {self.log_path.read_text()}")
            time.sleep(0.02)

    @property
    def log_path(self) -> pathlib.Path:
        return self._folder / "haproxy.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def tls(self) -> ema_client.Tls:
        return ema_client.Tls(ca_file=str(self.ca_file))

    def client(self, address: str = "", **options: object) -> ema_client.Client:
        """A client with the token. Not on the same host's shared memory, which does not pass the edge."""
        arguments = {"token": TOKEN, "timeout_s": 60, "same_host_lane": False, "tls": self.tls}
        return ema_client.Client(f"emas://{address or self.address}", **(arguments | options))

    def direct_client(self) -> ema_client.Client:
        options = {"token": TOKEN, "timeout_s": 60, "same_host_lane": False}
        return ema_client.Client(self.server.address, **options)


class Pair:
    """A trainer that pushes every step and an evaluator that pulls, each on a thread, while the body runs."""

    def __init__(self, trainer: ema_client.Client, evaluator: ema_client.Client, megabytes: int):
        self._clients = trainer, evaluator
        self._weights = {"w": np.ones(megabytes * 250_000, np.float32)}
        trainer.create_model("pair", self._weights, tracks={"ema": "10ba"})
        self._run = trainer.open_run("pair")
        self._step = 1
        self._run.push(step=1, weights=self._weights)
        self._stopping = threading.Event()
        self.pushes = self.pulls = 0
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Pair:
        self._stopping.clear()
        self.pushes = self.pulls = 0
        self._threads = [threading.Thread(target=work) for work in (self._push, self._pull)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _push(self) -> None:
        while not self._stopping.is_set():
            self._step += 1
            self._run.push(step=self._step, weights=self._weights)
            self.pushes += 1

    def _pull(self) -> None:
        while not self._stopping.is_set():
            self._clients[1].pull("pair", track="ema", framework="numpy")
            self.pulls += 1

    def close(self) -> None:
        self._run.close()
