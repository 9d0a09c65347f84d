"""NNAPI's memory domains: device memory, described by the arguments that it is used for."""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from msgspec import Struct

from .._core.errno import is_real
from .._core.leaving import Closing, Leaving, OneProcess
from ..devices.buffers import merge_role
from ..devices.interfaces import Buffer, Device
from ..errors import BadState, DeadObject, GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError
from ..memory.memory import Memory
from ..model.dimensions import combine_dimensions, is_fully_specified
from ..model.operand_types import is_extension, operand_info
from ..model.types import BufferDesc, BufferId, BufferRole, OperandDesc
from ..runtime.compile.compilation import Compilation

if TYPE_CHECKING:
    from ..burst.client.controller import ExecutionBurstController

_UINT32 = 2**32 - 1
_CHUNK = 4 << 20
"""Bytes in one step of a copy between unmapped memories."""


class _Role(Struct, frozen=True):
    compilation: Compilation
    kind: str
    """``input`` or ``output``."""
    index: int
    frequency: float

    def is_use(self, compilation: Compilation, kind: str, index: int) -> bool:
        return self.compilation is compilation and (self.kind, self.index) == (kind, index)


class MemoryDesc:
    """A description of a memory by its roles: the inputs and outputs that it is used for.

    Add roles and perhaps dimensions, call `finish`, then `create_memory` any number of times. Not thread-safe.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     description = nnburst.nnapi.MemoryDesc()
        ...     description.add_input_role(compilation, 0)
        ...     description.finish()
        ...     with description.create_memory() as memory:
        ...         memory.size
        16
    """

    def __init__(self) -> None:
        self._roles: list[_Role] = []
        self._operand: OperandDesc | None = None
        self._dimensions: tuple[int, ...] = ()
        self._finished = False

    def add_input_role(self, compilation: Compilation, index: int, frequency: float = 1.0) -> None:
        """Allow the memory as an input of executions of a compilation.

        Args:
            compilation: A finished compilation.
            index: Position among the model's inputs.
            frequency: Likelihood of this use, in (0, 1]: a hint.

        Raises:
            BadState: The description is finished.
            InvalidArgument: The compilation is not finished or has failed; index or frequency is wrong; the role
                exists already; or its type, quantisation or dimensions contradict another role. The description stays
                unchanged.
        """
        self._add("input", compilation, index, frequency)

    def add_output_role(self, compilation: Compilation, index: int, frequency: float = 1.0) -> None:
        """Allow the memory as an output of executions of a compilation; arguments as for `add_input_role`."""
        self._add("output", compilation, index, frequency)

    def _add(self, kind: str, compilation: Compilation, index: int, frequency: float) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument(f"the role needs a Compilation, not {type(compilation).__name__}")
        self._check_open()
        try:
            role = _Role(compilation, kind, operator.index(index), frequency)
        except TypeError:
            raise InvalidArgument(f"the position of an {kind} is a whole number, not {index!r}") from None
        place = f"{kind} {index}"
        if any(other.is_use(compilation, kind, role.index) for other in self._roles):
            raise InvalidArgument(f"{place} of this compilation is among the roles already")
        operand = _operand_of(role)
        if not is_real(frequency) or not 0 < frequency <= 1:  # NaN is refused, too.
            raise InvalidArgument(f"{place}: frequency {frequency} is not in (0, 1]")
        dimensions = merge_role(place, operand, self._operand, self._dimensions)
        self._roles.append(role)
        self._operand = operand if self._operand is None else self._operand
        self._dimensions = dimensions

    def set_dimensions(self, dimensions: Sequence[int]) -> None:
        """Set dimensions that the roles leave open. Further calls can set more dimensions.

        Args:
            dimensions: All dimensions, 0 for an open dimension.

        Raises:
            BadState: The description is finished.
            InvalidArgument: The dimensions contradict the roles or earlier dimensions, or the roles are scalars.
        """
        try:
            sizes = tuple(operator.index(size) for size in dimensions)
        except TypeError:
            raise InvalidArgument(f"dimensions are a sequence of sizes, not {dimensions!r}") from None
        self._check_open()
        if any(not 0 <= size <= _UINT32 for size in sizes):
            raise InvalidArgument(f"dimensions {list(sizes)} do not fit in 32 bits")
        if self._operand is not None and sizes and self._operand.is_scalar:
            raise InvalidArgument(f"the roles are scalars, which have no dimensions {list(sizes)}")
        self._dimensions = combine_dimensions(self._dimensions, sizes)

    def finish(self) -> None:
        """Finish the description, so that `create_memory` can use it.

        Raises:
            InvalidArgument: The description has no role.
            BadState: The description is finished already.
        """
        self._check_open()
        if not self._roles:
            raise InvalidArgument("the description has no role; add what the memory will be used for")
        self._finished = True

    def create_memory(self) -> DeviceMemory:
        """Return a new memory for the roles.

        If all compilations are for one device, the device allocates the memory. Otherwise, or if the device refuses,
        the memory is shared memory.

        Shared memory needs known dimensions, and compilations that were made with a `Service`, not with devices.

        Raises:
            BadState: The description is not finished, or a compilation is closed.
            DeadObject: The service has ended.
            NNBurstError: The device refused with this error, and shared memory is impossible.
        """
        if not self._finished:
            raise BadState("the description is not finished; call finish()")
        assert self._operand is not None
        refusal: NNBurstError
        try:
            buffer, memory = self._allocate(), None
        except (BadState, DeadObject, MissedDeadline):  # The device did not refuse.
            raise
        except NNBurstError as error:
            refusal = error
            buffer, memory = None, self._allocate_shared(refusal)
        return DeviceMemory(self._roles, self._operand, self._dimensions, buffer, memory)

    def _allocate(self) -> Buffer:
        compilations = list(dict.fromkeys(role.compilation for role in self._roles))
        device = _one_device(compilations)
        roles = {
            kind: [
                BufferRole(compilations.index(role.compilation), role.index, role.frequency)
                for role in self._roles
                if role.kind == kind
            ]
            for kind in ("input", "output")
        }
        prepared = [compilation.prepared_model for compilation in compilations]
        buffer = device.allocate(BufferDesc(self._dimensions), prepared, roles["input"], roles["output"])
        if buffer is None or buffer.id <= 0:  # A device of another package can return it.
            raise GeneralFailure(f"{device.name} gave no usable buffer")
        return buffer

    def _allocate_shared(self, refusal: NNBurstError) -> Memory:
        nbytes = _nbytes(self._operand, self._dimensions)
        if nbytes == 0 or any(role.compilation._names_devices for role in self._roles):
            raise refusal
        return Memory.hardware_buffer_blob(nbytes)

    def _check_open(self) -> None:
        if self._finished:
            raise BadState("the description is finished; make another one")


class DeviceMemory(OneProcess, Closing):
    """Memory from `MemoryDesc.create_memory`: a buffer of a device, or shared memory. Context manager.

    An execution uses the whole memory, in one of the memory's roles. The contents are undefined until `copy_memory` or
    an execution has written them.

    Attributes:
        buffer: The device's buffer; None if shared memory replaces it.
        memory: The shared memory, or None.
        initialised: True if the contents are defined.
        dimensions: Dimensions of the contents; 0 for an unknown dimension, () for an unknown rank or a scalar.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     description = nnburst.nnapi.MemoryDesc()
        ...     description.add_output_role(compilation, 0)
        ...     description.finish()
        ...     x, execution = np.ones((1, 4), np.float32), nnburst.nnapi.Execution(compilation)
        ...     with description.create_memory() as memory:
        ...         execution.set_input(0, x)
        ...         execution.set_output_from_memory(0, memory)
        ...         execution.compute()
        ...         memory.initialised, memory.dimensions
        (True, (1, 4))
    """

    def __init__(
        self,
        roles: Sequence[_Role],
        operand: OperandDesc,
        dimensions: tuple[int, ...],
        buffer: Buffer | None,
        memory: Memory | None,
    ) -> None:
        """Use `MemoryDesc.create_memory` instead."""
        self._roles = tuple(roles)
        self.operand, self.buffer, self.memory, self.initialised = operand, buffer, memory, False
        self._initial = self.dimensions = dimensions
        self._closed = False
        self._leaving = Leaving()
        self._bursts: weakref.WeakSet[ExecutionBurstController] = weakref.WeakSet()

    # ---- looking ---------------------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Bytes of the contents; 0 if unknown."""
        return _nbytes(self.operand, self.dimensions)

    @property
    def _place(self) -> Buffer | Memory:
        found = self.buffer or self.memory
        assert found is not None
        return found

    @property
    def pool(self) -> Memory | BufferId:
        """The memory's pool in a request.

        Raises:
            BadState: The memory is closed.
        """
        self._check_open()
        place = self._place
        return place if isinstance(place, Memory) else BufferId(place.id)

    # ---- rules for executions --------------------------------------------------------------------------------

    def _check_use(
        self, compilation: Compilation, kind: str, index: int, region: tuple[int, int], dimensions: tuple[int, ...]
    ) -> None:
        """Check that this memory was made for an argument, and that the argument takes all of it."""
        self._check_open()
        if region != (0, 0):
            raise InvalidArgument(f"{kind} {index}: memory of a device is used whole; offset and length must be 0")
        if not any(role.is_use(compilation, kind, index) for role in self._roles):
            raise InvalidArgument(f"{kind} {index} of this compilation is not a role of the memory")
        try:
            combine_dimensions(self._initial, dimensions)
        except InvalidArgument as error:
            raise InvalidArgument(f"{kind} {index}: the memory has other dimensions: {error}") from None

    def _check_readable(self, index: int, dimensions: tuple[int, ...]) -> None:
        """Check, when an execution starts, that an input's memory has contents of the right dimensions."""
        self._check_open()
        if not self.initialised:
            raise GeneralFailure(f"input {index}: the memory has no contents; copy to it or run what writes it")
        try:
            combine_dimensions(self.dimensions, dimensions)
        except InvalidArgument as error:
            raise GeneralFailure(f"input {index}: the memory's contents have other dimensions: {error}") from None

    def _record_write(self, dimensions: tuple[int, ...] | None) -> None:
        """Record the dimensions of written contents. After a failed write (None), the memory has no contents.

        Raises:
            GeneralFailure: The dimensions contradict the description; the memory has no contents.
        """
        self.initialised = False
        if dimensions is None:
            return
        try:
            self.dimensions = combine_dimensions(self._initial, dimensions)
        except InvalidArgument as error:
            raise GeneralFailure(f"the output does not fit the memory's description: {error}") from None
        self.initialised = True

    def _check_source(self, other: DeviceMemory) -> None:
        """Check that another memory has this memory's type and quantisation, and dimensions that fit."""
        if other.operand.meaning != self.operand.meaning:
            raise InvalidArgument("the memories differ in type, scale, zero point or parameters")
        combine_dimensions(self._initial, other.dimensions)

    def _nbytes_of(self, dimensions: tuple[int, ...]) -> int:
        """Return the size of contents in bytes; 0 if unknown. `()` means the description's dimensions."""
        return _nbytes(self.operand, combine_dimensions(self._initial, dimensions))

    def _note_burst(self, burst: ExecutionBurstController) -> None:
        """Record a burst that uses the memory. `close` also frees the memory in this burst."""
        self._bursts.add(burst)

    # ---- life ------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise BadState("the memory is closed")

    def close(self) -> None:
        """Free the memory, even if bursts have used it. Idempotent."""
        if not self._closed:
            known = [partial(burst.free_memory, self.pool) for burst in list(self._bursts)]
            self._leaving = Leaving(*known, self._place.close)
            self._closed, self.initialised = True, False
        self._leaving()


def _operand_of(role: _Role) -> OperandDesc:
    try:
        role.compilation.prepared_model  # noqa: B018  # This raises unless it is finished and usable.
    except BadState as error:
        raise InvalidArgument(f"{role.kind} {role.index}: {error}") from None
    main = role.compilation.model.main
    indexes = main.input_indexes if role.kind == "input" else main.output_indexes
    if not 0 <= role.index < len(indexes):
        raise InvalidArgument(f"{role.kind} {role.index}: the model has {len(indexes)} {role.kind}s")
    return main.operands[indexes[role.index]]


def _one_device(compilations: Sequence[Compilation]) -> Device:
    devices = list(dict.fromkeys(compilation.device for compilation in compilations))
    if len(devices) != 1:
        raise GeneralFailure("the roles are of several devices, none of which can allocate for the others")
    return devices[0]


def _nbytes(operand: OperandDesc | None, dimensions: tuple[int, ...]) -> int:
    if operand is None or is_extension(operand.type):
        return 0
    info = operand_info(operand.type)
    if not info.is_scalar and not is_fully_specified(dimensions):
        return 0
    return math.prod(dimensions) * info.element_size


def copy_memory(source: Memory | DeviceMemory, target: Memory | DeviceMemory) -> None:
    """Copy the whole contents of one memory to another. If source and target are the same memory, do nothing.

    After a failure, a target made by a `MemoryDesc` has no contents. A device copies between its own buffers, if it
    can.

    Args:
        source, target: Memories of the same size, dimensions, type and quantisation.

    Raises:
        InvalidArgument: An argument is not a memory; the source has no contents; the target is read-only; or the
            memories differ in size, dimensions, type or quantisation.
        GeneralFailure: The contents cannot be accessed.
        ResourceExhausted: A buffer is in use.
        BadState: A memory is closed.
        DeadObject: The service that holds a buffer has ended.

    Example:
        >>> with nnburst.Memory.ashmem(4) as here, nnburst.Memory.ashmem(4) as there:
        ...     here.write(np.array([1, 2, 3, 4], np.uint8))
        ...     nnburst.nnapi.copy_memory(here, there)
        ...     there.read(np.uint8, (4,))
        array([1, 2, 3, 4], dtype=uint8)
    """
    for what, memory in (("source", source), ("target", target)):
        if not isinstance(memory, Memory | DeviceMemory):
            raise InvalidArgument(f"the {what} is {type(memory).__name__}; give a Memory or a DeviceMemory")
    if source is target:
        return
    if not isinstance(target, DeviceMemory):
        _check_source(source)
        _require_size(source, target._contents_size)
        _transfer(source, target)
        return
    dimensions: tuple[int, ...] | None = None
    try:
        _check_source(source)
        wanted = source.dimensions if isinstance(source, DeviceMemory) else ()
        if isinstance(source, DeviceMemory):
            target._check_source(source)
        needed = target._nbytes_of(wanted)
        if not needed:
            raise InvalidArgument("the target's dimensions are open and the source does not know its own")
        _require_size(source, needed)
        target.pool  # noqa: B018  # This raises if it is closed.
        _transfer(source, target, wanted)
        dimensions = wanted
    finally:
        target._record_write(dimensions)


def _check_source(source: Memory | DeviceMemory) -> None:
    if isinstance(source, DeviceMemory):
        source.pool  # noqa: B018  # This raises if it is closed.
        if not source.initialised:
            raise InvalidArgument("the source has no contents; copy to it or run what writes it")


def _require_size(source: Memory | DeviceMemory, needed: int) -> None:
    size = source.size if isinstance(source, DeviceMemory) else source._contents_size
    if size != needed:
        raise InvalidArgument(f"the source has {size} bytes, the target takes {needed}")


def _transfer(source: Memory | DeviceMemory, target: Memory | DeviceMemory, dimensions: tuple[int, ...] = ()) -> None:
    source_place, target_place = (each if isinstance(each, Memory) else each._place for each in (source, target))
    if isinstance(target_place, Memory):
        if isinstance(source_place, Memory):
            _copy(source_place, target_place)
        else:
            source_place.copy_to(target_place)
    elif isinstance(source_place, Memory):
        target_place.copy_from(source_place, dimensions)
    else:
        try:  # Only the device can copy between its own buffers.
            target_place.copy_buffer(source_place)
        except (InvalidArgument, GeneralFailure):
            with Memory.hardware_buffer_blob(source.size) as between:
                source_place.copy_to(between)
                target_place.copy_from(between, dimensions)


def _copy(source: Memory, target: Memory) -> None:
    size, chunk = source._contents_size, _CHUNK
    if source.image is not None or target.image is not None:  # An image has gaps, so it is not copied in steps.
        chunk = size
    buffer = np.empty(min(size, chunk), np.uint8)
    for start in range(0, size, max(chunk, 1)):
        part = buffer[: min(chunk, size - start)]
        source._copy_out(start, part)
        target._copy_in(start, part)
