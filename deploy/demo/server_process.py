# SPDX-License-Identifier: Apache-2.0
"""An ema-server as a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import socket
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


class ServerError(RuntimeError):
    """The server did not start, or ended by itself."""


def server_binary() -> pathlib.Path:
    """The server to run: EMA_SERVER_BIN, or the release build."""
    default = ROOT / "build/release/server/ema-server"
    return pathlib.Path(os.environ.get("EMA_SERVER_BIN") or default)


def free_port() -> int:
    """A port of the loopback interface that nothing listens on, and that no outgoing connection gets."""
    while True:
        # The ports from 32768 on are those of outgoing connections.
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a process runs: its address, and the command that starts a program there."""

    host: str = "127.0.0.1"
    prefix: tuple[str, ...] = ()


class ServerProcess:
    """Runs from `start()` to `stop()`; a context manager."""

    def __init__(
        self,
        folder: pathlib.Path,
        *flags: str,
        data_dir: pathlib.Path | None = None,
        place: Place = Place(),
    ) -> None:
        self._folder = folder
        self._flags = flags
        self.data_dir = data_dir
        self._place = place
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self._place.host}:{self.port}"

    @property
    def log_path(self) -> pathlib.Path:
        return self._folder / "server.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def url(self, model: str) -> str:
        return f"ema://{self.address}/{model}"

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, *, port: int = 0, timeout_s: float = 60.0) -> None:
        """Starts the server and waits until it listens. Port 0: one of free_port(), for a later start too."""
        binary = server_binary()
        if not binary.exists():
            raise ServerError(
                f"no server at {binary}: build it with `cmake --build --preset release`"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        port_file = self._folder / "port"
        port_file.unlink(missing_ok=True)
        listen = f"{self._place.host}:{port or free_port()}"
        command = [*self._place.prefix, str(binary), "--listen", listen]
        command += ["--port-file", str(port_file)]
        if self.data_dir is not None:
            command += ["--data-dir", str(self.data_dir)]
        with self.log_path.open("ab") as log:
            # Its own process group: Ctrl-C is for us, and we stop it.
            self._process = subprocess.Popen(
                [*command, *self._flags], stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + timeout_s
        while not self._read_port(port_file):
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with {self._process.returncode}: {self.log()}")
            if time.monotonic() > deadline:
                self.kill()
                raise ServerError(f"the server does not listen after {timeout_s} s: {self.log()}")
            time.sleep(0.02)

    def _read_port(self, port_file: pathlib.Path) -> bool:
        if not port_file.exists():
            return False
        text = port_file.read_text().strip()
        if not text:
            return False
        self.port = int(text)
        return True

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self, *, timeout_s: float = 60.0) -> int:
        """SIGTERM; returns the exit code. A server that does not end in time is killed."""
        self.request_stop()
        return self.wait(timeout_s=timeout_s)

    def request_stop(self) -> None:
        """SIGTERM, without waiting for the end. A second one would end the server before it has saved its models."""
        if self.is_running():
            self.send_signal(signal.SIGTERM)

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            # Its threads run on for a moment. Popen waits for the end only, so it misses nothing.
            os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def wait(self, *, timeout_s: float = 60.0) -> int:
        """Waits for the end after request_stop(), and returns the exit code. A server that does not end is killed."""
        if self._process is None:
            return 0
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerError(f"the server did not end {timeout_s} s after SIGTERM") from None

    def kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")[-4000:]
