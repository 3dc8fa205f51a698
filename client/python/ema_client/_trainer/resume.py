# SPDX-License-Identifier: Apache-2.0
"""The average's entry in a trainer's own checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ema_client._client.client import Client
from ema_client._client.run import Joined
from ema_client._client.types import ResumePoint, Version
from ema_client._errors import (
    AbortedError,
    DeadlineExceededError,
    EmaError,
    FailedPreconditionError,
    InvalidArgumentError,
    UnavailableError,
)
from ema_client._trainer.pushing import Pushing

_logger = logging.getLogger(__name__)

_FORMAT = 1
_LABEL = re.compile(r"resume-(\d+)-\d+-\d+")
# How long reading or writing a model may take at the server's disk.
DISK_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class State:
    """Where a trainer and its average stand.

    Attributes:
        model: the model's name.
        step: optimizer steps so far: all that training time is computed from.
        version, incarnation: the model's newest version then, of this step or an earlier one; 0: none.
    """

    model: str
    step: int
    version: int
    incarnation: int

    def to_dict(self) -> dict[str, int | str]:
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, model: str) -> State:
        """Reads what `to_dict` has made; more entries, as of an earlier client, do nothing.
        InvalidArgumentError: it is not that, or of another model."""
        if not isinstance(state, Mapping):
            raise _refused(f"{state!r}: must be what Attachment.state_dict() gave")
        if state.get("format") != _FORMAT:
            raise _refused(
                f'format {state.get("format")!r}, but this client reads format {_FORMAT}'
                + "; use a newer client" * (type(state.get("format")) is int)
            )
        fields = dataclasses.fields(cls)
        for field in fields:
            value = state.get(field.name)
            # Annotations are text here.
            if type(value).__name__ != field.type:
                raise _refused(f"{field.name} {value!r}: expected {field.type}")
            if isinstance(value, int) and value >= 2**63:
                raise _refused(f"{field.name} {value!r}: expected less than 2**63")
        result = cls(**{field.name: state[field.name] for field in fields})
        if result.model != model:
            raise _refused(f'of model "{result.model}", but "{model}" is attached')
        return result

    @property
    def label(self) -> str:
        """What the server calls the version, if there was one."""
        # With the version: a trainer that went back may come to that step again, by another way.
        return f"resume-{self.step}-{self.incarnation}-{self.version}"

    @property
    def resume_point(self) -> ResumePoint | None:
        """What the run is opened with; None: there was no version."""
        if self.version == 0:
            return None
        return ResumePoint(self.step, (self.version, self.incarnation))

    def check_fresh(self, latest: Version | None) -> None:
        """Refuses a model that has versions, where there was none."""
        if self.version == 0 and latest is not None:
            raise FailedPreconditionError(
                f'model "{self.model}" has version {latest.number} (step {latest.step}), but the '
                f"trainer's state at step {self.step} is from before the first version: delete the "
                f"model, or choose another name",
                reason="RESUME_MISMATCH",
            )


def _refused(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"state of an average: {problem}")


def save(client: Client, state: State, version: Version) -> None:
    """Saves the state's version as what its step resumes from."""
    client.create_checkpoint(
        state.model, version=version, label=state.label, timeout_s=DISK_TIMEOUT_S
    )


@contextlib.contextmanager
def _labels_stay(model: str) -> Iterator[None]:
    """What is in it may fail: what shall stay is safe, and the next time tries again."""
    try:
        yield
    except EmaError as error:
        _logger.warning('model "%s": labels of older steps are still there: %s', model, error)


def trim(client: Client, model: str, *, keep: int) -> None:
    """Of what was saved keeps the newest `keep`."""
    with _labels_stay(model):
        # By version first: a trainer that went back has newer labels of earlier steps.
        labels = [
            (found.incarnation, found.number, int(match.group(1)), found.name)
            for found in client.labels(model).values()
            if (match := _LABEL.fullmatch(found.name))
        ]
        for *_, name in sorted(labels)[:-keep]:
            client.remove_label(model, name)


def warn_of_no_state(step: int, why: EmaError) -> None:
    _logger.warning(
        "the trainer's checkpoint of step %d has no average to resume from: %s", step, why
    )


class WithState(Pushing):
    """The part of an `Attachment` that a trainer's checkpoint needs."""

    # Set by `Attachment`.
    _client: Client
    _join_at: Callable[[Mapping[str, Any] | None], Joined | None]
    _keep_resumable: int
    # The label that a state from before the first step has made; of rank 0.
    _template: str | None = None

    def state_dict(self, *, timeout_s: float | None = None) -> dict[str, int | str] | None:
        """What belongs into the trainer's own checkpoint: which average is that of this step.

        To be called between two steps, on rank 0 or on all ranks: they get equal dicts, of plain
        numbers and strings. No rank waits for another, but for the running push. Rank 0 returns when
        the version is on the server's disk and has a label that begins with "resume-<step>"; of such
        labels the server keeps the newest `keep_resumable`; one from before the first step takes no
        other's place until the next, and goes when load_state_dict loads another state, or none (dcp.load
        asks for such a one, as its template, and overwrites it). What rank 0's checkpoint says is
        therefore there; other ranks' are not to be used without it.

        With on_error "skip", a server that is away, or cannot write to its disk, costs the checkpoint its
        average, not the training the checkpoint: then this is None, with a warning, and at once if that
        is known. `attach(resume=None)` resumes nothing: the average goes on from where the server stands.

        Args:
            timeout_s: seconds for the push, and for each call but the save, which may take minutes.
                None: those of `attach`; with on_error "wait" `max_outage_s`, if that is more. 0: does not
                wait for the push. With on_error "wait" an outage may take longer.

        Raises:
            AbortedError: FENCED: the average is not this run's any more: a newer one has begun, or it was
                rolled back.
            FailedPreconditionError: NO_DATA_DIR: the server keeps nothing; RESUME_MISMATCH: the
                average is of a later step than the trainer's.
            UnavailableError, DeadlineExceededError: the server is away, or its disk has failed, or the
                push has not ended; unless on_error is "skip".
            EmaError: as `Client.create_checkpoint`.

        Example:
            >>> torch.save({"model": model.state_dict(), "ema": ema.state_dict()}, path)
            >>> ...  # after a restart
            >>> ema = ema_client.attach(model, optimizer, url, resume=torch.load(path)["ema"])
        """
        if timeout_s is None:
            timeout_s = max(self._timeout_s, self._max_outage_s)
        try:
            return self._state(timeout_s).to_dict()
        except (UnavailableError, DeadlineExceededError) as error:
            problem: EmaError = error
            if self._link.is_away:
                problem = self._link.error()
            elif not error.reason:  # Not the server's own word, such as one about its disk.
                problem = type(error)(
                    f'model "{self._model_name}": the server is away, or takes too long: {error.args[0]}'
                )
            if self._on_error != "skip":
                raise problem from None
        warn_of_no_state(self._step, problem)
        return None

    def _state(self, timeout_s: float) -> State:
        """Where it stands, saved by rank 0."""
        self.wait_pushed(timeout_s=timeout_s)
        self._raise_error()
        if self._link.is_away and not self._link.is_fenced and self._on_error != "wait":
            raise self._link.error()
        # Not this rank's last reply: after a restart of the server the average may be an earlier one.
        # Until this rank pushes again, nothing can be committed, so all ranks find the same.
        # To look takes some time, also where the push is given none.
        latest = self._client.model(self._model_name, timeout_s=timeout_s or None).latest
        if self._link.is_fenced or (
            latest is not None and latest.run_epoch > self._link.run.run_epoch
        ):
            raise AbortedError(
                f'model "{self._model_name}": the average is not this run\'s any more: a newer one has '
                "begun, or it was rolled back",
                reason="FENCED",
            )
        if latest is not None and latest.step > self._step:
            raise FailedPreconditionError(
                f'model "{self._model_name}": the average is of step {latest.step}, the trainer at step '
                f"{self._step}",
                reason="RESUME_MISMATCH",
            )
        state = State(
            model=self._model_name,
            step=self._step,
            version=0 if latest is None else latest.number,
            incarnation=0 if latest is None else latest.incarnation,
        )
        if latest is not None and self._link.run.rank == 0:
            if self._has_stepped:
                save(self._client, state, latest)
                trim(self._client, self._model_name, keep=self._keep_resumable)
            else:
                # It may be but the template of what is loaded next (by dcp.load): nothing goes for it.
                is_new = state.label not in self._client.labels(self._model_name)
                save(self._client, state, latest)
                self._template = state.label if is_new else self._template
        return state

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Goes on from what `state_dict` gave: as `attach(..., resume=state)`, for an attachment.

        Collective. Before the first step, on every rank, with equal dicts; None, on all of them, resumes
        nothing. Opens a new run; on an error the attachment stays as it was.

        Raises:
            InvalidArgumentError: the state is of another model or format, or another one on another rank.
            FailedPreconditionError: steps have been made; or RESUME_MISMATCH: the server has no average
                that stands where the state does; the message lists what there is.
            OutOfRangeError: VERSION_NOT_KEPT: the very version that the state names is gone.
            EmaError: what fails on any rank raises on every rank.
        """
        if self._has_stepped or self._closed:
            raise FailedPreconditionError(
                f'model "{self._model_name}": load_state_dict comes before the first step, and this is '
                f"step {self._step}",
                reason="BAD_REQUEST",
            )
        joined = self._join_at(state)
        loaded: str | None = None
        if joined is not None and state is not None:
            loaded = State.from_dict(state, model=self._model_name).label
            old_run = self._link.run
            self._take(joined)
            old_run.close()
        template, self._template = self._template, None
        if template is not None and template != loaded:
            with _labels_stay(self._model_name):
                self._client.remove_label(self._model_name, template)
