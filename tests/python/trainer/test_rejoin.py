# SPDX-License-Identifier: Apache-2.0
"""A run that is joined again after the server was away, and what is said of it."""

from __future__ import annotations

import re
import threading

import ema_client
import pytest
import torch
from server_process import ServerProcess
from testing import step_until, wait_for


def is_disconnected(ema: ema_client.Attachment) -> bool:
    """As far as it is known by now."""
    _ = ema.stats
    return ema._pusher.engine.is_disconnected


def test_a_restart_forgets_nobody_who_was_fenced(tmp_path, model, caplog):
    class Trainer:
        def __init__(self, url: str) -> None:
            self.net = torch.nn.Linear(3, 2)
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
            self.ema = ema_client.attach(self.net, self.optimizer, url, half_life="3ba")

        def step(self) -> None:
            self.net(torch.ones(1, 3)).sum().backward()
            self.optimizer.step()

    with ServerProcess(tmp_path) as server:
        fenced, newer = Trainer(server.url(model)), Trainer(server.url(model))
        newer.step()
        newer.ema.wait_pushed()
        server.kill()
        # It has not heard that it was fenced, and comes back first.
        step_until(lambda: is_disconnected(fenced.ema), fenced.step)
        server.start(port=server.port)
        wait_for(lambda: not is_disconnected(fenced.ema), "the fenced one came back")
        step_until(lambda: newer.ema.stats.pushes >= 2, newer.step)
        step_until(lambda: "has taken over; this one no longer pushes." in caplog.text, fenced.step)
        pushes = newer.ema.stats.pushes
        newer.step()
        newer.ema.wait_pushed()
        assert newer.ema.stats.pushes > pushes and fenced.ema.stats.pushes == 0
        newer.ema.close()
        fenced.ema.close()


def test_a_step_that_is_pushed_again_after_an_outage_is_not_said_to_be_written(
    tmp_path, model, caplog
):
    """Nor is what it read copied from then on. The step behind it pushes nothing."""
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with ServerProcess(tmp_path) as server:
        options = {"half_life": "3ba", "update_interval": "2ba", "on_error": "wait"}
        with ema_client.attach(net, optimizer, server.url(model), **options) as ema:
            step()
            ema.wait_pushed()
            server.kill()
            step()  # Pushes, and its push fails.
            restart = threading.Timer(0.5, server.start, kwargs={"port": server.port})
            restart.start()
            for _ in range(3):
                step()
            restart.join()
        assert (ema.stats.pushes, ema.stats.skipped) == (3, 0)
    assert "waits for the server" in caplog.text
    assert "written since" not in caplog.text


GONE = {
    True: "the server has fallen back from step 5 to step 2; 3 of this trainer's updates are lost",
    False: "and the average starts again at step {next}; 5 of this trainer's updates are lost",
}


@pytest.mark.parametrize("on_error", ["skip", "wait"])
@pytest.mark.parametrize("is_saved", [True, False], ids=["saved", "never saved"])
def test_what_a_crash_of_the_server_has_lost_is_said(tmp_path, model, caplog, is_saved, on_error):
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step() -> None:
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    with ServerProcess(tmp_path, data_dir=tmp_path / "data") as server:
        with ema_client.attach(
            net, optimizer, server.url(model), half_life="3ba", on_error=on_error
        ) as ema:
            for count in range(1, 6):
                step()
                ema.wait_pushed()
                if is_saved and count == 2:
                    with ema_client.Client(server.address) as client:
                        client.create_checkpoint(model)
            server.kill()
            if on_error == "skip":
                for _ in range(3):
                    step()
            server.start(port=server.port)
            step_until(lambda: ema.stats.pushes >= 6, step)
            skipped = ema.stats.skipped
            ema.wait_pushed()
            # A second crash: what was gone is not counted again.
            server.kill()
            server.start(port=server.port)
            pushes = ema.stats.pushes
            step_until(lambda: ema.stats.pushes > pushes, step)
    assert GONE[is_saved].format(next=6 + skipped) in caplog.text
    gone = [int(count) for count in re.findall(r"(\d+) of this trainer's updates", caplog.text)]
    assert gone == [3 if is_saved else 5, pushes - 5]
    lost = [int(count) for count in re.findall(r"pushing again, (\d+) steps", caplog.text)]
    assert lost[0] == gone[0] + skipped
