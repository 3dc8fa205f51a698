# SPDX-License-Identifier: Apache-2.0
"""Code that the callbacks for training frameworks share."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
import logging
import pathlib
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client.client import Client
from ema_client._client.mode import is_disabled
from ema_client._client.pull_arguments import only_average_of
from ema_client._client.read import connect
from ema_client._client.timeouts import CALL_TIMEOUT_S, TRANSFER_TIMEOUT_S
from ema_client._client.types import Version, VersionLike, Weights
from ema_client._client.url import split_url
from ema_client._errors import EmaError, FailedPreconditionError, InvalidArgumentError, failure_of
from ema_client._evaluator.averaged import Average, OwnValues, read_average
from ema_client._evaluator.reading import WhichAverage
from ema_client._evaluator.started import awaited_start
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import half_of, named_tensors, unwrap, write
from ema_client._tracks.preset_arguments import FURTHER_NAMES, RULE_NAMES
from ema_client._tracks.track import Track
from ema_client._tracks.typed_arguments import CallbackTrackArguments
from ema_client._trainer.arguments import MAX_OUTAGE_S, RunArguments, check_values
from ema_client._trainer.attach import KEYWORDS, options_and_tracks
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.resume import warn_of_no_state

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)

# The copy track that `log_statistics` adds.
_RAW = "raw"

# A file in a trainer's checkpoint: the trainer's step, and a result of `Attachment.state_dict`.
STATE_FILE = "ema_state.json"


class CallbackArguments(CallbackTrackArguments, RunArguments, total=False):
    """The options of a callback that passes them to `attach`, and has `decay`, `device` and
    `use_buffers` itself."""


def check_options(
    caller: str, given: Mapping[str, Any], *, own: Collection[str] = ("resume",)
) -> None:
    """Checks the options of a callback. With a preset, unknown names may be the preset's:
    `check_tracks` checks them. A callback that sets the preset itself takes no schedule.

    Raises:
        TypeError: `attach` does not have the option, or the callback sets it itself (`own`).
        InvalidArgumentError: a bad value.
    """
    of_schedule = () if "preset" in own else FURTHER_NAMES
    known = [name for name in (*KEYWORDS, *of_schedule) if name not in own]
    has_preset = given.get("preset") is not None and "preset" not in own
    for name in given:
        if name not in known and (name in own or not has_preset):
            raise TypeError(
                f'{caller} got an unexpected argument "{name}"; of attach\'s there are '
                f'{", ".join(known)}'
            )
    check_values(given)


def _tracks_in(options: Mapping[str, Any]) -> list[_ema.Track]:
    extra = {name: value for name, value in options.items() if name not in KEYWORDS}
    return options_and_tracks(options, extra)[1]


def check_tracks(options: Mapping[str, Any]) -> None:
    """Raises as `attach` does for wrong tracks, but before the training starts."""
    _tracks_in(options)


def needs_only_batches(options: Mapping[str, Any]) -> bool:
    """Whether all tracks count in batches only. Then the callback sends no other units, which would
    start again from zero in a new training of the same model."""
    for track in _tracks_in(options):
        try:
            track.plan([], {"batch": 0})
        except InvalidArgumentError:
            return False
    return True


def options_of_start(
    options: Mapping[str, Any], *, step: int, resume: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The options for `attach` where the trainer is at `step`, and its checkpoint has the average's
    state `resume`. A trainer that has resumed continues the average: `existing` is for one that
    starts."""
    is_start = step == 0 and resume is None
    return {**options, "resume": resume, **({} if is_start else {"existing": "continue"})}


def warn_of_newest(step: int) -> None:
    """Warns that the average continues although its state at the trainer's `step` is not known."""
    _logger.warning(
        "the trainer resumes at step %d, but its checkpoint does not say which average belongs to it: "
        "the average continues from its newest version",
        step,
    )


def raises(options: Mapping[str, Any]) -> bool:
    """Whether a failure to read or save the average raises in a callback, instead of a warning."""
    return (options.get("on_error") or "skip") != "skip"


def call_timeout_s(options: Mapping[str, Any], *, by_default: float = CALL_TIMEOUT_S) -> float:
    """Seconds for each of the callback's own calls; with on_error "wait", at least max_outage_s."""
    given = options.get("timeout_s")
    timeout_s = by_default if given is None else float(given)
    if options.get("on_error") != "wait":
        return timeout_s
    return max(timeout_s, float(options.get("max_outage_s", MAX_OUTAGE_S)))


def pull_timeout_s(options: Mapping[str, Any]) -> float | None:
    """The same for a client that pulls. None: the client's defaults."""
    if options.get("timeout_s") is None and options.get("on_error") != "wait":
        return None
    return call_timeout_s(options, by_default=TRANSFER_TIMEOUT_S)


def saved_state(attachment: Attachment, options: Mapping[str, Any]) -> dict[str, int | str] | None:
    """The average's entry in a trainer's checkpoint. None: it could not be saved; a warning says
    why.

    Raises:
        EmaError: it could not be saved, and on_error is not "skip".
    """
    try:
        return attachment.state_dict()
    except EmaError as error:
        if raises(options):
            raise
        warn_of_no_state(attachment.step, error)
        return None


def write_state(folder: pathlib.Path, step: int, average: Mapping[str, Any]) -> None:
    """Writes `STATE_FILE` into a trainer's checkpoint. `step`: the trainer's."""
    text = json.dumps({"global_step": step, "average": average}, indent=2)
    new = folder / f"{STATE_FILE}.new"
    new.write_text(text + "\n")
    new.replace(folder / STATE_FILE)


def state_in(folder: pathlib.Path) -> dict[str, Any] | None:
    """The contents of a checkpoint's `STATE_FILE`. None: there is no readable file."""
    try:
        saved = json.loads((folder / STATE_FILE).read_text())
    except (OSError, ValueError):
        return None
    is_ours = isinstance(saved, dict) and {"global_step", "average"} <= saved.keys()
    return saved if is_ours else None


def with_copy_track(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a copy track, if they have none: the server computes distances from it. It is
    updated as often as the track "ema", or else the first one.

    InvalidArgumentError: an average has its name.
    """
    tracks = {track.name: track for track in _tracks_in(options)}
    if any(track.schedule.is_copy for track in tracks.values()):
        return dict(options)
    if _RAW in tracks:
        raise InvalidArgumentError(
            f'log_statistics adds a copy track "{_RAW}", and tracks has an average of this name: give it '
            'another name, or add a copy track of your own, such as "copy": "copy"',
            reason="BAD_SCHEDULE",
        )
    schedule = (tracks["ema"] if "ema" in tracks else next(iter(tracks.values()))).schedule
    phase = schedule.to_fields().get("interval_phase")
    raw = Track(
        copy=True,
        update_interval=schedule.update_interval or None,
        interval_phase=None if phase is None else int(phase),
    )
    # Tracks alone make no track "ema".
    is_default = not options.get("tracks") and all(options.get(n) is None for n in RULE_NAMES)
    return {
        **options,
        **({"half_life": tracks["ema"].schedule.to_fields()["half_life"]} if is_default else {}),
        "tracks": {**(options.get("tracks") or {}), _RAW: raw},
    }


class CallbackAverage:
    """The average that a framework's callback keeps: its attachment while a training runs, and swaps of the
    model's weights. Without a training, these read the newest average on the server.

    Attributes:
        url, model_name: of the model on the server.
        options: the arguments of `attach`.
        track: which average the trainer's model gets. None: the only one that is not a copy, else "ema".
        attachment: set by the callback while a training runs.
        own: the model's own values, from `swap_in` to `swap_out`.
    """

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any],
        *,
        track: str | None,
        logs_statistics: bool = False,
    ) -> None:
        """InvalidArgumentError: the URL is malformed, or the tracks are wrong."""
        check_tracks(options)
        self.url = url
        self._address, self.model_name = split_url(url)
        self.options = with_copy_track(options) if logs_statistics else dict(options)
        self.track = track
        self.attachment: Attachment | None = None
        self.own = OwnValues()
        # Puts the model's own values back.
        self._swapped = contextlib.ExitStack()
        self._has_warned_of_start = False
        self._logs_statistics = logs_statistics
        # The step of the last statistics.
        self._logged_step = 0
        # Failures to get statistics since the last success, by error.
        self._failures: collections.Counter[tuple[type, str]] = collections.Counter()

    def close(self) -> None:
        """Restores the model's own values, and closes the attachment."""
        self.swap_out()
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None
        self._has_warned_of_start = False
        self._failures.clear()

    def track_name(self) -> str:
        """The name of `track`. REQUIRES: there is an attachment, or `track` is given."""
        if self.track is not None:
            return self.track
        assert self.attachment is not None
        return self.attachment._ema_model.average_name()

    def saved_state(self) -> dict[str, int | str] | None:
        """As the function of this name, for the attachment. Also None without an attachment."""
        return None if self.attachment is None else saved_state(self.attachment, self.options)

    def swap_in(self, module: torch.nn.Module, *, version: VersionLike | None = None) -> None:
        """Like `averaged_or_own`, until `swap_out`."""
        self._swapped.enter_context(self.averaged_or_own(module, version=version, own=self.own))

    def swap_out(self) -> None:
        """Restores the model's own values, if it has others."""
        self._swapped.close()

    def statistics(self, step: int) -> dict[str, float]:
        """The norm of each average, and its distance from the raw weights, as the server has them now,
        by the names for a logger. {}: there are none yet, the server cannot be reached, they are not to
        be logged, or they were requested for this step already."""
        attachment = self.attachment
        if not self._logs_statistics or attachment is None or step == self._logged_step:
            return {}
        self._logged_step = step
        if attachment._pusher.disconnected_error() is not None:
            return {}
        try:
            record = attachment._client.statistics(
                self.model_name, timeout_s=max(1.0, float(self.options.get("max_wait_s", 30.0)))
            )
        except FailedPreconditionError:  # Before the first version, or the first update of a track.
            return {}
        except EmaError as error:
            cause = (type(error), error.reason)
            self._failures[cause] += 1
            count = self._failures[cause]
            if count & (count - 1) == 0:
                _logger.warning(
                    "log_statistics: nothing is logged at this step: %s%s",
                    error,
                    (
                        ""
                        if count == 1
                        else f" ({count} times by now; the next warning is at {2 * count})"
                    ),
                )
            return {}
        self._failures.clear()
        values: dict[str, float] = {}
        for track, numbers in record.tracks.items():
            values[f"{track}_norm"] = numbers.norm
            if numbers.distance is not None:
                values[f"{track}_distance"] = numbers.distance
        return values

    @contextlib.contextmanager
    def averaged_or_own(
        self,
        module: torch.nn.Module,
        *,
        version: VersionLike | None = None,
        own: OwnValues | None = None,
        doing: str = "evaluating",
    ) -> Iterator[Version | None]:
        """Puts the averages of `version`, or else of the last push, into a model for a `with` block. If
        they cannot be read, or the track has not reached its ema_start, the model keeps its own
        weights, with a warning about what the caller is `doing`. The latter warning is given once per
        attachment.

        Collective: all ranks get the same version, or all keep their own weights. With an attachment,
        waits for its pending push. `own`: stores the model's own values, so that the caller can drop
        them.

        Yields:
            The version in the model. None: the model has its own weights.

        Raises:
            EmaError: the averages cannot be read on some rank, and on_error is not "skip", or a
                version was given.
        """
        if is_disabled(self.url):
            yield None
            return
        ranks = self._ranks()
        with contextlib.ExitStack() as stack:
            record: Version | None = None
            try:
                average = self._read(module, ranks, version)
                if isinstance(average, str):
                    self._warn_of_start(average, doing)
                else:
                    record = average.version
                    swap = average.swapped(module, ranks, own)
                    del average  # As large as the model.
                    stack.enter_context(swap)
            except Exception as raised:  # No memory for the model's own values, for example.
                error = failure_of(raised)
                if raises(self.options) or version is not None:
                    raise error
                record = None
                _logger.warning("%s the trainer's own weights, not their average: %s", doing, error)
            yield record

    def copy_or_own(
        self, module: torch.nn.Module, *, version: VersionLike | None = None
    ) -> Version | None:
        """Like `averaged_or_own`, permanently, but a given version causes a warning, too, if it cannot
        be read, and each warning is given each time."""
        if is_disabled(self.url):
            return None
        ranks = self._ranks()
        try:
            average = self._read(module, ranks, version)
            if isinstance(average, str):
                _logger.warning(
                    "the model keeps its own weights: the average begins at its ema_start, %s",
                    average,
                )
                return None
            write(ranks.call_or_raise(functools.partial(average.pairs, module)))
            return average.version
        except EmaError as error:
            if raises(self.options):
                raise
            _logger.warning("the model keeps its own weights, not their average: %s", error)
            return None

    def whole(self, module: torch.nn.Module) -> Weights | None:
        """Pulls the whole average of the last push, on rank 0, for a model of which each rank has only
        pieces, in the dtype of its parameters if they are of one lower precision. None: this is another
        rank, or the average has not started or cannot be read; a warning says so. Collective.

        Raises:
            EmaError: it cannot be read, and on_error is not "skip".
        """
        if is_disabled(self.url):
            return None
        ranks = self._ranks()
        try:
            version, start = self._newest(ranks)
            if start is not None:
                if ranks.rank == 0:
                    self._warn_of_start(start, "saving")
                return None
            dtype = half_of(
                named_tensors(unwrap(module)).all()
            )  # On all ranks: it may communicate.

            def pull() -> Weights | None:
                if ranks.rank != 0:
                    return None
                with self._connect(pull_timeout_s(self.options)) as client:
                    return client.pull(
                        self.model_name,
                        track=self.track_name(),
                        version=version,
                        dtype=dtype,
                        framework="torch",
                    )

            return ranks.call_or_raise(pull)
        except EmaError as error:
            if raises(self.options):
                raise
            _logger.warning("the average is not saved: %s", error)
            return None

    def _ranks(self) -> Ranks:
        return Ranks.current(
            self.options.get("process_group"), timeout_s=pull_timeout_s(self.options)
        )

    def _connect(self, timeout_s: float | None) -> Client:
        return connect(self._address, self.model_name, timeout_s=timeout_s)

    def _read(
        self, module: torch.nn.Module, ranks: Ranks, version: VersionLike | None
    ) -> Average | str:
        """The averages of `version`, or else of the last push; or the track's ema_start, if the version
        is from before it. Collective."""
        if version is None:
            version, start = self._newest(ranks)
            if start is not None:
                return start
        which = WhichAverage(
            self.url,
            self.track,
            version,
            rename=self.options.get("rename"),
            process_group=self.options.get("process_group"),
            timeout_s=pull_timeout_s(self.options),
        )
        average = ranks.call_or_raise(functools.partial(read_average, module, which))
        return awaited_start(average.version, average.track) or average

    def _newest(self, ranks: Ranks) -> tuple[Version | None, str | None]:
        """Rank 0's newest version, on all ranks, and the track's ema_start if the version is from
        before it. Without an attachment, a single rank gets no version, and reads the newest."""
        failure: Exception | None = None
        version: Version | None = None
        start: str | None = None
        try:
            if self.attachment is not None:
                version = self.attachment.wait_pushed()
                track = self.track_name()
            elif ranks.rank == 0:
                with self._connect(call_timeout_s(self.options)) as client:
                    info = client.model(self.model_name)
                version = info.latest
                track = only_average_of(info) if self.track is None else self.track
            if version is not None:
                start = awaited_start(version, track)
        except Exception as raised:
            failure = failure_of(raised)
        version, start, failure = ranks.broadcast((version, start, failure))
        if failure is not None:
            raise failure
        if version is None:
            raise FailedPreconditionError("nothing has been pushed yet", reason="NO_VERSION")
        if self.attachment is None and ranks.world_size == 1:
            version = None
        return version, start

    def _warn_of_start(self, start: str, doing: str) -> None:
        if self.attachment is not None:
            if self._has_warned_of_start:
                return
            self._has_warned_of_start = True
        _logger.warning(
            "%s the trainer's own weights: the average begins at its ema_start, %s", doing, start
        )
