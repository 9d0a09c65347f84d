"""Requests that consist of several steps. Each step is one call of a kernel.

The kernel is bound to private arrays, which are as large as one step needs. Before each step, ``csrc/steps.c`` copies
the step's inputs and state into these arrays. After each step, it copies the outputs to the client's memory.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import numpy as np
from msgspec.structs import replace

from .._core._nnburst import ffi, lib
from .._core.errno import check
from ..burst.cancellation import CancelFlag, WorkingMemory
from ..burst.kernel import Kernel, run_until
from ..errors import (
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    OutputShape,
    error_for,
)
from ..memory.descriptor import private_bytes
from ..memory.staging import Region
from ..model.running import ExecutionResult, RunOptions, failure_of
from ..model.types import Array, DataLocation, Named, Request, RequestArgument, Steps
from .deadline import is_limit


def _errors() -> dict[int, NNBurstError]:
    return {
        errno.EPIPE: GeneralFailure("ended before it, for its client has gone, closed the burst, or given the run up"),
        errno.ETIMEDOUT: MissedDeadline("the deadline has passed; give it more time"),
    }


class SteppedKernel:
    """A kernel that runs all steps of a request. Not for concurrent use.

    Args:
        bind: Function that returns the kernel of one step.
        flag: Flag that is raised if the client stops waiting; or None.

    Raises:
        InvalidArgument: An output lies in memory that cannot be written.
        NNBurstError: See `bind`.
    """

    def __init__(
        self,
        bind: Callable[[Request, RunOptions], Kernel],
        steps: Steps,
        flag: CancelFlag | None,
        request: Request,
        options: RunOptions,
    ) -> None:
        self._count = steps.count
        self._memory = WorkingMemory()
        own: list[Region] = []  # pools with the arguments of one step
        exchanged: list[list[tuple[Array, Array, int]]] = [[], []]  # (one step, all, stride)
        pairs: dict[int, tuple[Array, Array]] = {}  # arrays of a state (read, written), by position of the output
        self._first: list[tuple[Array, Array]] = []  # (private array, buffer) of each state
        self._last: list[tuple[Array, Array]] = []
        outputs_of = {target: output for output, target in steps.state}

        def private(nbytes: int) -> Array:
            self._memory.take(nbytes)
            return private_bytes(nbytes)

        def bind_argument(position: int, argument: RequestArgument, *, is_input: bool) -> RequestArgument:
            if argument.has_no_value:
                return argument
            pool, location = request.pools[argument.location.pool_index], argument.location
            assert not isinstance(pool, Named)
            output = outputs_of.get(position) if is_input else position
            if is_input and output is not None:
                one, _ = pairs[output] = private(pool.size), private(pool.size)
                self._first.append((one, pool.array(np.uint8, (pool.size,))))
            elif not is_input and position in pairs:
                read, one = pairs[position]
                exchanged[1].append((one, read, 0))
                self._last.append((one, pool.array(np.uint8, (one.nbytes,))))
            else:
                whole = pool.array(np.uint8, (location.length,), location.offset)
                one = private(location.length // self._count)
                if not is_input and not whole.flags.writeable:
                    raise InvalidArgument(f"output {position} lies in read-only memory; share it for writing")
                exchanged[not is_input].append((one, whole, one.nbytes))
            own.append(Region(_readable(one) if is_input else one, is_private=True))
            return replace(argument, location=DataLocation(len(own) - 1, 0, one.nbytes))

        inputs = tuple(bind_argument(i, argument, is_input=True) for i, argument in enumerate(request.inputs))
        outputs = tuple(bind_argument(i, argument, is_input=False) for i, argument in enumerate(request.outputs))
        self._kernel = bind(Request(inputs, outputs, tuple(own)), options)
        self._dimensions = [argument.dimensions for argument in request.outputs]
        self._exchanged = exchanged
        every = [*exchanged[0], *exchanged[1]]
        self._rows = ffi.new("nnb_step_argument[]", max(1, len(every)))
        for row, (one, whole, stride) in zip(self._rows, every, strict=False):
            row.one, row.all = ffi.cast("uint8_t *", one.ctypes.data), ffi.cast("uint8_t *", whole.ctypes.data)
            row.nbytes, row.stride = one.nbytes, stride
        nbytes = sum(one.nbytes for one, _, _ in every)
        sizes = {"n_inputs": len(exchanged[0]), "n": len(every), "count": self._count, "nbytes": nbytes}
        self._cancel_flag = flag
        who = {} if flag is None else {"gone": flag.cancelled, "server": flag.server}
        self._steps = ffi.new("nnb_steps *", {"arguments": self._rows, "lasted_ns": 2**64 - 1, **who, **sizes})

    def __call__(self) -> None:
        self.run_until(0)

    def run_until(self, deadline_ns: int) -> None:
        """Run all steps. After the deadline, stop within a long step if the device can, else before the next step.

        Raises:
            MissedDeadline: The run was stopped.
        """
        turn, steps, kernel = lib.nnb_steps_turn, self._steps, self._kernel
        steps.deadline_ns = deadline_ns if is_limit(deadline_ns) else 0
        step = 0
        try:
            for private, buffer in self._first:
                private[...] = buffer
            for step in range(self._count):
                code = turn(steps, step)
                if code < 0:
                    check(code, special=_errors())
                result = run_until(kernel, deadline_ns) if code else kernel()
                if result is not None:
                    self._check(result)
        except Exception as error:
            raise self._step_error(step, error) from error
        turn(steps, self._count)
        for private, buffer in self._last:
            buffer[...] = private

    def _check(self, result: ExecutionResult) -> None:
        """Raise `GeneralFailure` for unexpected output shapes, since the client gets no shapes."""
        shapes: tuple[OutputShape, ...] = result[1]
        for position, (shape, dims) in enumerate(zip(shapes, self._dimensions, strict=False)):
            if dims and shape.dimensions != dims:
                raise GeneralFailure(f"output {position} has shape {shape.dimensions}, not {dims}")

    def _step_error(self, step: int, error: Exception) -> NNBurstError:
        status, shapes, _ = failure = failure_of(error)
        where = f"step {step} of {self._count}"
        if isinstance(error, OutputInsufficientSize):
            real = [shape.dimensions for shape in shapes]
            return GeneralFailure(f"{where}: outputs have shapes {real}, for which there is no room")
        return error_for(status, f"{where}: {failure.reason}")


def _readable(raw: Array) -> Array:
    view = raw[:]
    view.flags.writeable = False
    return view
