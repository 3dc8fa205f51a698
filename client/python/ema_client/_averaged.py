# SPDX-License-Identifier: Apache-2.0
"""`averaged`: a model with its averaged weights, for as long as a `with` statement; and for good."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client import _arrays
from ema_client._client import Client
from ema_client._errors import (
    AbortedError,
    FailedPreconditionError,
    InvalidArgumentError,
    OutOfRangeError,
)
from ema_client._guard import wait_unread
from ema_client._joining import of_known_dtypes
from ema_client._out import check_castable, check_writable
from ema_client._pieces import Piece, piece_of, pieces_of, selected, selection_of
from ema_client._pull_arguments import check_version, only_average_of
from ema_client._ranks import Ranks
from ema_client._recalibrate import Recalibration, recalibrated
from ema_client._torch_model import (
    NamedTensors,
    half_of,
    has_pieces,
    named_tensors,
    shard_again,
    specs_of,
    unwrap,
    write,
)
from ema_client._track import ignored_by
from ema_client._types import ModelInfo, Version, VersionLike, Weights, version_id
from ema_client._url import split_url

if TYPE_CHECKING:
    import torch

# How often ranks try to read the newest version before it has gone, and what lies between two attempts,
# which doubles.
_ATTEMPTS = 20
_FIRST_PAUSE_S = 0.005
_MOST_PAUSE_S = 0.5


@contextlib.contextmanager
def averaged(
    model: torch.nn.Module,
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    recalibrate: Recalibration | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
) -> Iterator[Version]:
    """Puts averaged values into a model's parameters and buffers, and its own back afterwards.

    The tensors stay the same objects; values are cast to their dtypes. Tensors that the track ignores
    keep the model's own values. What the trainer has tied goes to each of its names that the model has.
    The model's own values come back bit for bit, also after an exception; of several such statements,
    when the last of them has ended. Costs a copy of the model while it lasts.

    A model of DTensors (fully_shard, tensor parallel) gets on each rank only what that rank has, however
    the trainers have sharded it. All its ranks must call this together, and get the same version, or all
    raise. With `rename` or `process_group` a model may also be a part of the server's, such as a
    pipeline's stage.

    Args:
        model: the model; DistributedDataParallel and torch.compile are looked through.
        url: "ema://host:port/model".
        track: which average. None: the only track that is not a copy, else "ema".
        version: a number, a record, or a label such as "best"; None (or 0): the newest.
        step: instead: the version of this step of the trainer; see `Client.pull`.
        recalibrate: gives BatchNorm the statistics that the averaged weights have, which are not
            the average of the statistics: a loader of input tensors, or of tuples that begin with one,
            over which they are computed as by `torch.optim.swa_utils.update_bn`; or what does so,
            called with `model`. Takes a pass over the loader. Each module is in the mode afterwards in
            which it was; all buffers come back in the end.
        rename: gives the name that a tensor has on the server, as for `attach`.
        process_group: of torch.distributed: all ranks that have parts of the model. None: the default
            one, if the model is of DTensors or `rename` is given; else this rank is alone.
        timeout_s: seconds for each call. None: 600 for what moves weights, 60 for others.

    Yields:
        The version that is in the model.

    Raises:
        InvalidArgumentError: names or shapes do not match, averages cannot be cast to a tensor's dtype
            (int8), or it cannot be written (it is on the meta device, as those that accelerate has
            offloaded are); nothing was changed. The loader is empty.
        FailedPreconditionError: another thread has averaged values in the model now.
        EmaError: the pull failed; nothing was changed.

    Example:
        >>> with ema_client.averaged(model, "ema://host:50051/digits"):
        ...     evaluate(model)
    """
    with averaged_beside(
        OwnValues(),
        model,
        url,
        track=track,
        version=version,
        step=step,
        rename=rename,
        process_group=process_group,
        timeout_s=timeout_s,
    ) as record:
        with contextlib.nullcontext() if recalibrate is None else recalibrated(model, recalibrate):
            yield record


class OwnValues:
    """What a model has while averaged values are in it, to be put back."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def put_back(self) -> None:
        values, self._values = self._values, []
        write(values)

    def drop(self) -> None:
        """They are not put back: the model has been given others, for good."""
        self._values = []


@dataclasses.dataclass
class _Swap:
    """Averaged values in a module; what it had before they came."""

    own: OwnValues
    thread: int
    has_ended: bool = False


# By module, as they came.
_swaps: weakref.WeakKeyDictionary[torch.nn.Module, list[_Swap]] = weakref.WeakKeyDictionary()
_swaps_lock = threading.Lock()


def _begin(module: torch.nn.Module, what: str, own: OwnValues) -> _Swap:
    swap = _Swap(own, threading.get_ident())
    with _swaps_lock:
        swaps = _swaps.setdefault(module, [])
        if swaps and swaps[-1].thread != swap.thread:
            raise FailedPreconditionError(
                f"{what}: another thread has averaged values in this module now",
                reason="BAD_REQUEST",
            )
        swaps.append(swap)
    return swap


def _end(module: torch.nn.Module, swap: _Swap) -> None:
    """Puts back what the module had, as soon as nothing is in it that came later."""
    swap.has_ended = True
    swaps = _swaps[module]
    while swaps and swaps[-1].has_ended:
        try:
            swaps[-1].own.put_back()
        finally:
            swaps.pop()


@contextlib.contextmanager
def averaged_beside(
    own: OwnValues,
    model: torch.nn.Module,
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
) -> Iterator[Version]:
    """`averaged`, with the model's own values where the caller can drop them."""
    read = _read(model, url, track, version, step, rename, process_group, timeout_s)
    record = read.version
    swap = swapped(
        model,
        f'model "{read.model_name}"',
        read.weights,
        read.aliases,
        ignored=read.ignored,
        rename=rename,
        own=own,
        ranks=read.ranks,
    )
    del read  # As large as the model.
    with swap:
        yield record


def copy_average(
    model: torch.nn.Module,
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
    ranks: Ranks,
) -> Version:
    """Puts averaged values into a model's parameters and buffers for good. As `averaged` else.

    Collective: on an error of one of `ranks` all models stay as they were, and all raise it.
    """
    failure: Exception | None = None
    try:
        read = _read(model, url, track, version, step, rename, process_group, timeout_s)
        what = f'model "{read.model_name}"'
        pairs = _targets(model, what, read.weights, read.aliases, read.ignored, rename)
    except Exception as raised:
        failure = raised
    ranks.gather_or_raise(failure, None)
    write(pairs)
    return read.version


@dataclasses.dataclass(frozen=True)
class _Read:
    model_name: str
    ranks: Ranks  # That have read their parts together.
    weights: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    ignored: set[str]
    version: Version


def _read(
    model: torch.nn.Module,
    url: str,
    track: str | None,
    version: VersionLike | None,
    step: int | None,
    rename: Callable[[str], str] | None,
    process_group: Any,
    timeout_s: float | None,
) -> _Read:
    """The averages of what this rank has of a model."""
    is_part = rename is not None or process_group is not None or has_pieces(unwrap(model))
    ranks = Ranks.current(process_group) if is_part else Ranks.alone()
    with contextlib.ExitStack() as stack:
        failure: Exception | None = None
        try:
            check_version(version)
            address, model_name = split_url(url)
            named = named_tensors(unwrap(model), rename)
            client = stack.enter_context(Client(address, timeout_s=timeout_s))
            info = client.model(model_name)
            if track is None:
                track = only_average_of(info)
            names = _names_there(named, _first_names(info))
            ignored = _ignored(info, track, named, names)
            wanted = _without(named, ignored)
            pieces = _pieces_there(wanted, names) if is_part else {}
            _check_pieces(info, pieces)
        except Exception as raised:
            failure = raised
        ranks.gather_or_raise(failure, None)
        assert track is not None
        weights: Mapping[str, torch.Tensor]
        if is_part:
            weights, pulled = pull_pieces(client, ranks, info, track, version, step, pieces)
        else:
            whole = client.pull(
                model_name,
                track=track,
                version=version,
                step=step,
                dtype=half_of(wanted),
                framework="torch",
            )
            weights, pulled = whole, whole.version
    aliases = weights.aliases if isinstance(weights, Weights) else {}
    return _Read(model_name, ranks, weights, aliases, ignored, pulled)


@contextlib.contextmanager
def swapped(
    model: torch.nn.Module,
    what: str,
    weights: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    *,
    ignored: Collection[str] = (),
    rename: Callable[[str], str] | None = None,
    own: OwnValues | None = None,
    ranks: Ranks | None = None,
) -> Iterator[None]:
    """`averaged` with weights that are here; the model keeps its own of `ignored`. Errors name `what`.

    `aliases` are further names of weights, by which the model may have them, and the first ones.
    Collective, if there are `ranks`: on all of them or on none.
    """
    own = OwnValues() if own is None else own
    swap: _Swap | None = None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    failure: Exception | None = None
    try:
        swap = _begin(unwrap(model), what, own)
        pairs = _targets(model, what, weights, aliases, ignored, rename)
        own.keep(tensor for tensor, _ in pairs)
    except Exception as raised:  # No memory, for example.
        failure = raised
    try:
        (ranks or Ranks.alone()).gather_or_raise(failure, None)
        write(pairs)
        del weights, pairs
        yield
    finally:
        try:
            shard_again(unwrap(model))
        finally:
            if swap is not None:
                _end(unwrap(model), swap)


def write_average(
    model: torch.nn.Module,
    what: str,
    weights: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    *,
    ignored: Collection[str] = (),
) -> None:
    """As `swapped`, for good."""
    write(_targets(model, what, weights, aliases, ignored, None))


def _targets(
    model: torch.nn.Module,
    what: str,
    weights: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    ignored: Collection[str],
    rename: Callable[[str], str] | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Where the weights go, which nobody reads any more, each with what goes there.

    InvalidArgumentError: they do not fit.
    """
    named = named_tensors(unwrap(model), rename)
    own = _without(named, ignored)
    tensors = selected(pieces_of(own))
    first_names = {name: name for name in weights}
    first_names |= {alias: name for alias, name in aliases.items() if name in weights}
    names = _names_there(named, first_names)
    given = [names[name] for name in tensors]
    tied = {alias for name in tensors for alias in named.aliases.get(name, ())}
    lost = sorted(tied & set(first_names.values()) - set(given))
    if lost:
        raise InvalidArgumentError(
            f"{what}: tied to others here, with averages of their own there: {_arrays.some(lost)}",
            reason="BAD_LAYOUT",
        )
    _arrays.check_names(what, expected=first_names.values(), given=given)
    values = {name: weights[names[name]] for name in tensors}
    _arrays.check_shapes(what, expected=values, given=tensors)
    check_castable(what, values=values, targets=tensors)
    check_writable(what, tensors)
    wait_unread(own.values())
    return [(tensor, values[name]) for name, tensor in tensors.items()]


def _without(tensors: NamedTensors, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.all().items() if name not in ignored}


def _first_names(info: ModelInfo) -> dict[str, str]:
    """Of each name of a tensor there the one under which it goes."""
    names = {alias: spec.name for spec in info.tensors for alias in spec.aliases}
    return names | {spec.name: spec.name for spec in info.tensors}


def _names_there(named: NamedTensors, first_names: Mapping[str, str]) -> dict[str, str]:
    """By the tensors' names here those there: others may be tied, and tied ones in another order."""
    return {
        name: next(
            (
                first_names[one]
                for one in (name, *named.aliases.get(name, ()))
                if one in first_names
            ),
            name,
        )
        for name in named.all()
    }


def _pieces_there(
    tensors: Mapping[str, torch.Tensor], names: Mapping[str, str]
) -> dict[str, Piece]:
    """What is here, by the names there. InvalidArgumentError: of what is tied there, unlike parts."""
    pieces: dict[str, Piece] = {}
    for name, tensor in tensors.items():
        piece = piece_of(names[name], tensor)
        if pieces.setdefault(names[name], piece).box != piece.box:
            raise InvalidArgumentError(
                f'tensor "{name}": is "{names[name]}" on the server, of which another part is here',
                reason="BAD_LAYOUT",
            )
    return pieces


def _check_pieces(info: ModelInfo, pieces: Mapping[str, Piece]) -> None:
    """A box of a tensor fits into a larger one: the whole tensors must be the same."""
    what = f'model "{info.name}"'
    specs = {spec.name: spec for spec in info.tensors}
    _arrays.check_names(what, expected=specs.keys() & pieces.keys(), given=pieces)
    _arrays.check_shapes(what, expected=specs, given=pieces)


def pull_pieces(
    client: Client,
    ranks: Ranks,
    info: ModelInfo,
    track: str,
    version: VersionLike | None,
    step: int | None,
    pieces: Mapping[str, Piece],
) -> tuple[Mapping[str, torch.Tensor], Version]:
    """Each rank its pieces, all of them of one version. Collective."""
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
                    framework="torch",
                )
        except Exception as raised:
            failure = raised
        try:
            of_ranks = ranks.gather_or_raise(failure, None if weights is None else weights.version)
        except OutOfRangeError:
            # Commits have overtaken the pulls: the newest version has gone.
            if version or step is not None or attempt == _ATTEMPTS:
                raise
            continue
        pulled = [of_rank for of_rank in of_ranks if of_rank is not None]
        if not pulled:  # No rank has anything of it.
            record: Version | None = None
            try:
                record = version_alone(client, info, track, chosen, step)
            except Exception as raised:
                failure = raised
            record = ranks.gather_or_raise(failure, record)[0]
            assert record is not None
            return {}, record
        if len({(version_id(of_rank), of_rank.commit_time) for of_rank in pulled}) == 1:
            return {} if weights is None else weights, pulled[0]
        # A label has moved, the model has been rolled back to the step, or the track has been
        # synthesized anew, perhaps as the same version.
    wanted = version.number if isinstance(version, Version) else version or "newest"
    what = f"step {step}" if step is not None else f"version {wanted}"
    raise AbortedError(f'model "{info.name}": {what} of track "{track}" moved during every pull')


def _pause_s(attempt: int) -> float:
    """How long rank 0 waits before this attempt."""
    return random.SystemRandom().uniform(0.5, 1) * min(_MOST_PAUSE_S, _FIRST_PAUSE_S * 2.0**attempt)


def version_alone(
    client: Client, info: ModelInfo, track: str, version: VersionLike | None, step: int | None
) -> Version:
    """The record of what a pull would give. A pull that names nothing is of everything."""
    specs = [_arrays.spec_of(spec.name, spec) for spec in info.tensors]
    ignored = ignored_by(track, info.tracks, specs)
    sizes = {spec.name: math.prod(spec.shape) for spec in info.tensors if spec.name not in ignored}
    smallest = [min(sizes, key=sizes.__getitem__)] if sizes else []
    return client.pull(
        info.name, track=track, version=version, step=step, tensors=smallest or None
    ).version


def _ignored(
    info: ModelInfo, track: str, tensors: NamedTensors, names: Mapping[str, str]
) -> set[str]:
    """Tensors that the track does not have: the model keeps its own."""
    other = {name for name, tensor in tensors.all().items() if _arrays.has_other_dtype(tensor)}
    there = {spec.name: _arrays.spec_of(spec.name, spec) for spec in info.tensors}
    specs = {names[own[0]]: own for own in of_known_dtypes(specs_of(tensors))}
    specs |= {name: there[name] for name in specs if name in there}
    ignored = ignored_by(track, info.tracks, list(specs.values()))
    return other | {name for name in names if names[name] in ignored}
