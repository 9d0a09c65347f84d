"""A request bound to arrays: the list of calls that one execution makes.

Binding walks the operations once. Shapes are inferred, results get arrays (a region of the request, or a private
temporary), and each kernel appends its NumPy calls, with their arrays, to one list. Running is calling that list.

If something that decides a shape or a parameter is itself computed or supplied by the request, the list ends there
and the rest of the operations are bound anew in every run, when their inputs have values.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline, OutputInsufficientSize
from ...memory import BufferView
from ...model import (
    NO_TIMING,
    BufferToken,
    DataLocation,
    ExecutionResult,
    Lifetime,
    MemoryLike,
    Operand,
    Operation,
    OutputShape,
    OutputSpec,
    Request,
    RequestArgument,
    UnknownYet,
    combine_dimensions,
    is_fully_specified,
    operand_info,
    operation_name,
)
from .._common import deadline_passed
from .call import KernelCall, Step
from .kernels import KERNELS

if TYPE_CHECKING:
    from .prepared import ReferencePreparedModel

__all__ = ["Program"]

Array = np.ndarray[Any, np.dtype[Any]]


class Program:
    """The calls of one request on one prepared model. Not for concurrent use: its temporaries are its own.

    Args:
        prepared: The model.
        request: A request that `validate_request` accepted.
        deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds, checked between operations; 0 for none.

    Attributes:
        reads: Constants whose stored values are used, when operations are bound or in each run.

    Raises:
        InvalidArgument: An output lies in memory that cannot be written.
        GeneralFailure: The operations do not fit together, or a required argument is omitted.
    """

    def __init__(self, prepared: ReferencePreparedModel, request: Request, deadline_ns: int = 0) -> None:
        self._prepared = prepared
        self._deadline_ns = deadline_ns
        self.reads: set[int] = set()
        main = prepared.model.main
        self._operations = main.operations
        self._operands = main.operands
        self._arrays: dict[int, Array] = dict(prepared.constants)
        self._omitted = {i for i, operand in enumerate(main.operands) if operand.lifetime == Lifetime.NO_VALUE}
        self._regions: dict[int, tuple[MemoryLike, DataLocation]] = {}
        self._expected = [operand.dimensions for operand in main.operands]
        self._insufficient: dict[int, tuple[int, ...]] = {}
        self._bind_inputs(request)
        self._bind_outputs(request)
        self._reports_shapes = any(not self._is_complete(index) for index in main.output_indexes)
        self._steps: list[Step] = []
        self._starts: list[int] = []
        self._bound = self._bind_operations()

    def __call__(self) -> ExecutionResult | None:
        """Run once; see `nnburst.devices._plan.Bind`."""
        with np.errstate(all="ignore"):
            if self._deadline_ns or not self.is_bound:
                self._run_until(self._deadline_ns)
            elif not self._insufficient:
                for step in self._steps:
                    step()
        if self._insufficient:
            raise OutputInsufficientSize("an output needs more room", output_shapes=self._shapes())
        return (ErrorStatus.NONE, self._shapes(), NO_TIMING) if self._reports_shapes else None

    @property
    def is_bound(self) -> bool:
        """Whether all operations are bound, so that a run binds nothing."""
        return self._bound == len(self._operations)

    # -- binding ----------------------------------------------------------------------------------------------

    def _bind_inputs(self, request: Request) -> None:
        for index, argument in zip(self._prepared.model.main.input_indexes, request.inputs, strict=True):
            if argument.has_no_value:
                self._omitted.add(index)
                continue
            operand = self._operands[index]
            dims = combine_dimensions(operand.dimensions, argument.dimensions)
            self._arrays[index] = _map(_pool(request, argument), operand, dims, argument.location)

    def _bind_outputs(self, request: Request) -> None:
        for position, (index, argument) in enumerate(
            zip(self._prepared.model.main.output_indexes, request.outputs, strict=True)
        ):
            if argument.has_no_value:
                raise GeneralFailure(f"output {position} is omitted, but the operation that writes it needs it")
            pool, operand = _pool(request, argument), self._operands[index]
            self._regions[index] = (pool, argument.location)
            self._expected[index] = combine_dimensions(operand.dimensions, argument.dimensions)
            if isinstance(pool, BufferView):
                continue  # writable, and as large as it needs to be
            region = pool.array(np.uint8, (argument.location.length,), argument.location.offset)
            if not region.flags.writeable:
                raise InvalidArgument(f"output {position} lies in read-only memory; share it for writing")

    def _bind_operations(self) -> int:
        """Bind from the front as far as everything needed is known. Returns how many operations are bound."""
        for position in range(len(self._operations)):
            try:
                steps = self._bind_operation(position, eager=False)
            except UnknownYet:
                return position
            self._starts.append(len(self._steps))
            self._steps += steps
        return len(self._operations)

    def _bind_operation(self, position: int, *, eager: bool) -> list[Step]:
        operation = self._operations[position]
        prepared = self._prepared  # the closures below must not hold the program: a cycle would keep its mappings
        row, match = prepared.matches[position]
        try:
            self._require_inputs(operation, match.omittable)
            call = KernelCall(
                operation,
                self._operands,
                row,
                match,
                arrays=self._arrays,
                omitted=self._omitted,
                is_known=(lambda index: True) if eager else prepared.constants.__contains__,
                derived=lambda key, make: prepared.derived((position, key), make),
                is_constant=prepared.constants.__contains__,
                reads=self.reads,
            )
            specs = call.infer()
            if not row.zero_sized and any(self._arrays[i].size == 0 for i in operation.inputs if i in self._arrays):
                raise InvalidArgument("it takes no zero-sized inputs")
            for index, spec in zip(operation.outputs, specs, strict=True):
                self._place_result(index, spec)
            if all(self._arrays[index].size == 0 for index in operation.outputs):
                return []
            KERNELS[operation.type](call)
            return call.finished_steps()
        except UnknownYet:
            raise
        except InvalidArgument as error:
            raise GeneralFailure(f"operation {position} ({operation_name(operation.type)}): {error}") from error

    def _require_inputs(self, operation: Operation, omittable: frozenset[int]) -> None:
        for position, index in enumerate(operation.inputs):
            if index in self._omitted and position not in omittable:
                raise InvalidArgument(f"input {position} has no value, but the operation needs one")

    def _place_result(self, index: int, spec: OutputSpec) -> None:
        """Give a result its array, after checking that it has the dimensions that model and request say."""
        operand, expected, dims = self._operands[index], self._expected[index], spec.dimensions
        if expected and (
            len(expected) != len(dims) or any(e not in (0, d) for e, d in zip(expected, dims, strict=True))
        ):
            raise InvalidArgument(
                f"the result has dimensions {list(dims)}, but operand {index} is declared as {list(expected)}"
            )
        if index not in self._regions:
            self._arrays[index] = np.empty(dims, operand_info(operand.type).dtype)
            return
        pool, location = self._regions[index]
        if math.prod(dims) * operand_info(operand.type).element_size > location.length:
            self._insufficient[index] = dims
            self._arrays[index] = np.empty(dims, operand_info(operand.type).dtype)
        else:
            self._insufficient.pop(index, None)
            self._arrays[index] = _map(pool, operand, dims, location)

    # -- running ----------------------------------------------------------------------------------------------

    def _run_until(self, deadline_ns: int) -> None:
        """Run operation by operation, binding those that could not be bound before."""
        for position in range(self._bound):
            _require_time(deadline_ns)
            start = self._starts[position]
            end = self._starts[position + 1] if position + 1 < self._bound else len(self._steps)
            for step in self._steps[start:end]:
                step()
        for position in range(self._bound, len(self._operations)):
            _require_time(deadline_ns)
            for step in self._bind_operation(position, eager=True):
                step()

    def _is_complete(self, index: int) -> bool:
        return operand_info(self._operands[index].type).is_scalar or is_fully_specified(self._expected[index])

    def _shapes(self) -> tuple[OutputShape, ...]:
        return tuple(
            OutputShape(self._arrays[index].shape, index not in self._insufficient)
            for index in self._prepared.model.main.output_indexes
        )


def _require_time(deadline_ns: int) -> None:
    if deadline_passed(deadline_ns):
        raise MissedDeadline("the execution's deadline has passed")


def _pool(request: Request, argument: RequestArgument) -> MemoryLike:
    pool = request.pools[argument.location.pool_index]
    assert not isinstance(pool, BufferToken)  # replaced by a view before the plan is made
    return pool


def _map(pool: MemoryLike, operand: Operand, dims: tuple[int, ...], location: DataLocation) -> Array:
    dtype = operand_info(operand.type).dtype
    if dtype is None:
        raise GeneralFailure("an operand of a type without defined contents cannot be an argument")
    if 0 in dims:
        return np.empty(dims, dtype)
    return pool.array(dtype, dims, location.offset)
