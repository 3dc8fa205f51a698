# SPDX-License-Identifier: Apache-2.0
"""`attach`: three lines in a training loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickle
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ema_client import _arrays, _ema
from ema_client._attachment import Attachment, Joined, OnError
from ema_client._client import Client
from ema_client._errors import AlreadyExistsError, InvalidArgumentError, NotFoundError
from ema_client._files import FilesLike, small_files
from ema_client._ranks import Ranks
from ema_client._resume import DISK_TIMEOUT_S, State
from ema_client._run import Run
from ema_client._torch_model import (
    NamedTensors,
    check_whole,
    named_tensors,
    specs_of,
    unwrap,
)
from ema_client._track import TrackLike, tracks_of
from ema_client._types import NonFinite, TimeLike, WireDtype, model_from, time_dict
from ema_client._url import split_url

if TYPE_CHECKING:
    import torch


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    url: str,
    *,
    half_life: str | None = None,
    smoothing: float | None = None,
    update_interval: str | None = None,
    ema_start: str | None = None,
    preset: str | Mapping[str, Any] | None = None,
    tracks: Mapping[str, TrackLike] | None = None,
    non_finite: NonFinite = "reject",
    wire_dtype: WireDtype = "as pushed",
    start_step: int | None = None,
    time: Callable[[int], TimeLike] | None = None,
    process_group: Any = None,
    max_pinned_versions: int = 0,
    max_wait_s: float = 30.0,
    timeout_s: float = 60.0,
    on_error: OnError = "skip",
    resume: Mapping[str, Any] | None = None,
    keep_resumable: int = 5,
    files: FilesLike | None = None,
) -> Attachment:
    """Streams a model's weights to an EMA Server while it trains.

    To be called on every rank. Makes the model on the server if it is not there. From then on each
    `optimizer.step()` counts as a batch, and when an update is due a push starts after it: every rank
    sends an even share of the parameters, rank 0 also the buffers (BatchNorm's statistics differ
    between ranks). Parameters are read in place, not copied; the next `optimizer.step()` waits until
    their bytes have left. Those without requires_grad are sent until every track has their values;
    after that only a checksum tells, at each push, whether they have changed. Whoever else writes weights between steps (load_state_dict, clipping of
    weights) must call the attachment's `wait_released()` first.

    A server that goes away costs the steps that are due meanwhile, and about a second. When it is
    back, pushes start again; a server that has forgotten the model gets it made anew.

    Args:
        model: the model; DistributedDataParallel and torch.compile are looked through. With
            torch.distributed initialized, all ranks must hold the same parameters, whole: FSDP and
            DTensor are not supported yet.
        optimizer: the one that changes the parameters. Parameters that it does not hold are copied
            before they are sent, because someone else may change them: another optimizer, or the
            forward pass (a momentum encoder).
        url: "ema://host:port/model".
        half_life: of the track "ema", such as "200ba". With neither this nor smoothing, preset or
            tracks: "1000ba".
        smoothing: of the track "ema", instead of a half-life: the share of the old average that is
            kept at each update, never rescaled.
        update_interval: how often, such as "5ba"; for all tracks that do not say themselves.
        ema_start: when the track "ema" starts to average, such as "0.1dur".
        preset: the track "ema" as a library averages: its name ("diffusers"), or with arguments in
            the library's own words {"preset": "diffusers", "decay": 0.999}; see `Track.preset`.
        tracks: more tracks, as for `Client.create_model`. Tensors that all tracks ignore are not
            sent.
        non_finite: as for `Client.create_model`.
        wire_dtype: as for `Client.open_run`: "bfloat16" halves what is sent.
        start_step: optimizer steps done before. None: goes on after the model's newest version.
        time: gives the training time after so many steps, the same on all ranks; needed for tracks in
            units other than batches. None: steps are batches.
        process_group: of torch.distributed. None: the default one.
        max_pinned_versions: as for `Client.create_model`.
        max_wait_s: seconds that our hooks let one step of the training wait at most.
        timeout_s: seconds for a push, other ranks' included, and for each call of the set-up.
        on_error: what becomes of a step that cannot be pushed: "skip" it with a warning (the next update
            counts the longer time, so the half-life stays right), or "raise".
        resume: what `Attachment.state_dict` gave when the trainer's checkpoint was made, the same on all
            ranks: the model is brought back to where it stood then, and counting goes on from there.
        keep_resumable: of the versions that `Attachment.state_dict` saves, the server keeps so many of
            the newest; with as many of the trainer's own checkpoints, each finds its average.
        files: small files that the server's checkpoints shall have, as for `Client.attach_files`: with
            config.json in them, `from_pretrained` reads a checkpoint. Rank 0's count.

    Returns:
        The attachment; call its `close()` when training ends, or use it in a `with` statement.

    Raises:
        InvalidArgumentError: an argument is wrong, the ranks do not hold the same parameters, or
            `resume` is of another model or format.
        FailedPreconditionError: RESUME_MISMATCH: the server has no average that stands where `resume`
            does; the message lists what there is. The model is as it was.
        EmaError: the set-up failed. What fails on any rank raises on every rank.

    Example:
        >>> ema = ema_client.attach(
        ...     model, optimizer, "ema://host:50051/digits", half_life="200ba", update_interval="5ba"
        ... )
        >>> ...  # the training loop, unchanged
        >>> ema.close()
    """
    ranks = Ranks.current(process_group)
    # A rank that raised at once would let the others wait for it, so failures are passed on.
    plan: _Plan | None = None
    failure: Exception | None = None
    try:
        if keep_resumable < 1:
            raise InvalidArgumentError(
                f"keep_resumable {keep_resumable}: must be 1 or more", reason="BAD_REQUEST"
            )
        if resume is not None and start_step is not None:
            raise InvalidArgumentError(
                f"start_step {start_step} and resume are both given: resume says the step",
                reason="BAD_REQUEST",
            )
        track_list = tracks_of(half_life, smoothing, update_interval, ema_start, preset, tracks)
        now = time_dict(None if time is None else time(start_step or 0), step=start_step or 0)
        for track in track_list:
            # Raises if a unit that it needs is not counted.
            track.plan([], now)
        module = unwrap(model)
        check_whole(module)
        plan = _Plan.make(
            url,
            ranks,
            named_tensors(module),
            track_list,
            max_pinned_versions,
            non_finite,
            wire_dtype,
            small_files(files) if files is not None and ranks.rank == 0 else {},
            timeout_s,
        )
    except Exception as raised:
        failure = raised
    try:
        joined = _join(ranks, plan, failure, resume, timeout_s)
    except Exception:
        if plan is not None:
            plan.client.close()
        raise
    assert plan is not None
    if start_step is not None:
        joined = dataclasses.replace(joined, step=start_step)
    return Attachment(
        client=plan.client,
        joined=joined,
        join_at=functools.partial(_join, ranks, plan, None, timeout_s=timeout_s),
        model_name=plan.model_name,
        module=module,
        optimizer=optimizer,
        is_alone=ranks.world_size == 1,
        time_of=time,
        max_wait_s=max_wait_s,
        timeout_s=timeout_s,
        on_error=on_error,
        frozen=plan.tensors.frozen(),
        keep_resumable=keep_resumable,
    )


def _join(
    ranks: Ranks,
    plan: _Plan | None,
    failure: Exception | None,
    resume: Mapping[str, Any] | None,
    timeout_s: float,
) -> Joined:
    """Opens a run on all ranks, or raises on all of them. Collective.

    `failure`: what this rank has failed with so far; then there may be no plan.
    """
    launch: _Launch | None = None
    state: State | None = None
    try:
        if plan is not None and resume is not None:
            state = State.from_dict(resume, model=plan.model_name)
        if plan is not None and failure is None and ranks.rank == 0:
            plan.create(timeout_s, state)
            launch = _Launch(secrets.token_hex(16), plan.fingerprints(), state)
    except Exception as raised:
        failure = raised
    launch = ranks.broadcast(launch)
    try:
        # Without a launch, rank 0 says below what is wrong.
        if plan is not None and launch is not None and failure is None:
            plan.check_replicas(launch)
            plan.check_state(launch, state)
    except Exception as raised:
        failure = raised
    # No rank may have a reason left to fail when the first one ends the run of before.
    _gather(ranks, failure, None)
    assert plan is not None and launch is not None
    run: Run | None = None
    step = 0
    # Rank 0 first, so that the model is where it shall be when the others join; all have joined when
    # this returns, so the first push finds the run complete.
    for is_next in (ranks.rank == 0, ranks.rank != 0):
        try:
            if is_next:
                run = plan.open_run(launch, timeout_s)
                step = 0 if run.latest is None else run.latest.step
                step = step if state is None else state.step
        except Exception as raised:
            failure = raised
        steps = _gather(ranks, failure, step)
    assert run is not None
    # The average goes on from where it is, should the server forget the run.
    anew = functools.partial(plan.open_run_anew, dataclasses.replace(launch, state=None))
    return Joined(run, anew, launch.id, steps[0])


_Item = TypeVar("_Item")


def _gather(ranks: Ranks, failure: Exception | None, item: _Item) -> list[_Item]:
    """The items of all ranks, or raises the first rank's failure on all of them. Collective."""
    outcomes: list[tuple[Exception | None, _Item]] = ranks.gather((_portable(failure), item))
    for failed, _ in outcomes:
        if failed is not None:
            raise failed
    return [of_rank for _, of_rank in outcomes]


@dataclasses.dataclass(frozen=True)
class _Launch:
    """What rank 0 tells the others."""

    id: str
    fingerprints: list[tuple[str, str, int]]
    state: State | None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What one rank needs to make the model and to join its run."""

    client: Client
    model_name: str
    ranks: Ranks
    tensors: NamedTensors
    tracks: list[_ema.Track]
    max_pinned_versions: int
    non_finite: NonFinite
    wire_dtype: WireDtype
    files: dict[str, bytes]

    @classmethod
    def make(
        cls,
        url: str,
        ranks: Ranks,
        tensors: NamedTensors,
        tracks: list[_ema.Track],
        max_pinned_versions: int,
        non_finite: NonFinite,
        wire_dtype: WireDtype,
        files: dict[str, bytes],
        timeout_s: float,
    ) -> _Plan:
        address, model_name = split_url(url)
        client = Client(address, timeout_s=timeout_s)
        tensors = tensors.without(_ignored_by_all(tensors, tracks))
        return cls(
            client,
            model_name,
            ranks,
            tensors,
            [track.without_idle_rules(specs_of(tensors)) for track in tracks],
            max_pinned_versions,
            non_finite,
            wire_dtype,
            files,
        )

    def create(self, timeout_s: float, state: State | None = None) -> None:
        if state is not None and state.version != 0:
            # A model that is gone cannot be resumed; it must not be made anew.
            self.client.model(self.model_name, timeout_s=timeout_s)
        try:
            fields, _ = self.client._client.create_model(
                self.model_name,
                specs_of(self.tensors),
                self.tracks,
                self.max_pinned_versions,
                self.non_finite,
                timeout_s,
            )
        except AlreadyExistsError:
            fields = self.client._client.get_model(self.model_name, timeout_s)
            if not self._is_imported(fields):
                raise
        if state is not None:
            state.check_fresh(model_from(fields).latest)
        if self.files:
            self.client.attach_files(self.model_name, self.files, timeout_s=timeout_s)

    def _is_imported(self, fields: dict[str, Any]) -> bool:
        """Whether a model is ours but for what a file does not say: order, buffers, tied names."""

        def key(specs: Iterable[_ema.Spec]) -> set[tuple[str, str, tuple[int, ...]]]:
            return {(name, dtype, tuple(shape)) for name, dtype, shape, *_ in specs}

        return key(fields["tensors"]) == key(specs_of(self.tensors)) and {
            track.name: track for track in fields["tracks"]
        } == {track.name: track for track in self.tracks}

    def fingerprints(self) -> list[tuple[str, str, int]]:
        return [] if self.ranks.world_size == 1 else self.tensors.fingerprints()

    def check_replicas(self, launch: _Launch) -> None:
        for own, first in itertools.zip_longest(self.fingerprints(), launch.fingerprints):
            if own == first:
                continue
            here = "nothing" if own is None else f"{own[0]} ({own[1]})"
            there = "nothing" if first is None else f"{first[0]} ({first[1]})"
            values = " with other values" if here == there else ""
            raise InvalidArgumentError(
                f'model "{self.model_name}": the ranks are not replicas: rank {self.ranks.rank} has '
                f"{here}{values} where rank 0 has {there}",
                reason="BAD_LAYOUT",
            )

    def check_state(self, launch: _Launch, state: State | None) -> None:
        if launch.state != state:
            raise InvalidArgumentError(
                f'model "{self.model_name}": the ranks resume from different states: rank '
                f"{self.ranks.rank} from {state}, rank 0 from {launch.state}",
                reason="BAD_REQUEST",
            )

    def open_run(self, launch: _Launch, timeout_s: float) -> Run:
        resume = None if launch.state is None else launch.state.resume_point
        if resume is not None:
            timeout_s = max(timeout_s, DISK_TIMEOUT_S)
        run = self.client.open_run(
            self.model_name,
            launch_id=launch.id,
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
            rank0_only=list(self.tensors.buffers),
            frozen=self.tensors.frozen(),
            wire_dtype=self.wire_dtype,
            rejoins=False,
            resume=resume,
            timeout_s=timeout_s,
        )
        _arrays.check_names(
            f'rank {self.ranks.rank}: model "{self.model_name}"',
            expected=[spec.name for spec in run.tensors],
            given=self.tensors.all(),
        )
        return run

    def open_run_anew(self, launch: _Launch, timeout_s: float) -> Run:
        """The same after the server was away. NotFoundError: rank 0 has not made the model yet."""
        try:
            return self.open_run(launch, timeout_s)
        except NotFoundError:
            # The server keeps no data, and was restarted.
            if self.ranks.rank != 0:
                raise
        self.create(timeout_s)
        return self.open_run(launch, timeout_s)


def _ignored_by_all(tensors: NamedTensors, tracks: list[_ema.Track]) -> set[str]:
    """Tensors that no track has."""
    specs = specs_of(tensors)
    actions = [track.actions(specs) for track in tracks]
    return {
        spec[0]
        for spec, *of_tracks in zip(specs, *actions)
        if all(action == "ignore" for action, _ in of_tracks)
    }


def _portable(error: Exception | None) -> Exception | None:
    """The error, or what can be said of it if it cannot be sent to another rank."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
