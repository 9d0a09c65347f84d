"""A client and a service host over a socketpair in one process."""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import logging
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import Memory
from nnburst._core.deadline import Deadline
from nnburst.burst import ExecutionBurstController
from nnburst.burst.interfaces import BurstCallback
from nnburst.burst.kernel import Kernel
from nnburst.devices import PreparedModel
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.noop import NoopPreparedModel
from nnburst.devices.registry import create_device
from nnburst.errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    OutputShape,
    ResourceExhausted,
)
from nnburst.fmq import MessageQueue, MQDescriptor
from nnburst.model import Priority, Request, RunOptions, Timing
from nnburst.model.running import reason_of
from nnburst.model.types import NO_TIMING, DataLocation, DeviceStatus, MeasureTiming, RequestArgument
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.connection import transport
from nnburst.service.connection.pending import PendingCall
from nnburst.service.host.host import Client, ServiceHost
from nnburst.service.host.quotas import PER_USER, Quotas
from nnburst.service.process import limited_log
from nnburst.service.process.limited_log import LINES, LONGEST, PERIOD, JsonLines, LimitedHandler
from nnburst.service.wire import protocol
from nnburst.service.wire.marshal import memories_from_wire, model_to_wire
from nnburst.service.wire.packets import FdBundle
from nnburst.testing.leaks import Snapshot
from support.connections import socket_pair
from support.doubles import FakeDevice
from support.models import tiny_model
from support.processes import open_fds
from support.services import in_process
from support.users import in_forked_child
from support.waiting import PATIENCE, Background, Held, until, without_collector


def charged(host: ServiceHost) -> dict[str, int]:
    """What the only client of a host has of its quotas."""
    (hosted,) = host.connections
    return hosted.ledger.used


@contextlib.contextmanager
def prepared(**hooks: Any) -> Iterator[tuple[Any, FakeDevice, ServiceHost, ServiceConnection]]:
    """A model that a client has prepared, its device, the host and the client."""
    device = FakeDevice(**hooks)
    with in_process([device]) as (client, host):
        yield client.devices[0].prepare_model(tiny_model()), device, host, client


def queues() -> tuple[MessageQueue, MessageQueue]:
    return MessageQueue("V24", 1024), MessageQueue("V24", 1024)


class Callback(BurstCallback):
    """Answers with one pool per slot, filled with the slot's number."""

    def __init__(self, size: int = 64) -> None:
        self.size = size
        self.asked: list[tuple[int, ...]] = []

    def get_memories(self, slots: Any) -> Any:
        self.asked.append(tuple(slots))
        if any(slot < 0 for slot in slots):
            return ErrorStatus.INVALID_ARGUMENT, ()
        memories = tuple(Memory.ashmem(self.size) for _ in slots)
        for slot, memory in zip(slots, memories, strict=True):
            memory.array(np.int32, (1,))[0] = slot
        return ErrorStatus.NONE, memories


def configure(model: Any, callback: BurstCallback, window: float | None = None) -> Any:
    a, b = queues()
    with a, b:
        return model.configure_execution_burst(callback, a.descriptor, b.descriptor, window)


# -- devices and models ------------------------------------------------------------------------------------------------


def test_devices_are_seen_as_they_are() -> None:
    device = FakeDevice()
    with in_process([device, FakeDevice()]) as (client, _):
        assert len(client.devices) == 2
        remote = client.devices[0]
        assert (remote.name, remote.version_string, remote.type) == ("test-fake", "1", device.type)
        assert remote.capabilities == device.capabilities
        assert remote.status is DeviceStatus.AVAILABLE
        assert remote.get_number_of_cache_files_needed() == (0, 0)
        assert client.pid == os.getpid()
        assert client.alive
    assert not client.alive


@pytest.mark.parametrize("constant_bytes", [128, 132, 1 << 20])
def test_models_arrive_whole_and_large_constants_as_pools(constant_bytes: int) -> None:
    seen: list[Any] = []
    device = FakeDevice(prepare=lambda m: seen.append([p.array(np.float32, (p.size // 4,)).copy() for p in m.pools]))
    model = tiny_model(constant_bytes)
    with in_process([device]) as (client, _), client.devices[0].prepare_model(model):
        arrived = device.models[0].model
        assert (arrived.main, arrived.input_names) == (model.main, model.input_names)
        assert arrived.operand_values == model.operand_values
        assert len(arrived.pools) == (constant_bytes > 128)
        if constant_bytes > 128:
            assert len(model.operand_values) <= 16
            assert np.array_equal(seen[0][0][: constant_bytes // 4], np.arange(constant_bytes // 4))


def test_get_supported_operations_leaves_nothing_mapped() -> None:
    with in_process([FakeDevice()]) as (client, host):
        assert client.devices[0].get_supported_operations(tiny_model(4096)) == (True,)
        assert set(charged(host).values()) == {0}


def test_a_device_that_is_not_there_is_unavailable() -> None:
    with in_process([FakeDevice()]) as (client, _):
        device: Any = client.devices[0]
        at = device.place()
        device.place = lambda: at._replace(number=5)
        with pytest.raises(DeviceUnavailable, match="no device 5"):
            device.prepare_model(tiny_model())


def test_a_deadline_ends_the_wait_for_a_model_which_is_released_when_it_comes() -> None:
    go_on = threading.Event()
    device = FakeDevice(prepare=lambda _: go_on.wait(PATIENCE))
    with in_process([device]) as (client, host):
        with pytest.raises(MissedDeadline):
            client.devices[0].prepare_model(tiny_model(), CompileJob(deadline_ns=time.monotonic_ns() + 10_000_000))
        go_on.set()
        (hosted,) = host.connections
        until(lambda: device.models and device.models[0].closed)
        assert device.models[0].closed == 1
        assert len(hosted.objects) == 0


def test_calls_that_wait_for_a_thread_are_served_by_priority() -> None:
    began, go_on = threading.Event(), threading.Event()
    served: list[str] = []

    def supported(_: object) -> None:
        if not began.is_set():
            began.set()
            go_on.wait(PATIENCE)
        else:
            served.append("no priority")

    device = FakeDevice(
        supported=supported,
        prepare=lambda model: served.append(f"compile {len(model.operand_values) // 4 - 1}"),
        execute=lambda request: served.append(f"execute {request.pools[0].size // 4096}"),
    )
    with in_process([device], workers=1) as (client, host), ThreadPoolExecutor(8) as threads:
        remote = client.devices[0]
        models = [remote.prepare_model(tiny_model(), CompileJob(priority=each)) for each in Priority]
        served.clear()
        (hosted,) = host.connections
        calls = [threads.submit(remote.get_supported_operations, tiny_model())]
        assert began.wait(PATIENCE)

        def call(function: Any, *arguments: Any) -> None:
            """Have one more call wait."""
            calls.append(threads.submit(function, *arguments))
            until(lambda: hosted.connection._serving._served.count >= len(calls))

        with contextlib.ExitStack() as pools:
            for model, pages in zip(models, (1, 2, 3), strict=True):
                pool = pools.enter_context(Memory.ashmem(4096 * pages))
                call(model.execute_synchronously, a_request(pool))
            for priority, values in zip(Priority, (8, 9, 10), strict=True):
                call(remote.prepare_model, tiny_model(4 * values), CompileJob(priority=priority))
            call(remote.get_supported_operations, tiny_model())
            go_on.set()
            for each in calls:
                each.result(PATIENCE)
    expected = ["no priority", "execute 3", "compile 10", "execute 2", "compile 9", "execute 1", "compile 8"]
    assert served == expected


def test_a_compilation_that_does_not_end_keeps_no_call_waiting_that_computes_nothing() -> None:
    began, go_on = threading.Event(), threading.Event()

    def prepare(_: object) -> None:
        if device.models:
            began.set()
            go_on.wait(PATIENCE)

    device = FakeDevice(prepare=prepare)
    with in_process([device], workers=1) as (client, _), ThreadPoolExecutor(1) as thread:
        remote = client.devices[0]
        model = remote.prepare_model(tiny_model())
        hangs = thread.submit(remote.prepare_model, tiny_model())
        assert began.wait(PATIENCE)
        try:
            assert remote.status is DeviceStatus.AVAILABLE
            configure(model, Callback()).close()
            model.close()
            assert device.models[0].closed
        finally:
            go_on.set()
        hangs.result(PATIENCE)


# -- executions without a burst ----------------------------------------------------------------------------------------


def a_request(pool: Memory) -> Request:
    argument = RequestArgument(location=DataLocation(0, 0, 16))
    return Request((argument,), (argument,), (pool,))


def test_an_execution_reads_and_writes_the_client_s_pools() -> None:
    def double(request: Request) -> None:
        request.pools[0].array(np.int32, (4,))[:] *= 2

    with prepared(execute=double) as (model, _, host, *_), Memory.ashmem(4096) as pool:
        pool.array(np.int32, (4,))[:] = [1, 2, 3, 4]
        assert model.execute_synchronously(a_request(pool)) == (ErrorStatus.NONE, (), NO_TIMING)
        assert pool.array(np.int32, (4,)).tolist() == [2, 4, 6, 8]
        assert charged(host)["fds"] == 0


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((ErrorStatus.NONE, (OutputShape((1, 4)),), Timing(1, 2)),) * 2,
        (
            (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((9,), False),), Timing(1, 2)),
            (ErrorStatus.OUTPUT_INSUFFICIENT_SIZE, (OutputShape((9,), False),), NO_TIMING),
        ),
        (
            (ErrorStatus.GENERAL_FAILURE, (OutputShape((1,)),), Timing(1, 2)),
            (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING),
        ),
        ((ErrorStatus.DEAD_OBJECT, (), NO_TIMING), (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)),
        (OutputInsufficientSize("x", output_shapes=(OutputShape((2,)),)),) * 2,
        (ZeroDivisionError(), (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)),
    ],
)
def test_the_result_of_an_execution_is_a_status_never_an_exception(
    answer: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with prepared() as (model, device, *_), Memory.ashmem(64) as pool:

        def execute(*_: Any) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(device.models[0], "execute_synchronously", execute)
        if isinstance(expected, OutputInsufficientSize):
            expected = (expected.status, expected.output_shapes, NO_TIMING)
        assert model.execute_synchronously(a_request(pool), RunOptions(MeasureTiming.YES)) == expected


def test_a_pool_that_could_be_truncated_reaches_the_device_as_one_to_be_copied(tmp_path: Any) -> None:
    path = tmp_path / "pool"
    path.write_bytes(bytes(4096))
    seen: list[tuple[bool, ...]] = []

    def look(request: Request) -> None:
        seen.append(tuple(pool.mappable for pool in request.pools))  # type: ignore[attr-defined]

    with prepared(execute=look) as (model, *_), open(path, "r+b") as file:
        with Memory.mmap_fd(file.fileno(), 4096) as pool, Memory.mmap_fd(file.fileno(), 64, direct=True) as direct:
            for memory in (pool, direct):
                assert model.execute_synchronously(a_request(memory))[0] is ErrorStatus.NONE
    assert seen == [(False,), (True,)]


# -- bursts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "most"), [(0.005, 0.005), (60.0, 0.01)], ids=["as asked", "no longer than this"])
def test_REQ_CLI_002_006_a_burst_is_configured_once_with_its_window_and_released(window: float, most: float) -> None:
    with prepared() as (model, device, host, *_):
        burst = configure(model, Callback(), window)
        (context,) = device.contexts
        assert context.polling_window == most
        burst.free_memory(3)
        assert context.freed == [3]
        burst.close()
        burst.close()
        assert context.log == ["close"]
        with pytest.raises(BadState, match="burst is closed"):
            burst.free_memory(1)
        assert charged(host)["bursts"] == 0


def test_each_end_of_a_burst_learns_where_the_other_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pinned(Callback):
        cpus = frozenset({0, 7})

    with prepared() as (model, device, *_):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})  # of the service's worker
        burst = configure(model, Pinned())
        assert device.contexts[0].callback.cpus == {0, 7}
        assert burst.cpus == {5}


def test_a_bell_is_the_empty_end_of_a_connected_local_pair() -> None:
    class Ringing(Callback):
        bell: int | None = None

    with prepared() as (model, _, host, *_), contextlib.ExitStack() as stack:

        def given(*sockets: socket.socket) -> list[int]:
            return [stack.enter_context(each).fileno() for each in sockets]

        def ringing(bell: int) -> Ringing:
            callback = Ringing()
            callback.bell = bell
            return callback

        listener = socket.create_server(("127.0.0.1", 0))
        used, theirs = socket.socketpair()
        socket.send_fds(theirs, [b"x"], [listener.fileno()])
        network = socket.create_connection(listener.getsockname())
        datagrams = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        alone = socket.socket(socket.AF_UNIX)
        end, pipe = os.pipe()
        stack.callback(os.close, end)
        stack.callback(os.close, pipe)
        for bell in [*given(network, used, datagrams[0], alone), pipe]:
            with pytest.raises(InvalidArgument, match="bell"):
                configure(model, ringing(bell))
        given(listener, theirs, datagrams[1])
        assert charged(host)["bursts"] == charged(host)["fds"] == 0
        good, far = socket.socketpair()
        given(good, far)
        configure(model, ringing(good.fileno()))
        with pytest.raises(BrokenPipeError):
            far.send(b"x")  # what waited in a bell would have to be closed with it
        good.send(b"x")
        assert far.recv(1) == b"x"


@pytest.mark.parametrize("error", [GeneralFailure("no bursts today"), InvalidArgument("channel")])
def test_REQ_CLI_003_REQ_CLI_007_an_error_of_the_device_gives_no_burst(error: Exception) -> None:
    def fail(_: object) -> None:
        raise error

    with prepared(burst=fail) as (model, _, host, *_):
        with pytest.raises(type(error), match=str(error)):
            configure(model, Callback())
        assert charged(host)["bursts"] == 0
        assert len(host.connections[0].objects) == 1


def test_REQ_CLI_004_no_context_gives_no_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared() as (model, device, host, *_):
        monkeypatch.setattr(device.models[0], "configure_execution_burst", lambda *_: None)
        with pytest.raises(GeneralFailure, match="no burst"):
            configure(model, Callback())
        assert charged(host)["bursts"] == 0


@pytest.mark.parametrize(
    ("number", "status", "why"),
    [(errno.EIO, 2, os.strerror(errno.EIO)), (errno.ETOOMANYREFS, 7, "descriptors that were not received")],
    ids=["EIO", "ETOOMANYREFS"],
)
def test_REQ_CLI_005_REQ_CLI_008_a_failing_transport_gives_no_burst(
    monkeypatch: pytest.MonkeyPatch, number: int, status: int, why: str
) -> None:
    send = socket.socket.sendmsg

    def failing(sock: socket.socket, data: Any, ancillary: Any = (), *rest: Any) -> int:
        if ancillary and sum(len(fds) for _, _, fds in ancillary) == 3:  # those of the two channels and the bell
            raise OSError(number, os.strerror(number))
        return send(sock, data, ancillary, *rest)

    with prepared() as (model, device, host, client):
        before = open_fds()
        client.connection._outbox.send_timeout = 0.0  # for which it tries again
        monkeypatch.setattr(socket.socket, "sendmsg", failing)
        with pytest.raises(NNBurstError, match=why) as caught:
            ExecutionBurstController.create(model)
        assert caught.value.status == status
        until(lambda: open_fds() == before)
        assert not device.contexts
        assert charged(host)["bursts"] == 0
        monkeypatch.undo()
        assert configure(model, Callback()) is not None, "the connection goes on"


def test_channel_whose_descriptor_is_not_open_gives_no_burst() -> None:
    with prepared() as (model, *_):
        a, b = queues()
        with a, b:
            broken = b.descriptor.duplicate()
            os.close(broken.fds[0])
            with pytest.raises(InvalidArgument, match="not open"):
                model.configure_execution_burst(Callback(), a.descriptor, broken)
            broken._fds.disown(slice(None))  # its number may be another file's by now
        assert configure(model, Callback()) is not None


def test_REQ_CLI_009_a_dead_service_gives_dead_object() -> None:
    with prepared() as (model, _, host, client):
        host.close()
        with pytest.raises(DeadObject):
            configure(model, Callback())
        assert client.devices[0].status is DeviceStatus.OFFLINE


def test_call_that_a_service_gets_while_it_ends_is_told_of_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, admit, finish = threading.Event(), Client.admit, ServiceHost._finish

    def admitted(hosted: Client, call: Any) -> None:
        admit(hosted, call)
        begun.set()

    def finished(connections: Any) -> None:
        finish(connections)
        begun.clear()
        late.append(thread.submit(configure, model, Callback()))
        assert begun.wait(PATIENCE)

    monkeypatch.setattr(Client, "admit", admitted)
    monkeypatch.setattr(ServiceHost, "_finish", staticmethod(finished))
    late: list[Any] = []
    with prepared() as (model, _, host, *_), ThreadPoolExecutor(1) as thread:
        host.close("it was told to")
        with pytest.raises(DeadObject, match="the service ended: it was told to"):
            late[0].result(PATIENCE)


def test_call_that_a_service_gets_after_the_farewell_finds_the_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goodbye = Client.on_goodbye

    def late(hosted: Client, message: Any, fds: FdBundle) -> protocol.Done:
        done = goodbye(hosted, message, fds)
        go_on.set()
        assert answered.wait(PATIENCE)
        return done

    def pending(message: Any, *more: Any, **named: Any) -> PendingCall:
        if isinstance(message, protocol.ConfigureBurst):
            begun.set()
            go_on.wait(PATIENCE)
        return PendingCall(message, *more, **named)

    begun, go_on, answered = threading.Event(), threading.Event(), threading.Event()
    monkeypatch.setattr(Client, "on_goodbye", late)
    with prepared() as (model, _, _, client), ThreadPoolExecutor(1) as thread:
        monkeypatch.setattr(transport, "PendingCall", pending)
        call = thread.submit(configure, model, Callback())
        assert begun.wait(PATIENCE)
        client.connection.hang_up(protocol.Goodbye())
        try:
            with pytest.raises(BadState, match="configure_execution_burst: the connection to the service is closed"):
                call.result(PATIENCE)
        finally:
            answered.set()


def test_the_service_fetches_memories_also_more_than_fit_into_a_message() -> None:
    with prepared() as (model, device, host, *_):
        callback = Callback()
        burst = configure(model, callback)
        status, memories = device.contexts[0].callback.get_memories(range(450))
        assert status is ErrorStatus.NONE
        assert [m.array(np.int32, (1,))[0] for m in memories] == list(range(450))
        assert [len(slots) for slots in callback.asked] == [200, 200, 50]
        (hosted,) = host.connections
        before = hosted.ledger.used["mapped_bytes"]
        burst.free_memory(7)
        assert hosted.ledger.used["mapped_bytes"] == before - 64
        assert device.contexts[0].callback.get_memories([1, -1]) == (ErrorStatus.INVALID_ARGUMENT, ())


def test_memories_may_be_fetched_while_the_burst_is_configured() -> None:
    got: list[Any] = []
    with prepared(burst=lambda c: got.append(c.callback.get_memories([5]))) as (model, *_):
        configure(model, Callback())
        assert got[0][0] is ErrorStatus.NONE


class Broken(Callback):
    """Raises when it is asked for more than the first 200 memories."""

    def get_memories(self, slots: Any) -> Any:
        return super().get_memories(slots) if slots[0] < 200 else 1 // 0


class Short(Callback):
    def get_memories(self, slots: Any) -> Any:
        return ErrorStatus.NONE, super().get_memories(slots)[1][1:]


@pytest.mark.parametrize("callback", [Broken, Short])
def test_callback_that_raises_or_gives_a_wrong_number_of_memories_fails_the_request(callback: Any) -> None:
    with prepared() as (model, device, host, *_):
        burst = configure(model, callback())
        (hosted,) = host.connections
        before = hosted.ledger.used
        assert device.contexts[0].callback.get_memories(range(250)) == (ErrorStatus.GENERAL_FAILURE, ())
        assert hosted.ledger.used == before
        burst.close()


def test_a_burst_keeps_its_model_until_it_is_closed() -> None:
    with prepared() as (model, device, *_):
        burst = configure(model, Callback())
        model.close()
        with pytest.raises(BadState, match="closed"):
            configure(model, Callback())
        assert device.models[0].closed == 0
        burst.close()
        assert device.models[0].closed == 1


# -- release and the end -----------------------------------------------------------------------------------------------


def test_the_end_of_a_connection_releases_all_it_owned() -> None:
    device = FakeDevice()
    with in_process([device]) as (client, host):
        (hosted,) = host.connections
        burst = configure(client.devices[0].prepare_model(tiny_model(4096)), Callback())
        unused = client.devices[0].prepare_model(tiny_model())
        device.contexts[0].callback.get_memories([1, 2])
        client.connection.close()  # without goodbye, as if the client had died
        assert hosted.connection.wait_ended(PATIENCE)
        assert device.contexts[0].log == ["hang_up", "close"]
        assert [model.closed for model in device.models] == [1, 1]
        assert set(hosted.ledger.used.values()) == {0}
        assert host.connections == ()
    assert device.closed
    del burst, unused


def test_what_is_dropped_is_released() -> None:
    with prepared() as (model, device, host, client):
        burst = configure(model, Callback())
        del burst, model
        gc.collect()
        assert device.contexts[0].gone.wait(PATIENCE)
        client.devices[0].status  # noqa: B018 - a call that comes after both releases
        (hosted,) = host.connections
        until(lambda: len(hosted.objects) == 0)
        assert device.models[0].closed == 1


def test_a_model_that_is_prepared_after_the_client_left_is_released() -> None:
    slow = Held()
    device = FakeDevice(prepare=slow)
    with in_process([device]) as (client, host):
        (hosted,) = host.connections
        preparing = Background(lambda: client.devices[0].prepare_model(tiny_model(4096)))
        assert slow.entered.wait(PATIENCE)
        client.connection.close()
        assert isinstance(preparing.result(), BadState)
        assert hosted.connection.wait_ended(PATIENCE)
        slow.go_on.set()
    until(lambda: device.models and device.models[0].closed)
    assert device.models[0].closed == 1
    assert set(hosted.ledger.used.values()) == {0}


class LongNamed(FakeDevice):
    """Has more names than fit into a datagram."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{n:4000}" for n in range(20))


def test_client_that_does_not_read_a_long_answer_owns_it_until_it_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "WORKER_PATIENCE", 0.0)
    host, (client, other) = ServiceHost([LongNamed()], quotas=Quotas(fds=1)), socket_pair()
    try:
        hosted = host.serve(other)
        hosted.connection._outbox.send_timeout = 0.05
        with client:
            for number, call in enumerate((protocol.Hello(protocol.VERSION, 1), *[protocol.ListModels()] * 2)):
                client.send(struct.pack("<BBHI", 0, 0, 0, number) + protocol.encode(call))
            until(lambda: hosted.connection.ending.reason)
            assert not hosted.connection.wait_ended(0.5)
            used = hosted.ledger.used
            assert used["working_bytes"] > 80_000
            assert used["fds"] == 1, "the second answer has no descriptor: it is a refusal"
        assert hosted.connection.wait_ended(PATIENCE)
        assert set(hosted.ledger.used.values()) == {0}
    finally:
        host.close()


def test_a_client_for_whom_there_are_no_descriptors_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    host = ServiceHost([])
    end, other = socket_pair()
    with end, other, contextlib.closing(host), monkeypatch.context() as none_left:
        gc.collect()  # what other tests have left
        before = open_fds()
        none_left.setattr(os, "eventfd", no_descriptors)
        with pytest.raises(ResourceExhausted):
            host.serve(end, peer_pidfd=os.pidfd_open(os.getpid()))
        gc.collect()
        until(lambda: open_fds() == before, "descriptors are left")


def no_descriptors(*_: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.check
def test_closing_a_host_waits_for_connections_that_are_just_ending() -> None:
    stuck, released = Held(), threading.Event()
    a, b = socket_pair()
    host = ServiceHost([FakeDevice(supported=stuck)])
    hosted = host.serve(b)
    hosted.objects.add(object(), released.set)
    with a:
        wire, _ = model_to_wire(tiny_model())
        a.send(b"\0\0\0\0\1\0\0\0" + protocol.encode(protocol.Hello(protocol.VERSION, 1)))
        a.recv(1000)
        a.send(b"\0\0\0\0\2\0\0\0" + protocol.encode(protocol.GetSupportedOperations(0, wire)))
        assert stuck.entered.wait(PATIENCE)
    assert released.wait(PATIENCE)  # now the connection is ending, and waits for its handler a little
    host.close()
    assert hosted.connection.wait_ended(0)
    stuck.go_on.set()


def test_time_in_which_clients_are_let_finish_is_that_of_all_together() -> None:
    left: list[float] = []

    def slow_end() -> None:
        left.append(Deadline.after().left())
        time.sleep(0.05)

    host = ServiceHost([])
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            a, b = socket_pair()
            stack.enter_context(a)
            host.serve(b).objects.add(object(), slow_end)
        host.close("it was told to stop")
    assert left[1] <= left[0] - 0.05
    assert left[2] <= left[1] - 0.05


def test_dropping_every_reference_ends_the_connection() -> None:
    a, b = socket_pair()
    host = ServiceHost([FakeDevice()])
    hosted = host.serve(b)
    device = ServiceConnection(a).devices[0]
    assert device.status is DeviceStatus.AVAILABLE  # a proxy keeps the connection
    del device
    gc.collect()
    assert hosted.connection.wait_ended(PATIENCE)
    host.close()


def test_use_after_close_is_a_bad_state() -> None:
    with prepared() as (model, _, _, client), Memory.ashmem(64) as pool:
        burst = configure(model, Callback())
        client.close()
        client.close()
        for use in (
            lambda: client.devices[0].prepare_model(tiny_model()),
            lambda: client.devices[0].status,
            lambda: model.execute_synchronously(a_request(pool)),
            lambda: configure(model, Callback()),
            lambda: burst.free_memory(1),
        ):
            with pytest.raises(BadState, match="closed"):
                use()
        burst.close()
        model.close()


def test_a_closed_host_serves_nobody() -> None:
    host = ServiceHost([])
    host.close()
    a, b = socket_pair()
    with a, b, pytest.raises(BadState):
        host.serve(b)


# -- quotas ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quotas", "knob"),
    [(Quotas(models=2), "models"), (Quotas(mapped_bytes=9000), "mapped_bytes"), (Quotas(fds=2), "fds")],
)
def test_quotas_of_models_answer_resource_exhausted_and_releasing_helps(quotas: Quotas, knob: str) -> None:
    with in_process([FakeDevice()], quotas=quotas) as (client, _):
        models = [client.devices[0].prepare_model(tiny_model(4096)) for _ in range(2)]
        with pytest.raises(ResourceExhausted, match=knob) as caught:
            client.devices[0].prepare_model(tiny_model(4096))
        assert caught.value.status is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
        models[0].close()
        client.devices[0].prepare_model(tiny_model(4096))


@pytest.mark.parametrize("way", ["at once", "fenced"])
@pytest.mark.parametrize("owner", ["connection", "user"])
def test_quota_of_requests_counts_executions_without_a_burst_until_they_end(way: str, owner: str) -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def block(request: Request) -> None:
        begun.release()
        assert go_on.wait(PATIENCE)

    few = Quotas(requests=2)
    options = {"quotas": few} if owner == "connection" else {"user_quotas": PER_USER.replace({"requests": 2})}
    knob = r"this connection may have 2 requests.*--quota requests=N, launch\(quotas=\{'requests': N\}\)"
    if owner == "user":
        knob = rf"user {os.getuid()} may have 2 requests.*--quota user.requests=N\)"
    with in_process([FakeDevice(execute=block)], **options) as (client, host), Memory.ashmem(64) as pool:
        a, b = socket_pair()
        host.serve(b)
        with contextlib.closing(ServiceConnection(a)) as other, ThreadPoolExecutor() as threads:
            model = client.devices[0].prepare_model(tiny_model())
            same = model if owner == "connection" else other.devices[0].prepare_model(tiny_model())
            under_way = [threads.submit(model.execute_synchronously, a_request(pool)) for _ in range(2)]
            try:
                assert all(begun.acquire(timeout=PATIENCE) for _ in under_way)
                if way == "fenced":
                    with pytest.raises(ResourceExhausted, match=knob):
                        same.execute_fenced(a_request(pool))
                else:
                    failure = same.execute_synchronously(a_request(pool))
                    assert failure[0] is ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT
                    assert re.search(knob, reason_of(failure))
            finally:
                go_on.set()
            assert [future.result()[0] for future in under_way] == [ErrorStatus.NONE] * 2
            assert same.execute_synchronously(a_request(pool))[0] is ErrorStatus.NONE
            assert not any(hosted.ledger.used["requests"] for hosted in host.connections)


def test_quotas_of_bursts_and_of_their_memories() -> None:
    device = FakeDevice()
    with in_process([device], quotas=Quotas(bursts=1, mapped_bytes=1 << 20)) as (client, _):
        model = client.devices[0].prepare_model(tiny_model())
        burst = configure(model, Callback(size=400 << 10))
        with pytest.raises(ResourceExhausted, match="bursts"):
            configure(model, Callback())
        callback = device.contexts[0].callback
        assert callback.get_memories([0, 1])[0] is ErrorStatus.NONE
        with pytest.raises(ResourceExhausted, match="mapped_bytes"):
            callback.get_memories([2, 3])
        burst.free_memory(0)
        assert callback.get_memories([2])[0] is ErrorStatus.NONE
        burst.close()


def test_memory_of_a_slot_that_is_asked_again_counts_once() -> None:
    device = FakeDevice()
    with in_process([device], quotas=Quotas(mapped_bytes=1 << 20)) as (client, _):
        burst = configure(client.devices[0].prepare_model(tiny_model()), Callback(size=400 << 10))
        for _ in range(4):
            assert device.contexts[0].callback.get_memories([0])[0] is ErrorStatus.NONE
        burst.close()


# -- hello and hostile clients -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [(1, 1), (0, 0), (2, 0)])
def test_another_version_is_refused_by_the_service(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int]) -> None:
    a, b = socket_pair()
    host = ServiceHost([])
    host.serve(b)
    of_another = SimpleNamespace(**vars(protocol) | {"VERSION": version})
    monkeypatch.setattr("nnburst.service.client.connection.calls", of_another)
    said = rf"the client speaks version {version[0]}\.{version[1]} of the control protocol and the service 1\.0:"
    with pytest.raises(GeneralFailure, match=said):
        ServiceConnection(a)
    host.close()


def test_a_call_before_hello_closes_the_connection() -> None:
    host = ServiceHost([])
    a, b = socket_pair()
    hosted = host.serve(b)
    with a:
        a.send(b"\0\0\0\0\1\0\0\0" + protocol.encode(protocol.ListDevices()))
        assert hosted.connection.wait_ended(PATIENCE)
        assert "before hello" in hosted.connection.ending.reason
    host.close()


def test_bad_numbers_are_error_replies_and_the_connection_goes_on() -> None:
    with prepared() as (model, _, _, client):
        burst: Any = configure(model, Callback())
        call = client.connection.call
        request = protocol.WireRequest((), (), ())
        for message in (
            protocol.Execute(999, request, RunOptions()),
            protocol.Execute(burst.number, request, RunOptions()),
            protocol.FreeMemory(model.number, 0),
            protocol.FreeMemory(999, 0),
        ):
            with pytest.raises(InvalidArgument, match="on this connection"):
                call(message)
        call(protocol.Release(999))
        burst.close()


def test_pools_of_which_one_is_malformed_are_closed_at_once() -> None:
    good, bad = protocol.WireMemory("ashmem", 64, 3, 0), protocol.WireMemory("no-such-kind", 64, 3, 0)
    with Memory.ashmem(64) as memory:
        before = open_fds()
        fds = FdBundle.duplicate(memory.fds * 2)
        with pytest.raises(InvalidArgument) as caught, fds:
            memories_from_wire((good, bad), fds)
        assert caught.traceback  # which would keep them alive
        until(lambda: open_fds() == before)


def test_a_hostile_queue_is_an_error_reply() -> None:
    from nnburst.devices.registry import create_device

    with in_process([create_device("nnburst-noop")]) as (client, host):
        model = client.devices[0].prepare_model(tiny_model())
        a, b = queues()
        with a, b:
            good = b.descriptor
            for grantors in ((), good.grantors[:2], [(0, 9, 0, 8)] * 4, [(0, 0, 2**32 - 1, 2**64 - 1)] * 4):
                bad = MQDescriptor(grantors, [os.dup(good.fds[0])], 24, 1)
                with bad, pytest.raises((InvalidArgument, GeneralFailure, ResourceExhausted)):
                    model.configure_execution_burst(Callback(), bad, good)
        assert charged(host)["bursts"] == 0


def test_forked_children_get_a_bad_state_and_disturb_nobody() -> None:
    with prepared() as (model, device, _, client), Memory.ashmem(64) as pool:
        burst = configure(model, Callback())

        def uses() -> None:
            nonlocal burst, model
            for use in (
                lambda: client.devices[0].prepare_model(tiny_model()),
                lambda: model.execute_synchronously(a_request(pool)),
                lambda: burst.free_memory(1),
                lambda: client.link_to_death(lambda: None),
            ):
                with pytest.raises(BadState, match="fork"):
                    use()
            burst.close()
            burst = model = None
            gc.collect()
            client.close()

        in_forked_child(uses)
        assert model.execute_synchronously(a_request(pool))[0] is ErrorStatus.NONE
        assert device.contexts[0].log == []
        burst.free_memory(1)


def test_client_hears_that_the_service_has_ended_its_burst(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = Held(-errno.ENOBUFS)
    monkeypatch.setattr("nnburst.burst.server.server.serve", serve)
    with in_process([create_device("nnburst-noop")]) as (client, _), Memory.ashmem(4096) as pool:
        prepared = client.devices[0].prepare_model(tiny_model())
        with ThreadPoolExecutor() as threads, ExecutionBurstController.create(prepared) as controller:
            answer = threads.submit(controller.compute, a_request(pool))
            until(lambda: controller.stats.sent == 1)
            serve.go_on.set()
            with pytest.raises(DeadObject, match="the client takes no results"):
                answer.result(PATIENCE)
        assert client.alive


@pytest.mark.parametrize("through", ["execute", "burst"])
def test_pools_of_requests_that_fail_are_unmapped_at_once(monkeypatch: pytest.MonkeyPatch, through: str) -> None:
    """And not when the collector comes: a client that fails again and again would fill the address space."""
    mapped: list[bool] = []

    def bind(model: NoopPreparedModel, request: Request, options: RunOptions) -> Kernel:
        arrays = [pool.array(np.uint8, (16,)) for pool in request.pools]

        def run() -> None:
            mapped.append(Snapshot().mappings != before.mappings)
            raise GeneralFailure(f"{len(arrays)} arrays are of no use")

        return run

    def fail(prepared: PreparedModel) -> None:
        with Memory.ashmem(4096) as pool:
            source, target = (RequestArgument(location=DataLocation(0, offset, 16)) for offset in (0, 16))
            request = Request((source,), (target,), (pool,))
            if through == "execute":
                result = prepared.execute_synchronously(request)
                assert result[0] is ErrorStatus.GENERAL_FAILURE, result.reason
            else:
                with ExecutionBurstController.create(prepared) as controller:
                    assert controller.compute(request)[0] is ErrorStatus.GENERAL_FAILURE

    monkeypatch.setattr(NoopPreparedModel, "bind", bind)
    with without_collector(), in_process([create_device("nnburst-noop")]) as (client, _):
        prepared = client.devices[0].prepare_model(tiny_model())
        before = Snapshot()
        for _ in range(3):
            fail(prepared)
        until(lambda: Snapshot().mappings == before.mappings, "a pool stays mapped")
        assert mapped == [True] * 3
        prepared.close()


# ---- the log -------------------------------------------------------------------------------------------------------


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(limited_log, "time", clock)
    return clock


@pytest.fixture
def written(clock: Clock) -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def log(written: io.StringIO) -> Iterator[logging.Logger]:
    log = logging.getLogger("nnburst.test of the log")
    handler = LimitedHandler()
    handler.setStream(written)
    log.addHandler(handler)
    log.propagate = False
    yield log
    log.removeHandler(handler)
    handler.close()


def hostile(log: logging.Logger, times: int) -> None:
    for number in range(times):
        log.warning("malformed message %d", number)


def test_lines_of_one_place_are_written_a_few_times_and_counted_then(
    log: logging.Logger, written: io.StringIO, clock: Clock
) -> None:
    hostile(log, 1000)
    assert len(written.getvalue().splitlines()) == LINES
    log.warning("another thing")
    assert written.getvalue().splitlines()[LINES:] == ["another thing"]
    clock.now += PERIOD
    hostile(log, 1)
    *_, told, again = written.getvalue().splitlines()
    assert told.startswith(f"{1000 - LINES} lines from test_service_host.py:")
    assert again == "malformed message 0"


def test_what_was_left_out_is_told_at_the_end(log: logging.Logger, written: io.StringIO) -> None:
    hostile(log, LINES + 3)
    log.handlers[0].close()
    assert written.getvalue().splitlines()[-1].startswith("3 lines from")


def test_long_line_is_cut(log: logging.Logger, written: io.StringIO) -> None:
    log.warning("%s", "x" * 1_000_000)
    (line,) = written.getvalue().splitlines()
    assert line == "x" * LONGEST + f"… ({1_000_000 - LONGEST} characters more)"


def test_json_line_has_the_record_and_its_fields(log: logging.Logger, written: io.StringIO) -> None:
    log.handlers[0].setFormatter(JsonLines())
    try:
        raise ValueError("odd")
    except ValueError:
        log.exception("line\n%s", "x" * 1_000_000, extra={"fields": {"request_id": "r-1"}})
    (line,) = map(json.loads, written.getvalue().splitlines())
    assert line["message"] == "line\n" + "x" * (LONGEST - 5)
    assert line["traceback"].endswith("ValueError: odd")
    assert (line["level"], line["logger"], line["request_id"]) == ("error", log.name, "r-1")


def test_log_of_a_service_is_in_the_log_of_its_program(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("program.models")
    with caplog.at_level(logging.INFO, logger.name), nnburst.launch(log_level="info", log=logger) as service:
        until(lambda: caplog.records, "nothing is logged")
        said = caplog.records[0]
        assert (said.name, said.levelname, said.getMessage()) == (logger.name, "INFO", f"sandbox {service.sandbox}")
