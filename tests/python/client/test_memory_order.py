# SPDX-License-Identifier: Apache-2.0
"""Weights that do not lie in row-major order: channels_last, transposed, a part of another tensor."""

from __future__ import annotations

import signal
import threading

import ema_client
import pytest
import torch
from testing import assert_same_bits, replay


def strided_weights() -> dict[str, torch.Tensor]:
    """Of all sizes of elements; the large one is of several chunks."""
    generator = torch.Generator().manual_seed(4)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "first": values(5),
        "conv": values(7, 5, 3, 3).contiguous(memory_format=torch.channels_last),
        "volume": values(2, 3, 4, 5, 2).contiguous(memory_format=torch.channels_last_3d),
        "transposed": values(900, 1500).T,
        "permuted": values(3, 4, 5).permute(1, 2, 0).to(torch.bfloat16),
        "part": values(10, 12)[1:8:3, 2:11],
        "expanded": values(6, 1).expand(6, 4),
        "double": values(4, 3).double().T,
        "bytes": torch.arange(12, dtype=torch.uint8).view(3, 4).T,
        "mask": (values(5, 6) > 0).T,
        "count": torch.tensor(3),
        "last": values(6, 2),
    }


@pytest.mark.parametrize("same_host_lane", [True, False], ids=["shared memory", "grpc"])
@pytest.mark.parametrize("wire_dtype", ["as pushed", "bfloat16"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_any_order_is_pushed_as_it_reads(server, model, same_host_lane, wire_dtype, ranks):
    weights = strided_weights()
    assert sum(not value.is_contiguous() for value in weights.values()) == 9
    with ema_client.Client(server.address, same_host_lane=same_host_lane) as client:
        client.create_model(model, weights, tracks={"raw": "copy"})
        runs = [
            client.open_run(
                model, launch_id="x", rank=rank, world_size=ranks, wire_dtype=wire_dtype
            )
            for rank in range(ranks)
        ]
        pushes = [run.start_push(step=1, weights=weights) for run in runs]
        for push in pushes:
            push.wait()
            assert (push.stats.lane == "shared memory") == same_host_lane
        raw = client.pull(model, track="raw")
    if wire_dtype == "bfloat16":
        weights = {
            name: value.bfloat16().float() if value.dtype == torch.float32 else value
            for name, value in weights.items()
        }
    assert_same_bits({name: value.contiguous() for name, value in weights.items()}, raw)


class Net(torch.nn.Module):
    """A convolution in channels_last, a weight that is stored transposed, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 9, 3)
        self.norm = torch.nn.BatchNorm2d(9)
        self.fixed = torch.nn.Conv2d(9, 9, 2).requires_grad_(False)
        self.head = torch.nn.Parameter(0.1 * torch.randn(9 * 3 * 3, 5).T)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fixed(torch.relu(self.norm(self.conv(x)))).flatten(1) @ self.head.T


def test_a_training_in_channels_last(server, client, model):
    torch.manual_seed(6)
    net = Net().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05)
    schedule = {"half_life": "6ba", "update_interval": "3ba"}
    local = ema_client.LocalEMA(net, **schedule)
    logged = {}
    with ema_client.attach(
        net, optimizer, server.url(model), **schedule, check=True, max_wait_s=300
    ) as ema:
        for step in range(1, 31):
            x = torch.randn(4, 3, 6, 6).contiguous(memory_format=torch.channels_last)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            local.update()
            logged[step] = {
                name: tensor.detach().clone(memory_format=torch.contiguous_format)
                for name, tensor in net.state_dict().items()
            }
    assert not net.conv.weight.is_contiguous() and not net.head.is_contiguous()
    assert (ema.stats.pushes, ema.stats.skipped) == (11, 0)
    pushes = [(entry.version, logged[entry.version.step]) for entry in client.versions(model)]
    average = client.pull(model, track="ema")
    assert_same_bits(replay(pushes, "ema"), average)
    assert_same_bits(local.weights(), average)
    with ema_client.averaged(net, server.url(model)):
        assert_same_bits(average, {k: v.contiguous() for k, v in net.state_dict().items()})
        assert not net.conv.weight.is_contiguous()
    assert_same_bits(logged[30], {k: v.contiguous() for k, v in net.state_dict().items()})


def test_it_is_read_where_it_is_sent_and_not_copied_before(server, client, model):
    """While the server takes nothing, what is written all the same is pushed."""
    weight = torch.zeros(4096, 8192).T
    client.create_model(model, {"w": weight}, tracks={"raw": "copy"})
    with client.open_run(model) as run:
        server.send_signal(signal.SIGSTOP)
        try:
            push = run.start_push(step=1, weights={"w": weight})
            weight[-1, -1] = 5
        finally:
            server.send_signal(signal.SIGCONT)
        assert push.wait_released(max_wait_s=60)
        push.wait()
    raw = client.pull(model, track="raw")["w"]
    assert raw[-1, -1] == 5 and raw.sum() == 5


def test_the_next_step_waits_for_it(server, client, model):
    module = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.ones(4096, 8192).T)})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module["w"].grad = torch.ones_like(module["w"])
    has_stepped = threading.Event()
    waited = []

    def go_on() -> None:
        waited.append(not has_stepped.wait(1))
        server.send_signal(signal.SIGCONT)

    helper = threading.Thread(target=go_on)
    with ema_client.attach(
        module, optimizer, server.url(model), tracks={"raw": "copy"}, update_interval="10ba"
    ):
        server.send_signal(signal.SIGSTOP)
        try:
            optimizer.step()
            helper.start()
            optimizer.step()
        finally:
            has_stepped.set()
            helper.join()
    assert waited == [True]
    assert not client.pull(model, track="raw")["w"].any()
    assert (module["w"] == -1).all()
