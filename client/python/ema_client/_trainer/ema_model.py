# SPDX-License-Identifier: Apache-2.0
"""`ema.ema_model`: a copy of the model with its newest average, for evaluations during training."""

from __future__ import annotations

import copy
import functools
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Union

from ema_client._client import arrays
from ema_client._client.client import Client
from ema_client._client.first_weights import warn_of_first_weights
from ema_client._client.out import check_castable
from ema_client._client.state import version_id
from ema_client._client.types import Version
from ema_client._errors import DeadlineExceededError, EmaError, FailedPreconditionError
from ema_client._model.torch_model import (
    check_whole,
    check_values_here,
    half_of,
    named_tensors,
    write,
)
from ema_client._tracks.track import only_average

if TYPE_CHECKING:
    import torch

    from ema_client._trainer.pusher import Pusher
    from torch.utils.hooks import RemovableHandle

    #: A module for the averages, or a function that makes one.
    ModuleLike = Union[torch.nn.Module, Callable[[], torch.nn.Module]]

_logger = logging.getLogger(__name__)

_WITHOUT_COPY = (
    'evaluate in "with ema_client.averaged(model, url):", or call ema_client.load_into(other, url) with '
    "another module"
)


class AveragedCopy:
    """A module with one track's values.

    Parameters in host memory that have the pulled dtype share the pulled memory. For others, such
    as those on a GPU, the pulled bytes stay in host memory, too, so that a refresh transfers only
    changed bytes.

    A refresh writes in place, because a second copy in host memory would be as large as the model.
    If it fails half-way, the module has values of two versions: until another refresh succeeds, its
    forward and `state_dict` raise.
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
        """Pulls the averages. `model`: the trained model. `given`: a module for the averages, or a
        function that makes one; None: a deep copy of `model`.

        Raises:
            InvalidArgumentError: the model has DTensors, or cannot be copied; or `given` has other names
                or shapes, no values, or memory of the model; or an average is too large for the
                dtype of its tensor.
            EmaError: as `Client.pull`.
        """
        import torch

        check_whole(model)
        self._client = client
        self._model = model
        self._model_name = model_name
        self._bars: list[RemovableHandle] = []
        names = named_tensors(model)
        if given is not None and not isinstance(given, torch.nn.Module):
            has_grad = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(has_grad):
                given = given()
        if given is not None:
            ours, theirs = names.all(), named_tensors(given).all()
            places = ("in ema_model", "in the trained model")
            arrays.check_names("ema_model", expected=ours, given=theirs, places=places)
            arrays.check_shapes("ema_model", expected=ours, given=theirs, places=places)
            needed = {name: one for name, one in theirs.items() if not ours[name].is_meta}
            check_values_here("ema_model", given, needed, may_be_meta=False)
        start = time.monotonic()
        self._weights = client.pull(
            model_name, track=track, dtype=half_of(names.all()), framework="torch"
        )
        self.seconds = time.monotonic() - start  # Duration of the last update to a newer version.
        if given is None:
            # Tells deepcopy to use the pulled memory instead of copies.
            memo: dict[int, Any] = {
                id(parameter): torch.nn.Parameter(self._weights[name], requires_grad=False)
                for name, parameter in names.parameters.items()
                if name in self._weights and _may_share(parameter, self._weights[name])
            }
            # The first access may be in inference mode, and later ones outside it.
            with torch.inference_mode(False):
                given = self._copied(model, memo)
            copies = named_tensors(given).all()
            places = ("in its copy", "in the trained model")
            arrays.check_names("ema_model", expected=names.all(), given=copies, places=places)
            self._check_apart(copies)
        else:
            self._check_apart(named_tensors(given).all())
            for name, parameter in named_tensors(given).parameters.items():
                if name in self._weights and _may_share(parameter, self._weights[name]):
                    parameter.data = self._weights[name]
        self.module = given.eval().requires_grad_(False)
        self._write()
        self.version = self._weights.version  # The version in the module.
        self.problem = ""  # Why the module cannot be used.

    def _copied(self, model: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        """FailedPreconditionError: the model cannot be copied."""
        import torch

        try:
            return copy.deepcopy(model, memo)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as raised:
            raise FailedPreconditionError(
                f'model "{self._model_name}": ema_model: the model cannot be copied '
                f"({type(raised).__name__}: {raised}); {_WITHOUT_COPY}",
                reason="BAD_REQUEST",
            ) from raised

    def _check_apart(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """FailedPreconditionError: averages would be written into the trained model."""
        trained = named_tensors(self._model).all()
        shared = [
            name
            for name, tensor in tensors.items()
            if name in self._weights and tensor.numel() > 0 and _are_one(tensor, trained[name])
        ]
        if shared:
            raise FailedPreconditionError(
                f'model "{self._model_name}": ema_model: the module for the averages shares memory with the '
                f"trained model: {arrays.some(shared)}; {_WITHOUT_COPY}",
                reason="BAD_REQUEST",
            )

    def refresh(self, timeout_s: float | None) -> None:
        """Updates the values to the newest version.

        EmaError: as `Client.refresh`. The values are unchanged, or, if `problem` is set, of two
        versions.
        """
        start = time.monotonic()
        is_torn = bool(self.problem)
        try:
            self._let_in()
            is_newer = self._client.refresh(self._weights, timeout_s=timeout_s)
            is_torn = True
            self._write()
        except BaseException as error:
            if is_torn or self._has_mixed():
                self._disable(str(error) or type(error).__name__)
            raise
        self.version = self._weights.version
        if is_newer:
            self.seconds = time.monotonic() - start

    def check_consistent(self) -> None:
        """FailedPreconditionError: the module has values of two versions."""
        if self.problem:
            _refuse(self.problem)

    def _has_mixed(self) -> bool:
        """Whether a failed pull has written to the module's own memory."""
        pulled = self._weights._pulled
        if pulled is None:  # EMA_MODE is "local".
            return False
        return pulled.is_mixed and any(
            _are_one(tensor, self._weights[name])
            for name, tensor in named_tensors(self.module).all().items()
            if name in self._weights
        )

    def _disable(self, why: str) -> None:
        """Makes the module's forward and `state_dict` raise, for every user of the module."""
        import torch

        self.problem = (
            f'model "{self._model_name}": ema_model is partly of step {self.version.step} and partly of '
            f"a later one, as an update broke off ({why}): bring it to one by update_ema_model(), or, "
            "after close(), use ema_client.averaged(model, url)"
        )
        if isinstance(self.module, torch.jit.ScriptModule):
            return  # A ScriptModule takes no hooks.
        refuse = functools.partial(_refuse, self.problem)
        self._bars = [
            self.module.register_forward_pre_hook(refuse),
            self.module.register_state_dict_pre_hook(refuse),  # type: ignore[no-untyped-call]
        ]

    def _let_in(self) -> None:
        self.problem = ""
        for bar in self._bars:
            bar.remove()
        self._bars = []

    def _write(self) -> None:
        trained = named_tensors(self._model).all()
        # Tensors that the track ignores have the model's own values.
        values = {name: self._weights.get(name, own.detach()) for name, own in trained.items()}
        tensors = {
            name: tensor
            for name, tensor in named_tensors(self.module).all().items()
            if not _are_one(tensor, values[name])
        }
        check_castable("ema_model", values=values, targets=tensors)
        write((tensor, values[name]) for name, tensor in tensors.items())


def _refuse(problem: str, *_: object) -> None:
    raise FailedPreconditionError(problem, reason="BAD_REQUEST")


def _are_one(tensor: torch.Tensor, value: torch.Tensor) -> bool:
    import torch

    return tensor.layout == torch.strided and tensor.data_ptr() == value.data_ptr()


def _may_share(parameter: torch.Tensor, value: torch.Tensor) -> bool:
    import torch

    return (
        type(parameter) is torch.nn.Parameter
        and parameter.device.type == "cpu"
        and parameter.dtype == value.dtype
        and parameter.shape == value.shape
        and parameter.is_contiguous()
    )


class EmaModel:
    """The averaged module of an attachment, created at the first access."""

    def __init__(self, pusher: Pusher, client: Client, module: torch.nn.Module) -> None:
        self._pusher = pusher
        self._client = client
        self._module = module
        self._copy: AveragedCopy | None = None
        # A module for the averages, or a function that makes one; None: a deep copy.
        self.given: ModuleLike | None = None

    @property
    def module(self) -> torch.nn.Module:
        """As `Attachment.ema_model`."""
        self.update()
        assert self._copy is not None
        return self._copy.module

    def update(self) -> Version:
        """As `Attachment.update_ema_model`."""
        if not self._pusher.is_closed:
            self._bring_up_to_date(raises=self._pusher.options.on_error != "skip")
        elif self._copy is None:
            raise FailedPreconditionError(
                f'model "{self._pusher.options.model_name}": the attachment is closed: ask for ema_model '
                "before, or use ema_client.averaged(model, url)",
                reason="BAD_REQUEST",
            )
        else:
            self._copy.check_consistent()
        assert self._copy is not None
        return self._copy.version

    def update_at_close(self, timeout_s: float) -> None:
        """Updates an accessed module to the last version, unless that may exceed `timeout_s`."""
        if self._copy is None:
            return
        try:
            self._bring_up_to_date(raises=False, timeout_s=timeout_s)
        except EmaError as error:
            _logger.warning("%s", error)

    def average_name(self) -> str:
        """The name of the track whose average the module has."""
        with self._pusher.lock:
            tracks = self._pusher.engine.tracks
        return only_average(
            f'model "{self._pusher.options.model_name}": ',
            {track.name: track.schedule.is_copy for track in tracks},
        )

    def _bring_up_to_date(self, *, raises: bool, timeout_s: float | None = None) -> None:
        """Creates the module, or updates it to the newest version. `raises` False: an error becomes
        a warning if there is a copy of one version. `timeout_s`: if the last update took longer,
        the module is not updated."""
        pusher = self._pusher
        model_name = pusher.options.model_name
        try:
            newest = pusher.wait_pushed(pusher.options.max_wait_s)
            if newest is None:
                raise FailedPreconditionError(
                    f'model "{model_name}" has no version yet', reason="NO_VERSION"
                )
            copied = self._copy
            is_whole = copied is not None and not copied.problem
            if copied is not None and is_whole and version_id(copied.version) == version_id(newest):
                return  # It is the newest, since only this run pushes.
            if (disconnected := pusher.disconnected_error()) is not None:
                raise disconnected
            if copied is None:
                self._copy = AveragedCopy(
                    self._module,
                    self.given,
                    client=self._client,
                    model_name=model_name,
                    track=self.average_name(),
                )
            elif is_whole and timeout_s is not None and timeout_s < copied.seconds:
                raise DeadlineExceededError(
                    f"{timeout_s:.3g} s are left, and the last update took {copied.seconds:.3g} s"
                )
            else:
                copied.refresh(timeout_s)
            assert self._copy is not None
            warn_of_first_weights(model_name, self._copy.version, self.average_name())
        except EmaError as error:
            if raises or self._copy is None:
                raise
            self._copy.check_consistent()
            _logger.warning(
                'model "%s": ema_model stays at step %d: %s',
                model_name,
                self._copy.version.step,
                error,
            )
