# SPDX-License-Identifier: Apache-2.0
"""`EmaCallback` for Hugging Face's Trainer.

    >>> from ema_client.transformers import EmaCallback
    >>> average = EmaCallback("ema://host:50051/gpt", half_life="200ba")
    >>> trainer = transformers.Trainer(model, arguments, callbacks=[average], ...)

With accelerate alone, `ema_client.attach` takes what `Accelerator.prepare` returns.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._callbacks import (
    STATE_FILE,
    CallbackArguments,
    CallbackAverage,
    check_options,
    needs_only_batches,
    options_of_start,
    pull_timeout_s,
    state_in,
    write_state,
)
from ema_client._client.arrays import some
from ema_client._client.files import small_files
from ema_client._client.state import State
from ema_client._client.types import Version, VersionLike
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._evaluator.averaged import averaged
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import engine_of, has_pieces, named_tensors, unwrap
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

if TYPE_CHECKING:
    from typing_extensions import Unpack

    _TrainerCallback = object
else:
    from transformers import TrainerCallback as _TrainerCallback

_logger = logging.getLogger(__name__)

# A folder in the trainer's checkpoint: one folder for each saved average, as in the server's
# checkpoints. Not directly in the checkpoint, where Trainer takes a folder with a PEFT adapter for a
# further adapter of the model.
TRACKS_FOLDER = "tracks"


class _Arguments(CallbackArguments, total=False):
    decay: float | None
    device: Any
    use_buffers: bool


class EmaCallback(_TrainerCallback):
    """Keeps the average of a training on an EMA Server.

    Each checkpoint of the trainer has a folder tracks/ema with the average, which `from_pretrained`
    reads: "output/checkpoint-500/tracks/ema". The checkpoint itself has the raw weights, from which
    the trainer resumes. Its file ema_state.json identifies the average, which the server keeps on its
    disk; a training that resumes from the checkpoint also resumes that average. The server's
    checkpoints have the model's config and the tokenizer beside the weights, too.

    Times may be in batches ("200ba": optimizer steps), shares of the whole training ("0.1dur") and,
    if the data has a length, epochs ("2ep").

    With `deepspeed=` or `fsdp=`, each rank pushes and reads its own pieces. To save the average of a
    sharded model, rank 0 pulls all of it into host memory.

    Args:
        url: "ema://host:port/model".
        evaluate_with_average: evaluations and predictions during the training, also those that
            another callback starts, use the averaged weights of the last push. After each of them the
            model has its own weights again. False: they use the model's own weights. Before the
            average starts (ema_start), they use these, too, with a warning. A trainer whose `evaluate`
            does not call `evaluation_loop` is rejected: call `averaged()` in that method. With the
            trainer's load_best_model_at_end, the best checkpoint is the one with the best average, but
            its raw weights are loaded; a warning says so, unless copy_at_end=True replaces them.
        save_average: the trainer's checkpoints have the average in a folder, if it has started and
            can be read.
        copy_at_end: after the training the model has averaged weights, if the average has started;
            with load_best_model_at_end those of the best checkpoint, if the server still keeps them
            (see keep_resumable), else its own weights. False: its own weights.
        track: which average the model gets. None: the only one that is not a copy, else "ema".
        resume_from_checkpoint: the folder that the trainer resumes from, if that is neither
            args.resume_from_checkpoint nor in args.output_dir.
        log_statistics: logs for each track the norm of its average ("ema_norm") and that of the
            difference between the raw weights and the average ("ema_distance"), by `Trainer.log`, at
            each step at which the trainer logs something in the training. Adds a copy track "raw", if
            there is no copy track.
        arguments: of `ema_client.attach`, such as half_life, tracks, wire_dtype or on_error. With
            files={}, the server's checkpoints have no files beside the weights. With on_error
            "skip", the default, an unreachable server causes a warning: the model is then evaluated
            with its own weights.

    Raises:
        TypeError: an option that `attach` does not have.
        InvalidArgumentError: an argument is wrong.
        EmaError: in the training: as `attach`.

    Example:
        >>> average = EmaCallback("ema://host:50051/gpt", half_life="200ba", tracks={"raw": "copy"})
        >>> trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[average])
        >>> trainer.train()
        >>> with average.averaged():
        ...     trainer.evaluate()
    """

    def __init__(
        self,
        url: str,
        *,
        evaluate_with_average: bool = False,
        save_average: bool = True,
        copy_at_end: bool = False,
        track: str | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
        log_statistics: bool = False,
        **arguments: Unpack[_Arguments],
    ) -> None:
        check_options(type(self).__name__, arguments)
        self._average = CallbackAverage(url, arguments, track=track, logs_statistics=log_statistics)
        self._evaluates = evaluate_with_average
        self._saves_average = save_average
        self._copies_at_end = copy_at_end
        self._resume_folder = resume_from_checkpoint
        self._model: Any = None
        # The checkpoint that the trainer has loaded at the end of a training, and its average's state,
        # or why it has none.
        self._best: tuple[str, Mapping[str, Any] | str] | None = None
        # Removes the hook that an evaluation calls when it begins.
        self._hooked = contextlib.ExitStack()
        self._has_evaluated = False

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, while a training runs: its `stats`, its newest `version`."""
        return self._average.attachment

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Version]:
        """Puts averages into the trainer's model, as `ema_client.averaged` with our options: those
        of the last push; after the training those of the newest version, or with the trainer's
        load_best_model_at_end those of the checkpoint that it has loaded.

        Raises:
            FailedPreconditionError: no training has begun; or the loaded checkpoint does not identify
                its average.
            EmaError: no average can be read; nothing was changed.
        """
        if self._model is None:
            raise FailedPreconditionError(
                "no training has begun: use ema_client.averaged(model, url)", reason="BAD_REQUEST"
            )
        average = self._average
        version: VersionLike | None = None
        if average.attachment is not None:
            version = average.attachment.wait_pushed()
        elif self._best is not None:
            folder, saved = self._best
            if isinstance(saved, str):
                raise FailedPreconditionError(
                    f"{folder}: its {STATE_FILE} does not say what the average of these weights is: "
                    f"{saved}: use ema_client.averaged(model, url, version=...)",
                    reason="NO_VERSION",
                )
            version = saved
        with averaged(
            self._model,
            average.url,
            track=average.track,
            version=version,
            rename=average.options.get("rename"),
            process_group=average.options.get("process_group"),
            must_exist=True,
            timeout_s=pull_timeout_s(average.options),
        ) as record:
            yield record

    def close(self) -> None:
        """After a failed training: closes the attachment, and restores the model's own weights."""
        self._hooked.close()
        self._average.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            # The trainer has loaded a checkpoint's weights over those of a failed training.
            self._average.own.drop()
        is_retry = self.attachment is not None and self._model is kwargs["model"]
        self.close()
        if self._evaluates and args.load_best_model_at_end and not self._copies_at_end:
            _logger.warning(
                "load_best_model_at_end: the best checkpoint is chosen by its average, and then its own "
                "weights are loaded: EmaCallback(..., copy_at_end=True) puts its average into the model"
            )
        self._model = kwargs["model"]
        self._best = None
        given = self._average.options
        defaults: dict[str, Any] = {}
        if not needs_only_batches(given):
            defaults["time"] = _time_of(args, state, kwargs.get("train_dataloader"))
        if "files" not in given:
            defaults["files"] = _files_of(self._model, kwargs.get("processing_class"))
        options = options_of_start(given, step=state.global_step, resume=self._saved(args, state))
        if is_retry and options.get("existing") is None:
            # The trainer keeps the weights of the failed training, as auto_find_batch_size does.
            options["existing"] = "continue"
        if self._saves_average and options.get("rename") is not None and has_pieces(self._model):
            raise InvalidArgumentError(
                "rename: the average of a sharded model is saved under the names on the server, and "
                "from_pretrained needs the model's: give save_average=False, or no rename"
            )
        self._average.attachment = attach(
            _engine_or(self._model),
            kwargs["optimizer"],
            self._average.url,
            **{**defaults, **options},
        )
        if self._evaluates:
            self._has_evaluated = False
            self._hook(kwargs["optimizer"])

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # `log` calls this again, and then there are no values for this step.
        if state.is_world_process_zero and (values := self._average.statistics(state.global_step)):
            _trainer_that_calls().log(values)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # After an evaluation that has raised an exception.
        self._average.swap_out()

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.attachment is not None and args.load_best_model_at_end:
            # After the last epoch, the trainer may write the weights without waiting for a push.
            self.attachment.wait_released()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._average.swap_out()
        if self._evaluates and self.attachment is not None and not self._has_evaluated:
            raise InvalidArgumentError(
                "evaluate_with_average: the trainer evaluated the model's own weights, because its "
                "`evaluate` did not call Trainer.evaluation_loop: let it evaluate within "
                "EmaCallback.averaged(), and do not give evaluate_with_average"
            )

    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._average.swap_out()

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.attachment is None:
            return
        folder: pathlib.Path | None = None
        if state.is_world_process_zero:
            folder = _checkpoint_folder(args, state)
            if not folder.is_dir():
                _logger.warning(
                    "%s: no such checkpoint of the trainer, so %s is not saved", folder, STATE_FILE
                )
                folder = None
        if folder is not None:  # It may be that of an earlier training.
            (folder / STATE_FILE).unlink(missing_ok=True)
            shutil.rmtree(folder / TRACKS_FOLDER, ignore_errors=True)
        if self._saves_average:
            self._save_average(folder, kwargs.get("processing_class"))
        if folder is not None and (average := self._average.saved_state()) is not None:
            write_state(folder, state.global_step, average)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._average.swap_out()
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._best = self._find_best(state.best_model_checkpoint)
        try:
            if self._copies_at_end and self.attachment is not None:
                self._copy_at_end()
        finally:
            self.close()

    def _copy_at_end(self) -> None:
        version: Mapping[str, Any] | None = None
        if self._best is not None:
            folder, saved = self._best
            if isinstance(saved, str):
                _logger.warning(
                    "the model keeps the weights of %s, as its %s does not say what their average is: %s",
                    folder,
                    STATE_FILE,
                    saved,
                )
                return
            version = saved
        self._average.copy_or_own(self._model, version=version)

    def _find_best(self, folder: str) -> tuple[str, Mapping[str, Any] | str]:
        """A checkpoint, and the state of its average, or why there is none. Rank 0's, on all ranks:
        others may not see the folder."""
        ranks = Ranks.current(self._average.options.get("process_group"))
        result: Mapping[str, Any] | str = "there is no such file that can be read"
        if ranks.rank == 0 and (saved := state_in(pathlib.Path(folder))) is not None:
            try:
                State.from_dict(saved["average"], model=self._average.model_name)
                result = saved["average"]
            except InvalidArgumentError as error:  # Of a training of another model.
                result = str(error)
        best: tuple[str, Mapping[str, Any] | str] = ranks.broadcast((folder, result))
        return best

    def _hook(self, optimizer: Any) -> None:
        """Makes each evaluation call `_begin_evaluation`, also one that other code has started: Trainer's
        evaluation_loop calls `optimizer.eval()`, for optimizers that evaluate other weights."""
        before = vars(optimizer).get("eval")
        evaluate = getattr(optimizer, "eval", None)

        def begin() -> None:
            if evaluate is not None:
                evaluate()
            self._begin_evaluation()

        def unhook() -> None:
            if before is None:
                vars(optimizer).pop("eval", None)
            else:
                optimizer.eval = before

        optimizer.eval = begin
        self._hooked.callback(unhook)

    def _begin_evaluation(self) -> None:
        self._has_evaluated = True
        attachment = self.attachment
        # With eval_on_start, the first evaluation comes before the first push.
        is_at_start = attachment is None or (attachment.version is None and attachment.step == 0)
        if not (self._average.own or is_at_start):
            self._average.swap_in(self._model)

    def _save_average(self, folder: pathlib.Path | None, processing_class: Any) -> None:
        """Saves the average as `from_pretrained` reads it. Collective; only rank 0 has a folder."""
        if has_pieces(self._model):
            self._save_whole_average(folder, processing_class)
            return
        with self._average.averaged_or_own(self._model, doing="saving") as version:
            if version is None or folder is None:
                return
            target = folder / TRACKS_FOLDER / self._average.track_name()
            _save_model(unwrap(self._model), processing_class, target)

    def _save_whole_average(self, folder: pathlib.Path | None, processing_class: Any) -> None:
        """The same for a model of which each rank has pieces."""
        weights = self._average.whole(self._model)
        # On all ranks: it may communicate.
        names = named_tensors(unwrap(self._model)).all().keys()
        if weights is None or folder is None:
            return
        if lacking := sorted(names - weights.keys()):
            _logger.warning(
                "the saved average lacks tensors that the track ignores, of a sharded model: %s",
                some(lacking),
            )
        target = folder / TRACKS_FOLDER / self._average.track_name()
        _save_model(unwrap(self._model), processing_class, target, dict(weights))

    def _saved(self, args: Any, state: Any) -> dict[str, Any] | None:
        """The average's state in the trainer's checkpoint, as rank 0 reads it, on all ranks."""
        if state.global_step == 0:
            return None
        ranks = Ranks.current(self._average.options.get("process_group"))
        average: dict[str, Any] | None = None
        failure: Exception | None = None
        try:
            if ranks.rank == 0:
                average = self._read_saved(args, state)
        except Exception as raised:  # The other ranks wait for the result.
            failure = raised
        return ranks.gather_or_raise(failure, average)[0]

    def _read_saved(self, args: Any, state: Any) -> dict[str, Any] | None:
        folders = [_checkpoint_folder(args, state)]
        # Trainer also takes True: the last one in output_dir.
        if isinstance(args.resume_from_checkpoint, (str, os.PathLike)):
            folders.insert(0, pathlib.Path(args.resume_from_checkpoint))
        if self._resume_folder is not None:
            folders = [pathlib.Path(self._resume_folder)]
        for folder in folders:
            saved = state_in(folder)
            if saved is not None and saved["global_step"] == state.global_step:
                average: dict[str, Any] = saved["average"]
                return average
        _logger.warning(
            "the trainer resumes at step %d, but there is no %s of that step in %s: the average continues "
            "from its newest version",
            state.global_step,
            STATE_FILE,
            " or ".join(map(str, folders)),
        )
        return None


def _engine_or(model: Any) -> Any:
    """DeepSpeed's engine, if the trainer that has called a callback uses one; else the model. The
    trainer gives callbacks the model inside the engine."""
    with contextlib.suppress(FailedPreconditionError):
        wrapped = _trainer_that_calls().model_wrapped
        return model if engine_of(wrapped) is None else wrapped
    return model


def _trainer_that_calls() -> Any:
    """The trainer that has called a callback. It passes itself to none of them, and those of
    TensorBoard and W&B come before others, which cannot add to what these log."""
    from transformers import Trainer

    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
        frame = frame.f_back
    if frame is None:
        raise FailedPreconditionError("log_statistics: only Trainer.log may call on_log")
    return frame.f_locals["self"]


def _checkpoint_folder(args: Any, state: Any) -> pathlib.Path:
    return pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _files_of(model: Any, processing_class: Any) -> dict[str, bytes]:
    """The files beside the weights in a folder that `from_pretrained` reads."""
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            config = copy.deepcopy(model.config)
            # FSDP1's wrapper has the model, and fully_shard puts "FSDP" before the name of its class.
            inner = getattr(model, "_fsdp_wrapped_module", model)
            config.architectures = [type(inner).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
        if getattr(model, "generation_config", None) is not None:
            try:
                model.generation_config.save_pretrained(folder)
            except ValueError as error:  # Training works all the same.
                _logger.warning(
                    "the server's checkpoints have no generation_config.json: %s", error
                )
        if hasattr(processing_class, "save_pretrained"):
            processing_class.save_pretrained(folder)
        return small_files(folder)


def _save_model(
    model: Any,
    processing_class: Any,
    folder: pathlib.Path,
    weights: dict[str, Any] | None = None,
) -> None:
    """Writes what Trainer writes for a model into its checkpoints. `weights`: None: the model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    else:
        from safetensors.torch import save_file

        weights = model.state_dict() if weights is None else weights
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)


def _time_of(args: Any, state: Any, batches: Any) -> Callable[[int], dict[str, float]]:
    """The `time` for `attach`, which is called before the trainer has counted the step."""
    steps_per_epoch = 0
    with contextlib.suppress(TypeError):  # An iterable without a length.
        steps_per_epoch = max(1, math.ceil(len(batches) / args.gradient_accumulation_steps))

    def time(step: int) -> dict[str, float]:
        done = state.global_step + 1
        now: dict[str, float] = {"batch": step}
        if state.max_steps > 0:
            now["progress"] = min(1.0, done / state.max_steps)
        if steps_per_epoch > 0:
            now["epoch"] = done // steps_per_epoch
        return now

    return time
