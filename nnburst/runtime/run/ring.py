"""Rings of executions on one burst: while the service runs an execution, the caller fills the next."""

from __future__ import annotations

import errno
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..._core._nnburst import ffi, lib
from ...errors import BadState, DeadObject, InvalidArgument, MissedDeadline, NNBurstError
from ..execution import Execution

if TYPE_CHECKING:
    from ..._core._nnburst import CData
    from ..request.node_args import Sizes

T = TypeVar("T")

_EALREADY = -errno.EALREADY
LASTING = (MissedDeadline, DeadObject, BadState)
"""Errors that end a ring."""


class Ring:
    """A ring of executions on one burst. Several can be in flight. Answers come in the order of the executions' starts.

    Only one thread at a time may use a ring. Dropping the ring ends it.

    Args:
        executions: Two or more executions, which the ring owns.
        then: Called when the ring ends.
    """

    __slots__ = ("__weakref__", "_at", "_controller", "_executions", "_pointers")

    def __init__(self, executions: Sequence[Execution], then: Callable[[], object]) -> None:
        self._executions = executions
        self._pointers = [execution.pointer for execution in executions]
        self._controller = executions[0].controller
        self._at = 0  # index of `current`
        weakref.finalize(self, _end, self._pointers, then).atexit = False

    @property
    def current(self) -> Execution:
        """The execution to fill next."""
        return self._executions[self._at]

    def reshape(self, sizes: Sizes) -> bool:
        """Change the shapes of the arrays of all executions. Return False if the memory is too small."""
        try:
            for execution in self._executions:
                execution._reshape(sizes)
        except (InvalidArgument, BadState):
            return False
        return True

    @property
    def is_idle(self) -> bool:
        """True if the burst is alive, and has nothing in flight."""
        controller = self._controller
        return controller.is_free and controller.is_sound and not controller.ending.reason

    def run(self, items: Iterable[tuple[bool, T]]) -> Generator[tuple[T, Execution, NNBurstError | None], None, None]:
        """Run the ring's next execution for each item. Yield item, execution and error after each run.

        Several runs are in flight at the same time.

        An item with False starts no run, and is yielded in order. The generator stops after a `MissedDeadline` (the
        run may still use its arrays), a `DeadObject` or a `BadState`. Closing the generator abandons runs in flight.
        """
        flying: deque[T] = deque()
        try:
            for starts, item in items:
                execution = self._executions[self._at]
                flies, error = self._start() if starts else (False, None)
                if flies:
                    flying.append(item)
                    if len(flying) == len(self._pointers):
                        yield flying.popleft(), self._executions[self._at], error
                else:  # there was no run, its start failed, or it did not use the burst
                    yield from self._finish(flying)
                    yield item, execution, error
                if error is not None and isinstance(error, LASTING):
                    break
            yield from self._finish(flying)
        finally:
            _abandon_all(self._pointers)
            self._at = 0

    def _start(self) -> tuple[bool, NNBurstError | None]:
        """Start `current`, then wait for the end of the oldest execution, which is next in the ring.

        Returns:
            (True, the error of the oldest execution) if `current` is in flight; else (False, the error of `current`).
        """
        at, pointers = self._at, self._pointers
        following = (at + 1) % len(pointers)
        status = lib.nnb_execution_advance(pointers[at], pointers[following])
        flies = not status or (status != _EALREADY and lib.nnb_execution_flies(pointers[at]))
        if flies:
            self._at = following
        return bool(flies), _error(self._executions[following if flies else at], status) if status else None

    def _finish(self, flying: deque[T]) -> Iterator[tuple[T, Execution, NNBurstError | None]]:
        while flying:
            execution = self._executions[self._at - len(flying)]
            error = _error(execution, lib.nnb_execution_advance(ffi.NULL, execution.pointer))
            yield flying.popleft(), execution, error


def _error(execution: Execution, status: int) -> NNBurstError | None:
    try:
        execution._conclude(status)
    except NNBurstError as error:
        return error
    return None


def _abandon_all(executions: Sequence[CData]) -> None:
    """Abandon all runs without waiting. Safe in a finaliser."""
    for execution in filter(lib.nnb_execution_flies, executions):
        lib.nnb_execution_drop(execution)


def _end(executions: Sequence[CData], then: Callable[[], object]) -> None:
    """Withdraw the executions, so that no answer is written into freed memory. Then call `then`."""
    _abandon_all(executions)
    then()
