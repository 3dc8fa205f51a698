# SPDX-License-Identifier: Apache-2.0
"""The connection to a server."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ema_client import _ema
from ema_client._client import safetensors
from ema_client._client.arrays import spec_of
from ema_client._client.evaluator_calls import EvaluatorCalls
from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.run import Run
from ema_client._client.server_info import ServerInfo, server_info_from
from ema_client._client.timeouts import CALL_TIMEOUT_S, TRANSFER_TIMEOUT_S, check_timeout
from ema_client._client.types import (
    is_after,
    ListedVersion,
    ModelInfo,
    NonFinite,
    ResumePoint,
    Shard,
    Synthesis,
    SynthesisSource,
    TimeLike,
    Tls,
    Version,
    WireDtype,
    model_from,
    resume_tuple,
    time_dict,
    version_from,
    version_id,
)
from ema_client._errors import AlreadyExistsError, InvalidArgumentError
from ema_client._given import check_by_name, check_text, checked, names_from
from ema_client._tracks.track import TrackLike, tracks_by_name

_logger = logging.getLogger(__name__)

# Of `Synthesis`: above it, what was built has little to do with what was asked for.
_MOST_RESIDUAL = 0.5


class Client(EvaluatorCalls):
    """A connection to one server. Thread-safe. Connects on first use.

    All calls raise a subclass of EmaError, and KeyboardInterrupt while they wait. A process that forks
    must not use it in the child.

    Args:
        address: "host:port", "emas://host:port" over TLS, "unix:/path". Without a port it is 50051.
        timeout_s: seconds for every call that is not given its own. None: 600 for those that move
            weights or wait for the server's disk, 60 for others.
        same_host_lane: push and pull through shared memory where the server is on this host, of the
            same user, and offers it. gRPC stands in when there is none.
        max_connections: that one push may use; 0: half of the machine's processors, 8 at most. A run
            begins with one, and keeps more if its large pushes are faster with them.
        report_timing: the server tells with each push where its time has gone: `stats.server_seconds`.
        tls: PEM files for an `emas://` address; None: those that the environment names, as `Tls` says.
        token: a bearer token, for a server that asks for one. It is sent as it is: over a network, use
            TLS. "": that of the environment, EMA_TOKEN, unless a file is named.
        token_file: a file of the token, read for each call. "": the one that EMA_TOKEN_FILE names,
            unless a token is given.

    Example:
        >>> with ema_client.Client("host:50051") as client:
        ...     client.create_model("m", weights, tracks={"ema": "200ba", "raw": "copy"})
        ...     with client.open_run("m") as run:
        ...         version = run.push(step=10, weights=weights)
        ...     average = client.pull("m", track="ema", version=version.number)
    """

    def __init__(
        self,
        address: str,
        *,
        timeout_s: float | None = None,
        same_host_lane: bool = True,
        max_connections: int = 0,
        report_timing: bool = False,
        tls: Tls | None = None,
        token: str = "",
        token_file: str = "",
    ) -> None:
        if timeout_s is not None:
            check_timeout("timeout_s", timeout_s)
        self._timeout_s = timeout_s or CALL_TIMEOUT_S
        self._transfer_timeout_s = timeout_s or TRANSFER_TIMEOUT_S
        if not token and not token_file:
            token_file = os.environ.get("EMA_TOKEN_FILE", "")
            token = "" if token_file else os.environ.get("EMA_TOKEN", "")
        files = tls or Tls.from_environment()
        check_text("address", address)
        self._address = address
        # Not by `call`, whose error would have the token in it.
        client = _ema.Client(
            address,
            self._timeout_s,
            same_host_lane,
            max_connections,
            report_timing,
            (files.ca_file, files.certificate_file, files.key_file),
            token,
            token_file,
        )
        self._client = checked(client)
        self._unchecked = client  # As the extension module takes it itself.

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets the connection go, when the last of its runs has gone too."""
        self._client.close()

    def create_model(
        self,
        name: str,
        weights: Mapping[str, Any],
        *,
        tracks: Mapping[str, TrackLike],
        max_pinned_versions: int | None = None,
        non_finite: NonFinite = "reject",
        timeout_s: float | None = None,
    ) -> ModelInfo:
        """Makes a model and reserves its memory. The same call again is OK and changes nothing.

        Args:
            name: letters, digits, `.`, `_`, `-`; at most 128.
            weights: arrays (or TensorSpecs) by name, in the order that all bytes will follow; only
                their dtypes and shapes are looked at.
            tracks: the averages by name. Each is a half-life ("200ba"), "copy", a Track, or a dict
                of a Track's fields.
            max_pinned_versions: versions that readers may hold at once. None (or 0): the server's
                default.
            non_finite: what becomes of a step in which a float is NaN or infinity: "reject" it,
                "skip" the tensor (every track keeps its value), or "allow" it.
            timeout_s: seconds.

        Raises:
            InvalidArgumentError: a name, tensor or track is refused, or a tensor rule matches nothing.
            AlreadyExistsError: the model exists and differs; the message says in what.
            FailedPreconditionError: ALL_CHECKPOINTS_CORRUPT: the model is on the server's disk, and
                every checkpoint of it is corrupt. Put a good one back and restart the server, or
                accept the loss with `delete_model`.
            ResourceExhaustedError: it does not fit the server's memory budget.
        """
        check_by_name("weights", weights)
        specs = [spec_of(tensor, value) for tensor, value in weights.items()]
        made = tracks_by_name(tracks)
        for track in made:
            track.check(specs)
        return self._create_model(name, specs, made, max_pinned_versions, non_finite, timeout_s)

    def _create_model(
        self,
        name: str,
        specs: list[_ema.Spec],
        tracks: list[_ema.Track],
        max_pinned_versions: int | None,
        non_finite: NonFinite,
        timeout_s: float | None,
    ) -> ModelInfo:
        fields = self._client.create_model(
            name, specs, tracks, max_pinned_versions or 0, non_finite, self._timeout(timeout_s)
        )
        return model_from(fields)

    def import_weights(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        tracks: Mapping[str, TrackLike],
        step: int = 0,
        time: TimeLike = None,
        updates: int = 0,
        max_pinned_versions: int | None = None,
        non_finite: NonFinite = "reject",
        timeout_s: float | None = None,
    ) -> Version:
        """Makes a model whose averages begin with the weights of a file.

        `python -m ema_client.convert` makes such files of other libraries' averages. `attach` goes on
        with a model that was made so, if its tensors have the same names, dtypes and shapes. Which of
        them are buffers no file says: where a track copies those (`buffers="copy"`, as the preset
        "torch" does), give it `tensor_rules` that copy them by name, here and in `attach`.

        Args:
            name: the model; it must not have a version yet.
            path: a safetensors file, or a Hugging Face folder (model.safetensors, or its index), whose
                small files are attached, too.
            tracks: as for `create_model`; they go on from the weights as if they had made them.
            step: of the weights; training goes on after it. Warm-ups and other schedules that depend on
                their age need it: for `preset="ema_pytorch"` it is that library's `step`, for "diffusers"
                its `optimization_step`.
            time: training time at the step. None: the step is the batch.
            updates: that the weights are the average of: needed for uniform tracks and those that
                begin at zero. For a torch AveragedModel it is `n_averaged`.
            max_pinned_versions, non_finite: as for `create_model`; `attach` needs the same.
            timeout_s: seconds for each call.

        Returns:
            The first version.

        Raises:
            InvalidArgumentError: a track would write over the weights soon, because the step or the
                updates are missing; or the file is not what it should be.
            AlreadyExistsError: the model has a version, or other tensors or tracks.
            EmaError: as `create_model` and `Run.push`.
        """
        timeout_s = self._timeout(timeout_s, is_transfer=True)
        now = time_dict(time, step=step)
        made = tracks_by_name(tracks)
        for track in made:
            track.check_keeps_first_value(now, updates)
        stored = safetensors.open_weights(path)
        # A rule may ignore what the file has not: `attach` must find the tracks that it has itself.
        info = self._create_model(
            name,
            [spec_of(tensor.spec.name, tensor.spec) for tensor in stored],
            made,
            max_pinned_versions,
            non_finite,
            timeout_s,
        )
        if info.latest is not None:
            raise AlreadyExistsError(
                f'model "{name}" has version {info.latest.number} (step {info.latest.step}) already: '
                f"an import makes the first one",
                reason="MODEL_DIFFERS",
            )
        if os.path.isdir(path):
            self.attach_files(name, path, timeout_s=timeout_s)
        arrays = [
            _ema.Array(
                tensor.spec.name,
                tensor.read(),
                "bfloat16" if tensor.spec.dtype == "bfloat16" else "",
            )
            for tensor in stored
        ]
        with self._open_run(name, imported_updates=updates, timeout_s=timeout_s) as run:
            push = run._get().start_push(step, now, arrays, timeout_s)
            return version_from(push.wait())

    def update_model(
        self,
        name: str,
        *,
        tracks: Mapping[str, TrackLike] | None = None,
        remove: str | Collection[str] = (),
        pause: str | Collection[str] = (),
        resume: str | Collection[str] = (),
        timeout_s: float | None = None,
    ) -> ModelInfo:
        """Changes the tracks while training runs, all or nothing; what was averaged stays.

        Takes effect at the next commit (until then the result has them as `pending_tracks`), or at
        once before the first run, or while every track is paused. The same call again is OK.

        Args:
            name: the model.
            tracks: new ones, and those that get another schedule; as for `create_model`. What is stored
                of a track cannot change: its tensor_rules, buffers and compensated are to be given as
                before. It keeps being paused, or not.
            remove: names of tracks to forget; for these three, one name does, too.
            pause: names of tracks that pushes shall not change any more.
            resume: names of paused tracks to go on with.
            timeout_s: seconds.

        Raises:
            InvalidArgumentError: a track is refused, or what is stored of one would change. Not refused
                is a rule that ignores and matches nothing: it may be for what `attach` has not sent.
            NotFoundError: no such model or track.
            ResourceExhaustedError: a new track does not fit the server's memory budget.
        """
        put = tracks_by_name(tracks or {})
        return model_from(
            self._client.update_model(
                name,
                put,
                names_from("remove", remove),
                names_from("pause", pause),
                names_from("resume", resume),
                self._timeout(timeout_s),
            )
        )

    def models(self, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
        """All models, without their tensors and `tensor_rules`."""
        return tuple(map(model_from, self._client.list_models(self._timeout(timeout_s))))

    def delete_model(
        self, name: str, *, purge: bool = False, timeout_s: float | None = None
    ) -> None:
        """Forgets a model; one that is not there is OK. Pushes end, running pulls finish.

        Its checkpoints stay on the disk, for nobody to load; `purge` removes them. A model that the server
        could not load because every checkpoint of it is corrupt can be created again after this.
        """
        self._client.delete_model(name, purge, self._timeout(timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """What the server is and how it stands: version, device, memory, limits.

        Raises:
            PermissionDeniedError: the server's tokens do not allow this one to ask.
            UnavailableError: there is no server.

        Example:
            >>> info = client.server_info()
            >>> assert info.is_serving, info.not_serving
        """
        return server_info_from(self._client.get_server_info(self._timeout(timeout_s)))

    def versions(
        self, name: str, *, after: int | Version = 0, timeout_s: float | None = None
    ) -> tuple[ListedVersion, ...]:
        """The records that the server still has after version `after`, oldest first.

        Args:
            name: the model.
            after: a version's record, or its number, whichever life of the server counted it.
            timeout_s: seconds.
        """
        # A later life may have counted on from a lower number.
        number = 0 if isinstance(after, Version) else version_id(after, "after")[0]
        listed = [
            ListedVersion(version_from(version), available)
            for version, available in self._client.list_versions(
                name, number, self._timeout(timeout_s)
            )
        ]
        return tuple(one for one in listed if is_after(one.version, after))

    def statistics(
        self,
        name: str,
        *,
        version: int | Version | None = None,
        tracks: str | Collection[str] = (),
        timeout_s: float | None = None,
    ) -> Version:
        """Norms of a version's averages, and their distances from the raw weights: what people plot.

        The server computes them at the first call for a track, in the memory where they are; from then
        on `versions`, too, has them in the version's record. With `--statistics-every-commits N` it
        does so by itself.

        Args:
            name: the model.
            version: number or record of one that the server keeps in memory; None: the newest.
            tracks: only these; empty: all that average a tensor.
            timeout_s: seconds.

        Returns:
            The version's record, with `statistics` of these tracks. There are distances if the model
            has a copy track.

        Raises:
            NotFoundError: no such model or track.
            InvalidArgumentError: a track averages no tensor.
            OutOfRangeError: the version is not in memory any more, or not committed yet.
            FailedPreconditionError: nothing has been committed, or a track has no value yet.
            ResourceExhaustedError: readers hold as many versions as they may.

        Example:
            >>> version = client.statistics("m")
            >>> plot(version.step, version.statistics["ema"].norm, version.statistics["ema"].distance)
        """
        number, incarnation = version_id(version)
        timeout = self._timeout(timeout_s, is_transfer=True)
        return version_from(
            self._client.get_statistics(
                name, number, incarnation, names_from("tracks", tracks), timeout
            )
        )

    def synthesize(
        self,
        name: str,
        *,
        result: str,
        sigma_rel: float | None = None,
        half_life: str | None = None,
        step: int = 0,
        tracks: str | Collection[str] = (),
        timeout_s: float | None = None,
    ) -> Synthesis:
        """Builds the average of another length, at any past step, from kept snapshots.

        The server keeps snapshots of tracks that have a snapshot_interval. What it builds can be
        pulled like a track until it stops, has made four more, or is told to remove it
        (`update_model(name, remove=[result])`).

        Args:
            name: the model.
            result: what `pull` takes as the track; an earlier result of that name is replaced, also
                somebody else's.
            sigma_rel: relative width of the power-function profile, above 0 and at most 1/sqrt(12).
            half_life: instead: such as "1000ba", in the unit of the tracks' update_interval.
            step: at which the average stands; 0: the newest that is stored.
            tracks: to build from; empty: all that fit together.
            timeout_s: seconds.

        Returns:
            What was built; its `residual` says how near its profile is to the one that was asked for. Above
            about 0.1 it is another average: between two snapshots the newest weights are missing, and a
            length outside the tracks' cannot be made of them. Above 0.5 a warning says so.

        Raises:
            InvalidArgumentError: neither or both of sigma_rel and half_life, a wrong one, or a track
                that does not fit the others.
            NotFoundError: no such model or track.
            AlreadyExistsError: the model has a track with the result's name.
            OutOfRangeError: the step is not committed yet, or is before the first snapshot.
            FailedPreconditionError: no snapshot is stored yet.
            ResourceExhaustedError: no memory for the result.
            DataLossError: a checkpoint on the server's disk is damaged.

        Example:
            >>> made = client.synthesize("m", result="post-hoc", sigma_rel=0.07, step=5000)
            >>> weights = client.pull("m", track="post-hoc")
        """
        version, residual, sources = self._client.synthesize(
            name,
            result,
            sigma_rel,
            "" if half_life is None else str(half_life),
            step,
            names_from("tracks", tracks),
            self._timeout(timeout_s, is_transfer=True),
        )
        made = Synthesis(
            version_from(version),
            residual,
            tuple(SynthesisSource(*source) for source in sources),
        )
        if made.residual > _MOST_RESIDUAL:
            _logger.warning(
                'model "%s": "%s" is not the average that was asked for: its residual is %.2g, a good one is '
                "below 0.1. Ask for a step that has a snapshot (step %d is built from those up to step %d), "
                "and for a length between those of the tracks",
                name,
                result,
                made.residual,
                made.version.step,
                max(source.step for source in made.sources),
            )
        return made

    def open_run(
        self,
        name: str,
        *,
        launch_id: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        shards: Sequence[Shard] | None = None,
        rank0_only: str | Collection[str] = (),
        frozen: str | Collection[str] = (),
        wire_dtype: WireDtype = "as pushed",
        max_staging_bytes: int = STAGING_BYTES,
        resume: int | ResumePoint | None = None,
        timeout_s: float | None = None,
    ) -> Run:
        """Joins a run: one life of a trainer. A new launch_id fences the run before.

        A push that finds a restarted server, which knows of no runs, joins again and waits for the
        other ranks.

        Args:
            name: the model.
            launch_id: new for each life of the trainer, the same on all its ranks. None: a random
                one; right for one rank only.
            rank, world_size: which rank this is, and of how many.
            shards: what this rank pushes. None: an even share, as if all ranks held all tensors.
            rank0_only: tensors that differ between ranks (BatchNorm's statistics): they come from
                rank 0 and count in its share. Looked at only without `shards`.
            frozen: tensors that do not change while the run lasts; the same on all ranks. They are
                pushed until the server has their values in every track, then left out.
            wire_dtype: "bfloat16": float32 weights are rounded to it before they are sent, half the
                bytes; the averages are of what is sent. The same on all ranks.
            max_staging_bytes: the most pinned host memory that weights on GPUs pass through, at least
                64 MiB; each rank may have another. Taken at the first push that has some, as much as the
                shards that are not frozen need at most, and kept until the run ends; where the host has
                less, half, and so on. If all that is pushed fits in, `PendingPush.wait_released` waits
                for copies on the GPU only; else for the network, too.
            resume: the trainer goes on from a checkpoint of its own: a step, or a ResumePoint, the same
                on all ranks. The model is brought back to where it stood then.
            timeout_s: seconds.

        Raises:
            InvalidArgumentError: a shard does not fit its tensor, or overlaps another rank's;
                max_staging_bytes is too small.
            AbortedError: the launch_id is of a run that has been fenced.
            FailedPreconditionError: RESUME_MISMATCH: the model has no version that stands where the
                trainer stands; the message lists what there is. No run has been opened.
            OutOfRangeError: likewise, VERSION_NOT_KEPT: the version that the ResumePoint names is gone.
        """
        return self._open_run(
            name,
            launch_id=launch_id,
            rank=rank,
            world_size=world_size,
            shards=shards,
            rank0_only=rank0_only,
            frozen=frozen,
            wire_dtype=wire_dtype,
            max_staging_bytes=max_staging_bytes,
            resume=resume,
            timeout_s=timeout_s,
        )

    def _open_run(
        self,
        name: str,
        *,
        launch_id: str | None = None,
        rank: int = 0,
        world_size: int = 1,
        shards: Sequence[Shard] | None = None,
        rank0_only: str | Collection[str] = (),
        frozen: str | Collection[str] = (),
        wire_dtype: WireDtype = "as pushed",
        max_staging_bytes: int = STAGING_BYTES,
        rejoins: bool = True,
        resume: int | ResumePoint | None = None,
        last_run_epoch: int = 0,
        imported_updates: int = 0,
        timeout_s: float | None = None,
    ) -> Run:
        """`open_run`, with what is not the users'.

        Args:
            rejoins: False: a push that finds a restarted server ends, FENCED.
            last_run_epoch: of a launch_id that opens its run again: the `Run.run_epoch` that it had. By
                it a server that was restarted, and has forgotten the launches, knows whether a newer one
                has fenced it.
            imported_updates: that the first weights are the average of.
        """
        if launch_id is None:
            if world_size != 1:
                raise InvalidArgumentError(
                    "launch_id: with more than one rank, all must give the same"
                )
            launch_id = secrets.token_hex(16)
        # To resume is to read a version from the disk.
        timeout = self._timeout(timeout_s, is_transfer=resume is not None)
        rank0_only, frozen = names_from("rank0_only", rank0_only), names_from("frozen", frozen)
        tuples: list[_ema.ShardTuple] | None = None
        frozen_count = 0
        if shards is not None or world_size != 1 or frozen:
            specs: list[_ema.Spec] = self._client.get_model(name, timeout)["tensors"]
            index = {spec[0]: i for i, spec in enumerate(specs)}
            unknown = sorted({*frozen, *(shard.name for shard in shards or ())} - index.keys())
            if unknown:
                raise InvalidArgumentError(
                    f'model "{name}" has no tensors {", ".join(unknown)}', reason="BAD_LAYOUT"
                )
            if shards is None:
                tuples, frozen_count = _ema.even_share(specs, rank0_only, frozen, rank, world_size)
            else:
                ordered = sorted(shards, key=lambda shard: shard.name in frozen)
                tuples = [(index[s.name], s.offsets, s.extents) for s in ordered]
                frozen_count = sum(shard.name in frozen for shard in shards)
        run = self._client.open_run(
            name,
            launch_id,
            rank,
            world_size,
            tuples,
            frozen_count,
            wire_dtype,
            rejoins,
            resume_tuple(resume),
            last_run_epoch,
            imported_updates,
            max_staging_bytes,
            timeout,
        )
        return Run(run, timeout_s=self._timeout_s, push_timeout_s=self._transfer_timeout_s)
