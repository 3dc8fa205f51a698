# SPDX-License-Identifier: Apache-2.0
"""Averages without a server, with the same schedules and kernel: `LocalEMA`."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client import arrays
from ema_client._client.out import check_fits
from ema_client._client.training_time import TimeLike, time_dict
from ema_client._client.types import TrackVersion
from ema_client._compute_ema import kind, on_host
from ema_client._errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from ema_client._evaluator.averaged import write_average, swapped
from ema_client._model.torch_model import (
    ModelTensors,
    check_whole,
    check_values_here,
    non_finite,
    specs_of,
    unwrap,
    write,
)
from ema_client._tracks.preset_arguments import EmaRule
from ema_client._tracks.track import TensorRules, TrackLike, only_average
from ema_client._tracks.typed_arguments import TrackArguments
from ema_client._trainer.arguments import check_module
from ema_client._trainer.buffers import (
    AveragedBuffers,
    default_actions,
    ignored_by_default,
    warn_of_base,
    warn_of_ignored,
    with_default_actions,
)
from ema_client._trainer.joining import check_dtypes, ignored_by_all, of_known_dtypes

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

# The unit roundoff of each dtype of averages.
_UNITS = {"float32": 2.0**-24, "float64": 2.0**-53}


def _zeros(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Zeros in host memory, whichever device and mode the caller has set."""
    import torch

    # Outside inference mode, PyTorch does not write tensors that were created in it.
    with torch.inference_mode(False):
        return torch.zeros(shape, dtype=dtype, device="cpu")


@dataclasses.dataclass
class _Track:
    """One average and its state."""

    track: _ema.Track
    actions: dict[str, str]
    # For each tensor, the index of its schedule in the track.
    schedules: dict[str, int]
    # The state of each schedule; empty before the first update.
    state: list[_ema.ScheduleState] = dataclasses.field(default_factory=list)
    # Empty before the first update. Averaged tensors have the track's dtype.
    tensors: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    # Of a mean of the last k: the averaged tensors at the last k - 1 updates, the oldest first.
    latest: list[dict[str, torch.Tensor]] = dataclasses.field(default_factory=list)
    record: TrackVersion | None = None
    # For each schedule, the number of the last `update` call that was due; 0: none.
    last_calls: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, track: _ema.Track, specs: list[_ema.Spec]) -> _Track:
        names = [spec[0] for spec in specs]
        actions = track.actions(specs)
        return cls(
            track,
            {name: action for name, (action, _) in zip(names, actions)},
            {name: schedule for name, (_, schedule) in zip(names, actions)},
        )

    @property
    def kept_count(self) -> int:
        return self.track.schedule.kept_weights_count

    def names(self, action: str, schedule: int | None = None) -> list[str]:
        return [
            name
            for name, done in self.actions.items()
            if done == action and schedule in (None, self.schedules[name])
        ]

    def check_fits(self, weights: Mapping[str, torch.Tensor]) -> None:
        """InvalidArgumentError: a finite weight becomes infinite in the track's dtype."""
        import torch

        wide = {n: one.detach() for n, one in weights.items() if one.dtype == torch.float64}
        average = torch.empty(0, dtype=getattr(torch, self.track.dtype))
        for name in non_finite(wide, self.track.dtype):
            check_fits(f'LocalEMA: track "{self.track.name}"', name, wide[name], average)

    def absent(self, aliases: Mapping[str, str]) -> list[str]:
        """Tensors that the track ignores or has no value of yet, under all their names."""
        names = {name: name for name in self.actions} | dict(aliases)
        return [name for name, first in names.items() if first not in self.tensors]


class LocalEMA:
    """Averages of a model in this process, in host memory, with the schedules of a server.

    Computes the same numbers as a server, bit for bit, for the same pushes. To use a server later,
    call `attach(model, optimizer, url, ...)` with the same arguments, and remove the calls of
    `update`. NaN and infinity go into the averages, except that buffers that hold them now are
    ignored, with a warning. Not thread-safe.

    Args:
        model: the model to average; DistributedDataParallel and torch.compile are unwrapped. Each
            `update` reads it; only `averaged` and `copy_to` change it.
        half_life: of the track "ema", such as "200ba". Without half_life, smoothing, preset and
            tracks: "1000ba".
        smoothing: of the track "ema", instead of a half-life: the share of the old average that
            each update keeps.
        update_interval: how often to update, such as "5ba"; for all tracks without their own.
        ema_start: when the track "ema" starts to average, such as "0.1dur".
        preset: the track "ema" averages as a library does; see `Track.preset`.
        tensor_rules, buffers, dtype, paused, snapshot_interval: of the track "ema", as for `attach`.
        tracks: more tracks, as for `Client.create_model`. Tensors that all tracks ignore may have any
            dtype.
        track_arguments: `decay` for `smoothing`, other fields of a `Track`, or the preset's own arguments,
            as for `attach`.

    Raises:
        InvalidArgumentError: an argument is wrong.
        TypeError: an argument that neither this class nor the preset has.

    Example:
        >>> ema = ema_client.LocalEMA(model, half_life="200ba")
        >>> for batch in batches:
        ...     train(model, batch)
        ...     ema.update()
        >>> with ema.averaged():
        ...     evaluate(model)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        half_life: str | None = None,
        smoothing: float | None = None,
        update_interval: str | None = None,
        ema_start: str | None = None,
        preset: str | Mapping[str, Any] | None = None,
        tensor_rules: TensorRules | None = None,
        buffers: str | None = None,
        dtype: Any = None,
        paused: bool | None = None,
        snapshot_interval: str | None = None,
        tracks: Mapping[str, TrackLike] | None = None,
        **track_arguments: Unpack[TrackArguments],
    ) -> None:
        rule = EmaRule(
            preset=preset,
            half_life=half_life,
            smoothing=smoothing,
            update_interval=update_interval,
            ema_start=ema_start,
            tensor_rules=tensor_rules,
            buffers=buffers,
            dtype=dtype,
            paused=paused,
            snapshot_interval=snapshot_interval,
        ).with_arguments(track_arguments, inspect.signature(LocalEMA).parameters)
        self._begin(model, *rule.tracks(tracks))

    @classmethod
    def _of_tracks(
        cls, model: torch.nn.Module, tracks: list[_ema.Track], undecided: Collection[str]
    ) -> LocalEMA:
        """Averages with these tracks; `undecided` do not say what to do with buffers."""
        made = cls.__new__(cls)
        made._begin(model, tracks, undecided)
        return made

    def _begin(
        self, model: torch.nn.Module, made: list[_ema.Track], undecided: Collection[str]
    ) -> None:
        check_module(model)
        self._module = unwrap(model)
        check_whole(self._module)
        self._named_tensors = ModelTensors(self._module)
        specs = specs_of(self._named_tensors())
        ignored = ignored_by_all(specs, made)
        check_dtypes([spec for spec in specs if spec[0] not in ignored])
        named = self._named_tensors()
        tensors = {name: one for name, one in named.all().items() if name not in ignored}
        check_values_here("LocalEMA", self._module, tensors, may_be_meta=False)
        specs = of_known_dtypes(specs)
        actions = default_actions(self._module, named)
        actions = {name: action for name, action in actions.items() if name in tensors}
        if ignored_too := ignored_by_default(actions, specs):
            warn_of_ignored("LocalEMA", ignored_too)
        made = with_default_actions(made, actions, undecided, specs)
        if count := len(ignored_by_all(specs, made) - ignored - set(ignored_too)):
            warn_of_base("LocalEMA", count, len(specs) - len(ignored) - len(ignored_too))
        self._averaged_buffers = AveragedBuffers("LocalEMA", named, made, undecided, specs)
        self._tracks = {track.name: _Track.of(track, specs) for track in made}
        self._batch = 0
        self._calls = 0

    @property
    def batch(self) -> int:
        """Batches so far: of the last `time` that had them, plus one for each later call."""
        return self._batch

    @property
    def records(self) -> dict[str, TrackVersion]:
        """The result of the last `update` for each track."""
        return {
            name: track.record for name, track in self._tracks.items() if track.record is not None
        }

    def update(self, time: TimeLike = None) -> dict[str, TrackVersion]:
        """Updates the averages that are due with the model's weights.

        Args:
            time: the current training time. None: one batch more than at the previous call, from 1.

        Returns:
            The record of each track.

        Raises:
            InvalidArgumentError: the time lacks a unit that a track needs, or went back; or a finite
                float64 weight is too large for a float32 average. Nothing was changed.
        """
        now = {"batch": self._batch + 1, **time_dict(time, step=self._batch + 1)}
        tracks = [track for track in self._tracks.values() if not track.track.paused]
        plans = [track.track.plan(track.state, now) for track in tracks]
        host: dict[str, torch.Tensor] = {}
        if any(due and weight > 0 for plan in plans for due, weight, _, _ in plan):
            host = dict(self._named_tensors().all())
            for track, plan in zip(tracks, plans):
                due_now = [i for i, (due, weight, _, _) in enumerate(plan) if due and weight > 0]
                track.check_fits({n: host[n] for i in due_now for n in track.names("average", i)})
            self._averaged_buffers.warn_of_changes(self._named_tensors())
        self._batch = int(now.get("batch", self._batch + 1))
        self._calls += 1
        for track, plan in zip(tracks, plans):
            for schedule, (due, weight, from_zero, _) in enumerate(plan):
                if due and weight > 0:
                    self._fold(track, schedule, host, weight, from_zero)
            track.state = track.track.next(track.state, now)
            if track.kept_count and plan[0][0] and track.state[0].averaged_count <= 1:
                # The values are still the weights of one update.
                values = {name: track.tensors[name] for name in track.names("average")}
                track.latest = [arrays.copies_on("cpu", values)]
            self._record(track, plan)
        return self.records

    def _fold(
        self,
        track: _Track,
        schedule: int,
        source: dict[str, torch.Tensor],
        weight: float,
        from_zero: bool,
    ) -> None:
        import torch

        averaged, copied = track.names("average", schedule), track.names("copy", schedule)
        # One copy to the host serves all tracks.
        for name in (*averaged, *copied):
            source[name] = on_host(source[name])
            if name not in track.tensors:
                is_averaged = track.actions[name] == "average"
                dtype = getattr(torch, track.track.dtype) if is_averaged else source[name].dtype
                track.tensors[name] = _zeros(source[name].shape, dtype)
        write((track.tensors[name], source[name]) for name in copied)
        if from_zero:
            for name in averaged:
                track.tensors[name].zero_()
        emas = [track.tensors[name] for name in averaged]
        params = [source[name] for name in averaged]
        earlier: list[list[torch.Tensor]] = []
        if track.kept_count and weight < 1:
            earlier = [[weights[name] for name in averaged] for weights in track.latest]
            newest = {name: _zeros(ema.shape, ema.dtype) for name, ema in zip(averaged, emas)}
            _ema.fold_many(list(newest.values()), params, 1.0)
            track.latest = [*track.latest, newest][-track.kept_count :]
        _ema.fold_many(emas, params, weight, earlier=earlier)

    def _record(self, track: _Track, plan: list[tuple[bool, float, bool, float]]) -> None:
        track.last_calls = track.last_calls or [0] * len(plan)
        own, *others = [self._schedule_record(track, i, *step) for i, step in enumerate(plan)]
        for schedule, (due, *_) in enumerate(plan):
            if due:
                track.last_calls[schedule] = self._calls
        rules = [rule for rule in track.track.tensor_rules if rule[2] is not None]
        track.record = dataclasses.replace(
            own,
            config=str(track.track),
            rules={
                pattern: dataclasses.replace(record, config=str(schedule))
                for (pattern, _, schedule), record in zip(rules, others)
            },
        )

    def _schedule_record(
        self, track: _Track, schedule: int, due: bool, weight: float, _: bool, elapsed: float
    ) -> TrackVersion:
        """The record of one schedule of the track."""
        record = TrackVersion(
            update_weight=0.0,
            elapsed=elapsed,
            update_count=track.state[schedule].update_count,
            averaged_count=track.state[schedule].averaged_count,
            updated=due,
        )
        if not due or weight == 0:
            return record
        last_call = track.last_calls[schedule]
        return dataclasses.replace(
            record,
            update_weight=(
                weight
                if track.track.dtype == "float64"
                else struct.unpack("f", struct.pack("f", weight))[0]
            ),
            window_steps=(self._calls - last_call if last_call else 1) / weight,
            # A mean of the last k is computed again at each update, so it cannot stall.
            stall_gap=(
                _UNITS[track.track.dtype] / weight if weight < 1 and not track.kept_count else 0.0
            ),
        )

    def _get(self, name: str | None) -> _Track:
        if name is None:
            name = only_average(
                "", {key: track.track.schedule.is_copy for key, track in self._tracks.items()}
            )
        if name not in self._tracks:
            raise NotFoundError(
                f'no track "{name}"; there are {", ".join(self._tracks)}', reason="TRACK_NOT_FOUND"
            )
        track = self._tracks[name]
        if not track.tensors:
            raise FailedPreconditionError(
                f'track "{name}" has no weights yet: call update() first', reason="NO_VERSION"
            )
        return track

    def weights(self, track: str | None = None) -> dict[str, torch.Tensor]:
        """Copies of the track's tensors by name; tied ones under each of their names.

        Args:
            track: which average. None: the only one that is not a copy, else "ema".

        Raises:
            NotFoundError: no such track.
            FailedPreconditionError: it has no weights yet.
        """
        chosen = self._get(track)
        tensors = arrays.copies_on(
            "cpu", {name: chosen.tensors[name] for name in chosen.actions if name in chosen.tensors}
        )
        for alias, name in self._aliases().items():
            if name in tensors:
                tensors[alias] = tensors[name]
        return tensors

    def _aliases(self) -> dict[str, str]:
        """Maps the further names of tied tensors to the first ones."""
        aliases = self._named_tensors().aliases
        return {alias: name for name, others in aliases.items() for alias in others}

    def copy_to(self, model: torch.nn.Module, track: str | None = None) -> None:
        """Writes the track's values into a model, cast to its dtypes. Ignored tensors do not
        change.

        Raises:
            InvalidArgumentError: names or shapes do not match, or a tensor cannot be written; nothing was
                changed.
        """
        values, aliases = self._get(track), self._aliases()
        ignored = values.absent(aliases)
        write_average(model, "model", values.tensors, aliases, ignored=ignored)

    @contextlib.contextmanager
    def averaged(
        self, model: torch.nn.Module | None = None, *, track: str | None = None
    ) -> Iterator[None]:
        """Puts the averages into a model for a `with` block; restores its own values bit for bit.

        Args:
            model: the model to change. None: the averaged one.
            track: as for `weights`.

        Raises:
            InvalidArgumentError: names or shapes do not match, or a tensor cannot be written; nothing was
                changed.
        """
        target = self._module if model is None else model
        values, aliases = self._get(track), self._aliases()
        ignored = values.absent(aliases)
        with swapped(target, "model", values.tensors, aliases, ignored=ignored):
            yield

    def state_dict(self) -> dict[str, Any]:
        """The state for `load_state_dict`. Its tensors are the averages themselves, not copies."""
        return {
            "batch": self._batch,
            "calls": self._calls,
            "tracks": {
                name: {
                    "config": str(track.track),
                    "states": [
                        {
                            "update_count": state.update_count,
                            "averaged_count": state.averaged_count,
                            "last_update": state.last_update,
                            "started": state.started,
                        }
                        for state in track.state
                    ],
                    "last_calls": list(track.last_calls),
                    "tensors": dict(track.tensors),
                    "latest": [dict(weights) for weights in track.latest],
                }
                for name, track in self._tracks.items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`, even if the tracks had other schedules.

        Raises:
            InvalidArgumentError: the state has other tracks, other tensors in them, or another
                mean_of_last. Nothing was changed.
        """
        places = ("in the state", "in this LocalEMA")
        arrays.check_names("tracks", expected=self._tracks, given=state["tracks"], places=places)
        current = self._named_tensors().all()
        for name, saved in state["tracks"].items():
            track = self._tracks[name]
            stored = [tensor for tensor, done in track.actions.items() if done != "ignore"]
            count = 1 + sum(rule[2] is not None for rule in track.track.tensor_rules)
            if len(saved["states"]) not in (0, count):
                raise InvalidArgumentError(
                    f'track "{name}": has {count} schedules, the state is of {len(saved["states"])}',
                    reason="BAD_LAYOUT",
                )
            if not saved["tensors"]:
                continue
            arrays.check_names(
                f'track "{name}"', expected=stored, given=saved["tensors"], places=places
            )
            kept = track.kept_count
            expected = min(max(saved["states"][0]["averaged_count"], 1), kept)
            if len(saved.get("latest", [])) != expected:
                raise InvalidArgumentError(
                    f'track "{name}": needs the weights of {expected} updates for mean_of_last, the '
                    f'state has those of {len(saved.get("latest", []))}',
                    reason="BAD_LAYOUT",
                )
            for weights in saved.get("latest", []):
                arrays.check_names(
                    f'track "{name}", latest',
                    expected=track.names("average"),
                    given=weights,
                    places=places,
                )
            wrong = [
                f"{tensor}: {kind(value)}"
                for tensors in (saved["tensors"], *saved.get("latest", []))
                for tensor, value in tensors.items()
                if value.shape != current[tensor].shape
                or str(value.dtype)
                != (
                    f"torch.{track.track.dtype}"
                    if tensor in set(track.names("average"))
                    else str(current[tensor].dtype)
                )
            ]
            if wrong:
                raise InvalidArgumentError(
                    f'track "{name}": tensors do not match the model: {"; ".join(wrong)}',
                    reason="BAD_LAYOUT",
                )
        for name, saved in state["tracks"].items():
            track = self._tracks[name]
            track.state = [_ema.ScheduleState.from_fields(**state) for state in saved["states"]]
            track.last_calls = list(saved["last_calls"])
            track.tensors = arrays.copies_on("cpu", saved["tensors"])
            track.latest = [arrays.copies_on("cpu", weights) for weights in saved.get("latest", [])]
            track.record = None
        self._batch = state["batch"]
        self._calls = state["calls"]
