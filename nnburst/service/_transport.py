"""A connection: calls in both directions over one SOCK_SEQPACKET socket, and the peer's death.

One reader thread per connection owns the receiving side. It completes pending calls, hands requests to a few worker
threads (so a long `prepare_model` delays nobody), and watches the peer's pidfd. However a connection ends, the reader
thread runs `_finish` once: pending calls fail, then every death listener is called once, then `on_end`.

`_lock` guards the descriptors at the end; it is never held during a send, a callback or a wait. A thread that calls
takes no lock for which the reader could wait before all calls are answered: a signal handler may run anywhere in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from .._core import time_left
from ..errors import (
    BadState,
    DeadObject,
    ErrorStatus,
    GeneralFailure,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
    error_for,
)
from ._listeners import DeathListeners
from ._packets import DescriptorsLost, EndOfStream, FdBundle, Kind, Packet, close_fds, receive
from ._pending import PendingCall, PendingCalls, ServedCalls
from ._protocol import (
    CALL_BY_REQUEST,
    CALLS,
    MAX_INLINE,
    Call,
    Malformed,
    Message,
    Release,
    Side,
    decode_error,
    decode_reply,
    decode_request,
    encode,
    encode_reply,
    encode_request,
    error_reply,
)
from ._sender import Sender
from ._workers import Workers

__all__ = ["SEND_TIMEOUT", "Connection"]

_log = logging.getLogger(__name__)

SEND_TIMEOUT = 10.0
"""Seconds after which a peer that does not read its socket is given up."""
_WORKER_PATIENCE = 1.0
"""Seconds that the end of a connection waits for handlers which are still busy."""
_EXIT_PATIENCE = 0.2
"""Seconds between the end of a child's socket, which the system closes first, and that of the child."""


def exit_of_child(pidfd: int) -> str:
    """Say how a process ended that has just closed its socket; empty if it lives on or is no child of this one."""
    try:
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)  # raises if it is no child
        ended = select.poll()
        ended.register(pidfd, select.POLLIN)
        ended.poll(_EXIT_PATIENCE * 1000)
        found = os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except OSError:
        return ""
    if found is None:
        return ""
    if found.si_code == os.CLD_EXITED:
        return f"the other process ended with status {found.si_status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"the other process was killed by {names.get(found.si_status, f'signal {found.si_status}')}"


class Connection:
    """One end of a connection. Start it with `start`, end it with `close`.

    Args:
        sock: A connected SOCK_SEQPACKET socket; the connection owns it.
        side: Which calls this end serves.
        handler: Object with the methods that the rows of `CALLS` name for this side; a method `admit(call)`, if there
            is one, is called before each.
        peer_pidfd: pidfd of the peer's process, or None. The connection owns it.
        workers: Calls that are served at the same time.
        send_timeout: Seconds after which a peer that does not read is given up.
        on_end: Called once in the reader thread after all death listeners.
    """

    def __init__(
        self,
        sock: socket.socket,
        side: Side,
        handler: object,
        *,
        peer_pidfd: int | None = None,
        workers: int = 4,
        send_timeout: float = SEND_TIMEOUT,
        on_end: Callable[[], None] | None = None,
        name: str = "nnburst",
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._side = side
        self._handlers = {call: getattr(handler, call.handler) for call in CALLS if call.side is side}
        self._admit: Callable[[Call], None] | None = getattr(handler, "admit", None)
        self._pidfd = -1 if peer_pidfd is None else peer_pidfd
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._on_end = on_end
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._calls = PendingCalls()
        self._sender = Sender(sock, self._calls, send_timeout, self._wake)
        self._listeners = DeathListeners()
        self._serving = ServedCalls()
        self._stop_reason = ""
        self._closed = False
        self._ended = threading.Event()
        self._workers = Workers(workers, f"{name}-worker")
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to read. To be called once.

        Raises:
            ResourceExhausted: The system has no thread for it; the connection is to be closed.
        """
        try:
            self._reader.start()
        except RuntimeError as error:
            raise ResourceExhausted(f"a connection needs a thread: {error}") from error

    @property
    def alive(self) -> bool:
        """False once the connection has ended."""
        return not self._ended.is_set() and not self._closed and os.getpid() == self._owner

    @property
    def belongs_here(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._owner

    @property
    def end_reason(self) -> str:
        """Why the connection ended, empty before."""
        return self._stop_reason if self._ended.is_set() else ""

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the connection has ended and `on_end` has returned."""
        self._reader.join(timeout)
        return not self._reader.is_alive()

    def stop(self, reason: str) -> None:
        """End the connection without waiting. The first reason counts."""
        if os.getpid() != self._owner:
            return
        self._note(reason)
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._wake_fd >= 0:
                os.eventfd_write(self._wake_fd, 1)

    def close(self, timeout: float = 5.0) -> bool:
        """End the connection and wait for its threads. Idempotent; in a forked child only the descriptors are closed.

        Returns:
            False if a thread (a handler or listener that does not return) was still busy after `timeout` seconds.
        """
        if os.getpid() != self._owner:
            self._close_fds()  # never shutdown(): the socket is still the parent's
            return True
        self._closed = True
        self.stop("closed by this side")
        if self._reader.ident is None:
            self._finish()
            return True
        if self._reader is threading.current_thread():
            return True
        joined = self._workers.join(timeout) if self.wait_ended(timeout) else False
        return joined

    def check_usable(self) -> None:
        """Raise what a call would raise now.

        Raises:
            BadState: Closed, or inherited by a forked child.
            DeadObject: The peer is gone.
        """
        if os.getpid() != self._owner:
            raise BadState(
                "this connection to a service was inherited through fork() and belongs to the parent process: "
                "start or connect to a service in the child"
            )
        if self._closed:
            raise BadState("the connection to the service is closed")
        if self._ended.is_set():
            raise DeadObject(self._stop_reason)

    def link_to_death(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` once when the connection ends, at once if it has ended. Returns a function that unlinks.

        It runs in the reader thread and is held strongly until it was called or unlinked.
        """
        if os.getpid() != self._owner:
            self.check_usable()
        return self._listeners.add(listener)

    # -- calling -----------------------------------------------------------------------------------------------------

    def call(
        self,
        message: Message,
        fds: Sequence[int] = (),
        *,
        timeout: float | None = None,
        on_late: Callable[[Message], None] | None = None,
    ) -> tuple[Any, FdBundle]:
        """Call the other side and wait for the reply.

        Args:
            message: The request.
            fds: Descriptors that go with it; they stay the caller's.
            timeout: Seconds for everything, None for no limit but that of `within`.
            on_late: Called with the reply (in the reader thread) if it comes after this call gave up.

        Returns:
            The reply and its descriptors.

        Raises:
            NNBurstError: What the other side answered.
            MissedDeadline: No answer in time.
            DeadObject: The other side is gone.
            BadState: This side has closed, or is a forked child.
            InvalidArgument: The other side could not read the message; it says which field.
        """
        self.check_usable()
        call = CALL_BY_REQUEST[type(message)]
        timeout = time_left(timeout)
        deadline = None if timeout is None else time.monotonic() + timeout
        body = encode_request(message)
        pending = PendingCall(call, is_long=len(body) > MAX_INLINE)
        try:
            self._calls.enter(pending, timeout)
            self._send(Kind.REQUEST, pending.number, body, fds, deadline, pending)
            answered = pending.wait(None if deadline is None else deadline - time.monotonic())
        except BaseException:  # KeyboardInterrupt: the reply is nobody's now
            if not self._calls.give_up(pending, on_late):
                pending.discard()
            raise
        if not answered and self._calls.give_up(pending, on_late):
            raise MissedDeadline(f"{call.name}: no answer within {timeout:.3g} s")
        if pending.error is not None:
            raise pending.error
        return pending.reply, pending.fds

    def release_later(self, number: int) -> None:
        """Release a remote object without waiting, from a finaliser."""
        self.send_later(Release(number))

    def send_later(self, message: Message) -> None:
        """Send a short request whose answer nobody wants, without waiting: takes no lock that the thread might hold.

        It goes out before the next message, or the reader thread sends it.
        """
        if os.getpid() == self._owner and not self._ended.is_set():
            self._sender.later(message)

    def _send(
        self,
        kind: Kind,
        number: int,
        body: bytes,
        fds: Sequence[int],
        deadline: float | None,
        pending: PendingCall | None = None,
    ) -> None:
        try:
            self._sender.send(kind, number, body, fds, deadline, pending)
        except ConnectionError as error:
            self.stop(f"the connection broke: {error.strerror}")
            if threading.current_thread() is not self._reader:
                self._ended.wait(2 * _EXIT_PATIENCE)  # the reader finds out how the other process ended
            raise DeadObject(self._stop_reason) from error

    # -- the reader thread ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            self._read_until_end()
        except EndOfStream as error:
            self._note(str(error))
        except Malformed as error:
            self._note(f"malformed message: {error}")
            _log.warning("connection closed: malformed message: %s", error)
        except Exception as error:
            self._note(f"internal error: {error!r}")
            _log.exception("connection closed")
        finally:
            self._finish()

    def _note(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def _read_until_end(self) -> None:
        poll = select.poll()
        for fd in (self._sock.fileno(), self._wake_fd, self._pidfd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        is_full = False
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
                if self._stop_reason:  # noted before the wake-up was written
                    return
            with contextlib.suppress(BlockingIOError):
                self._receive()
            was_full, is_full = is_full, not self._sender.flush()
            if was_full != is_full:
                poll.modify(self._sock.fileno(), select.POLLIN | (select.POLLOUT if is_full else 0))
            if self._pidfd in ready:
                # What it said before it died still counts.
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._receive()
                raise EndOfStream("the other process ended")

    def _receive(self) -> None:
        try:
            self._dispatch(receive(self._sock))
        except DescriptorsLost as lost:  # this process has as many as it may; that is not the peer's doing
            number = lost.call_id
            error = ResourceExhausted("descriptors of a message were lost: the process may open no more (ulimit -n)")
            if lost.kind is Kind.REQUEST:
                self._serving.enter(0, False)

                def refuse() -> None:
                    self._serving.leave(0, False)
                    self._answer(number, Kind.ERROR, encode(error_reply(error)), ())

                self._workers.submit(refuse)
            elif (pending := self._calls.find(number)) is not None:
                self._calls.answer(pending, None, error, FdBundle())

    def _dispatch(self, packet: Packet) -> None:
        try:
            if packet.kind is Kind.REQUEST:
                self._accept(packet)
            else:
                self._complete(packet)
        except BaseException:
            packet.fds.close()
            raise

    def _accept(self, packet: Packet) -> None:
        call, message = decode_request(packet.body, self._side)
        if call.request_fds(message) != len(packet.fds):
            raise Malformed(f"{call.name} needs {call.request_fds(message)} descriptors, {len(packet.fds)} came")
        n_fds, number, fds, is_long = len(packet.fds), packet.call_id, packet.fds, packet.is_long
        self._serving.enter(n_fds, is_long)

        def job() -> None:
            try:
                answer = self._serve(call, message, fds)
            finally:
                fds.close()
                self._serving.leave(n_fds, is_long)  # before the peer has the answer and makes the next call
            if answer is not None:
                self._answer(number, *answer)

        try:
            if not self._workers.submit(job):
                fds.close()
        except ResourceExhausted as error:  # no thread to be had
            fds.close()
            self._serving.leave(n_fds, is_long)
            self._answer(number, Kind.ERROR, encode(error_reply(error)), ())

    def _complete(self, packet: Packet) -> None:
        pending = self._calls.find(packet.call_id)
        if pending is None:
            raise Malformed(f"a reply to call {packet.call_id}, which was not made")
        reply: Message | None = None
        error: NNBurstError | None = None
        if packet.kind is Kind.ERROR:
            answer = decode_error(packet.body)
            error = error_for(ErrorStatus(answer.status), answer.message, answer.output_shapes)
            wanted = 0
        else:
            reply = decode_reply(pending.call, packet.body)
            wanted = pending.call.reply_fds(reply)
        if wanted != len(packet.fds):
            raise Malformed(f"a reply needs {wanted} descriptors, {len(packet.fds)} came")
        self._calls.answer(pending, reply, error, packet.fds)

    def _finish(self) -> None:
        """The end, once: in the reader thread, or in `close` if that never started."""
        how = "" if self._closed else exit_of_child(self._pidfd)
        with self._lock:
            if self._ended.is_set():
                return
            self._stop_reason = how or self._stop_reason
            self._ended.set()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends it for the peer even if forked children hold copies
        failure = BadState if self._closed else DeadObject
        self._calls.end(lambda call: failure(f"{call.name} was not answered: {self._stop_reason}"))
        for dropped in self._workers.stop():
            del dropped  # their descriptors close with them
        self._listeners.call_all()
        if self._on_end is not None:
            try:
                self._on_end()
            except Exception:
                _log.exception("cleaning up after a connection failed")
        self._workers.join(_WORKER_PATIENCE)
        self._close_fds()

    def _close_fds(self) -> None:
        if os.getpid() != self._owner:  # a lock may have been held by another thread when fork copied it
            fds = [self._pidfd, self._wake_fd]
            self._pidfd = self._wake_fd = -1
            self._sock.close()
        else:
            with self._lock:
                fds = [self._pidfd, self._wake_fd]
                self._pidfd = self._wake_fd = -1
            self._sender.close()
        close_fds(fd for fd in fds if fd >= 0)

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve(self, call: Call, message: Message, received: FdBundle) -> tuple[Kind, bytes, Sequence[int]] | None:
        """Return the answer, with descriptors that are to be closed; None if the connection has to end."""
        fds: Sequence[int] = ()
        try:
            if self._admit is not None:
                self._admit(call)
            answer = self._handlers[call](message, received)
            reply, fds = answer if isinstance(answer, tuple) else (answer, ())
            return Kind.REPLY, encode_reply(call, reply), fds
        except Malformed as error:
            self.stop(f"malformed message: {error}")
            return None
        except NNBurstError as error:
            refusal = error
        except BaseException as error:  # also SystemExit from somebody's function: the peer must not wait for ever
            _log.exception("%s failed", call.name)
            refusal = GeneralFailure(f"{call.name} failed: {type(error).__name__}: {error}")
        close_fds(fds)
        return Kind.ERROR, encode(error_reply(refusal)), ()

    def _answer(self, number: int, kind: Kind, body: bytes, fds: Sequence[int]) -> None:
        try:
            if number:
                self._send(kind, number, body, fds, None)
        except MissedDeadline as error:
            self.stop(str(error))
        except DeadObject:
            pass
        except NNBurstError as error:  # e.g. too many descriptors in flight: say so without them
            with contextlib.suppress(NNBurstError):
                self._send(Kind.ERROR, number, encode(error_reply(error)), (), None)
        finally:
            close_fds(fds)
