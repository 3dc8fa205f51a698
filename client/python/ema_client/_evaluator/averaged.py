# SPDX-License-Identifier: Apache-2.0
"""`averaged`: a model with its averaged weights, for as long as a `with` statement."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client._client import arrays
from ema_client._client.out import check_castable, check_writable
from ema_client._client.pieces import Piece, pieces_of, selected
from ema_client._client.types import ModelInfo, Version, VersionLike, Weights
from ema_client._client.unread import wait_unread
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._evaluator.reading import Reading, names_there, reading
from ema_client._evaluator.started import warn_of_no_average
from ema_client._model.ranks import Ranks
from ema_client._model.recalibrate import Recalibration, recalibrated
from ema_client._model.torch_model import NamedTensors, named_tensors, shard_again, unwrap, write

if TYPE_CHECKING:
    import torch


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
    when the last of them has ended. Costs a copy of the model while it lasts. Before its ema_start a
    track is no average: a warning says so, but of one that is the latest weights until then.

    A model of DTensors (fully_shard, tensor parallel) gets on each rank only what that rank has, however
    the trainers have sharded it. All its ranks must call this together, and get the same version, or all
    raise. With `rename` or `process_group` a model may also be a part of the server's, such as a
    pipeline's stage.

    Args:
        model: the model; DistributedDataParallel and torch.compile are looked through.
        url: "ema://host:port/model".
        track: which average. None: the only track that is not a copy, else "ema".
        version: a number, a record, or a label such as "best"; None (or 0): the newest, which, in the thread
            that trains, is that of its last push: it is waited for.
        step: instead: the version of this step of the trainer; see `Client.pull`.
        recalibrate: gives BatchNorm the statistics that the averaged weights have, which are not
            the average of the statistics: a loader of input tensors, or of tuples that begin with one,
            over which they are computed as by `torch.optim.swa_utils.update_bn`; or what does so,
            called with `model`. Takes a pass over the loader. Each module is in the mode afterwards in
            which it was; all buffers come back in the end.
        rename: gives the name that a tensor has on the server, as for `attach`.
        process_group: of torch.distributed: all ranks that have parts of the model. None: the default
            one, if the model is of DTensors or `rename` is given; else this rank is alone.
        timeout_s: seconds for each call, but that a last push with on_error "wait" is waited for as by
            `Attachment.wait_pushed`. None: 600 for what moves weights, 60 for others.

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
    read = read_average(
        model,
        url,
        track=track,
        version=version,
        step=step,
        rename=rename,
        process_group=process_group,
        timeout_s=timeout_s,
    )
    record = read.version
    if read.ranks.rank == 0:
        warn_of_no_average(read.model_name, record, read.track)
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


@dataclasses.dataclass(frozen=True)
class Average:
    """What has been read for a model."""

    model_name: str
    track: str
    ranks: Ranks  # That have read their parts together.
    weights: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    ignored: set[str]
    version: Version

    def pairs(
        self, model: torch.nn.Module, rename: Callable[[str], str] | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For `write`. InvalidArgumentError: it does not fit."""
        what = f'model "{self.model_name}"'
        return _targets(model, what, self.weights, self.aliases, self.ignored, rename)


def read_average(
    model: torch.nn.Module,
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
) -> Average:
    """The averages of what this rank has of a model."""

    def match(
        asked: Reading,
    ) -> tuple[set[str], dict[str, torch.Tensor], dict[str, Piece]]:
        named = asked.named
        names = asked.names()
        ignored = asked.ignored()
        wanted = _without(named, ignored)
        pieces = asked.pieces(wanted, names)
        _check_pieces(asked.info, pieces)
        return ignored, wanted, pieces

    with reading(
        model,
        url,
        match,
        track=track,
        version=version,
        step=step,
        rename=rename,
        process_group=process_group,
        timeout_s=timeout_s,
    ) as (asked, (ignored, wanted, pieces)):
        weights, pulled = asked.pull(wanted, pieces)
    aliases = weights.aliases if isinstance(weights, Weights) else {}
    return Average(asked.info.name, asked.track, asked.ranks, weights, aliases, ignored, pulled)


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
    names = names_there(named, first_names)
    given = [names.get(name, name) for name in tensors]
    tied = {alias for name in tensors for alias in named.aliases.get(name, ())}
    lost = sorted(tied & set(first_names.values()) - set(given))
    if lost:
        raise InvalidArgumentError(
            f"{what}: tied to others here, with averages of their own there: {arrays.some(lost)}",
            reason="BAD_LAYOUT",
        )
    arrays.check_names(what, expected=first_names.values(), given=given)
    values = {name: weights[names[name]] for name in tensors}
    arrays.check_shapes(what, expected=values, given=tensors)
    check_castable(what, values=values, targets=tensors)
    check_writable(what, tensors)
    wait_unread(own.values())
    return [(tensor, values[name]) for name, tensor in tensors.items()]


def _without(tensors: NamedTensors, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.all().items() if name not in ignored}


def _check_pieces(info: ModelInfo, pieces: Mapping[str, Piece]) -> None:
    """A box of a tensor fits into a larger one: the whole tensors must be the same."""
    what = f'model "{info.name}"'
    specs = {spec.name: spec for spec in info.tensors}
    arrays.check_names(what, expected=specs.keys() & pieces.keys(), given=pieces)
    arrays.check_shapes(what, expected=specs, given=pieces)
