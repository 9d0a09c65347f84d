"""What runs a request, once it is bound."""

from __future__ import annotations

from collections.abc import Callable

from ..model import ExecutionResult

Kernel = Callable[[], ExecutionResult | None]
"""Runs a request that is decoded, checked and bound to arrays. ``None`` means: NONE, no shapes, no timing.

What fails it may be raised. A kernel with an attribute `gate`, a `BufferSet`, admits itself to driver-managed buffers
and commits; a burst does both in C, and calls `gate.current` in between, once nothing has to be checked or made anew.
One with a method ``until(deadline_ns)`` can end itself: it is called instead for a run that has a deadline.
One with a method ``cancel()`` ends soon once that is called, from any thread and without waiting, and never runs again:
nobody awaits what it computes.
One with an attribute `c_kernel`, an ``nnb_kernel *`` of ``csrc/nnburst.h`` that does the same, is run by that in C and
without the interpreter lock when a burst runs it again, perhaps bound to a request with other dimensions; see
``docs/internals/devices.md``. What that needs lives as long as the kernel.
Beside `c_kernel`, a method ``failed(status, deadline_ns)`` returns what to raise for a run in C that failed so.
What it keeps in memory beside the memory of the request, it takes as `WorkingMemory`, which it holds.
"""


def run_until(kernel: Kernel, deadline_ns: int) -> ExecutionResult | None:
    """Call a kernel; have it end by a time of CLOCK_MONOTONIC in nanoseconds (0: none), if it knows how to."""
    until: Callable[[int], ExecutionResult | None] | None = getattr(kernel, "until", None) if deadline_ns else None
    return kernel() if until is None else until(deadline_ns)
