# SPDX-License-Identifier: Apache-2.0
"""`EMAWeightAveraging` for Lightning's Trainer, with the arguments of Lightning's own callback.

    >>> from ema_client.lightning import EMAWeightAveraging
    >>> averaging = EMAWeightAveraging("ema://host:50051/digits", decay=0.999)
    >>> trainer = lightning.Trainer(callbacks=[averaging])

Works with `lightning.pytorch` and with `pytorch_lightning`.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import importlib.util
import logging
import math
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._callbacks import (
    CallbackArguments,
    CallbackAverage,
    check_options,
    needs_only_batches,
    options_of_start,
    warn_of_newest,
)
from ema_client._client.mode import is_disabled
from ema_client._client.types import Version
from ema_client._errors import InvalidArgumentError
from ema_client._model.torch_model import engine_of, has_pieces, write_pieces
from ema_client._tracks.rule_checks import check_count, refuse
from ema_client._tracks.track import SCHEDULE_NAMES, WHOLE_TRACK, Track
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

_logger = logging.getLogger(__name__)

# Entries of a checkpoint: Lightning's own callback, too, stores the raw weights in the first one. The
# second one identifies the average in the checkpoint's state_dict.
_RAW_WEIGHTS = "current_model_state"
_AVERAGE = "average_in_state_dict"

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Arguments of `attach` for the track "ema", in place of Lightning's.
_SCHEDULE = (*SCHEDULE_NAMES, "preset")


def _callback_class() -> type:
    """The base class: Callback of the imported Lightning packages, or of the installed one."""
    names = [name for name in _PACKAGES if name in sys.modules] or [
        name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0])
    ][:1]
    if not names:
        raise ImportError("ema_client.lightning needs Lightning: pip install lightning")
    return type("_Callback", tuple(importlib.import_module(name).Callback for name in names), {})


if TYPE_CHECKING:
    from typing_extensions import Unpack

    _Callback = object
else:
    _Callback = _callback_class()


class EMAWeightAveraging(_Callback):
    """Keeps the average of a fit on an EMA Server, and validates and tests with it.

    The arguments from `decay` to `device` are those of Lightning's EMAWeightAveraging. They make
    the track "ema", which averages as Lightning's does: the first update copies, and each later one
    keeps the share `decay`. Instead of them, you can give half_life, smoothing, preset and other
    arguments of `ema_client.attach`. Times may be in batches ("200ba": optimizer steps), epochs
    ("2ep") and shares of the whole training ("0.1dur"). Only optimizer steps count, not batches
    that only accumulate gradients, nor steps that AMP's grad scaler skips.

    As with Lightning's, the `state_dict` in a checkpoint is the average, for `load_from_checkpoint`
    and other readers, and "current_model_state" has the raw weights, from which a fit with
    `ckpt_path` continues. The entry "average_in_state_dict" says which average it is. The checkpoint
    also identifies its version, which the server keeps on its disk; such a fit continues the average
    from there.

    Unlike Lightning's, the average takes no memory in the trainer, except while it is used or saved.
    Needs exactly one optimizer. With strategies that shard the model (FSDPStrategy, DeepSpeedStrategy,
    ModelParallelStrategy) the `state_dict` in a checkpoint has the raw weights, and the callback logs a
    warning. The callback's entry in the checkpoint identifies the average.

    Args:
        url: "ema://host:port/model".
        decay: share of the average that each update keeps. None: 0.999.
        update_every_n_steps: optimizer steps between updates. 0: updates only at the ends of
            epochs.
        update_starting_at_step: the first step, from 0, that is averaged.
        update_starting_at_epoch: the first epoch, from 0, that is averaged: with
            update_every_n_steps=0 the weights at its end and at the ends of later epochs; else the
            steps after its beginning, with a warning: Lightning's callback also averages steps of
            earlier epochs, and the last weights of an epoch twice.
        use_buffers: averages floating-point buffers (BatchNorm's statistics). False: copies them.
        device: only None: nothing is stored here.
        validate_with_average: validations, tests and predictions use averaged weights: in a fit the
            average at its last push; with `ckpt_path` ("best", "last" or a path) the average of that
            checkpoint; otherwise the newest average. False: they use the model's own weights, or with
            `ckpt_path` the checkpoint's `state_dict`. Before the average starts (ema_start,
            update_starting_at_step), they use the model's own weights, with a warning.
        save_average: the `state_dict` in a checkpoint is the average, if it has started and can be
            read; else raw weights, with a warning. False: raw weights. None: as
            validate_with_average, because checkpoints are chosen by the scores of validations; but raw
            weights, with a warning, if the strategy shards the model. A ModelCheckpoint with
            save_weights_only=True always saves raw weights.
        copy_at_end: after the fit the model has averaged weights, as with Lightning's callback, if
            the average has started. False: its own.
        track: which average the model gets. None: the only one that is not a copy, else "ema".
        log_statistics: in a fit, logs for each track the norm of its average ("ema_norm") and that of
            the difference between the raw weights and the average ("ema_distance"), by the trainer's
            loggers, at every log_every_n_steps. Adds a copy track "raw", if there is no copy track.
        arguments: of `ema_client.attach`, such as half_life, tracks, wire_dtype or on_error. With
            on_error "skip", the default, an unreachable server causes a warning: the model then is
            validated with its own weights.

    Raises:
        TypeError: an option that `attach` does not have.
        InvalidArgumentError: an argument is wrong. In the fit also: the module does not have
            exactly one optimizer; Lightning's own callback is there, which would save another
            average in the same place; or save_average=True, and the strategy shards the model. With
            `ckpt_path`: the checkpoint neither has an average nor identifies one.
        EmaError: in the fit: as `attach`. With `ckpt_path`: the checkpoint's average cannot be read.

    Example:
        >>> averaging = EMAWeightAveraging("ema://host:50051/digits", decay=0.99)
        >>> trainer = lightning.Trainer(max_epochs=10, callbacks=[averaging])
        >>> trainer.fit(module, batches)
    """

    def __init__(
        self,
        url: str,
        *,
        decay: float | None = None,
        update_every_n_steps: int = 1,
        update_starting_at_step: int | None = None,
        update_starting_at_epoch: int | None = None,
        use_buffers: bool = True,
        device: Any = None,
        validate_with_average: bool = True,
        save_average: bool | None = None,
        copy_at_end: bool = True,
        track: str | None = None,
        log_statistics: bool = False,
        **arguments: Unpack[CallbackArguments],
    ) -> None:
        super().__init__()
        options: dict[str, Any] = dict(arguments)
        check_options(type(self).__name__, options)
        theirs = _given(
            decay=(decay, None),
            update_every_n_steps=(update_every_n_steps, 1),
            update_starting_at_step=(update_starting_at_step, None),
            update_starting_at_epoch=(update_starting_at_epoch, None),
            use_buffers=(use_buffers, True),
        )
        ours = [name for name in _SCHEDULE if options.get(name) is not None]
        if theirs and ours:
            refuse(
                f"{' and '.join(theirs)} and {' and '.join(ours)} are both given: give Lightning's "
                'arguments, such as decay=0.999, or ours, such as half_life="200ba"'
            )
        ema = _track(
            decay,
            update_every_n_steps,
            update_starting_at_step,
            update_starting_at_epoch,
            use_buffers,
            device,
        )
        tracks = options.get("tracks") or {}
        if theirs or not (ours or tracks):
            if "ema" in tracks:
                refuse(f'{" and ".join(theirs)}: for the track "ema", which is in tracks too')
            whole = {name: options[name] for name in WHOLE_TRACK if options.get(name) is not None}
            options = {name: value for name, value in options.items() if name not in whole}
            options["tracks"] = {"ema": dataclasses.replace(ema, **whole), **tracks}
        self._average = CallbackAverage(url, options, track=track, logs_statistics=log_statistics)
        self._validates = validate_with_average
        self._save_average = save_average
        # Whether checkpoints of the current fit have the average in their state_dict.
        self._saves_average = False
        self._copies_at_end = copy_at_end
        # The state in the checkpoint that the trainer's current call has loaded, or {}. None: it has
        # loaded none, or one without the states of callbacks.
        self._loaded: Mapping[str, Any] | None = None
        # Averages that modules have as their own weights, after a fit or from a checkpoint.
        self._held: weakref.WeakKeyDictionary[Any, Mapping[str, Any]] = weakref.WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # For the processes of ddp_spawn. A WeakKeyDictionary cannot be pickled.
        return {name: value for name, value in vars(self).items() if name != "_held"}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        vars(self).update(state)
        self._held = weakref.WeakKeyDictionary()

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, while a fit runs: its `stats`, its newest `version`."""
        return self._average.attachment

    @property
    def state_key(self) -> str:
        """The name of this callback's state in the trainer's checkpoint; one for each model."""
        return f"ema_client.EMAWeightAveraging({self._average.model_name})"

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        # Of the trainer's last call.
        self._loaded = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if len(trainer.optimizers) != 1:
            raise InvalidArgumentError(
                f"the module has {len(trainer.optimizers)} optimizers: an average follows one; with "
                "several, call ema_client.attach(module, None, url), and its after_step() in "
                "training_step, in place of this callback"
            )
        self._saves_average = self._can_save_average(trainer)
        self._average.close()  # After a fit that an exception has ended.
        self._held.pop(pl_module, None)
        if not self._loaded and trainer.global_step > 0:
            warn_of_newest(trainer.global_step)
        options = options_of_start(
            self._average.options, step=trainer.global_step, resume=self._loaded or None
        )
        if not needs_only_batches(options):
            options.setdefault("time", _time_of(trainer))
        self._average.attachment = attach(
            trainer.model, trainer.optimizers[0], self._average.url, **options
        )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps
        if every == 0 or step % every != 0 or not trainer.is_global_zero:
            return
        # Batches that only accumulate gradients do not change the step, and get no values.
        values = self._average.statistics(step)
        for logger in trainer.loggers if values else ():
            # Lightning counts the steps of its own metrics from 0.
            logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=step - 1)

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        # The sanity check comes before the first push.
        if not trainer.sanity_checking:
            self._swap_in(trainer, pl_module)

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._swap_in(trainer, pl_module)

    on_predict_epoch_start = on_test_epoch_start

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._average.swap_out()

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        # Still attached: callbacks that save a checkpoint now come after this one.
        self._average.swap_out()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._copies_at_end or self.attachment is None:
            return
        # Not pl_module: with FSDP1, the wrapper has the parameters.
        version = self._average.copy_or_own(trainer.model)
        if version is not None:
            self._held[pl_module] = self._record(version)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._average.close()

    def state_dict(self) -> dict[str, Any]:
        """Identifies this step's average, which the server saves. {}: no fit runs, or not saved."""
        return dict(self._average.saved_state() or {})

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Puts the average into the checkpoint's `state_dict`."""
        if self.attachment is None:
            if pl_module in self._held:
                checkpoint[_AVERAGE] = dict(self._held[pl_module])
            return
        if self._average.own:  # Another callback saves during a validation.
            with self._average.own.restored():
                checkpoint["state_dict"] = copy.deepcopy(checkpoint["state_dict"])
        if not self._saves_average:
            return
        with self._average.averaged_or_own(trainer.model, doing="saving") as version:
            if version is None:
                return
            average = copy.deepcopy(trainer.strategy.lightning_module_state_dict())
        checkpoint.setdefault(_RAW_WEIGHTS, checkpoint["state_dict"])
        checkpoint["state_dict"] = average
        checkpoint[_AVERAGE] = self._record(version)

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Puts the checkpoint's raw weights into the model for a fit. Lightning has put its
        `state_dict` there."""
        self._loaded = checkpoint["callbacks"].get(self.state_key, {})
        self._held.pop(pl_module, None)
        if trainer.state.fn != "fit":
            if _AVERAGE in checkpoint:
                self._held[pl_module] = checkpoint[_AVERAGE]
        elif _RAW_WEIGHTS in checkpoint:
            # A strategy that shards loads only what the file has as its state_dict.
            if has_pieces(trainer.model):
                write_pieces(trainer.model, checkpoint[_RAW_WEIGHTS])
                return
            trainer.strategy.load_model_state_dict(
                {**checkpoint, "state_dict": checkpoint[_RAW_WEIGHTS]},
                strict=pl_module.strict_loading,
            )

    def _can_save_average(self, trainer: Any) -> bool:
        """Whether checkpoints of the fit have the average in their `state_dict`.

        InvalidArgumentError: they cannot, and save_average=True was given; or another callback puts its
            average there.
        """
        if not (self._validates if self._save_average is None else self._save_average):
            return False
        _check_savers(trainer)
        if engine_of(trainer.model) is None and not has_pieces(trainer.model):
            return True
        saves_raw = (
            f"strategy: {type(trainer.strategy).__name__} saves the weights of each rank itself, so the "
            "state_dict of a checkpoint cannot be the average"
        )
        if self._save_average:
            raise InvalidArgumentError(
                f"save_average=True: {saves_raw}: give save_average=False, and pull the average with "
                "ema_client.pull"
            )
        _logger.warning(
            "%s: it has raw weights, and the callback's entry in the checkpoint identifies the average, which "
            "the server keeps; save_average=False turns this warning off",
            saves_raw,
        )
        return False

    def _swap_in(self, trainer: Any, module: Any) -> None:
        if not self._validates or is_disabled(self._average.url):
            return
        version: Mapping[str, Any] | None = None
        if trainer.state.fn != "fit" and trainer.ckpt_path is not None:
            if self._loaded is not None and self._is_held_by(module):
                return
            version = self._loaded
            if not version:
                raise InvalidArgumentError(
                    f'ckpt_path "{trainer.ckpt_path}": the checkpoint neither has an average of model '
                    f'"{self._average.model_name}" in its state_dict nor identifies one: it was saved without '
                    "this callback, with save_weights_only=True, or when the server could not save. "
                    "To use its own weights: EMAWeightAveraging(..., validate_with_average=False)"
                )
        self._average.swap_in(trainer.model, version=version)

    def _is_held_by(self, module: Any) -> bool:
        """Whether the module's own weights are the average that this callback uses."""
        held, own = self._held.get(module, {}), self._average
        return held.get("model") == own.model_name and own.track in (None, held.get("track"))

    def _record(self, version: Version) -> dict[str, Any]:
        return {
            "model": self._average.model_name,
            "track": self._average.track_name(),
            "version": version.number,
            "step": version.step,
        }


def _check_savers(trainer: Any) -> None:
    """Checks the other callbacks for ones that save other weights than the average."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "WeightAveraging" for kind in type(callback).__mro__):
            raise InvalidArgumentError(
                f"callbacks: {type(callback).__name__} puts its average into the checkpoint's state_dict, "
                "too: remove it, or give save_average=False here"
            )
    for saver in trainer.checkpoint_callbacks:
        if getattr(saver, "save_weights_only", False):
            _logger.warning(
                "%s(save_weights_only=True) saves raw weights, not their average, because Lightning then "
                "calls no other callback: use save_weights_only=False",
                type(saver).__name__,
            )


def _given(**arguments: tuple[object, object]) -> list[str]:
    """Names of arguments that are not at their defaults."""
    return [name for name, (value, default) in arguments.items() if value != default]


def _track(
    decay: float | None,
    every: int,
    first_step: int | None,
    first_epoch: int | None,
    use_buffers: bool,
    device: Any,
) -> Track:
    """The track that averages as Lightning's callback does with these arguments."""
    track = Track.preset(
        "torch", decay=0.999 if decay is None else decay, use_buffers=use_buffers, device=device
    )
    every = check_count("update_every_n_steps", every, "1", least=0)
    if first_step is not None:
        first_step = check_count("update_starting_at_step", first_step, "1", least=0)
    if first_epoch is not None:
        first_epoch = check_count("update_starting_at_epoch", first_epoch, "1", least=0)
    if every == 0 and first_epoch is None:
        refuse("update_every_n_steps 0: averages nothing; give update_starting_at_epoch, such as 0")
    if first_epoch is not None and first_step is not None:
        refuse(
            f"update_starting_at_epoch {first_epoch} and update_starting_at_step {first_step} are both "
            "given: give one of them"
        )
    if first_epoch is None:
        # Lightning's steps count from 0, and it starts at the first that is a multiple.
        start = None if first_step is None else f"{math.ceil(first_step / every) * every + 1}ba"
        return dataclasses.replace(
            track, update_interval=f"{every}ba", interval_phase=1, ema_start=start
        )
    if every != 0:
        _logger.warning(
            "update_starting_at_epoch %d: averages the steps after the beginning of that epoch. "
            "Lightning's callback averages those of earlier epochs, too, and from that epoch on the "
            "last weights of each epoch twice. For an update at each epoch's end give "
            "update_every_n_steps=0",
            first_epoch,
        )
        return dataclasses.replace(
            track,
            update_interval=f"{every}ba",
            interval_phase=1,
            ema_start=f"{first_epoch}ep" if first_epoch > 0 else None,
        )
    return dataclasses.replace(track, update_interval="1ep", ema_start=f"{first_epoch + 1}ep")


def _time_of(trainer: Any) -> Callable[[int], dict[str, float]]:
    """The `time` for `attach`, which is called before the trainer has counted the step."""
    total = trainer.estimated_stepping_batches

    def time(step: int) -> dict[str, float]:
        now = {"batch": step, "epoch": trainer.current_epoch + trainer.is_last_batch}
        if 0 < total < math.inf:
            now["progress"] = min(1.0, (trainer.global_step + 1) / total)
        return now

    return time
