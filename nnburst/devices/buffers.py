"""Driver-managed buffers of a device in this process, and their use in requests."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from ..errors import BadState, GeneralFailure, InvalidArgument
from ..memory.managed import BufferSet, BufferTracker, BufferUse, BufferView, ManagedBuffer, RoleKey
from ..memory.memory import Memory
from ..model.dimensions import combine_dimensions
from ..model.operand_types import is_extension, operand_info
from ..model.running import ExecutionResult
from ..model.types import BufferDesc, BufferId, BufferRole, DataLocation, OperandDesc, Request
from .interfaces import Buffer

if TYPE_CHECKING:
    from .local import LocalModel

_UINT32 = 2**32 - 1


class LocalBuffer(Buffer):
    """A driver-managed buffer of a device in this process, freed by `close` or the garbage collector.

    Args:
        managed: The buffer's memory, which this object registers with the tracker.
        models: Prepared models that use the buffer. This object keeps them alive.
    """

    id = 0

    def __init__(self, tracker: BufferTracker, managed: ManagedBuffer, models: Sequence[object] = ()) -> None:
        self._tracker = tracker
        self._managed = managed
        self._models = tuple(models)
        self.id = tracker.add(managed)
        self._finalizer = weakref.finalize(self, tracker.remove, self.id)
        self._finalizer.atexit = False

    @property
    def generation(self) -> int:
        """Number of times that the contents have changed."""
        return self._managed.generation

    def _open(self) -> ManagedBuffer:
        if not self._finalizer.alive:
            raise BadState("the buffer is closed")
        return self._managed

    def copy_to(self, memory: Memory) -> int:
        return self._open().copy_to(memory)

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...] = ()) -> None:
        self._open().copy_from(memory, tuple(dimensions))

    def copy_buffer(self, source: Buffer) -> None:
        if not isinstance(source, LocalBuffer) or source._tracker is not self._tracker:
            raise InvalidArgument("the source is a buffer of another device; copy through shared memory")
        self._open().copy_buffer(source._open())

    def account_to(self, account: Callable[[int], None]) -> None:
        self._managed.account_to(account)

    def close(self) -> None:
        self._finalizer()
        self._models = ()


def allocate_buffer(
    tracker: BufferTracker,
    desc: BufferDesc,
    prepared_models: Sequence[object],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> LocalBuffer:
    """Create a buffer, after checking the arguments.

    Args:
        desc, prepared_models, input_roles, output_roles: See `Device.allocate`.

    Raises:
        InvalidArgument: A role or dimension breaks a rule.
        GeneralFailure: The operand of a role has an extension type, or the buffer would be larger than a tensor can be.
        ResourceExhausted: There is not enough memory.
    """
    if not prepared_models or not (input_roles or output_roles):
        raise InvalidArgument("a buffer needs at least one role of at least one prepared model")
    dimensions = tuple(desc.dimensions)
    if any(not 0 <= size <= _UINT32 for size in dimensions):
        raise InvalidArgument(f"the descriptor's dimensions {list(dimensions)} do not fit in 32 bits")
    roles: set[RoleKey] = set()
    used: list[object] = []
    first: OperandDesc | None = None
    for is_input, listed in ((True, input_roles), (False, output_roles)):
        for position, role in enumerate(listed):
            place = f"{'input' if is_input else 'output'} role {position}"
            prepared, operand, key = _find_role(tracker, prepared_models, role, place, is_input=is_input)
            if key in roles:
                raise InvalidArgument(f"{place} is given twice")
            dimensions = merge_role(place, operand, first, dimensions)
            roles.add(key)
            used.append(prepared)
            first = first or operand
    assert first is not None
    if is_extension(first.type):
        raise GeneralFailure("buffers cannot hold extension types; use shared memory")
    if math.prod(dimensions) * operand_info(first.type).element_size > _UINT32:
        raise GeneralFailure(f"a buffer of dimensions {list(dimensions)} is larger than a tensor can be")
    return LocalBuffer(tracker, ManagedBuffer(first, dimensions, frozenset(roles)), used)


def merge_role(
    place: str, operand: OperandDesc, first: OperandDesc | None, dimensions: tuple[int, ...]
) -> tuple[int, ...]:
    """Merge a buffer's dimensions with the dimensions of a role's operand. Return the result.

    Args:
        first: Operand of the first role, whose type and quantisation the operand must have; None for the first role.

    Raises:
        InvalidArgument: The dimensions, types or quantisations conflict.
    """
    if first is not None and operand.meaning != first.meaning:
        raise InvalidArgument(f"{place} differs from the roles before it in type, scale, zero point or parameters")
    if dimensions and operand.is_scalar:
        raise InvalidArgument(f"{place} is a scalar, which has no dimensions {list(dimensions)}")
    try:
        return combine_dimensions(dimensions, operand.dimensions)
    except InvalidArgument as error:
        raise InvalidArgument(f"{place}: {error}") from None


def _find_role(
    tracker: BufferTracker, prepared_models: Sequence[object], role: BufferRole, place: str, *, is_input: bool
) -> tuple[object, OperandDesc, RoleKey]:
    """Return the prepared model and the operand to which a role refers, and the role's key."""
    if not 0 <= role.model_index < len(prepared_models):
        raise InvalidArgument(f"{place} names model {role.model_index} of {len(prepared_models)}")
    if getattr(prepared_models[role.model_index], "tracker", None) is not tracker:
        raise InvalidArgument(f"{place} names a prepared model that is not one of this device")
    prepared = cast("LocalModel", prepared_models[role.model_index])
    main = prepared.model.main
    indexes = main.input_indexes if is_input else main.output_indexes
    if not 0 <= role.io_index < len(indexes):
        raise InvalidArgument(f"{place} names argument {role.io_index} of a model with {len(indexes)}")
    if not 0 < role.frequency <= 1:  # NaN is refused, too.
        raise InvalidArgument(f"{place} has frequency {role.frequency}, which is not in (0, 1]")
    return prepared, main.operands[indexes[role.io_index]], RoleKey(prepared.number, is_input, role.io_index)


class BoundBuffers:
    """The buffers of one request. They stay alive even if their ids are released."""

    __slots__ = ("_main", "_request", "set")

    def __init__(self, prepared: LocalModel, request: Request) -> None:
        self._main = prepared.model.main
        self._request = request
        uses: list[BufferUse] = []
        for pool in request.pools:  # Pools that no argument uses are checked, too.
            if isinstance(pool, BufferId):
                prepared.tracker.resolve(pool.id)
        for is_input, arguments in ((True, request.inputs), (False, request.outputs)):
            for index, argument in enumerate(arguments):
                named = None if argument.has_no_value else request.pools[argument.location.pool_index]
                if isinstance(named, BufferId):
                    buffer = prepared.tracker.resolve(named.id)
                    uses.append(BufferUse(buffer, RoleKey(prepared.number, is_input, index), argument.dimensions))
        self.set = BufferSet(uses)

    def with_views(self) -> Request:
        """Return the request with a `BufferView` in place of each buffer's id. The caller has locked the buffers."""
        pools = list(self._request.pools)
        inputs, outputs = list(self._request.inputs), list(self._request.outputs)
        for use in (*self.set.inputs, *self.set.outputs):
            _, is_input, position = use.role
            arguments = inputs if is_input else outputs
            origin = arguments[position].location.pool_index, 0
            view = BufferView(use.buffer, origin, use.dimensions, writing=not is_input)
            pools.append(view)
            dims = use.buffer.dimensions if is_input else use.buffer.initial_dimensions
            arguments[position] = replace(
                arguments[position],
                location=DataLocation(len(pools) - 1, 0, view.size),
                dimensions=combine_dimensions(dims, use.dimensions),
            )
        return Request(tuple(inputs), tuple(outputs), tuple(pools))

    def written_dimensions(self, result: ExecutionResult | None) -> list[tuple[int, ...]]:
        """Return the dimensions of each output that lies in a buffer. `result` is the kernel's result."""
        if result is not None and result[1]:
            return [result[1][use.role.position].dimensions for use in self.set.outputs]
        known = []
        for use in self.set.outputs:
            declared = self._main.operands[self._main.output_indexes[use.role.position]].dimensions
            combined = combine_dimensions(declared, use.dimensions)
            known.append(combine_dimensions(combined, use.buffer.initial_dimensions))
        return known


def bind_buffers(prepared: LocalModel, request: Request) -> BoundBuffers | None:
    if not any(isinstance(pool, BufferId) for pool in request.pools):
        return None
    return BoundBuffers(prepared, request)
