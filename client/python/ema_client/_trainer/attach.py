# SPDX-License-Identifier: Apache-2.0
"""`attach`: three lines in a training loop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ema_client import _ema
from ema_client._client.files import FilesLike, small_files
from ema_client._client.gpu import STAGING_BYTES
from ema_client._client.mode import current_mode
from ema_client._client.timeouts import CALL_TIMEOUT_S
from ema_client._client.training_time import TimeLike, time_after
from ema_client._client.types import NonFinite, WireDtype
from ema_client._client.url import split_url
from ema_client._errors import EmaError, InvalidArgumentError
from ema_client._model.engine import is_megatron_optimizer
from ema_client._model.optimizers import check_held, unwrap_optimizers, with_contained
from ema_client._model.ranks import Ranks
from ema_client._model.torch_model import (
    ModelTensors,
    as_module,
    check_values_here,
    engine_of,
    unwrap,
)
from ema_client._tracks.preset_arguments import EmaRule
from ema_client._tracks.track import TensorRules, TrackLike
from ema_client._tracks.typed_arguments import TrackArguments
from ema_client._trainer.arguments import (
    MAX_OUTAGE_S,
    Arguments,
    Existing,
    OnError,
    PushOptions,
    Source,
    check_agreed,
    check_module,
    check_values,
)
from ema_client._trainer.attachment import Attachment
from ema_client._trainer.buffers import check_parameters_finite, default_actions
from ema_client._trainer.frozen import FrozenTensors
from ema_client._trainer.rank_layout import HeldBox, Layout, held_boxes_of
from ema_client._trainer.joining import OUTAGES, START_WAIT_S, Plan, join, resume_at
from ema_client._trainer.switch import PresetOptions

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

_logger = logging.getLogger(__name__)

# How long attach() waits for the server's first answer before it warns.
_PROBE_S = 1.0
# Arguments of `attach` for the track "ema".
_OF_TRACKS = (
    *("half_life", "smoothing", "update_interval", "ema_start"),
    *("tensor_rules", "buffers", "dtype", "paused", "snapshot_interval"),
)


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    url: str,
    *,
    half_life: str | None = None,
    smoothing: float | None = None,
    update_interval: str | None = None,
    ema_start: str | None = None,
    preset: str | Mapping[str, Any] | None = None,
    tracks: Mapping[str, TrackLike] | None = None,
    time: Callable[[int], TimeLike] | None = None,
    tensor_rules: TensorRules | None = None,
    buffers: str | None = None,
    dtype: Any = None,
    paused: bool | None = None,
    snapshot_interval: str | None = None,
    non_finite: NonFinite = "reject",
    wire_dtype: WireDtype = "as pushed",
    source: Source = "parameters",
    rename: Callable[[str], str] | None = None,
    max_staging_bytes: int = STAGING_BYTES,
    max_pinned_versions: int | None = None,
    check: bool = False,
    process_group: Any = None,
    on_error: OnError | None = None,
    timeout_s: float | None = None,
    max_wait_s: float = 30.0,
    max_outage_s: float = MAX_OUTAGE_S,
    existing: Existing | None = None,
    resume: Mapping[str, Any] | None = None,
    start_step: int | None = None,
    keep_resumable: int = 5,
    files: FilesLike | None = None,
    **track_arguments: Unpack[TrackArguments],
) -> Attachment:
    """Streams a model's weights to an EMA Server while it trains.

    Call it on every rank. It creates the model on the server if it does not exist. From then on, each
    `optimizer.step()` counts as a batch. When an update is due, a push starts after the step: every rank
    sends the parameters that it holds, and nothing is gathered. A rank may hold whole parameters
    (DistributedDataParallel, DeepSpeed ZeRO-0, 1 and 2, pipeline stages, experts) or pieces of them
    (fully_shard, tensor parallelism: DTensor; FullyShardedDataParallel: FSDP1; DeepSpeed ZeRO-3). Ranks that
    hold the same bytes send an even share each, except for buffers, which the first of these ranks sends
    (BatchNorm's statistics differ between ranks). Parameters are read in place:
    client/docs/training-loop.md says which code waits before it writes them, and how other writes, frozen
    parameters and copies are handled.

    If the environment variable EMA_MODE is "disabled", the attachment needs no server, and averages nothing;
    with "local" the averages are in this process: client/docs/outages.md.

    Args:
        model: the model, or this rank's part of it. DistributedDataParallel, torch.compile, Lightning
            Fabric's and Megatron-core's wrappers are unwrapped; of FullyShardedDataParallel (FSDP1), give
            the wrapper, and of DeepSpeed the engine. A list of modules is one model, whose tensors have the
            names that they have in their own modules (torchtitan's model parts); if some are equal (virtual
            pipeline stages), give `rename`, which then gets names with the module's index in front
            ("1.weight"). Ranks that hold the same parameter, or the same piece, must have equal values.
        optimizer: the optimizer that changes the parameters, or all such optimizers (a GAN's two; one for
            each parameter, in backward hooks). The first step is complete when each has stepped, and a
            later step when the optimizer that was the last then has stepped again. If optimizers contain
            others, a step ends with the outermost `step()`, whichever of them is given. The wrappers of
            accelerate and Lightning are unwrapped. Steps that a grad scaler skips do not count, nor those of an optimizer that is
            created later, nor those by which torch.distributed.checkpoint initializes an optimizer's state.
            The optimizers, or those that they contain, must hold parameters of the model. Parameters that
            none of them holds are copied for each push; if they are too large, the step waits. None, on all
            ranks: call the attachment's `after_step()` after each step. Give None if your optimizer trains copies of the
            parameters. Megatron-core's optimizer (a MegatronOptimizer) counts the steps that it has made.
            If `model` is DeepSpeed's engine, its steps count, and this argument is ignored: give None, or any
            of its optimizers. Steps that it skips, because gradients are not finite, do not count.
        url: "ema://host:port/model".

    Args, the schedule (how the track "ema" averages; client/docs/schedules.md):
        half_life: training time until a contribution halves, such as "200ba" (200 optimizer steps).
            Default: "1000ba", unless another rule, a preset or only `tracks` are given.
        smoothing, decay: instead of a half-life, under either name: the share of the old average that each
            update keeps, such as 0.999, never rescaled.
        update_interval: how often to update, such as "5ba"; for all tracks without their own. Default: one
            unit of the half-life, such as "1ba".
        ema_start: when averaging starts, such as "0.1dur". Default: at once.
        ramp_ratio, debias, inv_gamma, power, ramp, min_decay, max_decay, sigma_rel, age_offset, uniform,
            mean_of_last, copy, zero_init, before_start, ema_end, interval_phase: other rules and their
            options, as for `Track`. For a short training, ramp_ratio=0.1 shortens the half-life while
            training is young.
        preset: averages as a library does: its name ("diffusers"), with the library's own arguments under
            their names (beta=0.9999), or a dict of all: {"preset": "diffusers", "decay": 0.999}; see
            `Track.preset`. A name that `attach` has, too, keeps its meaning here. With the preset
            "composer", half_life, smoothing, update_interval and ema_start are arguments of the preset;
            update_interval also applies to the other tracks. With ema_pytorch's
            `update_model_with_ema_every`, the averages are written back into the model (Switch-EMA).
            Default: None.
        tracks: more tracks by name, as for `Client.create_model`, such as {"raw": "copy"}. If only
            `tracks` are given, there is no track "ema" beside them. Default: None.
        time: a function that returns the training time after a number of steps, such as
            `lambda step: {"epoch": step // steps_per_epoch}`, equal on all ranks (for seconds, rank 0's time
            is broadcast). Needed for tracks in units other than batches. Unless it returns "batch", the
            batches are the steps. Default: None.

    Args, the tensors:
        tensor_rules: of the track "ema": what to do with tensors by name or glob, as for `Track`, such as
            {"head.*": "ignore"}. Default: all tensors are averaged, but of a model with PEFT's adapters not
            the frozen base. Tensors that all tracks ignore are not sent, and may have any dtype, or consist
            of other tensors, as torchao's float8 weights do.
        buffers, dtype, paused, snapshot_interval: of the track "ema", as for `Track`. Default: those of
            `Track`, or the preset's.
        non_finite: what happens if a pushed float is NaN or infinity. "reject", the default: the step is
            dropped. "skip": the tensor keeps its averages. "allow": the value is averaged. Unless "allow"
            is given, tracks ignore buffers that hold NaN or infinity now, with a warning.
        wire_dtype: as for `Client.open_run`: "as pushed" (the default), or "bfloat16", which halves the sent
            bytes.
        source: what is averaged of each parameter of lower precision than float32: "parameters" (the
            default), the parameter itself; or "master", the float32 copy that the optimizer trains and
            rounds to the parameter. DeepSpeed has such copies with ZeRO-1, 2 and 3, and Megatron-core's
            mixed-precision optimizers have them; a float32 parameter is its own master. The model on
            the server is then float32. A module with rounded parameters can still read it (`averaged`).
        rename: returns the name of a tensor on the server, for parts of a model whose tensors have the
            same names on several ranks, such as experts. Without it (the default), tensors of one name with
            equal values at the start count as replicas, which must stay equal.
        max_staging_bytes: of this rank, as for `Client.open_run`. Default: 64 MiB.
        max_pinned_versions: as for `Client.create_model`. Default: the server's.
        check: a debugging aid: compares checksums of the weights before and after a push, and raises in the
            next `optimizer.step()` if other code has written them in between; after the last push, `close`
            warns. Reads the weights twice more. Default: False.

    Args, distributed training:
        process_group: of torch.distributed: all ranks that train the model. Default: the default group.

    Args, failures (client/docs/outages.md):
        on_error: how to treat a step that cannot be pushed: "skip" omits it, with a warning; "raise" raises
            in the next `optimizer.step()`, before it changes anything; with "wait", each `optimizer.step()`
            waits until the step before it is a version, even during an outage. If the server is
            unreachable when this is called, "skip" waits for it for at most 10 s (or `timeout_s`), and
            starts the training without the average: a warning says so, and the ranks join when they can
            (with `existing` "continue" this needs `start_step` or `resume`). Default: as "skip", but an
            unreachable server raises after `timeout_s`, as with "raise" and "wait".
        timeout_s: seconds for a push, with the wait for other ranks, and for each call of the set-up.
            Default: 60.
            This function waits at most this long until every rank has called it. It is also the limit of
            each pull of the averages, where the default is 600.
        max_wait_s: the most seconds that the hooks delay one step of the training. Does not apply to
            on_error "wait", where a push has all of `timeout_s`. Default: 30.
        max_outage_s: for on_error "wait": how many seconds after the first failed push the training
            raises. Default: 120.

    Args, resuming (client/docs/checkpoints.md):
        existing: how to treat a model that has an average of an earlier training. "error" raises, and
            changes nothing. "new" starts a new average: it deletes the model, which needs an admin's token
            where the server has tokens, and keeps its checkpoints on the server's disk. "continue" averages
            this training's weights into the old average; give it also if `load_state_dict` will resume.
            Default: "continue" with `resume`, else "error". An import (`Client.import_weights`) is continued
            unless this is "new". A model that has no version yet is used if it has the same tensors and
            tracks, else "error" and "new" create it again.
        resume: the result of `Attachment.state_dict` in the trainer's checkpoint, equal on all ranks: the
            server restores the model to that state, and counting continues from there. Default: None.
        start_step: the number of optimizer steps already made. Default: continues after the model's newest
            version, if there is one.
        keep_resumable: how many versions saved by `Attachment.state_dict` the server keeps. If the trainer
            keeps as many checkpoints, each finds its average. Default: 5.
        files: small files to put into the server's checkpoints, as for `Client.attach_files`; rank 0's are
            used. Default: None.

    Returns:
        The attachment. Call its `close()` when training ends, or use it in a `with` statement.

    Raises:
        InvalidArgumentError (a ValueError): an argument is wrong, or differs between ranks where it must
            not (tracks, steps, policies); the ranks' parameters do not fit together, hold NaN or infinity,
            or have their values elsewhere (offloaded by accelerate); or `resume` is of another model or
            format.
        TypeError: an argument that neither `attach` nor the preset or a `Track` has.
        FailedPreconditionError: RESUME_MISMATCH: the model has an average of an earlier training, and
            `existing` is "error"; or the server has no average for the state in `resume`, and the
            message lists the existing ones. The model is unchanged. ALL_CHECKPOINTS_CORRUPT: the server
            could not load the model at its start, and does not create a new one; the message says what to
            do.
        OutOfRangeError: VERSION_NOT_KEPT: the server no longer has the version that `resume` names.
        FailedPreconditionError, with EMA_MODE "local": the training has several ranks, or resumes.
        DeadlineExceededError: not every rank has called this within `timeout_s`; the message names the
            others.
        EmaError: the set-up failed. An error on any rank raises on every rank.

    Example:
        >>> ema = ema_client.attach(
        ...     model, optimizer, "ema://host:50051/digits", half_life="200ba", update_interval="5ba"
        ... )
        >>> ...  # the training loop, unchanged
        >>> ema.close()
    """
    given = dict(locals())
    mode = current_mode()
    if mode != "server":
        # Imported here: it is a layer above, and most trainings do not need it.
        from ema_client._without_server import attach_without_server

        given["model"] = model = as_module(model)
        check_module(model)
        check_values(given)
        return attach_without_server(mode, given, *options_and_tracks(given, track_arguments))
    ranks = Ranks.current(process_group, call="attach()", timeout_s=timeout_s)
    # If this rank raised at once, the others would wait for it, so a failure is sent to all ranks.
    failure: Exception | None = None
    own: _Training | None = None
    arguments = Arguments({}, "", {})
    try:
        own = _Training.of(given, track_arguments)
        arguments = own.arguments
    except Exception as raised:
        failure = raised
    # A wrong timeout_s is a failure, too.
    ranks.barrier(CALL_TIMEOUT_S if timeout_s is None or failure is not None else timeout_s)
    check_agreed(ranks.gather_or_raise(failure, arguments))
    assert own is not None
    layout = Layout.exchange(ranks, own.held)
    plan: Plan | None = None
    try:
        # Only after no rank has failed: `time` may be collective.
        now = time_after(time, start_step or 0)
        for track in own.tracks:
            _check_time(track, now)
        plan = Plan(
            url=url,
            ranks=ranks,
            layout=layout,
            tracks=own.tracks,
            undecided=own.undecided,
            max_pinned_versions=max_pinned_versions or 0,
            non_finite=non_finite,
            wire_dtype=wire_dtype,
            max_staging_bytes=max_staging_bytes,
            files=small_files(files) if files is not None and ranks.rank == 0 else {},
            existing=existing or ("error" if resume is None else "continue"),
            starts_alone=on_error == "skip",
            knows_step=start_step is not None,
            timeout_s=timeout_s,
        )
        own.check_weights(plan)
    except Exception as raised:
        failure = raised
    timeout_s = CALL_TIMEOUT_S if timeout_s is None else timeout_s
    if plan is not None and failure is None and ranks.rank == 0:
        _warn_of_wait(plan, resume is not None, timeout_s)
    try:
        joined = join(ranks, plan, failure, resume, timeout_s)
    except Exception:
        if plan is not None:
            plan.client.close()
        raise
    assert plan is not None
    if start_step is not None:
        joined = dataclasses.replace(joined, step=start_step)
    # If the rest fails, everything so far is undone.
    with contextlib.ExitStack() as undo:
        undo.callback(plan.client.close)
        if joined.run is not None:
            undo.callback(joined.run.close)
        attachment = Attachment(
            PushOptions(
                model_name=plan.model_name,
                tensors_of=own.tensors_of,
                time_of=time,
                max_wait_s=max_wait_s,
                timeout_s=timeout_s,
                on_error=on_error or "skip",
                max_outage_s=max_outage_s,
                check=check,
                averaged_buffers=plan.averaged_buffers(own.tensors_of()),
                non_finite=non_finite,
            ),
            client=plan.client,
            joined=joined,
            join_at=functools.partial(resume_at, ranks, plan, timeout_s),
            module=own.module,
            optimizers=own.optimizers,
            engine=own.engine,
            frozen=FrozenTensors(
                plan.layout.frozen,
                own.tensors_of(),
                {held.name: held.checksum for held in own.held},
                check=check,
            ),
            keep_resumable=keep_resumable,
        )
        undo.callback(attachment._detach)
        undo.callback(attachment._pusher.engine.leave, 0.0)
        own.options.apply(attachment, ranks)
        attachment._state.check_disk()
        undo.pop_all()
    return attachment


@dataclasses.dataclass(frozen=True)
class _Training:
    """One rank's model and arguments of `attach`, checked before the ranks communicate.

    Attributes:
        optimizers: None: none was given, or there is an engine.
        engine: DeepSpeed's engine, or Megatron-core's optimizer. None: neither.
        options: what the preset says besides the track "ema".
        undecided: names of the tracks that do not say what to do with buffers.
        held: the parts of the tensors that this rank holds.
        allows_non_finite: weights may be NaN or infinite.
        arguments: those that must be equal on all ranks.
    """

    module: torch.nn.Module
    optimizers: list[torch.optim.Optimizer] | None
    engine: Any
    options: PresetOptions
    tracks: list[_ema.Track]
    undecided: Collection[str]
    tensors_of: ModelTensors
    held: list[HeldBox]
    allows_non_finite: bool
    arguments: Arguments

    @classmethod
    def of(cls, given: Mapping[str, Any], track_arguments: Mapping[str, Any]) -> _Training:
        """Raises as `attach`."""
        model, optimizer, source = as_module(given["model"]), given["optimizer"], given["source"]
        check_module(model)
        split_url(given["url"])
        check_values(given)
        engine = optimizer if is_megatron_optimizer(optimizer) else engine_of(model)
        optimizers = None
        if optimizer is not None and engine is None:
            optimizers = unwrap_optimizers(optimizer)
        _check_start(given)
        options, tracks, undecided = options_and_tracks(given, track_arguments)
        has_optimizer = optimizers is not None or engine is not None
        arguments = _arguments_of(
            given, track_arguments, options, tracks, undecided, has_optimizer=has_optimizer
        )
        module = unwrap(model)
        options.check(module)
        if source == "master" and options.rule is not None:
            raise InvalidArgumentError(
                'source "master": the preset writes averages to the parameters (update_model_with_ema), and '
                "the optimizer would overwrite them from its float32 copies: give no such preset"
            )
        tensors_of = ModelTensors(
            module, given["rename"], has_masters=source == "master", optimizer=engine
        )
        allows_non_finite = given["non_finite"] == "allow"
        actions = default_actions(module, tensors_of(), allows_non_finite=allows_non_finite)
        held = held_boxes_of(tensors_of(), actions)
        if optimizers is not None:
            check_held(with_contained(optimizers), module.parameters())
        return cls(
            module=module,
            optimizers=optimizers,
            engine=engine,
            options=options,
            tracks=tracks,
            undecided=undecided,
            tensors_of=tensors_of,
            held=held,
            allows_non_finite=allows_non_finite,
            arguments=arguments,
        )

    def check_weights(self, plan: Plan) -> None:
        """InvalidArgumentError: a tensor that some track has is without values here, or its values are
        not finite."""
        what = f'model "{plan.model_name}"'
        averaged = {spec[0] for spec in plan.layout.specs}
        tensors = {n: one for n, one in self.tensors_of().all().items() if n in averaged}
        check_values_here(what, self.module, tensors, may_be_meta=False)
        if not self.allows_non_finite:
            parameters = self.tensors_of().parameters
            parameters = {n: parameters[n] for n in tensors if n in parameters}
            check_parameters_finite(what, parameters, self.tracks)


def _check_start(given: Mapping[str, Any]) -> None:
    """InvalidArgumentError: `resume` is given together with what it decides."""
    start_step, existing = given["start_step"], given["existing"]
    if given["resume"] is None:
        return
    if start_step is not None:
        raise InvalidArgumentError(
            f"start_step {start_step} and resume are both given: give only resume, which has the step"
        )
    if existing in ("error", "new"):
        raise InvalidArgumentError(
            f'existing "{existing}" and resume are both given: give only resume, which continues the '
            "average of its state"
        )


def _arguments_of(
    given: Mapping[str, Any],
    track_arguments: Mapping[str, Any],
    options: PresetOptions,
    tracks: list[_ema.Track],
    undecided: Collection[str],
    *,
    has_optimizer: bool,
) -> Arguments:
    """The arguments that must be equal on all ranks."""
    preset = options.preset
    return Arguments.of(
        {
            "the model of url": split_url(given["url"])[1],
            "optimizer": "given" if has_optimizer else None,
            "start_step": given["start_step"],
            "existing": given["existing"],
            "non_finite": given["non_finite"],
            "max_pinned_versions": given["max_pinned_versions"] or 0,
            "wire_dtype": given["wire_dtype"],
            "source": given["source"],
            "on_error": given["on_error"],
            "max_outage_s": given["max_outage_s"],
            "the tracks without buffers": undecided,
            "keep_resumable": given["keep_resumable"],
            "update_model_with_ema of preset": options.rule and options.rule.text(),
        },
        tracks,
        {
            **{name: given[name] for name in (*_OF_TRACKS, "tracks")},
            **(track_arguments if given["preset"] is None else {}),
            **(preset if isinstance(preset, Mapping) else {"preset": preset}),
        },
    )


def _warn_of_wait(plan: Plan, resumes: bool, timeout_s: float) -> None:
    """Warns at once if the server cannot be reached: the calls that follow wait for it in silence."""
    limit = f"{timeout_s:g} s (timeout_s), and then raises"
    if plan.may_start_alone(resumes):
        limit = (
            f"{min(timeout_s, START_WAIT_S):g} s, and then starts the training without the average"
        )
    try:
        plan.client.server_info(timeout_s=min(_PROBE_S, timeout_s))
    except OUTAGES as error:
        _logger.warning(
            'model "%s": %s; attach() tries to reach the server for %s',
            plan.model_name,
            error,
            limit,
        )
    except EmaError:
        pass  # The server has answered.


def _check_time(track: _ema.Track, now: dict[str, float]) -> None:
    """InvalidArgumentError: the track needs a unit that `now` lacks; says how to provide it."""
    try:
        track.plan([], now)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(
            f'track "{track.name}": {error.args[0]}: give it by attach(time=), such as '
            'time=lambda step: {"epoch": step // steps_per_epoch}, the same on all ranks',
            reason=error.reason,
        ) from None


#: The names of the arguments of `attach` that callbacks accept, too.
KEYWORDS = [
    name
    for name, parameter in inspect.signature(attach).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def options_and_tracks(
    given: Mapping[str, Any], track_arguments: Mapping[str, Any]
) -> tuple[PresetOptions, list[_ema.Track], frozenset[str]]:
    """The options and tracks that arguments of `attach` describe, and the names of the tracks that
    do not say what to do with buffers.

    Raises:
        InvalidArgumentError, TypeError: as `attach` for its tracks and its preset.
    """
    names = {field.name for field in dataclasses.fields(EmaRule)} - {"rule_fields"}
    own: dict[str, Any] = {name: given.get(name) for name in names}
    rule = EmaRule(**own).with_arguments(track_arguments, KEYWORDS)
    options = PresetOptions.of(rule.preset)
    tracks, undecided = dataclasses.replace(rule, preset=options.preset).tracks(given.get("tracks"))
    return options, tracks, undecided
