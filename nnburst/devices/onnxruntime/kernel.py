"""A graph that is bound to a request. It uses arguments without a copy if `snapshots.py` finds that safe."""

from __future__ import annotations

import ctypes
import errno
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..._core import ffi, lib
from ...burst.cancellation import WorkingMemory, present_cancel_flag
from ...errors import ErrorStatus, GeneralFailure, InvalidArgument, NNBurstError, OutputInsufficientSize, OutputShape
from ...memory.managed import BufferView
from ...memory.staging import Region
from ...model.dimensions import HIGHEST_RANK, combine_dimensions, is_fully_specified
from ...model.running import ExecutionResult
from ...model.types import NO_TIMING, MemoryLike, Model, OperandDesc, Request, RequestArgument
from ..deadline import require_time
from ..elements import is_scalar
from ..encoded import Bytes, Value, copy_region, read, write
from ..plan import pool_of
from .batch import Batches, BoundArgument
from .capi import BoundRun, OrtError, OrtValue
from .graph import Graph
from .importer import GraphArgument, is_bool
from .snapshots import must_copy
from .zip_maps import as_maps

_CPU = "cpu"
_NOTHING = np.empty(1, np.uint8)
_LEAST_ROOM = 4096
"""Minimum size of the copy of an argument with unknown dimensions, unless the client's region is smaller."""
_PRIVATE = 4
"""Bytes of private memory counted per byte of an encoded input. An empty string (8 encoded bytes) can need 32 bytes."""
_TENSOR = 1024
"""Bytes of private memory counted for each tensor in an encoded input, besides its elements."""


class _Output(NamedTuple):
    """An output of a request.

    Attributes:
        is_open: True if the size becomes known during the run. ONNX Runtime then allocates the output, which is
            copied afterwards. False if ONNX Runtime writes the output in place.
    """

    position: int
    node: GraphArgument
    is_open: bool
    pool: MemoryLike
    offset: int
    room: int


class BoundGraph:
    """A `Kernel` that runs a graph on the arrays of one request. Not for concurrent use.

    Args:
        request: A request that `validate_request` accepted, and whose memory is open.
        leave_open: Function to call with the positions of outputs whose declared dimensions are wrong. It makes these
            dimensions unknown.
        batches: The object that runs several requests as one batch; None if requests never run together.

    Raises:
        InvalidArgument: An argument's bytes do not fit its type and dimensions, or cannot be written.
        GeneralFailure: A required input, or every output, is omitted.
    """

    def __init__(
        self,
        graph: Graph,
        model: Model,
        request: Request,
        leave_open: Callable[[Collection[int]], None],
        batches: Batches | None = None,
    ) -> None:
        main = model.main
        self._graph = graph
        self._leave_open = leave_open
        self._memory = WorkingMemory()
        self._texts: list[object] = []  # C keeps only addresses of these.
        self._copied_in: list[tuple[Bytes, Bytes]] = []
        self._copied_out: list[tuple[Bytes, Bytes]] = []
        self._written: list[_Output] = []
        self._rows = ffi.new("nnb_ort_argument[]", len(request.inputs) + len(request.outputs))
        self._outputs = self._rows + len(request.inputs)
        for row in self._rows:
            row.copy, row.value, row.is_sufficient = -1, -1, True
        self._adapts = True
        self._is_describable = True
        self._encoded: dict[str, Bytes] = {}
        self._values: list[Value] = []
        self._counted = 0
        self._rebind: list[Callable[[], None]] = []
        self._places: list[list[BoundArgument]] = [[], []]
        """Inputs and outputs in the client's memory, kept alive because ONNX Runtime stores only addresses."""
        self._shapes = [OutputShape(()) for _ in request.outputs]
        self._binding = graph.session.io_binding()
        operands = main.operands
        nodes = (*graph.inputs, *graph.optional.values())
        for row, node, argument, index in zip(self._rows, nodes, request.inputs, main.input_indexes, strict=False):
            self._bind_input(row, node, operands[index], request, argument)
        for position, (argument, index) in enumerate(zip(request.outputs, main.output_indexes, strict=True)):
            if not argument.has_no_value:
                self._bind_output(position, graph.outputs[position], operands[index], request, argument)
        if not self._written:
            raise GeneralFailure("every output is omitted; there is nothing to run")
        self._bound = graph.bind(self._binding, self._copied_in, self._copied_out, self._rebind)
        self._batch, flag = None, present_cancel_flag()
        is_whole = [node for node, _, _ in self._places[0]] == list(graph.inputs)
        is_whole = is_whole and len(self._places[1]) == len(main.output_indexes)
        if batches is not None and is_whole and flag is not None and flag.server:
            inputs, outputs = self._places
            self._batch = batches.join(self._bound.kernel, inputs, outputs)
        self._open = [each for each in self._written if each.is_open]
        self._said = [each for each in self._written if not each.is_open]
        self._described: BoundRun | None = None
        if self._is_describable and isinstance(self._bound, BoundRun):
            self._described = self._bound
            self._described.describe_arguments(self._rows, len(request.inputs), adapts=self._adapts)
            self.c_kernel = self._bound.kernel
            self.finds_buffers = True

    # -- binding -------------------------------------------------------------------------------------------------------

    def _bind_input(
        self, row: Any, node: GraphArgument, operand: OperandDesc, request: Request, argument: RequestArgument
    ) -> None:
        dims = combine_dimensions(operand.dimensions, argument.dimensions)
        if argument.has_no_value:
            if node.name in self._graph.optional and not argument.dimensions:
                return
            if 0 not in dims or node.holds:
                raise GeneralFailure(f"input {node.name!r} is omitted, but the graph needs it")
            self._adapts = False
            self._bind(self._binding.bind_input, node, dims, _NOTHING)
            return
        pool = pool_of(request, argument)
        location = argument.location
        nbytes = _nbytes(node, operand, dims)
        if not dims and not node.shape and not isinstance(pool, BufferView):
            nbytes = node.element.itemsize  # The rank is unknown in the graph, and 0 in this request.
        if nbytes is None or (nbytes != location.length and not isinstance(pool, BufferView)):
            raise InvalidArgument(
                f"input {node.name!r} has {location.length} bytes, which is not what {node.element.name} of dimensions "
                f"{list(dims)} needs"
            )
        region = pool.array(np.uint8, (nbytes,), location.offset)
        if node.holds:
            self._memory.take(_PRIVATE * nbytes)
            self._encoded[node.name] = region
            self._is_describable = False
            return
        if not isinstance(pool, BufferView):
            self._places[0].append((node, dims, region))
        place, room = region, pool.room if isinstance(pool, Region) else 0
        if is_bool(node) or self._needs_copy(node, pool, region):
            row.copy = len(self._copied_in)
            place, room = self._allocate_copy(nbytes, room, operand)
            self._copied_in.append((place.view(np.bool_) if is_bool(node) else place, region))
        self._describe(row, node, operand, argument, pool, dims, place, room)
        self._bind(self._binding.bind_input, node, dims, place)

    def _allocate_copy(self, nbytes: int, room: int, operand: OperandDesc) -> tuple[Bytes, int]:
        """Return memory for a copy of an argument, and the memory's capacity in bytes."""
        is_fixed = is_scalar(operand) or is_fully_specified(operand.dimensions)
        room = nbytes if is_fixed else max(nbytes, min(room, max(2 * nbytes, _LEAST_ROOM)))
        self._memory.take(room)
        return np.zeros(room, np.uint8)[:nbytes], room  # Zeros keep unwritten memory from showing old data.

    def _describe(
        self,
        row: Any,
        node: GraphArgument,
        operand: OperandDesc,
        argument: RequestArgument,
        pool: MemoryLike,
        dims: tuple[int, ...],
        place: Bytes,
        room: int,
    ) -> None:
        """Fill in an ``nnb_ort_argument``. ``csrc/ort.c`` needs it for later requests with other memory or shapes."""
        dimensions, given = operand.dimensions, argument.dimensions
        if isinstance(pool, BufferView):
            row.buffer = pool.buffer.handle
            dimensions, given = pool.buffer.initial_dimensions, pool.dimensions
            self._is_describable &= row.copy < 0 and (pool.buffer.is_fixed or not given)
        name, declared = ffi.new("char[]", node.name.encode()), ffi.new("uint32_t[]", dimensions)
        self._texts += name, declared
        row.name, row.declared, row.place, row.room = name, declared, ffi.cast("uint8_t *", place.ctypes.data), room
        row.n_declared = len(dimensions) if dimensions or is_scalar(operand) else lib.NNB_ANY_RANK
        row.n_given = len(given)
        row.element, row.element_size = node.element.number, node.element.itemsize
        row.rank = len(dims)
        row.dims[0 : len(dims)] = dims
        if isinstance(pool, Region | BufferView):
            row.pool_index, row.offset = pool.origin
        else:
            self._adapts = False

    def _needs_copy(self, node: GraphArgument, pool: MemoryLike, region: Bytes) -> bool:
        """Return True if ONNX Runtime must use a copy instead of the client's memory."""
        if region.ctypes.data % node.element.itemsize:
            return True
        if getattr(pool, "is_private", False):
            return False
        return must_copy(node.element) or node.name in self._graph.exposed

    def _bind_output(
        self, position: int, node: GraphArgument, operand: OperandDesc, request: Request, argument: RequestArgument
    ) -> None:
        pool, location, row = pool_of(request, argument), argument.location, self._outputs[position]
        dims = combine_dimensions(operand.dimensions, argument.dimensions)
        nbytes = _nbytes(node, operand, dims)
        room = 1 << 62 if isinstance(pool, BufferView) else location.length
        if nbytes is not None and nbytes > location.length:
            raise InvalidArgument(f"output {node.name!r} has {location.length} bytes; it needs {nbytes}")
        is_open = nbytes is None or node.holds != ""
        self._written.append(_Output(position, node, is_open, pool, location.offset, room))
        if nbytes is None or is_open:
            if node.holds or not isinstance(pool, Region | BufferView):
                self._is_describable = False
            else:
                is_buffer = isinstance(pool, BufferView)
                self._adapts &= is_buffer or not argument.dimensions
                region = np.empty(0, np.uint8) if is_buffer else _writable(pool, node, room, location.offset)
                self._describe(row, node, operand, argument, pool, (), region, room)
                row.value = [*dict.fromkeys(each.node.name for each in self._written)].index(node.name)
            self._binding.bind_output(node.name, _CPU)
            return
        region = _writable(pool, node, nbytes, location.offset)
        if not isinstance(pool, BufferView):
            self._places[1].append((node, dims, region))
        place, room = region, pool.room if isinstance(pool, Region) else 0
        if self._needs_copy(node, pool, region):
            row.copy = len(self._copied_in) + len(self._copied_out)
            place, room = self._allocate_copy(nbytes, room, operand)
            self._copied_out.append((region, place))
        self._shapes[position] = OutputShape(dims)
        self._describe(row, node, operand, argument, pool, dims, place, room)
        self._bind(self._binding.bind_output, node, dims, place)

    def _bind(self, bind: Callable[..., None], node: GraphArgument, dims: tuple[int, ...], region: Bytes) -> None:
        bound = partial(bind, node.name, _CPU, 0, node.element.number, list(dims), region.ctypes.data)
        bound()
        if bind == self._binding.bind_input:
            self._rebind.append(bound)

    def __call__(self) -> ExecutionResult | None:
        return self.run_until(0)

    def run_until(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once. After the deadline, ONNX Runtime stops the run between two nodes.

        Raises:
            MissedDeadline: The run was stopped.
        """
        if self._open and self._described is None:
            return self._run_open(deadline_ns)
        return self._run_closed(deadline_ns)

    def cancel(self) -> None:
        """Stop the present run between two nodes. Later runs stop before their first node; see `Kernel`."""
        self._bound.cancel()

    # -- running -------------------------------------------------------------------------------------------------------

    def _run_closed(self, deadline_ns: int) -> ExecutionResult | None:
        if self._encoded:
            self._bind_encoded(deadline_ns)
        return self.conclude(self._bound.run(deadline_ns), deadline_ns)

    def conclude(self, status: int, deadline_ns: int) -> ExecutionResult | None:
        """Return the result of a run that ended with this status, or raise the run's error; see `Kernel`."""
        if status == -errno.ENOSPC:
            status = self._enlarge()
        result = None if self._described is None else self._described.result()
        if status == ErrorStatus.OUTPUT_INSUFFICIENT_SIZE and result is not None:
            raise OutputInsufficientSize("an output needs more room", output_shapes=result[1])
        if status:
            raise self._client_error(status, deadline_ns)
        return result

    def _enlarge(self) -> int:
        assert self._described is not None
        try:
            for each in self._open:
                row = self._outputs[each.position]
                if not row.is_sufficient and isinstance(each.pool, BufferView):
                    each.pool.array(np.uint8, (math.prod(self._dims(each.position)) * row.element_size,))
        except BaseException:
            self._leave_to_library(self._open)
            raise
        return self._described.finish()

    def _bind_encoded(self, deadline_ns: int) -> None:
        """Decode and bind the encoded inputs. An input of type optional that has no value stays unbound."""

        def count() -> None:
            require_time(deadline_ns)
            self._memory.take(_TENSOR)
            self._counted += _TENSOR

        self._memory.give_back(self._counted)
        self._counted = 0
        places = {name: f"input {name!r}" for name in self._encoded}
        values = {name: read(copy_region(self._encoded[name], place), place, count) for name, place in places.items()}
        if None in values.values() or None in self._values:
            self._binding.clear_inputs()
            for bind in self._rebind:
                bind()
        for name, value in values.items():
            if value is not None:
                try:
                    self._binding.bind_value(name, OrtValue.of(value))
                except OrtError as error:
                    raise InvalidArgument(f"{places[name]}: {error}") from None
        self._values = list(values.values())  # ONNX Runtime keeps only addresses.

    def _run_open(self, deadline_ns: int) -> ExecutionResult:
        try:
            self._run_closed(deadline_ns)
            self._fetch()
        finally:
            self._leave_to_library(self._open)  # The next run must allocate again.
        if not all(shape.is_sufficient for shape in self._shapes):
            raise OutputInsufficientSize("an output needs more room", output_shapes=tuple(self._shapes))
        return ErrorStatus.NONE, tuple(self._shapes), NO_TIMING

    def _leave_to_library(self, outputs: Iterable[_Output]) -> None:
        for output in outputs:
            self._binding.bind_output(output.node.name, _CPU)

    def _client_error(self, status: int, deadline_ns: int) -> NNBurstError:
        """Return the client's error for a failure of ONNX Runtime, which may be due to a wrongly declared shape.

        ONNX Runtime refuses to write an output to memory of another shape. So the graph, which has no side effects,
        runs again and lets ONNX Runtime allocate the outputs. If shapes differ, the error is `OutputInsufficientSize`.
        """
        failure = self._bound.failure(status)
        if not self._said or status != ErrorStatus.GENERAL_FAILURE:
            return failure
        try:
            self._leave_to_library(self._said)
            run = self._bound.run if self._described is None else self._described.run_into_binding
            if status := run(deadline_ns):  # Wrong shapes are not the cause.
                return self._bound.failure(status)
            values = ((each.position, value) for each, value in self._output_values() if not each.node.holds)
            shapes = {position: tuple(value.shape()) for position, value in values}
        except Exception as other:
            return GeneralFailure(f"ONNX Runtime: {other}")
        finally:
            self._leave_to_library(self._open)
            for i, node, *_ in self._said:
                place = int(ffi.cast("uintptr_t", self._outputs[i].place))
                self._binding.bind_output(node.name, _CPU, 0, node.element.number, list(self._dims(i)), place)
        wrong = {i for i, *_ in self._said if shapes[i] != self._dims(i)}
        if not wrong or any(len(shape) > HIGHEST_RANK for shape in shapes.values()):
            return failure
        known = [(o, math.prod(shapes[o.position])) for o in self._open if o.position in shapes]
        small = {o.position for o, count in known if count * o.node.element.itemsize > o.room}
        real = [
            OutputShape(shapes.get(i, old.dimensions), i not in wrong | small) for i, old in enumerate(self._shapes)
        ]
        self._leave_open(wrong)
        return OutputInsufficientSize(
            "an output has another shape than the model or the request says", output_shapes=real
        )

    def _dims(self, position: int) -> tuple[int, ...]:
        row = self._outputs[position]
        return tuple(row.dims[0 : row.rank])

    def _output_values(self) -> Iterator[tuple[_Output, OrtValue]]:
        """Return (output, ONNX Runtime's value) for each output. Outputs of equal name share a value."""
        values = dict(
            zip(dict.fromkeys(each.node.name for each in self._written), self._binding.get_outputs(), strict=True)
        )
        return ((each, values[each.node.name]) for each in self._written)

    def _fetch(self) -> None:
        """Copy the outputs that ONNX Runtime allocated, unless their regions are too small."""
        for output, value in self._output_values():
            node, place = output.node, f"output {output.node.name!r}"
            if not output.is_open:
                continue
            if node.holds:
                held, keys = value.value(), self._graph.keys.get(node.name)
                encoded = write(as_maps(held, keys, place) if keys else held)
                self._write_output(output, encoded.shape, encoded)
                continue
            if not value.has_value():
                raise GeneralFailure(f"{place} was not computed")
            shape = tuple(value.shape())
            if len(shape) > HIGHEST_RANK:
                raise GeneralFailure(f"{place} has {len(shape)} dimensions; {HIGHEST_RANK} are possible")
            nbytes = math.prod(shape) * node.element.itemsize
            source = (ctypes.c_uint8 * nbytes).from_address(value.data_ptr()) if nbytes else bytearray()
            self._write_output(output, shape, np.frombuffer(memoryview(source), np.uint8))

    def _write_output(self, output: _Output, shape: tuple[int, ...], source: Bytes) -> None:
        fits = source.nbytes <= output.room
        self._shapes[output.position] = OutputShape(shape, fits)
        if fits and source.nbytes:
            output.pool.array(np.uint8, (source.nbytes,), output.offset)[...] = source


def _writable(pool: MemoryLike, node: GraphArgument, nbytes: int, offset: int) -> Bytes:
    """Return the region of an output. Raises `InvalidArgument` if it cannot be written."""
    region: Bytes = pool.array(np.uint8, (nbytes,), offset)
    if not region.flags.writeable:
        raise InvalidArgument(f"output {node.name!r} lies in read-only memory; share it for writing")
    return region


def _nbytes(node: GraphArgument, operand: OperandDesc, dims: tuple[int, ...]) -> int | None:
    if is_scalar(operand):
        return node.element.itemsize
    return math.prod(dims) * node.element.itemsize if is_fully_specified(dims) else None
