"""Building a model call by call, in the NDK's manner."""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from .._core.errno import is_real, whole
from ..errors import BadState, InvalidArgument
from .extensions import extension_code
from .operand import Operand
from .operand_types import (
    BASE_MAXIMUM,
    HalVersion,
    OperandType,
    checked_type,
    is_extension,
    operand_info,
    operand_nbytes,
    type_name,
)
from .operation_types import operation_name, require_operation
from .operations import view_operation
from .pools import PoolFactory, make_pool
from .types import (
    Array,
    DataLocation,
    Lifetime,
    MemoryLike,
    Model,
    OperandDesc,
    Operation,
    Subgraph,
    SymmPerChannelQuantParams,
)
from .validate import check_operand, validate_model

INLINE_LIMIT = 128
"""By default constants of up to so many bytes travel inside the model; larger ones in a pool."""

_MOST_INLINE = 1 << 16
_MOST_LOOKED_AT = 4096
"""Bytes of a constant in a caller's memory whose values may decide about shapes, as the target of RESHAPE does."""

_ALIGNMENT = 64
_EXTENSION_NAME = re.compile(r"[a-z0-9_]+(\.[a-z0-9_]+)+")


def as_array(value: npt.ArrayLike, what: str) -> Array:
    """Return an array of what may be nested lists.

    Raises:
        InvalidArgument: The lists have different lengths; `what` says what the value was for.
    """
    try:
        return np.asarray(value)
    except ValueError:
        raise InvalidArgument(f"{what}={value!r}; its lists have different lengths") from None


class _FromMemory(Struct, frozen=True):
    memory: MemoryLike
    offset: int
    length: int


class _FromModel(Struct, frozen=True):
    """A subgraph, by its place among the referenced ones of the model."""

    number: int


_Value = Array | _FromMemory | _FromModel | None


class GraphBuilder:
    """Operands and operations by index, as the NDK adds them. An `Operand` of the builder may stand for its index.

    After `finish`, successful or not, every call raises `BadState`.

    Args:
        pool_factory: Makes the pool for constants above `inline_limit`; default: a sealed memfd.
        relaxed: Permit float32 computations with the range or precision of float16.
        inline_limit: Bytes (0 … 65536) up to which constants are copied into the model.

    Raises:
        InvalidArgument: No such limit.
    """

    def __init__(
        self,
        *,
        pool_factory: PoolFactory | None = None,
        relaxed: bool = False,
        inline_limit: int = INLINE_LIMIT,
    ) -> None:
        if not 0 <= inline_limit <= _MOST_INLINE:
            raise InvalidArgument(f"inline_limit is {inline_limit}; choose 0 … {_MOST_INLINE} bytes")
        self._inline_limit = inline_limit
        self._pool_factory = pool_factory
        self._relaxed = relaxed
        self._operands: list[OperandDesc] = []
        self._operations: list[Operation] = []
        self._values: dict[int, _Value] = {}
        self._inputs: list[int] = []
        self._outputs: list[int] = []
        self._named_inputs: dict[str, int] = {}  # these three are those of `ModelBuilder`
        self._named_outputs: dict[str, int] = {}
        self._scalars: dict[tuple[OperandType, bytes], int] = {}
        self._models: list[Model] = []
        self._prefixes: dict[str, int] = {}
        self._finished = False

    # -- operands ---------------------------------------------------------------------------------------------

    def add_operand(
        self,
        type: int,
        dimensions: Sequence[int] = (),
        *,
        scale: float = 0.0,
        zero_point: int = 0,
        extra_params: SymmPerChannelQuantParams | bytes | None = None,
    ) -> int:
        """Add an operand and return its index.

        Args:
            type: An `OperandType`.
            dimensions: Sizes; 0 for a dimension, ``()`` for a rank that only an execution knows.
            scale: Of a quantised type: real value = (stored - zero point) x scale.
            zero_point: See `scale`.
            extra_params: Channel scales of TENSOR_QUANT8_SYMM_PER_CHANNEL.

        Raises:
            InvalidArgument: Type, dimensions and quantisation do not belong together.
        """
        self._require_open()
        checked_type(type)
        if not isinstance(dimensions, Iterable):
            raise InvalidArgument(f"dimensions={dimensions!r}; give a list of sizes")
        if not is_real(scale):
            raise InvalidArgument(f"scale={scale!r}; give a number")
        dims = tuple(whole(size, "a dimension") for size in dimensions)
        operand = OperandDesc(type, dims, 0, float(scale), whole(zero_point, "zero_point"), extra_params=extra_params)
        try:
            check_operand(operand)
        except InvalidArgument as error:
            raise InvalidArgument(f"operand {len(self._operands)} ({type_name(type)}): {error}") from None
        self._operands.append(operand)
        return len(self._operands) - 1

    def set_operand_value(self, operand: int | Operand, value: npt.ArrayLike | None) -> None:
        """Make an operand a constant, or mark it as omitted.

        Args:
            operand: Which, by its index.
            value: Array (or scalar) with the operand's dimensions and dtype, or None for an optional input without
                a value. Up to the inline limit it is copied now; a larger array must keep its contents until `finish`.

        Raises:
            InvalidArgument: The value does not fit the operand.
        """
        index = self._open_operand(operand)
        if value is None:
            self._set_value(index, None)
            return
        array = self._fitting(index, value)
        self._set_value(index, array.copy() if array.nbytes <= self._inline_limit else array)

    def set_operand_value_from_memory(
        self, operand: int | Operand, memory: MemoryLike, offset: int, length: int
    ) -> None:
        """Make an operand a constant that lives in a memory pool; nothing is copied.

        Args:
            operand: Which, by its index.
            memory: The pool; it must outlive the model.
            offset: First byte.
            length: Bytes; exactly what type and dimensions need.

        Raises:
            InvalidArgument: The region is outside the memory or has the wrong length.
        """
        index = self._open_operand(operand)
        desc = self._operands[index]
        needed = operand_nbytes(desc.type, desc.dimensions)
        if length != needed or needed == 0:
            raise InvalidArgument(
                f"operand {index} ({type_name(desc.type)} {list(desc.dimensions)}) needs {needed} bytes,"
                f" not {length}; its dimensions must be known"
            )
        if offset < 0 or offset + length > memory.size:
            raise InvalidArgument(f"operand {index}: bytes {offset} … {offset + length} are not in {memory.size}")
        self._set_value(index, _FromMemory(memory, offset, length))

    def set_operand_value_from_model(self, operand: int | Operand, model: Model) -> None:
        """Make an operand refer to the main subgraph of another model.

        Args:
            operand: Of type SUBGRAPH.
            model: It is copied in.

        Raises:
            InvalidArgument: The operand has another type.
        """
        index = self._open_operand(operand)
        if not isinstance(model, Model):
            raise InvalidArgument(f"expected a Model, got {type(model).__name__}")
        kind = self._operands[index].type
        if kind != OperandType.SUBGRAPH:
            raise InvalidArgument(f"operand {index} is {type_name(kind)}; only a SUBGRAPH refers to a model")
        number = 0
        for known in self._models:
            if known is model:
                break
            number += 1 + len(known.referenced)
        else:
            self._models.append(model)
        self._set_value(index, _FromModel(number))

    def _fitting(self, index: int, value: npt.ArrayLike) -> Array:
        operand = self._operands[index]
        info = operand_info(operand.type)
        place = f"operand {index} ({info.type.name} {list(operand.dimensions)})"
        if info.dtype is None:
            raise InvalidArgument(f"{place} cannot have an array as its value")
        array = as_array(value, "a constant")
        if (array.dtype == np.bool_ and info.dtype == np.uint8) or not isinstance(value, np.ndarray | np.generic):
            converted = array.astype(info.dtype)
            if not np.array_equal(converted, array) and not info.is_float:
                raise InvalidArgument(f"{place}: {value!r} does not fit into {info.dtype}")
            array = converted
        if array.dtype != info.dtype:
            raise InvalidArgument(f"{place} needs dtype {info.dtype}, not {array.dtype}; convert it with astype()")
        if array.shape != operand.dimensions or 0 in array.shape:
            raise InvalidArgument(
                f"{place} cannot have a value of shape {list(array.shape)}; a constant has all its dimensions known"
            )
        return np.ascontiguousarray(array)

    # -- operations -------------------------------------------------------------------------------------------

    def add_operation(self, type: int, inputs: Sequence[int | Operand], outputs: Sequence[int | Operand]) -> None:
        """Add an operation; the order of calls does not matter.

        Args:
            type: An `OperationType`.
            inputs: Operand indexes in the order of the operation's signature.
            outputs: Likewise.

        Raises:
            InvalidArgument: An index is unknown or the operands do not fit the operation.
        """
        self._require_open()
        require_operation(type)
        operation = Operation(type, tuple(map(self._index_of, inputs)), tuple(map(self._index_of, outputs)))
        try:
            view = view_operation(operation, self._operands)
            if view is not None:
                view.check(HalVersion.V1_3)
        except InvalidArgument as error:
            raise InvalidArgument(f"operation {len(self._operations)} ({operation_name(type)}): {error}") from None
        self._operations.append(operation)

    def identify_inputs_and_outputs(self, inputs: Sequence[int | Operand], outputs: Sequence[int | Operand]) -> None:
        """Say which operands the caller supplies, and which it receives, in order.

        Args:
            inputs: Operands that the caller supplies.
            outputs: Operands that it receives.

        Raises:
            InvalidArgument: An operand appears twice, or is a constant, or the call was made before.
        """
        self._require_open()
        if self._inputs or self._outputs:
            raise InvalidArgument("inputs and outputs are identified already")
        ins, outs = ([self._index_of(operand) for operand in side] for side in (inputs, outputs))
        seen: set[int] = set()
        for index in (*ins, *outs):
            if index in seen:
                raise InvalidArgument(f"operand {index} is an input or output twice")
            if index in self._values:
                raise InvalidArgument(f"operand {index} is a constant; it cannot be an input or output")
            seen.add(index)
        for side, lifetime in ((ins, Lifetime.SUBGRAPH_INPUT), (outs, Lifetime.SUBGRAPH_OUTPUT)):
            for index in side:
                self._set_lifetime(index, lifetime)
        self._inputs, self._outputs = ins, outs

    def finish(self) -> Model:
        """Sort the operations into execution order, gather the constants and validate; return the model.

        Raises:
            InvalidArgument: The operations form a cycle or a rule is violated; the builder is then of no more use.
        """
        self._require_open()
        self._finished = True
        operations = self._sorted_operations()
        operands, inline, pools = self._placed_operands(operations)
        referenced, inline, pools = _linked(self._models, inline, pools, self._prefix)
        model = Model(
            referenced=referenced,
            main=Subgraph(tuple(operands), tuple(operations), tuple(self._inputs), tuple(self._outputs)),
            operand_values=inline,
            pools=pools,
            relax_computation_float32_to_float16=self._relaxed,
            extension_name_to_prefix=self._prefixes,
        )
        validate_model(model)
        return model

    # -- extensions -------------------------------------------------------------------------------------------

    def extension_code(self, name: str, number: int) -> int:
        """Return the code under which the model names a type or an operation of an extension.

        Args:
            name: Of the extension, such as ``"com.example.fibonacci"``.
            number: Of the type or operation within it, 0 … 65535.

        Raises:
            InvalidArgument: No extension has such a name or number.
        """
        number = whole(number, "the number of an extension's type or operation")
        if not 0 <= number <= BASE_MAXIMUM:
            raise InvalidArgument(f"{name} {number}: types and operations of extensions have the numbers 0 … 65535")
        return extension_code(self._prefix(name), number)

    def _prefix(self, name: str) -> int:
        """Return the prefix that stands for an extension in this model."""
        if not isinstance(name, str) or not _EXTENSION_NAME.fullmatch(name):
            raise InvalidArgument(
                f"{name!r} is no name of an extension: lower-case letters, digits, _ and at least one dot, such as"
                " 'com.example.fibonacci'"
            )
        return self._prefixes.setdefault(name, len(self._prefixes) + 1)

    # -- the work of finish -----------------------------------------------------------------------------------

    def _sorted_operations(self) -> list[Operation]:
        """Return the operations so that each comes after those whose results it reads; stable."""
        producer: dict[int, int] = {}
        for position, operation in enumerate(self._operations):
            for index in operation.outputs:
                if index in producer:
                    raise InvalidArgument(f"operand {index} is written by two operations")
                producer[index] = position
        missing = [len({producer[i] for i in operation.inputs if i in producer}) for operation in self._operations]
        readers: dict[int, list[int]] = {}
        for position, operation in enumerate(self._operations):
            for source in {producer[i] for i in operation.inputs if i in producer}:
                readers.setdefault(source, []).append(position)
        ready = [position for position, count in enumerate(missing) if count == 0]
        ordered: list[Operation] = []
        while ready:
            position = heapq.heappop(ready)
            ordered.append(self._operations[position])
            for reader in readers.get(position, ()):
                missing[reader] -= 1
                if missing[reader] == 0:
                    heapq.heappush(ready, reader)
        if len(ordered) != len(self._operations):
            raise InvalidArgument("the operations form a cycle")
        return ordered

    def _placed_operands(self, operations: list[Operation]) -> tuple[list[OperandDesc], bytes, tuple[MemoryLike, ...]]:
        consumers = [0] * len(self._operands)
        for operation in operations:
            for index in operation.inputs:
                consumers[index] += 1
        inline = bytearray()
        large: list[tuple[int, Array]] = []
        pools: list[MemoryLike] = []
        operands: list[OperandDesc] = []
        large_end = 0
        written = {index for operation in operations for index in operation.outputs}
        for index, operand in enumerate(self._operands):
            location = DataLocation()
            value = self._values.get(index)
            if isinstance(value, _FromMemory):
                location = DataLocation(_position(pools, value.memory), value.offset, value.length)
            elif isinstance(value, _FromModel):
                location = DataLocation(0, value.number, 0)
            elif value is not None and value.nbytes <= self._inline_limit:
                inline.extend(bytes(-len(inline) % 4))
                location = DataLocation(0, len(inline), value.nbytes)
                inline.extend(value.tobytes())
            elif value is not None:
                large_end += -large_end % _ALIGNMENT
                large.append((large_end, value))
                location = DataLocation(-1, large_end, value.nbytes)
                large_end += value.nbytes
            elif operand.lifetime == Lifetime.TEMPORARY_VARIABLE and index not in written:
                raise InvalidArgument(
                    f"operand {index} ({type_name(operand.type)}) has no value, is no input, and no operation"
                    " writes it; set a value or identify it as an input"
                )
            operands.append(replace(operand, number_of_consumers=consumers[index], location=location))
        if large:
            pools.append(self._filled_pool(large, large_end))
            own = len(pools) - 1
            for index, operand in enumerate(operands):
                if operand.location.pool_index == -1:
                    operands[index] = replace(operand, location=replace(operand.location, pool_index=own))
        return operands, bytes(inline), tuple(pools)

    def _filled_pool(self, large: list[tuple[int, Array]], size: int) -> MemoryLike:
        pool = (self._pool_factory or make_pool)(size)
        for offset, value in large:
            pool.array(value.dtype, value.shape, offset)[...] = value
        return pool

    # -- what is known so far ---------------------------------------------------------------------------------

    def _set_value(self, index: int, value: _Value) -> None:
        self._values[index] = value
        if value is None:
            lifetime = Lifetime.NO_VALUE
        elif isinstance(value, _FromModel):
            lifetime = Lifetime.SUBGRAPH
        elif isinstance(value, _FromMemory) or value.nbytes > self._inline_limit:
            lifetime = Lifetime.CONSTANT_REFERENCE
        else:
            lifetime = Lifetime.CONSTANT_COPY
        self._set_lifetime(index, lifetime)

    def _set_lifetime(self, index: int, lifetime: Lifetime) -> None:
        self._operands[index] = replace(self._operands[index], lifetime=lifetime)

    def _constant_value(self, index: int) -> Array | None:
        """Return an operand's constant, or None if it has none."""
        value = self._values.get(index)
        if isinstance(value, _FromModel):
            return None
        if isinstance(value, _FromMemory):
            operand = self._operands[index]
            dtype = operand_info(operand.type).dtype
            if dtype is None or value.length > _MOST_LOOKED_AT:
                return None
            read = getattr(value.memory, "read", value.memory.array)  # a private copy, where there is such a thing
            values: Array = read(dtype, operand.dimensions, value.offset)
            return values
        return value

    def _require_open(self) -> None:
        if self._finished:
            raise BadState("the model is finished; a change needs a new builder")

    def describe(self, index: int) -> OperandDesc:
        """Return what is known of an operand: type, dimensions, quantisation.

        Args:
            index: Of the operand.
        """
        return self._operands[self._index_of(index)]

    def _index_of(self, operand: int | Operand) -> int:
        if isinstance(operand, Operand):
            return operand._index_in(self)
        if isinstance(operand, bool) or not isinstance(operand, int | np.integer):
            raise InvalidArgument(f"expected the index of an operand, or an Operand, got {operand!r}")
        if not 0 <= operand < len(self._operands):
            raise InvalidArgument(f"there is no operand {operand!r}; {len(self._operands)} were added")
        return int(operand)

    def _open_operand(self, operand: int | Operand) -> int:
        self._require_open()
        index = self._index_of(operand)
        if index in self._inputs or index in self._outputs:
            raise InvalidArgument(f"operand {index} is an input or output; it cannot be a constant")
        return index


def _linked(
    models: Sequence[Model], inline: bytes, pools: tuple[MemoryLike, ...], prefix: Callable[[str], int]
) -> tuple[tuple[Subgraph, ...], bytes, tuple[MemoryLike, ...]]:
    """Return the subgraphs of models with their constants behind those of the model that refers to them.

    Extensions get the prefixes of that model, which `prefix` hands out.
    """
    subgraphs: list[Subgraph] = []
    for model in models:
        inline += bytes(-len(inline) % 4)
        shifts = {
            Lifetime.CONSTANT_COPY: DataLocation(0, len(inline), 0),
            Lifetime.CONSTANT_REFERENCE: DataLocation(len(pools), 0, 0),
            Lifetime.SUBGRAPH: DataLocation(0, len(subgraphs) + 1, 0),
        }
        prefixes = {number: prefix(name) for name, number in model.extension_name_to_prefix.items()}
        for subgraph in (model.main, *model.referenced):
            operands = tuple(
                replace(
                    _shifted(operand, shifts.get(Lifetime(operand.lifetime))), type=_renumbered(operand.type, prefixes)
                )
                for operand in subgraph.operands
            )
            operations = tuple(replace(each, type=_renumbered(each.type, prefixes)) for each in subgraph.operations)
            subgraphs.append(replace(subgraph, operands=operands, operations=operations))
        inline += model.operand_values
        pools += model.pools
    return tuple(subgraphs), inline, pools


def _renumbered(code: int, prefixes: Mapping[int, int]) -> int:
    """Return the code of a type or operation of an extension under its prefix in another model."""
    if not is_extension(code):
        return code
    return extension_code(prefixes[code >> 16], code & BASE_MAXIMUM)


def _shifted(operand: OperandDesc, by: DataLocation | None) -> OperandDesc:
    if by is None:
        return operand
    at = operand.location
    return replace(
        operand, location=replace(at, pool_index=at.pool_index + by.pool_index, offset=at.offset + by.offset)
    )


def _position(pools: list[MemoryLike], memory: MemoryLike) -> int:
    """Return the index of a memory in the list, adding it if it is new."""
    for position, pool in enumerate(pools):
        if pool is memory:
            return position
    pools.append(memory)
    return len(pools) - 1
