"""Plans: requests that a device has checked, mapped and bound to a kernel.

A run of a plan locks the request's driver-managed buffers, copies arguments that are not used in place, calls the
device's kernel, copies results back, and unlocks the buffers. A failure is an exception. `execute_synchronously` and a
burst's listener convert the exception to a status and a message with `failure_of`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ..burst.cancellation import WorkingMemory, present_cancel_flag, use_cancel_flag
from ..burst.kernel import Kernel, run_until
from ..errors import ErrorStatus, ResourceExhausted
from ..memory.managed import BufferSet
from ..memory.staging import OpenRequest, open_request
from ..model.running import ExecutionResult, RunOptions
from ..model.types import MeasureTiming, MemoryLike, Named, Request, RequestArgument, Timing
from .buffers import BoundBuffers

Bind = Callable[[Request, RunOptions], Kernel]
"""A device's function that returns a kernel for a valid request, whose pools stay mapped. A kernel returns None or, if
output shapes were unknown, a result with the shapes. It reports a failure by an exception.
"""


class Plan:
    """A request that is ready for any number of runs, one at a time.

    Args:
        buffers: The request's driver-managed buffers, or None.

    Attributes:
        gate: The buffers that each run locks, or None. A burst can lock them itself, and then call `gate.current`
            in place of this plan.

    Raises:
        NNBurstError: The request cannot run, or its memory cannot be mapped or copied.
    """

    def __init__(self, bind: Bind, request: Request, options: RunOptions, buffers: BoundBuffers | None = None) -> None:
        self._bind = bind
        self._request = request
        self._options = options
        self._buffers = buffers
        self._measures = options.measure == MeasureTiming.YES
        self._cancel_flag = present_cancel_flag()
        self._opened: OpenRequest | None = None
        self.gate: BufferSet | None = None if buffers is None else buffers.set
        if buffers is None:
            self._open()

    def _open(self) -> OpenRequest:
        try:
            with use_cancel_flag(self._cancel_flag):  # A later opening counts memory for the same client.
                self._staged = WorkingMemory()
                opened = open_request(self._request, self._staged.take)
                self._kernel = self._bind(opened.request, self._options)
        except MemoryError as error:
            raise ResourceExhausted(f"no memory for this execution: {error}") from error
        self._opened = opened
        return opened

    @property
    def call(self) -> Kernel:
        """The fastest callable for the request: the kernel, or this plan if a run must also copy, lock or measure."""
        direct = self._opened is not None and self._opened.is_direct and not self._measures
        return self._kernel if direct else self

    def __call__(self) -> ExecutionResult | None:
        """Run once. Return None for a success without shapes and timing. Raises the kernel's errors."""
        return self.run_until(0)

    def run_until(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once. At a deadline (0 for none), stop the kernel if that is possible.

        Raises:
            MissedDeadline: The run was stopped.
        """
        return self._run(deadline_ns) if self._buffers is None else self._run_admitted(self._buffers, deadline_ns)

    def _run(self, deadline_ns: int) -> ExecutionResult | None:
        opened = self._opened or self._open()
        self._opened = None  # A run after a failure opens the memory again, since a client may have truncated it.
        try:
            opened.before_run()
            started = time.monotonic_ns()
            result = run_until(self._kernel, deadline_ns)
            ended = time.monotonic_ns()
        except BaseException:
            opened.after_run(False)
            raise
        opened.after_run(True)
        self._opened = opened
        if not self._measures:
            return result
        return ErrorStatus.NONE, () if result is None else result[1], Timing((ended - started) // 1000)

    def _run_admitted(self, buffers: BoundBuffers, deadline_ns: int) -> ExecutionResult | None:
        gate = buffers.set
        kernel: Kernel | None = gate.admit()
        try:
            if kernel is None:
                with use_cancel_flag(self._cancel_flag):
                    kernel = Plan(self._bind, buffers.with_views(), self._options).call
                gate.keep(kernel)
            result = run_until(kernel, deadline_ns)
            shapes = () if gate.fixed else buffers.written_dimensions(result)
        except BaseException:
            gate.fail()
            raise
        gate.commit(shapes)
        return result


def pool_of(request: Request, argument: RequestArgument) -> MemoryLike:
    pool = request.pools[argument.location.pool_index]
    assert not isinstance(pool, Named)  # Views have replaced all buffers.
    return pool
