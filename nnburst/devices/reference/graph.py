"""Binding the operations of one subgraph to arrays.

A `PreparedSubgraph` is what preparation knows of a subgraph; a `Binding` is one use of it: every operand has an array,
given by a request or by the operation around it, or made when the operation that writes it is bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from msgspec import Struct

from ...burst import WorkingMemory
from ...errors import GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted
from ...model import (
    DataLocation,
    Lifetime,
    Match,
    MemoryLike,
    OperandDesc,
    Operation,
    OperationType,
    OutputSpec,
    Signature,
    Subgraph,
    UnknownYet,
    operand_info,
    operation_name,
)
from ..deadline import deadline_passed
from .call import KernelCall, KernelStep
from .kernels import KERNELS

Array = np.ndarray[Any, np.dtype[Any]]
_MOST_PLACES = 4
PASSING = (MissedDeadline, ResourceExhausted, MemoryError)
"""What ends an execution with a status of its own, whichever operation it comes from."""
CONTROL_FLOW = (OperationType.IF, OperationType.WHILE)
LONGEST_LOOP_NS = 15_000_000_000
"""What a WHILE may take at most, whatever is asked for."""
_LEAST_MEMORY = 1 << 28
_MEMORY_FACTOR = 64
"""Results of the operations of an execution may take so many times the bytes of request and constants, and 256 MiB in
any case; kernels use up to eight times the size of what they compute on."""


class OperationFailure(GeneralFailure):
    """An operation has failed.

    Args:
        places: The operation, after those of control flow that it is inside, from the outermost.
        reason: Why.
    """

    def __init__(self, places: tuple[str, ...], reason: str) -> None:
        self.places, self.reason = places, reason
        shown = places if len(places) <= _MOST_PLACES else (*places[:2], f"{len(places) - 3} more", places[-1])
        super().__init__(f"{': '.join(shown)}: {reason}")


class PreparedSubgraph(Struct, frozen=True):
    """What preparation knows of a subgraph.

    Attributes:
        subgraph: Operands, operations, inputs and outputs.
        constants: Value of each constant operand, read-only.
        matches: Signature and matched inputs of each operation.
        derived: Returns what an operation made from constants, or makes it.
        referenced: All subgraphs that operations may refer to.
    """

    subgraph: Subgraph
    constants: Mapping[int, Array]
    matches: tuple[tuple[Signature, Match], ...]
    derived: Callable[[Hashable, Callable[[], Any]], Any]
    referenced: Sequence[PreparedSubgraph] = ()


class RunLimits(Struct):
    """How far an execution may go. Kept from one execution to the next; each sets its deadline.

    Attributes:
        deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds; 0 is none.
        loop_ns: Nanoseconds that one WHILE may take.
        spent: What each WHILE has taken so far, by its id, where all runs of it together may take `loop_ns`.
        is_cancelled: Nobody awaits the results: there is no time left, whatever the deadline. Any thread may set it.
    """

    deadline_ns: int = 0
    loop_ns: int = 2_000_000_000
    spent: dict[int, int] | None = None
    is_cancelled: bool = False

    def require_time(self) -> None:
        """Raise `MissedDeadline` once the deadline has passed, or nobody awaits the results."""
        if self.is_cancelled:
            raise MissedDeadline("the execution was ended, for its client has gone or closed the burst")
        if deadline_passed(self.deadline_ns):
            raise MissedDeadline("the execution's deadline has passed")


class MemoryBudget(WorkingMemory):
    """The memory that one execution may take, with all subgraphs that it runs inside each other.

    Args:
        nbytes: Of its arguments and constants.

    Attributes:
        results: Bytes of the results of operations that there are now; they are limited.
        scratch: Bytes of the kernels' own arrays.
    """

    __slots__ = ("_most", "results", "scratch")

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self._most = max(_LEAST_MEMORY, _MEMORY_FACTOR * nbytes)
        self.results = self.scratch = 0

    def take_result(self, nbytes: int, dims: tuple[int, ...]) -> None:
        """Count a result.

        Raises:
            ResourceExhausted: The results of the execution take too much memory, or the caller's quota is used up.
        """
        if self.results + nbytes > self._most:
            raise ResourceExhausted(f"results take more than {self._most} bytes; the last has dimensions {list(dims)}")
        self.take(nbytes)
        self.results += nbytes

    def drop_results(self, nbytes: int) -> None:
        """So many bytes of results are free."""
        self.give_back(nbytes)
        self.results -= nbytes

    def take_scratch(self, shape: tuple[int, ...], nbytes: int) -> None:
        """Count an array of a kernel.

        Raises:
            ResourceExhausted: It is larger than all results may be, or the caller's quota is used up.
        """
        if nbytes > self._most:
            raise ResourceExhausted(f"{list(shape)} elements of working memory are more than {self._most} bytes")
        self.take(nbytes)
        self.scratch += nbytes

    def drop_scratch(self, to: int) -> None:
        """Arrays of kernels are free, but for so many bytes."""
        self.give_back(self.scratch - to)
        self.scratch = to

    @contextmanager
    def for_a_run(self) -> Iterator[None]:
        """See `WorkingMemory.for_a_run`."""
        results, scratch = self.results, self.scratch
        try:
            with super().for_a_run():
                yield
        finally:
            self.results, self.scratch = results, scratch


class Binding:
    """A subgraph whose operands have arrays, as far as it is bound. Not for concurrent use.

    Attributes:
        arrays: By operand.
        omitted: Operands without a value.
        regions: Where results go that do not get an array of their own.
        expected: What model and request say of each operand's dimensions.
        insufficient: Results that are larger than their regions, with their dimensions.
        reads: Constants whose stored values are used, when operations are bound or in each run.
    """

    def __init__(self, graph: PreparedSubgraph, budget: MemoryBudget) -> None:
        operands = graph.subgraph.operands
        self.graph = graph
        self.arrays: dict[int, Array] = dict(graph.constants)
        self.omitted = {i for i, operand in enumerate(operands) if operand.lifetime == Lifetime.NO_VALUE}
        self.regions: dict[int, tuple[MemoryLike, DataLocation]] = {}
        self.expected = [operand.dimensions for operand in operands]
        self.insufficient: dict[int, tuple[int, ...]] = {}
        self.reads: set[int] = set()
        self.budget = budget
        self._taken: dict[int, int] = {}

    def run(self, start: int, limits: RunLimits) -> None:
        """Bind and run the operations from `start` on, one after the other.

        Raises:
            NNBurstError: An operation fails, or the limits are reached.
        """
        for position in range(start, len(self.graph.subgraph.operations)):
            limits.require_time()
            scratch = self.budget.scratch
            self.step_through(position, self.bind(position, limits))
            self.budget.drop_scratch(scratch)

    def forget(self, operands: Iterable[int]) -> None:
        """Let go of the arrays that were made for results."""
        for index in operands:
            if index in self._taken:
                del self.arrays[index]
                self.budget.drop_results(self._taken.pop(index))

    def hand_over(self, operands: Iterable[int]) -> int:
        """Let go of all arrays that were made, but for those of some results: the caller has them from now on.

        Returns:
            What these count in the budget.
        """
        handed = sum(self._taken.pop(index, 0) for index in set(operands))
        self.forget(tuple(self._taken))
        return handed

    @contextmanager
    def for_a_run(self) -> Iterator[None]:
        """Results that get their arrays in the with block lose them at its end."""
        bound = frozenset(self._taken)
        try:
            with self.budget.for_a_run():
                yield
        finally:
            for index in self._taken.keys() - bound:
                del self.arrays[index], self._taken[index]

    def step_through(self, position: int, steps: Sequence[KernelStep]) -> None:
        """Make the calls of an operation.

        Raises:
            NNBurstError: One fails; the message names the operation.
        """
        try:
            for step in steps:
                step()
        except PASSING:
            raise
        except Exception as error:
            raise self.failure(position, error) from error

    def failure(self, position: int, error: Exception) -> GeneralFailure:
        """Return what an execution fails with when one of its operations does."""
        place = f"operation {position} ({operation_name(self.graph.subgraph.operations[position].type)})"
        if isinstance(error, OperationFailure):
            return OperationFailure((place, *error.places), error.reason)
        reason = str(error) if isinstance(error, NNBurstError) else f"{type(error).__name__}: {error}"
        return OperationFailure((place,), reason)

    def bind(self, position: int, limits: RunLimits | None) -> list[KernelStep]:
        """Give an operation's results their arrays and return the calls that compute them.

        Args:
            position: The operation.
            limits: None while only constants have values; else all inputs have theirs, and control flow is run.

        Raises:
            UnknownYet: It needs a value that is not known.
            GeneralFailure: The operation does not fit its inputs.
        """
        operation, eager = self.graph.subgraph.operations[position], limits is not None
        row, match = self.graph.matches[position]
        try:
            self._require_inputs(operation, match.omittable)
            if operation.type in CONTROL_FLOW:
                return self._run_control_flow(operation, limits)
            call = self._call(position, eager)
            specs = call.infer()
            if not row.zero_sized and any(self.arrays[i].size == 0 for i in operation.inputs if i in self.arrays):
                raise InvalidArgument("it takes no zero-sized inputs")
            if row.measured and not eager:
                raise UnknownYet("its results are measured")
            if not row.measured:
                for index, spec in zip(operation.outputs, specs, strict=True):
                    self._place_spec(index, spec)
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

    def _call(self, position: int, eager: bool) -> KernelCall:
        graph = self.graph  # the closures must not hold the binding: a cycle would keep its mappings
        row, match = graph.matches[position]
        return KernelCall(
            graph.subgraph.operations[position],
            graph.subgraph.operands,
            row,
            match,
            arrays=self.arrays,
            omitted=self.omitted,
            is_known=(lambda index: True) if eager else graph.constants.__contains__,
            derived=lambda key, make: graph.derived((position, key), make),
            is_constant=graph.constants.__contains__,
            reads=self.reads,
            budget=self.budget,
            place=self.place if row.measured else None,
        )

    def _run_control_flow(self, operation: Operation, limits: RunLimits | None) -> list[KernelStep]:
        if limits is None:
            raise UnknownYet("control flow is run, not bound")
        from .control import run_if, run_while

        (run_if if operation.type == OperationType.IF else run_while)(self, operation, limits)
        return []

    def _require_inputs(self, operation: Operation, omittable: frozenset[int]) -> None:
        for position, index in enumerate(operation.inputs):
            if index in self.omitted and position not in omittable:
                raise InvalidArgument(f"input {position} has no value, but the operation needs one")

    def _place_spec(self, index: int, spec: OutputSpec) -> None:
        self.place(index, spec.dimensions)

    def place(self, index: int, dims: tuple[int, ...]) -> None:
        """Give a result its array, after checking that it has the dimensions that model and request say.

        Raises:
            InvalidArgument: It has others.
            ResourceExhausted: See `MemoryBudget.take_result`.
        """
        operand, expected = self.graph.subgraph.operands[index], self.expected[index]
        if expected and (
            len(expected) != len(dims) or any(e not in (0, d) for e, d in zip(expected, dims, strict=True))
        ):
            raise InvalidArgument(
                f"the result has dimensions {list(dims)}, but operand {index} is declared as {list(expected)}"
            )
        info = operand_info(operand.type)
        nbytes = math.prod(dims) * info.element_size
        self.forget((index,))
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
    """Return the array of an argument of a request."""
    dtype = operand_info(operand.type).dtype
    if dtype is None:
        raise GeneralFailure("an operand of a type without defined contents cannot be an argument")
    if 0 in dims:
        return np.empty(dims, dtype)
    return pool.array(dtype, dims, location.offset)
