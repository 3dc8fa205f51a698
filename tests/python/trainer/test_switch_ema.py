# SPDX-License-Identifier: Apache-2.0
"""Switch-EMA: the averages are written back into the trained model, as ema_pytorch does."""

from __future__ import annotations

import copy
import subprocess
import sys

import ema_client
import numpy as np
import pytest
import torch
from server_process import ROOT, ServerProcess
from testing import SUPPORT, assert_same_bits, exit_codes, started

pytestmark = pytest.mark.framework

ema_pytorch = pytest.importorskip("ema_pytorch")


CASES = {
    "every-step": {"update_every": 1, "update_after_step": 0, "update_model_with_ema_every": 3},
    "rarer-than-updates": {
        "update_every": 2,
        "update_after_step": 3,
        "update_model_with_ema_every": 4,
    },
    # Written back also when no update is due, and before averaging has begun.
    "between-updates": {
        "update_every": 4,
        "update_after_step": 9,
        "update_model_with_ema_every": 3,
    },
    "soft": {
        "update_every": 1,
        "update_after_step": 0,
        "update_model_with_ema_every": 3,
        "update_model_with_ema_beta": 0.6,
        "param_or_buffer_names_no_ema": ["1.bias"],
    },
    "frozen": {
        "beta": 1,
        "update_every": 2,
        "update_after_step": 4,
        "update_model_with_ema_every": 5,
    },
    "frozen-soft": {
        "beta": 1,
        "update_every": 2,
        "update_after_step": 4,
        "update_model_with_ema_every": 5,
        "update_model_with_ema_beta": 0.5,
    },
}
STEPS = 24


class Trainer:
    """The same on every call: a small model with statistics, and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(7)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 9), torch.nn.BatchNorm1d(9), torch.nn.Linear(9, 2)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        self._generator = torch.Generator().manual_seed(11)

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(8, 5, generator=self._generator)
        (self.net(x) - x[:, :2]).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, torch.Tensor]:
        return copy.deepcopy(self.net.state_dict())


def largest_ulps(
    ours: dict[str, torch.Tensor],
    theirs: dict[str, torch.Tensor],
    operands: list[dict[str, torch.Tensor]],
) -> float:
    """How far floats are apart, in ulp of the largest of each tensor's operands."""
    worst = 0.0
    for name, value in ours.items():
        if value.is_floating_point():
            largest = max(float(operand[name].abs().max()) for operand in operands)
            apart = float((value - theirs[name]).abs().max())
            worst = max(worst, apart / float(np.spacing(np.float32(largest))))
    return worst


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_trains_as_with_the_library(server, model, arguments):
    """Each step from where ours was: within 1 ulp of the larger operand.

    The library forms its decay in float32, and torch's lerp rounds once more than we do.
    """
    ours, theirs = Trainer(), Trainer()
    library = ema_pytorch.EMA(theirs.net, **arguments)
    switched = 0
    before = ours.state()
    with ema_client.attach(
        ours.net,
        ours.optimizer,
        server.url(model),
        preset={"preset": "ema_pytorch", **arguments},
    ) as ema:
        for _ in range(STEPS):
            ours.step()
            theirs.step()
            trained = theirs.state()
            library.update()
            switched += any(not torch.equal(v, trained[k]) for k, v in theirs.state().items())
            average = ema.ema_model.state_dict()
            operands = [before, trained]
            assert largest_ulps(average, library.ema_model.state_dict(), operands) <= 1
            assert largest_ulps(ours.state(), theirs.state(), operands) <= 1
            before = copy.deepcopy(average)
            theirs.net.load_state_dict(ours.net.state_dict())
            library.ema_model.load_state_dict(average)
            theirs.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    assert ema.stats.skipped == 0
    is_never_written = "beta" in arguments and "update_model_with_ema_beta" in arguments
    assert (switched == 0) == is_never_written


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES.keys())
def test_trains_as_in_one_process(server, model, arguments):
    """A whole training bit for bit as with LocalEMA, whose average is copied by hand at the same calls."""
    ours, local = Trainer(), Trainer()
    own = {k: v for k, v in arguments.items() if not k.startswith("update_model_with")}
    average = ema_client.LocalEMA(local.net, preset={"preset": "ema_pytorch", **own})
    every = arguments["update_model_with_ema_every"]
    keep = arguments.get("update_model_with_ema_beta", 0.0)
    with ema_client.attach(
        ours.net,
        ours.optimizer,
        server.url(model),
        preset={"preset": "ema_pytorch", **arguments},
    ):
        for t in range(STEPS):
            ours.step()
            local.step()
            average.update()
            copies = t % arguments["update_every"] == 0 and t <= arguments["update_after_step"]
            is_frozen = arguments.get("beta") == 1 and keep
            if t > 0 and not copies and not is_frozen and t % every == 0:
                values = average.weights()
                with torch.no_grad():
                    for name, tensor in local.net.state_dict().items():
                        if not tensor.is_floating_point():
                            continue
                        if name in arguments.get("param_or_buffer_names_no_ema", ()) or not keep:
                            tensor.copy_(values[name])
                        else:
                            tensor.lerp_(values[name], 1 - keep)
            assert_same_bits(local.state(), ours.state())


def test_documented_trace(server, model):
    """reference/ema-semantics.md, 2.1: the weight grows by 1 a call; every third is written back."""
    net = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    arguments = {
        "beta": 0.9,
        "min_value": 0.9,
        "update_every": 1,
        "update_after_step": 0,
        "update_model_with_ema_every": 3,
    }
    twin = copy.deepcopy(net)
    library = ema_pytorch.EMA(twin, **arguments)
    online, averages = [], []
    with ema_client.attach(
        net, optimizer, server.url(model), preset={"preset": "ema_pytorch", **arguments}
    ) as ema:
        for _ in range(7):
            net.weight.grad = -torch.ones(1, 1)
            optimizer.step()
            online.append(net.weight.item())
            averages.append(ema.ema_model.weight.item())
            with torch.no_grad():
                twin.weight += 1
            library.update()
            assert online[-1] == pytest.approx(twin.weight.item(), rel=2e-7)
            assert averages[-1] == pytest.approx(library.ema_model.weight.item(), rel=2e-7)
    assert online == pytest.approx([1, 2, 3, 1.561, 2.561, 3.561, 2.122], abs=5e-4)
    assert averages == pytest.approx([1, 1.1, 1.29, 1.561, 1.661, 1.851, 2.122], abs=5e-4)


def test_two_ranks_stay_replicas(server, client, model, tmp_path):
    commands = [
        [
            *[sys.executable, SUPPORT / "switching_rank.py", rank, 2],
            *[tmp_path / "init", server.url(model), tmp_path / f"{rank}.npz"],
        ]
        for rank in (0, 1)
    ]
    with started(*commands) as ranks:
        assert exit_codes(ranks) == [0, 0]
    logs = [dict(np.load(tmp_path / f"{rank}.npz")) for rank in (0, 1)]
    assert logs[0].keys() == logs[1].keys()
    for key, value in logs[0].items():
        name = key.partition("/")[2]
        if name.startswith("1.running"):
            continue
        assert np.array_equal(value, logs[1][key]), key
    # Statistics differ between the ranks, and are rank 0's after each switch.
    for step in range(1, 26):
        same = np.array_equal(*(log[f"{step}/1.running_mean"] for log in logs))
        assert same == (step in range(4, 26, 3)), step


@pytest.mark.parametrize("on_error", ["skip", "raise"])
def test_without_the_server(model, tmp_path, caplog, on_error):
    trainer = Trainer()
    with ServerProcess(tmp_path) as server:
        ema = ema_client.attach(
            trainer.net,
            trainer.optimizer,
            server.url(model),
            preset={"preset": "ema_pytorch", **CASES["every-step"]},
            on_error=on_error,
            timeout_s=3,
            max_wait_s=3,
        )
        trainer.step()
        assert ema.update_ema_model().step == 1
        server.kill()
        if on_error == "skip":
            for _ in range(4):
                trainer.step()
            assert any("continues with its own weights" in r.message for r in caplog.records)
            assert ema.step == 5
        else:
            with pytest.raises((ema_client.UnavailableError, ema_client.DeadlineExceededError)):
                for _ in range(4):
                    trainer.step()
        ema.close()


def test_without_a_training_loop_it_is_refused():
    net = torch.nn.Linear(1, 1)
    preset = {"preset": "ema_pytorch", "update_model_with_ema_every": 3}
    with pytest.raises(ema_client.InvalidArgumentError, match="update_model_with_ema_every 3"):
        ema_client.LocalEMA(net, preset=preset)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"update_model_with_ema_every": 0},
            "update_model_with_ema_every 0: must be a whole number",
        ),
        (
            {"update_model_with_ema_every": 3, "update_model_with_ema_beta": 2},
            "update_model_with_ema_beta 2: must be 0 to 1",
        ),
    ],
    ids=["every", "beta"],
)
def test_wrong_arguments(server, model, arguments, message):
    trainer = Trainer()
    with pytest.raises(ema_client.InvalidArgumentError, match=message):
        ema_client.attach(
            trainer.net,
            trainer.optimizer,
            server.url(model),
            preset={"preset": "ema_pytorch", **arguments},
        )


def test_the_example(server, model):
    result = subprocess.run(
        [sys.executable, ROOT / "deploy/examples/ema_pytorch_train.py", server.url(model)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    trained, averaged = (float(line.split()[1]) for line in result.stdout.splitlines())
    assert averaged < trained
