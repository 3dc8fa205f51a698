# SPDX-License-Identifier: Apache-2.0
"""`load_into`: puts averages into a module permanently, also into one on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client._client import arrays
from ema_client._client.first_weights import warn_of_first_weights
from ema_client._client.mode import is_disabled, no_version
from ema_client._client.out import check_castable, check_writable, saturated
from ema_client._client.pieces import Piece, local_of, object_of, pieces_of
from ema_client._client.pull_arguments import check_device
from ema_client._client.types import Overflow, Version, VersionLike
from ema_client._client.unread import wait_unread
from ema_client._errors import InvalidArgumentError
from ema_client._evaluator.reading import (
    AverageReader,
    WhichAverage,
    first_names_of,
    names_there,
    reading,
    version_alone,
)
from ema_client._evaluator.started import warn_of_no_average
from ema_client._model.torch_model import (
    as_module,
    check_values_here,
    named_tensors,
    shard_again,
    unwrap,
    write,
)
from ema_client._tracks.track import ignored_by

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The result of `load_into`.

    Attributes:
        version: the version in the module.
        missing_keys: tensors of the module that the model does not have, or did not have at that
            version; they are unchanged.
        unexpected_keys: tensors of the track that the module does not have.
        meta_buffers: non-persistent buffers on the meta device. No state_dict has them, so the
            server does not, either: the caller must compute their values.
        ignored_keys: tensors of the module that the track ignores; they are unchanged, and on the
            meta device still have no memory.
    """

    version: Version
    missing_keys: tuple[str, ...]
    unexpected_keys: tuple[str, ...]
    meta_buffers: tuple[str, ...]
    ignored_keys: tuple[str, ...]


def load_into(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    url: str,
    *,
    track: str | None = None,
    version: VersionLike | None = None,
    step: int | None = None,
    strict: bool = True,
    overflow: Overflow = "error",
    device: Any = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    timeout_s: float | None = None,
) -> Loaded:
    """Puts averages into a module's parameters and buffers permanently.

    Tensors stay the same objects, and values are cast to their dtypes. Tensors on the `meta` device
    are replaced by new ones: parameters keep requires_grad, and tied ones stay tied. Tensors that
    the track ignores are left as they are. For a sharded model each rank reads its own pieces,
    as with `averaged`; all ranks must call this together. With `rename` or `process_group` the
    model may also be a part of the server's, such as a pipeline stage: then the track may have
    other tensors, too. Warns like `averaged` if the track has not started, or still consists
    largely of its first weights.

    Args:
        model: the module, or a list of modules, as for `attach`; DistributedDataParallel, torch.compile and
            DeepSpeed's engine are unwrapped. With DeepSpeed, the next step may overwrite the loaded
            values with its own copies.
        url: "ema://host:port/model".
        track: which average. None: the only track that is not a copy, else "ema".
        version: as for `Client.pull`; None (or 0): the newest. The training thread first waits
            for its last push.
        step: instead of a version: the version of this trainer step; see `Client.pull`.
        strict: the module and the track must have the same tensors, except those that the track's
            rules ignore by name. False: only the tensors that both have are sent and loaded, such
            as an encoder's.
        overflow: what to do with a finite value that is too large for the tensor's dtype, as for
            `Client.pull`.
        device: where tensors without memory get it, such as "cuda:1". None: in host memory. Others
            stay where they are; if all tensors have memory, it must be on this device.
        rename: returns the name of a tensor on the server, as for `attach`; the result has these
            names, too.
        process_group: of torch.distributed: all ranks that have parts of the model. None: the
            default group, if the model is sharded or `rename` is given; else this rank alone.
        timeout_s: seconds for each call. None: 600 for calls that move weights, 60 for others.

    Returns:
        What was loaded, and what was not. If EMA_MODE is "disabled": nothing, of version 0.

    Raises:
        InvalidArgumentError: shapes differ; averages cannot be cast to a tensor's dtype, such as
            int8; a tensor cannot be written, such as an expanded one; or, if `strict`, names
            differ. The message lists all of these. Or the values are not in the module's memory
            (accelerate has offloaded them). Or PyTorch has no such `device`, or the model is on
            another one.
        EmaError: the pull failed.
        RuntimeError: no memory on `device`.

        After each of these the module is unchanged on all ranks, except that a device that fails
        while existing memory is written leaves the module half written.

    Example:
        >>> with torch.device("meta"):
        ...     model = Net()
        >>> ema_client.load_into(model, "ema://host:50051/digits", device="cuda")
    """

    model = as_module(model)

    def match_all(
        reader: AverageReader,
    ) -> tuple[_Match, dict[str, torch.Tensor], dict[str, Piece]]:
        if device is not None:
            check_device(device)
        match = _match(reader)
        matched = {name: reader.named.all()[name] for name in match.names}
        check_values_here(f'model "{reader.info.name}"', unwrap(model), matched)
        match.check(reader.info.name, strict, reader.may_be_part)
        _check_place(matched, device)
        check_writable(
            f'model "{reader.info.name}"',
            {name: local_of(one) for name, one in matched.items() if not one.is_meta},
        )
        return match, matched, reader.pieces(matched, match.names)

    if is_disabled(url):
        return Loaded(no_version(), (), (), (), tuple(named_tensors(unwrap(model)).all()))
    values: Mapping[str, torch.Tensor] = {}
    which = WhichAverage(url, track, version, step, rename, process_group, timeout_s)
    with reading(model, which, match_all) as (reader, (match, matched, pieces)):
        info, named, ranks = reader.info, reader.named, reader.ranks
        if not match.names and not match.is_all and not reader.is_part:
            pulled = version_alone(reader.client, info, reader.track, version, step)
        else:
            names = None if match.is_all else list(dict.fromkeys(match.names.values()))
            values, pulled = reader.pull(matched, pieces, names=names, overflow=overflow)
        if not reader.is_part:
            # The version may be from before a change of the track.
            lacking = [name for name in match.names if match.names[name] not in values]
            _refuse(info.name, missing=lacking if strict else [], unexpected=[], wrong=[])
            for name in lacking:
                match.missing.append(name)
                del match.names[name]
    if ranks.rank == 0:
        warn_of_no_average(info.name, pulled, reader.track)
        warn_of_first_weights(info.name, pulled, reader.track)
    module = unwrap(model)
    failure: Exception | None = None
    made: dict[int, torch.Tensor] = {}
    try:
        targets = {name: named.all()[name] for name in match.names}
        given = {name: values[there] for name, there in match.names.items() if there in values}
        check_castable(
            f'model "{info.name}"',
            values=given,
            targets={name: targets[name] for name in given},
            overflow=overflow,
        )
        if overflow == "saturate":
            fitted = {match.names[n]: saturated(one, targets[n]) for n, one in given.items()}
            values = {**values, **fitted}
        made = _with_memory(targets.values(), "cpu" if device is None else device)
        fresh = {name: made[id(t)] for name, t in targets.items() if id(t) in made}
        _write(fresh, match.names, values)
    except Exception as raised:
        failure = raised
    ranks.gather_or_raise(failure, None)
    wait_unread(named.all().values())
    _write({n: t for n, t in targets.items() if n not in fresh}, match.names, values)
    _put_in(module, made)
    now = named_tensors(module, rename).all()
    lost = [
        name
        for name, t in targets.items()
        if object_of(now.get(name)) is not object_of(made.get(id(t), t))
    ]
    if lost:
        raise InvalidArgumentError(
            f'model "{info.name}": written, but the module has other tensors under these names: '
            f"{arrays.some(lost)}; does it keep parameters outside its `_parameters`?",
            reason="BAD_LAYOUT",
        )
    kept = set(map(id, named.buffers.values())) | set(map(id, made.values()))
    return Loaded(
        pulled,
        tuple(match.missing),
        tuple(match.unexpected),
        tuple(
            name
            for name, buffer in module.named_buffers()
            if buffer.is_meta and id(buffer) not in kept
        ),
        tuple(match.ignored),
    )


@dataclasses.dataclass(frozen=True)
class _Match:
    """The assignment of the module's tensors to the track's.

    Attributes:
        names: the server's names by the module's; of tied tensors the first names.
        is_all: the track has no other tensors.
    """

    names: dict[str, str]
    missing: list[str]
    unexpected: list[str]
    wrong_shapes: list[str]
    ignored: list[str]
    is_all: bool

    def check(self, model_name: str, strict: bool, may_be_part: bool) -> None:
        _refuse(
            model_name,
            missing=self.missing if strict else [],
            unexpected=self.unexpected if strict and not may_be_part else [],
            wrong=self.wrong_shapes,
        )


def _match(reader: AverageReader) -> _Match:
    info, named = reader.info, reader.named
    ignored = reader.ignored()
    ignored_there = ignored_by(
        reader.track, info.tracks, [arrays.spec_of(spec.name, spec) for spec in info.tensors]
    )
    specs = {spec.name: spec for spec in info.tensors if spec.name not in ignored_there}
    names = names_there(named, first_names_of(specs.values()))
    names = {name: there for name, there in names.items() if name not in ignored}
    # A tensor that cannot be averaged is not expected in the track.
    missing = [
        name
        for name, tensor in named.all().items()
        if not (name in names or name in ignored or arrays.is_without_memory(tensor))
    ]
    wrong = [
        f"{name}: {tuple(tensor.shape)} in the module, {tuple(specs[names[name]].shape)} on the server"
        for name, tensor in named.all().items()
        if name in names and tuple(tensor.shape) != tuple(specs[names[name]].shape)
    ]
    known = {name for one in named.all() for name in (one, *named.aliases.get(one, ()))}
    unexpected = [
        spec.name
        for spec in specs.values()
        if spec.name not in names.values() and known.isdisjoint((spec.name, *spec.aliases))
    ]
    is_all = len(set(names.values())) == len(specs)
    return _Match(names, missing, unexpected, wrong, sorted(ignored), is_all)


def _refuse(
    model_name: str, *, missing: list[str], unexpected: list[str], wrong: list[str]
) -> None:
    parts = [
        f"{what}: {separator.join(names)}"
        for what, separator, names in (
            ("not on the server", ", ", missing),
            ("not in the module", ", ", unexpected),
            ("shapes do not match", "; ", wrong),
        )
        if names
    ]
    if parts:
        raise InvalidArgumentError(f'model "{model_name}": {"; ".join(parts)}', reason="BAD_LAYOUT")


def _check_place(tensors: Mapping[str, torch.Tensor], device: Any) -> None:
    """InvalidArgumentError: all tensors have memory, and not all of it is on the given `device`."""
    import torch

    if device is None or any(tensor.is_meta for tensor in tensors.values()):
        return
    there = torch.empty(0, device=device).device
    elsewhere = {name: tensor for name, tensor in tensors.items() if tensor.device != there}
    if elsewhere:
        name, tensor = next(iter(elsewhere.items()))
        raise InvalidArgumentError(
            f"device {device!r}: is for tensors that have no memory yet; {name} is on {tensor.device}: move "
            f"the model with model.to({device!r})"
        )


def _with_memory(tensors: Iterable[torch.Tensor], device: Any) -> dict[int, torch.Tensor]:
    """New tensors on `device` for those without memory, by the ids of the old ones."""
    import torch

    made: dict[int, torch.Tensor] = {}
    # The caller may use the module in any grad mode.
    with torch.inference_mode(False):
        for tensor in tensors:
            if tensor.is_meta:
                empty = torch.empty_like(tensor, device=device)
                if isinstance(tensor, torch.nn.Parameter):
                    empty = torch.nn.Parameter(empty, tensor.requires_grad)
                made[id(tensor)] = empty
    return made


def _put_in(module: torch.nn.Module, made: Mapping[int, torch.Tensor]) -> None:
    """Replaces the module's tensors by the new ones, which are given by the ids of the old ones."""
    for part in module.modules():
        own: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for tensors in own:
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = made.get(id(tensor), tensor)
    # Updates fully_shard's own record of the module's parameters.
    shard_again(module)


def _write(
    tensors: Mapping[str, torch.Tensor],
    names: Mapping[str, str],
    values: Mapping[str, torch.Tensor],
) -> None:
    write(
        (piece.local, values[names[name]])
        for name, piece in pieces_of(tensors).items()
        if names[name] in values and not piece.is_empty
    )
