# SPDX-License-Identifier: Apache-2.0
"""Ranks, evaluators and a client that saves, of a model on a group of servers that are killed or cut off."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import ema_client
from group_history import GroupHistory, read_records
from kill_history import fill
from server_group import ServerGroup
from testing import SUPPORT, wait_for

MODEL = "filled"
RANKS = 4
READERS = 4
TIMEOUT_S = 30
# For the group to continue after a fault. A killed server can join again when its lease of 10 s has expired.
RECOVERY_S = 150.0
# What a client may be told while a server is away. Anything else is a bug.
GONE = ("UnavailableError", "DeadlineExceededError", "AbortedError")


class RankProcess:
    """A rank in a process of its own. kill() may be called by another thread than the other methods."""

    def __init__(self, address: str, rank: int, history: GroupHistory) -> None:
        self._name = f"rank {rank}"
        self._history = history
        command = [sys.executable, SUPPORT / "filling_rank.py", address, MODEL, rank, RANKS]
        self._process = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def begin(self, step: int) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # It was killed.
            # Without a buffer, which close() would try to write.
            os.write(self._process.stdin.fileno(), f"{step}\n".encode())

    def finish(self) -> bool:
        """Waits for the end of the step. Returns false if the process was killed."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            return False
        answer = json.loads(line)
        if error := answer.get("error"):
            self._history.on_error(self._name, error, answer["reason"])
            if error not in GONE:
                self._history.on_violation(f"{self._name}: {answer}")
            return True
        incarnation, number = answer["id"]
        version = SimpleNamespace(
            step=answer["step"],
            incarnation=incarnation,
            number=number,
            tracks={"ema": SimpleNamespace(update_weight=answer["weight"])},
        )
        self._history.on_push(self._name, answer["step"], version)
        return True

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        with self._process:
            self._process.kill()


class Traffic:
    """The ranks, evaluators and the client that saves."""

    def __init__(self, addresses: Sequence[str], history: GroupHistory) -> None:
        self._addresses = addresses
        self._history = history
        self._stopped = threading.Event()
        self.ranks = [RankProcess(self._address(rank), rank, history) for rank in range(RANKS)]
        jobs: list[tuple[str, Callable[[ema_client.Client, str], None]]] = [
            (f"reader {reader}", self._pull) for reader in range(READERS)
        ]
        jobs.append(("saver", self._save))
        self._threads = [
            threading.Thread(target=self._run, args=[index, *job]) for index, job in enumerate(jobs)
        ]
        self._threads.append(threading.Thread(target=self._train))
        for thread in self._threads:
            thread.start()

    def kill_rank(self, rank: int) -> None:
        """It is started again before the next step."""
        self.ranks[rank].kill()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        for rank in self.ranks:
            rank.close()

    def _train(self) -> None:
        """The ranks make each step together, as those of a training do."""
        step = 0
        while not self._stopped.is_set():
            step += 3 if step % 5 == 3 else 1  # Some are left out.
            for rank in self.ranks:
                rank.begin(step)
            for index, rank in enumerate(list(self.ranks)):
                if not rank.finish():
                    rank.close()
                    self.ranks[index] = RankProcess(self._address(index), index, self._history)

    def _address(self, index: int) -> str:
        """All servers; each client asks another one first."""
        first = index % len(self._addresses)
        return ",".join([*self._addresses[first:], *self._addresses[:first]])

    def _run(self, index: int, name: str, job: Callable[[ema_client.Client, str], None]) -> None:
        with ema_client.Client(self._address(index), timeout_s=TIMEOUT_S) as client:
            while not self._stopped.is_set():
                if self._history.acked() == (0, 0):
                    self._stopped.wait(0.1)  # There is no version yet.
                    continue
                try:
                    job(client, name)
                except ema_client.EmaError as error:
                    self._history.on_error(name, type(error).__name__, error.reason)
                    if type(error).__name__ not in GONE:
                        self._history.on_violation(f"{name}: {error!r}")
                    self._stopped.wait(0.1)

    def _pull(self, client: ema_client.Client, name: str) -> None:
        track = "raw" if name == "reader 0" else "ema"
        acked = self._history.acked()
        weights = client.pull(MODEL, track=track, framework="numpy")
        self._history.on_pull(name, track, acked, weights)
        self._stopped.wait(0.01)

    def _save(self, client: ema_client.Client, name: str) -> None:
        self._history.on_save(client.create_checkpoint(MODEL).version)
        self._history.on_versions([listed.version for listed in client.versions(MODEL)])
        self._stopped.wait(0.2)


class WatchedGroup:
    """A group of servers with a model that has a checkpoint, its clients, and what they are told. A context manager.

    Args:
        servers: not yet started.
    """

    def __init__(self, servers: ServerGroup) -> None:
        self.servers = servers
        self.history = GroupHistory()

    def __enter__(self) -> WatchedGroup:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.servers)
            with ema_client.Client(self.servers.address, timeout_s=TIMEOUT_S) as client:
                client.create_model(MODEL, fill(0), tracks={"ema": "1ba", "raw": "copy"})
            self.traffic = Traffic(self.servers.addresses, self.history)
            stack.callback(self.traffic.stop)
            record = read_records(self.servers.etcd.url, MODEL)[-1]
            self.home = int(record["partitions"][0]["member"].removeprefix("ema-"))
            self.await_recovery()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def others(self) -> list[int]:
        """The servers that are not the model's home."""
        return [index for index in range(len(self.servers.servers)) if index != self.home]

    def await_recovery(self) -> None:
        """Until all ranks have pushed, evaluators have pulled, and a checkpoint was saved, since now."""
        before = self.history.counts()

        def has_recovered() -> bool:
            now = self.history.counts()
            now.subtract(before)
            pushes = [now[f"pushes of rank {rank}"] for rank in range(RANKS)]
            return min(pushes) >= 3 and now["pulls"] >= 20 and now["saves"] >= 1

        self.await_event(has_recovered, f"that all goes on; before: {before}")

    def await_event(self, event: Callable[[], bool], what: str) -> None:
        """Waits for `event`, or until the history is violated."""
        wait_for(
            lambda: self.history.is_violated() or event(),
            lambda: f"{what}\n{self.history.counts()}\n{self.history.errors()}\n{self.servers.log()}",
            RECOVERY_S,
        )

    def finish(self) -> list[dict[str, Any]]:
        """Stops all, and checks what the clients were told. Returns all records that the registry has had."""
        self.traffic.stop()
        records = read_records(self.servers.etcd.url, MODEL)
        assert self.servers.stop() == 0, self.servers.log()
        problems = self.history.check(records)
        counts = self.history.counts()
        print(counts, self.history.errors())
        assert not problems, "\n".join(problems)
        assert counts["unchecked"] <= 0.01 * counts["pulls"]
        return records
