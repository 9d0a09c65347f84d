"""The service's side of the control plane: devices, and the objects of each connection."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..._core._nnburst import lib
from ..._core.deadline import Deadline, limit_ns
from ..._core.errno import check
from ..._core.leaving import LEAVING
from ...burst import FlowQueue, ListenerGroup, under_token
from ...cache import CacheRejected, SaveResult, check_fd, checked_token
from ...devices import Buffer, Device, DeviceInfo, Fence, PreparedModel, check_device, checked_model
from ...devices.deadline import earlier
from ...errors import (
    BadState,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    NNBurstError,
    ResourceExhausted,
)
from ...memory import Memory, check_pools
from ...model import BufferDesc, Model, Priority, Request, consistent_result, reason_of, took_too_long
from ...watch import Page, RowKind
from ..connection.transport import Connection
from ..process.discovery import peer_of
from ..wire import cache_messages as caching
from ..wire import protocol as calls
from ..wire.marshal import (
    cache_from_wire,
    descriptor_from_wire,
    memories_from_wire,
    model_from_wire,
    model_to_wire,
    request_from_wire,
    total_size,
)
from ..wire.packets import FdBundle
from ..wire.values import Message, WireMemory, WireModel, WireQueue, WireRequest
from .hosted import HostedBuffer, HostedBurst, HostedFenced, HostedModel, SlotMemories, close_all, limited_window
from .object_table import ObjectTable
from .quotas import PER_USER, Charge, Ledger, Quotas

if TYPE_CHECKING:
    from .faults import FaultPoints

_log = logging.getLogger(__name__)
_MAX_MESSAGE = 4096


class ServiceHost:
    """Serves devices to any number of connections.

    Args:
        devices: What clients see, in this order. The host closes them.
        quotas: What one connection may own.
        user_quotas: What all connections of one user may own.
        page: Where it counts what it does; closed by the host. None: nowhere.
        workers: Calls of one connection that are served at the same time, of those that compute and of the others.
        listeners: Serve the bursts of all connections, which the host closes; None for a thread for each burst.
        max_run: Seconds that a run may take; None for no limit.
        faults: What its client may order; None for nothing.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        quotas: Quotas | None = None,
        user_quotas: Quotas = PER_USER,
        page: Page | None = None,
        workers: int = 8,
        listeners: ListenerGroup | None = None,
        max_run: float | None = None,
        faults: FaultPoints | None = None,
    ) -> None:
        self.page = page
        self.max_run = max_run
        self.faults = faults
        self.listeners = listeners
        self.devices = tuple(filter(_is_usable, devices))
        self.quotas = quotas or Quotas()
        self._user_quotas = user_quotas
        self._users: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
        self._workers = workers
        self._lock = threading.Lock()
        self._idle_listeners: set[Callable[[], None]] = set()
        self._connections: set[HostedConnection] = set()
        self._ending: list[HostedConnection] = []  # released, but their reader thread has not returned yet
        self._closed = False

    def serve(
        self, sock: socket.socket, *, peer_pidfd: int | None = None, hello_timeout: float | None = None
    ) -> HostedConnection:
        """Serve one client, in threads of their own, until it goes.

        Args:
            sock: A connected SOCK_SEQPACKET socket; the host owns it.
            peer_pidfd: pidfd of the client's process, to notice its death for sure; the host owns it.
            hello_timeout: Seconds that the client has to say hello; None for no limit.

        Raises:
            BadState: The host is closed.
            ResourceExhausted: The system has no thread for another client.
        """
        with self._lock:
            if self._closed:
                raise BadState("the service host is closed")
            uid = peer_of(sock).uid
            user = self._users.setdefault(uid, Ledger(self._user_quotas, f"user {uid}"))
            charge = user.charge(connections=1)
            ledger = Ledger(self.quotas, above=user)
            hosted = HostedConnection(self, sock, peer_pidfd, self._workers, ledger, charge, hello_timeout)
            self._connections.add(hosted)
            try:
                hosted.connection.start()
                return hosted
            except ResourceExhausted as error:
                failure = error
        hosted.close()
        raise failure

    @property
    def connections(self) -> tuple[HostedConnection, ...]:
        """The connections that have not ended."""
        with self._lock:
            return tuple(self._connections)

    def end_clients(self, pid: int, reason: str) -> int:
        """End the connections of a process and what runs for it, as if it had gone. Does not wait.

        Args:
            pid: Of the process.
            reason: What it is told.

        Returns:
            How many connections it has.
        """
        found = [hosted for hosted in self.connections if hosted.client_pid == pid]
        for hosted in found:
            hosted.end(reason)
        return len(found)

    def when_idle(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener`, in some thread, each time that the last connection has ended. Returns what unlinks it."""
        with self._lock:
            self._idle_listeners.add(listener)
        return lambda: self._idle_listeners.discard(listener)

    def forget(self, hosted: HostedConnection) -> None:
        """Called by a connection that has ended, in its reader thread."""
        with self._lock:
            self._connections.discard(hosted)
            to_tell = () if self._connections else tuple(self._idle_listeners)
            self._ending = [other for other in self._ending if not other.wait_ended(0)]
            self._ending.append(hosted)
        for listener in to_tell:
            listener()

    def close(self, reason: str = "") -> None:
        """End all connections, release what they own, close the devices. Idempotent.

        Args:
            reason: What clients are told once their executions that run are finished, as far as the time of leaving
                allows; empty for nothing: executions of several steps end between two of them then.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            all_connections = [*self._connections, *self._ending]
        if reason:
            for hosted in all_connections:
                hosted.objects.hang_up()
            Deadline.after(LEAVING).call(self._finish, all_connections)
        for hosted in all_connections:
            hosted.connection.hang_up(calls.EndNotice(reason=reason) if reason else None)
        for hosted in all_connections:
            hosted.close()
        if self.listeners is not None:
            Deadline.after(LEAVING).call(self.listeners.close)
        for device in self.devices:
            device.close()
        if self.page is not None:
            self.page.close()

    @staticmethod
    def _finish(connections: list[HostedConnection]) -> None:
        """What runs is finished before its client hears of the end. The time that there is, is that of all clients."""
        for hosted in connections:
            hosted.objects.close()


class HostedConnection:
    """One client of a service. The methods ``on_*`` serve the calls of the table, each in a worker thread."""

    def __init__(
        self,
        host: ServiceHost,
        sock: socket.socket,
        peer_pidfd: int | None,
        workers: int,
        ledger: Ledger,
        charge: Charge,
        hello_timeout: float | None,
    ) -> None:
        self._host = host
        self._charge = charge
        self.objects = ObjectTable(self._account)
        self.ledger = ledger
        self.tokens: set[int] = set()
        """Tokens of the buffers that this connection owns: it may name no others."""
        self._fenced: set[HostedFenced] = set()
        """Those that have not ended."""
        self._flow = None if host.listeners is None else host.listeners.flow()
        self._greeted = False
        peer = peer_of(sock)
        self._client = peer.pid, peer.uid
        self._same_user = peer.uid == os.geteuid()
        self.connection = Connection(
            sock,
            calls.Side.SERVICE,
            self,
            peer_pidfd=peer_pidfd,
            workers=workers,
            hello_timeout=hello_timeout,
            on_end=lambda seconds: self._release_all(),
            name="nnburst-service",
        )

    @property
    def client_pid(self) -> int:
        """Process id of the client; 0 if it is in another pid namespace."""
        return self._client[0]

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the client is gone and its objects are released."""
        return self.connection.wait_ended(timeout)

    def close(self) -> None:
        """End the connection. Idempotent."""
        self.connection.close()

    def end(self, reason: str) -> None:
        """Have the connection end, and what runs for its client; waits for neither."""
        self.objects.hang_up()
        self.objects.leave()
        self.connection.hang_up(calls.EndNotice(reason=reason))

    def _release_all(self) -> None:
        self.objects.leave()
        self.objects.close()
        for hosted in self._fenced.copy():
            hosted.cancel()
        self._charge.release()
        self._flow = None
        self._host.forget(self)

    # -- serving -------------------------------------------------------------------------------------------------------

    def admit(self, call: calls.Call) -> None:
        """Nothing is served before hello; a fault that was ordered happens first."""
        if not self._greeted and call.request is not calls.Hello:
            raise calls.Malformed(f"{call.name} before hello")
        if self._host.faults is not None:
            self._host.faults.admit(call)

    def rank(self, message: Message) -> int:
        """Compilations and executions that wait for a thread get it by priority; calls that have none come first."""
        if isinstance(message, caching.PrepareModel):
            return message.job.priority
        if isinstance(message, caching.PrepareModelFromCache):
            return message.cache.priority
        if isinstance(message, calls.Execute):
            model = self.objects.find(message.prepared_model, HostedModel)
            return Priority.LOW if model is None else model.priority
        return Priority.HIGH + 1

    def on_hello(self, message: calls.Hello, fds: FdBundle) -> calls.HelloReply:
        """Compare versions."""
        if message.version[0] != calls.VERSION[0]:
            raise GeneralFailure(
                f"the client speaks version {_dotted(message.version)} of the control protocol and the service "
                f"{_dotted(calls.VERSION)}: run the same nnburst on both sides"
            )
        self._greeted = True
        self.connection.greet(message.version)
        return calls.HelloReply(version=calls.VERSION, pid=os.getpid())

    def on_list_devices(self, message: calls.ListDevices, fds: FdBundle) -> calls.ListDevicesReply:
        """Describe every device."""
        return calls.ListDevicesReply(devices=tuple(map(DeviceInfo.of, self._host.devices)))

    def on_get_device_status(self, message: calls.GetDeviceStatus, fds: FdBundle) -> calls.GetDeviceStatusReply:
        """Ask a device."""
        return calls.GetDeviceStatusReply(status=self._device(message.device).status)

    def on_get_supported_operations(
        self, message: calls.GetSupportedOperations, fds: FdBundle
    ) -> calls.GetSupportedOperationsReply:
        """Ask a device about a model, which is forgotten afterwards."""
        device = self._device(message.device)
        with contextlib.ExitStack() as call:
            model = self._model(call, message.model, fds)
            return calls.GetSupportedOperationsReply(supported=tuple(device.get_supported_operations(model)))

    def on_import_model(self, message: calls.ImportModel, fds: FdBundle) -> calls.ImportModelReply:
        """Have a device read a file, which is forgotten afterwards."""
        device = self._device(message.device)
        with contextlib.ExitStack() as call:
            call.enter_context(self._charge_for(message.pools, fds))
            pools = memories_from_wire(message.pools, fds, self._same_user)
            call.callback(close_all, pools)
            check_pools(pools, "imported file")
            imported = device.import_model(message.source, pools)
            return calls.ImportModelReply(
                model=model_to_wire(imported.model)[0],
                files=imported.files,
                input_shapes=imported.input_shapes,
                output_shapes=imported.output_shapes,
            )

    def on_prepare_model(self, message: caching.PrepareModel, fds: FdBundle) -> caching.PrepareModelReply:
        """Compile a model; the connection owns it and its pools."""
        device, job = self._device(message.device), message.job
        with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
            model = self._model(owned, message.model, fds, models=1)
            check_pools(model.pools, "model")
            if job.cache is not None:
                cache = cache_from_wire(job.cache, fds)
                call.enter_context(FdBundle(cache.fds))
                checked_token(cache.token)
                job = replace(job, cache=cache)
            prepared = checked_model(device, device.prepare_model(model, job))
            result = prepared.cache_result
            counted = ("models", "compiled", "saved") if result is not None and result.saved else ("models", "compiled")
            label = self._label(prepared, device, message.model)
            number = self._own_model(owned, prepared, job.priority, label, counted)
            return caching.PrepareModelReply(number, _outcome(result), self._takes_steps(prepared))

    def _takes_steps(self, prepared: PreparedModel) -> bool:
        return prepared.takes_steps and self.connection.peer_version >= (2, 2)

    def on_prepare_model_from_cache(
        self, message: caching.PrepareModelFromCache, fds: FdBundle
    ) -> caching.PrepareModelFromCacheReply:
        """Restore a model from cache files; the connection owns it."""
        device = self._device(message.device)
        checked_token(message.cache.token)
        cache = cache_from_wire(message.cache, fds)
        with FdBundle(cache.fds), contextlib.ExitStack() as owned:
            try:  # the private copies count like mappings
                nbytes = sum(check_fd(fd).st_size for fd in (*cache.model_fds, *cache.data_fds))
                owned.enter_context(self.ledger.charge(models=1, mapped_bytes=nbytes, fds=len(fds)))
                prepared = checked_model(device, device.prepare_model_from_cache(cache, message.deadline_ns))
            except CacheRejected as error:
                if self._host.page is not None:
                    self._host.page.service.count("rejected")
                return caching.PrepareModelFromCacheReply(
                    None, error.reason.value, int(error.status), str(error)[:_MAX_MESSAGE]
                )
            label = self._label(prepared, device)
            number = self._own_model(owned, prepared, cache.priority, label, ("models", "restored"))
            return caching.PrepareModelFromCacheReply(number, takes_steps=self._takes_steps(prepared))

    def _own_model(
        self,
        owned: contextlib.ExitStack,
        prepared: PreparedModel,
        priority: Priority,
        label: str,
        counted: Sequence[str],
    ) -> int:
        """Have a model in the table; what it needs goes with it. Returns its number."""
        owned.callback(prepared.close)
        page = self._host.page
        row = None if page is None else page.open(RowKind.MODEL, label, page.service, self._client)
        if row is not None:
            owned.callback(row.close)
            for name in counted:
                row.count(name)
        hosted = HostedModel(prepared, row, priority, self._host.faults)
        return self.objects.add(hosted, owned.pop_all().close, leave=None if row is None else row.leave)

    def on_confirm_cache(self, message: caching.ConfirmCache, fds: FdBundle) -> caching.ConfirmCacheReply:
        """Tell a device that cache files are visible."""
        return caching.ConfirmCacheReply(self._device(message.device).confirm_cache(message.token, message.generation))

    def on_get_device_counters(
        self, message: caching.GetDeviceCounters, fds: FdBundle
    ) -> caching.GetDeviceCountersReply:
        """Return a device's counters."""
        return caching.GetDeviceCountersReply(dict(self._device(message.device).counters()))

    def on_execute(self, message: calls.Execute, fds: FdBundle) -> calls.ExecuteReply:
        """Execute without a burst."""
        with contextlib.ExitStack() as call:
            model = call.enter_context(self.objects.lease(message.prepared_model, HostedModel, "prepared model"))
            call.enter_context(self.ledger.charge(requests=1))
            request = self._request(call, message.request, fds)
            started = time.monotonic_ns()
            limit = Deadline.after(self._host.max_run).at_ns
            options = replace(message.options, deadline_ns=earlier(message.options.deadline_ns, limit))
            with under_token(self.objects.token):
                result = model.served.execute_synchronously(request, options)
            if model.row is not None:
                model.row.count("fallbacks")
                model.row.time_execution(time.monotonic_ns() - started)
        status, shapes, timing = consistent_result(*result)
        reason = reason_of(result)
        missed = status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        if missed and self._host.max_run is not None and time.monotonic_ns() >= limit:
            reason = took_too_long(reason, self._host.max_run)
        return calls.ExecuteReply(int(status), tuple(shapes), timing, calls.sendable(reason))

    def on_execute_fenced(
        self, message: calls.ExecuteFenced, fds: FdBundle
    ) -> tuple[calls.ExecuteFencedReply, FdBundle]:
        """Launch an execution that waits for fences; neither this thread nor another that serves calls waits."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as fences:
            running = undo.enter_context(contextlib.ExitStack())  # what it needs until it has ended
            model = running.enter_context(self.objects.lease(message.prepared_model, HostedModel, "prepared model"))
            request = self._request(running, message.request, fds)
            wait_for = [fences.enter_context(Fence(fd)) for fd in fds.fds[: message.fences]]
            hosted = HostedFenced()
            charge = self.ledger.charge(requests=1)  # until its client lets go of it and it has ended
            number = self.objects.add(hosted, charge.release)
            undo.callback(self.objects.remove, number)
            running.enter_context(self.objects.lease(number, HostedFenced, "fenced execution"))
            running.callback(self._fenced.discard, hosted)
            self._fenced.add(hosted)
            undo.callback(hosted.cancel)
            on_end = running.pop_all().close
            try:
                duration_ns = earlier(message.duration_ns, limit_ns(self._host.max_run))
                with under_token(self.objects.token):
                    run = model.served.execute_fenced(request, wait_for, message.options, duration_ns, on_end)
            except BaseException:
                on_end()
                raise
            hosted.launched(run)
            fence = FdBundle((run.fence.detach_copy(),))
            undo.pop_all()
            return calls.ExecuteFencedReply(number), fence

    def on_get_fenced_info(self, message: calls.GetFencedInfo, fds: FdBundle) -> calls.GetFencedInfoReply:
        """Say how a fenced execution ended."""
        with self.objects.lease(message.execution, HostedFenced, "fenced execution") as hosted:
            info = hosted.execution.info()
        return calls.GetFencedInfoReply(int(info.status), info.launched, info.fenced, calls.sendable(info.reason))

    def on_cancel_fenced(self, message: calls.CancelFenced, fds: FdBundle) -> calls.Done:
        """Have a fenced execution not begin."""
        with self.objects.lease(message.execution, HostedFenced, "fenced execution") as hosted:
            hosted.execution.cancel()
        return calls.Done()

    def on_configure_execution_burst(self, message: calls.ConfigureBurst, fds: FdBundle) -> calls.ConfigureBurstReply:
        """Serve a burst; it keeps its model alive."""
        sizes = _extent(message.request_channel) + _extent(message.result_channel)
        with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
            model = owned.enter_context(self.objects.lease(message.prepared_model, HostedModel, "prepared model"))
            owned.enter_context(self.ledger.charge(bursts=1, mapped_bytes=sizes, fds=len(fds)))
            page, row = self._host.page, None
            if page is not None and model.row is not None:
                row = page.open(RowKind.BURST, "", model.row, self._client)
            if row is not None:
                row.count("bursts")
                owned.callback(row.close)
            bell = call.enter_context(FdBundle([fds.take_last()])) if message.bell else None
            if bell is not None:
                check(lib.nnb_bell_check(bell.fds[0]), "bell")
            flow = self._flow  # once: the connection may end meanwhile
            callback = SlotMemories(
                self.connection,
                self.ledger,
                self._account,
                message.callback,
                self.tokens,
                self._same_user,
                message.cpus,
                row,
                None if flow is None else FlowQueue(flow, model.priority),
                None if bell is None else bell.fds[0],
                self._host.max_run,
                message.loop_timeout_ns,
            )
            owned.callback(callback.forget_all)
            requests = call.enter_context(descriptor_from_wire(message.request_channel, fds))
            results = call.enter_context(descriptor_from_wire(message.result_channel, fds))
            window = limited_window(message.polling_window)
            context = model.served.configure_execution_burst(callback, requests, results, window)
            if context is None:
                raise GeneralFailure("the device gave no burst")
            owned.callback(context.close)
            hosted = HostedBurst(context, callback)
            number = self.objects.add(hosted, owned.pop_all().close, context.hang_up, hosted.leave)
            return calls.ConfigureBurstReply(number, tuple(context.cpus), message.bell and context.pipelined)

    def on_failure_reason(self, message: calls.FailureReason, fds: FdBundle) -> calls.FailureReasonReply:
        """Say why a run of a burst failed."""
        with self.objects.lease(message.burst, HostedBurst, "burst") as burst:
            return calls.FailureReasonReply(calls.sendable(burst.context.failure_reason()))

    def on_free_memory(self, message: calls.FreeMemory, fds: FdBundle) -> calls.Done:
        """Forget a slot of a burst."""
        with self.objects.lease(message.burst, HostedBurst, "burst") as burst:
            burst.context.free_memory(message.slot)
            burst.memories.forget(message.slot)
        return calls.Done()

    def on_allocate(self, message: calls.Allocate, fds: FdBundle) -> calls.AllocateReply:
        """Allocate a driver-managed buffer; the connection owns it."""
        device = self._device(message.device)
        with contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
            owned.enter_context(self.ledger.charge(buffers=1))
            named = {role.model_index for role in (*message.input_roles, *message.output_roles)}
            models: list[Any] = [
                call.enter_context(self.objects.lease(number, HostedModel, "prepared model")).prepared
                if index in named
                else None  # as any entry that no role names: not looked at
                for index, number in enumerate(message.prepared_models)
            ]
            desc = BufferDesc(message.dimensions)
            buffer = device.allocate(desc, models, message.input_roles, message.output_roles)
            hosted = HostedBuffer(buffer, self.ledger, self.tokens)
            owned.callback(hosted.dispose)
            return calls.AllocateReply(buffer=self.objects.add(hosted, owned.pop_all().close), token=buffer.token)

    def on_copy_to(self, message: calls.CopyTo, fds: FdBundle) -> calls.CopyToReply:
        """Copy a buffer out."""
        with self._copying(message.buffer, message.memory, fds) as (buffer, memory):
            return calls.CopyToReply(generation=buffer.copy_to(memory))

    def on_copy_from(self, message: calls.CopyFrom, fds: FdBundle) -> calls.Done:
        """Copy into a buffer."""
        with self._copying(message.buffer, message.memory, fds) as (buffer, memory):
            buffer.copy_from(memory, message.dimensions)
        return calls.Done()

    @contextlib.contextmanager
    def _copying(self, number: int, wire: WireMemory, fds: FdBundle) -> Iterator[tuple[Buffer, Memory]]:
        with (
            self._charge_for([wire], fds),
            self.objects.lease(number, HostedBuffer, "buffer") as owned,
            memories_from_wire((wire,), fds, self._same_user)[0] as memory,
        ):
            yield owned.buffer, memory

    def on_copy_buffer(self, message: calls.CopyBuffer, fds: FdBundle) -> calls.Done:
        """Copy inside the device."""
        with (
            self.objects.lease(message.buffer, HostedBuffer, "buffer") as target,
            self.objects.lease(message.source, HostedBuffer, "buffer") as source,
        ):
            target.buffer.copy_buffer(source.buffer)
        return calls.Done()

    def on_end_clients(self, message: calls.EndClients, fds: FdBundle) -> calls.EndClientsReply:
        """End another client, for who may end the service, too."""
        uid = self._client[1]
        if uid not in (0, os.geteuid()):
            raise InvalidArgument(
                f"user {uid} may not end clients of this service: user {os.geteuid()}, who runs it, may, and root"
            )
        reason = f"for process {message.pid} alone, by order of user {uid} (nnburst kick)"
        return calls.EndClientsReply(self._host.end_clients(message.pid, reason))

    def on_release(self, message: calls.Release, fds: FdBundle) -> calls.Done:
        """Let go of an object."""
        self.objects.remove(message.object)
        return calls.Done()

    def on_goodbye(self, message: calls.Goodbye, fds: FdBundle) -> calls.Done:
        """Release everything before the client closes its end."""
        self.objects.close()
        return calls.Done()

    # -- what calls bring ------------------------------------------------------------------------------------------

    def _account(self, nbytes: int) -> Callable[[], None]:
        """Charge working memory; where that would be too much, what is kept for later runs goes first."""
        try:
            return self.ledger.charge(working_bytes=nbytes).release
        except ResourceExhausted:
            for burst in self.objects.all_of(HostedBurst):
                burst.context.forget_plans()
            return self.ledger.charge(working_bytes=nbytes).release

    def _charge_for(self, pools: Sequence[WireMemory], fds: FdBundle, **more: int) -> Charge:
        return self.ledger.charge(mapped_bytes=total_size(pools), fds=len(fds), **more)

    def _model(self, stack: contextlib.ExitStack, wire: WireModel, fds: FdBundle, **more: int) -> Model:
        """Take in a model, whose pools are closed with the stack."""
        stack.enter_context(self._charge_for(wire.pools, fds, **more))
        model = model_from_wire(wire, fds, self._same_user)
        stack.callback(close_all, model.pools)
        return model

    def _request(self, stack: contextlib.ExitStack, wire: WireRequest, fds: FdBundle) -> Request:
        """Take in a request, whose memories are closed with the stack."""
        stack.enter_context(self._charge_for(wire.pools, fds))
        request = request_from_wire(wire, fds, self.tokens, self._same_user)
        stack.callback(close_all, request.pools)
        check_pools(request.pools, "request")
        return request

    def _label(self, prepared: PreparedModel, device: Device, model: WireModel | None = None) -> str:
        """What a model is called on the page of statistics."""
        if prepared.label or model is None or not model.input_names:
            return prepared.label or device.name
        return f"{device.name}: {', '.join(model.input_names)} → {', '.join(model.output_names)}"

    def _device(self, number: int) -> Device:
        if number >= len(self._host.devices):
            raise DeviceUnavailable(f"there is no device {number}: this service has {len(self._host.devices)}")
        return self._host.devices[number]


def _is_usable(device: Device) -> bool:
    """Whether a device may be offered; one that is not is left out, the others are not affected."""
    try:
        check_device(device)
    except NNBurstError as error:
        _log.warning("a device is not offered: %s", error)
        return False
    return True


def _outcome(result: SaveResult | None) -> caching.CacheOutcome | None:
    if result is None:
        return None
    return caching.CacheOutcome(result.saved, result.reason.value, result.generation, result.nbytes, result.seconds)


def _extent(queue: WireQueue) -> int:
    return max((grantor.offset + grantor.extent for grantor in queue.grantors), default=0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"
