"""Driver-managed buffers of a local device: allocation, the object that clients hold, and their place in requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import BadState, GeneralFailure, InvalidArgument
from ..memory import BufferSet, BufferTracker, BufferUse, BufferView, ManagedBuffer, Memory, Role
from ..model import (
    BufferDesc,
    BufferRole,
    BufferToken,
    DataLocation,
    Model,
    Operand,
    Request,
    combine_dimensions,
    is_extension,
    operand_info,
    type_name,
)
from ._interfaces import Buffer

__all__ = ["BoundBuffers", "LocalBuffer", "LocalModel", "allocate_buffer", "bind_buffers", "next_model_number"]

_numbers = itertools.count(1)


def next_model_number() -> int:
    """A number for a prepared model, never used again in this process: what buffer roles refer to."""
    return next(_numbers)


@runtime_checkable
class LocalModel(Protocol):
    """What allocation needs to know of a prepared model."""

    @property
    def model(self) -> Model: ...
    @property
    def number(self) -> int: ...
    @property
    def tracker(self) -> BufferTracker: ...


class LocalBuffer(Buffer):
    """A buffer of a device in this process.

    Args:
        tracker: Of the device.
        managed: The buffer; registered with the tracker by this object.
        models: Prepared models of its roles, kept alive.
    """

    def __init__(self, tracker: BufferTracker, managed: ManagedBuffer, models: Sequence[object] = ()) -> None:
        self._tracker = tracker
        self._managed = managed
        self._models = tuple(models)
        self._token = tracker.add(managed)
        self._closed = False

    @property
    def token(self) -> int:
        return self._token

    @property
    def generation(self) -> int:
        """Counts changes of the contents."""
        return self._managed.generation

    def _open(self) -> ManagedBuffer:
        if self._closed:
            raise BadState("the buffer is closed")
        return self._managed

    def copy_to(self, memory: Memory) -> int:
        return self._open().copy_to(memory.array(np.uint8, (memory.size,)))

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...] = ()) -> None:
        self._open().copy_from(memory.array(np.uint8, (memory.size,)), tuple(dimensions))

    def copy_buffer(self, source: Buffer) -> None:
        if not isinstance(source, LocalBuffer) or source._tracker is not self._tracker:
            raise InvalidArgument("the source is a buffer of another device; copy through shared memory")
        self._open().copy_buffer(source._open())

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._tracker.remove(self._token)
            self._models = ()


def allocate_buffer(
    tracker: BufferTracker,
    desc: BufferDesc,
    prepared_models: Sequence[object],
    input_roles: Sequence[BufferRole],
    output_roles: Sequence[BufferRole],
) -> LocalBuffer:
    """Check a request for a buffer (facts sheet `memory.md` §5.1) and make it.

    Args:
        tracker: Of the device.
        desc, prepared_models, input_roles, output_roles: As `Device.allocate`.

    Raises:
        InvalidArgument: A rule is broken; the message names the role.
        GeneralFailure: The operand type is one that buffers cannot hold.
    """
    if not prepared_models or not (input_roles or output_roles):
        raise InvalidArgument("a buffer needs at least one role of at least one prepared model")
    roles: set[Role] = set()
    first: Operand | None = None
    dimensions = tuple(desc.dimensions)
    used: list[object] = []
    for is_input, listed in ((True, input_roles), (False, output_roles)):
        for position, role in enumerate(listed):
            place = f"{'input' if is_input else 'output'} role {position}"
            if not 0 <= role.model_index < len(prepared_models):
                raise InvalidArgument(f"{place}: model {role.model_index} of {len(prepared_models)}")
            prepared = prepared_models[role.model_index]
            if not isinstance(prepared, LocalModel) or prepared.tracker is not tracker:
                raise InvalidArgument(f"{place}: the prepared model is not one of this device")
            main = prepared.model.main
            indexes = main.input_indexes if is_input else main.output_indexes
            if not 0 <= role.io_index < len(indexes):
                raise InvalidArgument(f"{place}: argument {role.io_index} of a model with {len(indexes)}")
            if not 0 < role.frequency <= 1:  # also refuses NaN
                raise InvalidArgument(f"{place}: frequency {role.frequency} is not in (0, 1]")
            key = Role(prepared.number, is_input, role.io_index)
            if key in roles:
                raise InvalidArgument(f"{place} is given twice")
            roles.add(key)
            used.append(prepared)
            operand = main.operands[indexes[role.io_index]]
            first = operand if first is None else first
            if _meta(operand) != _meta(first):
                raise InvalidArgument(f"{place}: type, scale, zero point or extra parameters differ between the roles")
            try:
                dimensions = combine_dimensions(dimensions, operand.dimensions)
            except InvalidArgument as error:
                raise InvalidArgument(f"{place}: {error}") from None
    assert first is not None
    if is_extension(first.type):
        raise GeneralFailure("buffers cannot hold extension types; use shared memory")
    if operand_info(first.type).is_scalar and dimensions:
        raise InvalidArgument(f"a {type_name(first.type)} is a scalar and has no dimensions {list(dimensions)}")
    try:
        managed = ManagedBuffer(first, dimensions, frozenset(roles))
    except MemoryError:
        raise GeneralFailure(f"no memory for a buffer of dimensions {list(dimensions)}") from None
    return LocalBuffer(tracker, managed, used)


def _meta(operand: Operand) -> tuple[object, ...]:
    return operand.type, operand.scale, operand.zero_point, operand.extra_params


class BoundBuffers:
    """The buffers of one request, found once; the request keeps them alive whatever happens to their tokens."""

    __slots__ = ("_buffers", "_request", "outputs", "set")

    def __init__(self, prepared: LocalModel, request: Request) -> None:
        self._request = request
        self._buffers: dict[tuple[bool, int], ManagedBuffer] = {}
        self.outputs: list[int] = []
        """Positions of the outputs that are in buffers."""
        uses: list[BufferUse] = []
        for pool in request.pools:  # also one that no argument uses
            if isinstance(pool, BufferToken):
                prepared.tracker.resolve(pool.token)
        for is_input, arguments in ((True, request.inputs), (False, request.outputs)):
            for index, argument in enumerate(arguments):
                if argument.has_no_value:
                    continue
                pool = request.pools[argument.location.pool_index]
                if not isinstance(pool, BufferToken):
                    continue
                buffer = self._buffers[is_input, index] = prepared.tracker.resolve(pool.token)
                uses.append(BufferUse(buffer, Role(prepared.number, is_input, index), argument.dimensions))
                if not is_input:
                    self.outputs.append(index)
        self.set = BufferSet(uses)

    def with_views(self) -> Request:
        """Return the request with its buffers as pools that kernels can use. Only while admitted."""
        pools = list(self._request.pools)
        arguments = {True: list(self._request.inputs), False: list(self._request.outputs)}
        for (is_input, index), buffer in self._buffers.items():
            argument = arguments[is_input][index]
            view = BufferView(buffer, writing=not is_input)
            pools.append(view)
            dims = buffer.dimensions if is_input else buffer.initial_dimensions
            arguments[is_input][index] = replace(
                argument,
                location=DataLocation(len(pools) - 1, 0, view.size),
                dimensions=combine_dimensions(dims, argument.dimensions),
            )
        return Request(tuple(arguments[True]), tuple(arguments[False]), tuple(pools))


def bind_buffers(prepared: LocalModel, request: Request) -> BoundBuffers | None:
    """Find the buffers of a valid request; None if it names none.

    Raises:
        InvalidArgument: A token is unknown, or a buffer may not be used so.
    """
    if not any(isinstance(pool, BufferToken) for pool in request.pools):
        return None
    return BoundBuffers(prepared, request)
