# SPDX-License-Identifier: Apache-2.0
"""The server and its models: functions that are methods of `Client`."""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Mapping
from typing import Any

from ema_client import _ema
from ema_client._client import safetensors
from ema_client._client.arrays import some, spec_of
from ema_client._client.connection import Connection
from ema_client._client.files import FilesLike, small_files
from ema_client._client.run import join_run
from ema_client._client.training_time import TimeLike, time_dict
from ema_client._client.types import ModelInfo, NonFinite, ServerInfo, Version, model_from
from ema_client._errors import AlreadyExistsError, EmaError
from ema_client._argument_checks import check_by_name, check_name, names_from
from ema_client._tracks.track import TrackLike, tracks_by_name

# The most seconds to ask for the names of the models, for the error of an unknown one.
_NAMES_TIMEOUT_S = 5.0


def server_info(client: Connection, *, timeout_s: float | None = None) -> ServerInfo:
    """The server's version, device, memory and limits, and whether it serves.

    Raises:
        PermissionDeniedError: the token does not allow this call.
        UnavailableError: the server is unreachable.

    Example:
        >>> info = client.server_info()
        >>> assert info.is_serving, info.not_serving
    """
    return client._client.get_server_info(client._timeout(timeout_s))


def create_model(
    client: Connection,
    name: str,
    weights: Mapping[str, Any],
    *,
    tracks: Mapping[str, TrackLike],
    max_pinned_versions: int | None = None,
    non_finite: NonFinite = "reject",
    timeout_s: float | None = None,
) -> ModelInfo:
    """Creates a model and reserves its memory. The same call again succeeds and changes nothing.

    Args:
        name: letters, digits, `.`, `_`, `-`; at most 128.
        weights: arrays (or TensorSpecs) by name, in the order of the server's bytes. Only their dtypes
            and shapes are used.
        tracks: the averages by name. Each is a half-life ("200ba"), "copy", a Track, or a dict of a
            Track's fields.
        max_pinned_versions: the most versions that readers may hold at once. None (or 0): the server's
            default.
        non_finite: what to do with a step that contains NaN or infinity: "reject" it, "skip" the tensor
            (every track keeps its value), or "allow" it.
        timeout_s: seconds.

    Raises:
        InvalidArgumentError: a wrong name, tensor or track, or a tensor rule that matches nothing.
        AlreadyExistsError: the model exists, and differs; the message names the difference.
        FailedPreconditionError: ALL_CHECKPOINTS_CORRUPT: the model is on the server's disk, and all its
            checkpoints are corrupt. Restore a good one and restart the server, or accept the loss with
            `delete_model`.
        ResourceExhaustedError: the model exceeds the server's memory budget.
    """
    check_by_name("weights", weights)
    specs = [spec_of(tensor, value) for tensor, value in weights.items()]
    track_list = tracks_by_name(tracks)
    for track in track_list:
        track.check(specs)
    return create_from_specs(
        client, name, specs, track_list, max_pinned_versions, non_finite, timeout_s
    )


def create_from_specs(
    client: Connection,
    name: str,
    specs: list[_ema.Spec],
    tracks: list[_ema.Track],
    max_pinned_versions: int | None,
    non_finite: NonFinite,
    timeout_s: float | None,
) -> ModelInfo:
    model = client._client.create_model(
        name, specs, tracks, max_pinned_versions or 0, non_finite, client._timeout(timeout_s)
    )
    return model_from(model)


def import_weights(
    client: Connection,
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
    """Creates a model whose averages start with the weights of a file.

    `python -m ema_client.convert` makes such files from other libraries' averages. `attach` continues
    such a model if its tensors have the same names, dtypes and shapes. Names lose what wrappers have added
    (DistributedDataParallel, torch.compile, activation checkpointing), as with `attach`. A file does not say which
    tensors are buffers: for tracks that copy buffers (`buffers="copy"`, as the preset "torch" has it),
    give `tensor_rules` that copy them by name, here and in `attach`.

    Args:
        name: the model; it must not have a version yet.
        path: a safetensors file, or a Hugging Face folder (model.safetensors, or its index), whose
            small files are attached, too.
        tracks: as for `create_model`. They continue as if they had computed the weights.
        step: the step of the weights; training continues after it. Warm-ups and other schedules
            that depend on the age need it: for `preset="ema_pytorch"` it is that library's `step`, for
            "diffusers" its `optimization_step`.
        time: training time at the step. None: the step is the batch.
        updates: the number of updates in the averages, for uniform tracks and those that start at zero:
            `n_averaged` of torch's AveragedModel.
        max_pinned_versions, non_finite: as for `create_model`. `attach` needs the same.
        timeout_s: seconds for each call.

    Returns:
        The first version.

    Raises:
        InvalidArgumentError: the file is malformed; or a track would soon overwrite the weights, because
            the step or the number of updates is missing.
        AlreadyExistsError: the model has a version, or other tensors or tracks.
        EmaError: as `create_model` and `Run.push`.
    """
    timeout_s = client._timeout(timeout_s, is_transfer=True)
    now = time_dict(time, step=step)
    track_list = tracks_by_name(tracks)
    for track in track_list:
        track.check_keeps_first_value(now, updates)
    stored = safetensors.open_weights(path)
    # Without `check`: a rule may ignore tensors that only `attach` finds, which needs equal tracks.
    specs = [spec_of(tensor.spec.name, tensor.spec) for tensor in stored]
    info = create_from_specs(
        client, name, specs, track_list, max_pinned_versions, non_finite, timeout_s
    )
    if info.latest is not None:
        raise AlreadyExistsError(
            f'model "{name}": has version {info.latest.number} (step {info.latest.step}), expected '
            "none: an import creates the first",
            reason="MODEL_DIFFERS",
        )
    if os.path.isdir(path):
        attach_files(client, name, path, timeout_s=timeout_s)
    arrays = [
        _ema.Array(
            tensor.spec.name,
            tensor.read(),
            "bfloat16" if tensor.spec.dtype == "bfloat16" else "",
        )
        for tensor in stored
    ]
    with join_run(client, name, imported_updates=updates, timeout_s=timeout_s) as run:
        return run._get().start_push(step, now, arrays, timeout_s).wait()


def update_model(
    client: Connection,
    name: str,
    *,
    tracks: Mapping[str, TrackLike] | None = None,
    remove: str | Collection[str] = (),
    pause: str | Collection[str] = (),
    resume: str | Collection[str] = (),
    timeout_s: float | None = None,
) -> ModelInfo:
    """Changes all given tracks while training runs, or none. Their averages are kept.

    Takes effect at the next commit or when the next run opens; until then the result has the new
    tracks as `pending_tracks`. Takes effect at once if no run is open, or every track is paused.
    The same call again succeeds.

    Args:
        name: the model.
        tracks: new tracks, and existing ones with another schedule, as for `create_model`. Of an
            existing track only the schedules, also those of its tensor_rules, can change: give the rest
            as it is. It stays paused, or not paused.
        remove, pause, resume: names of tracks, or one name. Pushes do not change paused tracks.
        timeout_s: seconds.

    Raises:
        InvalidArgumentError: a wrong track, or a property that cannot change. A rule that ignores may
            match nothing: `attach` may not have sent the tensor.
        NotFoundError: no such model or track.
        ResourceExhaustedError: a new track exceeds the server's memory budget.
    """
    put = tracks_by_name({} if tracks is None else tracks)
    return model_from(
        client._client.update_model(
            name,
            put,
            names_from("remove", remove),
            names_from("pause", pause),
            names_from("resume", resume),
            client._timeout(timeout_s),
        )
    )


def model(client: Connection, name: str, *, timeout_s: float | None = None) -> ModelInfo:
    """One model. NotFoundError: there is no such model."""
    return model_from(client._client.get_model(name, client._timeout(timeout_s)))


def models(client: Connection, *, timeout_s: float | None = None) -> tuple[ModelInfo, ...]:
    """All models that the token may read, without their tensors and `tensor_rules`."""
    return tuple(map(model_from, client._client.list_models(client._timeout(timeout_s))))


def add_model_names(client: _ema.Client, error: EmaError, args: tuple[Any, ...]) -> None:
    """Adds the names of the existing models to the error of a call with an unknown model, beginning with
    those nearest to the call's first argument."""
    if error.reason != "MODEL_NOT_FOUND":
        return
    try:
        names = sorted(model.name for model in client.list_models(_NAMES_TIMEOUT_S))
    except EmaError:
        return  # The first error counts.
    near = difflib.get_close_matches(args[0], names) if isinstance(args[0], str) else []
    listed = some(list(dict.fromkeys([*near, *names]))) or "none"
    error.args = (f"{error.args[0]}; readable models: {listed}", *error.args[1:])


def delete_model(
    client: Connection, name: str, *, purge: bool = False, timeout_s: float | None = None
) -> None:
    """Deletes a model, if it exists. Its pushes end; running pulls finish. On a server with tokens this
    needs an admin's token.

    Its checkpoints stay on the disk, where no call can load them, unless `purge` deletes them, too. A
    model with only corrupt checkpoints can be created again after this.
    """
    client._client.delete_model(name, purge, client._timeout(timeout_s))


def attach_files(
    client: Connection, name: str, files: FilesLike, *, timeout_s: float | None = None
) -> tuple[str, ...]:
    """Adds small files, such as config.json, to a model's checkpoints.

    From the next checkpoint on, each track's folder has them, so that `from_pretrained` of
    `transformers` can read it. They replace files of the same names. At most 64 files of 64 MiB.

    Args:
        name: the model.
        files: contents by name; or a folder such as `save_pretrained` writes, of which the files that
            describe a model are used: .json (but no index of weights), .txt, .model, .jinja.
        timeout_s: seconds for each file.

    Returns:
        The names.

    Raises:
        InvalidArgumentError: a name that files of weights have, or a file that is too large.
        NotFoundError: no such model.
        ResourceExhaustedError: too many files, or not enough memory on the server.

    Example:
        >>> model.config.save_pretrained("described")
        >>> tokenizer.save_pretrained("described")
        >>> client.attach_files("m", "described")
        ('config.json', 'tokenizer.json', 'tokenizer_config.json')
    """
    contents = small_files(files)
    for file, data in contents.items():
        client._client.attach_file(name, file, data, client._timeout(timeout_s))
    return tuple(contents)


def attached_files(
    client: Connection, name: str, *, timeout_s: float | None = None
) -> dict[str, bytes]:
    """The files of `attach_files`, by name.

    Raises:
        NotFoundError: no such model.
        AbortedError: another client keeps replacing a file.
    """
    timeout = client._timeout(timeout_s)
    names = client._client.get_model(name, timeout).attached_files
    return {file: client._client.get_attached_file(name, file, timeout) for file in names}


def remove_attached_file(
    client: Connection, name: str, file: str, *, timeout_s: float | None = None
) -> None:
    """Removes a file of `attach_files`, if it exists."""
    check_name("file", file)
    client._client.remove_attached_file(name, file, client._timeout(timeout_s))
