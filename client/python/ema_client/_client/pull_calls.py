# SPDX-License-Identifier: Apache-2.0
"""Reading averages, into memory or files: functions that are methods of `Client`."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ema_client import _ema
from ema_client._client import safetensors
from ema_client._client.arrays import (
    Framework,
    build,
    choose_framework,
    copies_on,
    is_instance,
    stack_like,
)
from ema_client._client.connection import Connection
from ema_client._client.files import FilesLike, small_files
from ema_client._client.model_calls import attached_files, model
from ema_client._client.out import check_writable, write_arrays
from ema_client._client.pieces import Piece, is_part, pieces_of, selected, selection_of
from ema_client._client.ranges import ParameterPart
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
from ema_client._client.state import version_id
from ema_client._client.types import (
    Overflow,
    Shard,
    Version,
    VersionLike,
    Weights,
)
from ema_client._client.unread import wait_unread
from ema_client._client.version_calls import listing_kept_versions
from ema_client._errors import InvalidArgumentError, OutOfRangeError
from ema_client._argument_checks import names_from

# How often all tracks are pulled again because the server no longer keeps the version of the first.
_STACKED_ATTEMPTS = 20


@dataclasses.dataclass(frozen=True)
class Destination:
    """Where the values of a pull go: into new arrays, or into arrays of the caller.

    Attributes:
        framework, device: of new arrays.
        out: arrays of the caller by name; None: new arrays.
        targets: the parts of these arrays that are on this rank: of a DTensor, its local tensor.
        pieces: the positions of these parts; empty: they are whole arrays.
        selection: names and boxes to pull instead of the caller's selection; None: the caller's.
        is_empty: `out` has no part on this rank, so only the version is needed.
    """

    framework: Framework
    device: Any
    out: Mapping[str, Any] | None = None
    targets: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    pieces: Mapping[str, Piece] = dataclasses.field(default_factory=dict)
    selection: tuple[list[str], list[Shard]] | None = None
    is_empty: bool = False

    @classmethod
    def of(
        cls,
        out: OutLike | None,
        *,
        framework: Framework,
        device: Any,
        names_there: Callable[[], Collection[str]],
    ) -> Destination:
        """`names_there` returns the names of the model's tensors.

        Raises:
            InvalidArgumentError: the arguments exclude each other; PyTorch has no such device; or `out`
                cannot be written.
        """
        choose_framework(framework)
        if device is not None and (out is not None or framework == "numpy"):
            raise InvalidArgumentError(
                f'device: {device} given with {"out" if out is not None else "NumPy arrays"}: it is '
                "for new torch tensors"
            )
        if device is not None:
            check_device(device)
        if out is None:
            return cls(framework, device)
        arrays = targets_of(out, names_there)
        if not any(map(is_part, arrays.values())):
            check_writable("out", arrays)
            return cls(framework, device, arrays, arrays)
        pieces = pieces_of(arrays)
        names, boxes = selection_of(pieces)
        is_empty = not names and not boxes
        if is_empty:
            # A pull without a selection would return everything. One element is enough for the version.
            first = next(iter(pieces.values()))
            dims = len(first.shape)
            boxes = [Shard(first.box.name, (0,) * dims, (1,) * dims)]
        targets = selected(pieces)
        check_writable("out", targets)
        return cls(framework, device, arrays, targets, pieces, (names, boxes), is_empty)

    def put(self, pulled: _ema.Pulled, track: str, overflow: Overflow) -> Weights:
        """Writes or wraps the pulled values, and returns the arrays."""
        version = pulled.version
        aliases = pulled.aliases
        if self.is_empty:
            return Weights({}, version=version, track=track, aliases={})
        if self.out is not None:
            # The server's bytes are in one buffer, from which they are copied.
            is_torch = all(is_instance(one, "torch", "Tensor") for one in self.targets.values())
            arrays = build(pulled.tensors, pulled.bytes, framework="torch" if is_torch else "numpy")
            for name in arrays.keys() & self.pieces.keys():
                arrays[name] = self.pieces[name].cut(arrays[name])
            wait_unread(self.targets.values())
            write_arrays(self.targets, arrays, aliases, overflow)
            written = {
                name: target if isinstance(self.out[name], ParameterPart) else self.out[name]
                for name, target in self.targets.items()
            }
            return Weights(written, version=version, track=track, aliases=aliases)
        if self.device is not None:
            arrays = build(pulled.tensors, pulled.bytes, framework="torch")
            arrays = copies_on(self.device, arrays)
            return Weights(arrays, version=version, track=track, aliases=aliases)
        arrays = build(pulled.tensors, pulled.bytes, framework=self.framework)
        return Weights(arrays, version=version, track=track, aliases=aliases, pulled=pulled)


def pull(
    client: Connection,
    name: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    tensors: str | Collection[str] | None = None,
    slices: Shard | Collection[Shard] | None = None,
    dtype: DtypeLike | None = None,
    overflow: Overflow = "error",
    out: OutLike | None = None,
    framework: Framework = "auto",
    device: Any = None,
    on_progress: Callable[[int], object] | None = None,
    timeout_s: float | None = None,
) -> Weights:
    """Reads one track of one version, or a part of it.

    Over gRPC its checksums are verified; through shared memory, on the server's host, they are not.

    Args:
        name: the model.
        track: which average. None: the only track that is not a copy, else "ema"; asks the server.
        version: a number, a record, a label such as "best", or what `Attachment.state_dict` put into
            the trainer's checkpoint; None (or 0): the newest. A version that is only on the server's
            disk is read from there.
        step: instead of a version: the version of this step. After a rollback, that of the
            training that was continued.
        tensors: names, or patterns such as "encoder.*", or one of these: only these, and those of
            `slices`. None, without slices: all.
        slices: boxes of tensors, or one box: only these parts.
        dtype: the server casts floats to it before it sends them: "float32", "float16", "bfloat16", or
            the dtype of that name in PyTorch, NumPy or JAX. None: no cast.
        overflow: what to do with a finite value that is too large for that dtype, or for the dtype of an
            array in `out`: "error", "saturate" (the largest finite value of the dtype) or "inf".
        out: torch tensors or NumPy arrays by name, to write in place, with a cast to their dtypes. They
            must have exactly the pulled names (a tied tensor its first name; its others are optional),
            and only tied ones may share memory. Or a module, for its parameters and buffers (tied ones
            once, by any name that the model has). If some are DTensors, or FSDP1 or ZeRO-3 has sharded it,
            each rank pulls just the pieces that it holds, however the trainers have sharded the model; to get
            one version, all ranks must name it. A rank without any piece gets only the version. If the pull
            fails, nothing is written, unless a device fails during the writes. The pulled bytes are in host
            memory, too, until they have been written.
        framework: "torch" tensors, "numpy" arrays, or "auto": torch if it is installed.
        device: where to put torch tensors, such as "cuda:1"; `refresh` cannot update them then. None:
            in host memory.
        on_progress: called with the number of bytes so far.
        timeout_s: seconds. None: the client's, by default 600.

    Returns:
        Tensors by name, which share one buffer; `version` is the pulled version. With `out`, the given
        tensors; of parameters of FSDP1 and ZeRO-3, the ranges that this rank has.

    Raises:
        NotFoundError: no such model, track or label; or there are several tracks, and none is "ema".
        FailedPreconditionError: nothing was committed yet.
        OutOfRangeError: the version is no longer kept, or not committed yet; for a step, the message
            lists the existing ones.
        InvalidArgumentError: the track does not have a tensor; a box does not fit it; the selection is
            empty; both a step and a version; no such device; a value is too large for its dtype
            (`overflow`); or arrays in `out` cannot be written because of their names, shapes, dtypes or
            memory layouts (the message lists all of them).
    """
    names, boxes = selection_from(tensors, slices)
    cast_to = dtype_name(dtype)
    check_version(version, name)
    destination = Destination.of(
        out,
        framework=framework,
        device=device,
        names_there=lambda: [
            spec.name for spec in model(client, name, timeout_s=timeout_s).tensors
        ],
    )
    names, boxes = destination.selection or (names, boxes)
    if track is None:
        track = only_average_of(model(client, name, timeout_s=timeout_s))
    label = version if isinstance(version, str) else ""
    number, incarnation = (0, 0) if isinstance(version, str) else version_id(version, of=name)
    with listing_kept_versions(client, name):
        pulled = client._client.pull(
            name,
            track,
            number,
            incarnation,
            label,
            step,
            names,
            [(box.name, box.offsets, box.extents) for box in boxes],
            cast_to,
            overflow,
            client._timeout(timeout_s, is_transfer=True),
            on_progress,
        )
    return destination.put(pulled, track, overflow)


def refresh(client: Connection, weights: Weights, *, timeout_s: float | None = None) -> bool:
    """Updates pulled weights to the newest version, in place. Only changed bytes are sent.

    Args:
        weights: the result of a `pull`, by any client of this server, without `out` and `device`.
        timeout_s: as for `pull`.

    Returns:
        False: they were the newest version already. Always True for a synthesized average, which may
        have been built again as the same version.

    Raises:
        InvalidArgumentError: the weights were pulled into `out` or to a `device`, or are of several
            tracks.
        FailedPreconditionError: the model was created again with other tensors.
        EmaError: as `pull`. Some of the values may be of the newer version; after the next call that
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
    timeout = client._timeout(timeout_s, is_transfer=True)
    is_newer = client._client.refresh(pulled, timeout)
    if is_newer:
        weights.version = pulled.version
        weights.received_bytes = pulled.received_bytes
        weights.lane = pulled.lane
    return is_newer


def pull_stacked(
    client: Connection,
    name: str,
    *,
    tracks: str | Sequence[str],
    version: VersionLike | None = None,
    step: int | None = None,
    framework: Framework = "auto",
    timeout_s: float | None = None,
) -> Weights:
    """Reads several tracks of one version, each tensor stacked along a new first dimension.

    For `bmm`, or, as a plain dict, for `torch.func.functional_call` under `vmap`, to evaluate all tracks
    at once.

    Args:
        name: the model.
        tracks: which averages, in the order of the first dimension; they must have the same tensors.
        version, step, framework: as for `pull`.
        timeout_s: for each track, as for `pull`.

    Returns:
        Tensors of shape [len(tracks), ...] by name, in the first track's dtypes. A tied tensor has only
        its first name, as `functional_call` requires. `track` is all names, joined by commas.

    Raises:
        InvalidArgumentError: no tracks, or they have different tensors.
        OutOfRangeError: the version was dropped between two pulls; for the newest version, many times
            in a row. A larger `max_pinned_versions` keeps it longer.
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
            first = pull(
                client,
                name,
                track=tracks[0],
                version=version,
                step=step,
                framework=framework,
                timeout_s=timeout_s,
            )
            tensors = [tensor for tensor in first if tensor not in first.aliases]
            stacked = {tensor: stack_like(first[tensor], len(tracks)) for tensor in tensors}
            for index, track in enumerate(tracks[1:], 1):
                out = {tensor: stacked[tensor][index, ...] for tensor in tensors}
                pull(client, name, track=track, version=first.version, out=out, timeout_s=timeout_s)
            return Weights(stacked, version=first.version, track=",".join(tracks))
        except OutOfRangeError:
            # Commits were faster than the pulls, and the server no longer keeps the first version.
            if version or step is not None or attempt == _STACKED_ATTEMPTS:
                raise
    raise AssertionError  # Not reached.


def save(
    client: Connection,
    name: str,
    path: str | os.PathLike[str],
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    tensors: str | Collection[str] | None = None,
    slices: Shard | Collection[Shard] | None = None,
    dtype: DtypeLike | None = None,
    overflow: Overflow = "error",
    files: FilesLike | None = None,
    timeout_s: float | None = None,
) -> Version:
    """Pulls averages into a safetensors file, or a folder that Hugging Face's libraries read.

    Args:
        name: the model.
        path: a file whose name ends in ".safetensors", or a folder, which exists or ends in "/". A
            folder is created if needed. It gets model.safetensors (diffusion_pytorch_model.safetensors
            if config.json is one of diffusers), and small files, so that `from_pretrained` reads it
            if config.json is among them or in the folder. Files of the same names are replaced; if
            the path is a link, its target is.
        track, version, step, tensors, slices, dtype, overflow: as for `pull`.
        files: for a folder: contents by name, or a folder whose files that describe a model are used,
            as for `attach_files`. None: the files that are attached to the model.
        timeout_s: for each call, as for `pull`.

    Returns:
        The saved version. Of a tied tensor only the first name is in the file.

    Raises:
        FailedPreconditionError: the folder has weights of that name in several files (with
            .index.json), which libraries would read instead; or the path is a device, pipe or socket.
        InvalidArgumentError: the path is neither a folder nor ends in ".safetensors".
        EmaError: as `pull`; no file has changed.
        OSError: the disk failed; the file of weights is the old one, or complete.

    Example:
        >>> client.save("m", "averaged/", track="ema", files="described/")
        >>> transformers.AutoModel.from_pretrained("averaged/")
    """

    def beside() -> dict[str, bytes]:
        if files is None:
            return attached_files(client, name, timeout_s=timeout_s)
        return small_files(files)

    target = safetensors.SaveTarget.of(path, beside)
    weights = pull(
        client,
        name,
        track=track,
        version=version,
        step=step,
        tensors=tensors,
        slices=slices,
        dtype=dtype,
        overflow=overflow,
        timeout_s=timeout_s,
    )
    target.write(name, weights)
    return weights.version
