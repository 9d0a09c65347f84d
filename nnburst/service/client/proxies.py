"""A device in another process, with the interface of a local device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec.structs import replace

from ..._core.deadline import Deadline
from ..._core.leaving import Closing
from ...burst.interfaces import BurstCallback, BurstContext
from ...cache.names import check_cache_key
from ...cache.reasons import SaveResult
from ...devices.common import check_preparation
from ...devices.described import DescribedDevice, DeviceInfo
from ...devices.fence import Fence
from ...devices.fenced import FencedExecution, FencedInfo, check_fences
from ...devices.interfaces import Buffer, CacheFiles, CompileJob, PreparedModel
from ...errors import BadState, DeadObject, Ending, ErrorStatus, InvalidArgument, MissedDeadline, NNBurstError
from ...model.extensions import ImportedModel
from ...model.running import ExecutionResult, Failure, RunOptions, failure_of
from ...model.types import BufferDesc, BufferRole, DeviceStatus, Model, Request
from ..connection.callbacks import CallbackRegistry
from ..connection.transport import Connection
from ..wire import protocol as calls
from ..wire.marshal import cache_to_wire, model_from_wire, model_to_wire, pools_to_wire, queue_to_wire, request_to_wire
from ..wire.packets import FdBundle
from ..wire.protocol import Message

if TYPE_CHECKING:
    from ...fmq.descriptor import MQDescriptor
    from ...memory.memory import Memory

_GRACE = 0.025
"""Seconds that this side waits for an answer after the device's deadline."""
_SHORT = 10.0
"""Time limit in seconds of a call that the service answers without computing."""


class Place(NamedTuple):
    """The address of a device in a service.

    Attributes:
        connection: The connection to the device's process.
        callbacks: The connection's registry of callbacks.
        keep: The owner of the connection; the connection ends when the owner is dropped.
        number: The device's number on the connection.
    """

    connection: Connection
    callbacks: CallbackRegistry
    keep: object
    number: int


class _Remote(Closing):
    """A numbered object of the service, released by `close` or the garbage collector."""

    def __init__(self, place: Place, number: int, what: str) -> None:
        self._place = place
        self.connection = connection = place.connection
        self._number = number
        self._what = what
        self._finalizer = weakref.finalize(self, connection.call_without_answer, calls.Release(number))
        self._finalizer.atexit = False  # at exit the connection ends, and with it all its objects

    @property
    def number(self) -> int:
        """The object's number on the connection.

        Raises:
            BadState: The object is closed, or this is a forked child.
            DeadObject: The service has ended.
        """
        if not self._finalizer.alive:
            raise BadState(f"the {self._what} is closed")
        self.connection.check_usable()
        return self._number

    def close(self) -> None:
        """Release the object in the service. Idempotent; has no effect after the service's end or in a forked child."""
        if not self._finalizer.alive:
            return
        try:
            self.connection.release(calls.Release(object=self._number))
        except (BadState, DeadObject, MissedDeadline):
            pass  # the service has ended, or is busy and releases the object later
        except BaseException:
            self._finalizer()  # the interrupted release may not have been sent; a second release does no harm
            raise
        self._finalizer.detach()


class RemoteDevice(DescribedDevice):
    """A `Device` in a service.

    Args:
        info: The device's description.
        place: Function that returns the device's current `Place`.
    """

    def __init__(self, info: DeviceInfo, place: Callable[[], Place]) -> None:
        super().__init__(info)
        self.place = place

    def __repr__(self) -> str:
        return f"<RemoteDevice {self.name}>"

    @property
    def status(self) -> DeviceStatus:
        """The device's status; OFFLINE once the service has ended."""
        at = self.place()
        try:
            reply, _ = at.connection.call(calls.GetDeviceStatus(device=at.number), timeout=_SHORT)
        except DeadObject:
            return DeviceStatus.OFFLINE
        return DeviceStatus(reply.status)

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        at = self.place()
        handles, fds = pools_to_wire(pools)
        reply, received = at.connection.call(calls.ImportModel(device=at.number, source=source, pools=handles), fds)
        arguments = reply.input_shapes, reply.output_shapes, reply.optional_inputs, reply.metadata
        return ImportedModel(model_from_wire(reply.model, received), reply.files, *arguments)

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        at = self.place()
        wire, fds = model_to_wire(model)
        reply, _ = at.connection.call(calls.GetSupportedOperations(device=at.number, model=wire), fds)
        return tuple(reply.supported)

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> RemotePreparedModel:
        at = self.place()
        check_preparation(replace(job, deadline_ns=0))
        deadline = Deadline.after().earlier(Deadline(job.deadline_ns))
        job = replace(job, deadline_ns=deadline.at_ns)
        wire, fds = model_to_wire(model)
        if job.cache is not None:
            check_cache_key(job.cache.cache_key)
            cache, cache_fds = cache_to_wire(job.cache)
            fds += cache_fds
            job = replace(job, cache=cache)
        message = calls.PrepareModel(device=at.number, model=wire, job=job)
        reply, _ = _create(at.connection, message, fds, _answer_timeout(deadline))
        return RemotePreparedModel(at, reply.prepared_model, reply.cache, takes_steps=reply.takes_steps)

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> RemotePreparedModel:
        at = self.place()
        check_cache_key(cache.cache_key)
        deadline = Deadline.after().earlier(Deadline(deadline_ns))
        wire, fds = cache_to_wire(cache)
        message = calls.PrepareModelFromCache(device=at.number, cache=wire, deadline_ns=deadline.at_ns)
        reply, _ = _create(at.connection, message, fds, _answer_timeout(deadline))
        return RemotePreparedModel(at, reply.prepared_model, takes_steps=reply.takes_steps)

    def confirm_cache(self, cache_key: bytes, generation: bytes) -> bool:
        at = self.place()
        message = calls.ConfirmCache(device=at.number, cache_key=cache_key, generation=generation)
        reply, _ = at.connection.call(message, timeout=_SHORT)
        return bool(reply.known)

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> RemoteBuffer:
        at = self.place()
        named = {role.model_index for role in (*input_roles, *output_roles)}
        numbers = []
        for position, prepared in enumerate(prepared_models):
            ours = isinstance(prepared, RemotePreparedModel) and prepared.connection is at.connection
            if position in named and not ours:
                raise InvalidArgument(f"prepared model {position} is not one of this service")
            numbers.append(prepared.number if isinstance(prepared, RemotePreparedModel) and ours else 0)
        message = calls.Allocate(
            device=at.number,
            dimensions=_check_range(desc.dimensions),
            prepared_models=tuple(numbers),
            input_roles=tuple(input_roles),
            output_roles=tuple(output_roles),
        )
        reply, _ = _create(at.connection, message)
        return RemoteBuffer(at, reply.buffer, reply.id)


class RemoteBuffer(_Remote, Buffer):
    """A driver-managed buffer in a service."""

    id = 0

    def __init__(self, place: Place, number: int, id: int) -> None:
        super().__init__(place, number, "buffer")
        self.id = id

    def copy_to(self, memory: Memory) -> int:
        (handle,), fds = pools_to_wire([memory])
        reply, _ = self.connection.call(calls.CopyTo(buffer=self.number, memory=handle), fds, timeout=self.timeout)
        return int(reply.generation)

    def copy_from(self, memory: Memory, dimensions: tuple[int, ...] = ()) -> None:
        (handle,), fds = pools_to_wire([memory])
        message = calls.CopyFrom(buffer=self.number, memory=handle, dimensions=_check_range(dimensions))
        self.connection.call(message, fds, timeout=self.timeout)

    def copy_buffer(self, source: Buffer) -> None:
        if not isinstance(source, RemoteBuffer) or source.connection is not self.connection:
            raise InvalidArgument("the source is a buffer of another device; copy through shared memory")
        self.connection.call(calls.CopyBuffer(buffer=self.number, source=source.number), timeout=self.timeout)


class RemotePreparedModel(_Remote, PreparedModel):
    """A `PreparedModel` in a service."""

    def __init__(
        self, place: Place, number: int, cache_result: SaveResult | None = None, *, takes_steps: bool = False
    ) -> None:
        super().__init__(place, number, "prepared model")
        self.cache_result, self.takes_steps = cache_result, takes_steps

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        """Run once, without a burst, and wait for the result.

        If the service does not answer soon after the deadline, the result is MISSED_DEADLINE_TRANSIENT. The service may
        still write to the outputs later.

        Raises:
            DeadObject: The service died.
            BadState: The model or the connection is closed.
        """
        number = self.number
        try:
            wire, fds = request_to_wire(request)
            message = calls.Execute(prepared_model=number, request=wire, options=options)
            reply, _ = self.connection.call(message, fds, timeout=_answer_timeout(Deadline(options.deadline_ns)))
        except (BadState, DeadObject):
            raise
        except NNBurstError as error:
            return failure_of(error)
        status = ErrorStatus(reply.status)
        if status is not ErrorStatus.NONE:
            return Failure(status, reply.reason, reply.output_shapes)
        return status, reply.output_shapes, reply.timing

    def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[Fence] = (),
        options: RunOptions = RunOptions(),
        duration_ns: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> RemoteFenced:
        """Let the service start an execution that waits for fences; see `PreparedModel.execute_fenced`.

        Raises:
            DeadObject: The service died.
        """
        number = self.number
        if on_end is not None:
            raise InvalidArgument("the end of an execution in another process is told by its fence: on_end is not used")
        fences = check_fences(wait_for, duration_ns)
        wire, fds = request_to_wire(request)
        message = calls.ExecuteFenced(number, wire, options, len(fences), duration_ns)
        fds += [fence.fileno() for fence in fences]
        reply, received = _create(self.connection, message, fds, _answer_timeout(Deadline(options.deadline_ns)))
        with received:
            return RemoteFenced(self._place, reply.execution, Fence(received.fds[0]))

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> RemoteBurstContext:
        """Open a burst on this model. The service limits `polling_window` to 10 ms.

        Raises:
            NNBurstError: The service answered with this error.
            DeadObject: The service died.
            BadState: The model or the connection is closed.
        """
        number = self.number
        requests, request_fds = queue_to_wire(request_channel)
        results, result_fds = queue_to_wire(result_channel)
        bells = [] if callback.bell is None else [callback.bell]
        message = calls.ConfigureBurst(
            prepared_model=number,
            callback=self._place.callbacks.add(callback),
            request_channel=requests,
            result_channel=results,
            polling_window=None if polling_window is None else float(polling_window),
            cpus=tuple(callback.cpus),
            bell=bool(bells),
            loop_timeout_ns=callback.loop_timeout_ns,
        )
        reply, _ = _create(self.connection, message, [*request_fds, *result_fds, *bells])
        return RemoteBurstContext(self._place, reply, callback)

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` in a thread of the connection when the service ends, or at once if it has ended."""
        return self.connection.link_to_death(on_death)

    @property
    def ending(self) -> Ending:
        return self.connection.ending


class RemoteFenced(_Remote, FencedExecution):
    """A fenced execution in a service."""

    def __init__(self, place: Place, number: int, fence: Fence) -> None:
        super().__init__(place, number, "fenced execution")
        self.fence = fence

    def info(self) -> FencedInfo:
        reply, _ = self.connection.call(calls.GetFencedInfo(execution=self.number), timeout=_SHORT)
        return FencedInfo(ErrorStatus(reply.status), reply.launched, reply.fenced, reply.reason)

    def cancel(self) -> None:
        self.connection.call_without_answer(calls.CancelFenced(execution=self.number))


class RemoteBurstContext(_Remote, BurstContext):
    """The client's proxy of a `BurstContext` in a service."""

    cpus = frozenset[int]()
    pipelined = False

    def __init__(self, place: Place, reply: calls.ConfigureBurstReply, callback: BurstCallback) -> None:
        super().__init__(place, reply.burst, "burst")
        self._callback = callback  # this keeps the callback alive: the registry has only a weak reference
        self.cpus, self.pipelined = frozenset(reply.cpus), reply.pipelined

    def failure_reason(self) -> str:
        reply, _ = self.connection.call(calls.FailureReason(burst=self.number), timeout=_SHORT)
        return str(reply.reason)

    def free_memory(self, slot: int) -> None:
        """Let the service release the memory behind a slot.

        Raises:
            DeadObject: The service died.
            BadState: The burst or the connection is closed.
        """
        self.connection.release(calls.FreeMemory(burst=self.number, slot=slot))

    def forget_memory(self, slot: int) -> None:
        self.connection.call_without_answer(calls.FreeMemory(burst=self.number, slot=slot))

    def hang_up(self) -> None:
        self._finalizer()


def _answer_timeout(deadline: Deadline) -> float | None:
    """Return the seconds until a deadline, plus `_GRACE`; None without a deadline."""
    left = deadline.left()
    return None if left is None else left + _GRACE


def _create(
    connection: Connection, message: Message, fds: Sequence[int] = (), timeout: float | None = None
) -> tuple[Any, FdBundle]:
    """Make a call that creates an object. If the answer comes after the time limit, release the object."""
    return connection.call(message, fds, timeout=timeout, on_late=partial(_forget_late, connection))


def _forget_late(connection: Connection, reply: Message) -> None:
    """Release the object that a late reply names."""
    for name in ("prepared_model", "burst", "buffer", "execution"):
        if number := getattr(reply, name, None):
            connection.call_without_answer(calls.Release(number))


def _check_range(dimensions: Sequence[int]) -> tuple[int, ...]:
    """Return the dimensions as a tuple. Raises `InvalidArgument` unless each fits in 32 bits."""
    if any(not 0 <= size < 2**32 for size in dimensions):
        raise InvalidArgument(f"dimensions {list(dimensions)} do not fit in 32 bits")
    return tuple(dimensions)
