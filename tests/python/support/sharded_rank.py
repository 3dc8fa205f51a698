# SPDX-License-Identifier: Apache-2.0
"""One rank of a small training whose model is spread over the ranks; test_sharded.py runs several.

Usage: sharded_rank.py KIND RANK WORLD_SIZE FOLDER URL STEPS
KIND: a function of this file that starts with "make_". Starts from FOLDER/state.pt if that is there,
and writes it. Logs to FOLDER/RANK.npz, by step and name, whole tensors, also of those that are in
pieces; under "averaged" what is in the model with the track "fast" in it.
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

TRACKS = {"fast": "8ba", "slow": {"half_life": "40ba", "update_interval": "6ba"}, "raw": "copy"}
Rename = Callable[[str], str] | None


class Net(torch.nn.Module):
    """Odd sizes, statistics that differ by rank, a frozen tensor, one that is smaller than the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(9, 18)
        self.down = torch.nn.Linear(18, 7)
        self.norm = torch.nn.BatchNorm1d(7)
        self.scale = torch.nn.Parameter(torch.ones(1))
        self.frozen = torch.nn.Parameter(torch.linspace(1, 2, 7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x)))) * self.scale * self.frozen


def make_fsdp(world_size: int) -> tuple[torch.nn.Module, Rename]:
    net = Net()
    for part in (net.up, net.down):
        fully_shard(part)
    return fully_shard(net), None


def make_plain(world_size: int) -> tuple[torch.nn.Module, Rename]:
    return Net(), None


def make_ddp(world_size: int) -> tuple[torch.nn.Module, Rename]:
    return torch.nn.parallel.DistributedDataParallel(Net()), None


def make_fsdp1(
    world_size: int, net: Net | None = None, **options
) -> tuple[torch.nn.Module, Rename]:
    options = {"use_orig_params": True, **options}
    return (
        FullyShardedDataParallel(net or Net(), device_id=torch.device("cpu"), **options),
        None,
    )


def make_fsdp1_wrapped(world_size: int) -> tuple[torch.nn.Module, Rename]:
    """Flat parameters of each layer, which are sharded again after backward only."""
    return make_fsdp1(
        world_size,
        auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    )


def make_fsdp1_flat(world_size: int) -> tuple[torch.nn.Module, Rename]:
    """Parameters that the optimizer does not see, and an ignored one: a flat one is trained or frozen."""
    net = Net()
    return make_fsdp1(world_size, net, use_orig_params=False, ignored_states=[net.frozen])


def make_fsdp1_mixed(world_size: int) -> tuple[torch.nn.Module, Rename]:
    """Computes in bfloat16, to which the statistics are cast, too."""
    dtypes = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), torch.bfloat16)
    precision = MixedPrecision(**dtypes, _module_classes_to_ignore=())
    return make_fsdp1(world_size, mixed_precision=precision)


def make_fsdp1_replicas(world_size: int) -> tuple[torch.nn.Module, Rename]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    return make_fsdp1(world_size, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def make_fsdp1_offloaded(world_size: int) -> tuple[torch.nn.Module, Rename]:
    # FSDP1 calls these, which need a GPU.
    torch.Tensor.pin_memory = lambda self, *_: self
    torch.cpu.Stream.synchronize = lambda self: None
    model, rename = make_fsdp1(world_size, cpu_offload=CPUOffload(offload_params=True))
    model(torch.randn(16, 9, generator=torch.Generator().manual_seed(7)))
    return model, rename


def make_fsdp1_whole(world_size: int) -> tuple[torch.nn.Module, Rename]:
    return make_fsdp1(world_size, sharding_strategy=ShardingStrategy.NO_SHARD)


def make_hsdp(world_size: int) -> tuple[torch.nn.Module, Rename]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replica", "shard"))
    net = Net()
    fully_shard(net.up, mesh=mesh)
    return fully_shard(net, mesh=mesh), None


_TENSOR_PARALLEL = {"up": ColwiseParallel(), "down": RowwiseParallel()}


def make_tensor_parallel(world_size: int) -> tuple[torch.nn.Module, Rename]:
    mesh = init_device_mesh("cpu", (world_size,))
    return parallelize_module(Net(), mesh, _TENSOR_PARALLEL), None


def make_fsdp_tensor_parallel(world_size: int) -> tuple[torch.nn.Module, Rename]:
    mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("data", "tensor"))
    net = parallelize_module(Net(), mesh["tensor"], _TENSOR_PARALLEL)
    return fully_shard(net, mesh=mesh["data"]), None


def make_pipeline(world_size: int) -> tuple[torch.nn.Module, Rename]:
    """A stage for each rank, under its names in the whole model."""
    stage = torch.nn.Module()
    stage.add_module(f"stage{dist.get_rank()}", Net())
    stage.forward = lambda x: getattr(stage, f"stage{dist.get_rank()}")(x)
    return stage, None


def make_experts(world_size: int) -> tuple[torch.nn.Module, Rename]:
    """An expert for each rank, by the same name in the module, and a gate that all have."""
    torch.manual_seed(5)
    gate = torch.nn.Linear(9, 9)
    torch.manual_seed(dist.get_rank())
    module = torch.nn.Sequential(gate, Net())
    gate.requires_grad_(False)
    rank = dist.get_rank()
    return module, lambda name: name.replace("1.", f"experts.{rank}.", 1)


def whole(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().numpy()


def log_model(
    log: dict[str, np.ndarray], prefix: str, module: torch.nn.Module, rename: Rename
) -> None:
    for name, tensor in module.state_dict().items():
        log[f"{prefix}/{name if rename is None else rename(name)}"] = whole(tensor)


def check_evaluation(model: torch.nn.Module, url: str, uses_bfloat16: bool) -> None:
    """An evaluation uses the averages, also after one with the model's own weights, which are there again after it,
    and after an exception in the middle of one."""
    model.eval()
    x = torch.randn(16, 9, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = model(x)

        def fail(*_: object) -> None:
            raise ValueError("in the middle of a forward")

        with ema_client.averaged(model, url, track="fast"):
            plain = Net().eval()
            weights = {name: whole(tensor) for name, tensor in model.state_dict().items()}
            plain.load_state_dict({n: torch.from_numpy(value) for n, value in weights.items()})
            tolerance = 2**-5 if uses_bfloat16 else 1e-4
            torch.testing.assert_close(
                model(x), plain(x), check_dtype=False, rtol=tolerance, atol=tolerance
            )
        assert torch.equal(model(x), expected)
        handle = model.norm.register_forward_pre_hook(fail)
        try:
            with ema_client.averaged(model, url, track="fast"):
                model(x)
        except ValueError:
            pass
        handle.remove()
        assert torch.equal(model(x), expected)


def log_loaded(log: dict[str, np.ndarray], kind: str, world_size: int, url: str) -> None:
    """What a model of the same layout has that had no memory before its averages came, or with FSDP1
    other values."""
    module = Net
    device = "cpu" if kind.startswith("fsdp1") else "meta"

    def on_meta() -> torch.nn.Module:
        with torch.device(device):
            return module()

    globals()["Net"] = on_meta
    model, _ = globals()[f"make_{kind}"](world_size)
    globals()["Net"] = module
    loaded = ema_client.load_into(model, url, track="fast")
    assert loaded.missing_keys == loaded.unexpected_keys == loaded.meta_buffers == ()
    by_step = ema_client.load_into(model, url, track="fast", step=loaded.version.step)
    assert by_step.version == loaded.version
    model.eval()
    with torch.no_grad():
        model(torch.randn(16, 9))
    log_model(log, "loaded", model, None)


def main() -> None:
    kind, rank, world_size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    folder, url, steps = pathlib.Path(sys.argv[4]), sys.argv[5], int(sys.argv[6])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    torch.manual_seed(5)
    model, rename = globals()[f"make_{kind}"](world_size)
    options = StateDictOptions(full_state_dict=True)
    resume = None
    if (folder / "state.pt").exists():
        state = torch.load(folder / "state.pt")
        set_model_state_dict(model, state["model"], options=options)
        resume = state["ema"]
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.02)
    log: dict[str, np.ndarray] = {}
    generator = torch.Generator().manual_seed(100 + rank)
    inner = model.module if kind == "ddp" else model
    if steps > 0:
        with ema_client.attach(
            model,
            optimizer,
            url,
            update_interval="3ba",
            tracks=TRACKS,
            rename=rename,
            max_pinned_versions=4,
            max_wait_s=300,
            resume=resume,
        ) as ema:
            for _ in range(steps):
                optimizer.zero_grad()
                # Tensor parallel ranks must see the same batch; the others may.
                x = torch.randn(16, 9, generator=torch.Generator().manual_seed(ema.step))
                x = x if "tensor" in kind else torch.randn(16, 9, generator=generator)
                model(x).square().mean().backward()
                optimizer.step()
                log_model(log, str(ema.step), inner, rename)
            if kind in ("fsdp", "fsdp1", "fsdp1_flat", "plain", "ddp"):
                ema_state = ema.state_dict()
                model_state = get_model_state_dict(model, options=options)
                if rank == 0:
                    torch.save({"model": model_state, "ema": ema_state}, folder / "state.pt")
        log["sent_bytes"] = np.array(ema.stats.sent_bytes)
        log["pushes"] = np.array(ema.stats.pushes)
    before = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    # A stage has names of the whole model; that it is a part must be said.
    group = dist.group.WORLD if kind == "pipeline" else None
    with ema_client.averaged(
        model, url, track="fast", rename=rename, process_group=group
    ) as version:
        model.eval()
        model(torch.randn(16, 9))  # Gathers what is in pieces.
        model.train()
        log_model(log, "averaged", inner, rename)
        log["averaged_step"] = np.array(version.step)
    for name, tensor in model.state_dict().items():
        assert np.array_equal(before[name], whole(tensor)), name
    if rename is None and kind not in ("pipeline", "ddp"):
        check_evaluation(model, url, kind == "fsdp1_mixed")
        log_loaded(log, kind, world_size, url)
    np.savez(folder / f"{rank}.npz", **log)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
