"""The functions that serve a client's calls, named as in `CALLS`. Methods of `Client` serve the other calls."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import Struct
from msgspec.structs import replace

from ..._core._nnburst import lib
from ..._core.deadline import Deadline, limit_ns
from ..._core.errno import check
from ...burst.cancellation import use_cancel_flag
from ...burst.interfaces import BurstCallback, BurstContext
from ...burst.server.group import FlowQueue
from ...cache.names import check_cache_key
from ...cache.reasons import CacheRejected
from ...cache.sealed_copy import check_fd
from ...devices.deadline import earlier
from ...devices.described import DeviceInfo
from ...devices.fence import Fence
from ...devices.fenced import FencedExecution
from ...devices.interfaces import Buffer, Device, PreparedModel
from ...devices.named import NamedDevice
from ...devices.resilient import check_model
from ...errors import BadState, DeadObject, ErrorStatus, GeneralFailure, NNBurstError, ResourceExhausted
from ...memory.memory import Memory
from ...memory.staging import check_pools
from ...model.extensions import ImportedModel
from ...model.running import consistent_result, overrun_reason, reason_of
from ...model.types import BufferDesc, Named, Priority
from ...watch.page import Row
from ...watch.stats import RowKind
from ..wire import marshal
from ..wire import protocol as calls
from ..wire.packets import FdBundle
from .quotas import Charge, Ledger

if TYPE_CHECKING:
    from .host import Client

# -- models and devices ----------------------------------------------------------------------------------------------


class HostedModel(Struct, frozen=True):
    """A prepared model in a connection's table.

    Attributes:
        served: The model that runs requests: the prepared model, or its wrapper with fault points.
        row: The row of statistics for the model's executions.
        priority: Priority of the model's bursts.
    """

    prepared: PreparedModel
    served: PreparedModel
    row: Row
    priority: Priority
    what: ClassVar[str] = "prepared model"


def on_list_devices(client: Client, message: calls.ListDevices, fds: FdBundle) -> calls.ListDevicesReply:
    apart = tuple(sorted(client.host.apart))
    return calls.ListDevicesReply(tuple(map(DeviceInfo.of, client.host.devices)), apart)


def on_list_models(client: Client, message: calls.ListModels, fds: FdBundle) -> calls.ListModelsReply:
    digests = {name: "" for device in client.host.devices for name in device.names}
    for device in client.host.devices:
        digests |= device.digests if isinstance(device, NamedDevice) else {}
    names = tuple(sorted(digests))
    return calls.ListModelsReply(names, tuple(digests[name] for name in names))


def on_get_device_status(client: Client, message: calls.GetDeviceStatus, fds: FdBundle) -> calls.GetDeviceStatusReply:
    return calls.GetDeviceStatusReply(status=client.device(message.device).status)


def on_get_supported_operations(
    client: Client, message: calls.GetSupportedOperations, fds: FdBundle
) -> calls.GetSupportedOperationsReply:
    """Ask a device which operations of a model it supports. The model is not kept."""
    device = client.device(message.device)
    with client.limit_compile_time(), contextlib.ExitStack() as call:
        model = client.model(call, message.model, fds)
        return calls.GetSupportedOperationsReply(supported=tuple(device.get_supported_operations(model)))


def on_import_model(client: Client, message: calls.ImportModel, fds: FdBundle) -> calls.ImportModelReply:
    """Ask a device to read a model's file, which is not kept."""
    device = client.device(message.device)
    with client.limit_compile_time(), contextlib.ExitStack() as call:
        call.enter_context(client.charge_for(message.pools, fds))
        pools = marshal.memories_from_wire(message.pools, fds, client.same_user)
        call.callback(marshal.close_all, pools)
        check_pools(pools, "imported file")
        imported = device.import_model(message.source, pools)
        return calls.ImportModelReply(
            model=marshal.model_to_wire(imported.model)[0],
            files=imported.files,
            input_shapes=imported.input_shapes,
            output_shapes=imported.output_shapes,
            optional_inputs=imported.optional_inputs,
            metadata=imported.metadata,
        )


def on_publish_model(client: Client, message: calls.PublishModel, fds: FdBundle) -> calls.Done:
    named = _named_device(client)
    with contextlib.ExitStack() as call:
        model = client.model(call, message.model, fds)
        check_pools(model.pools, "model")
        shapes = message.input_shapes, message.output_shapes
        imported = ImportedModel(model, (), *shapes, message.optional_inputs)
        batching = message.batch, message.batch_wait
        named.publish(message.name, client.device(message.device), imported, message.digest, *batching)
    return calls.Done()


def on_withdraw_model(client: Client, message: calls.WithdrawModel, fds: FdBundle) -> calls.Done:
    """Stop serving a model under its name. Open sessions keep the model."""
    _named_device(client).withdraw(message.name)
    return calls.Done()


def _named_device(client: Client) -> NamedDevice:
    client.require_broker()
    return next(device for device in client.host.devices if isinstance(device, NamedDevice))


def on_prepare_model(client: Client, message: calls.PrepareModel, fds: FdBundle) -> calls.PrepareModelReply:
    """Compile a model. The connection owns the compiled model and its pools."""
    device, job = client.device(message.device), message.job
    with client.limit_compile_time(), contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        model = client.model(owned, message.model, fds, models=1)
        check_pools(model.pools, "model")
        if job.cache is not None:
            cache = marshal.cache_from_wire(job.cache, fds)
            call.enter_context(FdBundle(cache.fds))
            check_cache_key(cache.cache_key)
            job = replace(job, cache=cache)
        prepared = check_model(device, device.prepare_model(model, job))
        result = prepared.cache_result
        counted = ("models", "compiled", "saved") if result is not None and result.saved else ("models", "compiled")
        label = _label(prepared, device, message.model)
        number = _add_model(client, owned, prepared, job.priority, label, counted)
        return calls.PrepareModelReply(number, result, prepared.takes_steps)


def on_prepare_model_from_cache(
    client: Client, message: calls.PrepareModelFromCache, fds: FdBundle
) -> calls.PrepareModelReply:
    """Restore a model from cache files. The connection owns the model."""
    device = client.device(message.device)
    check_cache_key(message.cache.cache_key)
    cache = marshal.cache_from_wire(message.cache, fds)
    with client.limit_compile_time(), FdBundle(cache.fds), contextlib.ExitStack() as owned:
        try:  # private copies are charged like mappings
            nbytes = sum(check_fd(fd).st_size for fd in (*cache.model_fds, *cache.data_fds))
            owned.enter_context(client.ledger.charge(models=1, mapped_bytes=nbytes, fds=len(fds)))
            prepared = check_model(device, device.prepare_model_from_cache(cache, message.deadline_ns))
        except CacheRejected:
            if client.host.page is not None:
                client.host.page.service.count("rejected")
            raise
        label = _label(prepared, device)
        number = _add_model(client, owned, prepared, cache.priority, label, ("models", "restored"))
        return calls.PrepareModelReply(number, takes_steps=prepared.takes_steps)


def on_confirm_cache(client: Client, message: calls.ConfirmCache, fds: FdBundle) -> calls.ConfirmCacheReply:
    """Tell a device that cache files that it wrote have been published."""
    return calls.ConfirmCacheReply(client.device(message.device).confirm_cache(message.cache_key, message.generation))


def _add_model(
    client: Client,
    owned: contextlib.ExitStack,
    prepared: PreparedModel,
    priority: Priority,
    label: str,
    counted: Sequence[str],
) -> int:
    owned.callback(prepared.close)
    row = client.open_row(RowKind.MODEL, label)
    owned.callback(row.close)
    for name in counted:
        row.count(name)
    faults = client.host.faults
    hosted = HostedModel(prepared, prepared if faults is None else faults.wrap(prepared), row, priority)
    return client.objects.add(hosted, owned.pop_all().close, leave=row.mark_left)


def on_execute(client: Client, message: calls.Execute, fds: FdBundle) -> calls.ExecuteReply:
    with contextlib.ExitStack() as call:
        model = call.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        call.enter_context(client.ledger.charge(requests=1))
        request = client.request(call, message.request, fds)
        started = time.monotonic_ns()
        limit = Deadline.after(client.host.max_run).at_ns
        options = replace(message.options, deadline_ns=earlier(message.options.deadline_ns, limit))
        with use_cancel_flag(client.objects.cancel_flag):
            result = model.served.execute_synchronously(request, options)
        model.row.count("fallbacks")
        model.row.time_execution(time.monotonic_ns() - started)
    status, shapes, timing = consistent_result(*result)
    reason = reason_of(result)
    missed = status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    if missed and client.host.max_run is not None and time.monotonic_ns() >= limit:
        reason = overrun_reason(reason, client.host.max_run)
    return calls.ExecuteReply(int(status), tuple(shapes), timing, calls.sendable(reason))


def _label(prepared: PreparedModel, device: Device, model: calls.WireModel | None = None) -> str:
    if prepared.label or model is None or not model.input_names:
        return prepared.label or device.name
    return f"{device.name}: {', '.join(model.input_names)} → {', '.join(model.output_names)}"


# -- driver-managed buffers ------------------------------------------------------------------------------------------


class HostedBuffer:
    """A driver-managed buffer in a connection's table, with its id and the charge for its bytes.

    Args:
        buffer: The device's buffer; `dispose` closes it.
        ledger: The ledger that the buffer's bytes are charged to.
        ids: Ids of the buffers that the connection may use; this buffer's id is added.
    """

    what: ClassVar[str] = "buffer"

    def __init__(self, buffer: Buffer, ledger: Ledger, ids: set[int]) -> None:
        self.buffer = buffer
        self._ledger = ledger
        self._charges: list[Charge] | None = []
        self._lock = threading.Lock()
        self._ids = ids
        ids.add(buffer.id)
        try:
            buffer.account_to(self._account)
        except BaseException:
            self.dispose()
            raise

    def _account(self, nbytes: int) -> None:
        charge = self._ledger.charge(buffer_bytes=nbytes)
        with self._lock:
            if self._charges is not None:
                self._charges.append(charge)
                return
        charge.release()  # a run may still use a released buffer: its bytes are given back when the run ends

    def dispose(self) -> None:
        self._ids.discard(self.buffer.id)
        try:
            self.buffer.close()
        finally:
            with self._lock:
                charges, self._charges = self._charges or [], None
            for charge in charges:
                charge.release()


def on_allocate(client: Client, message: calls.Allocate, fds: FdBundle) -> calls.AllocateReply:
    """Allocate a driver-managed buffer, which the connection owns."""
    device = client.device(message.device)
    with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        owned.enter_context(client.ledger.charge(buffers=1))
        named = {role.model_index for role in (*message.input_roles, *message.output_roles)}
        models: list[Any] = [
            call.enter_context(client.objects.lease(number, HostedModel)).prepared
            if index in named
            else None  # it is ignored, like any entry that no role refers to
            for index, number in enumerate(message.prepared_models)
        ]
        desc = BufferDesc(message.dimensions)
        buffer = device.allocate(desc, models, message.input_roles, message.output_roles)
        hosted = HostedBuffer(buffer, client.ledger, client.buffer_ids)
        owned.callback(hosted.dispose)
        return calls.AllocateReply(buffer=client.objects.add(hosted, owned.pop_all().close), id=buffer.id)


def on_copy_to(client: Client, message: calls.CopyTo, fds: FdBundle) -> calls.CopyToReply:
    with _copying(client, message.buffer, message.memory, fds) as (buffer, memory):
        return calls.CopyToReply(generation=buffer.copy_to(memory))


def on_copy_from(client: Client, message: calls.CopyFrom, fds: FdBundle) -> calls.Done:
    with _copying(client, message.buffer, message.memory, fds) as (buffer, memory):
        buffer.copy_from(memory, message.dimensions)
    return calls.Done()


@contextlib.contextmanager
def _copying(client: Client, number: int, wire: calls.WireMemory, fds: FdBundle) -> Iterator[tuple[Buffer, Memory]]:
    with (
        client.charge_for([wire], fds),
        client.objects.lease(number, HostedBuffer) as owned,
        marshal.memories_from_wire((wire,), fds, client.same_user)[0] as memory,
    ):
        yield owned.buffer, memory


def on_copy_buffer(client: Client, message: calls.CopyBuffer, fds: FdBundle) -> calls.Done:
    with (
        client.objects.lease(message.buffer, HostedBuffer) as target,
        client.objects.lease(message.source, HostedBuffer) as source,
    ):
        target.buffer.copy_buffer(source.buffer)
    return calls.Done()


# -- bursts ----------------------------------------------------------------------------------------------------------

_SLOTS_PER_CALL = 200
"""Maximum number of slots in one call, because a message has at most 253 descriptors."""
_GET_MEMORIES_TIMEOUT = 10.0
_MOST_SLOTS = 16384
"""Maximum number of slots of one burst, needed because no quota counts slots of driver-managed buffers."""
_LONGEST_WINDOW = 0.01


class HostedBurst(Struct, frozen=True):
    """A burst in a connection's table, and the memories that it has fetched."""

    context: BurstContext
    memories: SlotMemories
    what: ClassVar[str] = "burst"

    def detach_client(self) -> None:
        """Report to the burst that its client no longer waits for answers."""
        self.memories.row.mark_left()
        self.context.detach_client()


class SlotMemories(BurstCallback):
    """Fetches memories from the client for a burst's server, and counts them towards the client's quota."""

    row: Row
    cpus = frozenset[int]()

    def __init__(
        self, client: Client, message: calls.ConfigureBurst, row: Row, flow_queue: FlowQueue | None, bell: int | None
    ) -> None:
        self.row = row
        self.flow_queue = flow_queue
        self.bell = bell
        self.max_run = client.host.max_run
        self.account = client.account
        self.loop_timeout_ns = message.loop_timeout_ns
        self.cpus = frozenset(message.cpus)
        self._number = message.callback
        self._client = client
        self._charges: dict[int, Charge] = {}

    def report_end(self, reason: str) -> None:
        self._client.connection.call_without_answer(calls.EndNotice(reason, self._number))

    def get_memories(self, slots: Sequence[int]) -> tuple[ErrorStatus, tuple[Memory | Named, ...]]:
        """Ask the client for memories, in several calls if one message cannot carry all descriptors."""
        if len(self._charges) + len(slots) > _MOST_SLOTS:
            raise ResourceExhausted(f"a burst may have {_MOST_SLOTS} memories")
        memories: list[Memory | Named] = []
        charges: dict[int, Charge] = {}
        try:
            for start in range(0, len(slots), _SLOTS_PER_CALL):
                self._fetch(tuple(slots[start : start + _SLOTS_PER_CALL]), memories, charges)
        except NNBurstError as error:
            marshal.close_all(memories)
            for charge in charges.values():
                charge.release()
            if isinstance(error, ResourceExhausted):  # The reason names the quota.
                raise
            local = isinstance(error, BadState | DeadObject)
            return (ErrorStatus.GENERAL_FAILURE if local else error.status), ()
        for slot, charge in charges.items():
            self.forget(slot)  # the slot is requested again, so its old memory is no longer used
            self._charges[slot] = charge
        return ErrorStatus.NONE, tuple(memories)

    def _fetch(self, slots: tuple[int, ...], memories: list[Memory | Named], charges: dict[int, Charge]) -> None:
        reply: calls.GetMemoriesReply
        reply, fds = self._client.connection.call(
            calls.GetMemories(callback=self._number, slots=slots), timeout=_GET_MEMORIES_TIMEOUT
        )
        with fds:
            if reply.status != ErrorStatus.NONE:
                raise NNBurstError("the client knows no such slot", status=ErrorStatus(reply.status))
            if len(reply.memories) != len(slots):
                raise GeneralFailure(f"{len(slots)} memories wanted, {len(reply.memories)} came")
            for slot, handle in zip(slots, reply.memories, strict=True):
                charges[slot] = self._client.ledger.charge(mapped_bytes=marshal.total_size([handle]), fds=handle.n_fds)
            memories += marshal.pools_from_wire(reply.memories, fds, self._client.buffer_ids, self._client.same_user)
            check_pools(memories, "burst")

    def forget(self, slot: int) -> None:
        """Release the charge for the memory of a freed slot."""
        charge = self._charges.pop(slot, None)
        if charge is not None:
            charge.release()

    def forget_all(self) -> None:
        """Stop charging the slots' memories to the client's quota, because the burst has ended."""
        for slot in list(self._charges):
            self.forget(slot)


def on_configure_execution_burst(
    client: Client, message: calls.ConfigureBurst, fds: FdBundle
) -> calls.ConfigureBurstReply:
    """Serve a burst, which keeps its model alive."""
    sizes = _extent(message.request_channel) + _extent(message.result_channel)
    with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        model = owned.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        owned.enter_context(client.ledger.charge(bursts=1, mapped_bytes=sizes, fds=len(fds)))
        row = client.open_row(RowKind.BURST, parent=model.row)
        row.count("bursts")
        owned.callback(row.close)
        bell = call.enter_context(FdBundle([fds.take_last()])) if message.bell else None
        if bell is not None:
            check(lib.nnb_bell_check(bell.fds[0]), "bell")
        flow = client.flow  # it is read once: another thread sets it to None when the connection ends
        flow_queue = None if flow is None else FlowQueue(flow, model.priority, model.prepared.batcher)
        callback = SlotMemories(client, message, row, flow_queue, None if bell is None else bell.fds[0])
        owned.callback(callback.forget_all)
        requests = call.enter_context(marshal.descriptor_from_wire(message.request_channel, fds))
        results = call.enter_context(marshal.descriptor_from_wire(message.result_channel, fds))
        window = None if message.polling_window is None else min(message.polling_window, _LONGEST_WINDOW)
        context = model.served.configure_execution_burst(callback, requests, results, window)
        if context is None:
            raise GeneralFailure("the device gave no burst")
        owned.callback(context.close)
        client.bursts.add(context)
        owned.callback(client.bursts.discard, context)
        hosted = HostedBurst(context, callback)
        number = client.objects.add(hosted, owned.pop_all().close, context.hang_up, hosted.detach_client)
        return calls.ConfigureBurstReply(number, tuple(context.cpus), message.bell and context.pipelined)


def on_failure_reason(client: Client, message: calls.FailureReason, fds: FdBundle) -> calls.FailureReasonReply:
    with client.objects.lease(message.burst, HostedBurst) as burst:
        return calls.FailureReasonReply(calls.sendable(burst.context.failure_reason()))


def on_free_memory(client: Client, message: calls.FreeMemory, fds: FdBundle) -> calls.Done:
    with client.objects.lease(message.burst, HostedBurst) as burst:
        burst.context.free_memory(message.slot)
        burst.memories.forget(message.slot)
    return calls.Done()


def _extent(queue: calls.WireQueue) -> int:
    return max((grantor.offset + grantor.extent for grantor in queue.grantors), default=0)


# -- fenced executions -----------------------------------------------------------------------------------------------


class HostedFenced:
    """A fenced execution in a connection's table, removed when it has ended and the client has released it."""

    what: ClassVar[str] = "fenced execution"

    def __init__(self) -> None:
        self._execution: FencedExecution | None = None
        self._cancelled = False

    @property
    def execution(self) -> FencedExecution:
        assert self._execution is not None  # the client learns the number after the launch
        return self._execution

    def set_execution(self, execution: FencedExecution) -> None:
        self._execution = execution
        if self._cancelled:  # another thread cancelled it during the launch
            execution.cancel()

    def cancel(self) -> None:
        self._cancelled = True
        if self._execution is not None:
            self._execution.cancel()


def on_execute_fenced(
    client: Client, message: calls.ExecuteFenced, fds: FdBundle
) -> tuple[calls.ExecuteFencedReply, FdBundle]:
    """Launch an execution that waits for fences. No thread that serves calls waits for them."""
    with contextlib.ExitStack() as undo, contextlib.ExitStack() as fences:
        running = undo.enter_context(contextlib.ExitStack())  # it keeps the execution's resources until its end
        model = running.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        request = client.request(running, message.request, fds)
        wait_for = [fences.enter_context(Fence(fd)) for fd in fds.fds[: message.fences]]
        hosted = HostedFenced()
        charge = client.ledger.charge(requests=1)  # it lasts until the execution has ended and is released
        number = client.objects.add(hosted, charge.release)
        undo.callback(client.objects.remove, number)
        running.enter_context(client.objects.lease(number, HostedFenced))
        running.callback(client.fenced.discard, hosted)
        client.fenced.add(hosted)
        undo.callback(hosted.cancel)
        on_end = running.pop_all().close
        try:
            duration_ns = earlier(message.duration_ns, limit_ns(client.host.max_run))
            with use_cancel_flag(client.objects.cancel_flag):
                run = model.served.execute_fenced(request, wait_for, message.options, duration_ns, on_end)
        except BaseException:
            on_end()
            raise
        hosted.set_execution(run)
        fence = FdBundle((run.fence.detach_copy(),))
        undo.pop_all()
        return calls.ExecuteFencedReply(number), fence


def on_get_fenced_info(client: Client, message: calls.GetFencedInfo, fds: FdBundle) -> calls.GetFencedInfoReply:
    with client.objects.lease(message.execution, HostedFenced) as hosted:
        info = hosted.execution.info()
    return calls.GetFencedInfoReply(int(info.status), info.launched, info.fenced, calls.sendable(info.reason))


def on_cancel_fenced(client: Client, message: calls.CancelFenced, fds: FdBundle) -> calls.Done:
    with client.objects.lease(message.execution, HostedFenced) as hosted:
        hosted.execution.cancel()
    return calls.Done()
