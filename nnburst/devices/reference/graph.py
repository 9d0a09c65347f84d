"""Bindings of subgraphs to arrays.

A `PreparedSubgraph` has the results of the preparation. A `Binding` is one use of a subgraph, with an array for each
operand. Arrays come from the request or the enclosing operation, or are created when an operation is bound.
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from msgspec import Struct

from ...errors import GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError
from ...model.dimensions import combine_dimensions
from ...model.operand_types import operand_info
from ...model.operation_types import OperationType, operation_name
from ...model.operation_view import Match, Signature, UnknownYet
from ...model.types import Array, DataLocation, Lifetime, MemoryLike, OperandDesc, Operation, Subgraph
from .call import KernelCall, KernelStep
from .kernels import KERNELS
from .limits import PASSING, MemoryBudget, RunLimits

_Value = Array | None
"""An operand's array; None for an omitted value."""
CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)


class PreparedSubgraph(Struct, frozen=True):
    """The results of a subgraph's preparation.

    Attributes:
        constants: Read-only value of each constant operand.
        matches: For each operation, its signature and how its inputs match the signature.
        derived: Arrays that operations made from constants, such as transposed weights.
        referenced: The subgraphs to which operations can refer.
    """

    subgraph: Subgraph
    constants: Mapping[int, Array]
    matches: tuple[tuple[Signature, Match], ...]
    derived: dict[Hashable, Array]
    referenced: Sequence[PreparedSubgraph] = ()


class Binding:
    """A subgraph with arrays for its operands. Not for concurrent use.

    Attributes:
        regions: By operand: the request's memory for the result. A result without an entry gets a new array.
        expected: Declared dimensions of each operand.
        insufficient: Dimensions of results for which the regions are too small.
    """

    def __init__(self, graph: PreparedSubgraph, budget: MemoryBudget) -> None:
        operands = graph.subgraph.operands
        self.graph = graph
        self.arrays: dict[int, Array] = dict(graph.constants)
        self.omitted = {i for i, operand in enumerate(operands) if operand.lifetime == Lifetime.NO_VALUE}
        self.regions: dict[int, tuple[MemoryLike, DataLocation]] = {}
        self.expected = [operand.dimensions for operand in operands]
        self.insufficient: dict[int, tuple[int, ...]] = {}
        self.budget = budget
        self._taken: dict[int, int] = {}

    def run(self, start: int, limits: RunLimits) -> None:
        """Bind and run the operations from position `start` on, one after the other."""
        for position in range(start, len(self.graph.subgraph.operations)):
            limits.require_time()
            scratch = self.budget.scratch
            self.run_steps(position, self.bind(position, limits))
            self.budget.drop_scratch(scratch)

    def release(self, operands: Iterable[int]) -> None:
        for index in operands:
            if index in self._taken:
                del self.arrays[index]
                self.budget.drop_results(self._taken.pop(index))

    def hand_over(self, operands: Iterable[int]) -> int:
        """Release all arrays except those of `operands`, which the caller gets. Return the size of these in bytes."""
        handed = sum(self._taken.pop(index, 0) for index in set(operands))
        self.release(tuple(self._taken))
        return handed

    @contextmanager
    def release_after_run(self) -> Iterator[None]:
        """Release, at the end of a ``with`` block, the arrays that were created for results in the block."""
        bound = frozenset(self._taken)
        try:
            with self.budget.release_after_run():
                yield
        finally:
            for index in self._taken.keys() - bound:
                del self.arrays[index], self._taken[index]

    def run_steps(self, position: int, steps: Sequence[KernelStep]) -> None:
        """Make an operation's calls. Errors not in `PASSING` become a `GeneralFailure` that names the operation."""
        try:
            for step in steps:
                step()
        except PASSING:
            raise
        except Exception as error:
            raise self.failure(position, error) from error

    def failure(self, position: int, error: Exception) -> GeneralFailure:
        name = operation_name(self.graph.subgraph.operations[position].type)
        reason = str(error) if isinstance(error, NNBurstError) else f"{type(error).__name__}: {error}"
        return GeneralFailure(f"operation {position} ({name}): {reason}")

    def bind(self, position: int, limits: RunLimits | None) -> list[KernelStep]:
        """Create arrays for an operation's results; return the calls that compute the results.

        Args:
            limits: Limits of the present run; None if no run has begun. In a run, all inputs have values, and this call
                runs IF and WHILE. Before a run, only constants have values.

        Raises:
            UnknownYet: The operation needs a value that only a run computes.
            GeneralFailure: The operation does not fit its inputs.
        """
        operation, eager = self.graph.subgraph.operations[position], limits is not None
        row, match = self.graph.matches[position]
        try:
            self._require_inputs(operation, match.omittable)
            if operation.type in CONTROL_FLOW:
                if limits is None:
                    raise UnknownYet("control flow is run, not bound")
                (_run_if if operation.type == OperationType.IF else _run_while)(self, operation, limits)
                return []
            call = KernelCall(self, position, eager=eager)
            specs = call.infer()
            if not row.zero_sized and any(self.arrays[i].size == 0 for i in operation.inputs if i in self.arrays):
                raise InvalidArgument("it takes no zero-sized inputs")
            if row.measured and not eager:
                raise UnknownYet("its results are measured")
            if not row.measured:
                for index, spec in zip(operation.outputs, specs, strict=True):
                    self.place(index, spec.dimensions)
                if all(self.arrays[index].size == 0 for index in operation.outputs):
                    return []
            KERNELS[operation.type](call)
            return call.finished_steps()
        except PASSING:
            raise
        except Exception as error:
            if isinstance(error, UnknownYet) and not eager:
                raise
            raise self.failure(position, error) from error

    def _require_inputs(self, operation: Operation, omittable: frozenset[int]) -> None:
        for position, index in enumerate(operation.inputs):
            if index in self.omitted and position not in omittable:
                raise InvalidArgument(f"input {position} has no value, but the operation needs one")

    def place(self, index: int, dims: tuple[int, ...]) -> None:
        """Create a result's array, after comparing the dimensions with the declared dimensions."""
        operand, expected = self.graph.subgraph.operands[index], self.expected[index]
        if expected and (
            len(expected) != len(dims) or any(e not in (0, d) for e, d in zip(expected, dims, strict=True))
        ):
            raise InvalidArgument(
                f"the result has dimensions {list(dims)}, but operand {index} is declared as {list(expected)}"
            )
        info = operand_info(operand.type)
        nbytes = math.prod(dims) * info.element_size
        self.release((index,))
        if index in self.regions:
            pool, location = self.regions[index]
            if nbytes <= location.length:
                self.insufficient.pop(index, None)
                self.arrays[index] = map_argument(pool, operand, dims, location)
                return
            self.insufficient[index] = dims
        self.budget.take_result(nbytes, dims)
        self.arrays[index] = np.empty(dims, info.dtype)
        self._taken[index] = nbytes


def map_argument(pool: MemoryLike, operand: OperandDesc, dims: tuple[int, ...], location: DataLocation) -> Array:
    dtype = operand_info(operand.type).dtype
    if dtype is None:
        raise GeneralFailure("an operand of a type without defined contents cannot be an argument")
    if 0 in dims:
        return np.empty(dims, dtype)
    return pool.array(dtype, dims, location.offset)


# -- IF and WHILE, whose subgraphs are bound and run when their inputs have values ------------------------------------


def _run_if(outer: Binding, operation: Operation, limits: RunLimits) -> None:
    condition, then, otherwise, *values = operation.inputs
    chosen = then if _is_true(outer.arrays[condition]) else otherwise
    results, nbytes = _run_subgraph(outer, chosen, [_value(outer, index) for index in values], limits)
    _set_results(outer, operation, results)
    outer.budget.drop_results(nbytes)


def _run_while(outer: Binding, operation: Operation, limits: RunLimits) -> None:
    """Run a body while a condition is true. The body's results replace its first inputs in the next iteration."""
    condition, body, *indexes = operation.inputs
    values = [_value(outer, index) for index in indexes]
    begin = time.monotonic_ns()
    held = 0  # bytes of the values in the budget
    while True:
        (goes_on,), nbytes = _run_subgraph(outer, condition, values, limits)
        outer.budget.drop_results(nbytes)
        if not _is_true(goes_on):
            break
        if time.monotonic_ns() >= begin + limits.loop_ns:
            raise MissedDeadline(f"a WHILE ran for more than {limits.loop_ns / 1e9:g} s; raise the loop timeout")
        results, nbytes = _run_subgraph(outer, body, values, limits)
        values[: len(results)] = results
        outer.budget.drop_results(held)
        held = nbytes
    _set_results(outer, operation, values)
    outer.budget.drop_results(held)


def _is_true(condition: Array) -> bool:
    return bool(condition.reshape(-1)[0])


def _value(outer: Binding, index: int) -> _Value:
    return None if index in outer.omitted else outer.arrays[index]


def _run_subgraph(
    outer: Binding, reference: int, values: Sequence[_Value], limits: RunLimits
) -> tuple[list[Array], int]:
    """Run the subgraph to which an operand refers. Return the outputs, and their bytes in the memory budget."""
    referenced = outer.graph.referenced
    graph = referenced[outer.graph.subgraph.operands[reference].location.offset]
    inner = Binding(graph, outer.budget)
    for index, value in zip(graph.subgraph.input_indexes, values, strict=True):
        if value is None:
            inner.omitted.add(index)
        else:
            combine_dimensions(graph.subgraph.operands[index].dimensions, value.shape)
            inner.arrays[index] = value
    inner.run(0, limits)
    outputs = graph.subgraph.output_indexes
    return [inner.arrays[index] for index in outputs], inner.hand_over(outputs)


def _set_results(outer: Binding, operation: Operation, results: Sequence[_Value]) -> None:
    for index, result in zip(operation.outputs, results, strict=False):
        assert result is not None  # A subgraph's output always has a value.
        outer.place(index, result.shape)
        outer.arrays[index][...] = result
