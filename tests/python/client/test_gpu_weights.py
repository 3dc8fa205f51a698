# SPDX-License-Identifier: Apache-2.0
"""Weights on a GPU, as far as that goes without one: a driver in host memory, and CPU tensors."""

from __future__ import annotations

import subprocess
import sys

import ema_client
import pytest
import torch
from ema_client._client import gpu
from ema_client._model.torch_model import NamedTensors
from ema_client._trainer.guard import PushedWeights
from server_process import ROOT
from testing import SUPPORT, assert_same_bits

DRIVER = ROOT / "build/release/tests/client/fake_cuda/libcuda.so.1"


def run_with_driver(program: str, *arguments: str) -> str:
    """What the program prints, which opens the driver itself."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, whose driver torch has opened: see test_cuda_training.py")
    if not DRIVER.exists():
        pytest.skip(f"no {DRIVER}: cmake --build --preset release makes it")
    result = subprocess.run(
        [sys.executable, SUPPORT / program, DRIVER, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_average_is_that_of_weights_in_host_memory(server, client, model, dtype):
    names = [f"{model}-host", f"{model}-gpu"]
    copies = run_with_driver("fake_gpu_training.py", *map(server.url, names), dtype)
    assert int(copies) > 0
    host, gpu = (client.pull(name, track="ema") for name in names)
    assert_same_bits(host, gpu)


def test_an_array_lives_until_the_gpu_has_read_it(server, model):
    run_with_driver("fake_gpu_array.py", server.address, model)


def test_the_step_that_a_graph_captures_is_neither_counted_nor_pushed(
    server, client, model, monkeypatch
):
    """What runs while a graph is captured must call nothing of CUDA's, and has no new weights."""
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with ema_client.attach(module, optimizer, server.url(model), half_life="3ba") as ema:
        module(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        ema.wait_pushed(timeout_s=60)
        monkeypatch.setattr("ema_client._trainer.pusher.is_capturing", lambda: True)
        optimizer.step()
        ema.after_step()
        ema.wait_released()
        assert ema.step == 1
        monkeypatch.undo()
        optimizer.step()
        assert ema.step == 2
    assert client.model(model).latest.step == 2


def test_a_process_without_a_gpu_captures_nothing_and_has_default_streams():
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a GPU")
    assert not gpu.is_capturing()
    assert gpu.current_streams([1, 0, 1]) == [(0, 0), (1, 0)]


@pytest.mark.parametrize("rows, must_wait", [(4096, False), (4097, True)])
def test_copies_of_what_lies_in_another_order_are_bounded(monkeypatch, rows, must_wait):
    """64 MiB are 4096 x 4096 values."""
    monkeypatch.setattr(gpu, "is_readable", lambda tensor: True)
    values = {"turned": torch.empty(4096, rows).T, "large": torch.empty(2 * 4096, rows)}
    parameters = {name: torch.nn.Parameter(value) for name, value in values.items()}
    weights = PushedWeights(None, (), checks=False)
    taken = weights.take(NamedTensors(parameters, {}, {}), parameters)
    assert weights.must_wait == must_wait
    assert all(taken[name].data_ptr() == values[name].data_ptr() for name in values)
