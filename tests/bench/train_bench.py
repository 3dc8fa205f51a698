# SPDX-License-Identifier: Apache-2.0
"""What an average costs a trainer: a small transformer on the CPU, on one rank and on two (DDP).

Without an average, with those that are kept in the trainer (ema-pytorch, torch's AveragedModel,
Lightning's callback), and with ours. Each way trains in processes of its own; they take turns, round by
round, and a step's time is compared with that of the way without an average in the same round, in the
same kind of loop. Prints a table for each number of ranks: the median step, its ratio (median and range
over rounds), memory (peak resident, more than without), bytes that a rank sends for a step.

The server runs on this machine, too, and takes its share of the same processors.

    python tests/bench/train_bench.py [--quick] [--rounds N] [--steps N] [--ranks N ...]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import ema_client
import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "deploy/demo"))
from server_process import ServerProcess  # noqa: E402

DECAY = 0.999
WARM_UP_STEPS = 5
FOUR = {f"track{n}": f"{10 ** n * 50}ba" for n in range(4)}


@dataclasses.dataclass(frozen=True)
class Size:
    vocabulary: int = 4096
    width: int = 256
    layers: int = 4
    batch: int = 4
    length: int = 64


QUICK = Size(vocabulary=64, width=16, layers=1, batch=1, length=8)


class Transformer(torch.nn.Module):
    """Predicts the next token."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(size.vocabulary, size.width)
        layer = torch.nn.TransformerEncoderLayer(
            size.width, 4, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = torch.nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = torch.nn.Linear(size.width, size.vocabulary)

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.layers(self.embedding(tokens[:, :-1])))
        return torch.nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


# --- Ways: what is done after a step, and how many bytes of it have been sent. ---


@dataclasses.dataclass
class Averaging:
    after_step: Callable[[], None] = lambda: None
    sent_bytes: Callable[[], int] = lambda: 0
    close: Callable[[], None] = lambda: None


def bare(model: torch.nn.Module) -> torch.nn.Module:
    """The model, outside DistributedDataParallel."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def nothing(*_: Any) -> Averaging:
    return Averaging()


def ema_pytorch(model: torch.nn.Module, *_: Any) -> Averaging:
    from ema_pytorch import EMA

    ema = EMA(bare(model), beta=DECAY, update_after_step=0, update_every=1, use_foreach=True)
    return Averaging(ema.update)


def averaged_model(model: torch.nn.Module, *_: Any) -> Averaging:
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    average = AveragedModel(bare(model), multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    return Averaging(lambda: average.update_parameters(bare(model)))


def ours(**options: Any) -> Callable[..., Averaging]:
    def start(model: torch.nn.Module, optimizer: torch.optim.Optimizer, url: str) -> Averaging:
        ema = ema_client.attach(model, optimizer, url, **options)
        return Averaging(sent_bytes=lambda: ema.stats.sent_bytes, close=ema.close)

    return start


WAYS: dict[str, Callable[..., Averaging]] = {
    "nothing": nothing,
    "ema-pytorch": ema_pytorch,
    "AveragedModel": averaged_model,
    "ours, one track": ours(half_life="700ba"),
    "ours, one track, every 10": ours(half_life="700ba", update_interval="10ba"),
    "ours, four tracks": ours(tracks=FOUR),
    "ours, four tracks, every 10": ours(tracks=FOUR, update_interval="10ba"),
}
# In Lightning's loop, beside the same loop without an average.
LIGHTNING_WAYS = ["Lightning: nothing", "Lightning: its callback", "Lightning: our callback"]


# --- One process. ---


def train_plain(way: str, size: Size, steps: int, url: str) -> tuple[list[float], int]:
    net = Transformer(size)
    model = torch.nn.parallel.DistributedDataParallel(net) if dist.get_world_size() > 1 else net
    optimizer = optimizer_of(model)
    averaging = WAYS[way](model, optimizer, url)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.randint(size.vocabulary, (size.batch, size.length + 1))).backward()
        optimizer.step()
        averaging.after_step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - start)
    averaging.close()
    return times, averaging.sent_bytes()


def train_lightning(way: str, size: Size, steps: int, url: str) -> tuple[list[float], int]:
    import lightning
    from lightning.pytorch.callbacks import EMAWeightAveraging

    import ema_client.lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Transformer(size)

        def training_step(self, tokens: torch.Tensor, index: int) -> torch.Tensor:
            return self.net.loss(tokens)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self)

    ends: list[float] = []

    class Clock(lightning.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            ends.append(time.perf_counter())
            if way.endswith("our callback"):
                sent_bytes.append(ours.attachment.stats.sent_bytes)

    ours = ema_client.lightning.EMAWeightAveraging(url, decay=DECAY)
    sent_bytes = [0]
    averagings: dict[str, list[lightning.Callback]] = {
        "its callback": [EMAWeightAveraging(decay=DECAY)],
        "our callback": [ours],
    }
    data = torch.randint(
        size.vocabulary, ((steps + 1) * dist.get_world_size() * size.batch, size.length + 1)
    )
    trainer = lightning.Trainer(
        max_steps=steps + 1,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp" if dist.get_world_size() > 1 else "auto",
        callbacks=[*averagings.get(way.partition(": ")[2], []), Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=size.batch))
    return [end - start for start, end in zip(ends, ends[1:])], sent_bytes[-1]


def peak_bytes() -> int:
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no VmHWM")


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))
    dist.init_process_group("gloo")
    train = train_lightning if options.way in LIGHTNING_WAYS else train_plain
    size = QUICK if options.quick else Size()
    times, sent_bytes = train(options.way, size, options.steps + WARM_UP_STEPS, options.url)
    if dist.get_rank() == 0:
        result = {
            "step_s": statistics.median(times[WARM_UP_STEPS:]),
            "peak_bytes": peak_bytes(),
            "sent_bytes": sent_bytes / len(times),
        }
        pathlib.Path(options.result).write_text(json.dumps(result))
    dist.destroy_process_group()


# --- All of them. ---


def run_way(way: str, ranks: int, url: str, options: argparse.Namespace) -> dict[str, float]:
    with tempfile.NamedTemporaryFile("r", suffix=".json") as result:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), __file__, "--way", way, "--url", url]
        command += ["--steps", str(options.steps), "--result", result.name]
        command += ["--quick"] * options.quick
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            sys.exit(f"train_bench: {way}: {done.stderr[-4000:]}")
        return json.load(result)


@contextlib.contextmanager
def server() -> Iterator[ServerProcess]:
    with tempfile.TemporaryDirectory() as folder:
        with ServerProcess(pathlib.Path(folder)) as process:
            yield process


def baseline(way: str) -> str:
    return LIGHTNING_WAYS[0] if way in LIGHTNING_WAYS else "nothing"


def report(ranks: int, rounds: list[dict[str, dict[str, float]]]) -> None:
    print(f"\n{ranks} rank{'s' * (ranks > 1)}, {len(rounds)} rounds\n")
    print(f"| {'':27} | step, ms | of nothing (range)   | memory, MB | sent, MB a step |")
    print(f"|{'-' * 29}|---------:|---------------------:|-----------:|----------------:|")
    for way in rounds[0]:
        ratios = [done[way]["step_s"] / done[baseline(way)]["step_s"] for done in rounds]
        more = [done[way]["peak_bytes"] - done[baseline(way)]["peak_bytes"] for done in rounds]
        step_ms = 1e3 * statistics.median(done[way]["step_s"] for done in rounds)
        span = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} - {max(ratios):.2f})"
        print(
            f"| {way:27} | {step_ms:8.1f} | {span:>20} | {statistics.median(more) / 1e6:+10.0f} "
            f"| {rounds[0][way]['sent_bytes'] / 1e6:15.1f} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="one tiny round: does it run?")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way is not None:
        return work(options)
    if options.quick:
        options.rounds, options.steps = 1, 3
    ways = [*WAYS]
    for package, its_ways in (("ema_pytorch", ["ema-pytorch"]), ("lightning", LIGHTNING_WAYS)):
        if importlib.util.find_spec(package) is None:
            print(f"not installed, so not measured: {package}")
            ways = [way for way in ways if way not in its_ways]
        elif package == "lightning":
            ways += LIGHTNING_WAYS
    with server() as process:
        for ranks in options.ranks:
            rounds: list[dict[str, dict[str, float]]] = []
            for index in range(options.rounds):
                rounds.append({})
                for number, way in enumerate(ways):
                    url = process.url(f"m{ranks}.{index}.{number}")
                    rounds[-1][way] = run_way(way, ranks, url, options)
                    with ema_client.Client(process.address) as client:
                        client.delete_model(url.rpartition("/")[2])
            report(ranks, rounds)


if __name__ == "__main__":
    main()
