"""The execution: arguments for a compiled model, and its runs."""

from __future__ import annotations

import contextlib
import errno
import time
import weakref
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core._nnburst import ffi, lib
from .._core.deadline import Deadline
from .._core.errno import check, flag
from .._core.leaving import Closing, Leaving, process_lock
from ..burst.client.controller import ExecutionBurstController
from ..burst.client.request import BoundRequest, fork_error, in_time
from ..errors import BadState, ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from ..model.running import ExecutionResult
from ..model.types import Array
from .compile.compilation import Compilation
from .display import describe
from .request.arguments import Arguments
from .request.node_args import answer_length
from .request.state import States
from .run import event_loop
from .run.futures import submit

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from ..memory.memory import Memory
    from ..model.types import Named, Request
    from .request.node_args import Sizes
    from .run.burst import Burst
    from .run.burst_pool import BurstPool

    Timeout = float | EllipsisType | None

_A_MOMENT = 0.0005
MIN_SETUP_SECONDS = 1.0
"""Minimum time limit in seconds for the preparation of a run."""


def setup_deadline(open_timeout: float | None, timeout: float | None) -> Deadline:
    """Return the deadline for the preparation of a run: opening a burst, allocating arrays, setting a state.

    Args:
        open_timeout: Time limit of the preparation in seconds; None for the default.
        timeout: Time limit of the run in seconds, or None.
    """
    if open_timeout is None and timeout is not None:
        open_timeout = max(timeout, MIN_SETUP_SECONDS)
    return Deadline.after(open_timeout)


class Execution(BoundRequest, Closing):
    """A compiled model with its arguments, to run any number of times. Context manager.

    `Session.bind` and `nnapi.Burst.bind` make executions. The arguments are arrays that are shared with the service:
    fill ``inputs``, call `run`, use ``outputs``. Nothing is copied, and ``run()`` is one call into C.

    Attributes:
        inputs: Shared arrays by input name. States have no arrays. Write into the arrays
            (``execution.inputs["image"][:] = frame``), do not replace them. To set a value that is not an array of
            numbers, assign it: ``execution.inputs["words"] = ["a", "b"]``.
        outputs: Shared arrays by output name. The next run overwrites them: to keep one, use
            ``execution.outputs["scores"].copy()``. An output whose shape is known only after a run is flat bytes, with
            its dimensions in `output_shapes`. Reading a value that is not an array of numbers makes a copy.

    Example:
        >>> with nnburst.Session(model) as session, session.bind() as execution:
        ...     execution.inputs["x"][:] = [[-1, 0, 1, 2]]
        ...     execution.run()
        ...     execution.outputs["y"].copy()
        array([[0., 0., 1., 2.]], dtype=float32)
    """

    def __init__(
        self,
        burst: Burst,
        arguments: Arguments,
        *,
        pool: BurstPool | None,
        timeout: float | None,
        measure: bool,
        keep: object,
    ) -> None:
        """Use `Session.bind` instead."""
        self._home, self._pool, self._keep = burst, pool, keep
        self._arguments = arguments
        self._feeds: Collection[tuple[str, Any, tuple[int, ...], Array]] = arguments.feeds.values()
        self._copies = None if arguments.copies is None else arguments.copies.values()
        self._lock = process_lock()
        self._holder = object()  # the finaliser must not refer to the execution
        self._held: dict[ExecutionBurstController, list[Memory | Named]] = {}
        self._finalizer = weakref.finalize(self, _drop, self._held, self._holder)
        self._finalizer.atexit = False
        self._leaving: Leaving | None = None
        self._of_other_shapes: ExecutionResult | None = None  # result of the last run before `reshape`
        requests, longest = arguments.requests, answer_length(arguments.compilation.outputs)
        self._hold_memory(burst.controller, requests)
        super().__init__(burst.controller, requests, measure=flag(measure, "measure"), answer_length=longest)
        self.timeout = timeout
        if pool is not None:  # a run with a state is never repeated
            self._restarts, self._retries = pool.options.restarts, 0 if arguments.states.all else pool.options.retry

    @property
    def inputs(self) -> Mapping[str, Any]:
        """Shared arrays by input name."""
        return self._arguments.user_views[0]

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Shared arrays by output name."""
        return self._arguments.user_views[1]

    @property
    def compilation(self) -> Compilation:
        """The compilation. After a restart of the service, this is the session's new compilation."""
        return self._arguments.compilation

    # ---- shared arrays ---------------------------------------------------------------------------------------

    def _set_inputs(self, inputs: object) -> bool:
        """Copy arrays into the execution's input arrays, and change shapes accordingly.

        Returns:
            False if `inputs` is not a dict of arrays with exactly the inputs' names and dtypes, `reshape` cannot give
            the shapes, or an abandoned run uses the arrays.
        """
        feeds = self._feeds
        if type(inputs) is not dict or len(inputs) != len(feeds):
            return False
        others = None
        for name, dtype, shape, view in feeds:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype:
                return False
            if array.shape == shape:
                view[...] = array
            elif others is None:
                others = {name: array}
            else:
                others[name] = array
        return others is None or self._refill(others)

    def _fill(self, arrays: Mapping[str, Array]) -> bool:
        """Copy arrays from `checked_inputs` into the execution's input arrays, and change shapes accordingly.

        Returns:
            False if the names differ from the inputs', `reshape` cannot give the shapes, or an abandoned run uses the
            arrays.
        """
        return self._wired.keys() == arrays.keys() and self._refill(arrays)

    def _refill(self, arrays: Mapping[str, Array]) -> bool:
        try:
            self._reshape(self._arguments.sizes_with(arrays))
        except (InvalidArgument, BadState):
            return False
        wired = self._wired
        for name, array in arrays.items():
            wired[name][...] = array
        return True

    @property
    def _wired(self) -> dict[str, Array]:
        """The input arrays in shared memory; bytes for values that are sent encoded."""
        return self._arguments.inputs

    def _copied(self) -> list[Array]:
        """Return copies of all outputs, in the shapes of the last run."""
        if self._copies is None:
            return self._arguments.copy_outputs(self.output_shapes)
        copies = []  # a loop is faster than a comprehension
        for copy in self._copies:
            copies.append(copy())
        return copies

    def reshape(self, shapes: Mapping[str, int | Sequence[int]]) -> None:
        """Change the shapes of the arrays in `inputs` and `outputs`, within the sizes that ``bind(room=…)`` reserved.

        Nothing is allocated or copied. The elements of the new arrays are undefined.

        Args:
            shapes: All shapes that the model leaves open, as for `Burst.bind`.

        Raises:
            InvalidArgument: A shape is missing, contradicts the model or is too large; an argument would appear,
                disappear, become empty or change its rank; or a state would change its shape. All shapes stay as they
                were.
            BadState: The execution is in flight, or closed.
        """
        if not isinstance(shapes, Mapping):
            raise InvalidArgument(f"shapes is a dict by name, not {type(shapes).__name__}")
        sizes, result = self._arguments.solve(shapes), None
        with contextlib.suppress(BadState, GeneralFailure):  # there was no run, or its shapes are impossible
            result = self.result
        self._reshape(sizes)
        if result is not None:  # the result keeps the shapes of its run
            self._set_result(result)

    def _set_result(self, result: ExecutionResult | None) -> None:
        """Replace the result of the last run; None to remove it."""
        self._elsewhere = self._of_other_shapes = result
        lib.nnb_execution_ran_elsewhere(self.pointer, int(ErrorStatus.GENERAL_FAILURE))  # this does not swap states

    def _reshape(self, sizes: Sizes) -> None:
        arguments = self._arguments
        self._check_not_closed()
        if sizes == arguments.sizes:
            return
        changed = arguments.changes_for(sizes)
        numbers = ffi.new("uint32_t[]", arguments.packet_numbers(changed))
        try:
            if status := lib.nnb_execution_resize(self.pointer, numbers, len(numbers)):
                check(status, "reshape", {errno.EALREADY: _running_error(), errno.ECHILD: fork_error()})
            arguments.resize(sizes, changed)
        except BadState:
            raise
        except BaseException:  # a signal handler raised: some arrays may have new shapes
            self._feeds = ()
            self.forget()
            raise

    @property
    def _request(self) -> Request:
        return self._arguments.requests[self.turn]

    # ---- state -----------------------------------------------------------------------------------------------

    def reset_state(self, values: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Set the state for the next run.

        Args:
            values: Arrays by *input* name; missing inputs become zero (the zero point, if quantised).

        Raises:
            InvalidArgument: A name, dtype or shape is wrong. The state is unchanged.
            DeadObject: The service has ended, and the state is lost.
            MissedDeadline: The call took longer than the session's ``open_timeout``.
        """
        self._setup_deadline().call(self._reset_state, values)

    def _reset_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        states = self._living_states()
        states.write(self.turn, states.checked(values))
        if states.grown:  # the last run's shapes are invalid
            self._set_result(None)

    def get_state(self) -> dict[str, Array]:
        """Return copies of the states for the next run, by input name.

        Raises the same errors as `reset_state`.
        """
        states, shapes = self._living_states(), {}
        if states.grown:
            with contextlib.suppress(BadState):  # there was no run since the state was set
                if (status := self.result[0]) is not ErrorStatus.NONE:
                    raise InvalidArgument(f"the last run ended with {status.name}; set the state with reset_state()")
                rows = zip(self.compilation.outputs, self.output_shapes, strict=False)
                shapes = {node.name: shape.dimensions for node, shape in rows}
        return self._setup_deadline().call(states.read, self.turn, shapes)

    def _living_states(self) -> States:
        """Return the states. Raises `DeadObject` if they are lost because the service has died."""
        self._check_not_closed()
        states, ending = self._arguments.states, self.controller.ending
        if states.all and ending.reason:
            names = ", ".join(map(repr, states.all))
            raise ending.error(
                f"the service died ({ending.reason}), and with it the state {names}; bind another execution"
            )
        return states

    # ---- running ---------------------------------------------------------------------------------------------

    async def arun(self, timeout: Timeout = ...) -> None:
        """Run without blocking the event loop of asyncio or Trio, and without a thread.

        Cancelling the task abandons the run: its arrays stay in use until its end, and its answer is dropped.

        Args:
            timeout: See `run`.

        Raises:
            BadState: The execution is in flight (also in an abandoned run), or there is no event loop.
            GeneralFailure: The service accepts only one request at a time.
            NNBurstError: See `run`.
        """
        await event_loop.run(self, timeout)

    def submit(self, timeout: Timeout = ...) -> Future[Execution]:
        """Start a run. The service uses the arrays until the answer.

        After the timeout, which includes the wait for other runs, the future fails with `MissedDeadline`, but the
        execution stays in flight until the answer.

        Args:
            timeout: See `run`.

        Returns:
            A future, which cannot be cancelled, with this execution as its result.

        Raises:
            BadState: The execution is closed or in flight.
            ResourceExhausted: The system has no thread for the burst's futures.
            GeneralFailure: The service accepts only one request at a time.
        """
        with self._use_timeout(timeout):
            return submit(self)

    # ---- through a burst, and elsewhere ----------------------------------------------------------------------

    def _hold_memory(self, controller: ExecutionBurstController, requests: Sequence[Request]) -> None:
        """Make a burst keep the arguments' memory mapped until the execution is closed."""
        named = dict.fromkeys(pool for request in requests for pool in request.pools)
        self._held[controller] = list(named)  # type: ignore[arg-type]
        for pool in self._held[controller]:
            controller.hold(pool, self._holder)

    def _setup_deadline(self) -> Deadline:
        return setup_deadline(None if self._pool is None else self._pool.options.open_timeout, self._allowed)

    def _rebind(self, number: int, deadline: Deadline) -> Deadline | None:
        """Move the execution to a free burst, or to a restarted service.

        Raises:
            DeadObject: The service has ended, and with it the contents of the execution's state.
            MissedDeadline: No burst was free in time. Or an earlier run, for which no caller waits, took too long.
        """
        begin = time.monotonic_ns()
        moved = self._setup_deadline().call(self._move, number)
        if moved == -errno.EAGAIN:  # an abandoned run on the same burst must end first
            if deadline.left() == 0:
                within = in_time(self._allowed)
                raise MissedDeadline(f"not started {within}: the run before, which was given up, has not ended")
            time.sleep(_A_MOMENT)
            return deadline
        return None if moved is None else deadline.postpone(begin)

    def _move(self, number: int) -> int | None:
        """Move to another burst. Return 0; -EAGAIN if a run must end first; None if there is no other burst."""
        pointer, here = self.pointer, self._home
        if self._pool is None or self._closed:
            return None
        burst = self._pool.replacement(here, died=number not in (errno.EBUSY, errno.ESTALE))
        if burst is None or (burst is here and number == errno.EBUSY):  # the burst is free again
            return None if burst is None else 0
        if burst.compilation is not self.compilation:
            self._living_states()
        with self._lock:
            if self.pointer is not pointer:  # another thread has moved the execution
                return 0
            left = lib.nnb_execution_leave(pointer)
            if left == 0:
                try:
                    if burst.compilation is not self.compilation:
                        self._held.clear()  # a dead burst maps no memory
                        self._arguments.compilation = burst.compilation
                    self._home = burst
                    requests = self._arguments.requests
                    self._hold_memory(burst.controller, requests)
                    self._bind_to(burst.controller, requests, self.turn)
                except BaseException:
                    lib.nnb_execution_return(pointer)
                    raise
        return left if left == -errno.EAGAIN else check(left, "execution", {errno.EALREADY: _running_error()})

    # ---- results ---------------------------------------------------------------------------------------------

    @property
    def result(self) -> ExecutionResult:
        """Status, output shapes and timing of the last run.

        Raises:
            BadState: The execution has not run.
            GeneralFailure: The shapes from the service contradict the model or the request.
        """
        result: ExecutionResult = super().result
        if result[1] and result is not self._of_other_shapes:
            self._arguments.check_shapes(result[1])
        return result

    # ---- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Execution:
        self._check_not_closed()
        return self

    def close(self) -> None:
        """Free memory and state in client and service. Arrays that you keep stay readable. Idempotent."""
        self._end(wait=True)

    def forget(self) -> None:
        """Close without waiting for the service."""
        self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        self._refuse()
        if self._leaving is None:
            held = [(controller, pool) for controller, pools in self._held.items() for pool in pools]
            own = self._arguments.layout.memory
            self._leaving = Leaving(
                *(partial(controller.release, pool, self._holder, wait=wait) for controller, pool in held),
                *(() if own is None else (own.close,)),
                self._arguments.states.close,
            )
        self._finalizer.detach()
        self._leaving()

    def __repr__(self) -> str:
        return f"<Execution of {describe(self.compilation)}{', closed' if self._leaving else ''}>"


def _drop(held: dict[ExecutionBurstController, list[Memory | Named]], holder: object) -> None:
    """Release the memory of an execution that was dropped without `close`."""
    while held:
        controller, pools = held.popitem()
        for pool in pools:
            controller.release_soon(pool, holder)


def _running_error() -> BadState:
    return BadState("the execution is running; bind one for each thread")
