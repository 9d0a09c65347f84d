"""The execution: arguments for a compiled model, and the ways to run them."""

from __future__ import annotations

import contextlib
import enum
import errno
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from msgspec.structs import replace

from .._core._nnburst import lib
from .._core.deadline import Deadline, checked_timeout, limit_ns
from .._core.errno import flag, is_real, whole
from .._core.leaving import Leaving, ProcessLock
from ..burst import BoundRequest, ClientEnd, MemoryUse, loop_timeout_ns
from ..devices import Fence, FencedExecution
from ..errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    ResourceExhausted,
)
from ..memory import Memory, check_open
from ..model import (
    BufferToken,
    ExecutionResult,
    Failure,
    MeasureTiming,
    Named,
    OperandDesc,
    OutputShape,
    RunOptions,
    Steps,
    Timing,
    combine_dimensions,
    is_fully_specified,
    operand_info,
    operand_nbytes,
)
from .compile.compilation import Compilation, member
from .display import described, nodes_table
from .request.device_memory import DeviceMemory
from .request.external_buffers import ExternalBuffer
from .request.layout import ALIGNMENT, Argument, ArgumentLayout, lay_out
from .request.node_args import NodeArg, SharedArrays, Sizes, answer_length
from .request.state import State, check_steps, make_states
from .run import event_loop
from .run.event import Event
from .run.futures import submit

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from .run.burst import Burst
    from .run.burst_pool import Bursts

_A_MOMENT = 0.0005
_FIRST_GUESS = 4096
"""Bytes for an output whose shape only a run tells, before the first run."""
_HIGHEST_RANK = 64
_LEAST = 1.0
"""Seconds that a run may take at least to set up what it needs first: with less, a short one would never get it."""
_UINT32 = 2**32 - 1
Array = np.ndarray[Any, np.dtype[Any]]


class Duration(enum.IntEnum):
    """Which duration `Execution.get_duration` tells. The fenced ones count from the last fence that was waited for."""

    ON_HARDWARE = 0
    IN_DRIVER = 1
    FENCED_ON_HARDWARE = 2
    FENCED_IN_DRIVER = 3


class _State(enum.Enum):
    OPEN = enum.auto()
    RUNNING = enum.auto()
    COMPLETED = enum.auto()


def setting_up(open_timeout: float | None, timeout: float | None) -> Deadline:
    """Return the deadline for what a run needs first: another burst, arrays for other shapes, a state.

    Args:
        open_timeout: Seconds that it may take, if the caller has said so.
        timeout: Seconds of the run, which begins afterwards.
    """
    if open_timeout is None and timeout is not None:
        open_timeout = max(timeout, _LEAST)
    return Deadline.after(open_timeout)


def _sizes(kind: str, index: int, dimensions: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(dimensions, Iterable):
        raise InvalidArgument(f"{kind} {index}: dimensions={dimensions!r}; give a list of sizes")
    return tuple(whole(size, f"{kind} {index}: a dimension") for size in dimensions)


def _fence_of(position: int, event: object) -> Fence:
    if isinstance(event, Event):
        return event.fence
    if isinstance(event, Fence):
        return event
    raise InvalidArgument(f"wait_for[{position}] is {type(event).__name__}; give an Event or a Fence")


def _closed(pointer: object) -> int:
    raise BadState("the execution is closed; make another one")


def _not_shared(pointer: object) -> int:
    raise BadState("this execution copies its arguments; run it with compute() or burst_compute()")


class Execution(BoundRequest):
    """Arguments for a compiled model. Context manager.

    `Session.bind` and `Burst.bind` make one whose arguments are shared arrays: fill ``inputs``, `run`, use ``outputs``;
    nothing is copied, and ``run()`` is one call into C. Or make one from a `Compilation`, give each argument with
    `set_input`, `set_output` and their like, and run it with `compute`, `start_compute` or `burst_compute`, once, or
    again and again if it is reusable.

    Args:
        compilation: Finished.
        reusable: Whether it may run again after it has ended.

    Attributes:
        inputs: Shared arrays by input name. Write into them (``x.inputs["image"][:] = frame``), not over them. An input
            that is a state, or was given by a ``set_`` method, is not among them.
        outputs: Shared arrays by output name, valid from the end of a run until the next one begins, which writes over
            them: keep ``x.outputs["scores"].copy()``. An output whose shape only a run tells is flat bytes;
            `output_shapes` tells its dimensions.

    Raises:
        BadState: The compilation is not finished or has failed.
        InvalidArgument: It is no `Compilation`.
    """

    compilation: Compilation
    reusable: bool
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]
    _remedies: ClassVar[Mapping[str, str]] = {
        "inputs": "write into its arrays: inputs[name][:] = …",
        "outputs": "read from its arrays, or bind outputs to memory of your own",
    }

    def __init__(self, compilation: Compilation, *, reusable: bool = False) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("an execution needs a Compilation")
        super().__init__()
        self._prepared = compilation.prepared_model
        self.compilation = compilation
        self.reusable = reusable
        self._have_arrays(SharedArrays(), SharedArrays())
        main = compilation.model.main
        self._operands = {
            "input": [main.operands[i] for i in main.input_indexes],
            "output": [main.operands[i] for i in main.output_indexes],
        }
        self._arguments: dict[str, dict[int, Argument]] = {"input": {}, "output": {}}
        self._lock = ProcessLock()  # a signal handler may come while it is held
        self._progress = _State.OPEN
        self._layout: ArgumentLayout | None = None
        self._is_shared = False
        self._states: dict[str, State] = {}
        self._steps: Steps | None = None
        self._sizes = Sizes((), ())
        self._told: Set[str] = frozenset()  # outputs of which the model's own file says what no run confirms
        self._feeds: tuple[tuple[str, np.dtype[Any], tuple[int, ...], Array], ...] = ()
        self._copies: tuple[Callable[[], Array], ...] | None = None
        self._keep: object = None
        self._home: Bursts | None = None
        self._fenced: Timing | None = None
        self._begun: RunOptions | None = None  # if not through a burst
        self._loop_timeout_ns = 0
        self._at: Burst | None = None
        self._initial: Mapping[str, Array] = {}
        self._uses: dict[ClientEnd, list[MemoryUse]] = {}  # of memory of the caller's
        self._known: dict[ClientEnd, list[Memory | Named]] = {}  # what each burst has slots for
        self._finalizer = weakref.finalize(self, _drop, self._known)
        self._finalizer.atexit = False
        self._leaving: Leaving | None = None

    # ---- shared arrays ---------------------------------------------------------------------------------------

    def share(
        self,
        burst: Burst,
        sizes: Sizes,
        states: Mapping[str, State],
        places: Mapping[str, ExternalBuffer],
        rooms: Mapping[str, int],
        *,
        steps: Steps | None,
        measure: bool,
        keep: object,
        home: Bursts | None,
    ) -> None:
        """Put every argument that is not a state into shared arrays, and bind the request. Called by `Burst.bind`.

        Args:
            burst: The burst.
            sizes: Shapes of all arguments.
            states: By the name of their inputs.
            places: Arguments that lie in memory of the caller's, by name.
            rooms: Bytes by name of an output of which only a run tells the shape, whatever the model says; 4096 for
                others whose shape is not known.
            steps: How many steps a run has; None: one, without a leading dimension.
            measure: Whether `timing` is filled.
            keep: Kept alive by this execution.
            home: Where it finds another burst when this one is busy; None: a run is refused then.
        """
        inputs, outputs = self.compilation.inputs, self.compilation.outputs
        self._is_shared = self.reusable = True
        self._home, self._at = home, burst
        said = {node.name for node, shape in zip(outputs, sizes.outputs, strict=True) if shape is not None}
        self._told = said & rooms.keys()
        known = (None if n.name in rooms else shape for n, shape in zip(outputs, sizes.outputs, strict=True))
        self._states, self._sizes, self._keep = dict(states), Sizes(sizes.inputs, tuple(known)), keep
        self._steps = steps
        read = {state.target.name: state.tokens for state in states.values()}
        written = {state.source.name: state.tokens[::-1] for state in states.values()}
        for i, (node, shape) in enumerate(zip(inputs, sizes.inputs, strict=True)):
            if node.name in places:
                self._place("input", i, node, shape, places[node.name])
            else:
                self._arguments["input"][i] = _shared(node, shape, read.get(node.name), 0, steps)
        for i, (node, size) in enumerate(zip(outputs, self._sizes.outputs, strict=True)):
            if node.name in places:
                self._place("output", i, node, size, places[node.name])
                continue
            room = rooms.get(node.name, _FIRST_GUESS) if size is None else 1
            self._arguments["output"][i] = _shared(node, size, written.get(node.name), room, steps)
        self._check_total((*inputs, *outputs), (*sizes.inputs, *self._sizes.outputs))
        layout = self._laid_out()
        views = {name: place.view for name, place in places.items()}
        self._have_arrays(
            SharedArrays(_arrays(inputs, sizes.inputs, layout.inputs, read, views, steps)),
            SharedArrays(_arrays(outputs, self._sizes.outputs, layout.outputs, written, views, steps)),
        )
        self._feeds = tuple((name, view.dtype, view.shape, view) for name, view in self.inputs.items())
        if all(shape is not None and 0 not in shape for shape in self._sizes.outputs):
            self._copies = tuple(self.outputs[node.name].copy for node in outputs if node.name in self.outputs)
        self._measure = flag(measure, "measure")
        self._bind(burst.controller)

    def _check_total(self, nodes: Sequence[NodeArg], shapes: Sequence[tuple[int, ...] | None]) -> None:
        arguments = (*self._in_order("input"), *self._in_order("output"))
        if sum(argument.room + ALIGNMENT for argument in arguments) > _UINT32:
            largest = max(range(len(nodes)), key=lambda i: arguments[i].room)
            raise InvalidArgument(
                f"{nodes[largest].name!r} of shape {shapes[largest]} takes {arguments[largest].room} bytes; the "
                "arguments of a run have less than 4 GiB together"
            )

    def _have_arrays(self, inputs: SharedArrays, outputs: SharedArrays) -> None:
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "outputs", outputs)

    def _place(
        self, kind: str, index: int, node: NodeArg, shape: tuple[int, ...] | None, place: ExternalBuffer
    ) -> None:
        """Let an argument lie in memory of the caller's."""
        whole = shape if shape is None or self._steps is None else (self._steps.count, *shape)
        if place.memory.image is not None:
            length = 0
        else:
            length = place.nbytes if whole is None else math.prod(whole) * node.dtype.itemsize
            if place.offset + length > place.memory.size:
                raise InvalidArgument(f"{node.name!r} of shape {whole} takes {length} bytes of {place.memory!r}")
        given = shape if node.is_open and shape else ()
        if self._steps is None:
            self._set_memory(kind, index, place.memory, place.offset, length, given)
        else:
            self._set(kind, index, Argument(0, (place.memory,), place.offset, length, given))
        if place.view is None:
            with contextlib.suppress(InvalidArgument, GeneralFailure):  # what this process may not look at
                place.view = place.look(node, whole, length)

    def _bind(self, controller: ClientEnd) -> None:
        layout = self._laid_out()
        if self._is_shared:
            named = [place for rows in self._arguments.values() for a in rows.values() for place in a.memories]
            uses = self._uses[controller] = [controller.use(memory) for memory in named if isinstance(memory, Memory)]
            if self._steps is not None:
                uses.append(controller.use(self._steps))
        own = [] if layout.memory is None else [layout.memory]
        self._known[controller] = [*own, *(token for state in self._states.values() for token in state.tokens)]
        longest = answer_length(self.compilation.outputs)
        self.bind_to(controller, layout.requests, measure=self._measure, answer_length=longest)

    @property
    def repeats(self) -> int:
        """As `BoundRequest.repeats`; a run with a state is never repeated."""
        return 0 if self._home is None or self._states else self._home.retry

    @property
    def comes_back(self) -> bool:
        """As `BoundRequest.comes_back`."""
        return self._home is not None and self._home.recovery is not None

    def _find_way(self, number: int, deadline: Deadline) -> Deadline | None:
        """Move to a burst that is free, or to a service that has come back; see `BoundRequest._find_way`.

        Raises:
            DeadObject: The state was lost with the service. The next run begins with the initial one.
            MissedDeadline: There is none in time, or a run that was given up takes longer than this one may.
        """
        ending, states, begin = self._prepared.ending, self._states, time.monotonic_ns()
        left = self._setting_up.call(self._move, number)
        if states and self._states is not states:
            names = ", ".join(map(repr, states))
            raise ending.error(
                f"the service died ({ending.reason}), and with it the state {names}; it is as bind() made it, and runs "
                "go on from there"
            )
        if left == -errno.EAGAIN:  # a run that was given up comes first, on its burst
            if deadline.left() == 0:
                raise MissedDeadline(f"not started {self.in_time}: the run before, which was given up, has not ended")
            time.sleep(_A_MOMENT)
            return deadline
        return None if left is None else deadline.postponed(begin)

    @property
    def _setting_up(self) -> Deadline:
        return setting_up(None if self._home is None else self._home.open_timeout, self.limit)

    def _move(self, number: int) -> int | None:
        """Move to another burst: 0, or -EAGAIN if it has to stay for the moment, None if there is no other."""
        home, pointer, here = self._home, self._pointer, self._at
        if home is None or here is None or self._leaving is not None:
            return None
        if number not in (errno.EBUSY, errno.ESTALE) and not home.recover(here):
            return None
        burst = home.spare()
        if burst is here and number == errno.EBUSY:  # no longer
            return 0
        states = self._states
        if burst.compilation is not self.compilation:
            if self._steps is not None:
                check_steps(burst.compilation, self._steps.count)
            if states:
                states = self._states_on(burst.compilation)
        with self._lock.lock:
            if self._pointer is not pointer:  # another thread has moved it
                return 0
            left = lib.nnb_execution_leave(pointer)
            if left == 0:
                try:
                    self._settle_on(burst, states)
                except BaseException:
                    lib.nnb_execution_return(pointer)
                    raise
        if left == -errno.EAGAIN:
            return left
        if left:
            raise BadState("the execution is running; bind one for each thread")
        return 0

    def _settle_on(self, burst: Burst, states: dict[str, State]) -> None:
        """Bind the request to another burst, perhaps of the model that was compiled anew."""
        if states is not self._states:
            self._put_states(states)
        if burst.compilation is not self.compilation:
            self._known.clear()  # the dead hold nothing
            self._uses.clear()
            self.compilation, self._prepared = burst.compilation, burst.compilation.prepared_model
        self._at = burst
        self._bind(burst.controller)

    def _states_on(self, compilation: Compilation) -> dict[str, State]:
        """Make the states for a model that was compiled anew, as they were at first."""
        states = make_states(compilation, {state.source.name: name for name, state in self._states.items()})
        try:
            for name, state in states.items():
                state.write(self.turn, self._initial.get(name))
        except BaseException:
            for state in states.values():
                state.close()
            raise
        return states

    def _put_states(self, states: dict[str, State]) -> None:
        """Let requests name other buffers; all else stays where it lies."""
        layout = self._laid_out()
        for kind, nodes in (("input", self.compilation.inputs), ("output", self.compilation.outputs)):
            for i, node in enumerate(nodes):
                for state in states.values():
                    if node.name == (state.target if kind == "input" else state.source).name:
                        tokens = state.tokens if kind == "input" else state.tokens[::-1]
                        self._arguments[kind][i] = Argument(memories=tokens)
        self._layout = lay_out(self._in_order("input"), self._in_order("output"), layout.memory, self._steps)
        self._states = states

    def _laid_out(self) -> ArgumentLayout:
        if self._layout is None:
            self._layout = lay_out(self._in_order("input"), self._in_order("output"), None, self._steps)
        return self._layout

    def feed(self, inputs: object) -> bool:
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

    def copied(self) -> list[Array]:
        """Return copies of all outputs, of the shapes that the last run gave them."""
        if self._copies is None:
            nodes, shapes = self.compilation.outputs, self.output_shapes
            return [self._typed(i, node, shapes) for i, node in enumerate(nodes)]
        copies = []  # a comprehension would be a call more
        for copy in self._copies:
            copies.append(copy())
        return copies

    def _typed(self, index: int, node: NodeArg, shapes: Sequence[OutputShape]) -> Array:
        view, known, room = self.outputs[node.name], self._sizes.outputs[index], self._laid_out().outputs[index]
        if known is not None and 0 not in known:
            return view.copy()
        view = view if room is None else room
        if not shapes:
            raise GeneralFailure(f"the service did not tell the shape of output {node.name!r}")
        shape = shapes[index].dimensions
        return view[: math.prod(shape) * node.dtype.itemsize].view(node.dtype).reshape(shape).copy()

    def needed_rooms(self, error: OutputInsufficientSize) -> dict[str, int]:
        """Return the bytes that each output needs which had too little room in the last run.

        Raises:
            OutputInsufficientSize: One of them cannot have more, since the model knows its shape. What a file says of
                shapes may be wrong.
        """
        rooms = {}
        nodes = zip(self.compilation.outputs, self._sizes.outputs, error.output_shapes, strict=True)
        for node, known, shape in nodes:
            if not shape.is_sufficient:
                if known is not None and not node.may_be_empty:
                    raise error
                have = self.outputs[node.name].nbytes
                rooms[node.name] = max(math.prod(shape.dimensions) * node.dtype.itemsize, min(2 * have, _UINT32))
        return rooms

    # ---- state -----------------------------------------------------------------------------------------------

    def reset_state(self, values: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Set the state for the next run.

        Args:
            values: Arrays by *input* name; inputs that are left out become zero (the zero point, if quantised).

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the state is as it was then.
            DeadObject: The service has ended, and the session does not start it again.
            MissedDeadline: It takes longer than setting up may (``open_timeout`` of the session).
        """
        self._setting_up.call(self._reset_state, values)

    def _reset_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        self._check_not_closed()
        if not isinstance(values, Mapping | None):
            raise InvalidArgument(f"the values of a state are a dict of arrays, not {type(values).__name__}")
        given = dict(values or {})
        unknown = sorted(given.keys() - self._states.keys())
        if unknown:
            raise InvalidArgument(f"no state {unknown}; there is {list(self._states)}")
        arrays = {name: state.target.check(given[name]) for name, state in self._states.items() if name in given}
        try:
            self._write_states(arrays)
        except DeadObject:
            if self._move(errno.ENOTCONN) is None:
                raise
            self._write_states(arrays)

    def start_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        """As `reset_state`, and so it is again when the service has died and was started again."""
        self._reset_state(values)
        self._initial = {name: np.array(value) for name, value in (values or {}).items()}

    def _write_states(self, arrays: Mapping[str, Array]) -> None:
        for name, state in self._states.items():
            state.write(self.turn, arrays.get(name))

    def get_state(self) -> dict[str, Array]:
        """Copy the state out that the next run will read, by input name; raises as `reset_state`."""
        return self._setting_up.call(self._read_states)

    def _read_states(self) -> dict[str, Array]:
        self._check_not_closed()
        return {name: state.read(self.turn) for name, state in self._states.items()}

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

    def _operand(self, kind: str, index: int) -> OperandDesc:
        operands = self._operands[kind]
        if not is_real(index) or not 0 <= index < len(operands):
            raise InvalidArgument(f"{kind} {index!r}: the model has {len(operands)} {kind}s")
        return operands[index]

    def _set_array(self, kind: str, index: int, array: Array | None, dimensions: Sequence[int] | None) -> None:
        operand = self._operand(kind, index)
        if array is None:
            self._set(kind, index, Argument())
            return
        if not isinstance(array, np.ndarray):
            raise InvalidArgument(f"{kind} {index}: give a NumPy array, not {type(array).__name__}")
        dtype = operand_info(operand.type).dtype
        if array.dtype != dtype:
            raise InvalidArgument(f"{kind} {index} is {dtype}, got {array.dtype}; convert it with .astype('{dtype}')")
        open_ended = not is_fully_specified(operand.dimensions) and (
            bool(operand.dimensions) or not operand_info(operand.type).is_scalar
        )
        given: tuple[int, ...] = ()
        if dimensions is not None:
            given = _sizes(kind, index, dimensions)
        elif kind == "input" and open_ended:
            given = array.shape
        if kind == "input" and 0 in array.shape and self.compilation.inputs[index].may_be_empty:
            self._combined(kind, index, operand, given)
            self._set(kind, index, Argument(dimensions=given))
            return
        self._check_length(kind, index, operand, given, array.nbytes)
        self._set(kind, index, Argument(room=array.nbytes, dimensions=given, array=array))

    def _set_memory(
        self,
        kind: str,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int,
        length: int,
        dimensions: Sequence[int],
    ) -> None:
        operand, given = self._operand(kind, index), _sizes(kind, index, dimensions)
        offset, length = (whole(n, f"{kind} {index}: {what}") for n, what in ((offset, "offset"), (length, "length")))
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
        self._set(kind, index, Argument(memories=(memory,), offset=offset, length=length, dimensions=given))

    def _combined(self, kind: str, index: int, operand: OperandDesc, given: tuple[int, ...]) -> tuple[int, ...]:
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

    def _check_length(self, kind: str, index: int, operand: OperandDesc, given: tuple[int, ...], nbytes: int) -> None:
        combined = self._combined(kind, index, operand, given)
        scalar = operand_info(operand.type).is_scalar
        known = scalar or (bool(combined) and is_fully_specified(combined))
        if kind == "input" and not known:
            raise InvalidArgument(f"input {index}: dimensions {combined} are open; give them with dimensions=")
        if known and operand_nbytes(operand.type, combined) != nbytes:
            need = operand_nbytes(operand.type, combined)
            raise InvalidArgument(f"{kind} {index}: {nbytes} bytes, but shape {combined} takes {need}")

    def _set(self, kind: str, index: int, argument: Argument) -> None:
        with self._lock.lock:
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
        with self._lock.lock:
            self._check_open()
            self._check_one_device("timing")
            self._measure = flag(measure, "measure")
            if self._burst is not None:
                self._bind(self._burst)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of a run; None removes the limit. Raises as `set_measure_timing`."""
        with self._lock.lock:
            self._check_open()
            self._check_one_device("a timeout")
            self.timeout = seconds

    def set_loop_timeout(self, seconds: float | None) -> None:
        """Limit how long each WHILE of a run may take; None restores the default of 2 s, more than 15 s is cut to 15.

        A loop that takes longer ends the run with `MissedDeadline`. The requests of a burst do not carry it: there
        ``Burst(loop_timeout=)`` applies, or ``Session(loop_timeout=)``.

        Raises:
            InvalidArgument: It is no number above 0.
            BadState: The execution was started.
        """
        longest = loop_timeout_ns(seconds)
        with self._lock.lock:
            self._check_open()
            self._loop_timeout_ns = longest

    def _check_open(self) -> None:
        if self._progress is not _State.OPEN:
            raise BadState("the execution was started; make another one to change anything")

    def _check_not_closed(self) -> None:
        if not self._finalizer.alive:
            _closed(None)

    def _check_one_device(self, what: str) -> None:
        if not self.compilation.has_one_device:
            raise InvalidArgument(f"{what} needs a compilation for exactly one device")

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
        """Run without a burst, in the background. Raises as `compute`, the outcome comes with `Event.wait`."""
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
        for index, operand in enumerate(self._operands["output"]):
            if not operand_info(operand.type).is_scalar and not is_fully_specified(operand.dimensions):
                raise InvalidArgument(
                    f"output {index} has dimensions {list(operand.dimensions)}: an execution that waits for fences "
                    "needs a model that says them; use compute()"
                )
        before = self._begin(timeout)
        with self.limited(timeout):
            options = self._options
        with contextlib.ExitStack() as running:
            running.enter_context(self._while_running(before))
            request = self._laid_out().requests[self.turn]
            check_open(request)
            run = self._prepared.execute_fenced(request, fences, options, duration_ns)
            self._note_outputs(())  # what depends on them may be launched
            ending = running.pop_all()
        return Event(run.fence, partial(self._settle_fenced, run, ending))

    def _settle_fenced(self, run: FencedExecution, ending: contextlib.ExitStack) -> None:
        with ending:
            info = run.info()
            if info.status is ErrorStatus.NONE:
                self._fenced = info.fenced
                status = self._ran_elsewhere((info.status, (), info.launched))
            else:
                status = self._ran_elsewhere(Failure(info.status, info.reason))
            if status:
                super()._settle(status)  # what depends on it has failed with it

    def _settle(self, status: int) -> None:
        try:
            super()._settle(status)
        except (DeviceUnavailable, GeneralFailure, ResourceExhausted) as error:
            if not self._ran_on_another(error):
                raise

    def _ran_on_another(self, failure: NNBurstError) -> bool:
        """Have another device run what has failed, if the choice of the device was not the caller's."""
        request = self._laid_out().requests[self.turn]
        if any(isinstance(pool, BufferToken) for pool in request.pools):
            return False  # they are the first device's
        result = self.compilation.run_elsewhere(request, self._options_left, failure)
        if result is None:
            return False
        if status := self._ran_elsewhere(result):
            super()._settle(status)
        return True

    def burst_compute(self, burst: Burst, timeout: float | EllipsisType | None = ...) -> None:
        """Run through a burst and wait for the end.

        Args:
            burst: Of this compilation.
            timeout: As for `compute`.

        Raises:
            InvalidArgument: No burst, or one of another compilation; an argument is not set.
            BadState: The burst is in use, or as `compute`.
            NNBurstError: The execution failed; the status says how.
        """
        from .run.burst import Burst  # which makes executions

        if not isinstance(burst, Burst):
            raise InvalidArgument("burst_compute needs a Burst")
        if burst.compilation is not self.compilation:
            raise InvalidArgument("the burst belongs to another compilation")
        self._finish(self._begin(timeout), partial(self._through, burst), timeout)

    def _begin(self, timeout: float | EllipsisType | None) -> _State:
        """Claim the execution for one run; return its former state."""
        if timeout is not ...:
            checked_timeout(timeout)
            self._check_one_device("a timeout")
        with self._lock.lock:
            self._check_not_closed()
            if self._progress is _State.RUNNING:
                raise BadState("the execution is running")
            if self._progress is _State.COMPLETED and not self.reusable:
                raise BadState("the execution has run; make another one, or make it reusable")
            for kind, operands in self._operands.items():
                missing = sorted(set(range(len(operands))) - self._arguments[kind].keys())
                if missing:
                    raise InvalidArgument(f"{kind}s {missing} are not set; None omits an optional one")
            before, self._progress = self._progress, _State.RUNNING
            return before

    def _finish(self, before: _State, run: Callable[[], None], timeout: float | EllipsisType | None) -> None:
        with self._while_running(before), self.limited(timeout):
            run()

    @contextlib.contextmanager
    def _while_running(self, before: _State) -> Iterator[None]:
        """Copy the inputs in, run what is inside, copy the outputs out."""
        after = _State.COMPLETED
        self._elsewhere = self._fenced = self._begun = None
        try:
            for index, argument in self._arguments["input"].items():
                for memory in argument.memories:
                    if isinstance(memory, DeviceMemory):
                        operand = self._operand("input", index)
                        memory.check_readable(index, combine_dimensions(operand.dimensions, argument.dimensions))
            layout = self._laid_out()
            for argument, view in zip(self._in_order("input"), layout.inputs, strict=True):
                if argument.array is not None and view is not None:
                    view[:] = np.ascontiguousarray(argument.array).reshape(-1).view(np.uint8)
            try:
                yield
                shapes = self.output_shapes
            except BadState:  # it has not run
                after = before
                raise
            except BaseException as error:
                if not isinstance(error, InvalidArgument):  # that is refused before anything is touched
                    self._note_outputs(None)
                raise
            self._note_outputs(shapes)
            for argument, view in zip(self._in_order("output"), layout.outputs, strict=True):
                if argument.array is not None and view is not None:
                    argument.array.reshape(-1).view(np.uint8)[:] = view
        finally:
            if not self._is_shared:
                self._forget_memory()
            self._progress = after

    def _in_order(self, kind: str) -> list[Argument]:
        return [self._arguments[kind][i] for i in range(len(self._arguments[kind]))]

    def _note_outputs(self, shapes: tuple[OutputShape, ...] | None) -> None:
        """Tell the device memories among the outputs their contents now; None: none."""
        for index, argument in self._arguments["output"].items():
            for memory in argument.memories:
                if isinstance(memory, DeviceMemory):
                    known = shapes and shapes[index].dimensions
                    memory.written(None if shapes is None else known or self._known_dimensions(index))

    def _without_burst(self) -> None:
        request = self._laid_out().requests[self.turn]
        check_open(request)
        options = self._begun = self._options
        result = self._prepared.execute_synchronously(request, options)
        status = self._ran_elsewhere(result)
        if status:
            self._settle(status)

    @property
    def _options(self) -> RunOptions:
        measure = MeasureTiming.YES if self._measure else MeasureTiming.NO
        return RunOptions(measure, Deadline.after(self.limit).at_ns, self._loop_timeout_ns)

    @property
    def _options_left(self) -> RunOptions:
        """Those of the run that was begun last: its deadline is what it was."""
        return self._begun or replace(self._options, deadline_ns=self.deadline.at_ns)

    def _through(self, burst: Burst) -> None:
        for argument in (*self._in_order("input"), *self._in_order("output")):
            for memory in argument.memories:
                if isinstance(memory, DeviceMemory):
                    memory.seen_by(burst)
        self._bind(burst.controller)  # each time, since the burst may have been told to free one of the memories
        self.run()

    async def arun(self, timeout: float | EllipsisType | None = ...) -> None:
        """As `run`, awaited in asyncio or Trio; no thread is made.

        A task that is cancelled gives the run up: until that has landed its arrays are in use; its answer is dropped.

        Raises:
            BadState: It is in flight, also one that was given up; or there is no event loop.
            GeneralFailure: The service takes one request at a time.
            NNBurstError: As `run`.
        """
        await event_loop.run(self, timeout)

    def submit(self, timeout: float | EllipsisType | None = ...) -> Future[Execution]:
        """Start a run of the shared arrays; they are the service's until the future is done.

        Its result is this execution. One thread for each burst completes futures, and ends when there are none. When
        its time is over, waiting behind other runs included, the future has `MissedDeadline`; the execution stays in
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
        with self.limited(timeout):
            return submit(self)

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
            self._check_shapes(result[1])
        return result

    def _check_shapes(self, shapes: Sequence[OutputShape]) -> None:
        nodes = self.compilation.outputs
        if len(shapes) != len(nodes):
            raise GeneralFailure(f"the service told {len(shapes)} shapes for {len(nodes)} outputs")
        for node, argument, shape in zip(nodes, self._in_order("output"), shapes, strict=True):
            dims, room = shape.dimensions, _UINT32
            is_sure = node.name not in self._told and not (node.may_be_empty and node.is_open)
            declared = argument.dimensions or (node.shape if is_sure else None)
            fits = len(dims) <= _HIGHEST_RANK
            if shape.is_sufficient:
                room = argument.room or argument.length or _UINT32
                fits = fits and (
                    declared is None
                    or (
                        len(dims) == len(declared)
                        and all(d == n or not isinstance(d, int) or not d for d, n in zip(declared, dims, strict=True))
                    )
                )
            if not fits or math.prod(dims) * node.dtype.itemsize > room:
                raise GeneralFailure(
                    f"the service told shape {dims} for output {node.name!r}, which is {declared} and has {room} bytes"
                )

    def _completed(self) -> ExecutionResult:
        with self._lock.lock:
            if self._progress is _State.RUNNING:
                raise BadState("the execution has not ended")
            return self.result

    def get_output_dimensions(self, index: int) -> tuple[int, ...]:
        """Return the dimensions of an output after a run.

        Raises:
            BadState: No run has ended, or it failed otherwise than for lack of room.
            InvalidArgument: No such output, or it is a scalar.
            OutputInsufficientSize: Its region was too small; ``output_shapes`` has the needed dimensions.
        """
        status, shapes, _ = self._completed()
        operand = self._operand("output", index)
        if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
            raise BadState(f"the execution ended with {status.name}; its outputs have no shape")
        if operand_info(operand.type).is_scalar:
            raise InvalidArgument(f"output {index} is a scalar")
        shape = shapes[index] if shapes else OutputShape(self._known_dimensions(index))
        if not shape.is_sufficient:
            raise OutputInsufficientSize(f"output {index} needs shape {shape.dimensions}", output_shapes=shapes)
        return shape.dimensions

    def _known_dimensions(self, index: int) -> tuple[int, ...]:
        operand = self._operand("output", index)
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

    def close(self) -> None:
        """Give the memory and the state back on both sides; arrays that you still hold stay readable. Idempotent."""
        self._end(ClientEnd.free_memory)

    def forget(self) -> None:
        """As `close`, but do not wait for the service."""
        self._end(ClientEnd.forget)

    def _end(self, give_back: Callable[[ClientEnd, Memory | Named], object]) -> None:
        if self._leaving is None:
            known = [(controller, pool) for controller, pools in self._known.items() for pool in pools]
            own = [] if self._layout is None or self._layout.memory is None else [self._layout.memory.close]
            states = [state.close for state in self._states.values()]
            unused = [controller.forget_dropped for controller in self._known]
            steps = [self._uses.clear, *unused, *own, *states]
            self._leaving = Leaving(*(partial(give_back, *pair) for pair in known), *steps)
        self._run = _closed
        self._finalizer.detach()
        self._leaving()

    def _forget_memory(self) -> None:
        """Give back what a run needed, as the arrays are the caller's."""
        self._run = _not_shared
        layout, self._layout = self._layout, None
        _drop(self._known, ClientEnd.forget)
        if layout is not None and layout.memory is not None:
            layout.memory.close()

    def __repr__(self) -> str:
        state = (
            "closed" if self._leaving is not None else "shared arrays" if self._is_shared else "arguments one by one"
        )
        return f"<Execution of {described(self.compilation)}, {state}>"

    def _repr_html_(self) -> str:
        return nodes_table(repr(self)[1:-1], self.compilation)

    def __enter__(self) -> Execution:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _drop(
    known: dict[ClientEnd, list[Memory | Named]],
    give_back: Callable[[ClientEnd, Memory | Named], object] = ClientEnd.forget_soon,
) -> None:
    """For an execution that was not closed; buffers go with the last reference to them."""
    while known:
        controller, pools = known.popitem()
        for pool in pools:
            give_back(controller, pool)


def _shared(
    node: NodeArg,
    shape: tuple[int, ...] | None,
    state: tuple[BufferToken, BufferToken] | None,
    least: int,
    steps: Steps | None,
) -> Argument:
    """An argument with room of its own, unless it is a state; `least` is 0 for an input, which may be empty."""
    if state is not None:
        return Argument(memories=state)
    nbytes = 0 if shape is None else math.prod(shape) * node.dtype.itemsize
    if least and not nbytes:
        return Argument(room=max(least, node.dtype.itemsize))
    nbytes *= 1 if steps is None else steps.count
    return Argument(room=nbytes, dimensions=shape if node.is_open and shape else ())


def _arrays(
    nodes: Sequence[NodeArg],
    shapes: Sequence[tuple[int, ...] | None],
    views: Sequence[Array | None],
    states: Mapping[str, object],
    given: Mapping[str, Array | None],
    steps: Steps | None,
) -> dict[str, Array]:
    """Arrays by name; flat bytes where the shape is not known."""
    arrays, leading = {}, () if steps is None else (steps.count,)
    for node, shape, view in zip(nodes, shapes, views, strict=True):
        if node.name in states:
            continue
        if node.name in given:
            if (there := given[node.name]) is not None:
                arrays[node.name] = there
            continue
        if view is None:
            arrays[node.name] = np.empty((*leading, *(shape or ())), node.dtype)
        else:
            nbytes = view.nbytes if shape is None or 0 not in shape else 0
            arrays[node.name] = view if shape is None else view[:nbytes].view(node.dtype).reshape((*leading, *shape))
    return arrays
