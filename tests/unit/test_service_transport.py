"""Connections: datagrams, descriptors, calls in both directions, the end."""

from __future__ import annotations

import array
import errno
import fcntl
import functools
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nnburst._core.fds import FdSet
from nnburst.errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    OutputShape,
    ResourceExhausted,
    error_for,
)
from nnburst.service.connection.transport import Connection
from nnburst.service.wire import packets, protocol
from nnburst.service.wire.packets import DescriptorsLost, EndOfStream, FdBundle, Kind, receive
from nnburst.service.wire.protocol import Malformed, Side
from support.connections import Answers, connected, raw_peer, send, socket_pair
from support.processes import open_fds
from support.waiting import PATIENCE, Background, Held, until

HELLO = protocol.Hello((1, 0), 1)
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def raw_send(sock: socket.socket, data: bytes, fds: list[int] = []) -> None:  # noqa: B006 - never changed
    """Send a datagram, and close what went with it."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], ancillary)
    for fd in fds:
        os.close(fd)


def header(kind: int = 0, flags: int = 0, n_fds: int = 0, call_id: int = 1) -> bytes:
    return struct.pack("<BBHI", kind, flags, n_fds, call_id)


def next_datagram(sock: socket.socket) -> bytes:
    """Empty at the end, which is a reset if the peer left something unread."""
    try:
        return sock.recv(70000)
    except ConnectionResetError:
        return b""


def null_fds(count: int) -> list[int]:
    return [os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC) for _ in range(count)]


# -- datagrams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 65535, 65536, 65537, 1 << 20, protocol.MAX_BODY])
def test_bodies_of_any_length_arrive(length: int) -> None:
    a, b = socket_pair()
    with a, b:
        body = os.urandom(min(length, 1 << 20)) * max(1, length >> 20)
        send(a, Kind.REPLY, 7, body, (), None)
        packet = receive(b)
        assert (packet.kind, packet.call_id, packet.body == body, len(packet.fds)) == (Kind.REPLY, 7, True, 0)


def test_a_body_above_64_kib_travels_in_a_sealed_memfd() -> None:
    a, b = socket_pair()
    with a, b:
        for length, spilled in ((65536, 0), (65537, 1)):
            send(a, Kind.REQUEST, 1, bytes(length), (), None)
            data, ancillary, _, _ = b.recvmsg(70000, 4096, socket.MSG_CMSG_CLOEXEC)
            assert data[1] == spilled
            assert len(data) == (16 if spilled else 8 + length)
            for _, _, raw in ancillary:
                (fd,) = struct.unpack("i", raw)
                assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
                os.close(fd)
            assert len(ancillary) == spilled


def test_a_body_beyond_the_limit_is_refused_by_the_sender() -> None:
    a, b = socket_pair()
    with a, b, pytest.raises(ResourceExhausted):
        send(a, Kind.REQUEST, 1, bytes(protocol.MAX_BODY + 1), (), None)


@pytest.mark.parametrize(("count", "length"), [(0, 8), (1, 8), (253, 8), (252, 70000)])
def test_descriptors_arrive_in_order_and_close_on_exec(count: int, length: int) -> None:
    a, b = socket_pair()
    fds = null_fds(count)
    with a, b:
        send(a, Kind.REQUEST, 1, bytes(length), fds, None)
        with receive(b).fds as bundle:
            assert len(bundle) == count
            taken = bundle.take(count)
            assert all(not os.get_inheritable(fd) for fd in taken)
            assert [os.fstat(fd).st_ino for fd in taken] == [os.fstat(fd).st_ino for fd in fds]
    for fd in (*fds, *taken):
        os.close(fd)


@pytest.mark.parametrize(("count", "length"), [(254, 8), (253, 70000)])
def test_more_descriptors_than_a_message_can_carry_are_refused(count: int, length: int) -> None:
    a, b = socket_pair()
    fds = null_fds(1)
    with a, b:
        with pytest.raises(InvalidArgument, match="descriptors"):
            send(a, Kind.REQUEST, 1, bytes(length), fds * count, None)
        with pytest.raises(BlockingIOError):
            receive(b)
    os.close(fds[0])


def test_sending_a_closed_descriptor_is_an_error_of_the_caller() -> None:
    a, b = socket_pair()
    with a, b:
        fd = null_fds(1)[0]
        os.close(fd)
        with pytest.raises(InvalidArgument, match="not open"):
            send(a, Kind.REQUEST, 1, b"", (fd,), None)


def test_a_peer_that_does_not_read_cannot_block_the_sender() -> None:
    with raw_peer(Side.CLIENT) as (end, _):
        end._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(100):
            with pytest.raises(MissedDeadline) as caught:
                end.call(protocol.ImportModel(0, "x" * 256), timeout=0.01)
            if "does not read" in str(caught.value):
                break
        assert "does not read" in str(caught.value)
        assert end.alive


def _memfd(data: bytes, seals: int) -> int:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


BAD_DATAGRAMS = {
    "short header": lambda: (b"\0" * 7, []),
    "unknown kind": lambda: (header(kind=3), []),
    "unknown flags": lambda: (header(flags=2), []),
    "more descriptors announced": lambda: (header(n_fds=2), null_fds(1)),
    "fewer descriptors announced": lambda: (header(), null_fds(1)),
    "spilled without memfd": lambda: (header(flags=1) + struct.pack("<Q", 5), []),
    "spilled without length": lambda: (header(flags=1), [_memfd(b"12345", SEALS)]),
    "spilled, other length": lambda: (header(flags=1) + struct.pack("<Q", 6), [_memfd(b"12345", SEALS)]),
    "spilled, longer than announced": lambda: (header(flags=1) + struct.pack("<Q", 4), [_memfd(b"12345", SEALS)]),
    "spilled, too long": lambda: (header(flags=1) + struct.pack("<Q", 2**40), [_memfd(b"12345", SEALS)]),
    "spilled, can change": lambda: (
        header(flags=1) + struct.pack("<Q", 5),
        [_memfd(b"12345", SEALS & ~fcntl.F_SEAL_WRITE)],
    ),
    "spilled into another kind of file": lambda: (header(flags=1) + struct.pack("<Q", 0), null_fds(1)),
    "longer than a datagram may be": lambda: (header() + bytes(65537), []),
}


@pytest.mark.parametrize("name", BAD_DATAGRAMS)
def test_bad_datagrams_are_malformed_and_their_descriptors_closed(name: str) -> None:
    a, b = socket_pair()
    with a, b:
        raw_send(a, *BAD_DATAGRAMS[name]())
        before = open_fds()
        with pytest.raises(Malformed):
            receive(b)
        until(lambda: open_fds() == before)


def test_descriptors_that_this_process_may_not_have_are_not_the_peers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    # As the kernel does it for a receiver whose descriptor table is full.
    monkeypatch.setattr(packets, "_ANCILLARY", socket.CMSG_SPACE(4))
    a, b = socket_pair()
    fds = null_fds(5)
    with a, b:
        send(a, Kind.REQUEST, 1, b"", fds, None)
        before = open_fds()
        with pytest.raises(DescriptorsLost) as lost:
            receive(b)
        assert (lost.value.kind, lost.value.call_id) == (Kind.REQUEST, 1)
        until(lambda: open_fds() == before)
    for fd in fds:
        os.close(fd)


def test_a_closed_peer_is_the_end_of_the_stream() -> None:
    a, b = socket_pair()
    with b:
        a.close()
        with pytest.raises(EndOfStream):
            receive(b)
        with pytest.raises(ConnectionError):
            send(b, Kind.REQUEST, 1, b"", (), None)


def test_a_bundle_closes_what_nobody_took() -> None:
    fds = null_fds(3)
    bundle = FdBundle(fds)
    assert bundle.take(1) == (fds[0],)
    with pytest.raises(InvalidArgument):
        bundle.take(3)
    bundle.close()
    bundle.close()
    assert len(bundle) == 0
    assert fds[0] in open_fds()
    assert not {fds[1], fds[2]} & open_fds()
    os.close(fds[0])


# -- calls -------------------------------------------------------------------------------------------------------------


def test_both_sides_can_call() -> None:
    service = Answers(on_hello=lambda m, fds: protocol.HelloReply(m.version, 99))
    client = Answers(on_get_memories=lambda m, fds: protocol.GetMemoriesReply(len(m.slots)))
    with connected(client, service) as (a, b):
        assert a.call(HELLO)[0].pid == 99
        assert b.call(protocol.GetMemories(1, (4, 5)))[0].status == 2
        assert service.seen == [HELLO]


@pytest.mark.parametrize("status", [s for s in ErrorStatus if 1 <= s <= 8])
def test_an_error_comes_back_as_its_exception(status: ErrorStatus) -> None:
    shapes = (OutputShape((1, 2), False), OutputShape((3,)))

    def fail(message: object, fds: FdBundle) -> None:
        raise error_for(status, "operand 7 is wrong", shapes)

    with connected(service=Answers(on_hello=fail)) as (a, _):
        with pytest.raises(type(error_for(status, "")), match="operand 7") as caught:
            a.call(HELLO)
        assert caught.value.status is status
        if isinstance(caught.value, OutputInsufficientSize):
            assert caught.value.output_shapes == shapes


@pytest.mark.parametrize("error", [ZeroDivisionError("x"), MemoryError(), DeadObject("other"), BadState("y" * 9999)])
def test_any_exception_of_a_handler_is_a_general_failure(error: Exception) -> None:
    def fail(message: object, fds: FdBundle) -> None:
        raise error

    with connected(service=Answers(on_hello=fail)) as (a, _):
        with pytest.raises(GeneralFailure):
            a.call(HELLO)
        a.call(protocol.Goodbye())


def test_descriptors_of_requests_and_replies_belong_to_who_takes_them() -> None:
    pool = protocol.WireMemory("ashmem", 1, 3, 0)
    taken: list[int] = []

    def keep_one(message: object, fds: FdBundle) -> protocol.ExecuteReply:
        taken.extend(fds.take(1))
        return protocol.ExecuteReply(0, (), protocol.Timing())

    def give(message: object, fds: FdBundle) -> tuple[protocol.GetMemoriesReply, FdBundle]:
        return protocol.GetMemoriesReply(0, (pool, pool)), FdBundle(null_fds(2))

    mine = null_fds(2)
    with connected(Answers(on_get_memories=give), Answers(on_execute=keep_one)) as (a, b):
        request = protocol.WireRequest((), (), (pool, pool))
        a.call(protocol.Execute(1, request, protocol.RunOptions()), mine)
        _, fds = b.call(protocol.GetMemories(1, (0,)))
        with fds:
            assert len(fds) == 2
    for fd in (*mine, *taken):
        os.close(fd)


def test_a_long_call_delays_no_other() -> None:
    slow = Held(protocol.Done())
    client = Answers(on_get_memories=lambda m, fds: protocol.GetMemoriesReply(4))
    with connected(client, Answers(on_release=slow)) as (a, b):
        long = Background(lambda: a.call(protocol.Release(1))[0])
        assert slow.entered.wait(PATIENCE)
        assert b.call(protocol.GetMemories(1, (0,)), timeout=PATIENCE)[0].status == 4
        a.call(protocol.Goodbye(), timeout=PATIENCE)
        slow.go_on.set()
        assert long.result() == protocol.Done()


def test_a_call_that_is_not_answered_in_time_gives_up_and_the_late_reply_is_handed_on() -> None:
    go_on, late = threading.Event(), threading.Event()
    seen: list[object] = []

    def slow(message: object, fds: FdBundle) -> protocol.HelloReply:
        assert go_on.wait(PATIENCE)
        return protocol.HelloReply((1, 0), 3)

    def on_late(reply: object) -> None:
        seen.append(reply)
        late.set()

    service = Answers(on_hello=slow)
    with connected(service=service) as (a, _):
        while not service.seen:  # it may give up before the request is sent
            with pytest.raises(MissedDeadline):
                a.call(HELLO, timeout=0.02, on_late=on_late)
        go_on.set()
        assert late.wait(PATIENCE)
        assert seen[0] == protocol.HelloReply((1, 0), 3)
        a.call(protocol.Goodbye(), timeout=PATIENCE)


def test_a_message_that_cannot_be_encoded_is_an_invalid_argument() -> None:
    with connected() as (a, _):
        for bad in (object(), 2**70):
            with pytest.raises(InvalidArgument):
                a.call(protocol.Release(bad))  # type: ignore[arg-type]
        a.call(protocol.Goodbye())


# -- malformed messages and the end ------------------------------------------------------------------------------------

BAD_MESSAGES = {
    "garbage": lambda: (header() + b"\xc1", []),
    "no message": lambda: (header(), []),
    "reply to nothing": lambda: (header(kind=1, call_id=77) + protocol.encode(protocol.Done()), []),
    "error to nothing": lambda: (header(kind=2, call_id=77) + protocol.encode(protocol.ErrorReply(4, "")), []),
    "call to the other side": lambda: (header() + protocol.encode(protocol.GetMemories(1, (1,))), []),
    "descriptors that the message does not name": lambda: (
        header(n_fds=1) + protocol.encode(protocol.Goodbye()),
        null_fds(1),
    ),
    "a bad datagram": BAD_DATAGRAMS["spilled, can change"],
}


@pytest.mark.parametrize("name", BAD_MESSAGES)
def test_a_malformed_message_closes_its_connection_and_nothing_else(name: str) -> None:
    with connected() as (other, _), raw_peer(Side.SERVICE) as (end, sock):
        raw_send(sock, *BAD_MESSAGES[name]())
        assert end.wait_ended(PATIENCE)
        assert end.ending.reason.startswith("malformed")
        assert protocol.encode(protocol.EndNotice(end.ending.reason)) in next_datagram(sock)
        assert next_datagram(sock) == b""
        other.call(protocol.Goodbye())


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_any_datagram_leaves_the_connection_usable_or_closed(body: bytes) -> None:
    with raw_peer(Side.SERVICE) as (end, sock):
        sock.settimeout(PATIENCE)
        raw_send(sock, header() + body)
        try:
            raw_send(sock, header(call_id=9) + protocol.encode(protocol.Goodbye()))
        except ConnectionError:
            pass
        while reply := next_datagram(sock):
            if struct.unpack_from("<BBHI", reply)[3] == 9:
                break
        else:
            assert end.wait_ended(PATIENCE)


def test_REQ_MODEL_076_second_answer_to_a_call_closes_the_connection() -> None:
    with raw_peer(Side.CLIENT) as (end, sock):
        call = Background(lambda: end.call(protocol.Goodbye(), timeout=PATIENCE)[0])
        call_id = struct.unpack_from("<BBHI", sock.recv(1000))[3]
        reply = header(kind=1, call_id=call_id) + protocol.encode(protocol.Done())
        raw_send(sock, reply)
        assert call.result() == protocol.Done()
        raw_send(sock, reply)
        assert end.wait_ended(PATIENCE)
        assert end.ending.reason.startswith("malformed")


_POOL = protocol.WireMemory("ashmem", 1, 3, 0)
WRONG_REPLIES = {
    "another type": lambda n: (header(1, 0, 0, n) + protocol.encode(protocol.Done()), 0),
    "fewer descriptors": lambda n: (
        header(1, 0, 1, n) + protocol.encode(protocol.GetMemoriesReply(0, (_POOL, _POOL))),
        1,
    ),
    "surplus descriptors": lambda n: (header(1, 0, 2, n) + protocol.encode(protocol.GetMemoriesReply(0, (_POOL,))), 2),
    "an error with descriptors": lambda n: (header(2, 0, 1, n) + protocol.encode(protocol.ErrorReply(4, "no")), 1),
    "an error that is none": lambda n: (header(2, 0, 0, n) + protocol.encode(protocol.GetMemoriesReply(0)), 0),
    "a number that was not given": lambda n: (
        header(1, 0, 0, n + 1) + protocol.encode(protocol.GetMemoriesReply(0)),
        0,
    ),
    "cut off": lambda n: (header(1, 0, 0, n) + protocol.encode(protocol.GetMemoriesReply(0))[:-1], 0),
    "with more behind it": lambda n: (header(1, 0, 0, n) + protocol.encode(protocol.GetMemoriesReply(0)) + b"\0", 0),
}


@pytest.mark.parametrize("what", WRONG_REPLIES)
def test_wrong_reply_ends_the_connection_and_its_descriptors_are_closed(what: str) -> None:
    with raw_peer(Side.SERVICE) as (end, sock):
        before = open_fds()

        def answer() -> None:
            data, n_fds = WRONG_REPLIES[what](struct.unpack_from("<BBHI", sock.recv(1000))[3])
            raw_send(sock, data, null_fds(n_fds))

        answering = Background(answer)
        with pytest.raises(DeadObject, match="malformed"):
            end.call(protocol.GetMemories(1, (1,)), timeout=PATIENCE)
        assert answering.result() is None
        assert end.wait_ended(PATIENCE)
        until(lambda: open_fds() <= before)


def test_a_peer_that_does_not_read_replies_is_dropped() -> None:
    answer = Answers(on_hello=lambda m, fds: protocol.HelloReply((1, 0), 1, "x" * 256))
    with raw_peer(Side.SERVICE, answer, send_timeout=0.05) as (end, sock):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(PATIENCE)
        request = header() + protocol.encode(HELLO)
        try:
            while end.alive:
                raw_send(sock, request)
        except ConnectionError:
            pass
        assert end.wait_ended(PATIENCE)
        assert "read" in end.ending.reason or "too many calls" in end.ending.reason


# -- answers that are not received -------------------------------------------------------------------------------------


class LongAnswers(Answers):
    """Serves lists of names that need a descriptor, and charges the answers; it refuses those after `most`."""

    def __init__(self, most: int = 100) -> None:
        super().__init__(on_list_models=lambda message, fds: protocol.ListModelsReply(("x" * 4096,) * 20))
        self.most = most
        self.charged: list[tuple[int, int]] = []
        self.released: list[int] = []

    def charge_answer(self, nbytes: int, n_fds: int) -> Callable[[], None]:
        if len(self.charged) >= self.most:
            raise ResourceExhausted("too much was not received")
        self.charged.append((nbytes, n_fds))
        return functools.partial(self.released.append, len(self.charged))


THREADS = 3
LIST = protocol.encode(protocol.ListModels())


def in_flight(sock: socket.socket) -> int:
    """Return how many descriptors wait in a socket."""
    with open(f"/proc/self/fdinfo/{sock.fileno()}") as info:
        return int(next(line for line in info if line.startswith("scm_fds:")).split()[1])


def take(sock: socket.socket) -> int:
    """Receive a message, and return which call it answers."""
    packet = receive(sock)
    packet.fds.close()
    return packet.call_id


def test_answer_with_a_descriptor_is_sent_when_the_one_before_was_received() -> None:
    service = LongAnswers()
    with raw_peer(Side.SERVICE, service, workers=THREADS) as (end, sock):
        for number in range(1, 11):
            raw_send(sock, header(call_id=number) + LIST)
        until(lambda: len(service.charged) == THREADS)
        found = []
        for received in range(10):
            until(lambda: select.select([sock], [], [], 0)[0])
            assert in_flight(sock) == 1
            assert len(service.released) == received
            assert len(service.seen) <= received + THREADS, "calls are served whose answers have no room"
            found.append(take(sock))
            until(lambda n=received: len(service.released) == n + 1, "what was received is charged")  # type: ignore[misc]
        assert sorted(found) == list(range(1, 11))
        assert all(nbytes > 80_000 and n_fds == 1 for nbytes, n_fds in service.charged)
        assert end.alive


def test_answer_was_received_although_later_ones_were_not() -> None:
    def in_socket() -> int:
        return packets.unread_bytes(end._sock)

    service = LongAnswers()
    with raw_peer(Side.SERVICE, service) as (end, sock):
        raw_send(sock, header() + LIST)
        until(lambda: select.select([sock], [], [], 0)[0])
        alone = in_socket()
        small = [header() + protocol.encode(protocol.Goodbye())] * 10
        for request in small:
            raw_send(sock, request)
        until(lambda: in_socket() >= 11 * alone)
        assert not service.released
        take(sock)
        left = in_socket()
        while not service.released:
            raw_send(sock, small[0])
            until(lambda: in_socket() > left)
            take(sock)
        assert end.alive


def test_peer_that_does_not_receive_an_answer_with_a_descriptor_is_dropped_and_the_log_says_who(
    caplog: pytest.LogCaptureFixture,
) -> None:
    service = LongAnswers()
    with raw_peer(Side.SERVICE, service, send_timeout=0.05, peer="process 7 of user 8") as (end, sock):
        for number in range(1, 11):
            raw_send(sock, header(call_id=number) + LIST)
        assert end.wait_ended(PATIENCE)
        assert end.ending.reason == "the peer does not read its socket"
        assert "process 7 of user 8 is disconnected: the peer does not read its socket" in caplog.text
        assert len(service.released) == len(service.charged) >= 1
        assert in_flight(sock) == 1


@pytest.mark.parametrize("how", ["reads", "closes"])
def test_peer_that_is_dropped_counts_until_it_has_read_or_closed(how: str) -> None:
    service, ends = LongAnswers(), list[Connection]()
    with raw_peer(Side.SERVICE, service, on_end=lambda: ends[0].linger(), send_timeout=0.05) as (end, sock):
        ends.append(end)
        raw_send(sock, header() + LIST)
        until(lambda: end.ending.reason)
        assert not end.wait_ended(0)
        assert not service.released
        while how == "reads" and sock.recv(1 << 16):
            pass
        if how == "closes":
            sock.close()
        assert end.wait_ended(PATIENCE)
        assert len(service.released) == 1


def test_answer_that_may_not_be_charged_is_refused() -> None:
    with raw_peer(Side.SERVICE, LongAnswers(most=0)) as (end, sock):
        sock.settimeout(PATIENCE)
        raw_send(sock, header() + LIST)
        until(lambda: select.select([sock], [], [], 0)[0])
        packet = receive(sock)
        assert (packet.kind, len(packet.fds)) == (Kind.ERROR, 0)
        assert "too much was not received" in protocol.decode_error(packet.body).message
        assert end.alive


def refusing_descriptors(monkeypatch: pytest.MonkeyPatch, times: float) -> list[int]:
    """Have the kernel refuse so often to take descriptors; returns a list that grows with each refusal."""
    send, refused = socket.socket.sendmsg, []

    def sendmsg(sock: socket.socket, data: Any, ancillary: Any = (), *rest: Any) -> int:
        if ancillary and len(refused) < times:
            refused.append(len(refused))
            raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
        return send(sock, data, ancillary, *rest)

    monkeypatch.setattr(socket.socket, "sendmsg", sendmsg)
    return refused


def test_descriptors_that_the_kernel_refuses_are_sent_again_until_it_takes_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    service = LongAnswers()
    with connected(service=service) as (client, _):
        refused = refusing_descriptors(monkeypatch, 3)
        reply, _ = client.call(protocol.ListModels(), timeout=PATIENCE)
        assert len(reply.names) == 20
        assert len(refused) == 3
        assert caplog.text.count("descriptors that were not received") == 1
        until(lambda: service.released)


def test_descriptors_that_the_kernel_refuses_for_too_long_are_told_and_the_connection_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = LongAnswers()
    with connected(service=service, send_timeout=0.2) as (client, _):
        refused = refusing_descriptors(monkeypatch, math.inf)
        with pytest.raises(ResourceExhausted, match="descriptors that were not received, more than RLIMIT_NOFILE"):
            client.call(protocol.ListModels(), timeout=PATIENCE)
        assert len(refused) > 1
        until(lambda: len(service.released) == 1)
        client.call(protocol.Goodbye(), timeout=PATIENCE)
        failures: list[NNBurstError] = []
        client.call_without_answer(protocol.TakeClient(1, False), [0], failures.append)
        until(lambda: failures, "nobody learns that a request was not sent")
        assert isinstance(failures[0], ResourceExhausted)


@pytest.mark.parametrize("how", ["peer closes", "own close"])
def test_REQ_MODEL_078_the_end_fails_every_pending_call(how: str) -> None:
    with raw_peer(Side.CLIENT) as (end, sock):
        calls = [Background(lambda: end.call(protocol.Goodbye())) for _ in range(5)]
        for _ in calls:
            sock.recv(1000)
        if how == "peer closes":
            sock.close()
        else:
            end.close()
        expected = DeadObject if how == "peer closes" else BadState
        assert [type(call.result()) for call in calls] == [expected] * 5
        with pytest.raises(expected):
            end.call(protocol.Goodbye())


def test_each_death_listener_is_called_exactly_once() -> None:
    with raw_peer(Side.CLIENT) as (end, sock):
        calls: list[str] = []
        end.link_to_death(lambda: calls.append("early"))
        end.link_to_death(lambda: 1 // 0)  # one that fails disturbs nobody
        end.link_to_death(lambda: calls.append("unlinked"))()
        unlink = end.link_to_death(lambda: calls.append("second"))
        sock.close()
        assert end.wait_ended(PATIENCE)
        assert sorted(calls) == ["early", "second"]
        end.link_to_death(lambda: calls.append("late"))
        assert calls[-1] == "late"
        unlink()
        end.close()
        assert sorted(calls) == ["early", "late", "second"]


def _count(counts: list[int], i: int) -> None:
    counts[i] += 1


def test_registering_while_the_peer_dies_calls_every_listener_once() -> None:
    for _ in range(20):
        with raw_peer(Side.CLIENT) as (end, sock):
            counts = [0] * 200
            for i in range(200):
                if i == 100:
                    closing = Background(sock.close)
                end.link_to_death(functools.partial(_count, counts, i))
            assert closing.result() is None
            assert end.wait_ended(PATIENCE)
            assert counts == [1] * 200


def test_a_listener_may_close_the_connection() -> None:
    with raw_peer(Side.CLIENT) as (end, sock):
        end.link_to_death(end.close)
        sock.close()
        assert end.wait_ended(PATIENCE)


def test_a_dead_process_ends_the_connection_although_its_socket_is_still_open() -> None:
    pid = os.fork()
    if pid == 0:
        select.select([], [], [])
    pidfd = FdSet([os.pidfd_open(pid)])
    with raw_peer(Side.CLIENT, peer_pidfd=pidfd) as (end, sock):
        send(sock, Kind.REQUEST, 0, protocol.encode(protocol.GetMemories(1, (1,))), (), None)
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        assert end.wait_ended(PATIENCE)
        assert end.ending.reason.startswith("the other process")
        with pytest.raises(DeadObject):
            end.call(protocol.Goodbye())


def test_closing_ends_the_peer_s_connection_although_a_copy_of_the_socket_is_open() -> None:
    with connected() as (a, b), a._sock.dup():
        a.close()
        assert b.wait_ended(PATIENCE)


def test_no_thread_is_left() -> None:
    before = set(threading.enumerate())
    with connected() as (a, _):
        a.call(protocol.Goodbye())
        assert set(threading.enumerate()) - before
    until(lambda: set(threading.enumerate()) <= before)
