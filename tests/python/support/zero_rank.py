# SPDX-License-Identifier: Apache-2.0
"""One rank of small trainings with DeepSpeed; test_deepspeed.py runs several.

Usage: zero_rank.py RANK WORLD_SIZE FOLDER URL STEPS KIND...
KIND: the ZeRO stage, and perhaps a dtype and what is averaged: "3", "2-bf16", "2-bf16-master". With "fp32grad" DeepSpeed uses its
bfloat16 optimizer, and with "cpu" it offloads to the CPU. A training of each pushes to URL-KIND, and logs to FOLDER/KIND.RANK.npz, by step and name, whole tensors, which
DeepSpeed has gathered; under "averaged", "loaded" and "pulled" what modules have with the track "fast" in them.
"resumed" is ZeRO-3 that continues the run of FOLDER/state.pt, and writes this file and FOLDER/RANK.npz, as sharded_rank.py does.
"""

from __future__ import annotations

import os
import pathlib
import sys
from typing import Any

import deepspeed
import ema_client
import numpy as np
import torch
import torch.distributed as dist
from sharded_rank import TRACKS, Net

# Batches that an engine's step accumulates.
ACCUMULATED = 2
# Steps of a training in bfloat16 whose gradients are not finite: ZeRO-1 and 2 skip them.
SKIPPED = (2, 7)


def config_of(kind: str) -> dict[str, Any]:
    stage = int(kind[0])
    offloaded = {"offload_optimizer": {"device": "cpu"}} if "-cpu" in kind else {}
    if offloaded and stage == 3:
        offloaded["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": ACCUMULATED,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": "-bf16" in kind},
        "data_types": {"grad_accum_dtype": "fp32"} if "fp32grad" in kind else {},
        # Parameters of few elements stay gathered between steps.
        "zero_optimization": {
            **{"stage": stage, "stage3_param_persistence_threshold": 20},
            **offloaded,
        },
    }


def whole(tensor: torch.Tensor) -> np.ndarray:
    """All of a tensor, as DeepSpeed gathers it."""
    status = getattr(tensor, "ds_status", None)
    is_gathered = status is None or status.name == "AVAILABLE"
    with deepspeed.zero.GatheredParameters([] if is_gathered else [tensor]):
        value = tensor.detach().clone()
    return (value.float() if value.is_floating_point() else value).numpy()


def tensors_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict((*module.named_parameters(), *module.named_buffers()))


def log_model(log: dict[str, np.ndarray], prefix: str, module: torch.nn.Module) -> None:
    for name, tensor in tensors_of(module).items():
        log[f"{prefix}/{name}"] = whole(tensor)


def log_masters(log: dict[str, np.ndarray], prefix: str, module: torch.nn.Module) -> None:
    """As log_model, with the float32 copies of trained parameters in their place."""
    log_model(log, prefix, module)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            master = deepspeed.utils.safe_get_full_fp32_param(parameter)
            log[f"{prefix}/{name}"] = master.clone().numpy().reshape(log[f"{prefix}/{name}"].shape)


def train(
    engine: Any,
    steps: int,
    url: str,
    log: dict[str, np.ndarray],
    skipped: set[int],
    source: str,
) -> None:
    dtype = next(engine.module.buffers()).dtype
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with ema_client.attach(
        engine, None, url, update_interval="3ba", tracks=TRACKS, max_wait_s=300, source=source
    ) as ema:
        for step in range(1, steps + 1):
            made = ema.step
            for _ in range(ACCUMULATED):
                loss = engine(torch.randn(8, 9, generator=generator).to(dtype)).square().mean()
                engine.backward(loss * float("inf") if step in skipped else loss)
                assert ema.step == made
                engine.step()
            assert ema.step == made + (step not in skipped)
            assert engine.was_step_applied() == (step not in skipped)
            if step not in skipped:  # The forward has changed the statistics.
                logs = log_masters if source == "master" else log_model
                logs(log, str(ema.step), engine.module)
    log["sent_bytes"] = np.array(ema.stats.sent_bytes)
    log["pushes"] = np.array(ema.stats.pushes)


def evaluate(engine: Any, url: str, log: dict[str, np.ndarray]) -> None:
    """An evaluation uses the averages, also after one with the model's own weights, which are there again after it, and after an
    exception in the middle of one."""
    module = engine.module
    before = {name: whole(tensor) for name, tensor in tensors_of(module).items()}
    x = torch.randn(8, 9, generator=torch.Generator().manual_seed(3))
    x = x.to(next(module.buffers()).dtype)
    engine.eval()

    def fail(*_: object) -> None:
        raise ValueError("in the middle of a forward")

    with torch.no_grad():
        own = engine(x)
        with ema_client.averaged(engine, url, track="fast") as version:
            result = engine(x)
            log_model(log, "averaged", module)
            log["averaged_step"] = np.array(version.step)
        plain = Net().to(x.dtype).eval()
        averages = {n: torch.from_numpy(log[f"averaged/{n}"]) for n in plain.state_dict()}
        plain.load_state_dict(averages)
        torch.testing.assert_close(result, plain(x))
        assert not torch.equal(result, own)
        assert torch.equal(engine(x), own)
        handle = module.norm.register_forward_pre_hook(fail)
        try:
            with ema_client.averaged(engine, url, track="fast"):
                engine(x)
        except ValueError:
            pass
        handle.remove()
        assert torch.equal(engine(x), own)
    for name, tensor in tensors_of(module).items():
        assert np.array_equal(before[name], whole(tensor)), name


def load(config: dict[str, Any], url: str, log: dict[str, np.ndarray]) -> None:
    """Averages in models that had other values, one of which ZeRO-3 partitions while it is created."""
    is_stage3 = config["zero_optimization"]["stage"] == 3
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=is_stage3):
        loading, pulling = Net(), Net()
    loaded = ema_client.load_into(loading, url, track="fast")
    assert loaded.missing_keys == loaded.unexpected_keys == loaded.meta_buffers == ()
    log_model(log, "loaded", loading)
    address, _, name = url.removeprefix("ema://").partition("/")
    with ema_client.Client(address) as client:
        client.pull(name, track="fast", out=pulling, version=loaded.version)
    log_model(log, "pulled", pulling)


def run(kind: str, steps: int, url: str) -> dict[str, np.ndarray]:
    config = config_of(kind)
    torch.manual_seed(5)
    # With ZeRO-3, DeepSpeed does not cast the buffers.
    net = Net().to(torch.bfloat16 if "-bf16" in kind else torch.float32)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config)
    log: dict[str, np.ndarray] = {}
    skipped = set(SKIPPED) if kind.startswith(("1-bf16", "2-bf16")) else set()
    source = "master" if kind.endswith("-master") else "parameters"
    train(engine, steps, url, log, skipped, source)
    evaluate(engine, url, log)
    load(config, url, log)
    return log


def resumed(folder: pathlib.Path, steps: int, url: str) -> dict[str, np.ndarray]:
    state = torch.load(folder / "state.pt")
    net = Net()
    net.load_state_dict(state["model"])
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02)
    engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=config_of("3"))
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    log: dict[str, np.ndarray] = {}
    with ema_client.attach(
        engine,
        None,
        url,
        update_interval="3ba",
        tracks=TRACKS,
        max_pinned_versions=4,
        max_wait_s=300,
        resume=state["ema"],
    ) as ema:
        for _ in range(steps):
            for _ in range(ACCUMULATED):
                engine.backward(engine(torch.randn(8, 9, generator=generator)).square().mean())
                engine.step()
            log_model(log, str(ema.step), net)
        ema_state = ema.state_dict()
    weights = {name: whole(tensor) for name, tensor in tensors_of(net).items()}
    if dist.get_rank() == 0:
        model = {name: torch.tensor(value) for name, value in weights.items()}
        torch.save({"model": model, "ema": ema_state}, folder / "state.pt")
    return log


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    url, steps, kinds = sys.argv[4], int(sys.argv[5]), sys.argv[6:]
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    # It would compile this.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for kind in kinds:
        if kind == "resumed":
            np.savez(folder / f"{rank}.npz", **resumed(folder, steps, url))
        else:
            np.savez(folder / f"{kind}.{rank}.npz", **run(kind, steps, f"{url}-{kind}"))
    dist.barrier()


if __name__ == "__main__":
    main()
