"""Options and results of an execution."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Struct

from .._core.errno import refusal
from ..errors import ErrorStatus, NNBurstError, OutputShape
from .types import NO_TIMING, MeasureTiming, Timing

ExecutionResult = tuple[ErrorStatus, tuple[OutputShape, ...], Timing]
"""The result of an execution: status, shapes (one per output, or none), timing. A `Failure` also has a reason."""

Nanoseconds = Annotated[int, msgspec.Meta(ge=0)]


class RunOptions(Struct, frozen=True):
    """Options of an execution.

    Attributes:
        measure: `MeasureTiming.YES` to measure the `Timing`.
        deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds, 0 for none.
        loop_timeout_ns: Time limit of a WHILE in nanoseconds; 0 for the default of 2 s.

    Example:
        >>> nnburst.model.RunOptions(nnburst.model.types.MeasureTiming.YES).deadline_ns
        0
    """

    measure: MeasureTiming = MeasureTiming.NO
    deadline_ns: Nanoseconds = 0
    loop_timeout_ns: Nanoseconds = 0


class Failure(tuple[ErrorStatus, tuple[OutputShape, ...], Timing]):
    """An `ExecutionResult` of a failure, with a reason.

    Attributes:
        reason: A sentence for people.
    """

    reason: str

    def __new__(cls, status: ErrorStatus, reason: str, output_shapes: tuple[OutputShape, ...] = ()) -> Failure:
        made = super().__new__(cls, (status, output_shapes, NO_TIMING))
        made.reason = reason
        return made


def failure_of(error: BaseException) -> Failure:
    """Convert an exception to the result for the client.

    An `NNBurstError` keeps its status if that status can be sent. A `MemoryError` becomes RESOURCE_EXHAUSTED_TRANSIENT.
    All other errors become GENERAL_FAILURE.
    """
    if isinstance(error, NNBurstError):
        return Failure(_sendable(error.status), str(error), tuple(getattr(error, "output_shapes", ())))
    if isinstance(error, MemoryError):
        return Failure(ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT, f"no memory for this execution: {error}")
    return Failure(ErrorStatus.GENERAL_FAILURE, f"{type(error).__name__}: {error}{refusal(error)}")


def overrun_reason(reason: str, max_run: float) -> str:
    """Add the service's time limit of `max_run` seconds to the reason why a run failed."""
    return f"{reason}; this service ends a run after {max_run:g} s (nnburst serve --max-run, launch(max_run=...))"


def _sendable(status: ErrorStatus) -> ErrorStatus:
    """Return a status; GENERAL_FAILURE for a status that is never sent, such as DEAD_OBJECT."""
    return status if status <= ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT else ErrorStatus.GENERAL_FAILURE


def consistent_result(
    status: ErrorStatus, shapes: tuple[OutputShape, ...], timing: Timing, reason: str = ""
) -> ExecutionResult:
    """Make a result consistent (REQ-MODEL-077).

    The status becomes GENERAL_FAILURE if it is OUTPUT_INSUFFICIENT_SIZE without shapes, or NONE (success) although an
    output was too small. The only failure that keeps its shapes is OUTPUT_INSUFFICIENT_SIZE. A failure has no times. A
    success loses its times if they contradict each other.
    """
    status = _sendable(status)
    if status is ErrorStatus.NONE and all(shape.is_sufficient for shape in shapes):
        on_device, in_driver = timing.time_on_device, timing.time_in_driver
        contradicts = on_device is not None and in_driver is not None and on_device > in_driver
        return status, shapes, NO_TIMING if contradicts else timing
    if status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and shapes:
        return Failure(status, reason, shapes)
    claims = status in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)
    return Failure(ErrorStatus.GENERAL_FAILURE if claims else status, reason)


def reason_of(result: ExecutionResult) -> str:
    return result.reason if isinstance(result, Failure) else ""
