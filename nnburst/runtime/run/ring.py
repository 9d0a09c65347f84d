"""Executions of one burst that take turns: while the service runs some, the next one is filled."""

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
"""Errors after which a ring runs nothing more."""


class Ring:
    """Executions of one burst that take turns, several in flight: answers come in the order of the starts.

    One thread at a time. It ends when it is dropped.

    Args:
        executions: Two or more, which belong to the ring from now on.
        then: Called when it ends.
    """

    __slots__ = ("__weakref__", "_at", "_controller", "_executions", "_pointers")

    def __init__(self, executions: Sequence[Execution], then: Callable[[], object]) -> None:
        self._executions = executions
        self._pointers = [execution.pointer for execution in executions]
        self._controller = executions[0].controller
        self._at = 0  # place of `current`
        weakref.finalize(self, _end, self._pointers, then).atexit = False

    @property
    def current(self) -> Execution:
        """The execution to fill."""
        return self._executions[self._at]

    def reshape(self, sizes: Sizes) -> bool:
        """Give the arrays of all other shapes; False if there is no room for these."""
        try:
            for execution in self._executions:
                execution._reshape(sizes)
        except (InvalidArgument, BadState):
            return False
        return True

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in flight on its burst, which may be used again."""
        controller = self._controller
        return controller.is_free and controller.is_sound and not controller.ending.reason

    def flights(
        self, tokens: Iterable[tuple[bool, T]]
    ) -> Generator[tuple[T, Execution, NNBurstError | None], None, None]:
        """Run `current` once for each token, in turn, several at once; yield each with its execution when that has
        ended, and with why it failed. A token that says False starts nothing: it comes when all before it have ended.

        The last one is that after which nothing runs here: a `MissedDeadline`, whose run may still use its arrays, a
        `DeadObject` or a `BadState`. What is in flight when this is left is given up at once.
        """
        flying: deque[T] = deque()
        try:
            for starts, token in tokens:
                execution = self._executions[self._at]
                flies, error = self._start() if starts else (False, None)
                if flies:
                    flying.append(token)
                    if len(flying) == len(self._pointers):
                        yield flying.popleft(), self._executions[self._at], error
                else:  # it is not to be started, could not be, or has run elsewhere
                    yield from self._landed(flying)
                    yield token, execution, error
                if error is not None and isinstance(error, LASTING):
                    break
            yield from self._landed(flying)
        finally:
            _give_up(self._pointers)
            self._at = 0

    def _start(self) -> tuple[bool, NNBurstError | None]:
        """Start `current`, and wait for the one that is current then, if that is in flight.

        Returns:
            Whether it flies, and why the other one, or else this one, has failed.
        """
        at, pointers = self._at, self._pointers
        following = (at + 1) % len(pointers)
        status = lib.nnb_execution_advance(pointers[at], pointers[following])
        flies = not status or (status != _EALREADY and lib.nnb_execution_flies(pointers[at]))
        if flies:
            self._at = following
        return bool(flies), _error(self._executions[following if flies else at], status) if status else None

    def _landed(self, flying: deque[T]) -> Iterator[tuple[T, Execution, NNBurstError | None]]:
        while flying:
            execution = self._executions[self._at - len(flying)]
            error = _error(execution, lib.nnb_execution_advance(ffi.NULL, execution.pointer))
            yield flying.popleft(), execution, error


def _error(execution: Execution, status: int) -> NNBurstError | None:
    """Wait for the end of a run, and return how it failed."""
    try:
        execution._conclude(status)
    except NNBurstError as error:
        return error
    return None


def _give_up(executions: Sequence[CData]) -> None:
    """Await none of them any more. Waits for nothing; also in a finaliser."""
    for execution in filter(lib.nnb_execution_flies, executions):
        lib.nnb_execution_drop(execution)


def _end(executions: Sequence[CData], then: Callable[[], object]) -> None:
    """Answers must not be written to an execution that is gone."""
    _give_up(executions)
    then()
