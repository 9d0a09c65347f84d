"""Error statuses, and an exception for each status.

Every failure that a caller can see is an `NNBurstError` with a `.status`. Each exception has a second base class that
is built in, so ``except ValueError`` works, too.

Example:
    >>> try:
    ...     nnburst.Memory.ashmem(-1)
    ... except ValueError as error:
    ...     type(error).__name__, error.status.name
    ('InvalidArgument', 'INVALID_ARGUMENT')
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Struct

__all__ = [
    "BadState",
    "DeadObject",
    "DeviceUnavailable",
    "ErrorStatus",
    "GeneralFailure",
    "InvalidArgument",
    "MissedDeadline",
    "NNBurstError",
    "OutputInsufficientSize",
    "OutputShape",
    "ResourceExhausted",
]


class ErrorStatus(enum.IntEnum):
    """The outcome of a call to a device, which client and service send each other as a number."""

    NONE = 0
    DEVICE_UNAVAILABLE = 1
    GENERAL_FAILURE = 2
    OUTPUT_INSUFFICIENT_SIZE = 3
    INVALID_ARGUMENT = 4
    MISSED_DEADLINE_TRANSIENT = 5
    MISSED_DEADLINE_PERSISTENT = 6
    RESOURCE_EXHAUSTED_TRANSIENT = 7
    RESOURCE_EXHAUSTED_PERSISTENT = 8
    DEAD_OBJECT = 10000
    """The peer process ended. This number is never sent."""
    BAD_STATE = 10001
    """The object cannot do this now (closed, busy, not finished). This number is never sent."""


class NNBurstError(Exception):
    """Base of every error of this package.

    Attributes:
        status: The `ErrorStatus` that describes the failure.
    """

    status: ErrorStatus = ErrorStatus.GENERAL_FAILURE

    def __init__(self, message: str = "", *, status: ErrorStatus | None = None) -> None:
        super().__init__(message)
        if status is not None:
            self.status = status


class InvalidArgument(NNBurstError, ValueError):
    """An argument contradicts the model, the request or the interface."""

    status = ErrorStatus.INVALID_ARGUMENT


class NoSuchFile(InvalidArgument, FileNotFoundError):
    """The file that an argument names does not exist."""


class GeneralFailure(NNBurstError, RuntimeError):
    """The call was well-formed but failed."""

    status = ErrorStatus.GENERAL_FAILURE


class OutputShape(Struct, frozen=True):
    """The known dimensions of an output.

    Attributes:
        dimensions: Sizes; 0 if unknown.
        is_sufficient: True if the buffer was large enough.

    Example:
        >>> nnburst.errors.OutputShape((0, 6), is_sufficient=False).dimensions
        (0, 6)
    """

    dimensions: Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]
    is_sufficient: bool = True


class OutputInsufficientSize(NNBurstError, ValueError):
    """An output buffer is too small.

    Attributes:
        output_shapes: One `OutputShape` per output, with the needed dimensions if known.
    """

    status = ErrorStatus.OUTPUT_INSUFFICIENT_SIZE

    def __init__(self, message: str = "", *, output_shapes: Sequence[OutputShape] = ()) -> None:
        super().__init__(message)
        self.output_shapes = tuple(output_shapes)


class DeviceUnavailable(NNBurstError, RuntimeError):
    """The device is offline, busy or unknown."""

    status = ErrorStatus.DEVICE_UNAVAILABLE


class DeadObject(NNBurstError, ConnectionError):
    """The peer process has ended or closed its connection.

    Attributes:
        signal: Number of the signal that killed the process, if known.
        exit_status: Exit status of the process, if known.
    """

    status = ErrorStatus.DEAD_OBJECT

    def __init__(self, message: str = "", *, signal: int | None = None, exit_status: int | None = None) -> None:
        super().__init__(message)
        self.signal = signal
        self.exit_status = exit_status


class Ending(Struct, frozen=True):
    """The end of a process or connection.

    Attributes:
        reason: The reason in words; empty while the process lives.
        signal: See `DeadObject`.
        exit_status: See `DeadObject`.
    """

    reason: str = ""
    signal: int | None = None
    exit_status: int | None = None

    def error(self, message: str) -> DeadObject:
        """Return (without raising it) the exception for a call that failed because the process or connection ended."""
        return DeadObject(message, signal=self.signal, exit_status=self.exit_status)


class MissedDeadline(NNBurstError, TimeoutError):
    """The call did not finish before its deadline."""

    status = ErrorStatus.MISSED_DEADLINE_TRANSIENT


class ResourceExhausted(NNBurstError, RuntimeError):
    """A quota or a system resource ran out."""

    status = ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT


class BadState(NNBurstError, RuntimeError):
    """The object cannot do this now: it is closed, busy, unfinished, or inherited by a forked child."""

    status = ErrorStatus.BAD_STATE


_BY_STATUS: dict[ErrorStatus, type[NNBurstError]] = {
    ErrorStatus.DEVICE_UNAVAILABLE: DeviceUnavailable,
    ErrorStatus.GENERAL_FAILURE: GeneralFailure,
    ErrorStatus.INVALID_ARGUMENT: InvalidArgument,
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: MissedDeadline,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: MissedDeadline,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: ResourceExhausted,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: ResourceExhausted,
    ErrorStatus.DEAD_OBJECT: DeadObject,
    ErrorStatus.BAD_STATE: BadState,
}


def error_for(status: ErrorStatus, message: str, output_shapes: Sequence[OutputShape] = ()) -> NNBurstError:
    """Return the exception for `status`, without raising it.

    Args:
        status: Any status but ``NONE``.
        message: A sentence about the failure, its object, and a remedy.
        output_shapes: Needed shapes, for ``OUTPUT_INSUFFICIENT_SIZE`` only.

    Example:
        >>> nnburst.errors.error_for(nnburst.errors.ErrorStatus.BAD_STATE, "it is closed")
        BadState('it is closed')
    """
    if status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE:
        return OutputInsufficientSize(message, output_shapes=output_shapes)
    error = _BY_STATUS[status](message)
    error.status = status
    return error
