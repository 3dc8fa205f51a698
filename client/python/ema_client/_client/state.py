# SPDX-License-Identifier: Apache-2.0
"""The average's entry in a trainer's own checkpoint."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

from ema_client._client.types import ResumePoint, SavedState, Version
from ema_client._errors import FailedPreconditionError, InvalidArgumentError
from ema_client._argument_checks import is_whole

_FORMAT = 1


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
            raise _refused(f'of model "{result.model}", expected one of model "{model}"')
        return result

    @property
    def version_id(self) -> tuple[int, int]:
        """Number and incarnation of the version. InvalidArgumentError: there was none."""
        if self.version == 0:
            raise _refused(f'at step {self.step} model "{self.model}" had no version yet')
        return self.version, self.incarnation

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
                f"trainer's state at step {self.step} is from before the first version: attach without "
                'resume= and with existing="new" to start a new average, or choose another name',
                reason="RESUME_MISMATCH",
            )


def version_id(
    version: int | Version | SavedState | None, what: str = "version", *, of: str | None = None
) -> tuple[int, int]:
    """Number and incarnation as the extension module takes them; (0, 0): the newest.

    `of` is the model, whose saved states are accepted; None: no states are.

    InvalidArgumentError: neither a number nor a record, but a label, for example. `what` is its
    name in the message.
    """
    if isinstance(version, Version):
        return version.number, version.incarnation
    if version is None:
        return 0, 0
    if isinstance(version, Mapping) and of is not None:
        return State.from_dict(version, model=of).version_id
    if isinstance(version, Mapping) or not is_whole(version):
        problem = f"{what} {version!r}: must be a whole number or a Version"
        if isinstance(version, str):
            problem += f"; that of a label is client.labels(name)[{version!r}].number"
        raise InvalidArgumentError(problem)
    return operator.index(version), 0


def _refused(problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"state of an average: {problem}")
