"""What a client asks of models and devices."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from ..._core.deadline import Deadline
from ...burst import under_token
from ...cache import CacheRejected, check_fd, checked_token
from ...devices import Device, DeviceInfo, NamedDevice, PreparedModel, checked_model
from ...devices.deadline import earlier
from ...errors import ErrorStatus
from ...memory import check_pools
from ...model import ImportedModel, Priority, consistent_result, reason_of, took_too_long
from ...watch import Row, RowKind
from ..wire import protocol as calls
from ..wire.marshal import cache_from_wire, close_all, memories_from_wire, model_to_wire
from ..wire.packets import FdBundle
from ..wire.protocol import WireModel

if TYPE_CHECKING:
    from .faults import FaultPoints
    from .host import Client


class HostedModel:
    """A prepared model in a connection's table.

    Attributes:
        served: What runs requests: the same, or the same with fault points.
        row: Where its executions are counted.
        priority: Of its bursts.
    """

    what: ClassVar[str] = "prepared model"

    def __init__(
        self, prepared: PreparedModel, row: Row, priority: Priority, faults: FaultPoints | None = None
    ) -> None:
        self.prepared = prepared
        self.served = prepared if faults is None else faults.wrap(prepared)
        self.row = row
        self.priority = priority


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
    """Ask a device about a model, which is forgotten afterwards."""
    device = client.device(message.device)
    with client.limited(), contextlib.ExitStack() as call:
        model = client.model(call, message.model, fds)
        return calls.GetSupportedOperationsReply(supported=tuple(device.get_supported_operations(model)))


def on_import_model(client: Client, message: calls.ImportModel, fds: FdBundle) -> calls.ImportModelReply:
    """Have a device read a file, which is forgotten afterwards."""
    device = client.device(message.device)
    with client.limited(), contextlib.ExitStack() as call:
        call.enter_context(client.charge_for(message.pools, fds))
        pools = memories_from_wire(message.pools, fds, client.same_user)
        call.callback(close_all, pools)
        check_pools(pools, "imported file")
        imported = device.import_model(message.source, pools)
        return calls.ImportModelReply(
            model=model_to_wire(imported.model)[0],
            files=imported.files,
            input_shapes=imported.input_shapes,
            output_shapes=imported.output_shapes,
            optional_inputs=imported.optional_inputs,
        )


def on_publish_model(client: Client, message: calls.PublishModel, fds: FdBundle) -> calls.Done:
    """Serve a model under a name from now on."""
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
    """Sessions that have it open keep it."""
    _named_device(client).withdraw(message.name)
    return calls.Done()


def _named_device(client: Client) -> NamedDevice:
    client.require_broker()
    return next(device for device in client.host.devices if isinstance(device, NamedDevice))


def on_prepare_model(client: Client, message: calls.PrepareModel, fds: FdBundle) -> calls.PrepareModelReply:
    """Compile a model; the connection owns it and its pools."""
    device, job = client.device(message.device), message.job
    with client.limited(), contextlib.ExitStack() as call, contextlib.ExitStack() as owned:
        model = client.model(owned, message.model, fds, models=1)
        check_pools(model.pools, "model")
        if job.cache is not None:
            cache = cache_from_wire(job.cache, fds)
            call.enter_context(FdBundle(cache.fds))
            checked_token(cache.token)
            job = replace(job, cache=cache)
        prepared = checked_model(device, device.prepare_model(model, job))
        result = prepared.cache_result
        counted = ("models", "compiled", "saved") if result is not None and result.saved else ("models", "compiled")
        label = _label(prepared, device, message.model)
        number = _own_model(client, owned, prepared, job.priority, label, counted)
        return calls.PrepareModelReply(number, result, prepared.takes_steps)


def on_prepare_model_from_cache(
    client: Client, message: calls.PrepareModelFromCache, fds: FdBundle
) -> calls.PrepareModelReply:
    """Restore a model from cache files; the connection owns it."""
    device = client.device(message.device)
    checked_token(message.cache.token)
    cache = cache_from_wire(message.cache, fds)
    with client.limited(), FdBundle(cache.fds), contextlib.ExitStack() as owned:
        try:  # the private copies count like mappings
            nbytes = sum(check_fd(fd).st_size for fd in (*cache.model_fds, *cache.data_fds))
            owned.enter_context(client.ledger.charge(models=1, mapped_bytes=nbytes, fds=len(fds)))
            prepared = checked_model(device, device.prepare_model_from_cache(cache, message.deadline_ns))
        except CacheRejected:
            if client.host.page is not None:
                client.host.page.service.count("rejected")
            raise
        label = _label(prepared, device)
        number = _own_model(client, owned, prepared, cache.priority, label, ("models", "restored"))
        return calls.PrepareModelReply(number, takes_steps=prepared.takes_steps)


def on_confirm_cache(client: Client, message: calls.ConfirmCache, fds: FdBundle) -> calls.ConfirmCacheReply:
    """Tell a device that cache files are visible."""
    return calls.ConfirmCacheReply(client.device(message.device).confirm_cache(message.token, message.generation))


def _own_model(
    client: Client,
    owned: contextlib.ExitStack,
    prepared: PreparedModel,
    priority: Priority,
    label: str,
    counted: Sequence[str],
) -> int:
    """Have a model in the table; what it needs goes with it. Returns its number."""
    owned.callback(prepared.close)
    row = client.open_row(RowKind.MODEL, label)
    owned.callback(row.close)
    for name in counted:
        row.count(name)
    hosted = HostedModel(prepared, row, priority, client.host.faults)
    return client.objects.add(hosted, owned.pop_all().close, leave=row.leave)


def on_execute(client: Client, message: calls.Execute, fds: FdBundle) -> calls.ExecuteReply:
    """Execute without a burst."""
    with contextlib.ExitStack() as call:
        model = call.enter_context(client.objects.lease(message.prepared_model, HostedModel))
        call.enter_context(client.ledger.charge(requests=1))
        request = client.request(call, message.request, fds)
        started = time.monotonic_ns()
        limit = Deadline.after(client.host.max_run).at_ns
        options = replace(message.options, deadline_ns=earlier(message.options.deadline_ns, limit))
        with under_token(client.objects.token):
            result = model.served.execute_synchronously(request, options)
        model.row.count("fallbacks")
        model.row.time_execution(time.monotonic_ns() - started)
    status, shapes, timing = consistent_result(*result)
    reason = reason_of(result)
    missed = status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
    if missed and client.host.max_run is not None and time.monotonic_ns() >= limit:
        reason = took_too_long(reason, client.host.max_run)
    return calls.ExecuteReply(int(status), tuple(shapes), timing, calls.sendable(reason))


def _label(prepared: PreparedModel, device: Device, model: WireModel | None = None) -> str:
    """What a model is called on the page of statistics."""
    if prepared.label or model is None or not model.input_names:
        return prepared.label or device.name
    return f"{device.name}: {', '.join(model.input_names)} → {', '.join(model.output_names)}"
