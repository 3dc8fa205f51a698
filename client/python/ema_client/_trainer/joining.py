# SPDX-License-Identifier: Apache-2.0
"""Creates the model and joins its run, on all ranks of a trainer together."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.client import Client
from ema_client._client.run import Run, shard_tuples
from ema_client._client.state import State
from ema_client._client.types import NonFinite, Version, WireDtype, resume_tuple
from ema_client._client.url import split_url
from ema_client._errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
)
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import NamedTensors
from ema_client._trainer.arguments import Existing
from ema_client._trainer.buffers import (
    AveragedBuffers,
    ignored_by_default,
    warn_of_base,
    warn_of_ignored,
    with_default_actions,
)
from ema_client._trainer.rank_layout import Layout
from ema_client._trainer.resume import DISK_TIMEOUT_S

_logger = logging.getLogger(__name__)

# How long a training that may start without the server waits for it.
START_WAIT_S = 10.0
# The errors of calls to a server that is unreachable, see `is_outage`.
OUTAGES = (UnavailableError, DeadlineExceededError)


def is_outage(error: Exception) -> bool:
    """Whether the error means that the server is unreachable, not that its disk has failed, for example."""
    return isinstance(error, OUTAGES) and error.reason in ("", "DRAINING")


def join(
    ranks: Ranks,
    plan: Plan | None,
    failure: Exception | None,
    resume: Mapping[str, Any] | None,
    timeout_s: float,
) -> Joined:
    """Opens a run on all ranks, or raises on all of them. If the server cannot be reached from some rank,
    and `plan.may_start_alone`, no rank opens it: their engines join later. Collective.

    `failure`: an earlier failure of this rank; `plan` may then be None.
    """
    launch: Launch | None = None
    state: State | None = None
    try:
        if plan is not None and resume is not None:
            state = State.from_dict(resume, model=plan.model_name)
        if plan is not None and failure is None and ranks.rank == 0:
            outage = plan.create_or_outage(timeout_s, state)
            launch = Launch(secrets.token_hex(16), state, outage)
    except Exception as raised:
        failure = raised
    launch = ranks.broadcast(launch)
    try:
        # Without a launch, rank 0 has failed: its error is raised below.
        if plan is not None and launch is not None and failure is None:
            plan.check_state(launch, state)
    except Exception as raised:
        failure = raised
    # All ranks must have passed their checks before the first one ends the previous run.
    ranks.gather_or_raise(failure, None)
    assert plan is not None and launch is not None
    run: Run | None = None
    step = 0 if state is None else state.step
    outage = launch.outage
    # Rank 0 first, so that the model has been rolled back, if needed, when the others join. All
    # have joined when this returns, so the first push finds the run complete.
    for is_next in (ranks.rank == 0, ranks.rank != 0):
        if outage:
            break
        try:
            if is_next:
                if plan.may_start_alone(state is not None):
                    plan.await_server(timeout_s)
                run = plan.open_run(launch, timeout_s)
                if state is None and run.latest is not None:
                    step = run.latest.step
        except Exception as raised:
            if plan.may_start_alone(state is not None) and is_outage(raised):
                outage = f"rank {ranks.rank}: {raised}" if ranks.world_size > 1 else str(raised)
            else:
                failure = raised
        of_ranks = ranks.gather_or_raise(failure, (step, outage))
        step = of_ranks[0][0]
        outage = next((text for _, text in of_ranks if text), "")
    if outage:
        run = None
        step = 0 if state is None else state.step
        if ranks.rank == 0:
            plan.warn_of_start_alone(outage)
    make_engine = functools.partial(plan.make_engine, run, launch)
    return Joined(run, plan.pushed_names, make_engine, step)


def resume_at(
    ranks: Ranks, plan: Plan, timeout_s: float, state: Mapping[str, Any] | None
) -> Joined | None:
    """Like `join`, for a state that is loaded later. None: no rank has a state. Collective."""
    ranks = dataclasses.replace(ranks, call="load_state_dict()")
    if all(ranks.gather(state is None)):
        return None
    return join(ranks, plan, None, state, timeout_s)


@dataclasses.dataclass(frozen=True)
class Joined:
    """A run that all ranks have joined, or will join.

    Attributes:
        run: this rank's part of the run. None: the engine joins later, or EMA_MODE says that there is no
            server.
        names: the tensors of which this rank pushes all or a part.
        make_engine: makes the engine that pushes to the run and then owns it; takes the engine's
            options.
        step: the trainer's steps so far.
    """

    run: Run | None
    names: frozenset[str]
    make_engine: Callable[..., _ema.PushEngine]
    step: int


@dataclasses.dataclass(frozen=True)
class Launch:
    """Rank 0's broadcast to the others.

    Attributes:
        id: of the launch.
        state: to resume from.
        outage: why rank 0 cannot reach the server; "": it can, and the model is there.
    """

    id: str
    state: State | None
    outage: str


class Plan:
    """One rank's part in creating the model and joining its run."""

    def __init__(
        self,
        *,
        url: str,
        ranks: Ranks,
        layout: Layout,
        tracks: list[_ema.Track],
        undecided: Collection[str],
        max_pinned_versions: int,
        non_finite: NonFinite,
        wire_dtype: WireDtype,
        max_staging_bytes: int,
        files: dict[str, bytes],
        existing: Existing,
        starts_alone: bool,
        knows_step: bool,
        timeout_s: float | None,
    ) -> None:
        """`starts_alone`: the training starts without an unreachable server, if `knows_step`, or a state
        says the step, or no average is continued."""
        address, self.model_name = split_url(url)
        self.client = Client(address, timeout_s=timeout_s)
        layout = layout.without(ignored_by_all(layout.specs, tracks))
        specs = of_known_dtypes(layout.specs)
        tracks = with_default_actions(tracks, layout.default_actions, undecided, specs)
        ignored = _ignored_by_each(specs, tracks)
        self.layout = layout.without(ignored)
        check_dtypes(self.layout.specs)
        if ranks.rank == 0:
            what = f'model "{self.model_name}"'
            if buffers := ignored_by_default(layout.default_actions, specs):
                warn_of_ignored(what, buffers)
            if count := len(ignored) - len(buffers):
                warn_of_base(what, count, len(specs) - len(buffers))
        self._undecided = undecided
        self._ranks = ranks
        self._shards = self.layout.shards(ranks.rank)
        self._tracks = [track.without_idle_rules(self.layout.specs) for track in tracks]
        self._max_pinned_versions = max_pinned_versions
        self._non_finite = non_finite
        self._wire_dtype = wire_dtype
        self._max_staging_bytes = max_staging_bytes
        self._files = files
        self._existing: Existing = existing
        self._starts_alone = starts_alone
        self._knows_step = knows_step
        self._has_warned = False
        self.pushed_names = frozenset(shard.name for shard in self._shards)

    def averaged_buffers(self, tensors: NamedTensors) -> AveragedBuffers:
        """Those of this rank's `tensors` that are averaged by default."""
        what = f'model "{self.model_name}"'
        return AveragedBuffers(what, tensors, self._tracks, self._undecided, self.layout.specs)

    def may_start_alone(self, resumes: bool) -> bool:
        """Whether the training starts without the server if it is unreachable. An average that continues
        must have a known step: from start_step, or from a state that the training `resumes`."""
        knows_step = self._knows_step or resumes or self._existing != "continue"
        return self._starts_alone and knows_step

    def create_or_outage(self, timeout_s: float, state: State | None) -> str:
        """Creates the model unless it exists. Returns why the server is unreachable, if the training
        may start without it; else "".

        UnavailableError, DeadlineExceededError: the training may not start without it; says how it may.
        """
        may_start_alone = self.may_start_alone(state is not None)
        try:
            if may_start_alone:
                self.await_server(timeout_s)
            self.warn_of_changes(self.create(timeout_s, state))
            return ""
        except OUTAGES as raised:
            if not is_outage(raised):
                raise
            if may_start_alone:
                return str(raised)
            error = raised  # Python deletes `raised` at the end of the block.
        # Not inside `except`: the traceback would show both errors.
        needs_step = "" if self._existing != "continue" or self._knows_step else " and start_step="
        raise type(error)(
            f"{error.args[0]}. To train without the average until the server can be reached, give on_error="
            f'"skip"{needs_step}; to train without a server, set EMA_MODE=disabled',
            reason=error.reason,
        )

    def await_server(self, timeout_s: float) -> None:
        """Waits for the server as long as a training that may start without it does. Raises OUTAGES."""
        with contextlib.suppress(UnauthenticatedError, PermissionDeniedError):
            self.client.server_info(timeout_s=min(START_WAIT_S, timeout_s))

    def warn_of_start_alone(self, outage: str) -> None:
        _logger.warning(
            'model "%s": the training starts without its average (on_error="skip"), and joins when '
            "all ranks reach the server; the steps until then are not averaged: %s",
            self.model_name,
            outage,
        )

    def create(self, timeout_s: float, state: State | None = None) -> list[_ema.Track]:
        """Creates the model unless it exists. Returns its tracks as they are for the next step."""
        if state is not None and state.version != 0:
            # A deleted model cannot be resumed, and must not be created again.
            self.client.model(self.model_name, timeout_s=timeout_s)
        difference: AlreadyExistsError | None = None
        try:
            there = self._create_or_match(timeout_s)
        except AlreadyExistsError as raised:
            difference = raised
            there = self.client._client.get_model(self.model_name, timeout_s)
        # Not inside `except`: the traceback would show both errors.
        existing = self._existing if state is None else "continue"
        latest = there.latest
        # Version 1 may be an import, from which a training is meant to continue.
        if existing == "error" and latest is not None and latest.number > 1:
            raise self._exists_error(latest)
        if existing == "new" and latest is not None:
            there = self._create_again(timeout_s)
        elif existing != "continue" and latest is None and difference is not None:
            _logger.warning(
                'model "%s": created again, since it has other tensors, tracks or options, and no version '
                "yet",
                self.model_name,
            )
            there = self._create_again(timeout_s)
        elif difference is not None:
            raise difference
        if state is not None:
            state.check_fresh(there.latest)
        if self._files:
            self.client.attach_files(self.model_name, self._files, timeout_s=timeout_s)
        return there.pending_tracks or there.tracks

    def warn_of_changes(self, tracks: list[_ema.Track]) -> None:
        """Warns, once, of tracks that differ from the requested ones: the server accepts the tracks
        that the model was created with, even if UpdateModel has changed them since."""
        if self._has_warned:
            return
        self._has_warned = True
        there = {track.name: track for track in tracks}
        for track in self._tracks:
            if track.name not in there:
                change = "was removed on the server since the model was made; nothing goes into it"
            elif there[track.name].paused and not track.paused:
                change = "was paused on the server since the model was made; nothing goes into it"
            elif there[track.name] != track:
                change = (
                    f"its schedule was changed to {there[track.name]} on the server since the model was "
                    "made; it continues with that"
                )
            else:
                continue
            _logger.warning('model "%s": track "%s": %s', self.model_name, track.name, change)

    def _create_or_match(self, timeout_s: float) -> _ema.ModelInfo:
        """The model, which is created unless it exists. AlreadyExistsError: it exists,
        and differs."""
        try:
            return self._create(self.layout.specs, self._tracks, timeout_s)
        except AlreadyExistsError as raised:
            refused = raised  # Python deletes `raised` at the end of the block.
        # Not inside `except`: the traceback would show both errors.
        there = self.client._client.get_model(self.model_name, timeout_s)
        if not self._can_continue_with(there.tensors):
            raise refused
        self._check_actions(there.tensors)
        # The server compares the tracks, since it also accepts those that the model was created with.
        places = {track.name: place for place, track in enumerate(there.tracks)}
        tracks = sorted(self._tracks, key=lambda track: places.get(track.name, len(places)))
        return self._create(there.tensors, tracks, timeout_s)

    def _create_again(self, timeout_s: float) -> _ema.ModelInfo:
        """Deletes the model, whose checkpoints stay on the disk, and creates it."""
        try:
            self.client.delete_model(self.model_name, timeout_s=timeout_s)
        except PermissionDeniedError as raised:
            raise PermissionDeniedError(
                f'{raised.args[0]}. A new average of model "{self.model_name}" needs the old model to be '
                "deleted: use an admin's token, or take another name",
                reason=raised.reason,
            ) from None
        return self._create(self.layout.specs, self._tracks, timeout_s)

    def _exists_error(self, latest: Version) -> FailedPreconditionError:
        return FailedPreconditionError(
            f'model "{self.model_name}" has the average of an earlier training, at step {latest.step} '
            f'(version {latest.number}): pass existing="continue" to continue its average (also if '
            'load_state_dict() resumes later), existing="new" to start a new average and keep the old '
            "checkpoints on the server's disk, or resume= with the state_dict() in the trainer's own "
            "checkpoint to continue from there",
            reason="RESUME_MISMATCH",
        )

    def _create(
        self, specs: list[_ema.Spec], tracks: list[_ema.Track], timeout_s: float
    ) -> _ema.ModelInfo:
        options = (self._max_pinned_versions, self._non_finite)
        try:
            return self.client._client.create_model(
                self.model_name, specs, tracks, *options, timeout_s
            )
        except AlreadyExistsError as raised:
            raise AlreadyExistsError(
                f"{raised.args[0]}. Give attach() what the model was made with, or first change its "
                'tracks (Client.update_model, `emactl update`), or start a new average: existing="new", '
                "or another name",
                reason=raised.reason,
            ) from None

    def _can_continue_with(self, specs: list[_ema.Spec]) -> bool:
        """Whether these are our tensors in another order (of other pipeline stages), or from a
        file, which does not record buffers and tied names."""

        def key(spec: _ema.Spec, is_from_file: bool) -> tuple[object, ...]:
            name, dtype, shape, is_buffer, aliases = spec
            said = () if is_from_file else (is_buffer, tuple(aliases))
            return name, dtype, tuple(shape), *said

        is_from_file = not any(is_buffer or aliases for *_, is_buffer, aliases in specs)
        return {key(spec, is_from_file) for spec in specs} == {
            key(spec, is_from_file) for spec in self.layout.specs
        }

    def _check_actions(self, specs: list[_ema.Spec]) -> None:
        """AlreadyExistsError: a track would average a buffer on the server that it copies here."""
        own = {spec[0]: spec for spec in self.layout.specs}
        here = [own[name] for name, *_ in specs]
        for track in self._tracks:
            names = [
                spec[0]
                for spec, wanted, done in zip(specs, track.actions(here), track.actions(specs))
                if wanted != done
            ]
            if names:
                raise AlreadyExistsError(
                    f'model "{self.model_name}": made from a file, which does not say that these are '
                    f'buffers, so that track "{track.name}" would average them, not copy them: '
                    f"{arrays.some(names)}. Give the track tensor_rules that copy them by name, in the "
                    "import and here",
                    reason="MODEL_DIFFERS",
                )

    def check_state(self, launch: Launch, state: State | None) -> None:
        if launch.state != state:
            raise InvalidArgumentError(
                f'model "{self.model_name}": the ranks resume from different states: rank '
                f"{self._ranks.rank} from {state}, rank 0 from {launch.state}"
            )

    def open_run(self, launch: Launch, timeout_s: float) -> Run:
        resume = None if launch.state is None else launch.state.resume_point
        if resume is not None:
            timeout_s = max(timeout_s, DISK_TIMEOUT_S)
        run = self.client._open_run(
            self.model_name,
            launch_id=launch.id,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            shards=self._shards,
            frozen=self.layout.frozen,
            wire_dtype=self._wire_dtype,
            max_staging_bytes=self._max_staging_bytes,
            rejoins=False,
            resume=resume,
            timeout_s=timeout_s,
        )
        arrays.check_names(
            f'model "{self.model_name}"',
            expected=[spec.name for spec in run.tensors],
            given=[spec[0] for spec in self.layout.specs],
            places=("in the module", "on the server"),
        )
        return run

    def make_engine(self, run: Run | None, launch: Launch, **options: Any) -> _ema.PushEngine:
        """Makes the engine, which also creates the model again if the server has lost it. Without a run,
        it opens one when the server can be reached."""
        state = launch.state
        existing = self._existing if state is None else "continue"
        if state is not None and state.version == 0:  # As State.check_fresh().
            existing = "error"
        engine = _ema.PushEngine(
            client=self.client._raw,
            run=None if run is None else run._get(),
            unopened=None if run is not None else self._unopened(state),
            existing=existing,
            model=self.model_name,
            launch_id=launch.id,
            world_size=self._ranks.world_size,
            tracks=self._tracks,
            max_pinned_versions=self._max_pinned_versions,
            non_finite=self._non_finite,
            files=self._files,
            wire_dtype=self._wire_dtype,
            max_staging_bytes=self._max_staging_bytes,
            **options,
        )
        if run is not None:
            run.close()  # The engine owns it now.
        return engine

    def _unopened(self, state: State | None) -> _ema.UnopenedRun:
        shards, frozen_count = shard_tuples(self.layout.specs, self._shards, self.layout.frozen)
        resume = None if state is None else resume_tuple(state.resume_point)
        return self.layout.specs, shards, frozen_count, self._ranks.rank, resume


def of_known_dtypes(specs: list[_ema.Spec]) -> list[_ema.Spec]:
    """The specs, with float32 for unknown dtypes: tensors that rules ignore may have any dtype."""
    return [
        (name, dtype if dtype in arrays.DTYPES else "float32", shape, is_buffer, aliases)
        for name, dtype, shape, is_buffer, aliases in specs
    ]


def ignored_by_all(specs: list[_ema.Spec], tracks: list[_ema.Track]) -> set[str]:
    """The tensors that all tracks ignore. InvalidArgumentError: a track or a rule is wrong, or a
    rule matches no tensor: the server, which does not get ignored tensors, cannot check that."""
    specs = of_known_dtypes(specs)
    for track in tracks:
        track.check(specs)
    return _ignored_by_each(specs, tracks)


def _ignored_by_each(specs: list[_ema.Spec], tracks: list[_ema.Track]) -> set[str]:
    actions = [track.actions(specs) for track in tracks]
    return {
        spec[0]
        for spec, *of_tracks in zip(specs, *actions)
        if all(action == "ignore" for action, _ in of_tracks)
    }


def check_dtypes(specs: list[_ema.Spec]) -> None:
    """InvalidArgumentError: names the tensors whose dtype the server cannot hold."""
    wrong = [f"{name}: {dtype}" for name, dtype, *_ in specs if dtype not in arrays.DTYPES]
    if wrong:
        raise InvalidArgumentError(
            f"tensors whose dtype cannot be averaged: {arrays.some(wrong)}; must be one of "
            f"{', '.join(arrays.DTYPES)}, or ignored by the tensor_rules of all tracks",
            reason="BAD_MANIFEST",
        )
