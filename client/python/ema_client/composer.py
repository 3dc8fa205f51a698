# SPDX-License-Identifier: Apache-2.0
"""MosaicML Composer's `EMA` with the average on an EMA Server. Imports composer.

>>> from ema_client.composer import EMA
>>> trainer = Trainer(..., algorithms=[EMA(half_life="1000ba", url="ema://host:50051/digits")])
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any

from composer import algorithms
from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger

from ema_client._callbacks import (
    check_options,
    check_tracks,
    options_of_start,
    patience_s,
    pull_patience_s,
    raises,
    saved_state,
    warn_of_newest,
)
from ema_client._client.client import Client
from ema_client._client.types import TrainingTime, Version, VersionLike, Weights
from ema_client._client.url import split_url
from ema_client._errors import EmaError, FailedPreconditionError, InvalidArgumentError, failure_of
from ema_client._evaluator.averaged import swapped
from ema_client._evaluator.started import awaited_start
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import unwrap
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


class EMA(Algorithm):
    """Streams the weights of a `composer.Trainer` to an EMA Server, and evaluates with their average.

    Takes the arguments of `composer.algorithms.EMA`, and counts as it does: pushes at the end of a
    batch, or of an epoch if update_interval is in epochs. `Track.preset` lists how the numbers
    differ. After ema_start, evaluations use the averaged weights, also `trainer.eval()` after
    training: all ranks wait for the pending push, and use the same version. If it cannot be read,
    evaluations during training use the training weights, with a warning, if on_error is "skip". The
    average is in the trainer's memory only during evaluations.

    Unlike with Composer, the model in a checkpoint has the training weights. The checkpoint also
    identifies its average, which the server keeps on its disk (without a --data-dir it cannot, and
    a warning says so). A trainer with `load_path` continues from this average.

    Must not be combined with `composer.algorithms.SWA`, which averages the weights and writes them into
    the model itself, nor with Composer's own EMA, which swaps them at the same events.

    Args:
        half_life, smoothing, ema_start, update_interval: as for `composer.algorithms.EMA`.
        url: "ema://host:port/model".
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
        is_by_epoch = str(track.update_interval).endswith("ep")
        self._update_event = Event.EPOCH_END if is_by_epoch else Event.BATCH_END
        self._start = Time.from_timestring(ema_start)
        self._address, self._model_name = split_url(url)
        self._url = url
        self._options = options
        # ema_start has been reached: Composer would evaluate with its average.
        self._started = False
        self._resume: dict[str, Any] | None = None
        self._attachment: Attachment | None = None
        # The last version of the closed attachment, for later evaluations.
        self._last: Version | None = None
        # Pulled once for all evaluators of an evaluation.
        self._pulled: Weights | None = None
        # Holds the model's own weights while it has the averaged ones.
        self._swap: contextlib.ExitStack | None = None

    @property
    def attachment(self) -> Attachment | None:
        """The attachment; None before `fit`, and after `close`."""
        return self._attachment

    def close(self) -> None:
        """Waits for the last push, and closes the attachment. Call it after `trainer.fit`, or not
        at all. A later `fit` attaches again."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
            self._last = attachment.version

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.BATCH_START, Event.EVAL_END, *_CHECKPOINTS):
            return self._swap is not None
        if event in (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END):
            return self._pulled is not None
        return event in (
            Event.INIT,
            Event.FIT_START,
            self._update_event,
            Event.EVAL_START,
            Event.FIT_END,
        )

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            _check_others(state)
        elif event == Event.FIT_START:
            _check_others(state)
            self._attach(state)
        elif event == self._update_event:
            self._started = self._started or self._should_start(state)
            assert self._attachment is not None
            self._attachment._count(state.timestamp.batch.value)
        elif event == Event.EVAL_START:
            self._swap_in(state)
        elif event == Event.FIT_END:
            self._end_fit()
        elif event in (Event.EVAL_AFTER_ALL, Event.EVAL_STANDALONE_END):
            self._pulled = None
        else:
            self._swap_out()

    def state_dict(self) -> dict[str, Any]:
        """Identifies the average that belongs to the trainer's checkpoint; the server saves it."""
        state: dict[str, Any] = super().state_dict()
        state |= {"started": self._started, "average": self._resume}
        if self._attachment is not None:
            state["average"] = saved_state(self._attachment, self._options)
        return state

    def load_state_dict(self, state: dict[str, Any], strict: bool = False) -> None:
        """Loads a result of `state_dict`; the next `fit` continues from it.

        Raises:
            InvalidArgumentError: the state is of Composer's own EMA.
        """
        if "ema_model" in state:
            raise InvalidArgumentError(
                "the checkpoint is of Composer's own EMA, and its model may have averaged weights: load "
                "it with composer.algorithms.EMA, and save the training weights"
            )
        self._started = bool(state.get("started", False))
        self._resume = state.get("average")

    def _attach(self, state: State) -> None:
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

    def _should_start(self, state: State) -> bool:
        if self._start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and bool(self._start <= elapsed)
        return bool(self._start.value <= state.timestamp.get(self._start.unit).value)

    def _raises(self) -> bool:
        return self._attachment is None or raises(self._options)

    def _swap_in(self, state: State) -> None:
        if self._swap is not None or not self._started:
            return
        try:
            if self._pulled is None:
                self._pulled = self._pull()
            start = awaited_start(self._pulled.version, _TRACK)
            if start is not None:  # The push that began the average was skipped.
                raise FailedPreconditionError(
                    f"the newest version is from before ema_start, {start}", reason="NO_VERSION"
                )
            self._swap = self._swapped(state, self._pulled)
        except EmaError as error:
            if self._raises():
                raise
            _logger.warning(
                'model "%s": evaluating the training weights, without the average: %s',
                self._model_name,
                error,
            )

    def _swapped(self, state: State, weights: Weights) -> contextlib.ExitStack:
        """Swaps on all ranks or on none: an error on any rank raises on every rank."""
        with contextlib.ExitStack() as stack:
            failure: EmaError | None = None
            try:
                what = f'model "{self._model_name}"'
                stack.enter_context(swapped(state.model, what, weights, weights.aliases))
            except Exception as raised:
                failure = failure_of(raised)
            self._ranks().gather_or_raise(failure, None)
            return stack.pop_all()

    def _ranks(self) -> Ranks:
        return Ranks.current(self._options.get("process_group"))

    def _pull(self) -> Weights:
        """An error on any rank raises on every rank."""
        ranks = self._ranks()
        if self._attachment is not None:
            return pull_on_all_ranks(self._attachment, ranks, track=_TRACK)
        # Closed, or not trained yet since a checkpoint was loaded.
        weights: Weights | None = None
        failure: EmaError | None = None
        try:
            weights = self._pull_resumed()
        except Exception as raised:
            failure = failure_of(raised)
        ranks.gather_or_raise(failure, None)
        assert weights is not None
        return weights

    def _pull_resumed(self) -> Weights:
        version: VersionLike | None = self._last if self._resume is None else self._resume
        if version is None:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the checkpoint does not say which average belongs to it',
                reason="NO_VERSION",
            )
        with Client(self._address, timeout_s=pull_patience_s(self._options)) as client:
            return client.pull(self._model_name, track=_TRACK, version=version, framework="torch")

    def _swap_out(self) -> None:
        if self._swap is not None:
            swap, self._swap = self._swap, None
            swap.close()

    def _end_fit(self) -> None:
        """Waits for the last push, so that it is committed before the program ends."""
        assert self._attachment is not None
        try:
            self._attachment.wait_pushed(timeout_s=patience_s(self._options))
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
