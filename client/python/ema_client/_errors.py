# SPDX-License-Identifier: Apache-2.0
"""The exceptions that failed calls raise: one class per gRPC code."""

from __future__ import annotations

import logging

_logger = logging.getLogger(__name__)


class EmaError(Exception):
    """A call failed.

    Attributes:
        code: the gRPC code, such as "ABORTED".
        reason: a stable, machine-readable code (ErrorReason in proto/ema/v1/error.proto), such as
            "STALE_STEP"; "" if none was given. Branch on the class and on the reason, never on the
            text.
    """

    code = "UNKNOWN"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason

    def __str__(self) -> str:
        message = str(self.args[0]) if self.args else ""
        return f"{message} [{self.reason}]" if self.reason else message

    def __reduce__(self) -> tuple[object, ...]:
        # Pickled when a trainer sends an error from one rank to the others.
        return _rebuild, (type(self), self.args[0] if self.args else "", self.reason)


class CancelledError(EmaError):
    """The server ended the call, such as a pull whose reader was too slow, or it was interrupted."""

    code = "CANCELLED"


class InvalidArgumentError(EmaError, ValueError):
    """The call is wrong, and fails again if it is repeated. The default reason is BAD_REQUEST."""

    code = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, reason: str = "BAD_REQUEST") -> None:
        super().__init__(message, reason=reason)


class DeadlineExceededError(EmaError, TimeoutError):
    """The call has not ended within its timeout."""

    code = "DEADLINE_EXCEEDED"


class NotFoundError(EmaError, LookupError):
    """The named model, track, label, checkpoint or file does not exist."""

    code = "NOT_FOUND"


class AlreadyExistsError(EmaError):
    """The model or track exists already, and differs from the request."""

    code = "ALREADY_EXISTS"


class PermissionDeniedError(EmaError):
    """The token does not allow the call."""

    code = "PERMISSION_DENIED"


class UnauthenticatedError(EmaError):
    """The token is missing or not valid."""

    code = "UNAUTHENTICATED"


class ResourceExhaustedError(EmaError):
    """A budget or a limit of the server is reached: wait, or raise the limit."""

    code = "RESOURCE_EXHAUSTED"


class FailedPreconditionError(EmaError):
    """The state must change first: for example, nothing has been committed yet."""

    code = "FAILED_PRECONDITION"


class AbortedError(EmaError):
    """The call lost a race. After a push, continue with the next step; after FENCED, stop."""

    code = "ABORTED"


class OutOfRangeError(EmaError):
    """The version is no longer kept, or not committed yet."""

    code = "OUT_OF_RANGE"


class UnimplementedError(EmaError):
    """The server or its file system does not support the call."""

    code = "UNIMPLEMENTED"


class InternalError(EmaError):
    """A device has failed, or the server has a bug: report it. A retry does not help."""

    code = "INTERNAL"


class UnavailableError(EmaError, ConnectionError):
    """The server is unreachable, stopping, or cannot use its disk: retry later."""

    code = "UNAVAILABLE"


class DataLossError(EmaError):
    """Bytes were damaged in transit or on the server's disk, or changed during a push."""

    code = "DATA_LOSS"


# The classes above, by code.
_CLASSES = {cls.code: cls for cls in EmaError.__subclasses__()}


def failure_of(error: Exception) -> EmaError:
    """Converts any exception of this process, such as MemoryError, to an EmaError."""
    if isinstance(error, EmaError):
        return error
    message = f"{type(error).__name__}: {error}"
    failure = (
        ResourceExhaustedError(message)
        if isinstance(error, MemoryError)
        else InternalError(message)
    )
    failure.__cause__ = error
    return failure


def _rebuild(cls: type[EmaError], message: str, reason: str) -> EmaError:
    return cls(message, reason=reason)


def from_status(code: str, reason: str, message: bytes) -> EmaError:
    """Makes the error of a status; called by the extension module."""
    return _CLASSES.get(code, EmaError)(message.decode("utf-8", "replace"), reason=reason)


def to_status(error: Exception) -> tuple[str, str, str]:
    """The code, reason and message of the status of an exception; called by the extension module."""
    failure = failure_of(error)
    message = str(failure.args[0]) if failure.args else ""
    # A file's name may have lone surrogates.
    return failure.code, failure.reason, message.encode("utf-8", "replace").decode()


def log_wait(message: bytes) -> None:
    """Logs that a call is being retried; called by the extension module."""
    _logger.warning(
        "%s; trying again until the call's time-out", message.decode("utf-8", "replace")
    )
