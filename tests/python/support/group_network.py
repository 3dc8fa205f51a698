# SPDX-License-Identifier: Apache-2.0
"""A network of this machine, in which packets between two nodes can be dropped.

Each node is a network namespace with one link to a namespace in the middle, which forwards its packets. Needs root and
iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from server_process import Place


def why_not() -> str:
    """Why this machine cannot have such a network; empty: it can."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        return "network namespaces need root and iproute2"
    name = f"ema-try-{os.getpid()}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return "this machine does not allow network namespaces"
    ip("netns", "delete", name)
    return ""


def ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, text=True)


class Network:
    """The nodes have the numbers 0 to `count` - 1. A context manager."""

    def __init__(self, count: int) -> None:
        self._name = f"ema-{os.getpid()}"
        self.places = [
            Place(f"10.77.{node}.2", ("ip", "netns", "exec", f"{self._name}-{node}"))
            for node in range(count)
        ]

    def __enter__(self) -> Network:
        with contextlib.ExitStack() as stack:
            stack.callback(self._delete)
            ip("netns", "add", self._name)
            ip("netns", "exec", self._name, "sysctl", "-q", "-w", "net.ipv4.ip_forward=1")
            for node in range(len(self.places)):
                self._add(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def enter(self, node: int) -> None:
        """Moves the calling thread, and those that it will start, to a node."""
        clone_newnet = 0x40000000
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self._name}-{node}") as namespace:
            if libc.setns(namespace.fileno(), clone_newnet) != 0:
                raise OSError(ctypes.get_errno(), f"setns to node {node}")

    def _add(self, node: int) -> None:
        name, link = f"{self._name}-{node}", f"node{node}"
        ip("netns", "add", name)
        ip("-n", self._name, "link", "add", link, "type", "veth", "peer", "eth0", "netns", name)
        ip("-n", self._name, "address", "add", f"10.77.{node}.1/24", "dev", link)
        ip("-n", self._name, "link", "set", link, "up")
        ip("-n", name, "address", "add", f"10.77.{node}.2/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "route", "add", "default", "via", f"10.77.{node}.1")

    def _delete(self) -> None:
        """Also of a network that was created in part. The links go with their namespaces."""
        for name in [*(f"{self._name}-{node}" for node in range(len(self.places))), self._name]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)

    @contextlib.contextmanager
    def cut(self, ways: Sequence[tuple[int, int]]) -> Iterator[None]:
        """Drops all packets from the first node of each pair to the second one, until the end of the body."""
        rules = [
            ("from", self.places[source].host, "to", self.places[target].host, "blackhole")
            for source, target in ways
        ]
        with contextlib.ExitStack() as stack:
            for rule in rules:
                ip("-n", self._name, "rule", "add", *rule)
                stack.callback(ip, "-n", self._name, "rule", "delete", *rule)
            yield
