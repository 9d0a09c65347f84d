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
    """A region of a pool: ``length`` bytes from ``offset`` on.

    Attributes:
        pool_index: Position of the pool in its request or model.
        offset, length: Number of bytes.

    Example:
        >>> nnburst.model.types.DataLocation(0, offset=16, length=64)
        DataLocation(pool_index=0, offset=16, length=64)
    """

    pool_index: int = 0
    offset: int = 0
    length: int = 0


class SymmPerChannelQuantParams(Struct, frozen=True):
    """Scales of a TENSOR_QUANT8_SYMM_PER_CHANNEL operand.

    Attributes:
        scales: One for each channel.
        channel_dim: Position of the dimension for channels.

    Example:
        >>> nnburst.model.types.SymmPerChannelQuantParams((0.5, 0.25), channel_dim=0)
        SymmPerChannelQuantParams(scales=(0.5, 0.25), channel_dim=0)
    """

    scales: tuple[float, ...]
    channel_dim: int


MAX_OPERANDS = 65536
"""Largest number of operands, operations, names or arguments in one model or request."""
# Decoding applies these limits, so that a short message cannot use much memory.
_Dimensions = Annotated[tuple[int, ...], msgspec.Meta(max_length=64)]
_Indexes = Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_OPERANDS)]


class OperandDesc(Struct, frozen=True):
    """The description of a value in a subgraph.

    Attributes:
        type: An `OperandType` value, or an extension type above 0xFFFF.
        dimensions: Sizes; 0 if unknown. ``()`` is a scalar or an unknown rank.
        number_of_consumers: Number of uses as an input.
        scale, zero_point: Quantisation: real value = (stored - zero_point) * scale.
        lifetime: A `Lifetime` value.
        location: Region of a constant.
        extra_params: For TENSOR_QUANT8_SYMM_PER_CHANNEL, or an extension type.

    Example:
        >>> nnburst.OperandType(model.main.operands[0].type).name, model.main.operands[0].dimensions
        ('TENSOR_FLOAT32', (1, 4))
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
    """An operation of a subgraph.

    Attributes:
        type: An `OperationType` value, or an extension operation above 0xFFFF.
        inputs, outputs: Indexes of operands in the subgraph.

    Example:
        >>> nnburst.OperationType(model.main.operations[0].type).name
        'RELU'
    """

    type: int
    inputs: _Indexes
    outputs: _Indexes


class Subgraph(Struct, frozen=True):
    """Operands, operations in execution order, and the indexes of input and output operands.

    Attributes:
        operands, operations: Parts of the subgraph.
        input_indexes, output_indexes: Indexes in `operands`.

    Example:
        >>> [model.main.operands[i].dimensions for i in model.main.output_indexes]
        [(1, 4)]
    """

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
    """The memory of an input or output in a request. If ``dimensions`` is empty, the model's dimensions apply.

    Attributes:
        has_no_value: True to omit an optional input or an output, or for an argument without elements.
        location: Region in a pool.
        dimensions: Sizes.

    Example:
        >>> nnburst.model.types.RequestArgument(has_no_value=True).location.length
        0
    """

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
    """A driver-managed buffer as a pool of a request. An argument in the buffer has offset and length 0.

    Attributes:
        id: Number of the buffer in its device.

    Example:
        >>> nnburst.model.types.BufferId(7)
        BufferId(id=7)
    """

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

    Example:
        >>> nnburst.model.types.Steps(10, state=((1, 0),))
        Steps(count=10, state=((1, 0),))
    """

    count: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)]
    state: Annotated[tuple[tuple[_Position, _Position], ...], msgspec.Meta(max_length=MAX_OPERANDS)] = ()


Named = BufferId | Steps
"""An entry that is not memory. Such entries can be among a request's pools, and in the slots of a burst."""


class Request(Struct, frozen=True):
    """The arguments of an execution.

    Attributes:
        inputs, outputs: Arguments in the model's order. They refer to pools by ``location.pool_index``.
        pools: Memories and buffers. `Steps` among them make the request run the model several times.

    Example:
        >>> from nnburst.model.types import DataLocation, Request, RequestArgument
        >>> x, y = (RequestArgument(location=DataLocation(0, offset, 16)) for offset in (0, 16))
        >>> with nnburst.Memory.ashmem(32) as memory:
        ...     request = Request(inputs=(x,), outputs=(y,), pools=(memory,))
    """

    inputs: tuple[RequestArgument, ...]
    outputs: tuple[RequestArgument, ...]
    pools: tuple[MemoryLike | Named, ...] = ()

    @property
    def steps(self) -> Steps | None:
        """The pool that is a `Steps` object; None if the request runs the model once."""
        return next((pool for pool in self.pools if isinstance(pool, Steps)), None)


class Timing(Struct, frozen=True):
    """Durations in microseconds; None if unknown (``UINT64_MAX`` in the packets of a burst).

    Attributes:
        time_on_device: Time on the device.
        time_in_driver: Time in the driver, which includes `time_on_device`.

    Example:
        >>> with nnburst.Session(model) as session, session.bind(measure=True) as execution:
        ...     execution.run()
        ...     execution.timing.time_on_device <= execution.timing.time_in_driver
        True
    """

    time_on_device: int | None = None
    time_in_driver: int | None = None


NO_TIMING = Timing()


class PerformanceInfo(Struct, frozen=True):
    """A cost, above 0 and relative to a CPU baseline of 1. Smaller is better.

    Attributes:
        exec_time, power_usage: Relative time or energy.

    Example:
        >>> nnburst.model.types.PerformanceInfo(exec_time=0.5)
        PerformanceInfo(exec_time=0.5, power_usage=1.0)
    """

    exec_time: float = 1.0
    power_usage: float = 1.0


class Capabilities(Struct, frozen=True):
    """A device's declared speed.

    Attributes:
        relaxed_scalar, relaxed_tensor: Speed of float32 operations with the range or precision of float16.
        operand_performance: (operand type, speed), sorted by type.
        if_performance, while_performance: Speed of IF and WHILE.
        operation_time: Fixed time of each operation. The unit is the baseline's time for one multiplication and
            addition.

    Example:
        >>> with nnburst.launch() as service:
        ...     service.devices[0].capabilities.if_performance.exec_time > 0
        True
    """

    relaxed_scalar: PerformanceInfo = PerformanceInfo()
    relaxed_tensor: PerformanceInfo = PerformanceInfo()
    operand_performance: tuple[tuple[int, PerformanceInfo], ...] = ()
    if_performance: PerformanceInfo = PerformanceInfo()
    while_performance: PerformanceInfo = PerformanceInfo()
    operation_time: float = 0.0
