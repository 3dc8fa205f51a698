# SPDX-License-Identifier: Apache-2.0
"""The average's entry in a trainer's own checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ema_client._client.client import Client
from ema_client._client.types import ResumePoint, Version
from ema_client._errors import EmaError, FailedPreconditionError, InvalidArgumentError

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
def labels_stay(model: str) -> Iterator[None]:
    """What is in it may fail: what shall stay is safe, and the next time tries again."""
    try:
        yield
    except EmaError as error:
        _logger.warning('model "%s": labels of older steps are still there: %s', model, error)


def trim(client: Client, model: str, *, keep: int) -> None:
    """Of what was saved keeps the newest `keep`."""
    with labels_stay(model):
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
