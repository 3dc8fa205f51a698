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
import json
import logging
import math
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ema_client._callbacks import (
    averaged_or_own,
    check_options,
    check_tracks,
    copy_average_or_own,
    needs_only_batches,
    options_of_start,
    pull_patience_s,
    saved_state,
)
from ema_client._client.files import small_files
from ema_client._client.state import State
from ema_client._client.types import Version
from ema_client._client.url import split_url
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._evaluator.averaged import OwnValues, averaged
from ema_client._model.ranks import Ranks
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

if TYPE_CHECKING:
    _TrainerCallback = object
else:
    from transformers import TrainerCallback as _TrainerCallback

_logger = logging.getLogger(__name__)

# A file in the trainer's checkpoint: the trainer's step, and a result of `Attachment.state_dict`.
STATE_FILE = "ema_state.json"


class EmaCallback(_TrainerCallback):
    """Keeps the average of a training on an EMA Server.

    Each checkpoint of the trainer has a file ema_state.json, which identifies its average; the
    server keeps that on its disk. A training that resumes from the checkpoint also resumes that
    average. The server's checkpoints have the model's config and the tokenizer beside the weights,
    so that `from_pretrained` reads each track's folder.

    Times may be in batches ("200ba": optimizer steps), shares of the whole training ("0.1dur") and,
    if the data has a length, epochs ("2ep"). The weights must be whole on every rank: one process
    or DDP.

    Args:
        url: "ema://host:port/model".
        evaluate_with_average: evaluations during the training use the averaged weights of the last
            push; the model has its own again before it saves a checkpoint. False: its own. Before
            the average starts (ema_start) also its own, with a warning. Not with several
            eval_datasets: for these, override the trainer's `evaluate` with one that calls it
            within `averaged()`. With the trainer's load_best_model_at_end, the best checkpoint is
            the one with the best average, but its raw weights are loaded; a warning says so, unless
            copy_at_end=True replaces them.
        copy_at_end: after the training the model has averaged weights, if the average has started;
            with load_best_model_at_end those of the best checkpoint, if the server still keeps them
            (see keep_resumable), else its own. False: its own.
        track: which average the model gets. None: the only one that is not a copy, else "ema".
        resume_from_checkpoint: the folder that the trainer resumes from, if that is neither
            args.resume_from_checkpoint nor in args.output_dir.
        options: of `ema_client.attach`, such as half_life, tracks, wire_dtype or on_error. With
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
        copy_at_end: bool = False,
        track: str | None = None,
        resume_from_checkpoint: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, options)
        check_tracks(options)
        self._model_name = split_url(url)[1]
        self._url = url
        self._options = options
        self._evaluates = evaluate_with_average
        self._copies_at_end = copy_at_end
        self._track = track
        self._resume_folder = resume_from_checkpoint
        self._model: Any = None
        self._attachment: Attachment | None = None
        # Puts the model's own weights back, which `_own` keeps.
        self._swapped = contextlib.ExitStack()
        self._own = OwnValues()
        self._is_evaluating = False

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, while a training runs: its `stats`, its newest `version`."""
        return self._attachment

    @contextlib.contextmanager
    def averaged(self) -> Iterator[Version]:
        """Puts averages into the trainer's model, as `ema_client.averaged` with our options: those
        of the last push, or after the training those of the newest version.

        Raises:
            FailedPreconditionError: no training has begun.
            EmaError: no average can be read; nothing was changed.
        """
        if self._model is None:
            raise FailedPreconditionError(
                "no training has begun: use ema_client.averaged(model, url)", reason="BAD_REQUEST"
            )
        pushed = None if self._attachment is None else self._attachment.wait_pushed()
        with averaged(
            self._model,
            self._url,
            track=self._track,
            version=pushed,
            rename=self._options.get("rename"),
            process_group=self._options.get("process_group"),
            timeout_s=pull_patience_s(self._options),
        ) as version:
            yield version

    def close(self) -> None:
        """After a failed training: closes the attachment, and restores the model's own weights."""
        self._swapped.close()
        if self._attachment is not None:
            self._attachment.close()
            self._attachment = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > 0:
            # The trainer has loaded a checkpoint's weights over those of a failed training.
            self._own.drop()
        self.close()
        if self._evaluates and args.load_best_model_at_end and not self._copies_at_end:
            _logger.warning(
                "load_best_model_at_end: the best checkpoint is chosen by its average, and then its own "
                "weights are loaded: EmaCallback(..., copy_at_end=True) puts its average into the model"
            )
        self._model = kwargs["model"]
        defaults: dict[str, Any] = {}
        if not needs_only_batches(self._options):
            defaults["time"] = _time_of(args, state, kwargs.get("train_dataloader"))
        if "files" not in self._options:
            defaults["files"] = _files_of(self._model, kwargs.get("processing_class"))
        options = options_of_start(
            self._options, step=state.global_step, resume=self._saved(args, state)
        )
        self._attachment = attach(
            self._model, kwargs["optimizer"], self._url, **{**defaults, **options}
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # After an evaluation that another callback has cancelled.
        self._swapped.close()
        self._is_evaluating = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._swap_in_before_evaluation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attachment is not None and args.load_best_model_at_end:
            # After the last epoch, the trainer may write the weights without waiting for a push.
            self._attachment.wait_released()
        self._swap_in_before_evaluation(control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        self._swapped.close()
        is_ours, self._is_evaluating = self._is_evaluating, False
        if is_ours and "eval_runtime" not in metrics:
            raise InvalidArgumentError(
                "evaluate_with_average: not with several eval_datasets, as all but the first would be "
                "evaluated with the model's own weights: override Trainer.evaluate with one that calls it "
                "within EmaCallback.averaged()"
            )

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attachment is None or not state.is_world_process_zero:
            return
        folder = _checkpoint_folder(args, state)
        if not folder.is_dir():
            _logger.warning(
                "%s: no such checkpoint of the trainer, so %s is not saved", folder, STATE_FILE
            )
            return
        average = saved_state(self._attachment, self._options)
        if average is not None:
            text = json.dumps({"global_step": state.global_step, "average": average}, indent=2)
            new = folder / f"{STATE_FILE}.new"
            new.write_text(text + "\n")
            new.replace(folder / STATE_FILE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # If an expected evaluation was not made, the average is still in the model.
        self._swapped.close()
        try:
            if self._copies_at_end and self._attachment is not None:
                self._copy_at_end(self._attachment, args, state)
        finally:
            self.close()

    def _copy_at_end(self, attachment: Attachment, args: Any, state: Any) -> None:
        label: str | None = None
        if args.load_best_model_at_end:
            ranks = Ranks.current(self._options.get("process_group"))
            best: str | None = state.best_model_checkpoint
            saved = None if best is None or ranks.rank != 0 else _saved_in(pathlib.Path(best))
            # Other ranks may not see the folder.
            best, saved = ranks.broadcast((best, saved))
            problem: object = "there is no such file that can be read"
            try:
                if saved is not None:
                    label = State.from_dict(saved["average"], model=self._model_name).label
            except InvalidArgumentError as error:  # Of a training of another model.
                problem = error
            if label is None and best is not None:
                _logger.warning(
                    "the model keeps the weights of %s, as its %s does not say what their average is: %s",
                    best,
                    STATE_FILE,
                    problem,
                )
                return
        copy_average_or_own(
            self._model, self._url, attachment, self._options, track=self._track, version=label
        )

    def _swap_in_before_evaluation(self, control: Any) -> None:
        if self._evaluates and control.should_evaluate:
            swap = averaged_or_own(
                self._model,
                self._url,
                self._attachment,
                self._options,
                track=self._track,
                own=self._own,
            )
            self._swapped.enter_context(swap)
            self._is_evaluating = True

    def _saved(self, args: Any, state: Any) -> dict[str, Any] | None:
        """The average's state in the trainer's checkpoint, as rank 0 reads it, on all ranks."""
        if state.global_step == 0:
            return None
        ranks = Ranks.current(self._options.get("process_group"))
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
            saved = _saved_in(folder)
            if saved is not None and saved["global_step"] == state.global_step:
                average: dict[str, Any] = saved["average"]
                return average
        _logger.warning(
            "the trainer resumes at step %d, but there is no %s of that step in %s: the average goes on "
            "from its newest version",
            state.global_step,
            STATE_FILE,
            " or ".join(map(str, folders)),
        )
        return None


def _checkpoint_folder(args: Any, state: Any) -> pathlib.Path:
    return pathlib.Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _saved_in(folder: pathlib.Path) -> dict[str, Any] | None:
    """The contents of a checkpoint's ema_state.json. None: there is no readable file."""
    try:
        saved = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(saved, dict) and {"global_step", "average"} <= saved.keys()
    return saved if is_ours else None


def _files_of(model: Any, processing_class: Any) -> dict[str, bytes]:
    """The files beside the weights in a folder that `from_pretrained` reads."""
    with tempfile.TemporaryDirectory() as folder:
        if hasattr(getattr(model, "config", None), "save_pretrained"):
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
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
