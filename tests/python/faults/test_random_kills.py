# SPDX-License-Identifier: Apache-2.0
"""kill -9 of a real server at random, while 4 ranks push, 4 evaluators pull and one client saves.

Nothing that was answered as durable is lost, versions never repeat, and every pull is one whole step with the
average that belongs to it. EMA_KILLS: how many kills; TEST_SEED: another choice of their moments.
"""

from __future__ import annotations

import os
import random
import threading
import time

import ema_client
import pytest
from kill_history import History, fill, id_of
from server_process import ServerProcess
from testing import CAMPAIGN_SEED, IS_CAMPAIGN, wait_for

MODEL = "filled"
RANKS = 4
READERS = 4
# Of the lives so many are killed soon after their first version, however little went on.
EARLY_SHARE = 0.2
KILLS = int(os.environ.get("EMA_KILLS", 200 if IS_CAMPAIGN else 10))
# For the time limit; where nothing else runs it takes two.
S_PER_KILL = 12
# A client's calls, where much else runs.
TIMEOUT_S = 30
# What a client may be told when the server has gone; anything else is a bug.
GONE = (
    ema_client.UnavailableError,
    ema_client.DeadlineExceededError,
    ema_client.AbortedError,
    ema_client.CancelledError,
)


class Traffic:
    """Ranks, evaluators and a saver, over all lives of the server."""

    def __init__(self, address: str, history: History) -> None:
        self._address = address
        self._history = history
        self._changed = threading.Condition()
        self._stopped = False
        jobs = [(self._push, rank) for rank in range(RANKS)]
        jobs += [(self._pull, reader) for reader in range(READERS)]
        jobs += [(self._save, 0)]
        self._threads = [threading.Thread(target=self._run, args=job) for job in jobs]
        for thread in self._threads:
            thread.start()

    def begin(self, latest: ema_client.Version | None) -> None:
        with self._changed:
            self._history.on_start(latest)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self, job, number: int) -> None:
        life = -1
        with ema_client.Client(self._address, timeout_s=TIMEOUT_S) as client:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._history.life > life)
                    if self._stopped:
                        return
                    life = self._history.life
                try:
                    while self._is_on(life):
                        job(client, number, life)
                except GONE as error:
                    # The kill may be known to the client before it is to us.
                    with self._changed:
                        self._changed.wait_for(lambda: not self._is_on(life), timeout=10)
                    if self._is_on(life):
                        self._history.on_violation(f"{job.__name__} {number}: {error}")
                except ema_client.EmaError as error:
                    self._history.on_violation(f"{job.__name__} {number}: {error}")

    def _is_on(self, life: int) -> bool:
        return not self._stopped and self._history.is_on(life)

    def _push(self, client: ema_client.Client, rank: int, life: int) -> None:
        with client._open_run(
            MODEL, launch_id=f"life-{life}", rank=rank, world_size=RANKS, rejoins=False
        ) as run:
            run.wait_ready()
            step = run.latest.step if run.latest is not None else 0
            while self._is_on(life):
                # Some are left out.
                step += 3 if step % 5 == 3 else 1
                version = run.push(step=step, weights=fill(step))
                self._history.on_push(life, step, version)

    def _pull(self, client: ema_client.Client, reader: int, life: int) -> None:
        track = "raw" if reader == 0 else "ema"
        acked = self._history.now().acked
        if acked == (0, 0):
            time.sleep(0.01)  # There is nothing yet.
            return
        weights = client.pull(MODEL, track=track, framework="numpy")
        self._history.on_pull(reader, life, track, acked, weights)

    def _save(self, client: ema_client.Client, _: int, life: int) -> None:
        if self._history.now().acked == (0, 0):
            time.sleep(0.01)
            return
        self._history.on_save(life, client.create_checkpoint(MODEL, timeout_s=TIMEOUT_S).version)


def await_moment(history: History, chance: random.Random) -> None:
    """When the life is to end: some time after enough went on or, of some, soon after the first version."""
    # A model that was never saved is not there after a restart.
    is_early = history.life > 0 and chance.random() < EARLY_SHARE

    def may_end() -> bool:
        life = history.now()
        # What is wrong the end tells.
        return history.is_violated() or (life.versions > 0 if is_early else life.is_thick())

    # It goes by what happens and not by the time, so that a busy machine only makes it slower.
    wait_for(may_end, lambda: f"enough goes on: {history.now()}")
    time.sleep(chance.uniform(0.0, 0.2 if is_early else 1.2))


@pytest.mark.campaign
@pytest.mark.timeout(300 + S_PER_KILL * KILLS)
def test_nothing_durable_is_lost(tmp_path):
    print(f"TEST_SEED={CAMPAIGN_SEED}")
    chance = random.Random(CAMPAIGN_SEED)
    history = History()
    valid = others = 0
    was_thick = False
    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.Client(server.address) as client:
            client.create_model(MODEL, fill(0), tracks={"ema": "1ba", "raw": "copy"})
        traffic = Traffic(server.address, history)
        try:
            while True:
                with ema_client.Client(server.address) as client:
                    latest = client.model(MODEL).latest
                traffic.begin(latest)
                await_moment(history, chance)
                is_thick = history.now().is_thick()
                # A kill counts if enough went on before it and after it.
                if history.life > 0:
                    valid += was_thick and is_thick
                    others += not (was_thick and is_thick)
                was_thick = is_thick
                if history.is_violated() or valid >= KILLS:
                    break
                history.on_kill()
                server.kill()
                server.start(port=server.port)
        finally:
            traffic.stop()
        pulls, versions, saves = history.count()
        print(
            f"{valid} kills, {others} more of thin lives, {pulls} pulls, {versions} versions, {saves} saves"
        )
        problems = history.check()
        assert not problems, "\n".join(problems)
        with ema_client.Client(server.address) as client:
            last = client.model(MODEL).latest
            assert last is not None and id_of(last) >= history.now().acked
        assert server.stop() == 0
