# SPDX-License-Identifier: Apache-2.0
"""A way to a server that can be cut, for one of several clients."""

from __future__ import annotations

import contextlib
import socket
import threading


class Way:
    """Passes bytes between a port of its own and a server's while it is open; a context manager."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._mutex = threading.Lock()
        self._is_open = True
        self._replies = threading.Event()
        self._replies.set()
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

    def hold_replies(self) -> None:
        """Keeps what the server says, until `cut`."""
        self._replies.clear()

    def cut(self) -> None:
        """Breaks all connections; new ones end at once."""
        with self._mutex:
            self._is_open = False
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._sockets.clear()
        self._replies.set()

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
                always = threading.Event()
                always.set()
                for pair in ((client, server, always), (server, client, self._replies)):
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket, may_pass: threading.Event) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            may_pass.wait()
            target.sendall(data)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
