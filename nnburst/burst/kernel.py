"""Kernels: the functions that run bound requests."""

from __future__ import annotations

from collections.abc import Callable

from ..model.running import ExecutionResult

Kernel = Callable[[], ExecutionResult | None]
"""Function that runs a checked and bound request, and may raise the error of a failed run.

The result None means status NONE, without shapes or timing. A kernel may have these attributes:

* ``run_until(deadline_ns)`` is called instead of the kernel if a run has a deadline, and ends the run at the deadline.
* ``cancel()`` ends the run soon, from any thread and without waiting. The kernel never runs again.
* ``gate`` is a `BufferSet`. The kernel locks its driver-managed buffers, runs, and commits the buffers. If no buffer
  has moved since the last run, a burst may instead lock the buffers in C, run ``gate.current``, and commit the buffers
  in C.
* ``c_kernel`` is an ``nnb_kernel *`` of ``csrc/nnburst.h``. Later runs call it without the interpreter lock. It may
  also run requests of other dimensions (``docs/internals/devices.md``). The kernel keeps alive what ``c_kernel`` needs.
* ``conclude(status, deadline_ns)`` raises the exception of a failed run of ``c_kernel``, or returns the run's result.
* ``finds_buffers`` is True if each run of ``c_kernel`` looks up the driver-managed buffers, and sets the dimensions of
  written buffers (``nnb_buffer_contents``).

A kernel counts its own memory as `WorkingMemory`.
"""


def run_until(kernel: Kernel, deadline_ns: int) -> ExecutionResult | None:
    """Call a kernel. If the deadline (CLOCK_MONOTONIC nanoseconds) is not 0, prefer the kernel's ``run_until``."""
    method: Callable[[int], ExecutionResult | None] | None = getattr(kernel, "run_until", None) if deadline_ns else None
    return kernel() if method is None else method(deadline_ns)
