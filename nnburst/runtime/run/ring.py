"""Executions of one burst that alternate: while the service runs some, the next one is filled."""

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
    """Executions of one burst that alternate, several in flight; answers come in the order of the starts.

    For one thread at a time. The ring ends when it is dropped.

    Args:
        executions: Two or more; they belong to the ring from now on.
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
        """Give the arrays of all executions other shapes; False if there is no room for these."""
        try:
            for execution in self._executions:
                execution._reshape(sizes)
        except (InvalidArgument, BadState):
            return False
        return True

    @property
    def is_idle(self) -> bool:
        """True if its burst has nothing in flight and may be used again."""
        controller = self._controller
        return controller.is_free and controller.is_sound and not controller.ending.reason

    def flights(
        self, items: Iterable[tuple[bool, T]]
    ) -> Generator[tuple[T, Execution, NNBurstError | None], None, None]:
        """Run `current` for each item, several at once; when a run has ended, yield its item, execution and error. A
        false item starts nothing: it is yielded when all before it have ended.

        An error that ends the ring comes last: a `MissedDeadline`, whose run may still use its arrays, a `DeadObject`
        or a `BadState`. Closing the generator abandons the runs in flight.
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
                else:  # a false item, a failed start, or a run elsewhere
                    yield from self._finish(flying)
                    yield item, execution, error
                if error is not None and isinstance(error, LASTING):
                    break
            yield from self._finish(flying)
        finally:
            _give_up(self._pointers)
            self._at = 0

    def _start(self) -> tuple[bool, NNBurstError | None]:
        """Start `current`, then wait for the next execution if that is in flight.

        Returns:
            (True if it is in flight, error of the next execution or else of this one).
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
    """Wait for the end of a run and return its error."""
    try:
        execution._conclude(status)
    except NNBurstError as error:
        return error
    return None


def _give_up(executions: Sequence[CData]) -> None:
    """Abandon all runs without waiting; safe in a finaliser."""
    for execution in filter(lib.nnb_execution_flies, executions):
        lib.nnb_execution_drop(execution)


def _end(executions: Sequence[CData], then: Callable[[], object]) -> None:
    """Withdraw the executions: no answer may be written to one that no longer exists."""
    _give_up(executions)
    then()
