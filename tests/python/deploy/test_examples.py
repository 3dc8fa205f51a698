# SPDX-License-Identifier: Apache-2.0
"""The examples that need no framework besides torch, run as their users run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import ema_client
import pytest
import torch
from examples import run_example
from server_process import ROOT
from testing import assert_same_bits

EXAMPLES = ROOT / "deploy/examples"
STEPS = 300
# At the first step, and after every 5th.
PUSHES = 1 + STEPS // 5


@pytest.fixture
def trainer(monkeypatch):
    """The plain example, as a module."""
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "pytorch_train", raising=False)
    import pytorch_train

    return pytorch_train


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_without_arguments_an_example_says_how_to_call_it(name):
    result = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True)
    if "ModuleNotFoundError" in result.stderr:
        pytest.skip(result.stderr.splitlines()[-1])
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert f"{name} " in result.stderr.partition("Usage: ")[2].partition("\n")[0]


def accuracies(output: str) -> tuple[int, float, float]:
    """Step, and the share of held-out digits that the trained and the averaged weights know."""
    match = re.match(r"step (\d+): trained (0\.\d+), averaged (0\.\d+)", output)
    assert match, output
    return int(match[1]), float(match[2]), float(match[3])


def test_plain(server, client, model, trainer, monkeypatch):
    """Its average is the one that the same training has in its own process."""
    step, trained, averaged = accuracies(run_example("pytorch_train.py", server.url(model)))
    assert step == STEPS and averaged > trained
    assert client.model(model).latest.number == PUSHES
    followed = []

    def follow(net, optimizer, url, existing, **arguments):
        local = ema_client.LocalEMA(net, **arguments)
        optimizer.register_step_post_hook(lambda *_: local.update())
        followed.append(local)
        local.close = lambda: None
        return local

    monkeypatch.setattr(ema_client, "attach", follow)
    monkeypatch.setattr(sys, "argv", ["pytorch_train.py", server.url(model)])
    trainer.main()
    assert_same_bits(followed[0].weights(), client.pull(model, track="ema"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [1, 2])
def test_ddp(server, client, model, ranks):
    output = run_example("ddp_train.py", server.url(model), ranks=ranks, torchrun=True)
    step, trained, averaged = accuracies(output)
    assert step == STEPS and averaged > trained
    assert client.model(model).latest.number == PUSHES
    bytes_of_model = 4 * (64 * 64 + 64 + 64 * 10 + 10)
    assert output.endswith(f"sent {[PUSHES * bytes_of_model // ranks] * ranks}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fsdp2(server, client, model, tmp_path):
    """Interrupted and resumed it has the average of a training that was not; then it goes on alone."""

    def run(name: str, steps: int, ranks: int) -> None:
        url = server.url(f"{model}-{name}")
        output = run_example(
            "fsdp2_train.py", url, tmp_path / name, steps, ranks=ranks, torchrun=True
        )
        step, trained, averaged = accuracies(output)
        assert step == steps and averaged > trained

    run("whole", 200, ranks=2)
    run("resumed", 120, ranks=2)
    run("resumed", 200, ranks=2)
    whole, resumed = (client.pull(f"{model}-{name}", track="ema") for name in ("whole", "resumed"))
    assert_same_bits(whole, resumed)
    assert resumed.version.tracks["ema"].update_count == 1 + 200 // 5
    run("resumed", 250, ranks=1)
    assert client.model(f"{model}-resumed").latest.tracks["ema"].update_count == 1 + 250 // 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fsdp2_is_refused_where_the_server_has_an_average(server, client, model, tmp_path):
    def run(name: str, steps: int) -> None:
        run_example(
            "fsdp2_train.py", server.url(model), tmp_path / name, steps, ranks=1, torchrun=True
        )

    run("first", 40)
    # Its stderr.
    with pytest.raises(AssertionError, match='existing="new" to start a new average'):
        run("second", 30)
    assert client.model(model).latest.step == 40


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name, ranks", [("tensor_parallel", 4), ("pipeline", 2)])
def test_models_in_pieces(server, client, model, trainer, name, ranks):
    """What is on the server is the whole model, which any process can evaluate."""
    output = run_example(f"{name}_train.py", server.url(model), ranks=ranks)
    step, trained, averaged = accuracies(output)
    assert step == STEPS and averaged > trained
    assert client.model(model).latest.number == PUSHES
    whole = trainer.network()
    with ema_client.averaged(whole, server.url(model)):
        assert f"averaged {trainer.accuracy(whole):.4f}" in output


def test_evaluate(server, client, model, trainer):
    """Each version is measured as it comes, while this process trains."""
    net = trainer.network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = trainer.images(held_out=False)
    copy = trainer.network()
    scores = {}
    with ema_client.attach(net, optimizer, server.url(model), smoothing=0.5) as ema:
        evaluator = subprocess.Popen(
            [sys.executable, EXAMPLES / "evaluate.py", server.address, model, "24"],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        try:
            for step in range(1, 25):
                # The second half makes it worse.
                batch = torch.arange(step * 32, step * 32 + 32) % len(x)
                loss = torch.nn.functional.cross_entropy(net(x[batch]), y[batch])
                optimizer.zero_grad()
                (loss if step <= 12 else -loss).backward()
                optimizer.step()
                version = ema.wait_pushed()
                copy.load_state_dict(client.pull(model, track="ema", version=version))
                scores[step] = trainer.accuracy(copy)
                mark = ", the best so far" * (max(scores, key=scores.get) == step)
                line = evaluator.stdout.readline().rstrip()
                assert line == f"step {step}: {scores[step]:.4f}{mark}"
            best = max(scores, key=scores.get)
            assert 1 < best < 24
            assert evaluator.stdout.read() == f"best step {best}: {scores[best]:.4f}\n"
            assert evaluator.wait(60) == 0
        finally:
            evaluator.kill()
    assert client.labels(model)["best"].step == best


def test_evaluate_says_which_scores_come_too_late(
    server, client, model, trainer, monkeypatch, capsys
):
    monkeypatch.delitem(sys.modules, "evaluate", raising=False)
    import evaluate

    weights = trainer.network().state_dict()
    client.create_model(model, weights, tracks={"ema": "2ba"}, max_pinned_versions=1)
    with client.open_run(model) as run:
        run.push(step=1, weights=weights)

        def accuracy(_):
            # Training goes on while the first version is measured.
            for step in range(2 if client.model(model).latest.step == 1 else 10, 10):
                run.push(step=step, weights=weights)
            return 0.5

        monkeypatch.setattr(evaluate, "accuracy", accuracy)
        monkeypatch.setattr(sys, "argv", ["evaluate.py", server.address, model, "9"])
        evaluate.main()
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1: 0.5000, which does not count: the server dropped the version")
    assert last.startswith("best step ") and client.labels(model)["best"].step > 1


def test_evaluate_that_comes_too_late_says_so(server, client, model, trainer):
    weights = trainer.network().state_dict()
    client.create_model(model, weights, tracks={"ema": "2ba"}, max_pinned_versions=1)
    with client.open_run(model) as run:
        for step in range(1, 10):
            run.push(step=step, weights=weights)
    result = subprocess.run(
        [sys.executable, EXAMPLES / "evaluate.py", server.address, model, "5"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 1
    assert result.stderr == (
        "no version up to step 5 could be measured: the server has dropped them. Start this script before "
        "the training, or soon after its start\n"
    )
