# SPDX-License-Identifier: Apache-2.0
"""`ema.ema_model`: a copy of the model that has its newest average, to evaluate with while it trains."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Union

from ema_client import _arrays, _ema
from ema_client._away import Link, OnError
from ema_client._client import Client
from ema_client._errors import EmaError, FailedPreconditionError
from ema_client._torch_model import check_whole, half_of, named_tensors
from ema_client._track import only_average
from ema_client._types import Version, version_id

if TYPE_CHECKING:
    import torch

    #: A module to hold the averages, or what makes one.
    ModuleLike = Union[torch.nn.Module, Callable[[], torch.nn.Module]]

_logger = logging.getLogger(__name__)


class AveragedCopy:
    """A module with one track's values.

    Pulled parameters that lie in host memory in the module's dtype are not copied: the module's are the
    pulled memory itself. Of others, such as a GPU's, the pulled bytes are kept in host memory, too, so
    that only what has changed is sent.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        given: ModuleLike | None,
        *,
        client: Client,
        model_name: str,
        track: str,
    ) -> None:
        """Pulls. `model`: what is trained; `given`: holds the averages in place of a deep copy of it.

        Raises:
            InvalidArgumentError: `given` has other names or shapes; the model is in pieces (DTensor).
            EmaError: as `Client.pull`.
        """
        import torch

        check_whole(model)
        self._client = client
        self._model = model
        names = named_tensors(model)
        if given is not None and not isinstance(given, torch.nn.Module):
            given = given()
        if given is not None:
            ours, theirs = names.all(), named_tensors(given).all()
            _arrays.check_names("ema_model", expected=ours, given=theirs)
            _arrays.check_shapes("ema_model", expected=ours, given=theirs)
        self._weights = client.pull(
            model_name, track=track, dtype=half_of(names.all()), framework="torch"
        )
        if given is None:
            # Parameters that need not be copied, in place of copies.
            memo: dict[int, Any] = {
                id(parameter): torch.nn.Parameter(self._weights[name], requires_grad=False)
                for name, parameter in names.parameters.items()
                if name in self._weights and _may_share(parameter, self._weights[name])
            }
            given = copy.deepcopy(model, memo)
        else:
            for name, parameter in named_tensors(given).parameters.items():
                if name in self._weights and _may_share(parameter, self._weights[name]):
                    parameter.data = self._weights[name]
        self.module = given.eval().requires_grad_(False)
        self._write()

    @property
    def version(self) -> Version:
        return self._weights.version

    def refresh(self, timeout_s: float | None) -> None:
        """Brings the values to the newest version. EmaError: as `Client.refresh`."""
        self._client.refresh(self._weights, timeout_s=timeout_s)
        self._write()

    def _write(self) -> None:
        import torch

        trained = named_tensors(self._model).all()
        with torch.no_grad():
            for name, tensor in named_tensors(self.module).all().items():
                # Tensors that the track ignores have the model's own values.
                value = self._weights.get(name, trained[name].detach())
                if tensor.layout != torch.strided or tensor.data_ptr() != value.data_ptr():
                    tensor.copy_(value)


def _may_share(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    import torch

    return (
        type(parameter) is torch.nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.dtype == value.dtype
        and parameter.shape == value.shape
        and parameter.is_contiguous()
    )


class WithEmaModel:
    """The part of an `Attachment` that has `ema_model`."""

    _client: Client
    _closed: bool
    _model_name: str
    _module: torch.nn.Module
    _on_error: OnError
    _due: _ema.DueTracks
    _link: Link
    _max_wait_s: float
    _copy: AveragedCopy | None = None
    # What holds the averages in place of a deep copy.
    _given_ema_model: ModuleLike | None = None

    @property
    def ema_model(self) -> torch.nn.Module:
        """A copy of the model with the newest average, to evaluate with; in eval mode.

        Always the same module. At the first access it is made: a deep copy whose tensors are the pulled
        bytes. At later ones it is brought to the newest version in place, as by `update_ema_model`, if
        a push has made one since: what has changed is sent. Without any access it costs nothing. Its
        parameters have no gradients; tensors that the track ignores have the model's own values.
        Any rank may ask, alone. After `close` it stays as the last push has left it.

        Raises:
            As `update_ema_model`.
        """
        self.update_ema_model()
        assert self._copy is not None
        return self._copy.module

    def update_ema_model(self) -> Version:
        """Brings `ema_model` to the newest version, this step's included; waits for its push.

        When the server is away, with on_error "skip", the copy stays as it is, with a warning.

        Returns:
            The version that is in it.

        Raises:
            FailedPreconditionError: there is no version yet; or the attachment is closed, and
                `ema_model` had not been asked for.
            NotFoundError: of several tracks none is named "ema": which one is not clear.
            EmaError: the push has not ended within `max_wait_s`, or the pull failed; with on_error
                "skip" only if there is no copy yet.
        """
        if not self._closed:
            self._update_copy(raises=self._on_error != "skip")
        elif self._copy is None:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the attachment is closed: ask for ema_model before, or '
                "use ema_client.averaged(model, url)",
                reason="BAD_REQUEST",
            )
        assert self._copy is not None
        return self._copy.version

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`ema_model(...)`."""
        return self.ema_model(*args, **kwargs)

    def _forwarded(self, name: str) -> Callable[..., Any]:
        """The method of `ema_model`, as it is at each call."""
        return lambda *args, **kwargs: getattr(self.ema_model, name)(*args, **kwargs)

    def _update_copy(self, *, raises: bool, timeout_s: float | None = None) -> None:
        """`raises` False: what fails is a warning, if there is a copy already."""
        try:
            newest = self.wait_pushed(timeout_s=self._max_wait_s)
            if newest is None:
                raise FailedPreconditionError(
                    f'model "{self._model_name}" has no version yet', reason="NO_VERSION"
                )
            copied = self._copy
            if copied is not None and version_id(copied.version) == version_id(newest):
                return  # Nobody else pushes.
            if self._link.is_away:
                raise self._link.error()
            if copied is not None:
                copied.refresh(timeout_s)
            else:
                self._copy = AveragedCopy(
                    self._module,
                    self._given_ema_model,
                    client=self._client,
                    model_name=self._model_name,
                    track=self._average_name(),
                )
        except EmaError as error:
            if raises or self._copy is None:
                raise
            _logger.warning(
                'model "%s": ema_model stays at step %d: %s',
                self._model_name,
                self._copy.version.step,
                error,
            )

    def _average_name(self) -> str:
        return only_average(
            f'model "{self._model_name}": ',
            {track.name: track.schedule.is_copy for track in self._due.tracks},
        )

    def wait_pushed(self, *, timeout_s: float | None = None) -> Version | None:
        """Of `Attachment`."""
        raise NotImplementedError
