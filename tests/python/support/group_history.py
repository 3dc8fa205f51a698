# SPDX-License-Identifier: Apache-2.0
"""What the clients of a group of servers were told while it lost servers, and whether that was right.

As in kill_history.py, all elements pushed at step t are c(t). Here the registry says which incarnations there were: a
crash of one server makes all of them return to the newest checkpoint, and that begins the next incarnation.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import threading
import urllib.request
from collections.abc import Sequence
from typing import Any

import ema_client
from kill_history import Id, average_after, fill_value, id_of, read_values

# An index in the list of incarnations, and the number of a version that is the newest one at some time in it.
Position = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Incarnation:
    number: int
    base: Id  # The checkpoint from which it began; (0, 0): none.


def read_records(etcd_url: str, model: str, group: str = "local") -> list[dict[str, Any]]:
    """All values that the model's record has had in etcd, which must not have been compacted, oldest first."""
    key = base64.b64encode(f"/ema/{group}/models/{model}".encode()).decode()
    records = []
    revision = 0  # The newest.
    while True:
        body = json.dumps({"key": key, "revision": revision}).encode()
        with urllib.request.urlopen(f"{etcd_url}/v3/kv/range", body, timeout=30) as reply:
            found = json.load(reply).get("kvs", [])
        if not found:
            return records[::-1]
        records.append(json.loads(base64.b64decode(found[0]["value"])))
        revision = int(found[0]["mod_revision"]) - 1
        if revision == 0 or found[0]["version"] == "1":
            return records[::-1]


def checkpoint_ids(record: dict[str, Any]) -> list[Id]:
    return [id_from(checkpoint) for checkpoint in record["checkpoints"]]


def id_from(value: dict[str, Any] | None) -> Id:
    return (value["incarnation"], value["version"]) if value else (0, 0)


def incarnations_of(records: Sequence[dict[str, Any]]) -> list[Incarnation]:
    """In their order. `records`: all that the registry has had of the model."""
    incarnations = [Incarnation(records[0]["incarnation"], (0, 0))]
    for record in records:
        if record["incarnation"] != incarnations[-1].number:
            incarnations.append(Incarnation(record["incarnation"], id_from(record["base"])))
    return incarnations


@dataclasses.dataclass(frozen=True)
class Read:
    """A pull, or the answer to a push."""

    client: str
    id: Id
    acked_before: Id  # The newest version that any rank was told of before the call began.
    track: str = ""  # Of a pull.
    value: float = 0.0  # Of a pull: all floats of the track.


class GroupHistory:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._violations: list[str] = []
        self._reads: list[Read] = []
        self._saved: list[Id] = []
        self._steps: dict[Id, int] = {}
        self._weights: dict[Id, float] = {}
        self._acked: Id = (0, 0)
        self._errors: collections.Counter[str] = collections.Counter()
        self._counts: collections.Counter[str] = collections.Counter()

    def counts(self) -> collections.Counter[str]:
        """A copy of the numbers of pulls, torn and unchecked ones, pushes, commits and saves."""
        with self._lock:
            return self._counts.copy()

    def errors(self) -> collections.Counter[str]:
        """How often each error was returned."""
        with self._lock:
            return self._errors.copy()

    def is_violated(self) -> bool:
        with self._lock:
            return bool(self._violations)

    # --- What happens ---

    def acked(self) -> Id:
        """The newest version that a rank was told of. Of a later incarnation is newer."""
        with self._lock:
            return self._acked

    def on_push(self, rank: str, step: int, version: ema_client.Version) -> None:
        """A rank was told that its step is a version."""
        with self._lock:
            if version.step != step:
                self._violations.append(f"{rank}: step {step} was answered with {version}")
            self._counts["pushes"] += 1
            self._counts[f"pushes of {rank}"] += 1
            self._counts["commits"] += id_of(version) not in self._steps
            self._record(version)
            self._reads.append(Read(rank, id_of(version), acked_before=(0, 0)))
            self._acked = max(self._acked, id_of(version))

    def on_pull(
        self, reader: str, track: str, acked_before: Id, weights: ema_client.Weights
    ) -> None:
        version = weights.version
        floats, counts = read_values(weights)
        with self._lock:
            self._counts["pulls"] += 1
            self._record(version)
            if len(floats) != 1 or counts != {fill_value(version.step)}:
                self._counts["torn"] += 1
                self._violations.append(f"torn: {track} of {version}: {floats}, {counts}")
                return
            self._reads.append(Read(reader, id_of(version), acked_before, track, floats.pop()))

    def on_save(self, version: ema_client.Version) -> None:
        """A checkpoint was acknowledged as saved."""
        with self._lock:
            self._counts["saves"] += 1
            self._record(version)
            self._saved.append(id_of(version))

    def on_versions(self, versions: Sequence[ema_client.Version]) -> None:
        """What the server says of its versions: of some, no client was told because the reply was lost."""
        with self._lock:
            for version in versions:
                self._record(version)

    def on_error(self, client: str, error: str, reason: str) -> None:
        """A call has failed."""
        with self._lock:
            self._errors[f"{client.split()[0]}: {error} {reason}"] += 1

    def on_violation(self, text: str) -> None:
        with self._lock:
            self._violations.append(text)

    def _record(self, version: ema_client.Version) -> None:
        key = id_of(version)
        weight = version.tracks["ema"].update_weight
        if self._steps.setdefault(key, version.step) != version.step:
            self._violations.append(f"{key} is of steps {self._steps[key]} and {version.step}")
        if self._weights.setdefault(key, weight) != weight:
            self._violations.append(f"{key} has weights {self._weights[key]} and {weight}")

    # --- The verdict ---

    def check(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """What was wrong, at most 20 lines. `records`: all that the registry has had of the model."""
        with self._lock:
            self._check_durable(records)
            incarnations = incarnations_of(records)
            self._check_order(incarnations)
            self._check_values(incarnations)
            return self._violations[:20]

    def lost_pushes(self, records: Sequence[dict[str, Any]]) -> list[str]:
        """The pushes that were acknowledged, and whose versions the next incarnation discarded."""
        incarnations = incarnations_of(records)
        next_bases = {
            before.number: after.base for before, after in zip(incarnations, incarnations[1:])
        }
        with self._lock:
            return [
                f"{read} came after {next_bases[read.id[0]]}"
                for read in self._reads
                if not read.track and read.id > next_bases.get(read.id[0], read.id)
            ]

    def _check_durable(self, records: Sequence[dict[str, Any]]) -> None:
        """Each incarnation begins from the newest checkpoint, and all acknowledged ones have been recorded."""
        listed: set[Id] = set()
        for before, record in zip(records, records[1:]):
            listed.update(checkpoint_ids(record))
            if record["incarnation"] == before["incarnation"]:
                continue
            if record["incarnation"] < before["incarnation"]:
                self._violations.append(
                    f"incarnation {record['incarnation']} came after {before['incarnation']}"
                )
            newest = max([*checkpoint_ids(before), id_from(before["base"])])
            if id_from(record["base"]) != newest:
                self._violations.append(f"{record} does not begin from {newest}")
        for saved in self._saved:
            if saved not in listed:
                self._violations.append(f"{saved} was saved, but the registry never had it")

    def _check_order(self, incarnations: Sequence[Incarnation]) -> None:
        """No client goes back to an older version, except to the base of a later incarnation."""
        index = {each.number: i for i, each in enumerate(incarnations)}
        last: dict[str, Position] = collections.defaultdict(lambda: (0, 0))
        for read in self._reads:
            incarnation, number = read.id
            if incarnation not in index:
                self._violations.append(f"{read} is of no incarnation")
                continue
            acked = (index.get(read.acked_before[0], 0), read.acked_before[1])
            least = max(last[read.client], acked)
            places = [(index[incarnation], number)]
            places += [(i, number) for i, each in enumerate(incarnations) if each.base == read.id]
            later = [place for place in places if place >= least]
            if not later:
                self._violations.append(
                    f"{read} is older than {least}; incarnations {incarnations}"
                )
                continue
            last[read.client] = min(later)

    def _check_values(self, incarnations: Sequence[Incarnation]) -> None:
        """Each pull has the average that belongs to its version. Counts as unchecked where that is unknown."""
        bases = {each.number: each.base for each in incarnations}
        averages: dict[Id, float] = {}
        for key in sorted(self._steps):
            incarnation, number = key
            base = bases.get(incarnation, (0, 0))
            parent = base if number == base[1] + 1 else (incarnation, number - 1)
            if parent != (0, 0) and parent not in averages:
                continue  # All clients lost the reply with the parent's record.
            averages[key] = average_after(
                averages.get(parent), self._steps[key], self._weights[key]
            )
        for read in self._reads:
            expected = averages.get(read.id)
            if read.track == "raw":
                expected = float(fill_value(self._steps[read.id]))
            self._counts["unchecked"] += bool(read.track) and expected is None
            if read.track and expected is not None and read.value != expected:
                self._violations.append(f"{read}: expected {expected}")
