# SPDX-License-Identifier: Apache-2.0
"""Our side of the comparisons with other libraries: in this process, and a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import pytest
import torch
from libraries import UPDATES, Tensors, Time


class LocalOurs:
    def __init__(self, model: torch.nn.Module, track: Any) -> None:
        self._ema = ema_client.LocalEMA(model, tracks={"ema": track})

    def push(self, n: int, time: Time | None = None) -> float | None:
        record = self._ema.update(time)["ema"]
        return record.update_weight if record.updated else None

    def pull(self) -> Tensors:
        return self._ema.weights("ema")


class ServerOurs:
    def __init__(
        self, client: ema_client.Client, name: str, model: torch.nn.Module, track: Any
    ) -> None:
        self._client, self._name, self._model = client, name, model
        buffers = dict(model.named_buffers())
        specs = {
            name: ema_client.TensorSpec(
                name,
                str(tensor.dtype).removeprefix("torch."),
                tuple(tensor.shape),
                is_buffer=name in buffers,
            )
            for name, tensor in model.state_dict().items()
        }
        client.create_model(self._name, specs, tracks={"ema": track})
        self.run = client.open_run(self._name)

    def push(self, n: int, time: Time | None = None) -> float | None:
        version = self.run.push(step=n, weights=self._model.state_dict(), time=time)
        record = version.tracks["ema"]
        return record.update_weight if record.updated else None

    def pull(self) -> Tensors:
        return dict(self._client.pull(self._name, track="ema", framework="torch"))


MakeOurs = Callable[[torch.nn.Module, Any], LocalOurs | ServerOurs]


class Timed:
    """Ours, with a time that has epochs, and the share of a training of UPDATES batches."""

    def __init__(self, ours: LocalOurs | ServerOurs, epoch_batches: int = 10**9) -> None:
        self._ours, self._epoch_batches = ours, epoch_batches

    def push(self, n: int) -> float | None:
        return self._ours.push(
            n, {"batch": n, "epoch": n // self._epoch_batches, "progress": n / UPDATES}
        )

    def pull(self) -> Tensors:
        return self._ours.pull()


@pytest.fixture(params=["local", "server"])
def make_ours(request: pytest.FixtureRequest) -> Iterator[MakeOurs]:
    if request.param == "local":
        yield LocalOurs
        return
    client = request.getfixturevalue("client")
    name = request.getfixturevalue("model")
    made: list[ServerOurs] = []

    def make(model: torch.nn.Module, track: Any) -> ServerOurs:
        made.append(ServerOurs(client, f"{name[:90]}-{len(made)}", model, track))
        return made[-1]

    yield make
    for ours in made:
        ours.run.close()
