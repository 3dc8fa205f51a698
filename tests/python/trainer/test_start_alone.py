# SPDX-License-Identifier: Apache-2.0
"""attach() while the server is unreachable: it raises, or the training starts without the average and
joins later."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time

import ema_client
import pytest
import torch
from ema_client._trainer import joining
from server_process import ServerProcess, free_port
from testing import assert_same_bits, exit_codes, started, step_until, wait_for


@pytest.fixture(autouse=True)
def short_wait(monkeypatch):
    monkeypatch.setattr(joining, "START_WAIT_S", 1.0)


@pytest.fixture
def later(tmp_path):
    """A server that is not started yet, and the port that it will have."""
    server = ServerProcess(tmp_path / "server", data_dir=tmp_path / "data")
    server.port = free_port()
    yield server
    server.stop()


def start(server):
    server.start(port=server.port)


def trainer_of() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 2)
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def stepper(net, optimizer):
    def step():
        optimizer.zero_grad()
        net(torch.randn(4, 3)).square().mean().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("on_error", [None, "raise", "wait"])
def test_by_default_it_raises_with_the_ways_out(later, model, on_error):
    net, optimizer = trainer_of()
    with pytest.raises(ema_client.UnavailableError) as raised:
        ema_client.attach(net, optimizer, later.url(model), timeout_s=2, on_error=on_error)
    assert 'give on_error="skip"; to train without a server, set EMA_MODE=disabled' in str(
        raised.value
    )


def test_an_average_that_continues_needs_the_step(later, model, caplog):
    net, optimizer = trainer_of()
    options = {"timeout_s": 2, "on_error": "skip", "existing": "continue"}
    with pytest.raises(ema_client.UnavailableError, match='on_error="skip" and start_step='):
        ema_client.attach(net, optimizer, later.url(model), **options)
    with ema_client.attach(net, optimizer, later.url(model), **options, start_step=7) as ema:
        stepper(net, optimizer)()
        assert (ema.step, ema.stats.skipped) == (8, 1)


def test_skip_starts_without_the_average_and_joins_later(later, model, caplog):
    caplog.set_level(logging.INFO, "ema_client")
    net, optimizer = trainer_of()
    begin = time.monotonic()
    ema = ema_client.attach(
        net, optimizer, later.url(model), tracks={"ema": {"smoothing": 0.5}}, on_error="skip"
    )
    assert time.monotonic() - begin < 20
    first, second = caplog.messages[:2]
    assert "attach() tries to reach the server for " in first
    assert " s, and then starts the training without the average" in first
    assert "the training starts without its average" in second and later.address in second
    step = stepper(net, optimizer)
    for _ in range(5):
        step()
    assert (ema.step, ema.version, ema.stats.pushes, ema.stats.skipped) == (5, None, 0, 5)
    assert ema.state_dict() is None
    with pytest.raises(ema_client.FailedPreconditionError, match="has no version yet"):
        ema.update_ema_model()
    with pytest.raises(ema_client.UnavailableError):
        with ema_client.averaged(net, later.url(model), timeout_s=1):
            pass
    start(later)
    wait_for(lambda: "joined the run" in caplog.text, "the engine joins the run")
    step_until(lambda: ema.stats.pushes > 0, lambda: (step(), ema.wait_pushed()))
    # The first version is the weights of its step.
    joined = ema.step
    averages = {name: tensor.detach().clone() for name, tensor in net.state_dict().items()}
    for _ in range(4):
        step()
        ema.wait_pushed()
        for name, tensor in net.state_dict().items():
            averages[name].lerp_(tensor, 0.5)
    assert (ema.stats.pushes, ema.version.step) == (5, joined + 4)
    assert ema.step == ema.stats.pushes + ema.stats.skipped
    with ema_client.Client(later.address) as client:
        pulled = client.pull(model, track="ema")
        assert [entry.version.step for entry in client.versions(model)] == [
            *range(joined, joined + 5)
        ]
    for name, tensor in averages.items():
        torch.testing.assert_close(pulled[name], tensor, rtol=1e-6, atol=0)
    assert ema.state_dict()["step"] == ema.step
    ema.close()
    levels = [record.levelno for record in caplog.records if "joined the run" in record.message]
    assert levels == [logging.INFO]
    assert "pushing again" not in caplog.text


def test_an_existing_average_is_warned_of_when_it_joins(later, model, caplog):
    start(later)
    net, optimizer = trainer_of()
    step = stepper(net, optimizer)
    with ema_client.attach(net, optimizer, later.url(model)) as ema:
        for _ in range(2):
            step()
            ema.wait_pushed()
        ema.state_dict()
    later.stop()
    with ema_client.attach(net, optimizer, later.url(model), on_error="skip") as ema:
        step()
        start(later)
        fixed = "pushes will not resume until this is fixed"
        wait_for(lambda: fixed in caplog.text, "the engine warns")
        step()
        assert ema.stats.pushes == 0
    (said,) = [text for text in caplog.messages if fixed in text]
    assert "has the average of an earlier training, at step 2" in said and "existing=" in said
    with ema_client.Client(later.address) as client:
        assert client.model(model).latest.step == 2


@pytest.mark.parametrize("how", ["new", "resume", "load_state_dict"])
def test_it_joins_an_existing_average_as_attach_does(later, model, caplog, how):
    start(later)
    net, optimizer = trainer_of()
    step = stepper(net, optimizer)
    with ema_client.attach(net, optimizer, later.url(model), tracks={"raw": "copy"}) as ema:
        step()
        state = ema.state_dict()
        saved = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        for _ in range(2):
            step()
            ema.wait_pushed()
        ema.state_dict()
    later.stop()
    options = {
        "new": {"existing": "new"},
        "resume": {"resume": state},
        "load_state_dict": {"existing": "continue", "start_step": 0},
    }
    caplog.set_level(logging.INFO, "ema_client")
    with ema_client.attach(
        net,
        optimizer,
        later.url(model),
        tracks={"raw": "copy"},
        on_error="skip",
        **options[how],
    ) as ema:
        if how == "load_state_dict":
            ema.load_state_dict(state)
        assert ema.step == (0 if how == "new" else 1)
        start(later)
        wait_for(lambda: "joined the run" in caplog.text, "the engine joins the run")
        if how != "new":
            assert_same_bits(saved, ema_client.pull(later.url(model), track="raw"))
        step_until(lambda: ema.stats.pushes > 0, lambda: (step(), ema.wait_pushed()))
        with ema_client.Client(later.address) as client:
            steps = [entry.version.step for entry in client.versions(model)]
        assert steps[-1] == ema.step and (len(steps) == 1) == (how == "new")


def test_a_wrong_token_raises_at_once(tmp_path, model):
    tokens = tmp_path / "tokens"
    tokens.write_text("trainer trainer-6f1d2c70b4e94b0f *\n")
    net, optimizer = trainer_of()
    with ServerProcess(tmp_path / "server", "--auth-tokens", str(tokens)) as server:
        with pytest.raises(ema_client.UnauthenticatedError):
            ema_client.attach(net, optimizer, server.url(model), on_error="skip")


def test_a_server_that_hangs_is_joined_when_it_answers(later, model, caplog):
    start(later)
    net, optimizer = trainer_of()
    step = stepper(net, optimizer)
    later.send_signal(signal.SIGSTOP)
    try:
        ema = ema_client.attach(net, optimizer, later.url(model), on_error="skip")
        step()
        assert ema.stats.skipped == 1
    finally:
        later.send_signal(signal.SIGCONT)
    step_until(lambda: ema.stats.pushes > 0, lambda: (step(), ema.wait_pushed()))
    ema.close()


def test_close_before_it_has_joined(later, model):
    net, optimizer = trainer_of()
    ema = ema_client.attach(net, optimizer, later.url(model), on_error="skip")
    stepper(net, optimizer)()
    begin = time.monotonic()
    ema.close()
    assert time.monotonic() - begin < 20
    start(later)
    with ema_client.Client(later.address) as client:
        assert not client.models()


RANK = """
import sys, time
import ema_client, torch
import torch.distributed as dist
from ema_client._trainer import joining

joining.START_WAIT_S = 1.0
rank, init_file, url = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=2)
torch.manual_seed(0)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
interval = {"half_life": "4ba", "update_interval": "3ba"}
ema = ema_client.attach(net, optimizer, url, **interval, on_error="skip")
print("started", ema.step, flush=True)
done = torch.tensor(0)
while not done:
    net(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()
    ema.wait_pushed()
    done = torch.tensor(int(ema.stats.pushes >= 3))
    dist.all_reduce(done, dist.ReduceOp.MIN)
ema.close()
print("pushed", ema.version.step % 3, ema.stats.pushes, flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_start_without_the_average_together(later, model, tmp_path):
    command = [sys.executable, "-c", RANK]
    with started(
        *([*command, rank, tmp_path / "init", later.url(model)] for rank in range(2)),
        stdout=subprocess.PIPE,
        text=True,
    ) as ranks:
        assert [rank.stdout.readline() for rank in ranks] == ["started 0\n"] * 2
        start(later)
        said = [rank.communicate(timeout=100)[0] for rank in ranks]
        assert exit_codes(ranks) == [0, 0]
    assert said[0] == said[1] and said[0].startswith("pushed 0 ")
    with ema_client.Client(later.address) as client:
        assert all(entry.version.step % 3 == 0 for entry in client.versions(model))
