# SPDX-License-Identifier: Apache-2.0
"""`averaged`: puts averages into a model for a `with` block."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client._client import arrays
from ema_client._client.first_weights import warn_of_first_weights
from ema_client._client.mode import is_disabled, no_version
from ema_client._client.out import check_castable, check_writable, saturated
from ema_client._client.pieces import Piece, pieces_of, selected
from ema_client._client.types import ModelInfo, Overflow, Version, VersionLike, Weights
from ema_client._client.unread import wait_unread
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._evaluator.reading import AverageReader, WhichAverage, names_there, reading
from ema_client._evaluator.started import warn_of_no_average
from ema_client._model.ranks import Ranks
from ema_client._model.recalibrate import Recalibration, recalibrated
from ema_client._model.torch_model import (
    NamedTensors,
    as_module,
    check_values_here,
    first_part,
    named_tensors,
    shard_again,
    unwrap,
    write,
)

if TYPE_CHECKING:
    import torch


# Where names and shapes are that do not match.
_PLACES = ("in the module", "in the average")


@contextlib.contextmanager
def averaged(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    overflow: Overflow = "error",
    recalibrate: Recalibration | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    must_exist: bool = False,
    timeout_s: float | None = None,
) -> Iterator[Version]:
    """Puts averages into a model for a `with` block, then restores the model's own values.

    The tensors stay the same objects; values are cast to their dtypes. Tensors that the track
    ignores keep the model's own values. The average of tied tensors goes to each of their names
    that the model has. The model's own values are restored bit for bit, also after an exception;
    with several such blocks, when the last of them has ended. Keeps a copy of the model's values
    until then. Warns if the track has not reached its ema_start and still holds its first weights,
    and once if these have more than 10 % of the weight in the average.

    Waits, with a warning, until the model exists and has a version, unless `must_exist`, `version` or
    `step` is given, or this thread trains the model.

    For a sharded model (DTensors, FSDP1's wrapper, ZeRO-3) each rank reads only its own pieces,
    however the trainers have sharded the model. All its ranks must call this together; all get the
    same version, or all raise. With `rename` or `process_group` the model may also be a part of the
    server's, such as a pipeline stage.

    Args:
        model: the model, or a list of modules, as for `attach`; DistributedDataParallel, torch.compile and
            DeepSpeed's engine are unwrapped.
        url: "ema://host:port/model".
        track: which average. None: the only track that is not a copy, else "ema".
        version: as for `Client.pull`; None (or 0): the newest. The training thread first waits
            for its last push.
        step: instead of a version: the version of this trainer step; see `Client.pull`.
        overflow: what to do with a finite value that is too large for the tensor's dtype, as for
            `Client.pull`.
        recalibrate: recomputes BatchNorm's statistics for the averaged weights, which differ from
            the averaged statistics. A loader of input tensors, or of tuples that begin with one:
            one pass over it, as in `torch.optim.swa_utils.update_bn`. Or a function that does this,
            called with `model`. The modules keep their training modes; all buffers are restored at
            the end.
        rename: returns the name of a tensor on the server, as for `attach`.
        process_group: of torch.distributed: all ranks that have parts of the model. None: the
            default group, if the model is sharded or `rename` is given; else this rank alone.
        must_exist: raises where the model does not exist, or has no version yet.
        timeout_s: seconds for each call, and for the model's first version. None: 600 for that and for
            calls that move weights, 60 for others.
            Waiting for a last push with on_error "wait" may take longer, see
            `Attachment.wait_pushed`.

    Yields:
        The version in the model. If EMA_MODE is "disabled", a version 0, and the model has its own values.

    Raises:
        InvalidArgumentError: names or shapes do not match; averages cannot be cast to a tensor's
            dtype (int8), or a value is too large for it (see `overflow`); or a tensor cannot be
            written (on the meta device, such as those that accelerate has offloaded); nothing was
            changed. Or the loader is empty.
        FailedPreconditionError: averages from another thread are in the model now.
        DeadlineExceededError: the model has no version within `timeout_s`.
        EmaError: the pull failed; nothing was changed.

    Example:
        >>> with ema_client.averaged(model, "ema://host:50051/digits"):
        ...     evaluate(model)
    """
    if is_disabled(url):
        yield no_version()
        return
    model = as_module(model)
    read = read_average(
        model,
        WhichAverage(
            url, track, version, step, rename, process_group, timeout_s, must_exist, overflow
        ),
    )
    record = read.version
    if read.ranks.rank == 0:
        warn_of_no_average(read.model_name, record, read.track)
    swap = read.swapped(model, read.ranks)
    del read  # As large as the model.
    with swap:
        with contextlib.nullcontext() if recalibrate is None else recalibrated(model, recalibrate):
            yield record


class OwnValues:
    """A model's own values, kept while averages are in the model."""

    def __init__(self) -> None:
        self._values: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __bool__(self) -> bool:
        return bool(self._values)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        self._values = [(tensor, tensor.detach().clone()) for tensor in tensors]

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's tensors, each with its own value."""
        return list(self._values)

    def put_back(self) -> None:
        values, self._values = self._values, []
        write(values)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Puts the model's own values back for a `with` block, if other ones are in the model."""
        others = [(tensor, tensor.detach().clone()) for tensor, _ in self._values]
        write(self._values)
        try:
            yield
        finally:
            write(others)

    def drop(self) -> None:
        """Discards the values, because the model has permanently got other ones."""
        self._values = []


@dataclasses.dataclass
class _Swap:
    """Averages in a module, and the values that they replaced."""

    own: OwnValues
    thread: int
    has_ended: bool = False


# By module, oldest first.
_swaps: weakref.WeakKeyDictionary[torch.nn.Module, list[_Swap]] = weakref.WeakKeyDictionary()
_swaps_lock = threading.Lock()


def _begin(module: torch.nn.Module, what: str, own: OwnValues) -> _Swap:
    swap = _Swap(own, threading.get_ident())
    with _swaps_lock:
        swaps = _swaps.setdefault(first_part(module), [])
        if swaps and swaps[-1].thread != swap.thread:
            raise FailedPreconditionError(
                f"{what}: another thread has averaged values in this module now",
                reason="BAD_REQUEST",
            )
        swaps.append(swap)
    return swap


def _end(module: torch.nn.Module, swap: _Swap) -> None:
    """Restores the values that a swap has replaced, as soon as all later swaps have ended."""
    swap.has_ended = True
    swaps = _swaps[first_part(module)]
    while swaps and swaps[-1].has_ended:
        try:
            swaps[-1].own.put_back()
        finally:
            swaps.pop()


@dataclasses.dataclass(frozen=True)
class Average:
    """Averages that have been read for a model."""

    model_name: str
    track: str
    rename: Callable[[str], str] | None
    ranks: Ranks  # The ranks that have read their parts together.
    weights: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    ignored: set[str]
    version: Version
    overflow: Overflow

    def pairs(self, model: torch.nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The model's tensors with their averages, for `write`. InvalidArgumentError: no match."""
        what = f'model "{self.model_name}"'
        return _targets(
            model, what, self.weights, self.aliases, self.ignored, self.rename, self.overflow
        )

    def swapped(
        self, model: torch.nn.Module, ranks: Ranks, own: OwnValues | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Puts them into the model for a `with` block; see `swapped`."""
        return swapped(
            model,
            f'model "{self.model_name}"',
            self.weights,
            self.aliases,
            ignored=self.ignored,
            rename=self.rename,
            own=own,
            ranks=ranks,
            overflow=self.overflow,
        )


def read_average(model: torch.nn.Module, which: WhichAverage) -> Average:
    """Reads the averages for this rank's part of a model."""

    def match(
        reader: AverageReader,
    ) -> tuple[set[str], dict[str, torch.Tensor], dict[str, Piece]]:
        named = reader.named
        names = reader.names()
        ignored = reader.ignored()
        wanted = _without(named, ignored)
        check_values_here(f'model "{reader.info.name}"', unwrap(model), wanted)
        pieces = reader.pieces(wanted, names)
        _check_pieces(reader.info, pieces)
        return ignored, wanted, pieces

    with reading(model, which, match) as (reader, (ignored, wanted, pieces)):
        weights, pulled = reader.pull(wanted, pieces, overflow=which.overflow)
    if reader.ranks.rank == 0:
        warn_of_first_weights(reader.info.name, pulled, reader.track)
    return Average(
        reader.info.name,
        reader.track,
        which.rename,
        reader.ranks,
        weights,
        weights.aliases if isinstance(weights, Weights) else {},
        ignored,
        pulled,
        which.overflow,
    )


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
    overflow: Overflow = "error",
) -> Iterator[None]:
    """Like `averaged`, with given weights; the model keeps its own values of `ignored`. Errors name
    `what`.

    `aliases`: from further names of weights, which the model may use, to the first ones. With
    `ranks`, collective: swaps on all of them or on none.
    """
    own = OwnValues() if own is None else own
    swap: _Swap | None = None
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    failure: Exception | None = None
    try:
        swap = _begin(unwrap(model), what, own)
        pairs = _targets(model, what, weights, aliases, ignored, rename, overflow)
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
    """Like `swapped`, permanently."""
    write(_targets(model, what, weights, aliases, ignored, None))


def _targets(
    model: torch.nn.Module,
    what: str,
    weights: Mapping[str, torch.Tensor],
    aliases: Mapping[str, str],
    ignored: Collection[str],
    rename: Callable[[str], str] | None,
    overflow: Overflow = "error",
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The model's tensors, each with the value to write. Waits until no push reads these tensors.

    InvalidArgumentError: the weights do not match the model.
    """
    named = named_tensors(unwrap(model), rename)
    own = _without(named, ignored)
    check_values_here(what, unwrap(model), own)
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
    places = _PLACES
    arrays.check_names(what, expected=first_names.values(), given=given, places=places)
    values = {name: weights[names[name]] for name in tensors}
    arrays.check_shapes(what, expected=values, given=tensors, places=places)
    check_castable(what, values=values, targets=tensors, overflow=overflow)
    if overflow == "saturate":
        values = {name: saturated(value, tensors[name]) for name, value in values.items()}
    check_writable(what, tensors)
    wait_unread(own.values())
    return [(tensor, values[name]) for name, tensor in tensors.items()]


def _without(tensors: NamedTensors, ignored: Collection[str]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.all().items() if name not in ignored}


def _check_pieces(info: ModelInfo, pieces: Mapping[str, Piece]) -> None:
    """InvalidArgumentError: names or shapes of whole tensors differ; a box alone would also fit
    into a larger tensor."""
    what = f'model "{info.name}"'
    specs = {spec.name: spec for spec in info.tensors}
    places = _PLACES
    arrays.check_names(what, expected=specs.keys() & pieces.keys(), given=pieces, places=places)
    arrays.check_shapes(what, expected=specs, given=pieces, places=places)
