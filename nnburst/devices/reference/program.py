"""A request bound to arrays: the list of calls that one execution makes.

Binding walks the operations once. Shapes are inferred, results get arrays (a region of the request, or a private
temporary), and each kernel appends its NumPy calls, with their arrays, to one list. Running is calling that list.

If something that decides a shape or a parameter is itself computed or supplied by the request, the list ends there
and the rest of the operations are bound anew in every run, when their inputs have values.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from ...errors import ErrorStatus, GeneralFailure, InvalidArgument, OutputInsufficientSize
from ...memory import BufferView
from ...model import (
    NO_TIMING,
    ExecutionResult,
    OutputShape,
    Request,
    RunOptions,
    UnknownYet,
    combine_dimensions,
    is_fully_specified,
)
from ..plan import pool_of
from .call import KernelStep
from .graph import Binding, PreparedSubgraph, map_argument
from .limits import LONGEST_LOOP_NS, PASSING, MemoryBudget, RunLimits


class Program:
    """The calls of one request on one prepared model. Not for concurrent use: its temporaries are its own.

    Args:
        request: A request that `validate_request` accepted.
        options: Deadline, checked between operations, and loop timeout.

    Raises:
        InvalidArgument: An output lies in memory that cannot be written.
        GeneralFailure: The operations do not fit together, or a required argument is omitted.
    """

    def __init__(self, graph: PreparedSubgraph, request: Request, options: RunOptions = RunOptions()) -> None:
        main = self._main = graph.subgraph
        self._operations = main.operations
        self._operands = main.operands
        arguments = sum(argument.location.length for argument in (*request.inputs, *request.outputs))
        budget = MemoryBudget(arguments + sum(value.nbytes for value in graph.constants.values()))
        loop_ns = min(options.loop_timeout_ns, LONGEST_LOOP_NS) or RunLimits().loop_ns
        self._limits = RunLimits(deadline_ns=options.deadline_ns, loop_ns=loop_ns)
        self._binding = Binding(graph, budget)
        self._arrays, self._insufficient = self._binding.arrays, self._binding.insufficient
        self._bind_inputs(request)
        self._bind_outputs(request)
        self._reports_shapes = not all(
            self._operands[i].is_scalar or is_fully_specified(self._binding.expected[i]) for i in main.output_indexes
        )
        self._steps: list[KernelStep] = []
        self._starts: list[int] = []
        with np.errstate(all="ignore"):  # kernels compute from constants, which may be anything
            self._bound = self._bind_operations()

    def __call__(self) -> ExecutionResult | None:
        """Run once; see `nnburst.devices.plan.Bind`."""
        with np.errstate(all="ignore"):
            return self._run()

    def _run(self) -> ExecutionResult | None:
        if self._limits.deadline_ns or not self.is_bound:
            self._run_by_operation()
        elif not self._insufficient:
            self._run_all()
        if self._insufficient:
            raise OutputInsufficientSize("an output needs more room", output_shapes=self._shapes())
        return (ErrorStatus.NONE, self._shapes(), NO_TIMING) if self._reports_shapes else None

    def until(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once; between two operations, also those of a loop, a deadline that has passed ends it."""
        limits, usual_ns = self._limits, self._limits.deadline_ns
        limits.deadline_ns = deadline_ns
        try:
            return self()
        finally:
            limits.deadline_ns = usual_ns

    def cancel(self) -> None:
        """End between two operations, also those of a branch or a loop, and before any other run; see `Kernel`."""
        self._limits.is_cancelled = True
        self._steps[:] = [self._limits.require_time] * len(self._steps)  # also under a run that does not look at it

    @property
    def is_bound(self) -> bool:
        """Whether all operations are bound, so that a run binds nothing."""
        return self._bound == len(self._operations)

    # -- binding ----------------------------------------------------------------------------------------------

    def _bind_inputs(self, request: Request) -> None:
        for index, argument in zip(self._main.input_indexes, request.inputs, strict=True):
            if argument.has_no_value:
                self._binding.omitted.add(index)
                continue
            operand = self._operands[index]
            dims = combine_dimensions(operand.dimensions, argument.dimensions)
            self._arrays[index] = map_argument(pool_of(request, argument), operand, dims, argument.location)

    def _bind_outputs(self, request: Request) -> None:
        for position, (index, argument) in enumerate(zip(self._main.output_indexes, request.outputs, strict=True)):
            if argument.has_no_value:
                raise GeneralFailure(f"output {position} is omitted, but the operation that writes it needs it")
            pool, operand = pool_of(request, argument), self._operands[index]
            self._binding.regions[index] = (pool, argument.location)
            self._binding.expected[index] = combine_dimensions(operand.dimensions, argument.dimensions)
            if isinstance(pool, BufferView):
                continue  # writable, and as large as it needs to be
            region = pool.array(np.uint8, (argument.location.length,), argument.location.offset)
            if not region.flags.writeable:
                raise InvalidArgument(f"output {position} lies in read-only memory; share it for writing")

    def _bind_operations(self) -> int:
        """Bind from the front as far as everything needed is known. Returns how many operations are bound."""
        for position in range(len(self._operations)):
            scratch = self._binding.budget.scratch
            try:
                steps = self._binding.bind(position, None)
            except UnknownYet:
                self._binding.forget(self._operations[position].outputs)
                self._binding.budget.drop_scratch(scratch)
                return position
            self._starts.append(len(self._steps))
            self._steps += steps
        return len(self._operations)

    # -- running ----------------------------------------------------------------------------------------------

    def _run_all(self) -> None:
        """Make all calls. Only a failure asks to which operation a call belongs."""
        try:
            for step in self._steps:
                step()
        except PASSING:
            raise
        except Exception as error:
            which = next(i for i, other in enumerate(self._steps) if other is step)
            raise self._binding.failure(bisect_right(self._starts, which) - 1, error) from error

    def _run_by_operation(self) -> None:
        """Run operation by operation, binding those that could not be bound before."""
        limits = self._limits
        for position in range(self._bound):
            limits.require_time()
            start = self._starts[position]
            end = self._starts[position + 1] if position + 1 < self._bound else len(self._steps)
            self._binding.step_through(position, self._steps[start:end])
        if not self.is_bound:
            with self._binding.for_a_run():
                self._binding.run(self._bound, limits)

    def _shapes(self) -> tuple[OutputShape, ...]:
        return tuple(
            OutputShape(self._insufficient[index], False)
            if index in self._insufficient
            else OutputShape(self._arrays[index].shape)
            for index in self._main.output_indexes
        )
