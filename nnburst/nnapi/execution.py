"""NNAPI's execution, with arguments set one by one."""

from __future__ import annotations

import contextlib
import enum
import math
from collections.abc import Iterable, Iterator, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from .._core.deadline import Deadline, check_timeout, limit_ns
from .._core.errno import as_int, flag, is_real, member
from .._core.leaving import Closing, OneProcess, process_lock
from ..burst.client.request import check_result
from ..burst.polling import loop_timeout_ns
from ..devices.fence import Fence
from ..devices.fenced import FencedExecution
from ..errors import BadState, ErrorStatus, InvalidArgument, OutputInsufficientSize, OutputShape, ResourceExhausted
from ..memory.memory import Memory
from ..memory.staging import check_open
from ..model.dimensions import combine_dimensions, is_fully_specified
from ..model.operand_types import operand_info, operand_nbytes
from ..model.running import ExecutionResult, Failure, RunOptions, consistent_result, reason_of
from ..model.types import NO_TIMING, Array, MeasureTiming, OperandDesc, Request, Timing
from ..runtime.compile.compilation import Compilation
from ..runtime.display import describe
from ..runtime.request.arguments import UINT32, Argument, check_shapes, lay_out, requests_for
from ..runtime.run.burst import Burst
from .device_memory import DeviceMemory
from .event import Event

if TYPE_CHECKING:
    Timeout = float | EllipsisType | None


class Duration(enum.IntEnum):
    """Durations for `Execution.get_duration`. A fenced duration begins when the last fence is signalled."""

    ON_HARDWARE = 0
    IN_DRIVER = 1
    FENCED_ON_HARDWARE = 2
    FENCED_IN_DRIVER = 3


class _Given(Argument, frozen=True):
    """An argument from the caller.

    Attributes:
        array: The caller's array, copied before a run (input) or after it (output).
        device_memory: The device memory that contains the argument, if any.
    """

    array: Array | None = None
    device_memory: DeviceMemory | None = None

    @property
    def placed(self) -> Argument:
        """The argument, located in the present pool of its memory. Raises `BadState` if the memory is closed."""
        if self.device_memory is None:
            return self
        pool = self.device_memory.pool
        return replace(self, memories=(pool,), length=pool.size if isinstance(pool, Memory) else 0)


class Execution(OneProcess, Closing):
    """An execution of a compiled model, with one ``set_`` call for each argument. Context manager.

    `compute`, `start_compute`, `start_compute_with_dependencies` and `burst_compute` run the execution. Each run copies
    input arrays to memory that the service can access, and outputs from there to the output arrays.

    Args:
        compilation: A finished compilation.
        reusable: True to allow several runs, one after another.

    Raises:
        BadState: The compilation is not finished or has failed.
        InvalidArgument: `compilation` is not a `Compilation`.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     execution, y = nnburst.nnapi.Execution(compilation), np.empty((1, 4), np.float32)
        ...     execution.set_input(0, np.array([[-1, 0, 1, 2]], np.float32))
        ...     execution.set_output(0, y)
        ...     execution.compute()
        >>> y
        array([[0., 0., 1., 2.]], dtype=float32)
    """

    def __init__(self, compilation: Compilation, *, reusable: bool = False) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("an execution needs a Compilation")
        self.compilation = compilation
        self.reusable = reusable
        self._prepared = compilation.prepared_model
        main = compilation.model.main
        self._operands = {
            "input": [main.operands[i] for i in main.input_indexes],
            "output": [main.operands[i] for i in main.output_indexes],
        }
        self._given: dict[str, dict[int, _Given]] = {"input": {}, "output": {}}
        self._measure = False
        self._timeout: float | None = None
        self._loop_timeout_ns = 0
        self._lock = process_lock()
        self._is_running = self._has_run = self._closed = False
        self._result: ExecutionResult | None = None
        self._fenced = NO_TIMING

    # ---- arguments, one by one -------------------------------------------------------------------------------

    def set_input(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Set an input to an array, which each run copies.

        Args:
            index: Position among the model's inputs.
            array: Array of the operand's dtype, C-contiguous or not; None omits the input.
            dimensions: Dimensions of the input if the model leaves some open; by default, the array's shape.

        Raises:
            InvalidArgument: The index, dtype, size or dimensions are wrong.
            BadState: The input is set already, or the execution was started.
        """
        self._set_array("input", index, array, dimensions)

    def set_output(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Set the array for an output. The array must be C-contiguous and writable. Other arguments as for `set_input`.

        For an output with open dimensions, give a large enough array. After the run, `get_output_dimensions` returns
        the dimensions.
        """
        self._set_array("output", index, array, dimensions)

    def set_input_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Place an input in a memory pool.

        Raises the same errors as `set_input`.

        Args:
            index: See `set_input`.
            memory: The pool or device memory.
            offset, length: Region in bytes; both 0 for a whole image or `DeviceMemory`.
            dimensions: See `set_input`.
        """
        self._set_memory("input", index, memory, (offset, length), dimensions)

    def set_output_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Place an output in a memory pool; arguments as for `set_input_from_memory`."""
        self._set_memory("output", index, memory, (offset, length), dimensions)

    def set_measure_timing(self, measure: bool) -> None:
        """Set whether runs measure durations for `get_duration`.

        Args:
            measure: True to measure.

        Raises:
            InvalidArgument: The compilation is not for exactly one device.
            BadState: The execution was started.
        """
        with self._change():
            self._check_one_device("timing")
            self._measure = flag(measure, "measure")

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of a run. Raises the same errors as `set_measure_timing`.

        Args:
            seconds: Longest duration of a run; None for no limit.
        """
        with self._change():
            self._check_one_device("a timeout")
            self._timeout = check_timeout(seconds)

    def set_loop_timeout(self, seconds: float | None) -> None:
        """Limit the time of each WHILE loop in a run.

        A longer loop ends the run with `MissedDeadline`. For runs in bursts, use ``Burst(loop_timeout=)``.

        Args:
            seconds: Longest duration of a loop, at most 15 s; None for 2 s.

        Raises:
            InvalidArgument: `seconds` is not above 0.
            BadState: The execution was started.
        """
        longest = loop_timeout_ns(seconds)
        with self._change():
            self._loop_timeout_ns = longest

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        with self._lock:
            if self._is_running or self._has_run:
                raise BadState("the execution was started; make another one to change anything")
            yield

    def _check_one_device(self, what: str) -> None:
        if not self.compilation._has_one_device:
            raise InvalidArgument(f"{what} needs a compilation for exactly one device")

    def _operand(self, kind: str, index: int) -> OperandDesc:
        operands = self._operands[kind]
        if not is_real(index) or not 0 <= index < len(operands):
            raise InvalidArgument(f"{kind} {index!r}: the model has {len(operands)} {kind}s")
        return operands[index]

    def _set_argument(self, kind: str, index: int, argument: _Given) -> None:
        with self._change():
            if index in self._given[kind]:
                raise BadState(f"{kind} {index} has a value already; make another execution")
            self._given[kind][index] = argument

    def _set_array(self, kind: str, index: int, array: Array | None, dimensions: Sequence[int] | None) -> None:
        operand, what = self._operand(kind, index), f"{kind} {index}"
        if array is None:
            self._set_argument(kind, index, _Given())
            return
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{what}: give a NumPy array, not {type(array).__name__}")
        if kind == "output" and not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidArgument(f"{what}: the array must be C-contiguous and writable")
        info = operand_info(operand.type)
        if array.dtype != info.dtype:
            raise InvalidArgument(f"{what} is {info.dtype}, got {array.dtype}; convert it with .astype('{info.dtype}')")
        is_open = not is_fully_specified(operand.dimensions) and (bool(operand.dimensions) or not info.is_scalar)
        sizes: tuple[int, ...] = array.shape if dimensions is None and kind == "input" and is_open else ()
        if dimensions is not None:
            sizes = _sizes(what, dimensions)
        if kind == "input" and 0 in array.shape and self.compilation.inputs[index].may_be_empty:
            _combine(what, operand, sizes)
            self._set_argument(kind, index, _Given(dimensions=sizes))
            return
        _check_length(kind, what, operand, sizes, array.nbytes)
        self._set_argument(kind, index, _Given(room=array.nbytes, length=array.nbytes, dimensions=sizes, array=array))

    def _set_memory(
        self, kind: str, index: int, memory: Memory | DeviceMemory, region: tuple[int, int], dimensions: Sequence[int]
    ) -> None:
        operand, what = self._operand(kind, index), f"{kind} {index}"
        sizes = _sizes(what, dimensions)
        offset, length = (as_int(n, f"{what}: {name}") for n, name in zip(region, ("offset", "length"), strict=True))
        if isinstance(memory, DeviceMemory):
            memory._check_use(self.compilation, kind, index, (offset, length), _combine(what, operand, sizes))
            self._set_argument(kind, index, _Given(dimensions=sizes, device_memory=memory))
            return
        if not isinstance(memory, Memory):
            raise InvalidArgument(f"{what}: give a Memory, not {type(memory).__name__}")
        if memory.image is not None:
            if offset or length:
                raise InvalidArgument(f"{what}: an image is used whole; offset and length must be 0")
        elif offset < 0 or length <= 0 or offset + length > memory.size:
            raise InvalidArgument(
                f"{what}: bytes {offset}..{offset + length} of a memory with {memory.size}; give a region in it"
            )
        nbytes = length if memory.image is None else memory.image.tight_size
        _check_length(kind, what, operand, sizes, nbytes)
        self._set_argument(kind, index, _Given(memories=(memory,), offset=offset, length=length, dimensions=sizes))

    # ---- running ---------------------------------------------------------------------------------------------

    def compute(self, timeout: Timeout = ...) -> None:
        """Run the model without a burst and wait for the end.

        Args:
            timeout: Seconds until the run must end; None for no limit. By default, the limit of `set_timeout`.

        Raises:
            InvalidArgument: An argument is not set; the device refuses the request; or a timeout is given but the
                compilation is not for exactly one device.
            BadState: The execution is running, or has run and is not reusable.
            NNBurstError: The execution failed; see the status.
        """
        self._compute(self._begin(timeout))

    def start_compute(self, timeout: Timeout = ...) -> Event:
        """Start a run without a burst, and return at once.

        Raises errors of `compute` that occur before the run begins; `Event.wait` raises errors of the run.

        Args:
            timeout: See `compute`.

        Returns:
            The event of the run's end.
        """
        limit = self._begin(timeout)
        try:
            return Event.start(lambda: self._compute(limit))
        except (BadState, ResourceExhausted):
            self._is_running = False
            raise

    def start_compute_with_dependencies(
        self, wait_for: Iterable[Event | Fence] = (), *, duration: float | None = None, timeout: Timeout = ...
    ) -> Event:
        """Start a run that begins when all events in `wait_for` have ended, and return at once.

        The service waits for the events, which can come from executions of any model or service. Pass data between
        executions in a `Memory` or `DeviceMemory`: this call copies input arrays, and only `Event.wait` copies outputs
        to arrays.

        Args:
            wait_for: Events to wait for. If one fails, this execution fails.
            duration: Longest duration of the run in seconds, after the last event; None for no limit.
            timeout: See `compute`. It includes the wait for the events.

        Returns:
            The event of the run's end. Call `Event.wait` before you reuse the execution or read results.

        Raises:
            InvalidArgument: An argument is not set; an output has open dimensions; an item of `wait_for` is not an
                event, or has failed; `duration` is given but the compilation is not for exactly one device; or the
                device refuses the request.
            BadState: See `compute`.
            ResourceExhausted: The service has no thread for the run, or the client's quota is exhausted.
            MissedDeadline: The timeout is 0.
        """
        if not isinstance(wait_for, Iterable):
            raise InvalidArgument(f"wait_for is {type(wait_for).__name__}; give events in a list")
        fences = [_fence_of(position, event) for position, event in enumerate(wait_for)]
        if duration is not None:
            self._check_one_device("a duration")
        duration_ns = limit_ns(duration)
        for index, operand in enumerate(self._operands["output"]):
            if not operand.is_scalar and not is_fully_specified(operand.dimensions):
                raise InvalidArgument(
                    f"output {index} has dimensions {list(operand.dimensions)}: an execution that waits for fences "
                    "needs a model that says them; use compute()"
                )
        limit = self._begin(timeout)
        with contextlib.ExitStack() as running:
            request, _ = running.enter_context(self._exchange_arguments())
            run = self._prepared.execute_fenced(request, fences, self._options(limit), duration_ns)
            self._note_outputs(())  # Executions that need the outputs can start now.
            ending = running.pop_all()
        return Event(run.fence, lambda: self._finish_fenced(run, ending, limit))

    def burst_compute(self, burst: Burst, timeout: Timeout = ...) -> None:
        """Run the model through a burst and wait for the end.

        Args:
            burst: A burst of this compilation.
            timeout: See `compute`.

        Raises:
            InvalidArgument: `burst` is not a burst of this compilation; an argument is not set.
            BadState: The burst is in use. See also `compute`.
            NNBurstError: The execution failed; see the status.
        """
        if not isinstance(burst, Burst):
            raise InvalidArgument("burst_compute needs a Burst")
        if burst.compilation is not self.compilation:
            raise InvalidArgument("the burst belongs to another compilation")
        limit, controller = self._begin(timeout), burst.controller
        with self._exchange_arguments() as (request, own):
            for kind in self._given:
                for memory in self._device_memories(kind).values():
                    memory._note_burst(controller)
            try:
                bound = controller.bind(request, measure=self._measure)
                bound.timeout = limit
                self._set_result(bound.execute(), limit)
            finally:
                if own is not None:
                    controller.forget(own)

    def _begin(self, timeout: Timeout) -> float | None:
        """Mark the execution as running. Return the run's timeout in seconds."""
        limit = self._timeout
        if timeout is not ...:
            limit = check_timeout(timeout)
            self._check_one_device("a timeout")
        with self._lock:
            self._check_not_closed()
            if self._is_running:
                raise BadState("the execution is running")
            if self._has_run and not self.reusable:
                raise BadState("the execution has run; make another one, or make it reusable")
            for index, node in enumerate(self.compilation.inputs):
                if node.is_optional:
                    self._given["input"].setdefault(index, _Given())
            for kind, operands in self._operands.items():
                if missing := sorted(set(range(len(operands))) - self._given[kind].keys()):
                    raise InvalidArgument(f"{kind}s {missing} are not set; None omits an optional one")
            self._is_running, self._result = True, None
        return limit

    @contextlib.contextmanager
    def _exchange_arguments(self) -> Iterator[tuple[Request, Memory | None]]:
        """Lay out the arguments and copy the inputs; copy the outputs after the ``with`` block.

        Yields:
            The request, and the memory made for the arrays.
        """
        layout, has_run = None, True
        inputs, outputs = self._sorted_arguments("input"), self._sorted_arguments("output")
        try:
            for index, argument in enumerate(inputs):
                if argument.device_memory is not None:
                    argument.device_memory._check_readable(index, self._known_dimensions("input", index))
            placed = [each.placed for each in (*inputs, *outputs)]
            layout = lay_out(placed)
            (request,) = requests_for(layout, placed, len(inputs))
            check_open(request)
            for argument, view in zip(inputs, layout.views, strict=False):
                if argument.array is not None and view is not None:
                    view[:] = np.ascontiguousarray(argument.array).reshape(-1).view(np.uint8)
            yield request, layout.memory
            assert self._result is not None
            self._note_outputs(self._result[1])
            for argument, view in zip(outputs, layout.views[len(inputs) :], strict=True):
                if argument.array is not None and view is not None:
                    argument.array.reshape(-1).view(np.uint8)[:] = view
        except BadState:
            has_run = self._has_run
            raise
        except BaseException as error:
            if layout is not None and not isinstance(error, InvalidArgument):  # A refused request did not run.
                self._note_outputs(None)
            raise
        finally:
            if layout is not None and layout.memory is not None:
                layout.memory.close()
            self._has_run, self._is_running = has_run, False

    def _compute(self, limit: float | None) -> None:
        with self._exchange_arguments() as (request, _):
            options = self._options(limit)
            self._set_result(self._prepared.execute_synchronously(request, options), limit)

    def _finish_fenced(self, run: FencedExecution, ending: contextlib.ExitStack, limit: float | None) -> None:
        with ending:
            info = run.info()
            if info.status is ErrorStatus.NONE:
                self._set_result((info.status, (), info.launched), limit, info.fenced)
            else:
                self._set_result(Failure(info.status, info.reason), limit)

    def _options(self, limit: float | None) -> RunOptions:
        """Return the options of a run without a burst. The run's timeout of `limit` seconds begins now."""
        measure = MeasureTiming.YES if self._measure else MeasureTiming.NO
        return RunOptions(measure, Deadline.after(limit).at_ns, self._loop_timeout_ns)

    def _set_result(self, result: ExecutionResult, limit: float | None, fenced: Timing | None = None) -> None:
        result = consistent_result(*result, reason_of(result))
        if result[1]:
            check_shapes(self.compilation.outputs, self._sorted_arguments("output"), result[1])
        self._result, self._fenced = result, fenced or result[2]
        check_result(result, limit)

    def _sorted_arguments(self, kind: str) -> list[_Given]:
        return [self._given[kind][i] for i in range(len(self._operands[kind]))]

    def _device_memories(self, kind: str) -> dict[int, DeviceMemory]:
        found = ((i, each.device_memory) for i, each in self._given[kind].items())
        return {i: memory for i, memory in found if memory is not None}

    def _note_outputs(self, shapes: Sequence[OutputShape] | None) -> None:
        """Update the dimensions of output memories. After a failure (None), the memories have no contents."""
        for index, memory in self._device_memories("output").items():
            known = shapes and shapes[index].dimensions
            memory._record_write(None if shapes is None else known or self._known_dimensions("output", index))

    def _known_dimensions(self, kind: str, index: int) -> tuple[int, ...]:
        return combine_dimensions(self._operand(kind, index).dimensions, self._given[kind][index].dimensions)

    # ---- results ---------------------------------------------------------------------------------------------

    def _completed(self) -> ExecutionResult:
        with self._lock:
            if self._is_running:
                raise BadState("the execution has not ended")
            if self._result is None:
                raise BadState("the execution has not run yet, or its last run gave no answer")
            return self._result

    def get_output_dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of an output after a run.

        Args:
            index: Position among the model's outputs.

        Raises:
            BadState: No run has ended, or the last run failed with another error than `OutputInsufficientSize`.
            InvalidArgument: The index is wrong, or the output is a scalar.
            OutputInsufficientSize: The output's region was too small; see ``output_shapes`` for the dimensions.
        """
        status, shapes, _ = self._completed()
        operand = self._operand("output", index)
        if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
            raise BadState(f"the execution ended with {status.name}; its outputs have no shape")
        if operand_info(operand.type).is_scalar:
            raise InvalidArgument(f"output {index} is a scalar")
        shape = shapes[index] if shapes else OutputShape(self._known_dimensions("output", index))
        if not shape.is_sufficient:
            raise OutputInsufficientSize(f"output {index} needs shape {shape.dimensions}", output_shapes=shapes)
        return shape.dimensions

    def get_output_rank(self, index: int) -> int:
        """Return the number of dimensions of an output after a run.

        Raises the same errors as `get_output_dimensions`.

        Args:
            index: See `get_output_dimensions`.
        """
        return len(self.get_output_dimensions(index))

    def get_duration(self, code: Duration) -> int | None:
        """Return a duration of the last run in nanoseconds; None if the device did not measure it.

        Args:
            code: The duration: on the device or in the driver, with or without the wait for fences.

        Raises:
            InvalidArgument: The code is unknown.
            BadState: No run has succeeded, or timing was not requested.
        """
        which = member(Duration, code, "duration")
        status, _, timing = self._completed()
        if status is not ErrorStatus.NONE or not self._measure:
            raise BadState("no duration: the execution failed, or timing was not asked for")
        if which in (Duration.FENCED_ON_HARDWARE, Duration.FENCED_IN_DRIVER):
            timing = self._fenced
        on_device = which in (Duration.ON_HARDWARE, Duration.FENCED_ON_HARDWARE)
        micros = timing.time_on_device if on_device else timing.time_in_driver
        return None if micros is None else micros * 1000

    # ---- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Execution:
        self._check_not_closed()
        return self

    def _check_not_closed(self) -> None:
        if self._closed:
            raise BadState("the execution is closed; make another one")

    def close(self) -> None:
        """Refuse further runs. Idempotent."""
        self._closed = True

    def __repr__(self) -> str:
        return f"<Execution of {describe(self.compilation)}{', closed' * self._closed}>"


def _fence_of(position: int, event: object) -> Fence:
    if isinstance(event, Event):
        return event.fence
    if isinstance(event, Fence):
        return event
    raise InvalidArgument(f"wait_for[{position}] is {type(event).__name__}; give an Event or a Fence")


def _sizes(what: str, dimensions: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(dimensions, Iterable):
        raise InvalidArgument(f"{what}: dimensions={dimensions!r}; give a list of sizes")
    return tuple(as_int(size, f"{what}: a dimension") for size in dimensions)


def _combine(what: str, operand: OperandDesc, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if operand.is_scalar and sizes:
        raise InvalidArgument(f"{what}: a scalar has no dimensions")
    if any(not 0 <= size <= UINT32 for size in sizes):
        raise InvalidArgument(f"{what}: dimensions {list(sizes)} do not fit in 32 bits")
    try:
        combined = combine_dimensions(operand.dimensions, sizes)
    except InvalidArgument as error:
        raise InvalidArgument(f"{what}: {error}") from None
    if math.prod(size for size in combined if size) * operand_info(operand.type).element_size > UINT32:
        raise InvalidArgument(f"{what}: dimensions {list(combined)} are larger than a tensor can be")
    return combined


def _check_length(kind: str, what: str, operand: OperandDesc, sizes: tuple[int, ...], nbytes: int) -> None:
    combined = _combine(what, operand, sizes)
    known = operand.is_scalar or is_fully_specified(combined)
    if kind == "input" and not known:
        raise InvalidArgument(f"{what}: dimensions {combined} are open; give them with dimensions=")
    if known and operand_nbytes(operand.type, combined) != nbytes:
        need = operand_nbytes(operand.type, combined)
        raise InvalidArgument(f"{what}: {nbytes} bytes, but shape {combined} takes {need}")
