"""A connection: calls in both directions over one SOCK_SEQPACKET socket, and the peer's death.

One reader thread per connection owns the receiving side. It completes pending calls, hands requests to a few worker
threads (so a long `prepare_model` delays nobody), and watches the peer's pidfd. However a connection ends, the reader
thread runs `_finish` once: pending calls fail, then every death listener is called once, then `on_end`.

Locks: `_lock` guards the tables and is never held during a send, a callback or a wait; `_send_lock` serialises
datagrams.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import BadState, DeadObject, ErrorStatus, GeneralFailure, MissedDeadline, NNBurstError, error_for
from ._packets import EndOfStream, FdBundle, Kind, Packet, close_fds, receive, send
from ._pending import PendingCall
from ._protocol import (
    CALL_BY_REQUEST,
    CALLS,
    Call,
    Malformed,
    Message,
    Release,
    Side,
    decode_error,
    decode_reply,
    decode_request,
    encode,
    error_reply,
)
from ._workers import Workers

__all__ = ["MAX_PENDING", "SEND_TIMEOUT", "Connection"]

_log = logging.getLogger(__name__)

SEND_TIMEOUT = 10.0
"""Seconds after which a peer that does not read its socket is given up."""
MAX_PENDING = 128
"""Calls that one side may have under way; the other side tolerates twice as many, then drops the connection."""
_WORKER_PATIENCE = 1.0
"""Seconds that the end of a connection waits for handlers which are still busy."""
_MAX_QUEUED_FDS = 2048


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
        self._send_timeout = send_timeout
        self._on_end = on_end
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._send_lock = threading.Lock()
        self._credits = threading.BoundedSemaphore(MAX_PENDING)
        self._numbers = itertools.count(1)
        self._pending: dict[int, PendingCall] = {}
        self._listeners: dict[object, Callable[[], None]] = {}
        self._garbage: deque[int] = deque()
        self._queued_fds = 0
        self._under_way = 0
        self._stop_reason = ""
        self._closed = False
        self._ended = threading.Event()
        self._workers = Workers(workers, f"{name}-worker")
        self._reader = threading.Thread(target=self._read, name=f"{name}-reader", daemon=True)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start to read. To be called once."""
        self._reader.start()

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
        return self._stop_reason

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the connection has ended and `on_end` has returned."""
        self._reader.join(timeout)
        return not self._reader.is_alive()

    def stop(self, reason: str) -> None:
        """End the connection without waiting. The first reason counts."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._stop_reason = self._stop_reason or reason
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
            raise DeadObject(f"the other process is gone: {self._stop_reason}")

    def link_to_death(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` once when the connection ends, at once if it has ended. Returns a function that unlinks.

        It runs in the reader thread and is held strongly until it was called or unlinked.
        """
        if os.getpid() != self._owner:
            self.check_usable()
        key = object()
        with self._lock:
            ended = self._ended.is_set()
            if not ended:
                self._listeners[key] = listener
        if ended:
            listener()

        def unlink() -> None:
            self._listeners.pop(key, None)

        return unlink

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
            timeout: Seconds for everything, None for no limit.
            on_late: Called with the reply (in the reader thread) if it comes after this call gave up.

        Returns:
            The reply and its descriptors.

        Raises:
            NNBurstError: What the other side answered.
            MissedDeadline: No answer in time.
            DeadObject: The other side is gone.
            BadState: This side has closed, or is a forked child.
            InvalidArgument: The message cannot be encoded.
        """
        self.check_usable()
        call = CALL_BY_REQUEST[type(message)]
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            body = encode(message)
        except (TypeError, ValueError, OverflowError) as error:
            raise error_for(ErrorStatus.INVALID_ARGUMENT, f"{call.name} cannot be sent: {error}") from error
        if not self._credits.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            raise MissedDeadline(f"{call.name}: {MAX_PENDING} calls are under way already")
        pending = PendingCall(call)
        number = next(self._numbers) % 2**32 or next(self._numbers)
        with self._lock:
            if self._ended.is_set():
                self._credits.release()
                raise DeadObject(f"the other process is gone: {self._stop_reason}")
            self._pending[number] = pending
        try:
            self._send(Kind.REQUEST, number, body, fds, deadline)
        except BaseException:
            self._take_pending(number)
            raise
        try:
            answered = pending.done.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except BaseException:  # KeyboardInterrupt: the reply is nobody's now
            self._abandon(pending, on_late)
            raise
        if not answered and self._abandon(pending, on_late):
            raise MissedDeadline(f"{call.name}: no answer within {timeout} s")
        if pending.error is not None:
            raise pending.error
        return pending.reply, pending.fds

    def release_later(self, number: int) -> None:
        """Release a remote object without waiting, from a finaliser: takes no lock that its thread might hold."""
        if os.getpid() == self._owner and not self._ended.is_set():
            self._garbage.append(number)
            self._sweep()

    def _sweep(self) -> None:
        """Send the releases that finalisers left; whoever holds the send lock does it afterwards."""
        while self._garbage and self._send_lock.acquire(blocking=False):
            try:
                while self._garbage:
                    number = self._garbage.popleft()
                    try:
                        send(self._sock, Kind.REQUEST, 0, encode(Release(number)), (), 0.0)
                    except MissedDeadline:  # full: the next sender tries again
                        self._garbage.append(number)
                        return
                    except (NNBurstError, OSError):
                        return
            finally:
                self._send_lock.release()

    def _send(self, kind: Kind, number: int, body: bytes, fds: Sequence[int], deadline: float | None) -> None:
        give_up = time.monotonic() + self._send_timeout
        deadline = give_up if deadline is None else min(deadline, give_up)
        if not self._send_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise MissedDeadline("the peer does not read its socket")
        try:
            send(self._sock, kind, number, body, fds, deadline)
        except ConnectionError as error:
            self.stop(f"sending failed: {error}")
            raise DeadObject(f"the other process is gone: {error}") from error
        finally:
            self._send_lock.release()
        self._sweep()

    def _take_pending(self, number: int) -> PendingCall | None:
        with self._lock:
            pending = self._pending.pop(number, None)
        if pending is not None:
            self._credits.release()
        return pending

    def _abandon(self, pending: PendingCall, on_late: Callable[[Message], None] | None) -> bool:
        """Stop to wait for a reply; False if it has come meanwhile. The credit comes back with the late reply."""
        with self._lock:
            if pending.done.is_set():
                return False
            pending.on_late = on_late or _ignore
            return True

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
        with self._lock:
            self._stop_reason = self._stop_reason or reason

    def _read_until_end(self) -> None:
        poll = select.poll()
        for fd in (self._sock.fileno(), self._wake_fd, self._pidfd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._wake_fd in ready:
                return
            with contextlib.suppress(BlockingIOError):
                self._dispatch(receive(self._sock))
            if self._pidfd in ready:
                # What it said before it died still counts.
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._dispatch(receive(self._sock))
                raise EndOfStream("its process ended")

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
        n_fds = len(packet.fds)
        with self._lock:
            self._under_way += 1
            self._queued_fds += n_fds
            if self._under_way > 2 * MAX_PENDING or self._queued_fds > _MAX_QUEUED_FDS:
                raise Malformed("too many calls at once")

        def job() -> None:
            try:
                self._serve(call, message, packet)
            finally:
                packet.fds.close()
                with self._lock:
                    self._under_way -= 1
                    self._queued_fds -= n_fds

        self._workers.submit(job)

    def _complete(self, packet: Packet) -> None:
        with self._lock:
            pending = self._pending.get(packet.call_id)
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
        self._take_pending(packet.call_id)
        with self._lock:
            late = pending.on_late
            if late is None:
                pending.reply, pending.error, pending.fds = reply, error, packet.fds
                pending.done.set()
        if late is not None:
            packet.fds.close()
            if reply is not None:
                late(reply)

    def _finish(self) -> None:
        """The end, once: in the reader thread, or in `close` if that never started."""
        with self._lock:
            if self._ended.is_set():
                return
            self._ended.set()
            pending, self._pending = list(self._pending.values()), {}
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # ends it for the peer even if forked children hold copies
        if self._closed:
            failure: type[NNBurstError] = BadState
        else:
            failure = DeadObject
        for waiting in pending:
            waiting.error = failure(f"{waiting.call.name} was not answered: {self._stop_reason}")
            waiting.done.set()
            self._credits.release()
        for dropped in self._workers.stop():
            del dropped  # their descriptors close with them
        self._call_listeners()
        if self._on_end is not None:
            try:
                self._on_end()
            except Exception:
                _log.exception("cleaning up after a connection failed")
        self._workers.join(_WORKER_PATIENCE)
        self._close_fds()

    def _call_listeners(self) -> None:
        while True:
            try:
                _, listener = self._listeners.popitem()
            except KeyError:
                return
            try:
                listener()
            except Exception:
                _log.exception("a death listener failed")

    def _close_fds(self) -> None:
        if os.getpid() != self._owner:  # a lock may have been held by another thread when fork copied it
            fds = [self._pidfd, self._wake_fd]
            self._pidfd = self._wake_fd = -1
            self._sock.close()
        else:
            with self._send_lock, self._lock:
                fds = [self._pidfd, self._wake_fd]
                self._pidfd = self._wake_fd = -1
                self._sock.close()
        close_fds(fd for fd in fds if fd >= 0)

    # -- serving -----------------------------------------------------------------------------------------------------

    def _serve(self, call: Call, message: Message, packet: Packet) -> None:
        kind, body, fds = Kind.REPLY, b"", ()
        try:
            try:
                if self._admit is not None:
                    self._admit(call)
                answer = self._handlers[call](message, packet.fds)
                reply, fds = answer if isinstance(answer, tuple) else (answer, ())
                body = encode(reply)
            except Malformed as error:
                self.stop(f"malformed message: {error}")
                return
            except NNBurstError as error:
                kind, body = Kind.ERROR, encode(error_reply(error))
            except Exception as error:
                _log.exception("%s failed", call.name)
                failure = GeneralFailure(f"{call.name} failed: {type(error).__name__}: {error}")
                kind, body = Kind.ERROR, encode(error_reply(failure))
            if packet.call_id:
                self._answer(call, kind, packet.call_id, body, fds if kind is Kind.REPLY else ())
        finally:
            close_fds(fds)

    def _answer(self, call: Call, kind: Kind, number: int, body: bytes, fds: Sequence[int]) -> None:
        try:
            self._send(kind, number, body, fds, None)
        except MissedDeadline as error:
            self.stop(str(error))
        except DeadObject:
            pass
        except NNBurstError as error:  # e.g. too many descriptors in flight: say so without them
            with contextlib.suppress(NNBurstError):
                self._send(Kind.ERROR, number, encode(error_reply(error)), (), None)


def _ignore(reply: Message) -> None:
    """What happens to a reply that nobody waits for and that names no object."""
