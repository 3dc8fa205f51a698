# SPDX-License-Identifier: Apache-2.0
"""Training on a real GPU: what the server averages is what LocalEMA averages, bit for bit.

`tests/gpu.sh` runs it where there is one; elsewhere its tests are skipped.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import sysconfig
from collections.abc import Callable

import ema_client
import pytest
import torch
from testing import assert_same_bits, replay

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU that torch can use"
)

STEPS = 30
Values = dict[str, torch.Tensor]


def make_model() -> torch.nn.Sequential:
    """1.3 million weights: more than one chunk, small pieces, buffers, two dtypes."""
    torch.manual_seed(11)
    return torch.nn.Sequential(
        torch.nn.Linear(64, 1024),
        torch.nn.BatchNorm1d(1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 1024),
        torch.nn.GELU(),
        torch.nn.Linear(1024, 5),
    ).cuda()


def values_of(module: torch.nn.Module) -> Values:
    """Copies in host memory, made on the current stream."""
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def batch(step: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(step)
    return torch.randn(32, 64, device="cuda", generator=generator)


def check(client: ema_client.Client, model: str, logged: dict[int, Values]) -> None:
    """That every step was pushed, with its own weights, and what they average to."""
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    assert [version.step for version, _ in pushes] == list(logged)
    assert_same_bits(replay(pushes, "ema"), client.pull(model, track="ema", framework="torch"))


def train(
    module: torch.nn.Sequential,
    forward: Callable[[torch.Tensor], torch.Tensor],
    url: str,
    *,
    amp: bool = False,
    fused: bool = False,
) -> dict[int, Values]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, enabled=amp)
    logged: dict[int, Values] = {}
    with ema_client.attach(
        module, optimizer, url, half_life="5ba", max_wait_s=300, timeout_s=300, on_error="raise"
    ) as ema:
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
                loss = forward(batch(step)).float().square().mean()
            scaler.scale(loss).backward()
            before = ema.step
            scaler.step(optimizer)
            scaler.update()
            if ema.step != before:
                logged[ema.step] = values_of(module)
        ema.wait_pushed(timeout_s=300)
        assert ema.stats.skipped == 0
    return logged


@pytest.mark.parametrize("fused", [False, True], ids=["foreach", "fused"])
@pytest.mark.parametrize("amp", [False, True], ids=["float32", "amp"])
def test_training(server, client, model, amp, fused):
    module = make_model()
    logged = train(module, module, server.url(model), amp=amp, fused=fused)
    assert logged
    check(client, model, logged)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_training(server, client, model, mode):
    """reduce-overhead: forward and backward are CUDA graphs of torch.compile's."""
    pytest.importorskip("triton", reason="torch.compile needs triton on a GPU")
    if not any(shutil.which(compiler) for compiler in (os.environ.get("CC", "cc"), "gcc", "clang")):
        pytest.skip("triton needs a C compiler")
    # Its driver for NVIDIA (triton/backends/nvidia/driver.c) includes it.
    header = pathlib.Path(sysconfig.get_paths()["include"], "Python.h")
    if not header.exists():
        pytest.skip(f"triton needs {header}: Ubuntu's python3.N-dev has it")
    module = make_model()
    compiled = torch.compile(module, mode=mode)
    check(client, model, train(module, compiled, server.url(model)))


def test_training_on_a_stream_of_its_own(server, client, model):
    module = make_model()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        logged = train(module, module, server.url(model))
    check(client, model, logged)


def test_steps_that_a_graph_replays(server, client, model):
    """Whole steps, the optimizer's among them, as one CUDA graph: no hook sees a replay."""
    module = make_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, capturable=True)
    static = torch.empty(32, 64, device="cuda")

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        module(static).square().mean().backward()
        optimizer.step()

    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for number in range(3):
            static.copy_(batch(100 + number))
            step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    logged: dict[int, Values] = {}
    with ema_client.attach(
        module, None, server.url(model), half_life="5ba", max_wait_s=300, on_error="raise"
    ) as ema:
        for number in range(STEPS):
            static.copy_(batch(number))
            ema.wait_released()
            graph.replay()
            ema.after_step(wait_released=False)
            logged[ema.step] = values_of(module)
        ema.wait_pushed(timeout_s=300)
    check(client, model, logged)


def test_a_capture_with_hooks_goes_through(server, client, model):
    """The hooks of an attached optimizer do nothing while its step is captured."""
    module = make_model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, capturable=True)
    static = batch(0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        module(static).square().mean().backward()
        optimizer.step()

    with ema_client.attach(
        module, optimizer, server.url(model), half_life="5ba", max_wait_s=300, on_error="raise"
    ) as ema:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(warm_up)
        # The push of the last step may still be running.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        assert ema.step == 3
        ema.wait_released()
        graph.replay()
        torch.cuda.synchronize()
        ema.wait_pushed(timeout_s=300)
    assert client.model(model).latest.step == 3


def test_a_large_model_takes_no_memory_of_the_gpu(server, client, model):
    """More than the ring holds: 100 MB."""
    module = torch.nn.Linear(5000, 5000).cuda()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    logged: dict[int, Values] = {}
    with ema_client.attach(
        module, optimizer, server.url(model), half_life="5ba", max_wait_s=300, on_error="raise"
    ) as ema:
        for parameter in module.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        ema.wait_pushed(timeout_s=300)
        logged[1] = values_of(module)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for step in range(2, 6):
            optimizer.step()
            logged[step] = values_of(module)
        ema.wait_pushed(timeout_s=300)
        # foreach's own scratch memory is of one tensor's size at most.
        assert torch.cuda.max_memory_allocated() - before <= 5000 * 5000 * 4 + (1 << 20)
        assert torch.cuda.memory_allocated() == before
    check(client, model, logged)
