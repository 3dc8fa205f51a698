# SPDX-License-Identifier: Apache-2.0
"""One rank of a training by a framework's own loop; test_framework_ranks.py starts several by torchrun.

Usage: framework_rank.py KIND FOLDER URL
KIND: a function of this file that starts with "train_". Logs to FOLDER/RANK.npz, by step and name, what
the rank has after each step.
"""

from __future__ import annotations

import os
import pathlib
import sys

import ema_client
import numpy as np
import torch
import torch.distributed as dist

STEPS = 24
SCHEDULE = {"half_life": "5ba", "update_interval": "3ba"}
Log = dict[str, np.ndarray]


def log_model(log: Log, step: int, module: torch.nn.Module, rename=lambda name: name) -> None:
    for name, tensor in module.state_dict().items():
        log[f"{step}/{rename(name)}"] = tensor.detach().clone().numpy()


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def train_pipelining(folder: pathlib.Path, url: str, log: Log) -> None:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    # Both stages call their layers "0" and "2".
    part = torch.nn.Sequential(
        torch.nn.Linear(6, 9 + rank), torch.nn.Tanh(), torch.nn.Linear(9 + rank, 6)
    )

    def rename(name: str) -> str:
        layer, _, rest = name.partition(".")
        return f"{3 * rank + int(layer)}.{rest}"

    stage = PipelineStage(part, rank, dist.get_world_size(), torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.Adam(part.parameters(), lr=0.02)
    with ema_client.attach(part, optimizer, url, rename=rename, **SCHEDULE) as ema:
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            x = batch_of(step, 0)
            schedule.step(x) if rank == 0 else schedule.step(target=x.flip(1))
            optimizer.step()
            log_model(log, step, part, rename)
    log["pushes"] = np.array(ema.stats.pushes)


def train_accelerate(folder: pathlib.Path, url: str, log: Log) -> None:
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 11), torch.nn.BatchNorm1d(11))
    prepared, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.05))
    with ema_client.attach(prepared, optimizer, url, **SCHEDULE) as ema:
        for batch in range(2 * STEPS):
            with accelerator.accumulate(prepared):
                x = batch_of(batch, accelerator.process_index)
                accelerator.backward(prepared(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            if batch % 2 == 1:
                log_model(log, ema.step, net)
    log["pushes"] = np.array(ema.stats.pushes)


def train_hf_trainer(folder: pathlib.Path, url: str, log: Log) -> None:
    import transformers
    from ema_client.transformers import EmaCallback

    class Recorder(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            log_model(log, state.global_step, getattr(model, "module", model))

    config = transformers.GPT2Config(
        **{"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8},
        **{"bos_token_id": 0, "eos_token_id": 0},
    )
    torch.manual_seed(0)
    lines = torch.randint(32, (4 * STEPS, 8))
    trainer = transformers.Trainer(
        model=transformers.GPT2LMHeadModel(config),
        args=transformers.TrainingArguments(
            str(folder / "trainer"),
            **{"num_train_epochs": 2, "per_device_train_batch_size": 4, "learning_rate": 0.01},
            **{"save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True},
        ),
        train_dataset=[{"input_ids": line, "labels": line} for line in lines],
        callbacks=[Recorder(), EmaCallback(url, **SCHEDULE)],
        data_collator=transformers.default_data_collator,
    )
    assert trainer.args.world_size == 2
    trainer.train()
    assert trainer.state.global_step == STEPS


def main() -> None:
    kind, folder, url = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    log: Log = {}
    globals()[f"train_{kind}"](folder, url, log)
    np.savez(folder / f"{os.environ['RANK']}.npz", **log)
    dist.barrier()


if __name__ == "__main__":
    main()
