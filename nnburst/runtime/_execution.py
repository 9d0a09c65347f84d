"""One execution with every step in the open: arguments, timing, the ways to run (facts sheet `model.md` §5)."""

from __future__ import annotations

import enum
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core import checked_timeout, deadline_after, is_real
from ..burst import ExecutionResult, consistent_result
from ..errors import BadState, ErrorStatus, InvalidArgument, OutputInsufficientSize, ResourceExhausted, error_for
from ..memory import Memory
from ..model import (
    UINT64_MAX,
    DataLocation,
    MeasureTiming,
    Operand,
    OutputShape,
    Request,
    RequestArgument,
    combine_dimensions,
    is_fully_specified,
    operand_info,
    operand_nbytes,
)
from ._burst import Burst
from ._compilation import Compilation
from ._memory_desc import DeviceMemory

__all__ = ["Duration", "Event", "Execution"]

_ALIGNMENT = 64
_UINT32 = 2**32 - 1
Array = np.ndarray[Any, np.dtype[Any]]


class Duration(enum.IntEnum):
    """Which duration `Execution.get_duration` tells. The fenced ones equal the others where no fence was given."""

    ON_HARDWARE = 0
    IN_DRIVER = 1
    FENCED_ON_HARDWARE = 2
    FENCED_IN_DRIVER = 3


class _State(enum.Enum):
    OPEN = enum.auto()
    RUNNING = enum.auto()
    COMPLETED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Argument:
    """An array to be copied, a region of a memory, or neither: omitted."""

    array: Array | None = None
    memory: Memory | DeviceMemory | None = None
    offset: int = 0
    length: int = 0
    dimensions: tuple[int, ...] = ()


class Event:
    """The end of an execution that was started with `Execution.start_compute`."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="nnburst-compute", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # handed to whoever waits
            self._error = error

    def wait(self) -> None:
        """Wait for the end; raises what the execution raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class Execution:
    """Arguments for a compiled model, to be run once, or again and again if reusable.

    Args:
        compilation: Finished.
        reusable: Whether it may run again after it has ended.

    Raises:
        BadState: The compilation is not finished or has failed.
        InvalidArgument: It is no `Compilation`.
    """

    def __init__(self, compilation: Compilation, *, reusable: bool = False) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("an execution needs a Compilation")
        self._prepared = compilation.prepared_model
        self.compilation = compilation
        self.reusable = reusable
        main = compilation.model.main
        self._operands = {
            "input": [main.operands[i] for i in main.input_indexes],
            "output": [main.operands[i] for i in main.output_indexes],
        }
        self._arguments: dict[str, dict[int, _Argument]] = {"input": {}, "output": {}}
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._measure = False
        self._timeout: float | None = None
        self._result: ExecutionResult | None = None

    # ---- arguments -------------------------------------------------------------------------------------------

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
        self._set_array("input", index, array, dimensions)

    def set_output(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Give the array that an output is copied to (C-contiguous, writable); as `set_input`.

        Where the model leaves dimensions open the array is only room: `get_output_dimensions` tells the shape.
        """
        if isinstance(array, np.ndarray) and not (array.flags.c_contiguous and array.flags.writeable):
            raise InvalidArgument(f"output {index}: the array must be C-contiguous and writable")
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
        """Let an input lie in a pool: `length` bytes at `offset`; both 0 for an image or a `DeviceMemory`, used whole.

        Raises as `set_input`.
        """
        self._set_memory("input", index, memory, offset, length, dimensions)

    def set_output_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Let an output lie in a pool; as `set_input_from_memory`."""
        self._set_memory("output", index, memory, offset, length, dimensions)

    def _operand(self, kind: str, index: int) -> Operand:
        operands = self._operands[kind]
        if not is_real(index) or not 0 <= index < len(operands):
            raise InvalidArgument(f"{kind} {index!r}: the model has {len(operands)} {kind}s")
        return operands[index]

    def _set_array(self, kind: str, index: int, array: Array | None, dimensions: Sequence[int] | None) -> None:
        operand = self._operand(kind, index)
        if array is None:
            self._set(kind, index, _Argument())
            return
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{kind} {index}: give a NumPy array, not {type(array).__name__}")
        dtype = operand_info(operand.type).dtype
        if array.dtype != dtype:
            raise InvalidArgument(f"{kind} {index} is {dtype}, got {array.dtype}; convert it with .astype('{dtype}')")
        open_ended = not is_fully_specified(operand.dimensions) or (
            not operand.dimensions and not operand_info(operand.type).is_scalar
        )
        given: tuple[int, ...] = ()
        if dimensions is not None:
            given = tuple(dimensions)
        elif kind == "input" and open_ended:
            given = array.shape
        self._check_length(kind, index, operand, given, array.nbytes)
        self._set(kind, index, _Argument(array=array, length=array.nbytes, dimensions=given))

    def _set_memory(
        self,
        kind: str,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int,
        length: int,
        dimensions: Sequence[int],
    ) -> None:
        operand, given = self._operand(kind, index), tuple(dimensions)
        if isinstance(memory, DeviceMemory):
            combined = self._combined(kind, index, operand, given)
            memory.check_use(self.compilation, kind, index, (offset, length), combined)
        elif not isinstance(memory, Memory):
            raise InvalidArgument(f"{kind} {index}: give a Memory, not {type(memory).__name__}")
        elif memory.image is not None:
            if offset or length:
                raise InvalidArgument(f"{kind} {index}: an image is used whole; offset and length must be 0")
            self._check_length(kind, index, operand, given, memory.image.tight_size)
        else:
            if offset < 0 or length <= 0 or offset + length > memory.size:
                raise InvalidArgument(
                    f"{kind} {index}: bytes {offset}..{offset + length} of a memory with {memory.size}; "
                    "give a region in it"
                )
            self._check_length(kind, index, operand, given, length)
        self._set(kind, index, _Argument(memory=memory, offset=offset, length=length, dimensions=given))

    def _combined(self, kind: str, index: int, operand: Operand, given: tuple[int, ...]) -> tuple[int, ...]:
        if operand_info(operand.type).is_scalar and given:
            raise InvalidArgument(f"{kind} {index}: a scalar has no dimensions")
        if any(not 0 <= size <= _UINT32 for size in given):
            raise InvalidArgument(f"{kind} {index}: dimensions {list(given)} do not fit in 32 bits")
        try:
            combined = combine_dimensions(operand.dimensions, given)
        except InvalidArgument as error:
            raise InvalidArgument(f"{kind} {index}: {error}") from None
        if math.prod(size for size in combined if size) * operand_info(operand.type).element_size > _UINT32:
            raise InvalidArgument(f"{kind} {index}: dimensions {list(combined)} are larger than a tensor can be")
        return combined

    def _check_length(self, kind: str, index: int, operand: Operand, given: tuple[int, ...], nbytes: int) -> None:
        combined = self._combined(kind, index, operand, given)
        scalar = operand_info(operand.type).is_scalar
        known = scalar or (bool(combined) and is_fully_specified(combined))
        if kind == "input" and not known:
            raise InvalidArgument(f"input {index}: dimensions {combined} are open; give them with dimensions=")
        if known and operand_nbytes(operand.type, combined) != nbytes:
            need = operand_nbytes(operand.type, combined)
            raise InvalidArgument(f"{kind} {index}: {nbytes} bytes, but shape {combined} takes {need}")

    def _set(self, kind: str, index: int, argument: _Argument) -> None:
        with self._lock:
            self._check_open()
            if index in self._arguments[kind]:
                raise BadState(f"{kind} {index} has a value already; make another execution")
            self._arguments[kind][index] = argument

    def set_measure_timing(self, measure: bool) -> None:
        """Ask for durations.

        Raises:
            InvalidArgument: The compilation is not for exactly one device.
            BadState: The execution was started.
        """
        with self._lock:
            self._check_open()
            self._check_one_device("timing")
            self._measure = bool(measure)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of a run; 0 or None removes the limit. Raises as `set_measure_timing`."""
        with self._lock:
            self._check_open()
            self._check_one_device("a timeout")
            self._timeout = checked_timeout(seconds, zero=True)

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise BadState("the execution was started; make another one to change anything")

    def _check_one_device(self, what: str) -> None:
        if not self.compilation.has_one_device:
            raise InvalidArgument(f"{what} needs a compilation for exactly one device")

    # ---- running ---------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Run without a burst and wait for the end.

        Raises:
            InvalidArgument: An argument is not set, or the device refuses the request.
            BadState: It is running, or has run and is not reusable.
            NNBurstError: The execution failed; the status says how.
        """
        self._begin()
        self._finish(self._plain)

    def start_compute(self) -> Event:
        """Run without a burst, in the background. Raises as `compute`, the outcome comes with `Event.wait`."""
        self._begin()
        try:
            return Event(lambda: self._finish(self._plain))
        except RuntimeError as error:  # the system has no thread for us
            with self._lock:
                self._state = _State.OPEN
            raise ResourceExhausted(f"the execution was not started: {error}") from error

    def burst_compute(self, burst: Burst) -> None:
        """Run through a burst and wait for the end.

        Raises:
            InvalidArgument: No burst, or one of another compilation; an argument is not set.
            BadState: The burst is in use, or as `compute`.
            NNBurstError: The execution failed; the status says how.
        """
        if not isinstance(burst, Burst):
            raise InvalidArgument("burst_compute needs a Burst")
        if burst.compilation is not self.compilation:
            raise InvalidArgument("the burst belongs to another compilation")
        if burst.in_use.locked():
            raise BadState("the burst is running another execution; it runs one at a time")
        with burst.in_use:
            self._begin()
            self._finish(lambda request, staging: self._through(burst, request, staging))

    def _begin(self) -> None:
        with self._lock:
            if self._state is _State.RUNNING:
                raise BadState("the execution is running")
            if self._state is _State.COMPLETED and not self.reusable:
                raise BadState("the execution has run; make another one, or make it reusable")
            for kind, operands in self._operands.items():
                missing = sorted(set(range(len(operands))) - self._arguments[kind].keys())
                if missing:
                    raise InvalidArgument(f"{kind}s {missing} are not set; None omits an optional one")
            self._state = _State.RUNNING
            self._result = None

    def _finish(self, run: Callable[[Request, Memory | None], ExecutionResult]) -> None:
        result: ExecutionResult | None = None
        staging: Memory | None = None
        try:
            request, staging, copies = self._request()
            started = True
            try:
                result = consistent_result(*run(request, staging))
            except BadState:
                started = False
                raise
            finally:
                if started:
                    self._note_outputs(result)
            if result[0] is ErrorStatus.NONE:
                for argument, view in copies:
                    assert argument.array is not None
                    argument.array.reshape(-1).view(np.uint8)[:] = view
        finally:
            if staging is not None:
                staging.close()
            with self._lock:
                self._state = _State.COMPLETED
                self._result = result
        status, shapes, _ = result
        if status is not ErrorStatus.NONE:
            raise error_for(status, f"the execution ended with {status.name}", shapes)

    def _note_outputs(self, result: ExecutionResult | None) -> None:
        """Tell the memories of devices that were outputs what they hold now."""
        if result is not None and result[0] is ErrorStatus.INVALID_ARGUMENT:
            return  # refused before they were touched
        for index, argument in self._arguments["output"].items():
            if isinstance(argument.memory, DeviceMemory):
                if result is None or result[0] is not ErrorStatus.NONE:
                    argument.memory.written(None)
                else:
                    shapes, operand = result[1], self._operand("output", index)
                    argument.memory.written(
                        shapes[index].dimensions if shapes else self._known_dimensions(index, operand)
                    )

    def _plain(self, request: Request, staging: Memory | None) -> ExecutionResult:
        deadline = deadline_after(self._timeout)
        flag = MeasureTiming.YES if self._measure else MeasureTiming.NO
        return self._prepared.execute_synchronously(request, flag, deadline)

    def _through(self, burst: Burst, request: Request, staging: Memory | None) -> ExecutionResult:
        for memory in self._given_memories():
            if isinstance(memory, DeviceMemory):
                memory.seen_by(burst)
        try:
            return burst.controller.compute(request, measure=self._measure, timeout=self._timeout)
        finally:
            if staging is not None:  # not waited for: the deadline has perhaps passed
                burst.controller.forget(staging)

    def _given_memories(self) -> list[Memory | DeviceMemory]:
        every = [a for arguments in self._arguments.values() for a in arguments.values()]
        return list(dict.fromkeys(a.memory for a in every if a.memory is not None))

    def _request(self) -> tuple[Request, Memory | None, list[tuple[_Argument, Array]]]:
        """Stage the arrays in one pool of our own; memories that were given are used where they are.

        Raises:
            GeneralFailure: An input's memory of a device has no contents, or other dimensions.
            BadState: A memory is closed.
        """
        for index, argument in self._arguments["input"].items():
            if isinstance(argument.memory, DeviceMemory):
                operand = self._operand("input", index)
                argument.memory.check_readable(index, combine_dimensions(operand.dimensions, argument.dimensions))
        total = 0
        offsets: dict[int, int] = {}
        for arguments in self._arguments.values():
            for argument in arguments.values():
                if argument.array is not None:
                    offsets[id(argument)] = total
                    total += -(-max(argument.length, 1) // _ALIGNMENT) * _ALIGNMENT
        staging = Memory.ashmem(total) if total else None
        given = self._given_memories()
        first = 0 if staging is None else 1
        pools = [memory.pool if isinstance(memory, DeviceMemory) else memory for memory in given]
        copies: list[tuple[_Argument, Array]] = []

        def convert(kind: str, argument: _Argument) -> RequestArgument:
            if argument.array is None and argument.memory is None:
                return RequestArgument(True)
            if argument.memory is not None:
                stand_in = argument.memory.memory if isinstance(argument.memory, DeviceMemory) else None
                length = argument.length if stand_in is None else stand_in.size
                place = DataLocation(first + given.index(argument.memory), argument.offset, length)
                return RequestArgument(False, place, argument.dimensions)
            assert staging is not None
            assert argument.array is not None
            offset = offsets[id(argument)]
            view = staging.array(np.uint8, (argument.length,), offset)
            if kind == "input":
                view[:] = np.ascontiguousarray(argument.array).reshape(-1).view(np.uint8)
            else:
                copies.append((argument, view))
            return RequestArgument(False, DataLocation(0, offset, argument.length), argument.dimensions)

        converted = {
            kind: tuple(convert(kind, arguments[i]) for i in sorted(arguments))
            for kind, arguments in self._arguments.items()
        }
        every = (*([staging] if staging else []), *pools)
        return Request(converted["input"], converted["output"], every), staging, copies

    # ---- results ---------------------------------------------------------------------------------------------

    def _completed(self) -> ExecutionResult:
        with self._lock:
            if self._state is not _State.COMPLETED or self._result is None:
                raise BadState("the execution has not ended, or ended without a result")
            return self._result

    def get_output_dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of an output after a run.

        Raises:
            BadState: No run has ended, or it failed otherwise than for lack of room.
            InvalidArgument: No such output, or it is a scalar.
            OutputInsufficientSize: Its region was too small; ``output_shapes`` carries what is needed.
        """
        status, shapes, _ = self._completed()
        operand = self._operand("output", index)
        if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
            raise BadState(f"the execution ended with {status.name}; its outputs have no shape")
        if operand_info(operand.type).is_scalar:
            raise InvalidArgument(f"output {index} is a scalar")
        shape = shapes[index] if shapes else OutputShape(self._known_dimensions(index, operand))
        if not shape.is_sufficient:
            raise OutputInsufficientSize(f"output {index} needs shape {shape.dimensions}", output_shapes=shapes)
        return shape.dimensions

    def _known_dimensions(self, index: int, operand: Operand) -> tuple[int, ...]:
        return combine_dimensions(operand.dimensions, self._arguments["output"][index].dimensions)

    def get_output_rank(self, index: int) -> int:
        """Return the number of dimensions of an output after a run; raises as `get_output_dimensions`."""
        return len(self.get_output_dimensions(index))

    def get_duration(self, code: Duration) -> int | None:
        """Return a duration of the last run in nanoseconds, None if the device does not know it.

        Raises:
            InvalidArgument: Unknown code.
            BadState: No run has ended well, or timing was not asked for.
        """
        try:
            which = Duration(code)
        except ValueError:
            raise InvalidArgument(f"{code!r} is no duration; choose one of {[d.name for d in Duration]}") from None
        status, _, timing = self._completed()
        if status is not ErrorStatus.NONE or not self._measure:
            raise BadState("no duration: the execution failed, or timing was not asked for")
        on_device = which in (Duration.ON_HARDWARE, Duration.FENCED_ON_HARDWARE)
        micros = timing.time_on_device if on_device else timing.time_in_driver
        return None if micros == UINT64_MAX else micros * 1000
