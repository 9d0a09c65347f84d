"""Calls under way: how many there may be, Ctrl-C in each phase, handlers that leave, threads that are not there."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

import nnburst
from nnburst.errors import BadState, DeadObject, GeneralFailure, InvalidArgument, MissedDeadline, ResourceExhausted
from nnburst.model import RunOptions
from nnburst.model.types import DataLocation, RequestArgument
from nnburst.service.connection import mailbox, outbox, pending, serving
from nnburst.service.host.host import ServiceHost
from nnburst.service.host.object_table import ObjectTable
from nnburst.service.process.launch import start_child
from nnburst.service.wire import protocol
from nnburst.service.wire.packets import FdBundle, Kind, receive
from nnburst.service.wire.protocol import Side
from nnburst.testing import assert_nothing_left
from support.connections import Answers, connected, raw_peer, send
from support.doubles import refuse_threads
from support.models import compiled, ready, relu
from support.processes import open_fds
from support.users import as_user
from support.waiting import PATIENCE, Background, Held, handling, until

GOODBYE = protocol.encode(protocol.Goodbye())
LONG = protocol.Execute(
    1, protocol.WireRequest((RequestArgument(False, DataLocation(0, 0, 0), (1,) * 64),) * 1000, (), ()), RunOptions()
)
EXECUTED = protocol.ExecuteReply(0, (), protocol.Timing())


def test_too_many_calls_at_once_close_the_connection() -> None:
    slow = Held(protocol.Done())
    with raw_peer(Side.SERVICE, Answers(on_goodbye=slow)) as (end, sock):
        try:
            for number in range(10_000):
                send(sock, Kind.REQUEST, number + 1, GOODBYE, (), None)
        except ConnectionError:
            pass
        slow.go_on.set()
        assert end.wait_ended(PATIENCE)
        assert "too many calls" in end.ending.reason


def test_one_side_never_has_more_calls_under_way_than_the_other_takes() -> None:
    with raw_peer(Side.CLIENT) as (end, sock):
        calls = list[Background]()
        for _ in range(pending.MAX_PENDING):
            calls.append(Background(lambda: end.call(protocol.Goodbye(), timeout=PATIENCE)))
            sock.recv(1000)
        with pytest.raises(MissedDeadline, match="under way"):
            end.call(protocol.Goodbye(), timeout=0.01)
        end.hang_up()
        assert [type(call.result()) for call in calls] == [BadState] * pending.MAX_PENDING


def test_second_long_call_while_one_is_served_closes_the_connection() -> None:
    slow = Held(EXECUTED)
    with raw_peer(Side.SERVICE, Answers(on_execute=slow)) as (end, sock):
        for number in (1, 2):
            send(sock, Kind.REQUEST, number, protocol.encode(LONG), (), None)
        assert end.wait_ended(PATIENCE)
        slow.go_on.set()
        assert "two long calls" in end.ending.reason


def test_threads_with_long_calls_take_turns() -> None:
    """Otherwise the other side would drop the connection; short calls pass by."""
    at_once, most = 0, 0
    lock = threading.Lock()
    short_done = threading.Event()

    def serve(message: object, fds: FdBundle) -> protocol.ExecuteReply:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        assert short_done.wait(PATIENCE)
        with lock:
            at_once -= 1
        return EXECUTED

    with connected(service=Answers(on_execute=serve)) as (client, service):
        calls = [Background(lambda: client.call(LONG)[0]) for _ in range(4)]
        client.call(protocol.Goodbye(), timeout=PATIENCE)
        short_done.set()
        assert [call.result() for call in calls] == [EXECUTED] * 4
        assert client.alive
        assert service.alive
    assert most == 1


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_handler_that_wants_to_leave_is_answered_and_its_thread_serves_on(error: type[BaseException]) -> None:
    def leave(message: object, fds: FdBundle) -> None:
        raise error("enough")

    with connected(service=Answers(on_goodbye=leave), workers=1) as (client, _):
        for _ in range(3):
            with pytest.raises(GeneralFailure, match=error.__name__):
                client.call(protocol.Goodbye(), timeout=PATIENCE)
        client.call(protocol.FreeMemory(1, 1), timeout=PATIENCE)


def test_error_whose_text_cannot_be_sent_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "nnburst")  # such a text in a captured log ends pytest-xdist

    def fail(message: object, fds: FdBundle) -> None:
        raise ValueError(os.fsdecode(b"caf\xe9.bin"))

    with connected(service=Answers(on_goodbye=fail)) as (client, _):
        with pytest.raises(GeneralFailure, match=r"caf\\udce9\.bin"):
            client.call(protocol.Goodbye(), timeout=PATIENCE)


def test_call_for_which_there_is_no_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with connected() as (client, _):
        with monkeypatch.context() as patched:
            refuse_threads(patched, "worker")
            with pytest.raises(ResourceExhausted, match="thread"):
                client.call(protocol.Goodbye(), timeout=PATIENCE)
        client.call(protocol.Goodbye(), timeout=PATIENCE)


# ---- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before it is posted", "after it was posted", "while it waits", "when answered"])
@pytest.mark.parametrize("is_long", [False, True])
def test_call_that_is_interrupted_leaves_the_connection_usable(
    moment: str, is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reply of a call that was interrupted is expected, and what it names is let go of."""
    late: list[object] = []
    may_answer, came = threading.Event(), threading.Event()
    post, wait = mailbox.Mailbox.post, pending.PendingCall.wait

    def posting(self: mailbox.Mailbox, job: Any) -> None:
        if threading.current_thread() is not threading.main_thread() or interrupts.pop(0) is None:
            return post(self, job)
        if moment == "after it was posted":
            post(self, job)
            assert came.wait(PATIENCE)
        raise KeyboardInterrupt

    def waiting(self: pending.PendingCall, timeout: float | None) -> bool:
        assert came.wait(PATIENCE)
        if moment == "when answered":
            may_answer.set()
            assert wait(self, PATIENCE)
        raise KeyboardInterrupt

    def answer(message: object, fds: FdBundle) -> protocol.Message:
        came.set()
        assert may_answer.wait(PATIENCE)
        return EXECUTED if isinstance(message, protocol.Execute) else protocol.HelloReply((1, 0), 7)

    interrupts: list[type[BaseException] | None] = [KeyboardInterrupt, None]  # the second is how it gives up
    with connected(service=Answers(on_hello=answer, on_execute=answer)) as (client, _):
        with monkeypatch.context() as patched:
            if moment.endswith("posted"):
                patched.setattr(mailbox.Mailbox, "post", posting)
            else:
                patched.setattr(pending.PendingCall, "wait", waiting)
            with pytest.raises(KeyboardInterrupt):
                client.call(LONG if is_long else protocol.Hello((1, 0), 1), on_late=late.append)
        may_answer.set()
        for _ in range(2 * pending.MAX_PENDING):
            client.call(protocol.Goodbye(), timeout=PATIENCE)
        until(lambda: late or moment == "before it is posted")
        assert len(late) == (moment != "before it is posted")
        client.call(LONG, timeout=PATIENCE)


def test_exception_of_a_signal_handler_while_a_call_is_encoded_is_not_the_message_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise TimeoutError("of the handler")

    def encode(message: protocol.Message) -> bytes:
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.01)  # the handler runs now, where there may be one
        return encoded(message)

    encoded = protocol.encode
    monkeypatch.setattr(protocol, "encode", encode)
    with handling(signal.SIGALRM, interrupt), connected() as (client, _):
        with pytest.raises(TimeoutError, match="of the handler"):
            client.call(LONG, timeout=PATIENCE)
        monkeypatch.undo()
        client.call(protocol.Goodbye(), timeout=PATIENCE)


@pytest.fixture
def alarm() -> Iterator[Any]:
    """`alarm(seconds)`: raise KeyboardInterrupt in the main thread then, and each second if that was swallowed."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with handling(signal.SIGALRM, interrupt):
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds, 1.0 if seconds else 0)


@pytest.mark.check
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # swallowed in a callback of weakref
@pytest.mark.parametrize("what", ["run", "session"])
def test_ctrl_c_at_any_moment_leaves_a_service_and_its_sessions_usable(what: str, alarm: Any) -> None:
    rng = np.random.default_rng(1)
    one = {"x": np.ones(64, np.float32)}
    model = relu((64,))
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(model, timeout=30) as session:
        session.run(None, one)
        for _ in range(60 if what == "run" else 25):
            try:
                alarm(0.0005 + rng.random() * (0.005 if what == "run" else 0.04))
                while True:
                    if what == "run":
                        session.run(None, one)
                    else:
                        with service.session(model) as other:
                            other.run(None, one)
            except KeyboardInterrupt:
                pass
            finally:
                alarm(0)
            assert session.run(None, one)[0][0] == 1


# ---- no thread to be had -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["nnburst-client-reader", "nnburst-compute", "nnburst-listener", "nnburst-service-reader"]
)
def test_thread_that_cannot_be_started_leaves_nothing_behind(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def attempt() -> None:
        if name == "nnburst-client-reader":
            start_child(["nnburst-reference"]).close()
        elif name == "nnburst-service-reader":
            host = ServiceHost([nnburst.devices.registry.create_device("nnburst-reference")])
            a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                with b:
                    host.serve(a)
            except ResourceExhausted:
                assert not host.connections
                raise
            finally:
                host.close()
        elif name == "nnburst-listener":
            with nnburst.in_process() as service:
                service.session(relu((64,))).close()
        else:
            with nnburst.in_process() as service, compiled(relu((64,)), service) as compilation:
                execution = ready(compilation, np.ones(64, np.float32), out := np.zeros(64, np.float32), reusable=True)
                try:
                    execution.start_compute().wait()
                finally:
                    monkeypatch.undo()
                    execution.compute()
                    assert out[0] == 1

    attempt()
    with assert_nothing_left():  # what may block is closed by threads
        refuse_threads(monkeypatch, name)
        with pytest.raises(ResourceExhausted, match="thread"):
            attempt()
        monkeypatch.undo()


# ---- what finalisers leave -----------------------------------------------------------------------------------------


def _wait_readable(sock: socket.socket, timeout: float) -> None:
    select.select([sock], [], [], timeout)


def test_what_a_full_socket_keeps_back_goes_out_later_and_nobody_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader asks for room only as long as there is something to send."""
    polls = 0
    poll = select.poll

    class Counting:
        def __init__(self) -> None:
            self.poll_object = poll()

        def register(self, *arguments: Any) -> None:
            self.poll_object.register(*arguments)

        def poll(self, *arguments: Any) -> Any:
            nonlocal polls
            polls += 1
            return self.poll_object.poll(*arguments)

    monkeypatch.setattr(select, "poll", Counting)
    for is_dropped in (False, True):
        with raw_peer(Side.CLIENT) as (end, sock):
            junk = bytes(1000)
            with contextlib.suppress(BlockingIOError):
                while True:
                    end._sock.send(junk)
            end.call_without_answer(protocol.Release(7))
            before = -1
            while before != polls:  # until it waits for room
                before = polls
                time.sleep(0.05)
            if is_dropped:
                end._mailbox.post(end._outbox.clear)
            seen = []
            with contextlib.suppress(BlockingIOError):
                while True:
                    _wait_readable(sock, 0.2 if seen or is_dropped else PATIENCE)
                    data = sock.recv(2000, socket.MSG_DONTWAIT)
                    seen += [data] if data != junk else []
            assert len(seen) == 1 - is_dropped
            before = polls
            time.sleep(0.2)
            assert polls - before < 100, "one that spins polls more often in a moment"


def test_any_number_of_things_may_be_dropped_at_once() -> None:
    """The other side takes so many calls at a time, and no more."""
    count = 3000
    with connected(service=(service := Answers())) as (client, _):
        for number in range(count):
            client.call_without_answer(protocol.Release(number))
        client.call(protocol.Goodbye(), timeout=PATIENCE)
        until(lambda: len(service.seen) > count)
        assert {m.object for m in service.seen if isinstance(m, protocol.Release)} == set(range(count))
        assert client.alive


# ---- limits and the end --------------------------------------------------------------------------------------------


def test_releases_leave_room_for_calls_and_keep_to_the_limit_of_the_other_side() -> None:
    """Beside many calls that wait, and not beyond what the other side takes."""
    with raw_peer(Side.CLIENT) as (end, sock):
        calls = [Background(lambda: end.call(protocol.Goodbye(), timeout=PATIENCE)) for _ in range(100)]
        sock.settimeout(PATIENCE)
        for _ in calls:
            sock.recv(1000)
        for number in range(300):
            end.call_without_answer(protocol.Release(number))
        sock.settimeout(0.1)
        with pytest.raises(TimeoutError):
            sock.recv(1000)
        end.hang_up()
        assert {type(call.result()) for call in calls} == {BadState}


def test_call_is_over_when_its_answer_is_sent_so_that_another_long_one_may_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_now, over = outbox.Outbox.send_now, []
    with connected(service=Answers(on_execute=lambda message, fds: EXECUTED)) as (client, service):

        def noted(self: outbox.Outbox, message: Any) -> bool:
            served = service._serving._served
            served.begin(is_long=True)
            served.end(is_long=True)
            over.append(served.count)
            return send_now(self, message)

        monkeypatch.setattr(outbox.Outbox, "send_now", noted)
        client.call(LONG, timeout=PATIENCE)
    assert over == [0]


def test_answer_that_the_socket_does_not_take_is_left_to_the_owner() -> None:
    """The peer reads only when everything is asked."""
    reply = protocol.FailureReasonReply("x" * 60000)
    body = protocol.encode(protocol.FailureReason(1))
    with raw_peer(Side.SERVICE, Answers(on_failure_reason=lambda message, fds: reply)) as (_, sock):
        for number in range(1, 101):
            send(sock, Kind.REQUEST, number, body, (), time.monotonic() + PATIENCE)
        answered = []
        for _ in range(100):
            assert select.select([sock], [], [], PATIENCE)[0]
            answered.append(receive(sock).call_id)
    assert sorted(answered) == list(range(1, 101))


def test_what_is_served_is_counted_until_it_is_answered() -> None:
    served = serving.ServedCalls()
    for _ in range(3000):
        served.begin()
        served.end()
    for _ in range(2 * pending.MAX_PENDING):
        served.begin()
    with pytest.raises(protocol.Malformed, match="too many"):
        served.begin()
    served = serving.ServedCalls()
    with pytest.raises(protocol.Malformed, match="too many"):
        served.begin(waiting=2 * pending.MAX_PENDING)
    for _ in range(8):
        served.begin(253)
    served.begin(2048 - 8 * 253)
    with pytest.raises(protocol.Malformed, match="too many"):
        served.begin(1)
    served.end(253)
    served.begin(253)
    served.begin(0, is_long=True)
    with pytest.raises(protocol.Malformed, match="two long"):
        served.begin(0, is_long=True)
    served.end(0, is_long=True)
    served.begin(0, is_long=True)


def test_answer_that_comes_as_the_deadline_passes_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = pending.PendingCall.wait

    def late(self: pending.PendingCall, timeout: float | None) -> bool:
        assert wait(self, PATIENCE)
        return False

    with connected() as (client, _):
        monkeypatch.setattr(pending.PendingCall, "wait", late)
        assert client.call(protocol.Goodbye(), timeout=PATIENCE)[0] == protocol.Done()


def test_requests_that_a_busy_peer_does_not_read_do_not_end_the_connection() -> None:
    """Unlike answers: those it has asked for."""
    with raw_peer(Side.CLIENT, send_timeout=0.05) as (end, sock):
        junk = bytes(1000)
        with contextlib.suppress(BlockingIOError):
            while True:
                end._sock.send(junk)
        end.call_without_answer(protocol.Release(7))
        with pytest.raises(MissedDeadline, match="does not read"):
            end.call(protocol.Goodbye(), timeout=0.3)
        assert end.alive
        sock.settimeout(PATIENCE)
        while (data := sock.recv(2000)) == junk:
            pass
        assert protocol.decode_request(data[8:], Side.SERVICE)[1] == protocol.Release(7)


def test_close_says_that_a_handler_is_still_busy() -> None:
    stuck = Held(protocol.Done())
    with connected(service=Answers(on_goodbye=stuck)) as (client, service):
        call = Background(lambda: client.call(protocol.Goodbye(), timeout=PATIENCE))
        assert stuck.entered.wait(PATIENCE)
        client.hang_up()
        assert not service.close(1.5)
        stuck.go_on.set()
        assert isinstance(call.result(), BadState)


def test_forked_child_has_no_descriptor_of_a_connection() -> None:
    with connected() as (client, service):
        numbers = [client._sock.fileno(), service._sock.fileno(), client._mailbox.fileno(), service._mailbox.fileno()]
        assert as_user(None, lambda: set(numbers) & open_fds()) == "set()"
        assert set(numbers) <= open_fds()
        client.call(protocol.Goodbye(), timeout=PATIENCE)


def test_object_whose_end_fails_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture) -> None:
    table = ObjectTable()
    ended: list[int] = []
    for number in range(3):
        table.add(number, lambda number=number: ended.append(number) or 1 // (number - 1))  # type: ignore[misc]
    table.close()
    assert ended == [2, 1, 0]
    assert "releasing 1 failed" in caplog.text


def test_calls_that_come_while_a_service_ends_are_told_of_the_end() -> None:
    class Thing:
        what: ClassVar[str] = "thing"

    table = ObjectTable()
    number = table.add(Thing(), lambda: None)
    with pytest.raises(InvalidArgument, match="no thing 2"), table.lease(2, Thing):
        pass
    table.close()
    with pytest.raises(DeadObject, match="has ended"), table.lease(number, Thing):
        pass


def test_long_message_for_which_there_is_no_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with connected(service=Answers(on_execute=lambda message, fds: EXECUTED)) as (client, _):
        client.call(LONG, timeout=PATIENCE)
        before = open_fds()
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            with pytest.raises(ResourceExhausted, match="No space"):
                client.call(LONG, timeout=PATIENCE)
        until(lambda: open_fds() == before)
        client.call(LONG, timeout=PATIENCE)
