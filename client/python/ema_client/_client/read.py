# SPDX-License-Identifier: Apache-2.0
"""`pull` and `watch` by URL, and the connection for a URL."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from typing import Any, cast

from ema_client._client.arrays import Framework
from ema_client._client.client import Client
from ema_client._client.mode import current_mode, no_server_error
from ema_client._client.pull_arguments import DtypeLike, OutLike
from ema_client._client.types import Overflow, Shard, Version, VersionLike, Weights
from ema_client._client.url import split_url

# Averages of this process, by address and model, where EMA_MODE is "local". Like a server's, they are
# there after the training, too.
local_clients: dict[tuple[str, str], Any] = {}


def connect(address: str, model_name: str, *, timeout_s: float | None = None) -> Client:
    """A client of the server, or of the averages of this process where EMA_MODE is "local".

    FailedPreconditionError: EMA_MODE is "disabled", or this process has no average of the model.
    """
    if current_mode() != "local":
        return Client(address, timeout_s=timeout_s)
    if (address, model_name) in local_clients:
        return cast(Client, local_clients[address, model_name])
    raise no_server_error(
        "local",
        f'model "{model_name}" at {address}: no attach() of this process averages it; reading it',
    )


def pull(
    url: str,
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
    """Reads one track of one version of the model at `url`, or a part of it; see `Client.pull`.

    Example:
        >>> weights = ema_client.pull("ema://host:50051/digits", track="ema")
        >>> model.load_state_dict(weights, strict=False)
    """
    given = dict(locals())
    address, model_name = split_url(given.pop("url"))
    with connect(address, model_name, timeout_s=given.pop("timeout_s")) as client:
        return client.pull(model_name, **given)


def watch(
    url: str,
    *,
    after: int | Version | None = None,
    must_exist: bool = False,
    timeout_s: float | None = None,
) -> Generator[Version, None, None]:
    """Yields every commit of the model at `url` as it happens; see `Client.watch`.

    Waits, with a warning, while the model does not exist, unless `must_exist` is given.

    The server keeps few versions (`max_pinned_versions`). If commits come faster than they are
    evaluated, a commit's version may have been dropped when it is pulled (OutOfRangeError); the
    newest one is always kept. A slow evaluator should call `Client.wait_for(after=)` instead: then it
    evaluates only the newest version each time, and none twice.

    Example:
        >>> for version in ema_client.watch("ema://host:50051/digits"):
        ...     print(version.step, version.number)
    """
    address, model_name = split_url(url)
    with Client(address) as client:
        yield from client.watch(model_name, after=after, must_exist=must_exist, timeout_s=timeout_s)
