# SPDX-License-Identifier: Apache-2.0
"""Traffic of every kind at an even rate, and how much a server holds meanwhile."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable

import ema_client
import grpc
import numpy as np
from edge import resident_bytes
from half_sent import HalfSender
from hostile_calls import attack
from http_pages import scrape, value
from server_process import ServerProcess

STEADY = "steady"
TRACK_SETS: list[dict[str, str]] = [
    {"ema": "4ba"},
    {"ema": "4ba", "raw": "copy"},
    {"fast": "2ba", "slow": "100ba", "raw": "copy"},
]
# Long, because other programs may use the machine.
TIMEOUT_S = 300


@dataclasses.dataclass(frozen=True)
class Sample:
    """What the server holds at one time."""

    seconds: float
    # Without freed memory, which the server keeps up to a limit: a leak shows here first.
    heap_mib: float
    resident_mib: float
    fds: int
    threads: int
    disk_mib: float


def folder_bytes(folder: pathlib.Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def take_sample(server: ServerProcess, data_dir: pathlib.Path) -> Sample:
    """The server must have been started with http_pages.LISTEN."""
    process = pathlib.Path(f"/proc/{server.pid}")
    return Sample(
        seconds=time.monotonic(),
        heap_mib=value(scrape(server), "ema_heap_allocated_bytes") / 2**20,
        resident_mib=resident_bytes(server.pid) / 2**20,
        fds=len(os.listdir(process / "fd")),
        threads=len(os.listdir(process / "task")),
        disk_mib=folder_bytes(data_dir) / 2**20,
    )


def slope_per_hour(samples: list[Sample], what: str, max_samples: int = 300) -> float:
    """The median of the slopes between all pairs of samples (Theil and Sen), which single peaks do not move."""
    chosen = samples[:: max(1, len(samples) // max_samples)]
    x = np.array([sample.seconds for sample in chosen])
    y = np.array([float(getattr(sample, what)) for sample in chosen])
    first, second = np.triu_indices(len(chosen), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first]))) * 3600


class Churn:
    """Threads that each repeat one kind of work while the body runs. A context manager."""

    def __init__(
        self, server: ServerProcess, *, owner_token: str, limited_token: str, seed: int
    ) -> None:
        self._server = server
        self._owner_token = owner_token
        self._limited_token = limited_token
        self._seed = seed
        # The pusher stops last: others wait for its commits.
        self._stopping, self._stopping_pusher = threading.Event(), threading.Event()
        self._lock = threading.Lock()
        works = [self._read, self._read, self._watch, self._train, self._train]
        works += [self._send_mutants, self._break_calls]
        # How often each kind of work was done, and what went wrong.
        self.counts = Counter({work.__name__: 0 for work in [*works, self._push_steadily]})
        self.faults: list[str] = []
        self._threads = [
            threading.Thread(target=self._repeat, args=(work, number, self._stopping))
            for number, work in enumerate(works)
        ]
        self._pusher = threading.Thread(
            target=self._repeat, args=(self._push_steadily, len(works), self._stopping_pusher)
        )

    def __enter__(self) -> Churn:
        with self._client(random.Random(0)) as client:
            client.create_model(STEADY, weights_of(64), tracks=TRACK_SETS[1])
            with client.open_run(STEADY) as run:
                run.push(step=1, weights=weights_of(64))
        for thread in [*self._threads, self._pusher]:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        self._stopping_pusher.set()
        self._pusher.join()

    def _repeat(
        self, work: Callable[[random.Random, int], None], number: int, stopping: threading.Event
    ) -> None:
        chance = random.Random(f"{self._seed}-{number}")
        while not stopping.is_set():
            try:
                work(chance, number)
            except (ema_client.EmaError, grpc.RpcError, OSError, AssertionError) as error:
                self._on_fault(f"{work.__name__}: {type(error).__name__}: {error}")
            with self._lock:
                self.counts[work.__name__] += 1

    def _on_fault(self, text: str) -> None:
        with self._lock:
            self.faults.append(text)
        self._stopping.set()

    def _client(self, chance: random.Random) -> ema_client.Client:
        """A new connection; half of the clients use a same-host lane."""
        return ema_client.Client(
            self._server.address,
            token=self._owner_token,
            timeout_s=TIMEOUT_S,
            same_host_lane=chance.random() < 0.5,
        )

    # --- The kinds of work ---

    def _push_steadily(self, chance: random.Random, _: int) -> None:
        """A run of some steps of the steady model, with saves."""
        with self._client(chance) as client, client.open_run(STEADY) as run:
            latest = client.model(STEADY).latest
            assert latest is not None
            for step in range(latest.step + 1, latest.step + 20):
                run.push(step=step, weights=weights_of(64))
                if chance.random() < 0.1:
                    client.create_checkpoint(STEADY)

    def _read(self, chance: random.Random, _: int) -> None:
        dtype = chance.choice((None, "float16"))
        with self._client(chance) as client:
            for _ in range(chance.randrange(1, 10)):
                track = chance.choice(("ema", "raw"))
                client.pull(STEADY, track=track, dtype=dtype, framework="numpy")

    def _watch(self, chance: random.Random, _: int) -> None:
        """A watch that is left after a few commits."""
        with self._client(chance) as client:
            commits = client.watch(STEADY, timeout_s=TIMEOUT_S)
            for _ in range(chance.randrange(1, 5)):
                next(commits)
            commits.close()

    def _train(self, chance: random.Random, number: int) -> None:
        """The whole life of a model."""
        name = f"trained-{number}"
        weights = weights_of(chance.randrange(1, 16))
        tracks = chance.choice(TRACK_SETS)
        with self._client(chance) as client:
            client.create_model(name, weights, tracks=tracks)
            client.attach_files(name, {"config.json": b"{}" * chance.randrange(1000)})
            for launch in range(chance.randrange(1, 4)):
                with client.open_run(name) as run:
                    first = 10 * launch + 1
                    for step in range(first, first + chance.randrange(1, 5)):
                        run.push(step=step, weights=weights)
                    if chance.random() < 0.3:
                        run.start_push(step=first + 8, weights=weights).abandon()
                client.update_model(name, tracks={"more": "7ba"}, pause="more")
                client.update_model(name, remove="more")
            client.create_checkpoint(name)
            client.set_label(name, "kept")
            client.statistics(name)
            client.delete_model(name, purge=True)

    def _send_mutants(self, chance: random.Random, number: int) -> None:
        """Hostile requests of every RPC."""
        _, faults = attack(
            self._server.address,
            self._limited_token,
            self._owner_token,
            prefix=f"hostile-{number}-",
            seed=str(chance.getrandbits(32)),
            count=20,
        )
        for fault, example in faults.items():
            self._on_fault(f"{fault}: {example}")

    def _break_calls(self, chance: random.Random, _: int) -> None:
        """Connections that are cut in the middle of a message, or do not speak HTTP/2."""
        for rpc in ("CreateModel", "Push", "Pull", "Watch"):
            sender = HalfSender(self._server.port, token=self._owner_token)
            with contextlib.closing(sender):
                sender.begin(
                    f"/ema.v1.EmaService/{rpc}", message_bytes=chance.randrange(1, 1 << 20)
                )
                for _ in range(chance.randrange(5)):
                    sender.advance(max_wait_s=0.05)
        with socket.create_connection(("127.0.0.1", self._server.port)) as peer:
            peer.sendall(chance.randbytes(chance.randrange(1, 3000)))
        # Each leaves a trace until the server has seen its end; this is no flood.
        self._stopping.wait(0.2)


def weights_of(kilobytes: int) -> dict[str, np.ndarray]:
    return {
        "w": np.ones(kilobytes * 250, np.float32),
        "count": np.arange(3, dtype=np.int64),
    }
