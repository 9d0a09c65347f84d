"""Runs of an execution whose arguments are copied: without a burst, behind fences, or through a burst."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING

from ..._core.deadline import Deadline, checked_timeout, limit_ns
from ..._core.errno import member
from ..._core.leaving import ProcessLock
from ...burst import BoundRequest
from ...burst.client.client_end import ClientEnd
from ...devices import Fence, FencedExecution
from ...errors import BadState, ErrorStatus, InvalidArgument, OutputInsufficientSize, ResourceExhausted
from ...memory import Memory, check_open
from ...model import ExecutionResult, Failure, Named, OutputShape, RunOptions, Timing, operand_info
from ..compile.compilation import Compilation
from ..request.arguments import Arguments
from .event import Event
from .route import OpenBurst, Route

if TYPE_CHECKING:
    from ..request.layout import Argument

Timeout = float | EllipsisType | None


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


class Computation(BoundRequest):
    """What an `Execution` is beside its face: open as long as arguments are given, then running or completed.

    Args:
        compilation: Finished.
        reusable: Whether it may run again after it has ended.
    """

    reusable: bool
    _route: Route  # made with it

    def __init__(self, compilation: Compilation, reusable: bool) -> None:
        super().__init__()
        self.reusable = reusable
        self._lock = ProcessLock()  # a signal handler may come while it is held
        self._progress = _Progress.OPEN
        self._fenced: Timing | None = None
        self._arguments = Arguments(compilation)
        self._route = Route(self._arguments, self._lock)

    # ---- while it is open ------------------------------------------------------------------------------------

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

    def _move(self, number: int, deadline: Deadline) -> None:
        """Move to another burst before a run, for an errno; see `Route.again`."""
        self._route.again(self, number, deadline)

    # ---- running ---------------------------------------------------------------------------------------------

    def compute(self, timeout: float | EllipsisType | None = ...) -> None:
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

    def start_compute(self, timeout: float | EllipsisType | None = ...) -> Event:
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
        timeout: float | EllipsisType | None = ...,
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
            run = self._route.prepared.execute_fenced(request, fences, options, duration_ns)
            self._arguments.note_outputs(())  # what depends on them may be launched
            ending = running.pop_all()
        return Event(run.fence, partial(self._settle_fenced, run, ending))

    def burst_compute(self, burst: OpenBurst, timeout: float | EllipsisType | None = ...) -> None:
        """Run through a burst and wait for the end.

        Args:
            burst: Of this compilation.
            timeout: As for `compute`.

        Raises:
            InvalidArgument: No burst, or one of another compilation; an argument is not set.
            BadState: The burst is in use, or as `compute`.
            NNBurstError: The execution failed; the status says how.
        """
        if isinstance(burst, BoundRequest) or not isinstance(getattr(burst, "_controller", None), ClientEnd):
            raise InvalidArgument("burst_compute needs a Burst")
        if burst.compilation is not self._arguments.compilation:
            raise InvalidArgument("the burst belongs to another compilation")

        def run() -> None:
            self._arguments.note_burst(burst)
            self._route.bind(self, burst._controller)  # each time: the burst may have been told to free a memory
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
            self._route.begun = None
            if not arguments.is_shared:
                self._refuse(_not_shared)
                self._route.forget()
            self._progress = after

    def _without_burst(self) -> None:
        request = self._arguments.request(self._turn)
        check_open(request)
        options = self._route.begun = self._options()
        status = self._ran_elsewhere(self._route.prepared.execute_synchronously(request, options))
        if status:
            self._settle(status)

    def _options(self) -> RunOptions:
        return self._route.options(self, Deadline.after(self._allowed))

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

    def _check_not_closed(self) -> None:
        if self._route.closed:
            _closed(None)

    def _end(self, give_back: Callable[[ClientEnd, Memory | Named], object]) -> None:
        self._refuse(_closed)
        self._route.end(give_back)


def _closed(pointer: object) -> int:
    raise BadState("the execution is closed; make another one")
