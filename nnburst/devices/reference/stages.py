"""Compiling in stages: part of the work is done, and saved, only when executions show that it is worth it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

from ...burst import ExecutionResult
from .._common import InnerPlan

__all__ = ["CountedPlan", "LaterStage"]


class LaterStage:
    """Work that is done once, in the background, after a number of executions.

    Args:
        after: Executions until then.
        work: What to do.
    """

    def __init__(self, after: int, work: Callable[[], None]) -> None:
        self._after = after
        self._work = work
        self._runs = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False

    def ran(self) -> None:
        """An execution has ended. Any thread."""
        if next(self._runs) == self._after:
            with self._lock:
                if not self._ended:
                    self._thread = threading.Thread(target=self._work, name="nnburst-later-stage", daemon=True)
                    self._thread.start()

    def close(self) -> None:
        """Begin nothing any more, and wait for what has begun. Idempotent."""
        with self._lock:
            self._ended = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()


class CountedPlan:
    """A plan that tells of each run."""

    def __init__(self, plan: InnerPlan, stage: LaterStage) -> None:
        self._plan = plan
        self._stage = stage

    def __call__(self) -> ExecutionResult | None:
        """Run without a deadline."""
        return self.run(0)

    def run(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once; as the plan inside."""
        result = self._plan.run(deadline_ns)
        self._stage.ran()
        return result

    def output_dimensions(self, position: int) -> tuple[int, ...]:
        """Dimensions of an output after a run."""
        return self._plan.output_dimensions(position)
