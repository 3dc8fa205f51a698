# SPDX-License-Identifier: Apache-2.0
"""ema_pytorch.EMA's arguments that describe no track: Switch-EMA, and those of `ema_model`."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client.out import writing
from ema_client._errors import EmaError, InvalidArgumentError, failure_of
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import check_whole
from ema_client._tracks import presets, rule_checks
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.same_version import pull_on_all_ranks

if TYPE_CHECKING:
    import torch

    from ema_client._trainer.ema_model import ModuleLike

_logger = logging.getLogger(__name__)

_PRESET = "ema_pytorch"
# Arguments about ema_pytorch's own copies and loops. They do not change the numbers, and the server
# keeps the average.
_WITHOUT_EFFECT = (
    "include_online_model",
    "allow_different_devices",
    "use_foreach",
    "move_ema_to_online_device",
    "coerce_dtype",
    "lazy_init_ema",
)


@dataclasses.dataclass(frozen=True)
class PresetOptions:
    """The part of a preset that the attachment handles.

    Attributes:
        preset: the other arguments, which describe the track.
        ema_model: a module for the averages, or a function that makes one; None: a deep copy of the
            model.
        forward_method_names: methods of `ema_model` that the attachment has, too.
        rule: when the averages are written back; None: never.
    """

    preset: str | Mapping[str, Any] | None
    ema_model: ModuleLike | None = None
    forward_method_names: tuple[str, ...] = ()
    rule: SwitchRule | None = None

    @classmethod
    def of(cls, preset: str | Mapping[str, Any] | None) -> PresetOptions:
        """Takes these options from the preset of `attach`. InvalidArgumentError: a bad value."""
        if not isinstance(preset, Mapping) or preset.get("preset") != _PRESET:
            return cls(preset)
        rest = dict(preset)
        try:
            for name in _WITHOUT_EFFECT:
                if name in rest:
                    rule_checks.check_flag(name, rest.pop(name))
            ema_model = rest.pop("ema_model", None)
            if ema_model is not None and not callable(ema_model):
                rule_checks.refuse(f"ema_model {ema_model!r}: must be a module, or what makes one")
            names = rest.pop("forward_method_names", ())
            if isinstance(names, str) or not all(isinstance(name, str) for name in names):
                rule_checks.refuse(f"forward_method_names {names!r}: must be names of methods")
            every = rest.pop("update_model_with_ema_every", None)
            beta = rest.pop("update_model_with_ema_beta", 0.0)
            rule = None if every is None else SwitchRule.of(every, beta, rest)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(
                f'preset "{_PRESET}": {error.args[0]}', reason=error.reason
            ) from None
        return cls(rest, ema_model, tuple(names), rule)

    def check(self, module: torch.nn.Module) -> None:
        """InvalidArgumentError: the module has no such method to forward, or the attachment has one
        of that name; or averages would be written back into DTensors."""
        if self.rule is not None:
            check_whole(module)
        for name in self.forward_method_names:
            if not callable(getattr(module, name, None)) or hasattr(Attachment, name):
                raise InvalidArgumentError(
                    f'preset "{_PRESET}": forward_method_names "{name}": must be a method of the model, '
                    "with a name that the attachment does not have"
                )

    def apply(self, attachment: Attachment, ranks: Ranks) -> None:
        """Applies the options to the attachment."""
        attachment._ema_model.given = self.ema_model
        for name in self.forward_method_names:
            setattr(attachment, name, attachment._forwarded(name))
        if self.rule is not None:
            Switch(attachment, self.rule, ranks)


@dataclasses.dataclass(frozen=True)
class SwitchRule:
    """When and how ema_pytorch writes the averages back into the model. Batch n is its call n,
    whose `step` is n - 1.

    Attributes:
        every: number of calls from one write to the next.
        beta: share of the model's own weights that is kept.
        copied: tensors that have no average: they are copied whatever beta is.
        update_every, update_after_step: when the average is updated.
        is_frozen: the average does not change after update_after_step.
    """

    every: int
    beta: float
    copied: frozenset[str]
    update_every: int
    update_after_step: int
    is_frozen: bool

    @classmethod
    def of(cls, every: object, beta: object, arguments: Mapping[str, Any]) -> SwitchRule:
        parameters = inspect.signature(presets.ema_pytorch).parameters

        def get(name: str) -> Any:
            return arguments.get(name, parameters[name].default)

        return cls(
            rule_checks.check_count("update_model_with_ema_every", every, "1000"),
            rule_checks.check_number("update_model_with_ema_beta", beta, "0.5"),
            frozenset(get("param_or_buffer_names_no_ema")),
            rule_checks.check_count("update_every", get("update_every"), "10"),
            rule_checks.check_count("update_after_step", get("update_after_step"), "100", least=0),
            get("beta") == 1,
        )

    def text(self) -> str:
        """The rule as text, which is equal on all ranks for equal rules."""
        return repr(dataclasses.astuple(dataclasses.replace(self, copied=frozenset()))) + repr(
            sorted(self.copied)
        )

    def is_due(self, batch: int) -> bool:
        step = batch - 1
        if step == 0 or (step % self.update_every == 0 and step <= self.update_after_step):
            return False  # A call that copies the model does nothing else.
        return step % self.every == 0 and not (self.is_frozen and self.beta != 0)

    def last_update(self, batch: int) -> int:
        """The batch of the average's last update up to `batch`."""
        step = batch - 1
        if self.is_frozen:
            step = min(step, self.update_after_step)
        return step // self.update_every * self.update_every + 1


class Switch:
    """Switch-EMA: regularly writes the averages into the trained model.

    After `optimizer.step()` it waits until the push of this step has ended, and pulls the version:
    the step takes a whole push and a whole pull longer, at most `max_wait_s` and the pull's
    timeout. Each rank pulls the whole model into host memory and, while it writes, also holds the
    values on the model's device. All ranks write the same version, or none: then training continues
    with its own weights, with a warning, or raises unless on_error is "skip". The optimizer's state
    does not change. Unlike in ema_pytorch, tensors that the track ignores do not change either
    (ema_pytorch resets them to their last copy).
    """

    def __init__(self, attachment: Attachment, rule: SwitchRule, ranks: Ranks) -> None:
        self._attachment = attachment
        self._rule = rule
        self._ranks = ranks
        attachment._pusher.after_counted_step = self._after_step
        # The last step whose batch was known, and that batch.
        self._known = (0, 0)

    def _after_step(self) -> None:
        attachment = self._attachment
        failure: EmaError | None = None
        try:
            batch = int(attachment._pusher.training_time(attachment.step)["batch"])
            self._known = attachment.step, batch
        except Exception as raised:  # From the user's `time`; it may not fail on other ranks.
            failure = failure_of(raised)
            step, batch = self._known
            batch += attachment.step - step
        if not self._rule.is_due(batch):
            return
        start = time.monotonic()
        try:
            self._write(batch, failure)
        except EmaError as error:
            if attachment._pusher.options.on_error != "skip":
                raise
            _logger.warning(
                'model "%s": step %d continues with its own weights, not with their average: %s',
                attachment._pusher.options.model_name,
                attachment.step,
                error,
            )
        finally:
            attachment._pusher.other_wait_seconds += time.monotonic() - start

    def _write(self, batch: int, failure: EmaError | None) -> None:
        weights = pull_on_all_ranks(
            self._attachment,
            self._ranks,
            track="ema",
            least_batch=self._rule.last_update(batch),
            failure=failure,
        )
        written: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
        try:
            for name, tensor in self._attachment._pusher.options.tensors_of().all().items():
                if name in weights and tensor.is_floating_point():
                    value = weights[name].to(tensor.device, tensor.dtype)
                    is_copied = self._rule.beta == 0 or name in self._rule.copied
                    written.append((tensor, value, is_copied))
        except Exception as raised:
            failure = failure_of(raised)
        # All ranks must have the memory before the first one writes.
        self._ranks.gather_or_raise(failure, None)
        with writing():
            for tensor, value, is_copied in written:
                if is_copied:
                    tensor.copy_(value)
                else:
                    tensor.lerp_(value, 1 - self._rule.beta)
