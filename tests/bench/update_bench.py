# SPDX-License-Identifier: Apache-2.0
"""How fast averages are updated in this process, on the CPU, in every usual way.

Prints a table: seconds per update (median and range over rounds, in which the ways take turns) and
bytes per second beside memcpy's. Bytes are what an update in place must move: the new weights and
the average read, the average written. For memcpy they are what it reads and writes. Then what a
schedule costs a push, and what the average of a model of many small tensors costs the thread that
trains: libraries update in place, ours starts a push to a server and, before the next step, waits until
the weights may change. Between them lies time that a forward and backward would take, for all alike.

    python tests/bench/update_bench.py [--quick] [--threads N] [--rounds N]
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import statistics
import sys
import tempfile
import time
import timeit
from collections.abc import Callable

import ema_client
import torch
from ema_client import Track, _ema
from ema_client._tracks.track import track_of

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy/demo"))
from server_process import ServerProcess  # noqa: E402

UPDATE_WEIGHT = 1e-4
BYTES_PER_ELEMENT = 4
BETWEEN_STEPS_S = 0.02
WARM_UP_ROUNDS = 3


class Weights:
    """Averages and weights as views of one flat tensor each, so that flat ways see the same."""

    def __init__(self, tensor_count: int, elements_each: int) -> None:
        self.flat_ema = torch.rand(tensor_count * elements_each)
        self.flat_param = torch.rand(tensor_count * elements_each)
        self.emas = list(self.flat_ema.view(tensor_count, elements_each).unbind())
        self.params = list(self.flat_param.view(tensor_count, elements_each).unbind())
        self.wide_emas = [ema.double() for ema in self.emas]
        self.bytes = self.flat_ema.numel() * BYTES_PER_ELEMENT
        self.fresh: object = None

    def loop_temporaries(self) -> None:
        decay = 1 - UPDATE_WEIGHT
        for ema, param in zip(self.emas, self.params):
            ema.copy_(decay * ema + UPDATE_WEIGHT * param)

    def loop_fresh(self) -> None:
        decay = 1 - UPDATE_WEIGHT
        self.fresh = [decay * e + UPDATE_WEIGHT * p for e, p in zip(self.emas, self.params)]

    def loop_in_place(self) -> None:
        for ema, param in zip(self.emas, self.params):
            ema.lerp_(param, UPDATE_WEIGHT)

    def foreach(self) -> None:
        torch._foreach_lerp_(self.emas, self.params, UPDATE_WEIGHT)

    def foreach_fresh(self) -> None:
        self.fresh = torch._foreach_lerp(self.emas, self.params, UPDATE_WEIGHT)

    def flat(self) -> None:
        self.flat_ema.lerp_(self.flat_param, UPDATE_WEIGHT)

    def flat_fresh(self) -> None:
        self.fresh = self.flat_ema.lerp(self.flat_param, UPDATE_WEIGHT)

    def ours(self) -> None:
        _ema.fold_many(self.emas, self.params, UPDATE_WEIGHT, threads=torch.get_num_threads())

    def ours_flat(self) -> None:
        _ema.fold_many(
            [self.flat_ema], [self.flat_param], UPDATE_WEIGHT, threads=torch.get_num_threads()
        )

    def ours_float64(self) -> None:
        _ema.fold_many(self.wide_emas, self.params, UPDATE_WEIGHT, threads=torch.get_num_threads())

    def memcpy(self) -> None:
        self.flat_ema.copy_(self.flat_param)


# Name, function, and the memory traffic of an update in place, in sizes of the model.
Way = tuple[str, Callable[[Weights], None], int]
WAYS: list[Way] = [
    ("memcpy (flat copy_)", Weights.memcpy, 2),
    ("loop, temporaries, copied back", Weights.loop_temporaries, 3),
    ("loop, freshly allocated", Weights.loop_fresh, 3),
    ("loop, lerp_ in place", Weights.loop_in_place, 3),
    ("_foreach_lerp, freshly allocated", Weights.foreach_fresh, 3),
    ("_foreach_lerp_ in place", Weights.foreach, 3),
    ("one flat lerp, freshly allocated", Weights.flat_fresh, 3),
    ("one flat lerp_ in place", Weights.flat, 3),
    ("ours, in place", Weights.ours, 3),
    ("ours, one flat array in place", Weights.ours_flat, 3),
    ("ours, float64 averages, in place", Weights.ours_float64, 5),
]


def measure(weights: Weights, rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name, _, _ in WAYS}
    for round_index in range(rounds + 1):
        for name, way, _ in WAYS:
            start = time.perf_counter()
            way(weights)
            elapsed = time.perf_counter() - start
            weights.fresh = None  # Not a part of the next one's time.
            if round_index > 0:  # The first touches memory and loads code.
                seconds[name].append(elapsed)
    return seconds


def report(weights: Weights, seconds: dict[str, list[float]]) -> None:
    print(f"| {'':33}|      ms | range, ms         |  GB/s | of memcpy |")
    print(f"|{'-' * 34}|--------:|------------------:|------:|----------:|")
    memcpy_rate = 2 * weights.bytes / statistics.median(seconds[WAYS[0][0]])
    for name, _, moves in WAYS:
        median = statistics.median(seconds[name])
        rate = moves * weights.bytes / median
        span = f"{min(seconds[name]) * 1e3:.1f} - {max(seconds[name]) * 1e3:.1f}"
        print(
            f"| {name:33}| {median * 1e3:7.1f} | {span:>17} | {rate / 1e9:5.1f} "
            f"| {rate / memcpy_rate:9.2f} |"
        )


SCHEDULES = {
    "half_life": Track(half_life="1000ba"),
    "smoothing": Track(smoothing=0.999),
    "inverse gamma": Track(inv_gamma=1.0),
    "ramp": Track(ramp=10.0),
    "power function": Track(sigma_rel=0.05),
    "uniform": Track(uniform=True),
}


def report_schedules(calls: int) -> None:
    """What a schedule costs a push, for each track, the Python binding included."""
    print("\n| schedule        | us a push |\n|-----------------|----------:|")
    for name, track in SCHEDULES.items():
        planned = track_of("ema", track)
        state = planned.next(planned.next([], {"batch": 1}), {"batch": 2})
        seconds = timeit.repeat(lambda: planned.plan(state, {"batch": 3}), number=calls, repeat=5)
        print(f"| {name:16}| {statistics.median(seconds) / calls * 1e6:9.2f} |")


def updates_of(
    module: torch.nn.Module, ema: ema_client.Attachment
) -> dict[str, Callable[[], object]]:
    """What is done at each step, by library: those that are installed."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    def push() -> None:
        ema.wait_released()
        ema.after_step(wait_released=False)

    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(1 - UPDATE_WEIGHT))
    updates: dict[str, Callable[[], object]] = {
        "ours, a push": push,
        "AveragedModel": lambda: averaged.update_parameters(module),
    }
    if importlib.util.find_spec("timm") is not None:
        from timm.utils import ModelEmaV3

        timm = ModelEmaV3(module)
        updates["timm ModelEmaV3"] = lambda: timm.update(module)
    if importlib.util.find_spec("ema_pytorch") is not None:
        from ema_pytorch import EMA

        updates["ema_pytorch"] = EMA(module, update_after_step=0, update_every=1).update
    return updates


def report_steps(tensor_counts: list[int], rounds: int) -> None:
    """What an average costs the thread that trains, at each step: time, and time on a processor."""
    print("\n| tensors | average          |     ms | range, ms         | ms on a processor |")
    print(f"|--------:|{'-' * 18}|-------:|{'-' * 18}:|{'-' * 18}:|")
    with tempfile.TemporaryDirectory() as folder, ServerProcess(pathlib.Path(folder)) as server:
        for count in tensor_counts:
            module = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(count // 2)))
            with ema_client.attach(module, None, server.url(f"m{count}")) as ema:
                updates = updates_of(module, ema)
                times: dict[str, list[tuple[float, float]]] = {name: [] for name in updates}
                for _ in range(rounds + WARM_UP_ROUNDS):
                    for name, update in updates.items():
                        time.sleep(BETWEEN_STEPS_S)
                        start, on_processor = time.perf_counter(), time.thread_time()
                        update()
                        on_processor = time.thread_time() - on_processor
                        times[name].append((time.perf_counter() - start, on_processor))
                assert ema.stats.skipped == 0
            for name, rows in times.items():
                wall, busy = zip(*rows[WARM_UP_ROUNDS:])
                span = f"{min(wall) * 1e3:.2f} - {max(wall) * 1e3:.2f}"
                print(
                    f"| {count:7} | {name:17}| {statistics.median(wall) * 1e3:6.2f} | {span:>17} "
                    f"| {statistics.median(busy) * 1e3:17.2f} |"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one tiny round: does it run?")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sizes = [(4, 1000), (100, 10)] if options.quick else [(400, 250_000), (100_000, 1000)]
    for tensor_count, elements_each in sizes:
        weights = Weights(tensor_count, elements_each)
        rounds = 1 if options.quick else options.rounds
        print(
            f"\n{tensor_count} tensors of {elements_each} float32, {weights.bytes / 1e6:.0f} MB, "
            f"{options.threads} threads, {rounds} rounds\n"
        )
        report(weights, measure(weights, rounds))
    report_schedules(calls=100 if options.quick else 20_000)
    report_steps([20] if options.quick else [300, 1000, 1700], rounds=5 * options.rounds)


if __name__ == "__main__":
    main()
