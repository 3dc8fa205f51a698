# SPDX-License-Identifier: Apache-2.0
"""What evaluators ask of a `Client`: weights, in memory and as files, and to be told of new ones."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any

from ema_client import _ema
from ema_client._client import safetensors
from ema_client._client.arrays import Framework, build, choose_framework, is_instance, stack_like
from ema_client._client.checkpoint_calls import CheckpointCalls
from ema_client._client.files import FilesLike, small_files
from ema_client._client.out import check_writable, write_arrays
from ema_client._client.pieces import is_dtensor, pieces_of, selected, selection_of
from ema_client._client.pull_arguments import (
    DtypeLike,
    OutLike,
    check_device,
    check_version,
    dtype_name,
    only_average_of,
    selection_from,
    targets_of,
)
from ema_client._client.timeouts import check_seconds
from ema_client._client.types import (
    Shard,
    Version,
    VersionLike,
    Weights,
    is_after,
    version_from,
    version_id,
)
from ema_client._client.unread import wait_unread
from ema_client._errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
)
from ema_client._given import check_int64, names_from

# How often tracks are pulled anew because a newer version has pushed theirs out.
_STACKED_ATTEMPTS = 20


class EvaluatorCalls(CheckpointCalls):
    """A part of `Client`, which has the calls that these are made of."""

    def pull(
        self,
        name: str,
        *,
        track: str | None = None,
        version: VersionLike | None = None,
        step: int | None = None,
        tensors: str | Collection[str] | None = None,
        slices: Shard | Collection[Shard] | None = None,
        dtype: DtypeLike | None = None,
        out: OutLike | None = None,
        framework: Framework = "auto",
        device: Any = None,
        on_progress: Callable[[int], object] | None = None,
        timeout_s: float | None = None,
    ) -> Weights:
        """Reads one track of one version, or a part of it, checked by its digest.

        Args:
            name: the model.
            track: which average. None: the only track that is not a copy, else "ema"; the server is asked.
            version: a number, a record, or a label such as "best"; None (or 0): the newest. One that
                is only on the server's disk is read from there.
            step: instead: the version of this step of the trainer. After a rollback it is the step of
                today's training, not of the one that was given up.
            tensors: names, or patterns such as "encoder.*", or one: only these, and those of `slices`. None,
                and no slices: all.
            slices: of these tensors only a box; or one.
            dtype: what the server casts floats to before it sends them: "float32", "float16",
                "bfloat16", or PyTorch's, NumPy's or JAX's dtype of that name. None: as it keeps them.
            out: what is to be written in place, in place of new memory, with the values cast to its
                dtypes: torch tensors or NumPy arrays by name, exactly the names that are pulled (of
                tied tensors the first, and any others), no two of which share memory but for those
                that are tied; or a module, for its parameters and buffers (tied ones
                once, by whichever of their names the model has). With DTensors among them these say
                what is pulled: of each just the piece that is on this rank, however trainers have
                sharded the model; ranks that shall get one version must name it. A rank that has
                nothing of any gets the version alone. Untouched if the pull fails, but for a device
                that fails while they are written. The pulled bytes are in memory beside them until
                they have been.
            framework: what to return: "torch" tensors, "numpy" arrays, "auto": torch if installed.
            device: where to put torch tensors, such as "cuda:1"; `refresh` does not know of them then.
                None: in host memory.
            on_progress: called with the bytes so far.
            timeout_s: seconds. None: the client's, by default 600.

        Returns:
            Tensors by name, which share one buffer that is theirs alone; its `version` says what was
            pulled. With `out`, the tensors that were given.

        Raises:
            NotFoundError: no such model, track or label; or of several tracks none is named "ema".
            FailedPreconditionError: nothing has been committed yet.
            OutOfRangeError: the version is not kept any more, or not committed yet; of a step, the
                message says which there are.
            InvalidArgumentError: a tensor that the track has not, or a box that does not fit it; an
                empty selection; a step and a version; a device that is not there; `out` has other
                names or shapes, dtypes that the values cannot be cast to, or arrays that cannot be
                written (read-only, expanded), all of which the message lists.
        """
        choose_framework(framework)
        names, boxes = selection_from(tensors, slices)
        cast_to = dtype_name(dtype)
        check_version(version)
        if device is not None and (out is not None or framework == "numpy"):
            raise InvalidArgumentError(
                f'device: {device} given with {"out" if out is not None else "NumPy arrays"}: it is '
                "for new torch tensors"
            )
        if device is not None:
            check_device(device)
        given: Mapping[str, Any] | None = None
        if out is not None:
            given = targets_of(
                out, lambda: [spec.name for spec in self.model(name, timeout_s=timeout_s).tensors]
            )
        targets = given
        is_nothing = False
        if given is not None and any(map(is_dtensor, given.values())):
            pieces = pieces_of(given)
            names, boxes = selection_of(pieces)
            targets = selected(pieces)
            is_nothing = not names and not boxes
            if is_nothing:
                # Without a name a pull is of everything. The version is asked for by one element.
                first = next(iter(pieces.values()))
                dims = len(first.shape)
                boxes = [Shard(first.box.name, (0,) * dims, (1,) * dims)]
        if targets is not None:
            check_writable("out", targets)
        if track is None:
            track = only_average_of(self.model(name, timeout_s=timeout_s))
        label = version if isinstance(version, str) else ""
        number, incarnation = (0, 0) if isinstance(version, str) else version_id(version)
        pulled = self._client.pull(
            name,
            track,
            number,
            incarnation,
            label,
            step,
            names,
            [(box.name, box.offsets, box.extents) for box in boxes],
            cast_to,
            self._timeout(timeout_s, is_transfer=True),
            on_progress,
        )
        record = version_from(pulled.version)
        aliases = pulled.aliases
        if is_nothing:
            return Weights({}, version=record, track=track, aliases={})
        if targets is None and device is not None:
            arrays = build(pulled.tensors, pulled.bytes, framework="torch")
            arrays = {tensor: value.to(device, copy=True) for tensor, value in arrays.items()}
            return Weights(arrays, version=record, track=track, aliases=aliases)
        if targets is None or given is None:
            arrays = build(pulled.tensors, pulled.bytes, framework=framework)
            return Weights(arrays, version=record, track=track, aliases=aliases, pulled=pulled)
        # The server's bytes are one piece; they are scattered from there.
        is_torch = all(is_instance(value, "torch", "Tensor") for value in targets.values())
        arrays = build(pulled.tensors, pulled.bytes, framework="torch" if is_torch else "numpy")
        wait_unread(targets.values())
        write_arrays(targets, arrays, aliases)
        arrays = {tensor: given[tensor] for tensor in targets}
        return Weights(arrays, version=record, track=track, aliases=aliases)

    def refresh(self, weights: Weights, *, timeout_s: float | None = None) -> bool:
        """Brings pulled weights to the newest version, in place: only what has changed is sent.

        Args:
            weights: what `pull` of any client of this server has given, without `out` or `device`.
            timeout_s: as for `pull`.

        Returns:
            False: they are the newest version. Never of a synthesized average, which may have been built
            anew as the same version.

        Raises:
            InvalidArgumentError: the weights were pulled into `out` or to a `device`, or are of several
                tracks.
            FailedPreconditionError: the model has been made anew with other tensors.
            EmaError: as `pull`. Some of the values may be the newer version's already; once a call
                succeeds, all are.

        Example:
            >>> weights = client.pull("m", track="ema", dtype="bfloat16")
            >>> while training:
            ...     if client.refresh(weights):
            ...         evaluate(weights, weights.version.step)
        """
        pulled = weights._pulled if isinstance(weights, Weights) else None
        if pulled is None:
            raise InvalidArgumentError(
                "weights: not the memory of one pull; pull without `out` and `device`"
            )
        timeout = self._timeout(timeout_s, is_transfer=True)
        is_newer = self._client.refresh(pulled, timeout)
        if is_newer:
            weights.version = version_from(pulled.version)
            weights.received_bytes = pulled.received_bytes
            weights.lane = pulled.lane
        return is_newer

    def pull_stacked(
        self,
        name: str,
        *,
        tracks: str | Sequence[str],
        version: VersionLike | None = None,
        step: int | None = None,
        framework: Framework = "auto",
        timeout_s: float | None = None,
    ) -> Weights:
        """Reads several tracks of one version, each tensor stacked along a new first dimension.

        For `bmm`, or, as a plain dict, for `torch.func.functional_call` under `vmap`: all of them are
        evaluated at once.

        Args:
            name: the model.
            tracks: which averages, in the order of the first dimension; they must have the same tensors.
            version, step: as for `pull`.
            framework: as for `pull`.
            timeout_s: for each track, as for `pull`.

        Returns:
            Tensors of shape [len(tracks), ...] by name, in the first track's dtypes; of a tied tensor by
            the first name only, as `functional_call` has to be given it. Its `track` is all names, joined
            by commas.

        Raises:
            InvalidArgumentError: no tracks, or they have not the same tensors.
            OutOfRangeError: the version was let go between the tracks; of the newest, many times over. More
                `max_pinned_versions` keep it longer.
            EmaError: as `pull`.

        Example:
            >>> stacked = client.pull_stacked("m", tracks=["fast", "slow"])
            >>> outputs = vmap(lambda weights: functional_call(model, weights, (x,)))(dict(stacked))
        """
        tracks = names_from("tracks", tracks)
        if not tracks:
            raise InvalidArgumentError("tracks: at least one is needed")
        for attempt in itertools.count(1):
            try:
                return self._pull_stacked(name, tracks, version, step, framework, timeout_s)
            except OutOfRangeError:
                # Commits have overtaken the pulls.
                if version or step is not None or attempt == _STACKED_ATTEMPTS:
                    raise
        raise AssertionError  # Not reached.

    def _pull_stacked(
        self,
        name: str,
        tracks: Sequence[str],
        version: VersionLike | None,
        step: int | None,
        framework: Framework,
        timeout_s: float | None,
    ) -> Weights:
        first = self.pull(
            name,
            track=tracks[0],
            version=version,
            step=step,
            framework=framework,
            timeout_s=timeout_s,
        )
        names = [tensor for tensor in first if tensor not in first.aliases]
        stacked = {tensor: stack_like(first[tensor], len(tracks)) for tensor in names}
        for index, track in enumerate(tracks[1:], 1):
            out = {tensor: stacked[tensor][index, ...] for tensor in names}
            self.pull(name, track=track, version=first.version, out=out, timeout_s=timeout_s)
        return Weights(stacked, version=first.version, track=",".join(tracks))

    def watch(
        self,
        name: str,
        *,
        after: int | Version | None = None,
        timeout_s: float | None = None,
    ) -> Generator[Version, None, None]:
        """Yields every commit after version `after`, in order, as it happens. Reconnects by itself.

        A slow reader gets them later, as long as the server keeps their records: the newest 4,096 of a
        model, at most 4 MiB. How many have gone before a commit is its `skipped`.
        Weights go sooner: who wants the newest each time calls `wait_for(name, after=version)`.

        Args:
            name: the model.
            after: a version's record; or its number, whichever life of the server counted it: 0 is
                with the oldest record. None: from now on. A server that was ended may come back at an
                older version and count on from there: of a number of its old life, commits are yielded
                only once they are past it; of a record, all that are later.
            timeout_s: seconds that who asks for a commit waits for one, before DeadlineExceededError is
                raised. None: waits for ever.

        Raises:
            NotFoundError: no such model, or it was deleted.
        """
        timeout = math.inf if timeout_s is None else self._timeout(timeout_s)
        since = None if after is None else version_id(after, "after")
        return _iterate(self._client.watch(name, since, timeout))

    def wait_for(
        self,
        name: str,
        *,
        step: int | None = None,
        after: int | Version | None = None,
        timeout_s: float | None = None,
    ) -> Version:
        """Waits until the model has come to a step, or to a newer version.

        Args:
            name: the model.
            step: of the trainer. After a rollback the model is at an earlier step.
            after: instead: a version's record; any that was committed later will do, whatever its step. Or
                its number, whichever life of the server counted it: any with a larger one.
            timeout_s: seconds in all. None: waits for ever. 0: only looks, for the client's time at most.

        Returns:
            The newest version, if its step is not before `step`, or it is newer than `after`; else the
            first commit of which that is true. Its weights can be pulled until later commits have
            pushed it out.

        Raises:
            InvalidArgumentError: not one of step and after, or it is none.
            NotFoundError: no such model, or it was deleted.
            DeadlineExceededError: it has not come so far in time.

        Example:
            >>> weights = client.pull("m", track="ema", version=client.wait_for("m", step=10_000))
            >>> while training:
            ...     weights = client.pull("m", track="ema")
            ...     evaluate(weights, weights.version.step)
            ...     client.wait_for("m", after=weights.version)
        """
        if (step is None) == (after is None):
            raise InvalidArgumentError(
                f"wait_for takes a step or a version to come after, given are {step} and {after}"
            )
        least_step = 0 if step is None else step
        check_int64("step", least_step)
        least_number = version_id(after, "after")[0]

        def is_there(version: Version) -> bool:
            return version.step >= least_step if after is None else is_after(version, after)

        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # To look takes some time, too.
        latest = self.model(name, timeout_s=timeout_s or None).latest
        while latest is None or not is_there(latest):
            left = None if deadline is None else deadline - time.monotonic()
            found: Version | None = None
            if left is None or left > 0:
                found = self._first_commit(
                    name, after=latest or 0, is_there=is_there, timeout_s=left
                )
            if found is None:
                at, wanted = "no version", f"step {step}"
                if after is not None:
                    wanted = f"one after version {least_number}"
                if latest is not None:
                    at = f"step {latest.step}" if after is None else f"version {latest.number}"
                raise DeadlineExceededError(
                    f'model "{name}": is at {at}, not at {wanted}, after {timeout_s} s'
                )
            latest = found
        return latest

    def _first_commit(
        self,
        name: str,
        *,
        after: int | Version,
        is_there: Callable[[Version], bool],
        timeout_s: float | None,
    ) -> Version | None:
        """The first that is there; with a time, the first: the time is not one commit's."""
        with contextlib.closing(self.watch(name, after=after, timeout_s=timeout_s)) as versions:
            try:
                return next(found for found in versions if timeout_s is not None or is_there(found))
            except DeadlineExceededError:
                return None

    def save(
        self,
        name: str,
        path: str | os.PathLike[str],
        *,
        track: str | None = None,
        version: VersionLike | None = None,
        step: int | None = None,
        tensors: str | Collection[str] | None = None,
        slices: Shard | Collection[Shard] | None = None,
        dtype: DtypeLike | None = None,
        files: FilesLike | None = None,
        timeout_s: float | None = None,
    ) -> Version:
        """Pulls averages into a safetensors file, or a folder that Hugging Face's tools read.

        Args:
            name: the model.
            path: a file, whose name ends in ".safetensors", or a folder, if it is one or ends in "/". A
                folder is made if need be, and gets model.safetensors, or by a config.json of diffusers
                diffusion_pytorch_model.safetensors, and small files beside it, so that `from_pretrained`
                reads it if a config.json is among them or there already. What is there of the same
                names is replaced; of a link to a file, the file that it leads to.
            track: which average; None: as for `pull`.
            version, step, tensors, slices, dtype: as for `pull`.
            files: of a folder: contents by name, or a folder of which is taken what describes a model,
                as for `attach_files`. None: those that are attached to the model.
            timeout_s: for each call, as for `pull`.

        Returns:
            The version that is in the file. Of a tied tensor only the first name is.

        Raises:
            FailedPreconditionError: the folder has weights of that name in pieces (with .index.json),
                which tools would read in place of these; or the path is a device, a pipe or a socket.
            InvalidArgumentError: the path is neither.
            EmaError: as `pull`; no file has changed.
            OSError: the disk; the file of weights is the old one, or complete.

        Example:
            >>> client.save("m", "averaged/", track="ema", files="described/")
            >>> transformers.AutoModel.from_pretrained("averaged/")
        """
        if not os.fspath(path):  # pathlib takes it for the working directory.
            raise InvalidArgumentError(f"path {path!r}: must name a file or a folder")
        target = pathlib.Path(path)
        beside: dict[str, bytes] = {}
        is_folder = target.is_dir() or os.fspath(path).endswith(os.sep)
        if is_folder:
            if files is None:
                beside = self.attached_files(name, timeout_s=timeout_s)
            else:
                beside = small_files(files)
            file_name = safetensors.folder_file(target, beside)
            index = target / f"{file_name}.index.json"
            if index.exists():
                raise FailedPreconditionError(
                    f"{index}: the folder has weights in pieces; take another, or remove them"
                )
        else:
            target = safetensors.replaceable(path)
            if ".safetensors" not in (target.suffix, pathlib.Path(path).suffix):
                raise InvalidArgumentError(
                    f'path "{os.fspath(path)}": must end in "/" (a folder) or in ".safetensors" (a '
                    "file), or be a folder"
                )
        weights = self.pull(
            name,
            track=track,
            version=version,
            step=step,
            tensors=tensors,
            slices=slices,
            dtype=dtype,
            timeout_s=timeout_s,
        )
        if is_folder:
            target.mkdir(parents=True, exist_ok=True)
            for file, data in beside.items():
                safetensors.replace(target / file, [data])
            target /= file_name
        pulled = weights._pulled
        assert pulled is not None
        # As in the server's checkpoints; transformers insists on "format".
        metadata = {"format": "pt", "ema.model": name, "ema.track": weights.track}
        metadata |= {
            "ema.step": str(weights.version.step),
            "ema.version": str(weights.version.number),
            "ema.incarnation": str(weights.version.incarnation),
        }
        safetensors.write_placed(target, pulled.tensors, pulled.bytes, metadata)
        return weights.version


def _iterate(watch: _ema.VersionWatch) -> Generator[Version, None, None]:
    try:
        while True:
            version, skipped = watch.next()
            yield version_from(version, skipped=skipped)
    finally:
        # Ends it. What has been raised may hold this frame for long.
        del watch
