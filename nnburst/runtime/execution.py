"""The execution: arguments for a compiled model, and the ways to run them."""

from __future__ import annotations

import contextlib
import enum
import errno
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core._nnburst import lib
from .._core.deadline import Deadline, checked_timeout, limit_ns
from .._core.errno import check, flag, member
from .._core.leaving import Closing, Leaving, ProcessLock
from ..burst import BoundRequest, ExecutionBurstController, loop_timeout_ns
from ..devices import Fence, FencedExecution
from ..errors import (
    BadState,
    ErrorStatus,
    InvalidArgument,
    MissedDeadline,
    OutputInsufficientSize,
    ResourceExhausted,
)
from ..memory import Memory, check_open
from ..model import (
    Array,
    ExecutionResult,
    Failure,
    MeasureTiming,
    OutputShape,
    RunOptions,
    Timing,
    operand_info,
)
from .compile.compilation import Compilation
from .display import described
from .request.arguments import Argument, Arguments
from .request.device_memory import DeviceMemory
from .request.node_args import answer_length
from .request.state import States
from .run import event_loop
from .run.event import Event
from .run.futures import submit

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from ..model import Named
    from .run.burst import Burst
    from .run.burst_pool import BurstPool

    Timeout = float | EllipsisType | None

_A_MOMENT = 0.0005
MIN_SETUP_SECONDS = 1.0
"""What a run needs first takes this long at least to be tried; shorter limits are raised to it."""


class Duration(enum.IntEnum):
    """Which duration `Execution.get_duration` tells. The fenced ones count from the last fence that was waited for."""

    ON_HARDWARE = 0
    IN_DRIVER = 1
    FENCED_ON_HARDWARE = 2
    FENCED_IN_DRIVER = 3


class _Progress(enum.Enum):
    OPEN = enum.auto()
    RUNNING = enum.auto()
    COMPLETED = enum.auto()


def _fence_of(position: int, event: object) -> Fence:
    if isinstance(event, Event):
        return event.fence
    if isinstance(event, Fence):
        return event
    raise InvalidArgument(f"wait_for[{position}] is {type(event).__name__}; give an Event or a Fence")


def _not_shared(pointer: object) -> int:
    raise BadState("this execution copies its arguments; run it with compute() or burst_compute()")


def setting_up(open_timeout: float | None, timeout: float | None) -> Deadline:
    """Return the deadline for what a run needs first: another burst, arrays for other shapes, a state.

    Args:
        open_timeout: Seconds that it may take, if the caller has said so.
        timeout: Seconds of the run, which begins afterwards.
    """
    if open_timeout is None and timeout is not None:
        open_timeout = max(timeout, MIN_SETUP_SECONDS)
    return Deadline.after(open_timeout)


class Execution(BoundRequest, Closing):
    """Arguments for a compiled model. Context manager.

    `Session.bind` and `Burst.bind` make one whose arguments are shared arrays: fill ``inputs``, `run`, use ``outputs``;
    nothing is copied, and ``run()`` is one call into C. Or make one from a `Compilation`, give each argument with
    `set_input`, `set_output` and their like, and run it with `compute`, `start_compute` or `burst_compute`, once, or
    again and again if it is reusable.

    Args:
        compilation: Finished.
        reusable: Whether it may run again after it has ended.
        arguments: All of them, as `Burst.bind` makes them; None: each is given with a ``set_`` method.

    Attributes:
        inputs: Shared arrays by input name. Write into them (``x.inputs["image"][:] = frame``), not over them. An input
            that is a state, or was given by a ``set_`` method, is not among them.
            What is no array of numbers is copied instead: ``x.inputs["words"] = ["a", "b"]``.
        outputs: Shared arrays by output name, valid from the end of a run until the next one begins, which writes over
            them: keep ``x.outputs["scores"].copy()``. An output whose shape only a run tells is flat bytes;
            `output_shapes` tells its dimensions. Each look at what is no array of numbers makes a new value.

    Raises:
        BadState: The compilation is not finished or has failed.
        InvalidArgument: It is no `Compilation`.

    Example:
        >>> with nnburst.Session(model) as session, session.bind() as execution:
        ...     execution.inputs["x"][:] = [[-1, 0, 1, 2]]
        ...     execution.run()
        ...     execution.outputs["y"].copy()
        array([[0., 0., 1., 2.]], dtype=float32)
    """

    def __init__(self, compilation: Compilation, *, reusable: bool = False, arguments: Arguments | None = None) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("an execution needs a Compilation")
        super().__init__()
        self.reusable = reusable
        self._prepared = compilation.prepared_model
        self._arguments = arguments = arguments or Arguments(compilation)
        self._feeds, self._copies = arguments.feeds, arguments.copies
        self._lock = ProcessLock()  # a signal handler may come while it is held
        self._progress = _Progress.OPEN
        self._fenced: Timing | None = None
        self._loop_timeout_ns = 0
        self._home: Burst | None = None
        self._pool: BurstPool | None = None
        self._keep: object = None
        self._holder = object()  # stands for this execution where its finaliser must not refer to it
        self._held: dict[ExecutionBurstController, list[Memory | Named]] = {}
        self._finalizer = weakref.finalize(self, _drop, self._held, self._holder)
        self._finalizer.atexit = False
        self._leaving: Leaving | None = None

    @property
    def inputs(self) -> Mapping[str, Any]:
        """See the class."""
        return self._arguments.shown[0]

    @property
    def outputs(self) -> Mapping[str, Any]:
        """See the class."""
        return self._arguments.shown[1]

    @property
    def compilation(self) -> Compilation:
        """The compilation; after a restart of the service, the session's new one."""
        return self._arguments.compilation

    # ---- shared arrays ---------------------------------------------------------------------------------------

    def _feed(self, inputs: object) -> bool:
        """Copy arrays into `inputs`; False if they are not a dict with exactly these names, dtypes and shapes."""
        feeds = self._feeds
        if type(inputs) is not dict or len(inputs) != len(feeds):
            return False
        for name, dtype, shape, view in feeds:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return False
            view[...] = array
        return True

    def _fits(self, arrays: Mapping[str, Array]) -> bool:
        """Whether arrays that `checked_inputs` returned have the shapes of `inputs`."""
        wired = self._wired
        return wired.keys() == arrays.keys() and all(wired[name].shape == each.shape for name, each in arrays.items())

    def _fill(self, arrays: Mapping[str, Array]) -> None:
        """Copy such arrays to `inputs`."""
        for name, array in arrays.items():
            self._wired[name][...] = array

    @property
    def _wired(self) -> dict[str, Array]:
        """The arrays of the inputs as they cross to the service."""
        return self._arguments.inputs

    def _copied(self) -> list[Array]:
        """Return copies of all outputs, of the shapes that the last run gave them."""
        if self._copies is None:
            return self._arguments.copied(self.output_shapes)
        copies = []  # a comprehension would be a call more
        for copy in self._copies:
            copies.append(copy())
        return copies

    def _needed_rooms(self, error: OutputInsufficientSize) -> dict[str, int]:
        """See `Arguments.needed_rooms`."""
        return self._arguments.needed_rooms(error)

    # ---- state -----------------------------------------------------------------------------------------------

    def reset_state(self, values: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Set the state for the next run.

        Args:
            values: Arrays by *input* name; inputs that are left out become zero (the zero point, if quantised).

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the state is as it was then.
            DeadObject: The service has ended, and with it the state.
            MissedDeadline: It takes longer than setting up may (``open_timeout`` of the session).
        """
        self._setting_up().call(self._reset_state, values)

    def _reset_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        states = self._living_states()
        states.write(self._turn, states.checked(values))

    def get_state(self) -> dict[str, Array]:
        """Return copies of the state that the next run will read, by input name; raises as `reset_state`."""
        return self._setting_up().call(self._living_states().read, self._turn)

    def _living_states(self) -> States:
        """Return the states, which die with the service."""
        self._check_not_closed()
        states, ending = self._arguments.states, self._prepared.ending
        if states.all and ending.reason:
            names = ", ".join(map(repr, states.all))
            raise ending.error(
                f"the service died ({ending.reason}), and with it the state {names}; bind another execution"
            )
        return states

    # ---- arguments, one by one -------------------------------------------------------------------------------

    def set_input(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Give an input as an array, which is copied when the execution runs; None omits it.

        Args:
            index: Position among the model's inputs.
            array: Of the operand's dtype; C-contiguous data is not required.
            dimensions: Given where the model leaves some open; default: the array's shape.

        Raises:
            InvalidArgument: The index, dtype, size or dimensions are wrong.
            BadState: The input has a value already, or the execution was started.
        """
        self._put("input", index, self._arguments.of_array("input", index, array, dimensions))

    def set_output(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Give the array that an output is copied to (C-contiguous, writable); arguments as for `set_input`.

        Where the model leaves dimensions open the array is only room: `get_output_dimensions` tells the shape.
        """
        self._put("output", index, self._arguments.of_array("output", index, array, dimensions))

    def set_input_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Let an input lie in a pool.

        Raises as `set_input`.

        Args:
            index: Of the input.
            memory: The pool, or memory of the device.
            offset, length: Bytes; both 0 for an image or a `DeviceMemory`, used whole.
            dimensions: As for `set_input`.
        """
        self._put("input", index, self._arguments.of_memory("input", index, memory, (offset, length), dimensions))

    def set_output_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Let an output lie in a pool; arguments as for `set_input_from_memory`."""
        self._put("output", index, self._arguments.of_memory("output", index, memory, (offset, length), dimensions))

    def set_measure_timing(self, measure: bool) -> None:
        """Say whether to measure durations, for `get_duration` and `timing`.

        Args:
            measure: Whether.

        Raises:
            InvalidArgument: The compilation is not for exactly one device.
            BadState: The execution was started.
        """
        with self._changing("timing"):
            self._measure = flag(measure, "measure")
            if self._burst is not None:
                self._bind(self._burst)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of a run. Raises as `set_measure_timing`.

        Args:
            seconds: None for no limit.
        """
        with self._changing("a timeout"):
            self.timeout = seconds

    def set_loop_timeout(self, seconds: float | None) -> None:
        """Limit the time that each WHILE of a run may take.

        A loop that takes longer ends the run with `MissedDeadline`. The requests of a burst do not carry it: there
        ``Burst(loop_timeout=)`` applies, or ``Session(loop_timeout=)``.

        Args:
            seconds: None for the default of 2 s; more than 15 s is cut to 15.

        Raises:
            InvalidArgument: It is no number above 0.
            BadState: The execution was started.
        """
        longest = loop_timeout_ns(seconds)
        with self._changing():
            self._loop_timeout_ns = longest

    @contextlib.contextmanager
    def _changing(self, one_device: str = "") -> Iterator[None]:
        with self._lock.lock:
            if self._progress is not _Progress.OPEN:
                raise BadState("the execution was started; make another one to change anything")
            if one_device:
                self._check_one_device(one_device)
            yield

    def _put(self, kind: str, index: int, argument: Argument) -> None:
        with self._changing():
            self._arguments.put(kind, index, argument)

    def _check_one_device(self, what: str) -> None:
        if not self._arguments.compilation._has_one_device:
            raise InvalidArgument(f"{what} needs a compilation for exactly one device")

    # ---- running ---------------------------------------------------------------------------------------------

    async def arun(self, timeout: Timeout = ...) -> None:
        """As `run`, awaited in asyncio or Trio; no thread is made.

        A task that is cancelled gives the run up: until that has landed its arrays are in use; its answer is dropped.

        Args:
            timeout: As for `run`.

        Raises:
            BadState: It is in flight, also one that was given up; or there is no event loop.
            GeneralFailure: The service takes one request at a time.
            NNBurstError: As `run`.
        """
        await event_loop.run(self, timeout)

    def submit(self, timeout: Timeout = ...) -> Future[Execution]:
        """Start a run of the shared arrays; they are the service's until the future is done.

        Its result is this execution. One thread for each burst completes futures, and ends with it. When its time is
        over, waiting behind other runs included, the future has `MissedDeadline`; the execution stays in
        flight until its late answer has landed.

        Args:
            timeout: As for `run`.

        Returns:
            A future that cannot be cancelled.

        Raises:
            BadState: It is closed, in flight, or not bound by `Session.bind` or `Burst.bind`.
            ResourceExhausted: The system has no thread for the first future.
            GeneralFailure: The service takes one request at a time.
        """
        with self._limited(timeout):
            return submit(self)

    # ---- through a burst, and elsewhere ----------------------------------------------------------------------

    def _bind(self, controller: ExecutionBurstController) -> None:
        """Bind the arguments to a burst, which holds what is shared and forgets it with this execution."""
        arguments, layout = self._arguments, self._arguments.layout
        named = dict.fromkeys(pool for request in layout.requests for pool in request.pools)
        held = self._held[controller] = [each for each in named if arguments.is_shared or each is layout.memory]  # type: ignore[misc]
        for pool in held:
            controller.hold(pool, self._holder)
        longest = answer_length(arguments.compilation.outputs)
        self._bind_to(controller, layout.requests, measure=self._measure, answer_length=longest)

    def _join(
        self, burst: Burst, pool: BurstPool | None, *, timeout: float | None, measure: bool, keep: object
    ) -> None:
        """Bind to the first burst; see `Burst.bind`."""
        self.timeout, self._keep, self._measure = timeout, keep, flag(measure, "measure")
        self._pool = pool
        self._settle_at(burst)

    def _settle_at(self, burst: Burst) -> None:
        """Bind to a burst, perhaps of a compilation that was made anew."""
        if burst.compilation is not self._arguments.compilation:
            self._held.clear()  # the dead hold nothing
            self._arguments.compilation, self._prepared = burst.compilation, burst.compilation.prepared_model
        self._home = burst
        self._bind(burst._controller)

    @property
    def _retries(self) -> int:
        """As the pool says; a run with a state is never repeated."""
        return 0 if self._pool is None or self._arguments.states.all else self._pool.retry

    @property
    def _restarts(self) -> bool:
        return self._pool is not None and self._pool.restarts_service

    def _setting_up(self) -> Deadline:
        """Return the deadline for what a run that begins now needs first."""
        return setting_up(None if self._pool is None else self._pool.open_timeout, self._allowed)

    def _again(self, number: int, deadline: Deadline) -> Deadline | None:
        """Move to a burst that is free, or to a service that has come back.

        Raises:
            DeadObject: The state was lost with the service.
            MissedDeadline: There is none in time, or a run that was given up takes longer than this one may.
        """
        begin = time.monotonic_ns()
        moved = self._setting_up().call(self._move, number)
        if moved == -errno.EAGAIN:  # a run that was given up comes first, on its burst
            if deadline.left() == 0:
                raise MissedDeadline(f"not started {self._in_time}: the run before, which was given up, has not ended")
            time.sleep(_A_MOMENT)
            return deadline
        return None if moved is None else deadline.postponed(begin)

    def _move(self, number: int) -> int | None:
        """Move to another burst: 0, or -EAGAIN if it has to stay for the moment, None if there is no other."""
        pointer, here = self._pointer, self._home
        if self._pool is None or here is None or self._leaving is not None:
            return None
        burst = self._pool.replacement(here, died=number not in (errno.EBUSY, errno.ESTALE))
        if burst is None or (burst is here and number == errno.EBUSY):  # no longer
            return None if burst is None else 0
        if burst.compilation is not self.compilation:
            self._living_states()
        with self._lock.lock:
            if self._pointer is not pointer:  # another thread has moved it
                return 0
            left = lib.nnb_execution_leave(pointer)
            if left == 0:
                try:
                    self._settle_at(burst)
                except BaseException:
                    lib.nnb_execution_return(pointer)
                    raise
        busy = {errno.EALREADY: BadState("the execution is running; bind one for each thread")}
        return left if left == -errno.EAGAIN else check(left, "execution", busy)

    # ---- without a burst, or a burst for each run ------------------------------------------------------------

    def compute(self, timeout: Timeout = ...) -> None:
        """Run without a burst and wait for the end.

        Args:
            timeout: Seconds that this run may take; None for no limit. By default those of `set_timeout`.

        Raises:
            InvalidArgument: An argument is not set, or the device refuses the request; a timeout without a compilation
                for exactly one device.
            BadState: It is running, or has run and is not reusable.
            NNBurstError: The execution failed; the status says how.
        """
        self._finish(self._begin(timeout), self._without_burst, timeout)

    def start_compute(self, timeout: Timeout = ...) -> Event:
        """Run without a burst, in the background. Raises as `compute`, the outcome comes with `Event.wait`.

        Args:
            timeout: As for `compute`.

        Returns:
            What the run signals when it has ended.
        """
        before = self._begin(timeout)
        try:
            return Event.start(lambda: self._finish(before, self._without_burst, timeout))
        except ResourceExhausted:
            self._progress = before
            raise

    def start_compute_with_dependencies(
        self,
        wait_for: Iterable[Event | Fence] = (),
        *,
        duration: float | None = None,
        timeout: Timeout = ...,
    ) -> Event:
        """Have the service run this once everything in `wait_for` is over, and return at once.

        The service waits, not this process: the event of one execution may be given to another one, of another model
        or service, before either has run. An output that the next one reads lies in a `Memory` or `DeviceMemory`; what
        was set as an array is copied now (inputs) and by `Event.wait` (outputs).

        Args:
            wait_for: What must be over first. If something of it fails, so does this.
            duration: Seconds that the run may take once all of it is over; None for no limit.
            timeout: As for `compute`; it counts from now, the waiting included.

        Returns:
            The end. `Event.wait` has to be called before this execution can be used again or asked for results.

        Raises:
            InvalidArgument: An argument is not set; an output has open dimensions; something in `wait_for` is no event,
                or has failed; a duration without a compilation for exactly one device; or the device refuses the
                request.
            BadState: As `compute`.
            ResourceExhausted: The service has no thread for it, or its quota is used up.
            MissedDeadline: The timeout is 0.
        """
        if not isinstance(wait_for, Iterable):
            raise InvalidArgument(f"wait_for is {type(wait_for).__name__}; give events in a list")
        fences = [_fence_of(position, event) for position, event in enumerate(wait_for)]
        duration_ns = 0
        if duration is not None:
            self._check_one_device("a duration")
            duration_ns = limit_ns(duration)
        self._arguments.check_outputs_are_known()
        before = self._begin(timeout)
        with self._limited(timeout):
            options = self._options()
        with contextlib.ExitStack() as running:
            running.enter_context(self._running(before))
            request = self._arguments.request(self._turn)
            check_open(request)
            run = self._prepared.execute_fenced(request, fences, options, duration_ns)
            self._arguments.note_outputs(())  # what depends on them may be launched
            ending = running.pop_all()
        return Event(run.fence, partial(self._settle_fenced, run, ending))

    def burst_compute(self, burst: Burst, timeout: Timeout = ...) -> None:
        """Run through a burst and wait for the end.

        Args:
            burst: Of this compilation.
            timeout: As for `compute`.

        Raises:
            InvalidArgument: No burst, or one of another compilation; an argument is not set.
            BadState: The burst is in use, or as `compute`.
            NNBurstError: The execution failed; the status says how.
        """
        from .run.burst import Burst as AnyBurst  # it imports this module

        if not isinstance(burst, AnyBurst):
            raise InvalidArgument("burst_compute needs a Burst")
        if burst.compilation is not self._arguments.compilation:
            raise InvalidArgument("the burst belongs to another compilation")

        def run() -> None:
            self._arguments.note_burst(burst._controller)
            self._bind(burst._controller)  # each time: the burst may have been told to free a memory
            self.run()

        self._finish(self._begin(timeout), run, timeout)

    def _settle_fenced(self, run: FencedExecution, ending: contextlib.ExitStack) -> None:
        with ending:
            info = run.info()
            if info.status is ErrorStatus.NONE:
                self._fenced = info.fenced
                status = self._ran_elsewhere((info.status, (), info.launched))
            else:
                status = self._ran_elsewhere(Failure(info.status, info.reason))
            self._check_ended_well(status)  # no other device: what depends on it has failed with it

    def _begin(self, timeout: Timeout) -> _Progress:
        """Claim the execution for one run; return its former progress."""
        if timeout is not ...:
            checked_timeout(timeout)
            self._check_one_device("a timeout")
        with self._lock.lock:
            self._check_not_closed()
            if self._progress is _Progress.RUNNING:
                raise BadState("the execution is running")
            if self._progress is _Progress.COMPLETED and not self.reusable:
                raise BadState("the execution has run; make another one, or make it reusable")
            self._arguments.check_complete()
            before, self._progress = self._progress, _Progress.RUNNING
            return before

    def _finish(self, before: _Progress, run: Callable[[], None], timeout: Timeout) -> None:
        with self._running(before), self._limited(timeout):
            run()

    @contextlib.contextmanager
    def _running(self, before: _Progress) -> Iterator[None]:
        """Copy the inputs in, run what is inside, copy the outputs out."""
        after, arguments = _Progress.COMPLETED, self._arguments
        self._elsewhere = self._fenced = None
        try:
            arguments.copy_in()
            try:
                yield
                shapes = self.output_shapes
            except BadState:  # it has not run
                after = before
                raise
            except BaseException as error:
                if not isinstance(error, InvalidArgument):  # that is refused before anything is touched
                    arguments.note_outputs(None)
                raise
            arguments.note_outputs(shapes)
            arguments.copy_out()
        finally:
            if not arguments.is_shared:
                self._refuse(_not_shared)
                memory = arguments.drop_layout()
                _drop(self._held, self._holder, ExecutionBurstController.release)
                if memory is not None:
                    memory.close()
            self._progress = after

    def _without_burst(self) -> None:
        request = self._arguments.request(self._turn)
        check_open(request)
        options = self._options()
        status = self._ran_elsewhere(self._prepared.execute_synchronously(request, options))
        if status:
            self._settle(status)

    def _options(self) -> RunOptions:
        """Return those of a run without a burst, which ends by a deadline; None: it begins now."""
        measure = MeasureTiming.YES if self._measure else MeasureTiming.NO
        return RunOptions(measure, Deadline.after(self._allowed).at_ns, self._loop_timeout_ns)

    # ---- results ---------------------------------------------------------------------------------------------

    @property
    def result(self) -> ExecutionResult:
        """(status, output shapes, timing) of the last run. Not to be read while another thread runs it.

        Raises:
            BadState: There was none.
            GeneralFailure: The service told shapes that contradict the model or the request.
        """
        result: ExecutionResult = super().result
        if result[1]:
            self._arguments.check_shapes(result[1])
        return result

    def _completed(self) -> ExecutionResult:
        with self._lock.lock:
            if self._progress is _Progress.RUNNING:
                raise BadState("the execution has not ended")
            return self.result

    def get_output_dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of an output after a run.

        Args:
            index: Of the output.

        Raises:
            BadState: No run has ended, or it failed otherwise than for lack of room.
            InvalidArgument: No such output, or it is a scalar.
            OutputInsufficientSize: Its region was too small; ``output_shapes`` has the needed dimensions.
        """
        status, shapes, _ = self._completed()
        operand = self._arguments.operand("output", index)
        if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
            raise BadState(f"the execution ended with {status.name}; its outputs have no shape")
        if operand_info(operand.type).is_scalar:
            raise InvalidArgument(f"output {index} is a scalar")
        shape = shapes[index] if shapes else OutputShape(self._arguments.known_dimensions("output", index))
        if not shape.is_sufficient:
            raise OutputInsufficientSize(f"output {index} needs shape {shape.dimensions}", output_shapes=shapes)
        return shape.dimensions

    def get_output_rank(self, index: int) -> int:
        """Return the number of dimensions of an output after a run; raises as `get_output_dimensions`.

        Args:
            index: Of the output.
        """
        return len(self.get_output_dimensions(index))

    def get_duration(self, code: Duration) -> int | None:
        """Return a duration of the last run in nanoseconds, None if the device does not know it.

        Args:
            code: Which: on the device, in the driver, and from when.

        Raises:
            InvalidArgument: Unknown code.
            BadState: No run has ended well, or timing was not asked for.
        """
        which = member(Duration, code, "duration")
        status, _, timing = self._completed()
        if status is not ErrorStatus.NONE or not self._measure:
            raise BadState("no duration: the execution failed, or timing was not asked for")
        if which in (Duration.FENCED_ON_HARDWARE, Duration.FENCED_IN_DRIVER) and self._fenced is not None:
            timing = self._fenced
        on_device = which in (Duration.ON_HARDWARE, Duration.FENCED_ON_HARDWARE)
        micros = timing.time_on_device if on_device else timing.time_in_driver
        return None if micros is None else micros * 1000

    # ---- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Execution:
        self._check_not_closed()
        return self

    def _check_not_closed(self) -> None:
        if not self._finalizer.alive:
            _closed(None)

    def close(self) -> None:
        """Give the memory and the state back on both sides; arrays that you still hold stay readable. Idempotent."""
        self._end(wait=True)

    def forget(self) -> None:
        """As `close`, but do not wait for the service."""
        self._end(wait=False)

    def _end(self, *, wait: bool) -> None:
        self._refuse(_closed)
        if self._leaving is None:
            held = [(controller, pool) for controller, pools in self._held.items() for pool in pools]
            own = self._arguments.memory
            self._leaving = Leaving(
                *(partial(controller.release, pool, self._holder, wait=wait) for controller, pool in held),
                *(() if own is None else (own.close,)),
                self._arguments.states.close,
            )
        self._finalizer.detach()
        self._leaving()

    def __repr__(self) -> str:
        arguments = "shared arrays" if self._arguments.is_shared else "arguments one by one"
        return f"<Execution of {described(self.compilation)}, {'closed' if self._leaving else arguments}>"


def _drop(
    held: dict[ExecutionBurstController, list[Memory | Named]],
    holder: object,
    release: Callable[
        [ExecutionBurstController, Memory | Named, object], object
    ] = ExecutionBurstController.release_soon,
) -> None:
    """For an execution that was not closed; buffers go with the last reference to them."""
    while held:
        controller, pools = held.popitem()
        for pool in pools:
            release(controller, pool, holder)


def _closed(pointer: object) -> int:
    raise BadState("the execution is closed; make another one")
