"""A plan on memory that cannot simply be mapped: copied in before and out after each run, or watched for truncation."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..burst import ExecutionResult
from ..errors import BadState, ErrorStatus, NNBurstError
from ..memory import OpenRequest, open_request
from ..model import NO_TIMING, Request

if TYPE_CHECKING:
    from ._common import InnerPlan

__all__ = ["StagedPlan"]


class StagedPlan:
    """One request on one prepared model. Not for concurrent use.

    Args:
        request: What to open again after memory was truncated and its mapping given up.
        opened: The request's memory.
        make: Binds a plan to opened memory.
    """

    def __init__(self, request: Request, opened: OpenRequest, make: Callable[[OpenRequest], InnerPlan]) -> None:
        self._request = request
        self._make = make
        self._opened: OpenRequest | None = opened
        self._plan = make(opened)

    def __call__(self) -> ExecutionResult | None:
        """Run without a deadline."""
        return self.run(0)

    def output_dimensions(self, position: int) -> tuple[int, ...]:
        """Dimensions of an output after a run."""
        return self._plan.output_dimensions(position)

    def run(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once; as `Plan.run`."""
        try:
            if self._opened is None:
                opened = open_request(self._request)
                self._plan, self._opened = self._make(opened), opened
            self._opened.before_run()
            result = self._plan.run(deadline_ns)
            self._opened.after_run(result is None or result[0] is ErrorStatus.NONE)
        except NNBurstError as error:
            self._opened = None
            status = ErrorStatus.GENERAL_FAILURE if isinstance(error, BadState) else error.status
            return status, (), NO_TIMING
        return result
