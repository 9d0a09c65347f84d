"""A plan whose request has arguments in driver-managed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ...burst import ExecutionResult
from ...errors import ErrorStatus, NNBurstError
from ...model import NO_TIMING, Request

if TYPE_CHECKING:
    from .._buffers import BoundBuffers
    from .plan import Plan
    from .staged import StagedPlan

__all__ = ["BufferPlan"]


class BufferPlan:
    """Admits, runs and commits. The plan inside is bound anew only when a buffer's storage or dimensions changed.

    Args:
        buffers: Of a valid request.
        make: Binds a plan to the request, with views in place of its buffers.
    """

    def __init__(self, buffers: BoundBuffers, make: Callable[[Request], Plan | StagedPlan]) -> None:
        self._buffers = buffers
        self._make = make
        self._plan: Plan | StagedPlan | None = None
        self._version = -1

    def __call__(self) -> ExecutionResult | None:
        """Run without a deadline."""
        return self.run(0)

    def run(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once; as `Plan.run`."""
        buffers = self._buffers.set
        try:
            buffers.admit()
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        try:
            if self._plan is None or buffers.version != self._version:
                self._plan = self._make(self._buffers.with_views())
                self._version = buffers.version
            plan = self._plan
            result = plan.run(deadline_ns)
            if result is not None and result[0] is not ErrorStatus.NONE:
                buffers.fail()
                return result
            shapes = (
                [plan.output_dimensions(position) for position in self._buffers.outputs]
                if buffers.is_open_ended
                else ()
            )
        except NNBurstError as error:
            buffers.fail()
            return error.status, (), NO_TIMING
        except BaseException:
            buffers.fail()
            raise
        try:
            buffers.commit(shapes)
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        return result
