# SPDX-License-Identifier: Apache-2.0
"""MosaicML Composer's `EMA` with the average on an EMA Server. Imports composer.

>>> from ema_client.composer import EMA
>>> trainer = Trainer(..., algorithms=[EMA(half_life="1000ba", url="ema://host:50051/digits")])
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from composer import algorithms
from composer.algorithms.ema.ema import EMAParameters
from composer.callbacks import CheckpointSaver
from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger

from ema_client._callbacks import (
    check_options,
    check_tracks,
    options_of_start,
    call_timeout_s,
    pull_timeout_s,
    raises,
    saved_state,
    warn_of_newest,
)
from ema_client._client import arrays
from ema_client._client.mode import is_disabled
from ema_client._client.read import connect
from ema_client._client.training_time import TrainingTime
from ema_client._client.types import Version, VersionLike, Weights
from ema_client._client.url import split_url
from ema_client._errors import EmaError, FailedPreconditionError, InvalidArgumentError, failure_of
from ema_client._evaluator.averaged import OwnValues, swapped, write_average
from ema_client._evaluator.started import awaited_start
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import check_no_ranges, named_tensors, unwrap, write
from ema_client._tracks import presets
from ema_client._tracks.track import Track
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.same_version import pull_on_all_ranks

_logger = logging.getLogger(__name__)

_TRACK = "ema"
# Arguments of `attach` that this class sets itself.
_OWN = ("preset", "start_step", "time", "resume")
_CHECKPOINTS = (Event.BATCH_CHECKPOINT, Event.EPOCH_CHECKPOINT, Event.ITERATION_CHECKPOINT)
# Events by which the training has its own weights again after an evaluation or a checkpoint.
_TRAINING = (
    *(Event.FIT_START, Event.BATCH_START, Event.EPOCH_END, Event.ITERATION_END),
    *(Event.EVAL_END, Event.FIT_END),
)


class EMA(Algorithm):
    """Streams the weights of a `composer.Trainer` to an EMA Server, and evaluates with their average.

    Takes the arguments of `composer.algorithms.EMA`, and counts as it does: pushes at the end of a
    batch, or of an epoch if update_interval is in epochs. `Track.preset` lists how the numbers
    differ. After ema_start, evaluations use the averaged weights, also `trainer.eval()` after
    training: all ranks wait for the pending push, and use the same version. If it cannot be read,
    evaluations during training use the training weights, with a warning, if on_error is "skip". The
    average is in the trainer's memory only during evaluations and while a checkpoint is saved.

    As with Composer, the model in a checkpoint has the averaged weights after ema_start, and the
    algorithm's state has the training weights, with which a trainer with `load_path` continues. The
    checkpoint also identifies its average, which the server keeps on its disk (without a --data-dir
    it cannot, and a warning says so), and from which the average continues.

    Must not be combined with `composer.algorithms.SWA`, which averages the weights and writes them into
    the model itself, nor with Composer's own EMA, which swaps them at the same events.

    Args:
        half_life, smoothing, ema_start, update_interval: as for `composer.algorithms.EMA`.
        url: "ema://host:port/model".
        save_average: the model in a checkpoint has the averaged weights, if they can be read; else
            the training weights, with a warning. False: the training weights.
        options: of `ema_client.attach`, such as tracks (more averages), wire_dtype, on_error, max_wait_s.

    Raises:
        InvalidArgumentError: an argument is wrong.
        TypeError: there is no such option.

    Example:
        >>> average = EMA(half_life="1000ba", update_interval="10ba", url="ema://host:50051/digits")
        >>> trainer = Trainer(model=model, optimizers=optimizer, algorithms=[average], ...)
    """

    def __init__(
        self,
        half_life: str | None = presets.UNSET,
        smoothing: float | None = None,
        ema_start: str = "0.0dur",
        update_interval: str | None = None,
        *,
        url: str,
        save_average: bool = True,
        **options: Any,
    ) -> None:
        check_options(type(self).__name__, options, own=_OWN)
        self._preset: dict[str, Any] = {
            "preset": "composer",
            "smoothing": smoothing,
            "ema_start": ema_start,
            "update_interval": update_interval,
        }
        if half_life is not presets.UNSET:
            self._preset["half_life"] = half_life
        track = Track.preset(
            "composer", **{name: self._preset[name] for name in self._preset if name != "preset"}
        )
        check_tracks({**options, "preset": self._preset})
        #: The share of the average that each update keeps, as Composer's.
        self.smoothing = track.smoothing
        is_by_epoch = str(track.update_interval).endswith("ep")
        self._update_event = Event.EPOCH_END if is_by_epoch else Event.BATCH_END
        self._start = Time.from_timestring(ema_start)
        self._saves_average = save_average
        self._address, self._model_name = split_url(url)
        self._url = url
        self._options = options
        #: ema_start has been reached, as Composer's.
        self.ema_started = False
        self._model: torch.nn.Module | None = None
        self._resume: dict[str, Any] | None = None
        self._attachment: Attachment | None = None
        # The last version of the closed attachment, for later evaluations.
        self._last: Version | None = None
        # Pulled once for all evaluators of an evaluation.
        self._pulled: Weights | None = None
        # Holds the model's own weights while it has the averaged ones.
        self._swap: contextlib.ExitStack | None = None
        self._own = OwnValues()
        # From a loaded checkpoint whose averaged weights are still in the model: the training weights.
        self._training: dict[str, torch.Tensor] | None = None

    @property
    def ema_weights_active(self) -> bool:
        """The trainer's model has the averaged weights now, as Composer's."""
        return self._swap is not None or self._training is not None

    @property
    def ema_model(self) -> EMAParameters | None:
        """The averages of the last push in a new object of Composer's class, pulled at each use; before
        ema_start, and if EMA_MODE is "disabled", the training weights. Buffers that are not in the model's
        state_dict have the model's values. None: no trainer has this algorithm yet."""
        if self._model is None:
            return None
        named = named_tensors(unwrap(self._model))
        values = self._pull_alone() if self._has_average() else named.all()
        result = EMAParameters(None)
        result.named_parameters_dict = {
            name: values[name].detach().clone()
            for name, parameter in named.parameters.items()
            if parameter.requires_grad and name in values
        }
        buffers = {name: values[name] for name in named.buffers if name in values}
        buffers |= self._unsaved_buffers()
        result.named_buffers_dict = {
            name: value.detach().clone() for name, value in buffers.items()
        }
        return result

    def get_ema_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Writes the averages of the last push into a model of the same names, and returns it. Before
        ema_start, and if EMA_MODE is "disabled", the training weights.

        Raises:
            InvalidArgumentError: the trainer's model has the averages now; or the model does not
                match, and was not changed.
            EmaError: the pull failed.
        """
        if self.ema_weights_active:
            raise InvalidArgumentError("get_ema_model: the trainer's model has the averages now")
        if self._has_average():
            weights = self._pull_alone()
            ignored = self._ignored(weights)
            write_average(model, "model", weights, weights.aliases, ignored=ignored)
        elif self._model is not None:
            write_average(model, "model", named_tensors(unwrap(self._model)).all(), {})
        return model

    def get_training_model(self, model: torch.nn.Module) -> torch.nn.Module:
        """Writes the training weights into a model of the same names, and returns it.

        Raises:
            InvalidArgumentError: the trainer's model has the training weights now; or the model does
                not match, and was not changed.
        """
        if not self.ema_weights_active:
            raise InvalidArgumentError(
                "get_training_model: the trainer's model has the training weights now"
            )
        write_average(model, "model", self._training_weights(), {})
        return model

    @property
    def attachment(self) -> Attachment | None:
        """The attachment; None before `fit`, and after `close`."""
        return self._attachment

    def close(self) -> None:
        """Waits for the last push, and closes the attachment. Call it after `trainer.fit`, or not
        at all. A later `fit` attaches again."""
        self._swap_out()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
            self._last = attachment.version

    def match(self, event: Event, state: State) -> bool:
        if event in _CHECKPOINTS:
            return self._swap is not None or self._is_saved(event, state)
        if event in (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END):
            return self._pulled is not None
        return event in (
            Event.INIT,
            Event.FIT_START,
            self._update_event,
            Event.EVAL_START,
            Event.FIT_END,
        ) or (event in _TRAINING and self._swap is not None)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event in _TRAINING:
            self._swap_out()
        if event == Event.INIT:
            _check_others(state)
            self._model = state.model
        elif event == Event.FIT_START:
            _check_others(state)
            self._attach(state)
        elif event == self._update_event:
            self.ema_started = self.ema_started or self._should_start(state)
            assert self._attachment is not None
            self._attachment._count(state.timestamp.batch.value)
        elif event == Event.EVAL_START:
            self._swap_in(state)
        elif event == Event.FIT_END:
            self._end_fit()
        elif event in (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END):
            self._pulled = None
        elif event in _CHECKPOINTS:
            self._swap_out()  # After an evaluation that has failed.
            if self._is_saved(event, state):
                self._pulled = None
                self._swap_in(state, doing="saving")
                self._pulled = None

    def state_dict(self) -> dict[str, Any]:
        """Identifies the average that belongs to the trainer's checkpoint; the server saves it. While the
        model has the averaged weights, the state has the training weights where Composer's has them.
        """
        state: dict[str, Any] = super().state_dict()
        state |= {
            "ema_started": self.ema_started,
            "ema_weights_active": self.ema_weights_active,
            "average": self._resume,
        }
        if self.ema_weights_active:
            assert self._model is not None
            weights, buffers = self._training_weights(), named_tensors(unwrap(self._model)).buffers
            state["ema_model"] = {
                "named_parameters_dict": {n: weights[n] for n in weights if n not in buffers},
                "named_buffers_dict": {
                    **{n: weights[n] for n in weights if n in buffers},
                    **self._unsaved_buffers(),
                },
            }
        if self._attachment is not None:
            state["average"] = saved_state(self._attachment, self._options)
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Loads a result of `state_dict`; the next `fit` continues from it.

        Raises:
            InvalidArgumentError: the state is of Composer's own EMA.
        """
        if "average" not in state:
            raise InvalidArgumentError(
                "the checkpoint is of Composer's own EMA, and its model may have averaged weights: load "
                "it with composer.algorithms.EMA, and save the training weights"
            )
        self.ema_started = bool(state["ema_started"])
        self._resume = state["average"]
        self._training = None
        if state["ema_weights_active"]:
            own, unsaved = state["ema_model"], self._unsaved_buffers()
            weights = {**own["named_parameters_dict"], **own["named_buffers_dict"]}
            self._training = {n: weights[n] for n in weights if n not in unsaved}

    def _attach(self, state: State) -> None:
        check_no_ranges(state.model)
        self._model = state.model
        if self._training is not None:
            named = named_tensors(unwrap(state.model)).all()
            own, self._training = self._training, None
            places = ("in the checkpoint", "in the model")
            arrays.check_names("training weights", expected=named, given=own, places=places)
            write((tensor, own[name]) for name, tensor in named.items())
        batch = state.timestamp.batch.value
        attachment = self._attachment
        if attachment is not None and attachment.module is not unwrap(state.model):
            attachment.close()
            self._attachment = attachment = None
        if attachment is not None and attachment.step > batch:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the trainer is at batch {batch}, but has pushed batch '
                f"{attachment.step}: the average cannot go back; use another model for each training",
                reason="RESUME_MISMATCH",
            )
        if attachment is not None:
            return
        if self._resume is None and self._last is None and batch > 0:
            warn_of_newest(batch)
        attachment = attach(
            state.model,
            state.optimizers[0],
            self._url,
            preset=self._preset,
            start_step=batch if self._resume is None else None,
            time=lambda _: _time_of(state),
            **options_of_start(self._options, step=batch, resume=self._resume),
        )
        attachment._count_by_hand()
        if attachment.version is not None and attachment.version.step > batch:
            attachment.close()
            raise FailedPreconditionError(
                f'model "{self._model_name}" has step {attachment.version.step} already, and the trainer '
                f"is at batch {batch}: load the trainer's checkpoint of then, delete the model, or choose "
                "another name",
                reason="RESUME_MISMATCH",
            )
        self._attachment, self._resume = attachment, None

    def _is_saved(self, event: Event, state: State) -> bool:
        """Whether the averages shall be in a checkpoint that is saved at this event."""
        return (
            self._saves_average
            and self.ema_started
            and any(
                isinstance(saver, CheckpointSaver) and saver.save_interval(state, event)
                for saver in state.callbacks
            )
        )

    def _has_average(self) -> bool:
        """Whether there is an average to evaluate and save, in place of the training weights."""
        return self.ema_started and not is_disabled(self._url)

    def _should_start(self, state: State) -> bool:
        if self._start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and bool(self._start <= elapsed)
        return bool(self._start.value <= state.timestamp.get(self._start.unit).value)

    def _swap_in(self, state: State, *, doing: str = "evaluating") -> None:
        if self.ema_weights_active or not self._has_average():
            return
        try:
            if self._pulled is None:
                self._pulled = self._pull()
            weights = self._pulled
            start = awaited_start(weights.version, _TRACK)
            if start is not None:  # The push that began the average was skipped.
                raise FailedPreconditionError(
                    f"the newest version is from before ema_start, {start}", reason="NO_VERSION"
                )
            stack = contextlib.ExitStack()
            stack.enter_context(
                swapped(
                    state.model,
                    f'model "{self._model_name}"',
                    weights,
                    weights.aliases,
                    ignored=self._ignored(weights),
                    own=self._own,
                    ranks=self._ranks(),
                )
            )
            self._swap = stack
        except Exception as raised:  # No memory for the model's own values, for example.
            error = failure_of(raised)
            if self._attachment is None or raises(self._options):
                raise error
            _logger.warning(
                'model "%s": %s the training weights, without the average: %s',
                self._model_name,
                doing,
                error,
            )

    def _ranks(self) -> Ranks:
        return Ranks.current(self._options.get("process_group"))

    def _pull(self) -> Weights:
        """An error on any rank raises on every rank."""
        ranks = self._ranks()
        if self._attachment is not None:
            return pull_on_all_ranks(self._attachment, ranks, track=_TRACK)
        return ranks.call_or_raise(self._pull_alone)

    def _ignored(self, weights: Weights) -> set[str]:
        """The model's tensors that the track ignores."""
        assert self._model is not None
        names = named_tensors(unwrap(self._model)).all()
        return {name for name in names if name not in weights and name not in weights.aliases}

    def _pull_alone(self) -> Weights:
        """The averages of the last push, on this rank. Without an attachment, because it is closed or nothing
        was trained since a checkpoint was loaded: those of the last fit or of the checkpoint."""
        version: VersionLike | None
        if self._attachment is not None:
            version = self._attachment.wait_pushed()
        else:
            version = self._last if self._resume is None else self._resume
            if version is None:
                raise FailedPreconditionError(
                    f'model "{self._model_name}": the checkpoint does not say which average belongs to it',
                    reason="NO_VERSION",
                )
        timeout_s = pull_timeout_s(self._options)
        with connect(self._address, self._model_name, timeout_s=timeout_s) as client:
            return client.pull(self._model_name, track=_TRACK, version=version, framework="torch")

    def _swap_out(self) -> None:
        if self._swap is not None:
            swap, self._swap = self._swap, None
            swap.close()

    def _unsaved_buffers(self) -> dict[str, torch.Tensor]:
        """The model's buffers that are not in its state_dict. The server has no average of them, while
        Composer's class has all buffers. {}: no trainer has this algorithm yet."""
        if self._model is None:
            return {}
        module = unwrap(self._model)
        saved = {id(buffer) for buffer in named_tensors(module).buffers.values()}
        return {
            name: buffer.detach()
            for name, buffer in module.named_buffers()
            if id(buffer) not in saved
        }

    def _training_weights(self) -> dict[str, torch.Tensor]:
        """REQUIRES: the model has the averaged weights."""
        assert self._model is not None
        if self._training is not None:
            return self._training
        own = {id(tensor): value for tensor, value in self._own.pairs()}
        named = named_tensors(unwrap(self._model)).all()
        return {name: own.get(id(tensor), tensor.detach()) for name, tensor in named.items()}

    def _end_fit(self) -> None:
        """Waits for the last push, so that it is committed before the program ends."""
        assert self._attachment is not None
        try:
            self._attachment.wait_pushed(timeout_s=call_timeout_s(self._options))
        except EmaError as error:
            _logger.warning('model "%s": %s', self._model_name, error)


def _time_of(state: State) -> TrainingTime:
    now = state.timestamp
    progress = state.get_elapsed_duration()
    return TrainingTime(
        batch=now.batch.value,
        epoch=now.epoch.value,
        sample=now.sample.value,
        token=now.token.value,
        iteration=now.iteration.value,
        progress=None if progress is None else min(1.0, progress.value),
        seconds=now.total_wct.total_seconds(),
    )


def _check_others(state: State) -> None:
    for other in state.algorithms:
        if isinstance(other, (algorithms.SWA, algorithms.EMA)):
            raise InvalidArgumentError(
                f"algorithms: ema_client.composer.EMA cannot be combined with {type(other).__name__}, "
                "which puts averaged weights into the model too; an average of all weights is "
                'tracks={"swa": Track(uniform=True)} here'
            )
