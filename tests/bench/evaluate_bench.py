# SPDX-License-Identifier: Apache-2.0
"""How fast K averages of one model are evaluated at once on the same inputs.

A loop over K models, torch.func.vmap over stacked weights, and einsum, bmm or a broadcast `@` over
stacked weights, for a linear and a small convolutional model. Prints a table: the median time of a
call, and the median and range of its share of the loop's time in the same round. In a round the ways
take turns.

    python tests/bench/evaluate_bench.py [--quick] [--threads N ...] [--rounds N]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

BATCH = 16
DIMENSION = 512
INPUTS = 13

Evaluate = Callable[[], torch.Tensor]  # [K, ..., batch, outputs]


class Stacked:
    """K models with random weights, and the same weights stacked as pull_stacked() gives them."""

    def __init__(self, models: list[torch.nn.Module], data: torch.Tensor) -> None:
        self.models = models
        self.count = len(models)
        self.data = data
        states = [model.state_dict() for model in models]
        self.weights = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def loop(self) -> torch.Tensor:
        return torch.stack([model(self.data) for model in self.models])

    def vmap(self) -> torch.Tensor:
        def call(weights: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(self.models[0], weights, (self.data,))

        return torch.func.vmap(call)(self.weights)


class StackedLinear(Stacked):
    """One layer of DIMENSION to DIMENSION, on `inputs` batches."""

    def __init__(self, count: int, inputs: int = 1) -> None:
        models: list[torch.nn.Module] = [
            torch.nn.Linear(DIMENSION, DIMENSION) for _ in range(count)
        ]
        super().__init__(models, torch.randn(inputs, BATCH, DIMENSION))

    def einsum(self) -> torch.Tensor:
        product = torch.einsum("nbi,koi->knbo", self.data, self.weights["weight"])
        return product + self.weights["bias"][:, None, None]

    def bmm(self) -> torch.Tensor:
        data = self.data.flatten(0, 1).expand(self.count, -1, -1)
        weight = self.weights["weight"].transpose(1, 2)
        product = torch.baddbmm(self.weights["bias"][:, None], data, weight)
        return product.unflatten(1, self.data.shape[:2])

    def broadcast(self) -> torch.Tensor:
        """[inputs, 1, batch, in] @ [K, in, out]: matmul copies the K weights for each input."""
        product = self.data[:, None] @ self.weights["weight"].transpose(1, 2)
        return (product + self.weights["bias"][:, None]).transpose(0, 1)

    def ways(self) -> dict[str, Evaluate]:
        return {
            "loop": self.loop,
            "vmap": self.vmap,
            "einsum": self.einsum,
            "bmm": self.bmm,
            "broadcast @": self.broadcast,
        }


class StackedConvolutional(Stacked):
    """Two 3x3 convolutions on 16x16 images, a mean over them, and a layer to DIMENSION outputs."""

    def __init__(self, count: int) -> None:
        models: list[torch.nn.Module] = [
            torch.nn.Sequential(
                torch.nn.Conv2d(3, 32, 3, padding=1),
                torch.nn.ReLU(),
                torch.nn.Conv2d(32, 64, 3, padding=1, stride=2),
                torch.nn.ReLU(),
                torch.nn.AdaptiveAvgPool2d(1),
                torch.nn.Flatten(),
                torch.nn.Linear(64, DIMENSION),
            )
            for _ in range(count)
        ]
        super().__init__(models, torch.randn(BATCH, 3, 16, 16))

    def _features(self) -> torch.Tensor:
        """[K, batch, 64]: stacked convolutions are one grouped convolution."""
        values = self.data.repeat(1, self.count, 1, 1)
        for name, stride in (("0", 1), ("2", 2)):
            weight = self.weights[f"{name}.weight"].flatten(0, 1)
            bias = self.weights[f"{name}.bias"].flatten()
            values = F.relu(
                F.conv2d(values, weight, bias, padding=1, stride=stride, groups=self.count)
            )
        means = values.mean(dim=(2, 3))
        return means.view(BATCH, self.count, -1).transpose(0, 1)

    def einsum(self) -> torch.Tensor:
        product = torch.einsum("kbi,koi->kbo", self._features(), self.weights["6.weight"])
        return product + self.weights["6.bias"][:, None]

    def bmm(self) -> torch.Tensor:
        weight = self.weights["6.weight"].transpose(1, 2)
        return torch.baddbmm(self.weights["6.bias"][:, None], self._features(), weight)

    def ways(self) -> dict[str, Evaluate]:
        return {
            "loop": self.loop,
            "vmap": self.vmap,
            "groups + einsum": self.einsum,
            "groups + bmm": self.bmm,
        }


def measure(ways: dict[str, Evaluate], rounds: int, calls: int) -> dict[str, list[float]]:
    """Seconds of one call, for each round the mean of `calls`. With one thread, they are its CPU time,
    which other processes hardly change."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    expected = ways["loop"]()
    for name, way in ways.items():
        torch.testing.assert_close(way(), expected, rtol=1e-4, atol=1e-4, msg=f"{name} differs")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = clock()
            for _ in range(calls):
                way()
            seconds[name].append((clock() - start) / calls)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one tiny round: does it run?")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    torch.manual_seed(0)
    rounds, calls = (1, 1) if options.quick else (options.rounds, 3)
    counts = (1, 2) if options.quick else (1, 4, 12)
    models: dict[str, Callable[[int], StackedLinear | StackedConvolutional]] = {
        "linear": StackedLinear,
        f"linear, {INPUTS} inputs": lambda count: StackedLinear(count, INPUTS),
        "convolutional": StackedConvolutional,
    }
    print(f"batch {BATCH}, dimension {DIMENSION}, {rounds} rounds\n")
    print(
        "| threads | model             |  K | way             | us per call | of loop | range         |"
    )
    print(
        "|--------:|-------------------|---:|-----------------|------------:|--------:|--------------:|"
    )
    for threads, (model, make), count in itertools.product(options.threads, models.items(), counts):
        torch.set_num_threads(threads)
        with torch.inference_mode():
            seconds = measure(make(count).ways(), rounds, calls)
        for name, values in seconds.items():
            shares = [value / loop for value, loop in zip(values, seconds["loop"])]
            span = f"{min(shares):.2f} - {max(shares):.2f}"
            print(
                f"| {threads:7} | {model:17} | {count:2} | {name:15} "
                f"| {statistics.median(values) * 1e6:11.0f} | {statistics.median(shares):7.2f} "
                f"| {span:>13} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
