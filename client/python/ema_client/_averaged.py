# SPDX-License-Identifier: Apache-2.0
"""`averaged`: a model with its averaged weights, for as long as a `with` statement."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ema_client import _arrays, _attachment
from ema_client._client import Client
from ema_client._errors import InvalidArgumentError, NotFoundError
from ema_client._torch_model import NamedTensors, named_tensors, specs_of, unwrap
from ema_client._track import track_of
from ema_client._types import ModelInfo, Version, VersionLike
from ema_client._url import split_url

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def averaged(
    model: torch.nn.Module,
    url: str,
    *,
    track: str | None = None,
    version: VersionLike = 0,
    timeout_s: float = 60.0,
) -> Iterator[Version]:
    """Puts averaged values into a model's parameters and buffers, and its own back afterwards.

    The tensors stay the same objects; values are cast to their dtypes. Tensors that the track ignores
    keep the model's own values. The model's own values come back bit for bit, also
    after an exception. Costs a copy of the model while it lasts.

    Args:
        model: the model; DistributedDataParallel and torch.compile are looked through.
        url: "ema://host:port/model".
        track: which average. None: the only track that is not a copy, else "ema".
        version: a number, a record, or a label such as "best"; 0: the newest.
        timeout_s: seconds for the pull.

    Yields:
        The version that is in the model.

    Raises:
        InvalidArgumentError: names or shapes do not match; nothing was changed.
        EmaError: the pull failed; nothing was changed.

    Example:
        >>> with ema_client.averaged(model, "ema://host:50051/digits"):
        ...     evaluate(model)
    """
    address, model_name = split_url(url)
    module = unwrap(model)
    named = named_tensors(module)
    with Client(address, timeout_s=timeout_s) as client:
        info = client.model(model_name)
        if track is None:
            track = _only_average(info)
        weights = client.pull(model_name, track=track, version=version, framework="torch")
    ignored = _ignored(info, track, named)
    tensors = {name: tensor for name, tensor in named.all().items() if name not in ignored}
    expected = [name for name in weights if name not in weights.aliases]
    _arrays.check_names(f'model "{model_name}"', expected=expected, given=tensors)
    wrong = [
        f"{name}: {tuple(tensor.shape)} here, {tuple(weights[name].shape)} there"
        for name, tensor in tensors.items()
        if tensor.shape != weights[name].shape
    ]
    if wrong:
        raise InvalidArgumentError(
            f'model "{model_name}": shapes do not match; {"; ".join(wrong)}', reason="BAD_LAYOUT"
        )
    for attachment in list(_attachment.live):
        if attachment.module is module:
            # A push reads the weights where they lie.
            attachment.wait_released()

    own = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    try:
        _write(tensors, weights)
        yield weights.version
    finally:
        _write(tensors, own)


def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])


def _only_average(info: ModelInfo) -> str:
    averages = [name for name, track in info.tracks.items() if not track.is_copy]
    if len(averages) == 1:
        return averages[0]
    if "ema" in averages:
        return "ema"
    raise NotFoundError(
        f'model "{info.name}": which track? There are {", ".join(info.tracks)}',
        reason="TRACK_NOT_FOUND",
    )


def _ignored(info: ModelInfo, track: str, tensors: NamedTensors) -> set[str]:
    """Tensors that the track does not have: the model keeps its own."""
    if track not in info.tracks:  # Removed since; its older versions are still there.
        return set()
    specs = specs_of(tensors)
    actions = track_of(track, info.tracks[track]).actions(specs)
    return {spec[0] for spec, (action, _) in zip(specs, actions) if action == "ignore"}
