"""Several executions of a burst in flight: while the service runs one, the next ones are filled."""

from __future__ import annotations

import contextlib
import errno
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from ..._core._nnburst import ffi, lib
from ..._core.leaving import Closing
from ..._core.one_process import OneProcess
from ...errors import BadState, DeadObject, InvalidArgument, MissedDeadline, NNBurstError
from ...model import Array
from ..execution import Execution
from ..request.node_args import checked_inputs

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..._core._nnburst import CData
    from ...burst import ExecutionBurstController


T = TypeVar("T")

_EALREADY = -errno.EALREADY
LASTING = (MissedDeadline, DeadObject, BadState)
"""Errors after which a pipeline runs nothing more."""


class Pipeline(OneProcess, Closing):
    """Executions that take turns on one burst, so that the service always finds the next request.

    Made by `Session.pipeline` and `Burst.pipeline`. Fill `current` and call `advance`, which starts it and returns the
    next one to fill; if that was in flight, its run has ended and its outputs are there. `map` does all of this for
    arrays. One thread at a time. Context manager.

    Args:
        executions: Two or more of one burst, which the pipeline owns from now on.

    Attributes:
        depth: How many executions there are.

    Raises:
        InvalidArgument: There are fewer than two.

    Example:
        >>> inputs = [{"x": np.full((1, 4), i, np.float32)} for i in range(3)]
        >>> with nnburst.Session(model) as session, session.pipeline(2) as pipeline:
        ...     [float(y[0, 0]) for (y,) in pipeline.map(inputs)]
        [0.0, 1.0, 2.0]
    """

    __slots__ = ("__weakref__", "_advance", "_at", "_executions", "_finalizer", "_pointers", "_then", "depth")

    depth: int

    def __init__(self, executions: Sequence[Execution]) -> None:
        if len(executions) < 2:
            raise InvalidArgument(f"a pipeline needs a depth of 2 or more, not {len(executions)}")
        self._executions = tuple(executions)
        self._pointers = tuple(execution.pointer for execution in executions)
        self._at = 0  # place of `current`
        self._advance = lib.nnb_execution_advance
        self._then: list[Callable[[], object]] = []
        # It must not keep the executions, which may keep what keeps the pipeline.
        self._finalizer = weakref.finalize(self, _end, executions[0].controller, self._pointers, self._then)
        self._finalizer.atexit = False
        self.depth = len(executions)

    def _when_closed(self, call: Callable[[], object]) -> None:
        """Have a function called once, when the pipeline is closed or dropped."""
        self._then.append(call)

    @property
    def current(self) -> Execution:
        """The execution to fill."""
        return self._executions[self._at]

    def advance(self) -> Execution:
        """Start `current` and return the execution that comes next, which is current from now on.

        From the call number `depth` on it is one that was in flight: its run has ended.

        Raises:
            BadState: The pipeline or its burst is closed, or another thread waits in the burst; nothing has changed.
            NNBurstError: The run that has ended failed, as `Execution.run` says. The pipeline has advanced.
        """
        at, pointers = self._at, self._pointers
        following = at + 1 if at + 1 < len(pointers) else 0
        current = self._executions[following]
        status = 0
        try:
            status = self._advance(pointers[at], pointers[following])
            if status:
                if status == _EALREADY or not lib.nnb_execution_flies(pointers[at]):
                    self._executions[at]._conclude(status)  # it was not started, or has run elsewhere
                else:
                    self._at = following
                    current._conclude(status)
        except BaseException:
            lib.nnb_execution_abandon(pointers[following])  # a signal handler raised
            if status != _EALREADY and lib.nnb_execution_flies(pointers[at]):  # perhaps as soon as it was started
                self._at = following
            raise
        self._at = following
        return current

    def drain(self) -> Iterator[Execution]:
        """Wait for all that are in flight, and yield them in the order in which they were started.

        Raises:
            NNBurstError: A run failed, as `Execution.run` says; call again for those that are left.
        """
        for ahead in range(1, self.depth + 1):
            execution = self._executions[(self._at + ahead) % self.depth]
            if execution.is_in_flight:
                self._land(execution)
                yield execution

    def _land(self, execution: Execution) -> None:
        """Wait for the run of one of its executions, if that is in flight.

        Raises:
            NNBurstError: As `drain`.
        """
        try:
            execution._conclude(self._advance(ffi.NULL, execution.pointer))
        except BaseException:
            lib.nnb_execution_abandon(execution.pointer)
            raise

    def map(self, inputs: Iterable[Mapping[str, npt.ArrayLike]]) -> Iterator[list[Array]]:
        """Run the model on each of many inputs; yield copies of the outputs, in order.

        Args:
            inputs: Arrays by name, as for `Session.run`; taken while the service runs those before.

        Raises:
            InvalidArgument: A name, dtype or shape is wrong. The outputs of all inputs before were yielded; what was in
                flight behind it is dropped.
            NNBurstError: A run failed, likewise.
        """
        with contextlib.closing(self._flights(self._filled(inputs))) as flights:
            for failure, execution, error in flights:
                if (wrong := failure or error) is not None:
                    raise wrong
                yield execution._copied()

    def _filled(self, inputs: Iterable[Mapping[str, npt.ArrayLike]]) -> Iterator[tuple[bool, Exception | None]]:
        """Fill `current` with one input after the other, for `_flights`; yield what is wrong with one."""
        try:
            for arrays in inputs:
                try:
                    fill(self.current, arrays)
                except NNBurstError as error:
                    yield False, error
                else:
                    yield True, None
        except Exception as error:  # of the caller's
            yield False, error

    def _flights(
        self, tokens: Iterable[tuple[bool, T]]
    ) -> Generator[tuple[T, Execution, NNBurstError | None], None, None]:
        """Run `current` once for each token, in turn, several at once; yield each with its execution when that has
        ended, and with why it failed. A token that says False starts nothing: it comes when all before it have ended.

        The last one is that after which nothing runs here: a `MissedDeadline`, whose run may still use its arrays, a
        `DeadObject` or a `BadState`.
        """
        flying: deque[T] = deque()
        try:
            for starts, token in tokens:
                execution, error = self.current, None
                if starts:
                    try:
                        self.advance()
                    except NNBurstError as failure:
                        error = failure
                if starts and (error is None or self.current is not execution):
                    flying.append(token)
                    if len(flying) == self.depth:
                        yield flying.popleft(), self.current, error
                else:  # it is not to be started, could not be, or has run elsewhere
                    yield from self._landed(flying)
                    yield token, execution, error
                if isinstance(error, LASTING):
                    break
            yield from self._landed(flying)
        finally:
            self._settle()

    def _landed(self, flying: deque[T]) -> Iterator[tuple[T, Execution, NNBurstError | None]]:
        while flying:
            execution, error = self._executions[(self._at - len(flying)) % self.depth], None
            try:
                self._land(execution)
            except NNBurstError as failure:
                error = failure
            yield flying.popleft(), execution, error

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is in flight on its burst, which may be used again."""
        controller = self._executions[0].controller
        return controller.is_free and controller.is_sound and not controller.ending.reason

    def _settle(self) -> None:
        """Wait for what is in flight, whatever comes of it, and begin at the first execution again."""
        for execution in self._executions:
            if execution.is_in_flight:
                with contextlib.suppress(NNBurstError):
                    execution._conclude(self._advance(ffi.NULL, execution.pointer))
        if not any(execution.is_in_flight for execution in self._executions):
            self._at = 0

    def forget(self) -> None:
        """As `close`, but wait for nothing."""
        self._finalizer()
        for execution in self._executions:
            execution.forget()

    def close(self) -> None:
        """Wait for what is in flight and give the memory back. Idempotent."""
        self._settle()
        for execution in self._executions:
            execution.close()
        self._finalizer()


def _end(
    controller: ExecutionBurstController, executions: Sequence[CData], then: Sequence[Callable[[], object]]
) -> None:
    """What is in flight is not awaited any more: its answer must not be written to an execution that is gone."""
    controller.give_up(executions)
    for call in then:
        call()


def fill(execution: Execution, inputs: Mapping[str, npt.ArrayLike]) -> None:
    """Copy arrays into the inputs of an execution; `InvalidArgument` if a name, dtype or shape is wrong."""
    if execution._feed(inputs):
        return
    arrays, wired = checked_inputs(execution.compilation.inputs, inputs), execution._wired
    if arrays.keys() != wired.keys():
        raise InvalidArgument(f"inputs {list(arrays)} are given; what is bound here runs {list(wired)}")
    for name, array in arrays.items():
        view = wired[name]
        if array.shape != view.shape:
            raise InvalidArgument(f"input {name!r} has shape {array.shape}; what is bound here runs {view.shape}")
        view[...] = array
