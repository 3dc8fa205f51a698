# SPDX-License-Identifier: Apache-2.0
"""One rank of trainings by frameworks that shard the model; test_sharded_frameworks.py runs two.

Usage: sharded_framework_rank.py RANK WORLD_SIZE FOLDER URL KIND...
KIND: a function of this file that starts with "train_". Each pushes to URL-KIND, and logs to FOLDER/KIND.RANK.npz, by step and name,
whole tensors, which the library that shards the model has gathered. With "-first" or "-second" behind it, only that training of the
Trainer's two.
"""

from __future__ import annotations

import os
import pathlib
import sys
import unittest.mock
from collections.abc import Callable
from typing import Any

import ema_client
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

STEPS = 9
# The step whose checkpoint of the Trainer the second training resumes from.
SAVED = 6
# The trainings of the Trainer that are to run.
TRAININGS = ["first", "second"]
SCHEDULE: dict[str, Any] = {"half_life": "5ba", "update_interval": "3ba", "max_wait_s": 300}
Log = dict[str, np.ndarray]


def whole_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(get_model_state_dict(module, options=StateDictOptions(full_state_dict=True)))


def whole_zero(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Of a model that DeepSpeed trains, the float32 masters in place of parameters in bfloat16."""
    import deepspeed

    parameters = dict(module.named_parameters(remove_duplicate=False))
    tensors = {**parameters, **dict(module.named_buffers())}
    for name, parameter in parameters.items():
        if parameter.dtype == torch.bfloat16:
            tensors[name] = deepspeed.utils.safe_get_full_fp32_param(parameter).view(
                parameter.shape
            )
        elif hasattr(parameter, "ds_id"):
            with deepspeed.zero.GatheredParameters([parameter]):
                tensors[name] = parameter.detach().clone()
    return tensors


def log_model(log: Log, prefix: object, tensors: dict[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        log[f"{prefix}/{name}"] = tensor.detach().float().clone().numpy()


def batch_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1000 * rank + step))


def lines(count: int) -> list[dict[str, torch.Tensor]]:
    """Lines of text for a language model, which learns to count."""
    ids = [(torch.arange(8) + 5 * index) % 32 for index in range(count)]
    # The first token has no prediction. The Trainer would count it, and the model's own loss would not.
    return [{"input_ids": line, "labels": line.where(torch.arange(8) > 0, -100)} for line in ids]


def let_accelerate_shard_on_cpu() -> None:
    """accelerate refuses FSDP, and runs DeepSpeed with one process, where there is no accelerator."""
    import accelerate.state as state

    state.PartialState._prepare_backend = lambda *_, **__: (
        "gloo",
        state.DistributedType.MULTI_GPU,
    )
    state.PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))


def train_hf(
    kind: str,
    folder: pathlib.Path,
    url: str,
    log: Log,
    whole: Callable[[Any], dict[str, torch.Tensor]],
    **arguments: Any,
) -> None:
    """Two trainings: the second one resumes from the checkpoint of the first one."""
    let_accelerate_shard_on_cpu()
    import transformers
    from ema_client.transformers import EmaCallback

    transformers.training_args.is_torch_bf16_gpu_available = lambda: True

    source = arguments.pop("source", "parameters")

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            log_model(log, f"begin {state.global_step}", whole(model))

        def on_step_end(self, args, state, control, model=None, **kwargs):
            log_model(log, state.global_step, whole(model))

        def on_evaluate(self, args, state, control, model=None, metrics=None, **kwargs):
            log[f"evaluated {state.global_step}"] = np.array(metrics["eval_loss"])

    config = transformers.GPT2Config(
        **{"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 32, "n_positions": 8},
        **{"bos_token_id": 0, "eos_token_id": 0, "resid_pdrop": 0, "embd_pdrop": 0},
    )
    data = lines(8 * STEPS)
    for training in TRAININGS:
        is_first = training == "first"
        steps = SAVED if is_first else STEPS
        resumed = None if is_first else str(folder / kind / f"checkpoint-{SAVED}")
        torch.manual_seed(steps)
        trainer = transformers.Trainer(
            model=transformers.GPT2LMHeadModel(config),
            args=transformers.TrainingArguments(
                str(folder / kind),
                **{"max_steps": steps, "per_device_train_batch_size": 4, "learning_rate": 0.05},
                **{"save_strategy": "steps", "save_steps": SAVED},
                **{"eval_strategy": "steps", "eval_steps": SAVED, "report_to": "none"},
                **{"disable_tqdm": True, "dataloader_pin_memory": False, **arguments},
            ),
            train_dataset=data,
            eval_dataset=data[:8],
            callbacks=[
                Recorder(),
                EmaCallback(url, evaluate_with_average=True, source=source, **SCHEDULE),
            ],
            data_collator=transformers.default_data_collator,
        )
        if "fsdp1" in kind:
            # PyTorch crashes where accelerate gathers FSDP1's state_dict for rank 0 only, on a CPU.
            trainer.accelerator.get_state_dict = lambda model, **_: whole_state(model)
        trainer.train(resume_from_checkpoint=resumed)
        assert trainer.state.global_step == steps


def train_hf_fsdp1(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    fsdp = {
        **{"version": 1, "transformer_layer_cls_to_wrap": "GPT2Block"},
        "sync_module_states": False,  # It asks for a GPU.
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    train_hf(kind, folder, url, log, whole_state, fsdp=True, fsdp_config=fsdp)


def train_hf_fsdp2(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    fsdp = {
        **{"version": 2, "transformer_layer_cls_to_wrap": "GPT2Block"},
        "state_dict_type": "SHARDED_STATE_DICT",
    }
    train_hf(kind, folder, url, log, whole_state, fsdp=True, fsdp_config=fsdp)


def zero_config(stage: int, **options: Any) -> dict[str, Any]:
    return {
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        **options,
    }


def train_hf_zero3(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    train_hf(kind, folder, url, log, whole_zero, deepspeed=zero_config(3))


def train_hf_zero2(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    """In bfloat16, with the masters averaged."""
    config = zero_config(2, bf16={"enabled": True})
    train_hf(kind, folder, url, log, whole_zero, deepspeed=config, bf16=True, source="master")


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(6, 11)
        self.down = torch.nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(x)))


def train_accelerate(
    folder: pathlib.Path, url: str, log: Log, whole: Any, make_plugins: Callable[[], dict[str, Any]]
) -> None:
    """Two trainings: the second one loads the state that the first one has saved."""
    let_accelerate_shard_on_cpu()
    import accelerate
    from accelerate.state import AcceleratorState

    for first, last in ((0, SAVED), (SAVED, STEPS)):
        AcceleratorState._reset_state(reset_partial_state=True)
        plugins = make_plugins()
        accelerator = accelerate.Accelerator(**plugins)
        assert accelerator.num_processes == dist.get_world_size()
        torch.manual_seed(first)
        net = Small()
        if "fsdp_plugin" in plugins:  # FSDP1 makes other parameters.
            model = accelerator.prepare(net)
            optimizer = accelerator.prepare(torch.optim.Adam(model.parameters(), lr=0.05))
        else:  # DeepSpeed gets both at once.
            model, optimizer = accelerator.prepare(net, torch.optim.Adam(net.parameters(), lr=0.05))
        with ema_client.attach(model, optimizer, url, existing="continue", **SCHEDULE) as ema:
            accelerator.register_for_checkpointing(ema)
            if first > 0:
                accelerator.load_state(str(folder / "state"))
                log_model(log, f"begin {first}", whole(model))
            assert ema.step == first
            for batch in range(2 * first, 2 * last):
                with accelerator.accumulate(model):
                    loss = model(batch_of(batch, accelerator.process_index)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                assert ema.step == (batch + 1) // 2
                if batch % 2 == 1:
                    log_model(log, ema.step, whole(model))
            if last < STEPS:
                accelerator.save_state(str(folder / "state"))
    with ema_client.averaged(model, url):
        log_model(log, "averaged", whole(model))


def train_accelerate_fsdp1(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    import accelerate

    def make_plugins() -> dict[str, Any]:
        plugin = accelerate.FullyShardedDataParallelPlugin(
            **{"fsdp_version": 1, "auto_wrap_policy": "size_based_wrap", "min_num_params": 30},
            state_dict_type="SHARDED_STATE_DICT",
        )
        return {"fsdp_plugin": plugin, "gradient_accumulation_steps": 2}

    train_accelerate(folder / kind, url, log, whole_state, make_plugins)


def train_accelerate_zero3(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    import accelerate

    def make_plugins() -> dict[str, Any]:
        config = zero_config(3, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=2)
        return {"deepspeed_plugin": accelerate.DeepSpeedPlugin(hf_ds_config=config)}

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    whole = lambda engine: whole_zero(engine.module)  # noqa: E731
    train_accelerate(folder / kind, url, log, whole, make_plugins)
    del os.environ["ACCELERATE_USE_DEEPSPEED"]


def train_lightning(
    folder: pathlib.Path,
    url: str,
    log: Log,
    whole: Any,
    make_strategy: Callable[[], Any],
    make_first: Callable[[], Any] | None = None,
    shard: Callable[[Any, torch.nn.Module], None] = lambda *_: None,
) -> None:
    """Two fits of an epoch each: the second one resumes from the checkpoint of the first one, and so does a test.

    With ZeRO-3, Lightning's own `test` with a checkpoint fails: DeepSpeed 0.19 cannot load one without an optimizer.
    `make_first`: makes the strategy of the first fit. `shard`: called with the mesh and the network.
    """
    import lightning
    from ema_client.lightning import EMAWeightAveraging

    class Module(lightning.LightningModule):
        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                torch.manual_seed(0)
                self.net = Small()
                shard(self.device_mesh, self.net)

        def training_step(self, batch, index):
            return self.net(batch).square().mean()

        def validation_step(self, batch, index):
            self.log("score", self.net(batch).square().mean(), sync_dist=True)

        def test_step(self, batch, index):
            self.net(batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.05)

    class Recorder(lightning.Callback):
        def on_train_start(self, trainer, *_):
            log_model(log, f"begin {trainer.global_step}", whole(trainer.model))

        def on_test_epoch_end(self, trainer, *_):
            log_model(log, "tested", whole(trainer.model))

        def on_train_batch_end(self, trainer, *_):
            log_model(log, trainer.global_step, whole(trainer.model))

        def on_validation_epoch_end(self, trainer, *_):
            if not trainer.sanity_checking:
                log_model(log, f"averaged {trainer.global_step}", whole(trainer.model))

        def on_validation_end(self, trainer, *_):
            if not trainer.sanity_checking:
                log["score"] = trainer.callback_metrics["score"].numpy()

        def teardown(self, trainer, module, stage):  # After on_fit_end of all callbacks.
            if stage == "fit":
                log_model(log, "copied", whole(trainer.model))

    def make_trainer(strategy: Any, epochs: int) -> Any:
        saver = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_on_train_epoch_end=True)
        return lightning.Trainer(
            **{"max_epochs": epochs, "accelerator": "cpu", "devices": dist.get_world_size()},
            **{"logger": False, "enable_progress_bar": False, "enable_model_summary": False},
            **{"use_distributed_sampler": False, "val_check_interval": 6},
            strategy=strategy,
            callbacks=[Recorder(), EMAWeightAveraging(url, **SCHEDULE), saver],
        )

    batches = [batch_of(step, dist.get_rank()) for step in range(STEPS)]
    train_data = torch.utils.data.DataLoader(batches, batch_size=None)
    test_data = torch.utils.data.DataLoader(batches[:2], batch_size=None)
    first = make_trainer((make_first or make_strategy)(), 1)
    first.fit(Module(), train_data, test_data)
    checkpoint = first.checkpoint_callback.best_model_path
    second = make_trainer(make_strategy(), 2)
    second.fit(Module(), train_data, test_data, ckpt_path=checkpoint)
    assert second.global_step == 2 * STEPS
    if "zero" not in folder.name:
        tester = make_trainer((make_first or make_strategy)(), 2)
        tester.test(Module(), test_data, ckpt_path=checkpoint)


def train_lightning_ddp_fsdp1(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    """FSDP1 resumes from a checkpoint of DDP, in which the state_dict is the average."""
    from lightning.pytorch.strategies import DDPStrategy

    train_lightning_fsdp1(kind, folder, url, log, lambda: DDPStrategy(process_group_backend="gloo"))


def train_lightning_fsdp2(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def make_strategy() -> ModelParallelStrategy:
        ranks = dist.get_world_size()
        return ModelParallelStrategy(ranks, 1, process_group_backend="gloo")

    def shard(mesh: Any, net: torch.nn.Module) -> None:
        for part in (net.up, net.down):
            fully_shard(part, mesh=mesh["data_parallel"])
        fully_shard(net, mesh=mesh["data_parallel"])

    train_lightning(folder / kind, url, log, whole_state, make_strategy, shard=shard)


def train_lightning_fsdp1(
    kind: str,
    folder: pathlib.Path,
    url: str,
    log: Log,
    make_first: Callable[[], Any] | None = None,
) -> None:
    from lightning.pytorch.strategies import FSDPStrategy
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    class OnCpu(FSDPStrategy):
        """Lightning refuses FSDPStrategy itself without a GPU, and gives FSDP1 no device."""

        def _setup_model(self, model):
            with unittest.mock.patch.object(FullyShardedDataParallel, "__init__", init_on_cpu):
                return super()._setup_model(model)

    init = FullyShardedDataParallel.__init__

    def init_on_cpu(self, *args, device_id=None, **options):
        init(self, *args, device_id=torch.device("cpu"), **options)

    def make_strategy() -> FSDPStrategy:
        return OnCpu(
            auto_wrap_policy=ModuleWrapPolicy({torch.nn.Linear}),
            process_group_backend="gloo",
            # PyTorch crashes where Lightning gathers a "full" one for rank 0 only, on a CPU.
            state_dict_type="sharded",
        )

    train_lightning(folder / kind, url, log, whole_state, make_strategy, make_first)


def train_lightning_zero3(kind: str, folder: pathlib.Path, url: str, log: Log) -> None:
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class OnCpu(DeepSpeedStrategy):
        """Lightning refuses DeepSpeedStrategy itself without a GPU."""

        @property
        def root_device(self) -> torch.device:
            return torch.device("cpu", 0)  # DeepSpeed needs an index.

        def setup_environment(self) -> None:
            super(DeepSpeedStrategy, self).setup_environment()

        def setup_distributed(self) -> None:
            self.set_world_ranks()
            self._init_deepspeed_distributed()

    def make_strategy() -> DeepSpeedStrategy:
        config = zero_config(3, train_micro_batch_size_per_gpu=8)
        del config["gradient_accumulation_steps"]  # Lightning sets it.
        return OnCpu(config=config, process_group_backend="gloo")

    whole = lambda engine: whole_zero(engine.module)  # noqa: E731
    train_lightning(folder / kind, url, log, whole, make_strategy)


def main() -> None:
    rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    url, kinds = sys.argv[4], sys.argv[5:]
    os.environ.update(
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
        **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
        # As torchrun sets them; the group below exists already.
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"},
    )
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/init", rank=rank, world_size=world_size
    )
    if any("zero" in kind for kind in kinds):
        import deepspeed

        # It would compile this.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for kind in kinds:
        log: Log = {}
        name, _, training = kind.partition("-")
        TRAININGS[:] = [training] if training else ["first", "second"]
        globals()[f"train_{name}"](name, folder, f"{url}-{name}", log)
        np.savez(folder / f"{kind}.{rank}.npz", **log)
        print(f"{kind} done", flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
