# SPDX-License-Identifier: Apache-2.0
"""`attach` where EMA_MODE is "local", with averages in this process, or "disabled", without averages.

The attachment is the same as with a server. Only the parts below it differ: the engine, the client and,
without averages, the copy of the model.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, cast

from ema_client import _ema
from ema_client._client.arrays import Framework
from ema_client._client.client import Client
from ema_client._client.mode import Mode, no_server_error, no_version
from ema_client._client.pull_arguments import selection_from
from ema_client._client.read import local_clients
from ema_client._client.training_time import TrainingTime
from ema_client._client.types import ModelInfo, Version, VersionLike, Weights, specs_from
from ema_client._client.url import split_url
from ema_client._client.timeouts import CALL_TIMEOUT_S
from ema_client._errors import EmaError, FailedPreconditionError, InvalidArgumentError
from ema_client._local import LocalEMA
from ema_client._model.engine import is_megatron_optimizer
from ema_client._model.optimizers import check_held, unwrap_optimizers, with_contained
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import (
    ModelTensors,
    engine_of,
    named_tensors,
    specs_of,
    unwrap,
    write,
)
from ema_client._tracks.track import track_from
from ema_client._trainer.arguments import PushOptions
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.buffers import AveragedBuffers
from ema_client._trainer.ema_model import EmaModel
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.joining import Joined, of_known_dtypes
from ema_client._trainer.switch import PresetOptions

if TYPE_CHECKING:
    import torch

    from ema_client._trainer.ema_model import ModuleLike

_logger = logging.getLogger(__name__)


def attach_without_server(
    mode: Mode,
    given: Mapping[str, Any],
    options: PresetOptions,
    tracks: list[_ema.Track],
    undecided: Collection[str],
) -> Attachment:
    """`attach` with the arguments `given`, which have been checked. The rest: of `options_and_tracks`.

    Raises:
        FailedPreconditionError: "local", and the training has several ranks, or an argument needs a
            server.
        InvalidArgumentError, TypeError: as `attach`.
    """
    model, optimizer = given["model"], given["optimizer"]
    address, model_name = split_url(given["url"])
    engine = optimizer if is_megatron_optimizer(optimizer) else engine_of(model)
    optimizers = None if optimizer is None or engine is not None else unwrap_optimizers(optimizer)
    module = unwrap(model)
    options.check(module)
    tensors = ModelTensors(module)
    client: _NoClient = _NoClient(mode, address)
    if mode == "local":
        world_size = Ranks.current(given["process_group"]).world_size
        if world_size > 1:
            raise no_server_error(mode, f"a training of {world_size} ranks")
        for name in ("resume", "rename"):
            if given[name] is not None:
                raise no_server_error(mode, f"attach({name}=)")
        if given["source"] != "parameters":
            raise no_server_error(mode, f'attach(source="{given["source"]}")')
        if optimizers is not None:
            check_held(with_contained(optimizers), module.parameters())
        average = LocalEMA._of_tracks(model, tracks, undecided)
        client = local_clients[address, model_name] = LocalClient(address, model_name, average)
        _logger.warning('model "%s": EMA_MODE=local: averaged in this process only', model_name)
    else:
        options = dataclasses.replace(options, rule=None)
        engine = optimizers = None  # No steps are counted.
        _logger.warning('model "%s": EMA_MODE=disabled: nothing is averaged', model_name)
    push_engine = LocalEngine(
        client if isinstance(client, LocalClient) else None, given["start_step"] or 0
    )

    def join_at(state: Mapping[str, Any] | None) -> None:
        if state is not None and mode == "local":
            raise no_server_error(mode, "load_state_dict()")

    attachment = Attachment(
        PushOptions(
            model_name=model_name,
            tensors_of=tensors,
            time_of=given["time"],
            max_wait_s=given["max_wait_s"],
            timeout_s=given["timeout_s"] or CALL_TIMEOUT_S,
            on_error=given["on_error"] or "skip",
            max_outage_s=given["max_outage_s"],
            check=False,
            averaged_buffers=AveragedBuffers("", tensors(), [], [], []),
            non_finite="allow",
        ),
        client=cast(Client, client),
        joined=Joined(
            None, frozenset(), lambda **_: cast(_ema.PushEngine, push_engine), push_engine.step
        ),
        join_at=join_at,
        module=module,
        optimizers=optimizers,
        engine=engine,
        frozen=FrozenTensors([], tensors(), {}, check=False),
        keep_resumable=given["keep_resumable"],
    )
    if mode == "disabled":
        attachment._count_by_hand()
        attachment._ema_model = cast(EmaModel, OwnModel(module))
    options.apply(attachment, Ranks.alone())
    return attachment


class LocalEngine:
    """Stands in for `_ema.PushEngine`: updates averages in this process at each step.

    Attributes:
        step: the trainer's steps so far.
    """

    rank = run_epoch = 0
    is_disconnected = is_fenced = False
    is_push_done = True

    def __init__(self, client: LocalClient | None, step: int) -> None:
        """`client`: has the averages. None: nothing is averaged or counted."""
        self.step = step
        self._client = client
        self._error: EmaError | None = None

    @property
    def version(self) -> Version | None:
        return None if self._client is None else self._client.version

    @property
    def stats(self) -> dict[str, Any]:
        pushes = 0 if self.version is None else self.version.number
        return {"pushes": pushes, "skipped": 0, "sent_bytes": 0, "wait_seconds": 0.0}

    @property
    def tracks(self) -> list[_ema.Track]:
        return [] if self._client is None else self._client.tracks

    def after_step(self, step: int, training_step: _ema.TrainingStep) -> None:
        if self._client is None:
            return
        self.step = step
        try:
            self._client.update(step, training_step.time())
        except EmaError as error:
            self._error = error

    def raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _do_nothing(self, *_: object) -> None:
        """There are no pushes."""

    wait_released = wait_pushed = end_pushes = leave = poll = abandon_written_push = _do_nothing


class _NoClient:
    """Stands in for `Client`: all calls raise a FailedPreconditionError that names EMA_MODE."""

    def __init__(self, mode: Mode, address: str) -> None:
        self._mode: Mode = mode
        self._address = address

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise no_server_error(self._mode, f"{name}()")

        return refuse

    def __enter__(self) -> _NoClient:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass


class LocalClient(_NoClient):
    """Reads averages of this process as `Client` reads a server's: the newest version only.

    Attributes:
        version: the newest version; None: there is none yet.
    """

    def __init__(self, address: str, model_name: str, average: LocalEMA) -> None:
        super().__init__("local", address)
        self._model_name = model_name
        self._average = average
        self.version: Version | None = None
        # Held while averages are updated or copied: evaluations have threads of their own.
        self._lock = threading.RLock()

    @property
    def tracks(self) -> list[_ema.Track]:
        return [track.track for track in self._average._tracks.values()]

    def update(self, step: int, now: dict[str, float]) -> None:
        """Updates the averages that are due at this step; each step that updates one makes a version."""
        with self._lock:
            self._update(step, now)

    def _update(self, step: int, now: dict[str, float]) -> None:
        records = self._average.update(now)
        if any(record.updated for record in records.values()):
            self.version = Version(
                number=1 if self.version is None else self.version.number + 1,
                step=step,
                incarnation=1,
                time=TrainingTime(**now),  # type: ignore[arg-type]
                tracks=records,
                commit_time=time.time(),
            )

    def model(self, name: str, *, timeout_s: float | None = None) -> ModelInfo:
        tensors = self._average._named_tensors()
        return ModelInfo(
            name=name,
            tensors=tuple(specs_from(of_known_dtypes(specs_of(tensors)))),
            tracks={track.name: track_from(track) for track in self.tracks},
            max_pinned_versions=0,
            reserved_bytes=0,
            latest=self.version,
            run_epoch=0,
        )

    def pull(
        self,
        name: str,
        *,
        track: str | None = None,
        version: VersionLike | None = None,
        step: int | None = None,
        tensors: str | Collection[str] | None = None,
        slices: Any = None,
        out: Any = None,
        framework: Framework = "auto",
        device: Any = None,
        on_progress: Any = None,
        **_: Any,
    ) -> Weights:
        """Copies of the averages, as torch tensors in their own dtype: callers that write them into a
        model cast them."""
        refused = {"slices": slices, "out": out, "device": device, "on_progress": on_progress}
        for argument, value in refused.items():
            if value is not None:
                raise no_server_error("local", f"pull({argument}=)")
        if framework not in ("auto", "torch"):
            raise no_server_error("local", f'pull(framework="{framework}")')
        with self._lock:
            return self._pull(name, track, version, step, selection_from(tensors, None)[0])

    def _pull(
        self,
        name: str,
        track: str | None,
        version: VersionLike | None,
        step: int | None,
        chosen_names: list[str],
    ) -> Weights:
        newest = self.version
        if newest is None:
            raise FailedPreconditionError(f'model "{name}" has no version yet', reason="NO_VERSION")
        wanted = version.number if isinstance(version, Version) else version or newest.number
        if wanted != newest.number or step not in (None, newest.step):
            what = f"version {wanted}" if step is None else f"step {step}"
            raise no_server_error(
                "local", f"{what} (the newest is version {newest.number}, of step {newest.step})"
            )
        chosen = self._average._get(track).track.name
        values = self._average.weights(chosen)
        aliases = {alias: one for alias, one in self._average._aliases().items() if one in values}
        if chosen_names:
            unknown = set(chosen_names) - values.keys() - aliases.keys()
            if unknown:
                raise InvalidArgumentError(
                    f'tensors: track "{chosen}" has no {", ".join(sorted(unknown))} (EMA_MODE=local '
                    "takes whole names, no patterns)",
                    reason="BAD_LAYOUT",
                )
            wanted_names = {aliases.get(one, one) for one in chosen_names} | set(chosen_names)
            values = {key: one for key, one in values.items() if key in wanted_names}
        aliases = {alias: one for alias, one in aliases.items() if one in values}
        return Weights(values, version=newest, track=chosen, aliases=aliases)

    def refresh(self, weights: Weights, *, timeout_s: float | None = None) -> bool:
        """Updates the result of a `pull` in place. False: it was the newest already."""
        newest = self.pull(self._model_name, track=weights.track)
        if newest.version == weights.version:
            return False
        write((value, newest[name]) for name, value in weights.items())
        weights.version = newest.version
        return True


class OwnModel:
    """Stands in for `EmaModel`: a copy of the model with the model's own weights."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._copy: torch.nn.Module | None = None
        self.given: ModuleLike | None = None

    @property
    def module(self) -> torch.nn.Module:
        self.update()
        assert self._copy is not None
        return self._copy

    def update(self) -> Version:
        import torch

        if self._copy is None:
            # The first access may be in inference mode, and later ones outside it.
            with torch.inference_mode(False):
                made = self.given
                if made is None:
                    made = copy.deepcopy(self._module)
                elif not isinstance(made, torch.nn.Module):
                    made = made()
            self._copy = made.eval().requires_grad_(False)
        own = named_tensors(self._module).all()
        copies = named_tensors(self._copy).all()
        write((tensor, own[name].detach()) for name, tensor in copies.items())
        return no_version()

    def update_at_close(self, timeout_s: float) -> None:
        pass

    def average_name(self) -> str:
        return "ema"
