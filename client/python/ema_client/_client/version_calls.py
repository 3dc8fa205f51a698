# SPDX-License-Identifier: Apache-2.0
"""The versions of a model: their records, commits as they happen, and averages built from snapshots.

Functions that are methods of `Client`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Collection, Generator, Iterator

from ema_client import _ema
from ema_client._client.connection import Connection
from ema_client._client.timeouts import check_seconds
from ema_client._client.state import version_id
from ema_client._client.types import (
    ListedVersion,
    ModelInfo,
    SavedState,
    Statistics,
    Synthesis,
    Version,
    is_after,
    model_from,
)
from ema_client._errors import (
    DeadlineExceededError,
    EmaError,
    InvalidArgumentError,
    NotFoundError,
    OutOfRangeError,
)
from ema_client._argument_checks import check_int64, check_name, names_from

_logger = logging.getLogger(__name__)

# Above this sum of the absolute weights of a synthesis, a warning says that it amplifies.
_MOST_AMPLIFICATION = 10
# Above this `Synthesis.residual`, a warning says that the result is not the requested average.
_MOST_RESIDUAL = 0.5

# The pauses between two checks whether a model exists, in seconds. Each is twice the one before.
_FIRST_PAUSE_S = 0.05
_MOST_PAUSE_S = 2.0


def versions(
    client: Connection, name: str, *, after: int | Version = 0, timeout_s: float | None = None
) -> tuple[ListedVersion, ...]:
    """The records that the server keeps of versions after `after`, oldest first.

    Args:
        name: the model.
        after: a version's record, or its number in any incarnation of the server.
        timeout_s: seconds.
    """
    if after is None:
        raise InvalidArgumentError(f"after {after}: must be a whole number or a Version")
    # A later incarnation may have continued from a lower number.
    number = 0 if isinstance(after, Version) else version_id(after, "after")[0]
    listed = client._client.list_versions(name, number, client._timeout(timeout_s))
    return tuple(one for one in listed if is_after(one.version, after))


def awaited_model(
    client: Connection, name: str, *, timeout_s: float, must_exist: bool
) -> ModelInfo:
    """The model, as soon as it exists. If it does not, a warning says so.

    Args:
        name: the model.
        timeout_s: seconds in all, perhaps infinite. 0: checks once, within the client's timeout.
        must_exist: does not wait.

    Raises:
        NotFoundError: there is no such model, and `must_exist` is given; or its checkpoints are corrupt.
        DeadlineExceededError: it has not been created in time.
    """
    deadline = time.monotonic() + timeout_s
    # A timeout of 0 must leave time for one call.
    call_timeout_s = min(timeout_s or math.inf, client._timeout(None))
    pause_s = _FIRST_PAUSE_S
    # Only the first error lists the existing models; listing them each time would take longer.
    get_model = client._client.get_model
    problem = ""
    while True:
        try:
            return model_from(get_model(name, call_timeout_s))
        except NotFoundError as error:
            if must_exist or error.reason != "MODEL_NOT_FOUND":
                raise
            problem = problem or error.args[0]
        get_model = client._raw.get_model
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlineExceededError(
                f"{problem}; expected it within {timeout_s:g} s (timeout_s)"
            )
        if pause_s == _FIRST_PAUSE_S:
            limit = "" if timeout_s == math.inf else f", at most {timeout_s:g} s (timeout_s)"
            _logger.warning(
                "%s; waiting until it is created%s; must_exist=True raises instead", problem, limit
            )
        threading.Event().wait(min(pause_s, left_s))
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
        call_timeout_s = min(max(left_s, _FIRST_PAUSE_S), client._timeout(None))


def watch(
    client: Connection,
    name: str,
    *,
    after: int | Version | None = None,
    must_exist: bool = False,
    timeout_s: float | None = None,
) -> Generator[Version, None, None]:
    """Yields every commit after version `after`, in order, as it happens. Reconnects by itself.

    Waits, with a warning, while the model does not exist: before a trainer has created it, and after it
    was deleted, for the next one of that name.

    A slow reader gets commits later, while the server keeps their records: the newest 4,096 of a model,
    at most 4 MiB. The `skipped` of a commit counts the missing ones before it. Weights are dropped
    sooner: to get the newest each time, call `wait_for(name, after=version)`.

    Args:
        name: the model.
        after: a version's record, or its number in any incarnation of the server; 0: starts with the
            oldest record. None: only future commits. A restarted server may continue from an older
            version: after a number, only commits with a larger one are yielded; after a record, all
            later ones.
        must_exist: raises NotFoundError where the model does not exist, or is deleted.
        timeout_s: seconds to wait for the model, and for each commit; then DeadlineExceededError is
            raised. None: no limit.

    Raises:
        NotFoundError: `must_exist` is given, and there is no such model.
    """
    timeout = math.inf if timeout_s is None else client._timeout(timeout_s)
    since = None if after is None else version_id(after, "after")
    opened: _ema.VersionWatch | None = None
    if since is None:
        try:
            opened = client._client.watch(name, None, timeout)
        except NotFoundError:
            if must_exist:
                raise
    return _commits_of(client, name, opened, since or (0, 0), timeout, must_exist)


def _commits_of(
    client: Connection,
    name: str,
    watch: _ema.VersionWatch | None,
    since: tuple[int, int],
    timeout_s: float,
    must_exist: bool,
) -> Generator[Version, None, None]:
    """The versions of a watch, which ends with the generator. None: it is opened after `since`, as
    soon as the model exists, and so is another one after the model was deleted."""
    try:
        while True:
            try:
                if watch is None:
                    awaited_model(client, name, timeout_s=timeout_s, must_exist=must_exist)
                    watch = client._client.watch(name, since, timeout_s)
                version = watch.next()
            except NotFoundError as error:
                if must_exist or error.reason != "MODEL_NOT_FOUND":
                    raise
                watch = None
                continue
            since = version.number, version.incarnation
            yield version
    finally:
        # A raised error may keep this frame alive for long.
        del watch


def wait_for(
    client: Connection,
    name: str,
    *,
    step: int | None = None,
    after: int | Version | None = None,
    must_exist: bool = False,
    timeout_s: float | None = None,
) -> Version:
    """Waits until the model has reached a step, or has a newer version.

    While the model does not exist, a warning says so, and this waits for a trainer to create it.

    Args:
        name: the model.
        step: the trainer's step. A rollback takes the model back to an earlier one.
        after: instead of a step: a version's record, to wait for any later commit, whatever its step; or
            a version number in any incarnation of the server, to wait for a larger one.
        must_exist: raises NotFoundError where the model does not exist, or is deleted.
        timeout_s: seconds in all. None: no limit. 0: checks once, within the client's timeout.

    Returns:
        The newest version, if it has reached the step, or is newer than `after`; else the first commit
        for which that is true. It can be pulled until later commits replace it.

    Raises:
        InvalidArgumentError: both or neither of step and after, or a wrong value.
        NotFoundError: `must_exist` is given, and there is no such model.
        DeadlineExceededError: not reached in time.

    Example:
        >>> weights = client.pull("m", track="ema", version=client.wait_for("m", step=10_000))
        >>> while training:
        ...     weights = client.pull("m", track="ema")
        ...     evaluate(weights, weights.version.step)
        ...     client.wait_for("m", after=weights.version)
    """
    if (step is None) == (after is None):
        raise InvalidArgumentError(f"wait_for: give either step or after, not {step} and {after}")
    least_step = 0 if step is None else step
    check_int64("step", least_step)
    least_number = version_id(after, "after")[0]

    def is_reached(version: Version) -> bool:
        return version.step >= least_step if after is None else is_after(version, after)

    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s)
    limit_s = math.inf if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    latest = awaited_model(client, name, timeout_s=limit_s, must_exist=must_exist).latest
    while latest is None or not is_reached(latest):
        left_s = deadline - time.monotonic()
        found: Version | None = None
        if left_s > 0:
            since = version_id(latest or 0)
            opened = client._client.watch(name, since, left_s)
            commits = _commits_of(client, name, opened, since, left_s, must_exist=True)
            with contextlib.closing(commits):
                try:
                    # With a timeout, which a watch applies to each commit, only one commit is awaited.
                    found = next(one for one in commits if timeout_s is not None or is_reached(one))
                except DeadlineExceededError:
                    pass
                except NotFoundError:  # The model was deleted.
                    left_s = max(0.0, deadline - time.monotonic())
                    latest = awaited_model(
                        client, name, timeout_s=left_s, must_exist=must_exist
                    ).latest
                    continue
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


def statistics(
    client: Connection,
    name: str,
    *,
    version: int | Version | SavedState | None = None,
    tracks: str | Collection[str] = (),
    timeout_s: float | None = None,
) -> Statistics:
    """Norms of a version's averages, and their distances from the raw weights.

    The server computes them at the first call for a track, and keeps them in the version's record, which
    `versions` returns, too. With `--statistics-every-commits N` it computes them without a call.

    Args:
        name: the model.
        version: the number, the record or a saved state of a version in the server's memory; None: the
            newest.
        tracks: only these; empty: all that average a tensor.
        timeout_s: seconds.

    Returns:
        The version, and the statistics of these tracks. If the model has a copy track, they include
        distances.

    Raises:
        NotFoundError: no such model or track.
        InvalidArgumentError: a track averages no tensor.
        OutOfRangeError: the version is not in memory.
        FailedPreconditionError: the model has no version yet, or a track has no value yet.
        ResourceExhaustedError: readers hold as many versions as `max_pinned_versions` allows.

    Example:
        >>> statistics = client.statistics("m")
        >>> plot(statistics.version.step, statistics.tracks["ema"].distance)
    """
    number, incarnation = version_id(version, of=name)
    timeout = client._timeout(timeout_s, is_transfer=True)
    with listing_kept_versions(client, name):
        record = client._client.get_statistics(
            name, number, incarnation, names_from("tracks", tracks), timeout
        )
    return Statistics(record, record.statistics)


def synthesize(
    client: Connection,
    name: str,
    *,
    result: str,
    sigma_rel: float | None = None,
    half_life: str | None = None,
    step: int = 0,
    tracks: str | Collection[str] = (),
    timeout_s: float | None = None,
) -> Synthesis:
    """Builds the average of another length, at any past step, from stored snapshots.

    The server stores snapshots of tracks with a snapshot_interval. The result can be pulled like a track
    until the server stops, has built four more, or removes it (`update_model(name, remove=[result])`).

    Args:
        name: the model.
        result: the track name for `pull`. Replaces an earlier result of that name, of any client.
        sigma_rel: relative width of the power-function profile, above 0 and at most 1/sqrt(12).
        half_life: instead of sigma_rel: such as "1000ba", in the unit of the tracks' update_interval.
        step: the step of the average; 0: the newest stored one.
        tracks: the tracks to build from; empty: all that fit together.
        timeout_s: seconds.

    Returns:
        The result. Its `residual` is the distance of its profile from the requested one. If it is above
        about 0.1, the result is not the requested average, because the step is between two snapshots
        and the newest weights are missing, or because the length is outside the tracks' lengths. Above
        0.5 a warning says so. Another warning says if the absolute values of the sources' weights add
        up to more than 10: then the result amplifies noise.

    Raises:
        InvalidArgumentError: both or neither of sigma_rel and half_life, a wrong value, or a track that
            does not fit the others.
        NotFoundError: no such model or track.
        AlreadyExistsError: the model has a track with the result's name.
        OutOfRangeError: the step is not committed yet, or is before the first snapshot.
        FailedPreconditionError: no snapshot is stored yet.
        ResourceExhaustedError: not enough memory for the result.
        DataLossError: a checkpoint on the server's disk is corrupt.

    Example:
        >>> result = client.synthesize("m", result="post-hoc", sigma_rel=0.07, step=5000)
        >>> weights = client.pull("m", track="post-hoc")
    """
    if half_life is not None:
        check_name("half_life", str(half_life))
    synthesis = client._client.synthesize(
        name,
        result,
        sigma_rel,
        "" if half_life is None else str(half_life),
        step,
        names_from("tracks", tracks),
        client._timeout(timeout_s, is_transfer=True),
    )
    amplification = sum(abs(source.weight) for source in synthesis.sources)
    if synthesis.residual > _MOST_RESIDUAL:
        _logger.warning(
            'model "%s": "%s" is not the average that was asked for: residual %.2g, expected below 0.1. '
            "Ask for a step with a snapshot (step %d is built from snapshots up to step %d), and for "
            "a length between those of the tracks",
            name,
            result,
            synthesis.residual,
            synthesis.version.step,
            max(source.step for source in synthesis.sources),
        )
    elif amplification > _MOST_AMPLIFICATION:
        _logger.warning(
            'model "%s": "%s" amplifies the differences between its snapshots: the absolute values of its '
            "weights add up to %.3g, expected at most %d. Ask for a length between those of the tracks",
            name,
            result,
            amplification,
            _MOST_AMPLIFICATION,
        )
    return synthesis


@contextlib.contextmanager
def listing_kept_versions(client: Connection, name: str) -> Iterator[None]:
    """Adds the versions in the server's memory to the error of one that is gone, unless the server
    has listed those on its disk, too."""
    try:
        yield
    except OutOfRangeError as error:
        if error.reason == "VERSION_NOT_KEPT" and "there are" not in error.args[0]:
            with contextlib.suppress(EmaError):
                listed = versions(client, name)
                kept = [str(one.version.number) for one in listed if one.available]
                text = f"{error.args[0]}; versions in memory: {', '.join(kept) or 'none'}"
                error.args = (text, *error.args[1:])
        raise
