"""Kernels: the functions that run bound requests."""

from __future__ import annotations

from collections.abc import Callable

from ..model.running import ExecutionResult

Kernel = Callable[[], ExecutionResult | None]
"""Function that runs a checked and bound request. None as result means status NONE, without shapes or timing.

A kernel may raise its failure. A kernel with an attribute `gate`, a `BufferSet`, admits itself to driver-managed
buffers and commits; a burst does both in C, and runs `gate.current` in between, once nothing has to be checked or made
anew. A kernel with a method ``until(deadline_ns)`` can end itself: a run with a deadline calls that method instead. A
kernel with a method ``cancel()`` ends soon after a call of this method, from any thread and without waiting, and never
runs again: its result is not awaited.

An attribute `c_kernel`, an ``nnb_kernel *`` of ``csrc/nnburst.h``, does the same in C: a burst calls it without the
interpreter lock when it runs the kernel again, perhaps bound to a request with other dimensions; see
``docs/internals/devices.md``. The objects that it needs live as long as the kernel. Beside `c_kernel`, a method
``conclude(status, deadline_ns)`` raises the exception for a run in C that failed, or finishes the run and returns its
result. If `finds_buffers` is true, each run in C looks where the request's driver-managed buffers are, and settles
those that it has written (``nnb_buffer_contents``). A kernel takes the memory that it keeps besides the request's own
as `WorkingMemory`, and refers to that.
"""


def run_until(kernel: Kernel, deadline_ns: int) -> ExecutionResult | None:
    """Call a kernel, with a deadline (CLOCK_MONOTONIC nanoseconds, 0 for none) if it has a method ``until``."""
    until: Callable[[int], ExecutionResult | None] | None = getattr(kernel, "until", None) if deadline_ns else None
    return kernel() if until is None else until(deadline_ns)
