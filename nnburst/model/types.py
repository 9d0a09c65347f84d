"""Types of models and requests."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, runtime_checkable

import msgspec
import numpy as np
from msgspec import Struct

from .operand_types import OPERANDS

if TYPE_CHECKING:
    import numpy.typing as npt

Array = np.ndarray[Any, np.dtype[Any]]
UINT64_MAX = 2**64 - 1


@runtime_checkable
class MemoryLike(Protocol):
    """A pool of shared memory, implemented by `nnburst.Memory`. Size and offsets are in bytes."""

    @property
    def kind(self) -> str: ...

    @property
    def size(self) -> int: ...

    def array(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int = 0) -> Array: ...


class Lifetime(enum.IntEnum):
    """The origin of an operand's value, such as the model, a request or an operation."""

    TEMPORARY_VARIABLE = 0
    SUBGRAPH_INPUT = 1
    SUBGRAPH_OUTPUT = 2
    CONSTANT_COPY = 3
    CONSTANT_REFERENCE = 4
    NO_VALUE = 5
    SUBGRAPH = 6


class ExecutionPreference(enum.IntEnum):
    """The goal of a compilation."""

    LOW_POWER = 0
    FAST_SINGLE_ANSWER = 1
    SUSTAINED_SPEED = 2


class Priority(enum.IntEnum):
    """The relative priority of a prepared model's executions."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2


class DeviceStatus(enum.IntEnum):
    """The readiness of a device for work."""

    AVAILABLE = 0
    BUSY = 1
    OFFLINE = 2
    UNKNOWN = 3


class DeviceType(enum.IntEnum):
    """The kind of hardware that a device uses."""

    OTHER = 1
    CPU = 2
    GPU = 3
    ACCELERATOR = 4


class MeasureTiming(enum.IntEnum):
    """Choice of whether to measure the duration of an execution."""

    NO = 0
    YES = 1


class DataLocation(Struct, frozen=True):
    """A region of a pool: ``offset`` and ``length`` in bytes."""

    pool_index: int = 0
    offset: int = 0
    length: int = 0


class SymmPerChannelQuantParams(Struct, frozen=True):
    """Scales of a TENSOR_QUANT8_SYMM_PER_CHANNEL operand, one per index along ``channel_dim``."""

    scales: tuple[float, ...]
    channel_dim: int


MAX_OPERANDS = 65536
"""Largest number of operands, operations, names or arguments in one model or request."""
# Decoding applies these limits, so that a short message cannot use much memory.
_Dimensions = Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]
_Indexes = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


class OperandDesc(Struct, frozen=True):
    """The description of a value in a subgraph.

    ``type`` is an `OperandType` value, or an extension type above 0xFFFF. In ``dimensions``, 0 is an unknown size;
    ``()`` is a scalar or an unknown rank. ``extra_params`` is a `SymmPerChannelQuantParams` for
    TENSOR_QUANT8_SYMM_PER_CHANNEL, and can be bytes for extension types.
    """

    type: int
    dimensions: _Dimensions = ()
    number_of_consumers: int = 0
    scale: float = 0.0
    zero_point: int = 0
    lifetime: int = Lifetime.TEMPORARY_VARIABLE
    location: DataLocation = DataLocation()
    extra_params: SymmPerChannelQuantParams | bytes | None = None

    @property
    def is_scalar(self) -> bool:
        """True if the type is an NNAPI scalar type."""
        info = OPERANDS.get(self.type)
        return info is not None and info.is_scalar

    @property
    def meaning(self) -> tuple[Any, ...]:
        """The type and quantisation. Bytes of operands with equal meaning are interchangeable."""
        return self.type, self.scale, self.zero_point, self.extra_params


class Operation(Struct, frozen=True):
    """An operation. ``inputs`` and ``outputs`` are indexes of operands in the operation's subgraph."""

    type: int
    inputs: _Indexes
    outputs: _Indexes


class Subgraph(Struct, frozen=True):
    """Operands, operations in execution order, and the indexes of input and output operands."""

    operands: Annotated[tuple[OperandDesc, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    operations: Annotated[tuple[Operation, ...], msgspec.Meta(max_length=MAX_OPERANDS)]
    input_indexes: _Indexes
    output_indexes: _Indexes


class Model(Struct, frozen=True):
    """A model as a device receives it (HAL 1.3 form).

    Attributes:
        main: The subgraph that runs.
        referenced: The subgraphs of IF and WHILE.
        operand_values: Values of CONSTANT_COPY operands of all subgraphs.
        pools: Pools of CONSTANT_REFERENCE operands of all subgraphs.
        relax_computation_float32_to_float16: Permit float32 computations with the range or precision of float16.
        extension_name_to_prefix: A number for each extension that the model uses.
        input_names, output_names: Names for `Session.run`: none at all, or one for each input or output of `main`.

    Example:
        >>> model.input_names, len(model.main.operations)
        (('x',), 1)
    """

    main: Subgraph
    referenced: tuple[Subgraph, ...] = ()
    operand_values: bytes = b""
    pools: tuple[MemoryLike, ...] = ()
    relax_computation_float32_to_float16: bool = False
    extension_name_to_prefix: Mapping[str, int] = {}
    input_names: tuple[str, ...] = ()
    output_names: tuple[str, ...] = ()


class RequestArgument(Struct, frozen=True):
    """The memory of an input or output in a request. If ``dimensions`` is empty, the model's dimensions apply."""

    has_no_value: bool = False
    location: DataLocation = DataLocation()
    dimensions: _Dimensions = ()


class BufferDesc(Struct, frozen=True):
    """A description of a driver-managed buffer. ``dimensions`` are merged with those of the buffer's roles."""

    dimensions: tuple[int, ...] = ()


class BufferRole(Struct, frozen=True):
    """A use of a driver-managed buffer as an input or output of a prepared model.

    ``model_index`` is the model's position in the list of models for which the buffer is allocated. ``io_index`` is the
    position of the input or output. ``frequency``, in (0, 1], is a hint for the placement of the buffer.
    """

    model_index: int
    io_index: int
    frequency: float = 1.0


class BufferId(Struct, frozen=True):
    """A driver-managed buffer as a pool of a request. An argument in the buffer has offset and length 0."""

    id: int


MOST_STEPS = 65536
_Position = Annotated[int, msgspec.Meta(ge=0, lt=MAX_OPERANDS)]


class Steps(Struct, frozen=True):
    """An entry among a request's pools that makes the request run the model several times, in steps.

    An argument's region contains the values of all steps in order. The argument's dimensions are those of one step.

    Attributes:
        count: Number of steps.
        state: Pairs of positions (output, input). Each step reads the output of the step before as this input. Both
            arguments are in driver-managed buffers; all other arguments are in memory. The first step reads the
            input's buffer. After all steps have succeeded, the output's buffer contains the last step's result.
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
    state: Annotated[tuple[tuple[_Position, _Position], ...], msgspec.Meta(max_length=MAX_OPERANDS)] = ()


Named = BufferId | Steps
"""An entry that is not memory. Such entries can be among a request's pools, and in the slots of a burst."""


class Request(Struct, frozen=True):
    """The arguments of an execution, which refer to ``pools`` by ``location.pool_index``."""

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[MemoryLike | Named, ...] = ()

    @property
    def steps(self) -> Steps | None:
        """The pool that is a `Steps` object; None if the request runs the model once."""
        return next((pool for pool in self.pools if isinstance(pool, Steps)), None)


class Timing(Struct, frozen=True):
    """Durations in microseconds; None if unknown (``UINT64_MAX`` in the packets of a burst)."""

    time_on_device: int | None = None
    time_in_driver: int | None = None


NO_TIMING = Timing()


class PerformanceInfo(Struct, frozen=True):
    """A cost, above 0 and relative to a CPU baseline of 1. Smaller is better."""

    exec_time: float = 1.0
    power_usage: float = 1.0


class Capabilities(Struct, frozen=True):
    """A device's declared speed. ``operand_performance`` is sorted by operand type.

    Attributes:
        operation_time: Fixed time of each operation. The unit is the baseline's time for one multiplication and
            addition.
    """

    relaxed_scalar: PerformanceInfo = PerformanceInfo()
    relaxed_tensor: PerformanceInfo = PerformanceInfo()
    operand_performance: tuple[tuple[int, PerformanceInfo], ...] = ()
    if_performance: PerformanceInfo = PerformanceInfo()
    while_performance: PerformanceInfo = PerformanceInfo()
    operation_time: float = 0.0
