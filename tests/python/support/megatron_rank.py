# SPDX-License-Identifier: Apache-2.0
"""One rank of small trainings by Megatron-core's optimizers; test_megatron.py runs several.

Usage: megatron_rank.py RANK WORLD_SIZE FOLDER URL STEPS KIND...
KIND: "distributed" or "replicated": whether the optimizer's float32 copies, the masters, are spread over the ranks. A training of each
in bfloat16 pushes the masters to URL-KIND, and logs to FOLDER/KIND.RANK.npz, by step and name, whole masters, put together from those
of all ranks; under "averaged" what the model has with the track "fast" in it.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

TRACKS = {"fast": "8ba", "raw": "copy"}


class OnCpu(TorchFunctionMode):
    """Lets Megatron-core, which asks for tensors of a GPU, use those of the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")
        return result


torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import MegatronModule  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


class Chunk(MegatronModule):
    """A virtual pipeline stage: each calls its layers "layers.0" and "layers.1"."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(7, 7), torch.nn.Linear(7, 7)])
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def rename(name: str) -> str:
    chunk, _, layer, rest = name.split(".", 3)
    return f"layers.{2 * int(chunk) + int(layer)}.{rest}"


def whole_masters(chunks: list[Any], optimizer: Any) -> dict[str, np.ndarray]:
    """Put together from the pieces of all ranks, which must give the parameters when they are rounded."""
    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    parameters = {
        rename(f"{index}.{name}"): parameter
        for index, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
    }
    for name, parameter in parameters.items():
        if parameter.main_param is not None:
            first = 0
            if hasattr(optimizer, "_get_model_param_range_map"):
                first = optimizer._get_model_param_range_map(parameter)["param"].start
            pieces[name] = [(first, parameter.main_param.detach().flatten().clone().numpy())]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    result: dict[str, np.ndarray] = {}
    for name, parameter in parameters.items():
        whole = np.full(parameter.numel(), np.nan, np.float32)
        for of_rank in gathered:
            for first, values in of_rank.get(name, []):
                whole[first : first + values.size] = values
        result[name] = whole.reshape(parameter.shape)
        assert torch.equal(torch.from_numpy(result[name]).bfloat16(), parameter.detach()), name
    return result


def train(kind: str, steps: int, url: str) -> dict[str, np.ndarray]:
    is_distributed = kind == "distributed"
    config = TransformerConfig(
        **{"num_layers": 4, "hidden_size": 7, "num_attention_heads": 1, "bf16": True},
        **{"params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
    )
    # As large a bucket as one chunk.
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
    torch.manual_seed(5)
    chunks = [DistributedDataParallel(config, ddp, Chunk(config)) for _ in range(2)]
    options = {"bf16": True, "lr": 0.02, "clip_grad": 0.0, "params_dtype": torch.bfloat16}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(use_distributed_optimizer=is_distributed, **options), chunks
    )
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    assert len(parts) == 1
    log: dict[str, np.ndarray] = {}
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    with ema_client.attach(
        chunks,
        optimizer,
        url,
        update_interval="3ba",
        tracks=TRACKS,
        source="master",
        rename=rename,
        max_wait_s=300,
    ) as ema:
        for step in range(1, steps + 1):
            for chunk in chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            x = torch.randn(4, 7, generator=generator).bfloat16()
            for chunk in chunks:
                x = chunk(x)
            x.float().square().mean().backward()
            for chunk in chunks:
                chunk.finish_grad_sync()
            was_successful, _, _ = optimizer.step()
            assert was_successful and ema.step == step
            for name, value in whole_masters(chunks, parts[0]).items():
                log[f"{step}/{name}"] = value
    own = [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]
    with ema_client.averaged(chunks, url, track="fast", rename=rename):
        for index, chunk in enumerate(chunks):
            for name, value in chunk.module.state_dict().items():
                log[f"averaged/{rename(f'{index}.{name}')}"] = value.float().numpy()
    now = [parameter for chunk in chunks for parameter in chunk.parameters()]
    assert all(map(torch.equal, own, now))
    return log


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    url, steps, kinds = sys.argv[4], int(sys.argv[5]), sys.argv[6:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    with OnCpu():
        parallel_state.initialize_model_parallel()
        for kind in kinds:
            np.savez(folder / f"{kind}.{rank}.npz", **train(kind, steps, f"{url}-{kind}"))
    dist.barrier()


if __name__ == "__main__":
    main()
