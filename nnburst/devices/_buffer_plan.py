"""A plan whose request has arguments in driver-managed buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..burst import ExecutionResult
from ..errors import ErrorStatus, NNBurstError
from ..model import NO_TIMING, Request

if TYPE_CHECKING:
    from ._buffers import BoundBuffers
    from ._common import InnerPlan

__all__ = ["BufferPlan"]


class BufferPlan:
    """Admits, runs and commits. A plan is bound for each place where the buffers' bytes are, and kept.

    Args:
        buffers: Of a valid request.
        make: Binds a plan to the request, with views in place of its buffers.
    """

    def __init__(self, buffers: BoundBuffers, make: Callable[[Request], InnerPlan]) -> None:
        self._buffers = buffers
        self._set = buffers.set
        self._make = make

    def __call__(self, deadline_ns: int = 0) -> ExecutionResult | None:
        """Run once; as `Plan.run`."""
        buffers = self._set
        try:
            plan = buffers.admit()
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        try:
            if plan is None:
                plan = self._make(self._buffers.with_views())
                buffers.keep(plan)
            result: ExecutionResult | None = plan.run(deadline_ns)
            failed = result is not None and result[0] is not ErrorStatus.NONE
            shapes = () if failed or buffers.fixed else [plan.output_dimensions(i) for i in self._buffers.outputs]
        except NNBurstError as error:
            buffers.fail()
            return error.status, (), NO_TIMING
        except BaseException:
            buffers.fail()
            raise
        if failed:
            buffers.fail()
            return result
        try:
            buffers.commit(shapes)
        except NNBurstError as error:
            return error.status, (), NO_TIMING
        return result

    run = __call__

    @property
    def uses(self) -> Any:
        """See `GuardedPlan.uses`; None if an output's dimensions are known only after it ran."""
        return self._set.handle if self._set.fixed else None

    @property
    def admitted(self) -> InnerPlan | None:
        """See `GuardedPlan.admitted`."""
        plan: InnerPlan | None = self._set.current
        return plan

    def when_freed(self, forget: Callable[[], None]) -> None:
        """See `GuardedPlan.when_freed`."""
        self._set.when_freed(forget)
