"""Programs: lists of NumPy calls that run requests.

The binding infers shapes, assigns an array to each result (a region of the request, or a private temporary), and lets
each kernel append its calls to a list. A run makes the calls.

An operation whose shapes or parameters depend on a value from the request or another operation ends the list. Each run
binds that operation and all later ones again, when their inputs have values.
"""

from __future__ import annotations

import numpy as np

from ...errors import ErrorStatus, GeneralFailure, InvalidArgument, OutputInsufficientSize, OutputShape
from ...memory.managed import BufferView
from ...model.dimensions import combine_dimensions, is_fully_specified
from ...model.operation_view import UnknownYet
from ...model.running import ExecutionResult, RunOptions
from ...model.types import NO_TIMING, Request
from ..plan import pool_of
from .call import KernelStep
from .graph import Binding, PreparedSubgraph, map_argument
from .limits import LONGEST_LOOP_NS, MemoryBudget, RunLimits


class Program(Binding):
    """A request as a list of kernel calls. Not for concurrent use.

    Args:
        request: A request that `validate_request` accepted.
        options: Options of the run. The deadline is checked between operations.

    Raises:
        InvalidArgument: An output lies in memory that cannot be written.
        GeneralFailure: An operation does not fit its inputs, or a required argument is omitted.
    """

    def __init__(self, graph: PreparedSubgraph, request: Request, options: RunOptions = RunOptions()) -> None:
        arguments = sum(argument.location.length for argument in (*request.inputs, *request.outputs))
        super().__init__(graph, MemoryBudget(arguments + sum(value.nbytes for value in graph.constants.values())))
        loop_ns = min(options.loop_timeout_ns, LONGEST_LOOP_NS) or RunLimits().loop_ns
        self._limits = RunLimits(deadline_ns=options.deadline_ns, loop_ns=loop_ns)
        self._bind_inputs(request)
        self._bind_outputs(request)
        main = graph.subgraph
        self._reports_shapes = not all(
            main.operands[i].is_scalar or is_fully_specified(self.expected[i]) for i in main.output_indexes
        )
        self._steps: list[list[KernelStep]] = []
        with np.errstate(all="ignore"):  # The binding computes with constants.
            self._bind_operations()

    def __call__(self) -> ExecutionResult | None:
        """Run once; see `nnburst.devices.plan.Bind`."""
        with np.errstate(all="ignore"):
            return self._run()

    def _run(self) -> ExecutionResult | None:
        bound = len(self._steps)
        is_bound = bound == len(self.graph.subgraph.operations)
        if not (is_bound and self.insufficient):
            for position, steps in enumerate(self._steps):
                self._limits.require_time()
                self.run_steps(position, steps)
        if not is_bound:
            with self.release_after_run():
                self.run(bound, self._limits)
        if self.insufficient:
            raise OutputInsufficientSize("an output needs more room", output_shapes=self._shapes())
        return (ErrorStatus.NONE, self._shapes(), NO_TIMING) if self._reports_shapes else None

    def run_until(self, deadline_ns: int) -> ExecutionResult | None:
        """Run once. After the deadline, stop between two operations, also within a loop."""
        limits, usual_ns = self._limits, self._limits.deadline_ns
        limits.deadline_ns = deadline_ns
        try:
            return self()
        finally:
            limits.deadline_ns = usual_ns

    def cancel(self) -> None:
        """Stop the present run before its next operation, and every later run before its first. See `Kernel`."""
        self._limits.is_cancelled = True

    # -- binding ----------------------------------------------------------------------------------------------

    def _bind_inputs(self, request: Request) -> None:
        for index, argument in zip(self.graph.subgraph.input_indexes, request.inputs, strict=True):
            if argument.has_no_value:
                self.omitted.add(index)
                continue
            dims = combine_dimensions(self.expected[index], argument.dimensions)
            operand = self.graph.subgraph.operands[index]
            self.arrays[index] = map_argument(pool_of(request, argument), operand, dims, argument.location)

    def _bind_outputs(self, request: Request) -> None:
        indexes = self.graph.subgraph.output_indexes
        for position, (index, argument) in enumerate(zip(indexes, request.outputs, strict=True)):
            if argument.has_no_value:
                raise GeneralFailure(f"output {position} is omitted, but the operation that writes it needs it")
            pool = pool_of(request, argument)
            self.regions[index] = (pool, argument.location)
            self.expected[index] = combine_dimensions(self.expected[index], argument.dimensions)
            if isinstance(pool, BufferView):
                continue  # A buffer is writable and can grow.
            region = pool.array(np.uint8, (argument.location.length,), argument.location.offset)
            if not region.flags.writeable:
                raise InvalidArgument(f"output {position} lies in read-only memory; share it for writing")

    def _bind_operations(self) -> None:
        for position, operation in enumerate(self.graph.subgraph.operations):
            scratch = self.budget.scratch
            try:
                self._steps.append(self.bind(position, None))
            except UnknownYet:
                self.release(operation.outputs)
                self.budget.drop_scratch(scratch)
                return

    def _shapes(self) -> tuple[OutputShape, ...]:
        return tuple(
            OutputShape(self.insufficient[index], False)
            if index in self.insufficient
            else OutputShape(self.arrays[index].shape)
            for index in self.graph.subgraph.output_indexes
        )
