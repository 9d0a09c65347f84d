"""Runs through ONNX Runtime's Python module, for providers other than the CPU, and for ONNX Runtime before 1.19."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import GeneralFailure, MissedDeadline, NNBurstError, ResourceExhausted
from ..deadline import call_at, deadline_passed, is_limit
from .capi import Copies
from .library import python_module


class PythonRun:
    """A bound run like `capi.BoundRun`, but without a kernel in C.

    Args:
        session: An ``InferenceSession`` of the Python module.
        binding: A binding of the session.
        binds: Functions that bind the inputs. Each run calls them, because some providers copy inputs to the device
            only in these calls.
    """

    kernel = None

    def __init__(
        self,
        session: Any,
        binding: Any,
        before: Copies = (),
        after: Copies = (),
        binds: Sequence[Callable[[], None]] = (),
    ) -> None:
        self._session, self._binding = session, binding
        self._before, self._after, self._binds = tuple(before), tuple(after), binds
        self._usual = self._options = _run_options()
        self._is_cancelled = False
        self._failure: NNBurstError = GeneralFailure()

    def run(self, deadline_ns: int) -> int:
        """Run the graph. Stop at a deadline (0 for none). Return 0, or the status of a failure."""
        try:
            for to, source in self._before:
                np.copyto(to, source if to.dtype == source.dtype else source != 0)
            for bind in self._binds:
                bind()
            self._binding.synchronize_inputs()
            if is_limit(deadline_ns):
                self._run_until(deadline_ns)
            else:
                self._session.run_with_iobinding(self._binding, self._usual)
            self._binding.synchronize_outputs()
            for to, source in self._after:
                to[...] = source
        except Exception as error:
            self._failure = self._failure_of(error, deadline_ns)
            return int(self._failure.status)
        return 0

    def _run_until(self, deadline_ns: int) -> None:
        options = self._options = _run_options()  # A late timer of an earlier run must not stop this run.
        if self._is_cancelled or deadline_passed(deadline_ns):
            options.terminate = True
        try:
            with call_at(deadline_ns, partial(setattr, options, "terminate", True)):
                self._session.run_with_iobinding(self._binding, options)
        finally:
            self._options = self._usual

    def _failure_of(self, error: Exception, deadline_ns: int) -> NNBurstError:
        if deadline_passed(deadline_ns):
            return MissedDeadline("the run was ended at its deadline")
        if self._is_cancelled:
            return MissedDeadline("the run was ended, for its client has gone or closed the burst")
        if isinstance(error, MemoryError):
            return ResourceExhausted(f"no memory for this execution: {error}")
        return error if isinstance(error, NNBurstError) else GeneralFailure(f"ONNX Runtime: {error}")

    def failure(self, status: int) -> NNBurstError:
        """Return the error of the run that has just failed."""
        return self._failure

    def cancel(self) -> None:
        """Stop the present run between two nodes, and later runs before their first node."""
        self._is_cancelled = True
        for options in (self._usual, self._options):
            options.terminate = True


def _run_options() -> Any:
    """Return options that prevent messages to stderr after a failure."""
    options = python_module().RunOptions()
    options.log_severity_level = 4
    return options
