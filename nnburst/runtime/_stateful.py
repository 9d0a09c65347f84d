"""An execution whose recurrent state stays in the device (facts sheet `memory.md` §5, §7)."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices import Buffer
from ..errors import BadState, InvalidArgument
from ..memory import Memory
from ..model import BufferDesc, BufferRole, BufferToken
from ._arguments import NodeArg, Placement
from ._bound import BoundExecution

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from ..burst import ExecutionBurstController
    from ..devices import Device, PreparedModel

__all__ = ["StatePair", "StatefulExecution", "state_pairs"]

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class StatePair:
    """An output whose value is the input of the next run."""

    source: NodeArg
    target: NodeArg
    output_index: int
    input_index: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of both, all known."""
        return tuple(size for size in self.target.shape or () if isinstance(size, int))


def state_pairs(
    inputs: Sequence[NodeArg], outputs: Sequence[NodeArg], state: Mapping[str, str]
) -> tuple[StatePair, ...]:
    """Check ``{output: input}`` and return the pairs.

    Raises:
        InvalidArgument: A name is unknown or given twice, or the two differ in type, shape or quantisation.
    """
    by_input = {argument.name: (i, argument) for i, argument in enumerate(inputs)}
    by_output = {argument.name: (i, argument) for i, argument in enumerate(outputs)}
    pairs = []
    for source_name, target_name in state.items():
        if source_name not in by_output or target_name not in by_input:
            raise InvalidArgument(
                f"state {source_name!r} → {target_name!r}: give {{output: input}}; the model has outputs "
                f"{list(by_output)} and inputs {list(by_input)}"
            )
        (i, source), (j, target) = by_output[source_name], by_input[target_name]
        if replace(source, name="") != replace(target, name=""):
            raise InvalidArgument(f"state {source_name!r} → {target_name!r}: type, shape or quantisation differ")
        if target.is_open:
            raise InvalidArgument(
                f"state {target_name!r} has open dimensions {target.shape}; a state needs all of them"
            )
        pairs.append(StatePair(source, target, i, j))
    if len({pair.input_index for pair in pairs}) != len(pairs):
        raise InvalidArgument("two outputs cannot be the next value of one input")
    return tuple(pairs)


class StatefulExecution:
    """Made by ``Session.bind(state=…)``: as `BoundExecution`, but part of the arguments lives in the device.

    Each state has two buffers in the device. A run reads one and writes the other; the next run has them the other way
    round. Nothing of it is copied and no byte of it crosses the channel.

    Attributes:
        inputs: Arrays of the inputs that are no state.
        outputs: Arrays of the outputs that are no state.
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_burst",
        "_finalizer",
        "_pairs",
        "_placement",
        "_session",
        "_turn",
        "_turns",
        "inputs",
        "outputs",
    )

    def __init__(
        self,
        session: object,
        burst: ExecutionBurstController,
        device: Device,
        prepared: PreparedModel,
        pairs: Sequence[StatePair],
        placement: Placement,
        initial: Mapping[str, npt.ArrayLike] | None,
        timeout: float | None,
    ) -> None:
        """Use `Session.bind`."""
        self._session = session  # kept while this is used
        self._burst = burst
        self._pairs = tuple(pairs)
        self._placement = placement
        self._buffers: list[tuple[Buffer, Buffer]] = []
        self._turn = 0
        self._turns: tuple[BoundExecution, ...] = ()
        self._finalizer = weakref.finalize(self, _drop, burst, placement.memory, self._buffers)
        self._finalizer.atexit = False
        self.inputs: Mapping[str, Array] = MappingProxyType(placement.inputs)
        self.outputs: Mapping[str, Array] = MappingProxyType(placement.outputs)
        try:
            for pair in pairs:
                self._buffers.append((_allocate(device, prepared, pair), _allocate(device, prepared, pair)))
            requests = [
                replace(placement.request, pools=(placement.memory, *_tokens(self._buffers, turn))) for turn in (0, 1)
            ]
            self._turns = tuple(burst.bind(request, kind=BoundExecution).attach(placement) for request in requests)
            self.timeout = timeout
            self.reset_state(initial)
        except BaseException:
            self.close()
            raise

    def run(self) -> None:
        """Run one step; raises as `BoundExecution.run`. A step that fails leaves the state as it was before."""
        turn = self._turn
        try:
            run = self._turns[turn].run
        except IndexError:
            self._check_open()
            raise
        run()
        self._turn = 1 - turn

    def reset_state(self, values: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Set the state for the next run.

        Args:
            values: Arrays by *input* name; what is left out becomes zero (the zero point, if quantised).

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the state is as it was then.
        """
        self._check_open()
        given = dict(values or {})
        names = [pair.target.name for pair in self._pairs]
        unknown = sorted(given.keys() - set(names))
        if unknown:
            raise InvalidArgument(f"no state {unknown}; there is {names}")
        arrays = [_checked(pair, given) for pair in self._pairs]
        for pair, buffers, array in zip(self._pairs, self._buffers, arrays, strict=True):
            with Memory.ashmem(_nbytes(pair)) as memory:
                view = memory.array(pair.target.dtype, pair.shape)
                view[...] = pair.target.zero_point if array is None else array
                buffers[self._turn].copy_from(memory)

    def get_state(self) -> dict[str, Array]:
        """Copy the state out that the next run will read, by input name."""
        self._check_open()
        out: dict[str, Array] = {}
        for pair, buffers in zip(self._pairs, self._buffers, strict=True):
            with Memory.ashmem(_nbytes(pair)) as memory:
                buffers[self._turn].copy_to(memory)
                out[pair.target.name] = memory.array(pair.target.dtype, pair.shape).copy()
        return out

    @property
    def timeout(self) -> float | None:
        """Seconds that a run, or a copy of a state in or out, may take; None for no limit (a copy: a minute)."""
        return self._turns[0].timeout if self._turns else None

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        for execution in self._turns:
            execution.timeout = seconds
        for pair in self._buffers:
            for buffer in pair:
                buffer.timeout = Buffer.timeout if self.timeout is None else self.timeout

    def close(self) -> None:
        """Give the memory and the state back; arrays that you still hold stay readable. Idempotent."""
        if self._finalizer.detach() is None:
            return
        self._turns = ()
        self._burst.free_memory(self._placement.memory)
        self._placement.memory.close()
        for pair in self._buffers:
            for buffer in pair:
                self._burst.free_memory(BufferToken(buffer.token))
                buffer.close()

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise BadState("the execution is closed; bind another one")

    def __enter__(self) -> StatefulExecution:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _checked(pair: StatePair, given: Mapping[str, npt.ArrayLike]) -> Array | None:
    name = pair.target.name
    return pair.target.check(given[name]) if name in given else None


def _drop(burst: ExecutionBurstController, memory: Memory, buffers: Sequence[tuple[Buffer, Buffer]]) -> None:
    """For an execution that nobody closed; the buffers go with the last reference to them."""
    burst.forget_soon(memory)
    for pair in buffers:
        for buffer in pair:
            burst.forget_soon(BufferToken(buffer.token))


def _nbytes(pair: StatePair) -> int:
    return int(np.prod(pair.shape, dtype=np.int64)) * pair.target.dtype.itemsize


def _allocate(device: Device, prepared: PreparedModel, pair: StatePair) -> Buffer:
    return device.allocate(
        BufferDesc(), [prepared], [BufferRole(0, pair.input_index)], [BufferRole(0, pair.output_index)]
    )


def _tokens(buffers: Sequence[tuple[Buffer, Buffer]], turn: int) -> list[BufferToken]:
    """Per state: the buffer that a turn reads, then the one that it writes."""
    return [BufferToken(pair[which].token) for pair in buffers for which in (turn, 1 - turn)]
