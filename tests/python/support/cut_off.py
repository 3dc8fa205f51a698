# SPDX-License-Identifier: Apache-2.0
"""A way to a server that can be cut, for one of several clients."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
from collections.abc import Callable


class Way:
    """Passes bytes between a port of its own and a server's while it is open; a context manager."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self._is_open = True
        self._replies = threading.Condition()
        self._reply_bytes = math.inf  # That may still pass.
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def url(self, model: str) -> str:
        return f"ema://127.0.0.1:{self._listener.getsockname()[1]}/{model}"

    def __enter__(self) -> Way:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def hold_replies(self, *, after_bytes: int = 0) -> None:
        """Keeps what the server says after so many bytes (64 KiB more or less), until `cut`."""
        with self._replies:
            self._reply_bytes = after_bytes

    def cut(self) -> None:
        """Breaks all connections; new ones end at once."""
        with self._mutex:
            self._is_open = False
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()
        with self._replies:
            self._reply_bytes = math.inf
            self._replies.notify_all()

    def mend(self) -> None:
        with self._mutex:
            self._is_open = True

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with self._mutex:
                    if not self._is_open:
                        client.close()
                        continue
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                    self._sockets += [client, server]
                for pair in ((client, server, _pass), (server, client, self._wait_turn)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()

    def _wait_turn(self, count: int) -> None:
        with self._replies:
            self._replies.wait_for(lambda: self._reply_bytes > 0)
            self._reply_bytes -= count


def _pass(count: int) -> None:
    pass


def _pass_on(
    source: socket.socket, target: socket.socket, wait_turn: Callable[[int], None]
) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            wait_turn(len(data))
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
