# SPDX-License-Identifier: Apache-2.0
"""Reads averages for a module's tensors: asks the server, coordinates the ranks, matches names."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ema_client._client import arrays
from ema_client._client.client import Client
from ema_client._client.mode import current_mode
from ema_client._client.pieces import Piece, piece_of, selection_of
from ema_client._client.pull_arguments import check_version, only_average_of
from ema_client._client.read import connect
from ema_client._client.state import version_id
from ema_client._client.timeouts import TRANSFER_TIMEOUT_S
from ema_client._client.types import ModelInfo, Overflow, TensorSpec, Version, VersionLike, Weights
from ema_client._client.unread import attachments
from ema_client._client.url import split_url
from ema_client._client.version_calls import awaited_model
from ema_client._errors import (
    AbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    OutOfRangeError,
)
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import (
    NamedTensors,
    half_of,
    has_pieces,
    is_stage,
    named_tensors,
    specs_of,
    unwrap,
)
from ema_client._tracks.track import ignored_by
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.joining import of_known_dtypes

if TYPE_CHECKING:
    import torch

Wanted = TypeVar("Wanted")

_logger = logging.getLogger(__name__)

# How often ranks try to read the newest version before it is dropped, and the pause between two
# attempts, which doubles.
_ATTEMPTS = 20
_FIRST_PAUSE_S = 0.005
_MOST_PAUSE_S = 0.5


@dataclasses.dataclass(frozen=True)
class WhichAverage:
    """The average to read, and `overflow`: arguments of `averaged` and `load_into`."""

    url: str
    track: str | None = None
    version: VersionLike | None = None
    step: int | None = None
    rename: Callable[[str], str] | None = None
    process_group: Any = None
    timeout_s: float | None = None
    # False: if the newest version is to be read, the model's first version is waited for.
    must_exist: bool = True
    overflow: Overflow = "error"


@dataclasses.dataclass(frozen=True)
class AverageReader:
    """One rank's part in reading averages.

    Attributes:
        named: the module's tensors.
        may_be_part: the caller says that the server's model may have more tensors.
        is_part: this rank may hold only pieces, so all `ranks` read together.
    """

    client: Client
    ranks: Ranks
    info: ModelInfo
    track: str
    version: VersionLike | None
    step: int | None
    named: NamedTensors
    may_be_part: bool
    is_part: bool

    def names(self) -> dict[str, str]:
        """The server's names, by the module's; for tensors that the server lacks, the module's."""
        names = {name: name for name in self.named.all()}
        return names | names_there(self.named, first_names_of(self.info.tensors))

    def ignored(self) -> set[str]:
        """The module's tensors that the track does not have, because of its rules or their dtypes:
        they are not changed."""
        named, names = self.named, self.names()
        there = {spec.name: spec for spec in self.info.tensors}
        other = {name for name, one in named.all().items() if arrays.has_other_dtype(one)}
        specs = {names[own[0]]: own for own in of_known_dtypes(specs_of(named))}
        specs |= {name: arrays.spec_of(name, there[name]) for name in specs if name in there}
        ignored = ignored_by(self.track, self.info.tracks, list(specs.values()))
        result = other | {name for name in names if names[name] in ignored}
        if result:
            _logger.debug(
                'model "%s": track "%s" ignores %d tensors, which are left as they are',
                self.info.name,
                self.track,
                len(result),
            )
        return result

    def pieces(
        self, tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
    ) -> dict[str, Piece]:
        """This rank's pieces, by the server's names, for `pull`. Empty unless `is_part`.

        InvalidArgumentError: tensors that are tied on the server have different pieces here.
        """
        return _pieces_there(tensors, names) if self.is_part else {}

    def pull(
        self,
        wanted: Mapping[str, torch.Tensor],
        pieces: Mapping[str, Piece],
        *,
        names: Collection[str] | None = None,
        overflow: Overflow = "error",
    ) -> tuple[Mapping[str, torch.Tensor], Version]:
        """Averages by the server's names, and their version: of `pieces`, if this is a part, else
        of `names`, or of all. Collective. `wanted`: the tensors that will get them."""
        if self.is_part:
            return pull_pieces(self, pieces, overflow)
        weights = self.client.pull(
            self.info.name,
            track=self.track,
            version=self.version,
            step=self.step,
            tensors=names,
            dtype=half_of(wanted),
            overflow=overflow,
            framework="torch",
        )
        return weights, weights.version


@contextlib.contextmanager
def reading(
    model: torch.nn.Module, which: WhichAverage, match: Callable[[AverageReader], Wanted]
) -> Iterator[tuple[AverageReader, Wanted]]:
    """Connects, and asks the server about the model; `match` selects the wanted tensors. If the
    model is in parts, an error on any rank raises on all of them."""
    module = unwrap(model)
    version, step, timeout_s = which.version, which.step, which.timeout_s
    has_more = which.rename is not None or which.process_group is not None
    may_be_part = has_more or is_stage(module)
    is_part = may_be_part or has_pieces(module)
    ranks = Ranks.alone()
    if is_part:
        ranks = Ranks.current(
            which.process_group, call="averaged() or load_into()", timeout_s=timeout_s
        )
    with contextlib.ExitStack() as stack:
        failure: Exception | None = None
        try:
            address, model_name = split_url(which.url)
            check_version(version, model_name)
            if which.rename is not None and not callable(which.rename):
                raise InvalidArgumentError(f"rename {which.rename!r}: must be a function")
            named = named_tensors(module, which.rename)
            client = stack.enter_context(connect(address, model_name, timeout_s=timeout_s))
            reads_newest = not version and step is None
            is_trained_here = reads_newest and _wait_pushed(address, model_name, timeout_s)
            is_local = current_mode() == "local"
            if which.must_exist or is_trained_here or not reads_newest or is_local:
                info = client.model(model_name)
            else:
                info = _model_with_version(client, model_name, timeout_s)
            track = only_average_of(info) if which.track is None else which.track
            reader = AverageReader(
                client, ranks, info, track, version, step, named, may_be_part, is_part
            )
            wanted = match(reader)
        except Exception as raised:
            failure = raised
        ranks.gather_or_raise(failure, None)
        yield reader, wanted


def _wait_pushed(address: str, model_name: str, timeout_s: float | None) -> bool:
    """Waits for the last push to this model by a training of this thread, at most `timeout_s`
    (None: that of `attach`). A warning says if it has not ended. Returns whether there is one."""
    is_trained_here = False
    for attachment in list(attachments):
        assert isinstance(attachment, Attachment)
        if attachment._is_trained_here(address, model_name):
            is_trained_here = True
            try:
                attachment.wait_pushed(timeout_s=timeout_s)
            except DeadlineExceededError as error:
                _logger.warning(
                    'model "%s": the newest version is of an earlier step than %d: %s',
                    model_name,
                    attachment.step,
                    error,
                )
    return is_trained_here


def _model_with_version(client: Client, model_name: str, timeout_s: float | None) -> ModelInfo:
    """The model, as soon as it has a version. A warning says that this waits."""
    limit_s = TRANSFER_TIMEOUT_S if timeout_s is None else timeout_s
    deadline = time.monotonic() + limit_s
    info = awaited_model(client, model_name, timeout_s=limit_s, must_exist=False)
    if info.latest is not None:
        return info
    _logger.warning(
        'model "%s" has no version yet; waiting for its first one, at most %g s (timeout_s); '
        "must_exist=True raises instead",
        model_name,
        limit_s,
    )
    client.wait_for(model_name, step=0, timeout_s=max(0.0, deadline - time.monotonic()))
    return client.model(model_name)


def names_there(named: NamedTensors, first_names: Mapping[str, str]) -> dict[str, str]:
    """The server's names by the module's, for tensors that both have. The server may tie other
    tensors, and order their names differently. `first_names`: the first name of each tensor, by all
    its names on the server."""
    return {
        name: found
        for name in named.all()
        if (found := _first_found((name, *named.aliases.get(name, ())), first_names)) is not None
    }


def _first_found(names: Collection[str], first_names: Mapping[str, str]) -> str | None:
    return next((first_names[one] for one in names if one in first_names), None)


def first_names_of(specs: Collection[TensorSpec]) -> dict[str, str]:
    """The first name of each tensor on the server, by all its names."""
    names = {alias: spec.name for spec in specs for alias in spec.aliases}
    return names | {spec.name: spec.name for spec in specs}


def _pieces_there(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, Piece]:
    """This rank's pieces, by the server's names. InvalidArgumentError: tensors that are tied there
    have different pieces."""
    pieces: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        piece = piece_of(names[name], tensor)
        if pieces.setdefault(names[name], piece).box != piece.box:
            raise InvalidArgumentError(
                f'tensor "{name}": is "{names[name]}" on the server, of which another part is here',
                reason="BAD_LAYOUT",
            )
    return pieces


def pull_pieces(
    reader: AverageReader, pieces: Mapping[str, Piece], overflow: Overflow = "error"
) -> tuple[Mapping[str, torch.Tensor], Version]:
    """Pulls each rank's pieces, all of the same version. Collective."""
    client, ranks, info = reader.client, reader.ranks, reader.info
    track, version, step = reader.track, reader.version, reader.step
    whole, boxes = selection_of(pieces)
    dtype = half_of({name: piece.local for name, piece in pieces.items()})
    for attempt in range(1, _ATTEMPTS + 1):
        weights: Weights | None = None
        failure: Exception | None = None
        try:
            if attempt > 1:
                if ranks.rank == 0:  # The others wait for it.
                    threading.Event().wait(_pause_s(attempt))
                info = client.model(info.name)
        except Exception as raised:
            failure = raised
        # A synthesized track has one version, which is not the model's newest.
        newest = info.latest if step is None and track in info.tracks else None
        chosen, step = ranks.broadcast((version or newest, step))
        try:
            if failure is None and (whole or boxes):
                weights = client.pull(
                    info.name,
                    track=track,
                    version=chosen,
                    step=step,
                    tensors=whole,
                    slices=boxes,
                    dtype=dtype,
                    overflow=overflow,
                    framework="torch",
                )
        except Exception as raised:
            failure = raised
        try:
            of_ranks = ranks.gather_or_raise(failure, None if weights is None else weights.version)
        except OutOfRangeError:
            # Commits were faster than the pulls: the version has been dropped.
            if version or step is not None or attempt == _ATTEMPTS:
                raise
            continue
        pulled = [of_rank for of_rank in of_ranks if of_rank is not None]
        if not pulled:  # No rank has a piece.
            record: Version | None = None
            try:
                record = version_alone(client, info, track, chosen, step)
            except Exception as raised:
                failure = raised
            record = ranks.gather_or_raise(failure, record)[0]
            assert record is not None
            return {}, record
        if len({(version_id(of_rank), of_rank.commit_time) for of_rank in pulled}) == 1:
            if weights is None:
                return {}, pulled[0]
            for name in pieces.keys() & weights.keys():
                weights[name] = pieces[name].cut(weights[name])
            return weights, pulled[0]
        # A label has moved, the model has been rolled back to the step, or the track has been
        # synthesized again, perhaps as the same version.
    wanted = version.number if isinstance(version, Version) else version or "newest"
    what = f"step {step}" if step is not None else f"version {wanted}"
    raise AbortedError(f'model "{info.name}": {what} of track "{track}" moved during every pull')


def _pause_s(attempt: int) -> float:
    """How long rank 0 waits before this attempt, in seconds."""
    return random.SystemRandom().uniform(0.5, 1) * min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2.0**attempt)


def version_alone(
    client: Client, info: ModelInfo, track: str, version: VersionLike | None, step: int | None
) -> Version:
    """The record of the version that a pull would read; pulls one small tensor, if there is any."""
    specs = [arrays.spec_of(spec.name, spec) for spec in info.tensors]
    ignored = ignored_by(track, info.tracks, specs)
    sizes = {spec.name: math.prod(spec.shape) for spec in info.tensors if spec.name not in ignored}
    smallest = [min(sizes, key=sizes.__getitem__)] if sizes else []
    return client.pull(
        info.name, track=track, version=version, step=step, tensors=smallest or None
    ).version
