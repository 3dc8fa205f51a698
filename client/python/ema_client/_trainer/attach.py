# SPDX-License-Identifier: Apache-2.0
"""`attach`: three lines in a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client.client import Client
from ema_client._client.files import FilesLike, small_files
from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.timeouts import CALL_TIMEOUT_S
from ema_client._client.types import NonFinite, TimeLike, WireDtype, time_after
from ema_client._client.url import split_url
from ema_client._errors import InvalidArgumentError
from ema_client._model.model_tensors import ModelTensors
from ema_client._model.optimizers import hold_none_of, unwrap_optimizers
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import unwrap
from ema_client._tracks.preset_arguments import EmaRule
from ema_client._tracks.track import TensorRules, TrackLike
from ema_client._trainer.agreed import Arguments, check_agreed
from ema_client._trainer.arguments import check_module, check_values
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.holdings import Holding, Layout, holdings_of
from ema_client._trainer.joining import Plan, join, resume_at
from ema_client._trainer.push import MAX_OUTAGE_S, OnError, PushOptions
from ema_client._trainer.switch import PresetOptions

if TYPE_CHECKING:
    import torch

_logger = logging.getLogger(__name__)


def attach(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    url: str,
    *,
    half_life: str | None = None,
    smoothing: float | None = None,
    update_interval: str | None = None,
    ema_start: str | None = None,
    preset: str | Mapping[str, Any] | None = None,
    tensor_rules: TensorRules | None = None,
    buffers: str | None = None,
    compensated: bool | None = None,
    paused: bool | None = None,
    snapshot_interval: str | None = None,
    tracks: Mapping[str, TrackLike] | None = None,
    non_finite: NonFinite = "reject",
    wire_dtype: WireDtype = "as pushed",
    max_staging_bytes: int = STAGING_BYTES,
    start_step: int | None = None,
    time: Callable[[int], TimeLike] | None = None,
    rename: Callable[[str], str] | None = None,
    process_group: Any = None,
    max_pinned_versions: int | None = None,
    max_wait_s: float = 30.0,
    timeout_s: float | None = None,
    on_error: OnError = "skip",
    max_outage_s: float = MAX_OUTAGE_S,
    resume: Mapping[str, Any] | None = None,
    keep_resumable: int = 5,
    files: FilesLike | None = None,
    check: bool = False,
    **preset_arguments: Any,
) -> Attachment:
    """Streams a model's weights to an EMA Server while it trains.

    To be called on every rank. Makes the model on the server if it is not there. From then on each
    `optimizer.step()` counts as a batch, and when an update is due a push starts after it: every rank
    sends what it has, and nothing is gathered. That may be whole parameters (DistributedDataParallel,
    pipeline stages, experts) or pieces of them (fully_shard, tensor parallel: DTensor); what several
    ranks have, they share evenly, but for buffers, which come from the first of them (BatchNorm's
    statistics differ between ranks). Parameters are read in place: `Attachment` says who waits before
    writing them, and client/docs/training-loop.md what becomes of other writes, of frozen parameters and
    of copies.

    Args:
        model: the model, or this rank's part of it; DistributedDataParallel, torch.compile and Lightning
            Fabric's wrapper are looked through, FullyShardedDataParallel (FSDP1) is not supported. Ranks
            that have a parameter, or a piece of it, must have the same values.
        optimizer: the one that changes the parameters, or all of them (a GAN's two; one for each
            parameter, in backward hooks): a step is complete when each has stepped, and from then on
            whenever the one has that was last. accelerate's and Lightning's wrappers are looked through.
            Steps that a grad scaler skips do not count, nor those of an optimizer that is made later, nor
            the ones by which torch.distributed.checkpoint initializes an optimizer's state.
            Parameters that none holds are copied, or waited for. None, on all ranks: call the
            attachment's `after_step()` after each step.
        url: "ema://host:port/model".
        half_life: of the track "ema", such as "200ba". With neither this nor smoothing, preset or
            tracks: "1000ba".
        smoothing: of the track "ema", instead of a half-life: the share of the old average that is
            kept at each update, never rescaled.
        update_interval: how often, such as "5ba"; for all tracks that do not say themselves.
        ema_start: when the track "ema" starts to average, such as "0.1dur".
        preset: the track "ema" as a library averages: its name ("diffusers"), with `preset_arguments`,
            or all in a dict: {"preset": "diffusers", "decay": 0.999}; see `Track.preset`. With ema_pytorch's
            `update_model_with_ema_every` the averages are written back into the model (Switch-EMA).
        tensor_rules, buffers, compensated, paused, snapshot_interval: of the track "ema", by whichever of
            these it averages; see `Track`. None: its defaults, or the preset's. With tracks alone, these
            say it themselves.
        tracks: more tracks, as for `Client.create_model`. Tensors that all tracks ignore are not
            sent, and may have any dtype, or be made of other tensors, as torchao's float8 weights are.
        non_finite: as for `Client.create_model`.
        wire_dtype: as for `Client.open_run`: "bfloat16" halves what is sent.
        max_staging_bytes: of this rank, as for `Client.open_run`.
        start_step: optimizer steps done before. None: goes on after the model's newest version;
            without `resume` a warning says so at the first step.
        time: gives the training time after so many steps, such as
            `lambda step: {"epoch": step // steps_per_epoch}`, the same on all ranks (of seconds, rank 0's,
            broadcast); needed for tracks in units other than batches, which are the steps unless it says
            otherwise.
        rename: gives the name that a tensor has on the server, for parts of a model whose tensors have
            the same names on several ranks: experts, for example. Without it, tensors of one name
            that have equal values now count as replicas, which are assumed to stay equal.
        process_group: of torch.distributed: all ranks that train the model. None: the default one.
        max_pinned_versions: as for `Client.create_model`.
        max_wait_s: seconds that our hooks let one step of the training wait at most, but for on_error
            "wait", where a push has all of `timeout_s`.
        timeout_s: seconds for a push, other ranks' included, and for each call of the set-up; None: 60.
            And for each pull of the averages; None: 600.
        on_error: what becomes of a step that cannot be pushed: "skip" leaves it out, with a warning; after
            "raise" the next `optimizer.step()` raises, before it changes anything; with "wait" each
            `optimizer.step()` waits until what was pushed before it is a version, an outage included.
            client/docs/outages.md has the rest.
        max_outage_s: for on_error "wait": seconds from the first push that failed; after them it raises.
        resume: what `Attachment.state_dict` gave when the trainer's checkpoint was made, the same on all
            ranks: the model is brought back to where it stood then, and counting goes on from there. None:
            not.
        keep_resumable: of the versions that `Attachment.state_dict` saves, the server keeps so many of
            the newest; with as many of the trainer's own checkpoints, each finds its average.
        files: small files that the server's checkpoints shall have, as for `Client.attach_files`; rank 0's
            count.
        check: to look for mistakes: compares checksums of what is pushed before and after, and raises in
            the next `optimizer.step()` if something else has written weights meanwhile; of the last push
            `close` warns. Reads the weights twice more.
        preset_arguments: the library's own arguments, under its names, such as beta=0.9999. A name that
            `attach` has, too, means what it says here; composer's preset is given those of half_life,
            smoothing, update_interval and ema_start that are given, and the other tracks follow
            update_interval all the same.

    Returns:
        The attachment; call its `close()` when training ends, or use it in a `with` statement.

    Raises:
        InvalidArgumentError (a ValueError): an argument is wrong, or another one on another rank where
            all must have the same (tracks, steps, policies), the ranks' parameters do not fit together,
            or `resume` is of another model or format.
        TypeError: there is no such argument, nor has the preset one.
        FailedPreconditionError: RESUME_MISMATCH: the server has no average that stands where `resume`
            does; the message lists what there is. The model is as it was.
        FailedPreconditionError: ALL_CHECKPOINTS_CORRUPT: the server could not load the model at its
            start and does not make a new one; the message says what a person does.
        OutOfRangeError: likewise, VERSION_NOT_KEPT: the very version that `resume` names is gone.
        EmaError: the set-up failed. What fails on any rank raises on every rank.

    Example:
        >>> ema = ema_client.attach(
        ...     model, optimizer, "ema://host:50051/digits", half_life="200ba", update_interval="5ba"
        ... )
        >>> ...  # the training loop, unchanged
        >>> ema.close()
    """
    given = dict(locals())
    ranks = Ranks.current(process_group)
    # A rank that raised at once would let the others wait for it, so failures are passed on.
    failure: Exception | None = None
    optimizers: list[torch.optim.Optimizer] | None = None
    held: list[Holding] = []
    arguments = Arguments({}, "", {})
    try:
        check_module(model)
        split_url(url)
        check_values(given)
        optimizers = None if optimizer is None else unwrap_optimizers(optimizer)
        if resume is not None and start_step is not None:
            raise InvalidArgumentError(
                f"start_step {start_step} and resume are both given: resume says the step"
            )
        options, track_list = options_and_tracks(given, preset_arguments)
        arguments = Arguments.of(
            {
                "the model of url": split_url(url)[1],
                "optimizer": None if optimizer is None else "given",
                "start_step": start_step,
                "non_finite": non_finite,
                "max_pinned_versions": max_pinned_versions or 0,
                "wire_dtype": wire_dtype,
                "on_error": on_error,
                "max_outage_s": max_outage_s,
                "keep_resumable": keep_resumable,
                "update_model_with_ema of preset": options.rule and options.rule.text(),
            },
            track_list,
            {
                "half_life": half_life,
                "smoothing": smoothing,
                "update_interval": update_interval,
                "ema_start": ema_start,
                "tensor_rules": tensor_rules,
                "buffers": buffers,
                "compensated": compensated,
                "paused": paused,
                "snapshot_interval": snapshot_interval,
                "tracks": tracks,
                **(
                    options.preset
                    if isinstance(options.preset, Mapping)
                    else {"preset": options.preset}
                ),
            },
        )
        module = unwrap(model)
        options.check(module)
        tensors_of = ModelTensors(module, rename)
        held = holdings_of(tensors_of())
    except Exception as raised:
        failure = raised
    check_agreed(ranks.gather_or_raise(failure, arguments))
    layout = Layout.exchange(ranks, held)
    plan: Plan | None = None
    try:
        # Now that no rank has failed: a clock that is broadcast is collective.
        now = time_after(time, start_step or 0)
        for track in track_list:
            _check_time(track, now)
        plan = Plan(
            url=url,
            ranks=ranks,
            layout=layout,
            tracks=track_list,
            max_pinned_versions=max_pinned_versions or 0,
            non_finite=non_finite,
            wire_dtype=wire_dtype,
            max_staging_bytes=max_staging_bytes,
            files=small_files(files) if files is not None and ranks.rank == 0 else {},
            timeout_s=timeout_s,
        )
    except Exception as raised:
        failure = raised
    timeout_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
    try:
        joined = join(ranks, plan, failure, resume, timeout_s)
    except Exception:
        if plan is not None:
            plan.client.close()
        raise
    assert plan is not None
    if start_step is not None:
        joined = dataclasses.replace(joined, step=start_step, unasked=None)
    # Should the rest fail, nothing is left of it.
    with contextlib.ExitStack() as undo:
        undo.callback(plan.client.close)
        undo.callback(joined.run.close)
        attachment = Attachment(
            PushOptions(
                model_name=plan.model_name,
                tensors_of=tensors_of,
                time_of=time,
                max_wait_s=max_wait_s,
                timeout_s=timeout_s,
                on_error=on_error,
                max_outage_s=max_outage_s,
                check=check,
            ),
            client=plan.client,
            joined=joined,
            join_at=functools.partial(resume_at, ranks, plan, timeout_s),
            module=module,
            optimizers=optimizers,
            frozen=FrozenTensors(
                plan.layout.frozen,
                tensors_of(),
                {own.name: own.checksum for own in held},
                check=check,
            ),
            keep_resumable=keep_resumable,
        )
        undo.callback(attachment._detach)
        undo.callback(attachment._pusher.engine.leave, 0.0)
        options.apply(attachment, ranks)
        undo.pop_all()
    if optimizers is not None and hold_none_of(optimizers, module.parameters()):
        _logger.warning(
            'model "%s": no optimizer that was given holds a parameter of the model; was it made for '
            "another one, or before the model was sharded?",
            plan.model_name,
        )
    return attachment


def _check_time(track: _ema.Track, now: dict[str, float]) -> None:
    """InvalidArgumentError: the track needs a unit that is not in `now`; says how to count it."""
    try:
        track.plan([], now)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f'track "{track.name}": {error.args[0]}: give it by attach(time=), such as '
            'time=lambda step: {"epoch": step // steps_per_epoch}, the same on all ranks',
            reason=error.reason,
        ) from None


#: The names of the arguments of `attach` that callbacks pass on.
KEYWORDS = [
    name
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def options_and_tracks(
    given: Mapping[str, Any], preset_arguments: Mapping[str, Any]
) -> tuple[PresetOptions, list[_ema.Track]]:
    """What arguments of `attach` ask for.

    Raises:
        InvalidArgumentError, TypeError: as `attach` for its tracks and its preset.
    """
    own = {field.name: given.get(field.name) for field in dataclasses.fields(EmaRule)}
    rule = EmaRule(**own).with_arguments(preset_arguments, KEYWORDS)
    options = PresetOptions.of(rule.preset)
    return options, dataclasses.replace(rule, preset=options.preset).tracks(given.get("tracks"))
