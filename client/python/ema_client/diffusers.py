# SPDX-License-Identifier: Apache-2.0
"""`EMAModel` replaces diffusers' own: the same calls and decays, but the average is on a server.

>>> from ema_client.diffusers import EMAModel  # not: from diffusers.training_utils
>>> ema = EMAModel(unet.parameters(), decay=0.9999, url="ema://host:50051/unet", model=unet)
>>> ...
>>> ema.step(unet.parameters())
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client._callbacks import check_options, check_tracks, options_of_start, saved_state
from ema_client._client.arrays import check_materialized
from ema_client._client.mode import is_disabled
from ema_client._client.out import check_castable
from ema_client._client.read import pull
from ema_client._client.state import State
from ema_client._client.types import VersionLike
from ema_client._client.unread import wait_unread
from ema_client._client.url import split_url
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._model.optimizers import unwrap_optimizers
from ema_client._model.torch_model import check_no_ranges, named_tensors, unwrap, write
from ema_client._trainer.attach import attach
from ema_client._trainer.attachment import Attachment

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# The arguments of the schedule, as diffusers' state_dict names them.
_SCHEDULE = ("decay", "min_decay", "update_after_step", "use_ema_warmup", "inv_gamma", "power")
# Our entry in a state_dict.
_STATE = "ema_server"
# diffusers' entry for the averages.
_AVERAGES = "shadow_params"
# Arguments of `attach` that the schedule and the state determine.
_OWN = ("half_life", "smoothing", "update_interval", "ema_start", "preset", "resume")


class EMAModel:
    """diffusers.training_utils.EMAModel, whose average is the track "ema" of a model on an EMA Server.

    The first `step` creates the model and opens its run; every rank must call it, with the same
    parameters. The decay of each step is diffusers' own bit for bit; the average is computed in
    float32, with one rounding less, also for half-precision parameters. Parameters that are not
    trained are averaged, too: their average is their value unless that changes.

    Before the first step the averages are the constructor's weights, of which a copy stays in host
    memory until then.

    diffusers gives parameters no names. Their names come from `model`; without it they are "0",
    "1", and so on, in order.

    Args:
        parameters: the parameters to average.
        decay, min_decay, update_after_step, use_ema_warmup, inv_gamma, power: as diffusers'.
        foreach: has no effect.
        model_cls, model_config: for `save_pretrained`.
        url: "ema://host:port/model". None: the object only holds a state, see `from_pretrained`.
        model: names the parameters. These must be parameters of this model, or have the shapes of
            all its parameters, in order.
        optimizer: the one that changes the parameters. With it, they are read while training
            continues, and its next step waits for bytes that have not been sent; parameters that it
            does not hold are copied, or `step` waits. Without it, `step` waits until they have been
            read: it cannot know when they change next, and a copy would take as much memory as the
            average.
        options: of `ema_client.attach`, such as tracks (more averages of the same weights),
            wire_dtype or on_error; and diffusers' old names max_value (decay), min_value
            (min_decay) and device, which has no effect.

    Raises:
        TypeError: an option that `attach` does not have.
        InvalidArgumentError: an argument is wrong.

    Example:
        >>> ema = EMAModel(unet.parameters(), url="ema://host:50051/unet", model=unet)
        >>> for batch in batches:
        ...     train(unet, batch)
        ...     ema.step(unet.parameters())
        >>> ema.store(unet.parameters())
        >>> ema.copy_to(unet.parameters())
        >>> evaluate(unet)
        >>> ema.restore(unet.parameters())
        >>> ema.close()
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        decay: float = 0.9999,
        min_decay: float = 0.0,
        update_after_step: int = 0,
        use_ema_warmup: bool = False,
        inv_gamma: float = 1.0,
        power: float = 2 / 3,
        foreach: bool = False,
        model_cls: Any = None,
        model_config: Mapping[str, Any] | None = None,
        *,
        url: str | None = None,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **options: Any,
    ) -> None:
        import torch

        if isinstance(parameters, torch.nn.Module):
            raise InvalidArgumentError(
                "parameters is a module, which diffusers' EMAModel turns use_ema_warmup on for, and will "
                "not take for long: give module.parameters(), and model=module"
            )
        options.pop("device", None)
        max_value, min_value = options.pop("max_value", None), options.pop("min_value", None)
        self.decay = decay if max_value is None else max_value
        self.min_decay = min_decay if min_value is None else min_value
        self.update_after_step = update_after_step
        self.use_ema_warmup = use_ema_warmup
        self.inv_gamma = inv_gamma
        self.power = power
        self.foreach = foreach
        self.model_cls = model_cls
        self.model_config = model_config
        #: The decay of the last step.
        self.cur_decay_value: float | None = None
        check_options(type(self).__name__, options, own=_OWN)
        check_tracks({**options, "preset": self._preset()})
        self._model_name = None if url is None else split_url(url)[1]
        self._url = url
        self._options = options
        given = _materialized(parameters)
        self._shapes, self._names = _shapes_of(given), _names_of(given, model)
        # The averages before the first step; None: they are on the server.
        self._initial: list[torch.Tensor] | None = _copies(given)
        self._optimizer = None if optimizer is None else unwrap_optimizers(optimizer)[0]
        # Holds the parameters of the last `step`, by name.
        self._module = torch.nn.Module()
        self._attachment: Attachment | None = None
        # From a loaded state: where the first step continues.
        self._loaded_step = 0
        self._resume: Mapping[str, Any] | None = None
        self._stored: list[torch.Tensor] | None = None

    def __enter__(self) -> EMAModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def attachment(self) -> Attachment | None:
        """The attachment, from the first step on: its `stats`, its newest `version`."""
        return self._attachment

    @property
    def optimization_step(self) -> int:
        """Steps so far. The first one continues after the model's newest version, if any."""
        return self._loaded_step if self._attachment is None else self._attachment.step

    @property
    def shadow_params(self) -> list[torch.Tensor]:
        """The averages, in the order of the parameters: copies, pulled from the server at each use. Before the
        first step, the weights of the constructor or of a loaded state."""
        if self._initial is not None:
            return list(self._initial)
        if is_disabled(self._needed_url()):
            named = self._module.state_dict()
            return _copies(named[name] for name in self._names)
        weights = pull(self._needed_url(), track="ema", version=self._version(), framework="torch")
        return [weights[name] for name in self._names]

    def get_decay(self, optimization_step: int) -> float:
        """The share of the average that this step keeps; steps count from 1."""
        age = optimization_step - self.update_after_step - 1
        if age <= 0:
            return 0.0
        if self.use_ema_warmup:
            decay = 1 - (1 + age / self.inv_gamma) ** -self.power
        else:
            decay = (1 + age) / (10 + age)
        return float(max(min(decay, self.decay), self.min_decay))

    def step(self, parameters: Iterable[torch.Tensor]) -> None:
        """Updates the average with the parameters, after each optimizer step, on every rank.

        Raises:
            InvalidArgumentError: other parameters than at first, in number or shapes.
            FailedPreconditionError: it is closed.
            EmaError: at the first step: as `attach`. Later, unless on_error is "skip": a step could not
                be pushed.
        """
        checked = self._checked(parameters)
        _hold(self._module, dict(zip(self._names, checked)))
        if self._attachment is None:
            self._attachment = self._attach()
            self._initial = None
        # Parameters that the optimizer does not hold are copied, or waited for.
        self._attachment.after_step(wait_released=self._optimizer is None)
        self.cur_decay_value = self.get_decay(self.optimization_step)

    def store(self, parameters: Iterable[torch.Tensor]) -> None:
        """Keeps a copy of the parameters in host memory, for `restore`."""
        self._stored = _copies(parameters)

    def copy_to(self, parameters: Iterable[torch.Tensor]) -> None:
        """Writes the averages, those of the last step, into parameters, cast to their dtypes.

        Raises:
            InvalidArgumentError: some parameters' dtypes cannot hold averages, such as int8; nothing was
                changed.
            EmaError: the pull failed; nothing was changed.
        """
        targets, values = self._checked(parameters), self.shadow_params
        check_castable(
            "parameters",
            values=dict(zip(self._names, values)),
            targets=dict(zip(self._names, targets)),
        )
        _write(targets, values)

    def restore(self, parameters: Iterable[torch.Tensor]) -> None:
        """Writes the values that `store` has kept into parameters, and drops them.

        Raises:
            FailedPreconditionError: nothing is stored.
        """
        if self._stored is None:
            raise FailedPreconditionError("restore: call store() first", reason="BAD_REQUEST")
        _write(self._checked(parameters), self._stored)
        self._stored = None

    def to(self, device: Any = None, dtype: Any = None, non_blocking: bool = False) -> None:
        """Does nothing: the averages are on the server, and keep their dtype.

        Raises:
            InvalidArgumentError: another dtype.
        """
        if str(dtype).removeprefix("torch.") not in ("None", "float32"):
            raise InvalidArgumentError(
                f"dtype {dtype}: the averages keep theirs; pull them with dtype= to have others"
            )

    def pin_memory(self) -> None:
        """Does nothing: no average is in this process."""

    def state_dict(self) -> dict[str, Any]:
        """The schedule, the steps so far, and the identity of this step's average.

        Before the first step the averages are in it, as "shadow_params"; later it has no tensors.
        Returns when that average is on the server's disk. Call it on rank 0 or on all ranks, as
        `Attachment.state_dict`. With on_error "skip", a server that cannot save it causes a
        warning.
        """
        average = self._resume
        if self._attachment is not None:
            average = saved_state(self._attachment, self._options)
        state = {
            **self._schedule(),
            "optimization_step": self.optimization_step,
            _STATE: None if average is None else dict(average),
        }
        if self._initial is not None:
            state[_AVERAGES] = self._initial
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continues from a result of `state_dict`. Call it before the first step, on every rank.

        Raises:
            InvalidArgumentError: the state is wrong, of another model, or diffusers' own.
            FailedPreconditionError: steps have been made.
        """
        state = dict(state_dict)
        step = state.get("optimization_step", self.optimization_step)
        if _STATE not in state and step != 0:
            raise InvalidArgumentError(
                f"the state at step {step} has no {_STATE!r}: it is of diffusers' own EMAModel. Make a "
                "file of it by `python -m ema_client.convert`, a model of that by "
                f"Client.import_weights(..., step={step}), and load no state: the first step continues "
                "from there"
            )
        if self._attachment is not None:
            raise FailedPreconditionError(
                f"load_state_dict comes before the first step, and this is step "
                f"{self.optimization_step}",
                reason="BAD_REQUEST",
            )
        schedule = {name: state.get(name, value) for name, value in self._schedule().items()}
        check_tracks({"preset": {"preset": "diffusers", **schedule}})
        initial: list[torch.Tensor] | None = self._initial if step == 0 else None
        if state.get(_AVERAGES) is not None:
            initial = _copies(self._checked(state[_AVERAGES]))
        average = state.get(_STATE)
        if average is not None and self._model_name is not None:
            State.from_dict(average, model=self._model_name)  # Raises if it is malformed.
        if average is None and step != 0:
            _logger.warning(
                "the state at step %d says nothing of the average, which continues from its newest version",
                step,
            )
        for name, value in schedule.items():
            setattr(self, name, value)
        self._loaded_step, self._resume, self._initial = step, average, initial

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder with the averages, which `model_cls.from_pretrained` reads, and the state.

        Raises:
            InvalidArgumentError: model_cls or model_config was not given.
            EmaError: as `copy_to` and `state_dict`.
        """
        if self.model_cls is None or self.model_config is None:
            raise InvalidArgumentError(
                "save_pretrained needs EMAModel(..., model_cls=, model_config=)"
            )
        model = self.model_cls.from_config(self.model_config)
        self.copy_to(model.parameters())
        state = self.state_dict()
        state.pop(_AVERAGES, None)
        model.register_to_config(**state)
        model.save_pretrained(path)

    @classmethod
    def from_pretrained(
        cls, path: str | os.PathLike[str], model_cls: Any, foreach: bool = False, **options: Any
    ) -> EMAModel:
        """Reads the averages and the state that `save_pretrained` has written. The first step continues from
        the version on the server that the state identifies.

        Args:
            options: of the class, such as url, which `step` needs.

        Example:
            >>> ema.load_state_dict(EMAModel.from_pretrained("out/unet_ema", UNet2DModel).state_dict())
        """
        model = model_cls.from_pretrained(path)
        ema = cls(
            model.parameters(),
            foreach=foreach,
            model_cls=model_cls,
            model_config=model.config,
            **options,
        )
        ema.load_state_dict({**model_cls.load_config(path), _AVERAGES: list(model.parameters())})
        return ema

    def close(self) -> None:
        """Waits for the last push. Without this call, the exit waits, at most two seconds."""
        if self._attachment is not None:
            self._attachment.close()

    def _schedule(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SCHEDULE}

    def _preset(self) -> dict[str, Any]:
        return {"preset": "diffusers", **self._schedule()}

    def _needed_url(self) -> str:
        if self._url is None:
            raise InvalidArgumentError("url: needed to step, such as ema://host:50051/unet")
        return self._url

    def _attach(self) -> Attachment:
        attachment = attach(
            self._module,
            self._optimizer,
            self._needed_url(),
            preset=self._preset(),
            **options_of_start(self._options, step=self._loaded_step, resume=self._resume),
        )
        attachment._count_by_hand()
        return attachment

    def _version(self) -> VersionLike | None:
        """The version of the averages: the last step's, or the loaded state's, or the newest."""
        if self._attachment is not None:
            version = self._attachment.wait_pushed()
            if version is None:
                raise FailedPreconditionError("nothing has been pushed yet", reason="NO_VERSION")
            return version
        if self._resume is not None and self._resume["version"] and self._model_name is not None:
            return self._resume
        return None

    def _checked(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        result = _materialized(parameters)
        _check_shapes_by_place("parameters that EMAModel was made with", self._shapes, result)
        return result


def _materialized(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """InvalidArgumentError: a parameter has no shape yet, or no values."""
    result = list(parameters)
    for place, parameter in enumerate(result):
        check_materialized(f"parameter {place}", parameter)
    return result


def _copies(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in host memory."""
    return [tensor.detach().cpu().clone() for tensor in tensors]


def _write(targets: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    wait_unread(targets)
    write(zip(targets, values))


def _names_of(parameters: Sequence[torch.Tensor], model: torch.nn.Module | None) -> list[str]:
    """The parameters' names in `model`, or if they are not its own, the names of its parameters in the same
    order. Without a model, their positions: "0", "1", and so on.

    Raises:
        InvalidArgumentError: the model has neither these parameters nor as many of the same shapes.
    """
    if model is None:
        return [str(place) for place in range(len(parameters))]
    check_no_ranges(model)
    named = named_tensors(unwrap(model)).parameters
    names = {id(parameter): name for name, parameter in named.items()}
    if all(id(parameter) in names for parameter in parameters):
        return [names[id(parameter)] for parameter in parameters]
    _check_shapes_by_place("model's parameters", _shapes_of(named.values()), parameters)
    return list(named)


def _shapes_of(parameters: Iterable[torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(parameter.shape) for parameter in parameters]


def _check_shapes_by_place(
    whose: str, expected: Sequence[tuple[int, ...]], given: Sequence[torch.Tensor]
) -> None:
    """InvalidArgumentError: the given parameters differ from the expected ones in number or shapes."""
    if len(expected) != len(given):
        raise InvalidArgumentError(
            f"{len(given)} parameters are given, expected the {len(expected)} {whose}",
            reason="BAD_LAYOUT",
        )
    for place, (shape, other) in enumerate(zip(expected, _shapes_of(given))):
        if shape != other:
            raise InvalidArgumentError(
                f"parameter {place} of {len(given)} has shape {other}, expected that of the {whose}: {shape}",
                reason="BAD_LAYOUT",
            )


def _hold(root: torch.nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Puts the parameters into a module of submodules without code, by name."""
    import torch

    for name, parameter in parameters.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, torch.nn.Module())
            owner = owner.get_submodule(part)
        # The tensors need not be torch.nn.Parameter.
        owner._parameters[leaf] = parameter  # type: ignore[assignment]
