# SPDX-License-Identifier: Apache-2.0
"""Trains a network whose average is on a group of servers, while one of them is killed and restarted."""

from __future__ import annotations

import threading
import time

import ema_client
import torch
from digits import accuracy, images, network
from server_group import ServerGroup
from server_process import ServerError

MODEL = "digits"
BATCH = 4
UPDATE_INTERVAL = 5
# Versions that must be committed in a phase before the next one begins.
PHASE_VERSIONS = 30
# Steps between the checkpoint and the kill: the kill loses them.
UNSAVED_STEPS = 50
# A killed server joins its group again when its lease in etcd has expired, after at most 10 s.
RECOVERY_S = 120.0


class Training:
    """A small network that is trained on real images of digits, with an average on the group."""

    def __init__(self, url: str) -> None:
        self.url = url
        torch.manual_seed(1)
        torch.set_num_threads(1)
        self.net = network()
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.03, momentum=0.9)
        self._x, self._y = images(held_out=False)
        self.ema = ema_client.attach(
            self.net,
            self._optimizer,
            url,
            half_life="100ba",
            ramp_ratio=0.1,
            update_interval=f"{UPDATE_INTERVAL}ba",
            max_wait_s=1.0,
        )

    def make_step(self) -> None:
        self.net.train()
        batch = torch.randint(len(self._x), (BATCH,))
        loss = torch.nn.functional.cross_entropy(self.net(self._x[batch]), self._y[batch])
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()

    def make_versions(self, count: int) -> None:
        """Trains until `count` more steps have become versions. Raises ServerError: not in time."""
        goal = self.ema.stats.pushes + count
        deadline = time.monotonic() + RECOVERY_S
        while self.ema.stats.pushes < goal:
            if time.monotonic() > deadline:
                raise ServerError(
                    f"no {count} versions within {RECOVERY_S:.0f} s: {self.ema.stats}"
                )
            self.make_step()


class Report:
    """A table with a row for each phase of the training."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._images = images(held_out=True)
        self._steps = self._pushes = self._skipped = 0
        self._lines = [
            f"{'phase':<34}{'steps':>7}{'committed':>11}{'skipped':>9}{'average at':>12}"
            f"{'its accuracy':>14}{'trained':>9}"
        ]

    def add(self, phase: str) -> None:
        """Adds a row of what happened since the row before."""
        ema = self._training.ema
        ema.wait_pushed()
        stats = ema.stats
        trained = accuracy(self._training.net, *self._images)
        with ema_client.averaged(self._training.net, self._training.url) as version:
            averaged = accuracy(self._training.net, *self._images)
        self._lines.append(
            f"{phase:<34}{ema.step - self._steps:>7}{stats.pushes - self._pushes:>11}"
            f"{stats.skipped - self._skipped:>9}{f'step {version.step}':>12}{averaged:>14.1%}{trained:>9.1%}"
        )
        self._steps, self._pushes, self._skipped = ema.step, stats.pushes, stats.skipped

    def print(self) -> None:
        print("\n" + "\n".join(self._lines) + "\n")


def run_demo(group: ServerGroup) -> None:
    """Prints a table of what became of the steps. Raises ServerError: the training did not recover from the kill."""
    print(f"group: a training is averaged on {len(group.servers)} servers", flush=True)
    training = Training(group.url(MODEL))
    report = Report(training)
    training.make_versions(PHASE_VERSIONS)
    with ema_client.Client(group.address) as client:
        saved = client.create_checkpoint(MODEL).version.step
    report.add("all servers run")

    training.make_versions(UNSAVED_STEPS // UPDATE_INTERVAL)
    killed = len(group.servers) - 1
    group.servers[killed].kill()
    print(f"group: step {saved} is saved; server ema-{killed} is killed", flush=True)
    restart = threading.Thread(target=group.start_server, args=[killed])
    restart.start()
    training.make_versions(1)
    restart.join()
    report.add(f"ema-{killed} is killed and comes back")
    print("group: the first step after the kill is committed", flush=True)

    training.make_versions(PHASE_VERSIONS)
    training.ema.close()
    report.add("all servers run again")
    report.print()
    if not training.ema.stats.skipped:
        raise ServerError("no step was skipped: the kill had no effect")
