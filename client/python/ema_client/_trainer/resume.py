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
# Timeout of calls that read a model from the server's disk or write it there.
DISK_TIMEOUT_S = 600.0


@dataclasses.dataclass(frozen=True)
class State:
    """The position of a trainer, and the average that belongs to it.

    Attributes:
        model: the model's name.
        step: optimizer steps so far, from which training time is computed.
        version, incarnation: the model's newest version at that time, of this step or an earlier
            one; 0: none.
    """

    model: str
    step: int
    version: int
    incarnation: int

    def to_dict(self) -> dict[str, int | str]:
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], *, model: str) -> State:
        """Reads a result of `to_dict`; further entries, such as an earlier client's, are ignored.
        InvalidArgumentError: not such a result, or of another model."""
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
            # In this module annotations are text.
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
        """The version's label on the server, if there was a version."""
        # Includes the version: after a rollback, the trainer may reach the same step with other
        # weights.
        return f"resume-{self.step}-{self.incarnation}-{self.version}"

    @property
    def resume_point(self) -> ResumePoint | None:
        """The position to open the run with; None: there was no version."""
        if self.version == 0:
            return None
        return ResumePoint(self.step, (self.version, self.incarnation))

    def check_fresh(self, latest: Version | None) -> None:
        """FailedPreconditionError: the model has versions, but the state precedes the first."""
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
    """Saves the version to the server's disk, with the label that the state resumes from."""
    client.create_checkpoint(
        state.model, version=version, label=state.label, timeout_s=DISK_TIMEOUT_S
    )


@contextlib.contextmanager
def labels_stay(model: str) -> Iterator[None]:
    """Turns EmaErrors into warnings: old labels do no harm, and a later call removes them."""
    try:
        yield
    except EmaError as error:
        _logger.warning('model "%s": labels of older steps are still there: %s', model, error)


def trim(client: Client, model: str, *, keep: int) -> None:
    """Removes the labels of all saved states but the newest `keep`."""
    with labels_stay(model):
        # By version first: after a rollback, newer labels may have earlier steps.
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
