# SPDX-License-Identifier: Apache-2.0
"""HTTP/2 by hand: requests of which only a part is ever sent, as no client of gRPC sends them."""

from __future__ import annotations

import select
import socket
import struct
import time

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
INITIAL_WINDOW_SIZE = 4
FRAME_BYTES = 16384


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: str, text: str) -> bytes:
    """As HPACK has one that is in no table."""
    assert len(name) < 127 and len(text) < 127
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(text)]) + text.encode()


class HalfSender:
    """One connection, whose calls send what the server takes of a message that has no end."""

    def __init__(self, port: int, *, token: str = "", takes: int = 65535) -> None:
        """`takes`: bytes that the server may send for a call, and no more."""
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._token = token
        self._in = b""
        self._out = PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, takes))
        self._window = 65535
        self._initial_window = 65535
        self._windows: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._next_stream = 1
        self.ended: set[int] = (
            set()
        )  # Streams that the server has ended since the caller emptied it.
        self.sent_bytes = 0

    def close(self) -> None:
        self._socket.close()

    def begin(self, path: str, *, message_bytes: int = 8 << 20) -> int:
        """Starts a call whose message is said to be so long, and never ends."""
        stream = self._begin(path)
        self._left[stream] = 5 + message_bytes - 1
        self._send(stream, struct.pack(">BI", 0, message_bytes))
        return stream

    def call(self, path: str, message: bytes) -> int:
        """Starts a call and sends its message."""
        stream = self._begin(path)
        self._left[stream] = 5 + len(message)
        self._send(stream, struct.pack(">BI", 0, len(message)) + message)
        return stream

    def send_all(self) -> None:
        """Sends what has been begun."""
        while self._out:
            self.advance(max_wait_s=1.0)

    def take(self, stream: int, size: int) -> None:
        """Lets the server send so many bytes more for a call."""
        for of in (0, stream):
            self._out += frame(WINDOW_UPDATE, 0, of, struct.pack(">I", size))

    def _begin(self, path: str) -> int:
        stream = self._next_stream
        self._next_stream += 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x"}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        if self._token:
            fields["authorization"] = f"Bearer {self._token}"
        block = b"".join(header(name, text) for name, text in fields.items())
        self._out += frame(HEADERS, END_HEADERS, stream, block)
        self._windows[stream] = self._initial_window
        return stream

    def advance(self, *, max_wait_s: float) -> bool:
        """Sends and receives what there is. False: nothing has happened for so long."""
        self._fill()
        readable, writable, _ = select.select(
            [self._socket], [self._socket] if self._out else [], [], max_wait_s
        )
        if writable:
            self._out = self._out[self._socket.send(self._out) :]
        if readable:
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self._in += received
            self._take_frames()
        return bool(readable or writable)

    def advance_until_ended(self, streams: set[int], *, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not streams <= self.ended:
            assert time.monotonic() < deadline, f"not ended: {sorted(streams - self.ended)[:8]}"
            self.advance(max_wait_s=1.0)

    def _send(self, stream: int, payload: bytes) -> None:
        self._out += frame(DATA, 0, stream, payload)
        self._window -= len(payload)
        self._windows[stream] -= len(payload)
        self._left[stream] -= len(payload)
        self.sent_bytes += len(payload)

    def _fill(self) -> None:
        for stream in self._windows:  # Those that have not ended.
            while len(self._out) < 1 << 20:
                size = min(self._window, self._windows[stream], self._left[stream], FRAME_BYTES)
                if size <= 0:
                    break
                self._send(stream, bytes(size))

    def _take_frames(self) -> None:
        while len(self._in) >= 9:
            size = int.from_bytes(self._in[:3], "big")
            kind, flags, stream = struct.unpack(">BBI", self._in[3:9])
            if len(self._in) < 9 + size:
                return
            payload = self._in[9 : 9 + size]
            self._in = self._in[9 + size :]
            self._take(kind, flags, stream, payload)

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, number = struct.unpack(">HI", payload[at : at + 6])
                if name == INITIAL_WINDOW_SIZE:
                    for other in self._windows:
                        self._windows[other] += number - self._initial_window
                    self._initial_window = number
            self._out += frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self._out += frame(PING, ACK, 0, payload)
        elif kind == WINDOW_UPDATE:
            (more,) = struct.unpack(">I", payload)
            if stream == 0:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
        elif kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            # A stream can end twice: by its last frame, and by a reset that follows.
            if self._windows.pop(stream, None) is not None:
                del self._left[stream]
                self.ended.add(stream)
