# SPDX-License-Identifier: Apache-2.0
"""One rank of small trainings of Megatron-core's GPTModel, whose tensors are spread over the ranks; test_megatron_parallel.py runs four.

Usage: megatron_parallel_rank.py RANK WORLD_SIZE FOLDER URL KIND...
KIND: a key of KINDS. A training of each pushes to URL-KIND, and is continued by one without groups, where each rank has the whole
model. Logs to FOLDER/KIND.npz, by step and name, whole tensors, put together from the pieces of all ranks; under "averaged STEP" and
"loaded" what the models have with the track "fast" in them. Gradients are made up: the pipeline's forward needs a GPU.
"""

from __future__ import annotations

import pathlib
import sys
import zlib
from typing import Any

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from megatron_rank import OnCpu
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

# The last steps of both trainings.
STEPS = (6, 9)
TRACKS = {"fast": "8ba", "raw": "copy"}
# The sizes of the groups; whether the optimizer spreads its masters over the data-parallel ranks; what is averaged.
KINDS: dict[str, tuple[dict[str, int], bool, str]] = {
    "stages": ({"tensor": 2, "pipeline": 2, "virtual": 2}, False, "master"),
    "distributed": ({"tensor": 2}, True, "master"),
    "experts": ({"expert": 2}, False, "parameters"),
}
Log = dict[str, np.ndarray]


def make_chunks(sizes: dict[str, int], has_experts: bool) -> list[GPTModel]:
    """This rank's virtual pipeline stages, in groups of these sizes."""
    parallel_state.destroy_model_parallel()
    virtual = sizes.get("virtual")
    parallel_state.initialize_model_parallel(
        sizes.get("tensor", 1),
        sizes.get("pipeline", 1),
        virtual_pipeline_model_parallel_size=virtual,
        expert_model_parallel_size=sizes.get("expert", 1),
    )
    experts = 4 if has_experts else None
    config = TransformerConfig(
        **{"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 12},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu},
        **{"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16},
        **{"tensor_model_parallel_size": sizes.get("tensor", 1)},
        **{"pipeline_model_parallel_size": sizes.get("pipeline", 1)},
        **{"virtual_pipeline_model_parallel_size": virtual, "num_moe_experts": experts},
        **{"expert_model_parallel_size": sizes.get("expert", 1)},
        **{"add_bias_linear": experts is None},
        **{"use_cpu_initialization": True, "gradient_accumulation_fusion": False},
    )
    torch.manual_seed(5)
    chunks = []
    for stage in range(virtual or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if virtual else None}
        chunk = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=experts, normalization="LayerNorm"),
            **{"vocab_size": 20, "max_sequence_length": 6, "vp_stage": place["vp_stage"]},
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
        )
        chunks.append(chunk.bfloat16())
    return chunks


def master_of(parameter: torch.nn.Parameter, optimizer: Any) -> torch.Tensor:
    """The part of the float32 copy that this rank has, in a tensor of the parameter's shape; NaN elsewhere."""
    whole = torch.full((parameter.numel(),), torch.nan)
    main = parameter.main_param
    if main is not None and not getattr(parameter, "main_param_sharded", False):
        whole = main.detach().flatten().clone()
    elif main is not None:
        for one in getattr(optimizer, "chained_optimizers", [optimizer]):
            if parameter in one.model_param_gbuf_map:
                found = one._get_model_param_range_map(parameter)["param"]
                whole[found.start : found.end] = main.detach().flatten()
    return whole.view(parameter.shape)


def whole_model(chunks: list[GPTModel], optimizer: Any = None) -> Log:
    """Of the parameters, or with an optimizer of its masters: what the pieces of all ranks give together."""
    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], np.ndarray]] = []
    for chunk in chunks:
        for part in chunk.sharded_state_dict(metadata={"singleton_local_shards": True}).values():
            if not isinstance(part, (ShardedTensor, ShardedTensorFactory)):
                continue
            data = part.data.detach().float()
            if optimizer is not None and isinstance(part.data, torch.nn.Parameter):
                data = master_of(part.data, optimizer)
            if isinstance(part, ShardedTensorFactory):
                built = part.build_fn(part.key, data, part.replica_id, None)
            else:
                part.data, part.dtype = data, data.dtype
                built = [part]
            pieces += [(p.key, p.global_shape, p.global_offset, p.data.numpy()) for p in built]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, pieces)
    result: Log = {}
    for name, shape, offsets, values in sum(gathered, []):
        whole = result.setdefault(name, np.full(shape, np.nan, np.float32))
        box = tuple(slice(a, a + n) for a, n in zip(offsets, values.shape))
        both = ~np.isnan(whole[box]) & ~np.isnan(values)
        assert np.array_equal(whole[box][both], values[both]), name  # Of replicas.
        whole[box] = np.where(np.isnan(values), whole[box], values)
    assert not any(np.isnan(value).any() for value in result.values())
    return result


def make_up_gradients(chunks: list[Any], step: int) -> None:
    """Equal ones for replicas."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    for index, chunk in enumerate(chunks):
        for name, parameter in chunk.module.named_parameters():
            place = f"{step} {stage} {index} {name}"
            if not getattr(parameter, "allreduce", True):  # Of an expert.
                place += f" {parallel_state.get_expert_model_parallel_rank()}"
                place += f" {parallel_state.get_expert_tensor_parallel_rank()}"
            elif getattr(parameter, "tensor_model_parallel", False):
                place += f" {parallel_state.get_tensor_model_parallel_rank()}"
            generator = torch.Generator().manual_seed(zlib.crc32(place.encode()))
            parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))


def train(kind: str, url: str) -> Log:
    sizes, is_distributed, source = KINDS[kind]
    log: Log = {}
    state: Any = None
    for groups, last in ((sizes, STEPS[0]), ({}, STEPS[1])):
        plain = make_chunks(groups, kind == "experts")
        if state is not None:
            ema_client.load_into(plain, url, track="fast")
            log.update({f"loaded/{name}": value for name, value in whole_model(plain).items()})
            ema_client.load_into(plain, url, track="raw")
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=is_distributed)
        chunks = [DistributedDataParallel(chunk.config, ddp, chunk) for chunk in plain]
        options = {"bf16": True, "lr": 0.02, "clip_grad": 0.0, "params_dtype": torch.bfloat16}
        optimizer = get_megatron_optimizer(
            OptimizerConfig(use_distributed_optimizer=is_distributed, **options), chunks
        )
        masters = optimizer if source == "master" else None
        with ema_client.attach(
            *(chunks, optimizer, url),
            **{"update_interval": "3ba", "tracks": TRACKS, "source": source, "resume": state},
            max_wait_s=300,
        ) as ema:
            for step in range(ema.step + 1, last + 1):
                make_up_gradients(chunks, step)
                was_successful, _, _ = optimizer.step()
                assert was_successful and ema.step == step
                whole = whole_model(plain, masters)
                log.update({f"{step}/{name}": value for name, value in whole.items()})
            state = ema.state_dict()
        own = whole_model(plain)
        with ema_client.averaged(chunks, url, track="fast"):
            whole = whole_model(plain)
            log.update({f"averaged {last}/{name}": value for name, value in whole.items()})
        now = whole_model(plain)
        assert all(np.array_equal(own[name], now[name]) for name in own)
    return log


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    url, kinds = sys.argv[4], sys.argv[5:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    with OnCpu():
        for kind in kinds:
            log = train(kind, f"{url}-{kind}")
            if rank == 0:
                np.savez(folder / f"{kind}.npz", **log)
    dist.barrier()


if __name__ == "__main__":
    main()
