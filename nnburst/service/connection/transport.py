"""A connection: calls in both directions over one SOCK_SEQPACKET socket.

Any thread may call. One thread owns the connection (see `mailbox`): it sends, receives and completes calls. Worker
threads serve the peer's calls and send the answers, so that a long `prepare_model` delays no other call. At the
connection's end, `_finish` ends each pending call with an error, then calls each death listener, then `on_end`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ..._core.deadline import Deadline
from ..._core.errno import meaning
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING, abandon_when_forked
from ..._core.threads import start
from ...errors import BadState, Ending, GeneralFailure, NNBurstError, ResourceExhausted
from ..wire import protocol as calls
from ..wire.packets import DescriptorsLost, EndOfStream, FdBundle, Kind, Outgoing, Packet, receive
from ..wire.protocol import Message
from .mailbox import Mailbox
from .outbox import Outbox
from .pending import PendingCall, PendingCalls
from .serving import Serving, Workers, refusal

if TYPE_CHECKING:
    from ..process.launch import Child

_log = logging.getLogger(__name__)

SEND_TIMEOUT = 10.0
"""Seconds after which a peer that does not read its answers is disconnected."""
TOLD = "the service ended: "
"""Prefix of the reason why a connection ended, if the service sent the reason."""
WORKER_PATIENCE = 1.0
"""Seconds that a connection waits for busy handlers before it ends."""


def _ending(status: int | None) -> Ending | None:
    """Return the `Ending` for a process's exit status; None for None."""
    if status is None:
        return None
    if status >= 0:
        return Ending(f"the other process ended with status {status}", exit_status=status)
    names = {each.value: each.name for each in signal.Signals}
    return Ending(f"the other process was killed by {names.get(-status, f'signal {-status}')}", signal=-status)


class Connection:
    """One end of a connection. Start it with `start`, end it with `close`.

    Args:
        sock: A connected SOCK_SEQPACKET socket; the connection owns it.
        side: Role of this end, client or service. The role decides the calls that this end serves.
        handler: See `Serving`.
        peer_pidfd: A pidfd of the peer's process, if known. The connection owns it.
        child: The peer's process, if this end is to start it; else None. The owner thread starts the process, because
            the kernel ends a child together with the thread that started the child.
        workers: Maximum number of computing calls that are served at the same time. Other calls have an equal limit.
        send_timeout: Seconds after which a peer that does not read its answers is disconnected.
        on_end: Called once, after all death listeners.
        peer: Name of the peer, for the log.
    """

    def __init__(
        self,
        sock: socket.socket,
        side: calls.Side,
        handler: object,
        *,
        peer_pidfd: FdSet | None = None,
        child: Child | None = None,
        workers: int = 4,
        send_timeout: float = SEND_TIMEOUT,
        on_end: Callable[[], object] = lambda: None,
        name: str = "nnburst",
        peer: str = "the peer",
    ) -> None:
        sock.setblocking(False)
        self._sock, self._pidfd = sock, peer_pidfd or FdSet()
        self._mailbox = Mailbox()
        self._outbox = Outbox(sock, send_timeout)
        self._workers = tuple(Workers(workers, f"{name}-{kind}") for kind in ("worker", "computing"))
        self._serving = Serving(side, handler, self._workers, self._outbox, self._mailbox, self._drop)
        self._calls = PendingCalls()
        self._child, self._on_end, self._peer = child, on_end, peer
        self._launched: Future[None] = Future()
        """Done when the launch of the peer has succeeded or failed. `result` raises the error of a failed launch."""
        self._closed = self._ended = self._abandoned = False
        """`_closed`: True after `close`. `_ended`: True after the end. `_abandoned`: True in a forked child."""
        self._leave_by = math.inf
        """Time when `close` stops waiting for the peer. After a release without an answer, `close` does not wait."""
        self._farewell: PendingCall | None = None
        self._listeners: dict[object, Callable[[], None]] = {}
        self._stop_reason = ""
        self._exit: Ending | None = None
        self._thread = threading.Thread(target=self._run, name=f"{name}-reader", daemon=True)
        abandon_when_forked(self)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the owner thread, and wait until it has launched the child, if there is one. Call it only once.

        After an error, the caller closes the connection.

        Raises:
            ResourceExhausted: The system cannot start a thread.
            Exception: The peer could not be launched.
        """
        start(self._thread, "a connection")
        self._launched.result()

    @property
    def alive(self) -> bool:
        """True until the connection ends or is closed; always False in a forked child."""
        return not (self._ended or self._closed or self._abandoned)

    @property
    def ending(self) -> Ending:
        return (self._exit or Ending(self._stop_reason)) if self._ended else Ending()

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the connection has ended and `on_end` has returned. Return False after `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, reason: str) -> None:
        """End the connection without waiting. If called more than once, the first reason counts."""
        self._mailbox.post(partial(self._note, reason))

    def hang_up(self, farewell: Message | None = None) -> None:
        """Refuse later calls, and let the owner thread end the connection. Does not wait for the end.

        Any thread, signal handler or finaliser may call it.

        Args:
            farewell: A last call. The connection ends when this call is answered, or at the time limit of closing.
        """
        if not self._abandoned:
            self._closed = True
            self._mailbox.post(partial(self._leave, farewell))

    def close(self, timeout: float | None = None, farewell: Message | None = None) -> bool:
        """Call `hang_up` and wait for the threads. Idempotent.

        If Ctrl-C interrupts the wait, the connection ends nevertheless.

        Returns:
            False if a handler or listener was still busy after `timeout` seconds (default 3).
        """
        if self._abandoned:
            return True
        self.hang_up(farewell)
        if self._thread.ident is None:
            self._note("closed by this side")
            self._finish()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        deadline = Deadline.after(LEAVING + WORKER_PATIENCE if timeout is None else timeout)
        return self.wait_ended(deadline.left()) and self._join_workers(deadline)

    def linger(self) -> None:
        """Wait until the peer has received all answers, or this side closes. For use in `on_end`."""
        self._outbox.linger(lambda: self._closed)

    def abandon(self) -> None:
        """Close a forked child's copies of the descriptors; the parent's connection continues."""
        self._abandoned = True
        self._mailbox.abandon()
        self._pidfd.close()
        self._sock.close()

    def check_usable(self) -> None:
        """Raise the error that a call would raise now, if any.

        Raises:
            BadState: The connection is closed, or this is a forked child.
            DeadObject: The peer has ended.
        """
        if self._abandoned:
            raise BadState(
                "this connection to a service was inherited through fork() and belongs to the parent process: "
                "start or connect to a service in the child"
            )
        if self._closed:
            raise BadState("the connection to the service is closed")
        if self._ended:
            raise self.ending.error(f"{self.ending.reason}; connect to a service again, or launch another one")

    def link_to_death(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` in a thread of the connection when the connection ends, or at once if it has ended.

        Returns:
            A function that cancels the call.
        """
        if self._abandoned:
            self.check_usable()
        key = object()
        self._listeners[key] = listener
        self._mailbox.post(partial(self._on_link, key))
        return partial(self._unlink, key)

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
            fds: Descriptors to send; the caller still owns them.
            timeout: Seconds for the whole call; None for no limit. An enclosing `Deadline.call` can end the wait.
            on_late: Called in the owner thread with a reply that comes too late.

        Returns:
            The reply and its descriptors.

        Raises:
            NNBurstError: The other side answered with this error.
            MissedDeadline: No answer came in time.
            DeadObject: The other side has ended.
            BadState: This side has closed, or is a forked child.
            InvalidArgument: The message has a field that the other side would refuse. The error names the field.
        """
        self.check_usable()
        limit = Deadline.after(timeout).left()
        pending = PendingCall(message, FdBundle.duplicate(fds), on_late)
        try:
            self._mailbox.post(partial(self._begin, pending))
            answered = pending.wait(limit)
        except BaseException:  # a signal handler raised it: no caller is left to take the reply
            if not self._stop_waiting(pending):
                pending.discard()
            raise
        if not answered and self._stop_waiting(pending):
            raise pending.deadline_error(limit)
        return pending.result()

    def _stop_waiting(self, pending: PendingCall) -> bool:
        given_up = pending.stop_waiting()
        if given_up:
            self._mailbox.post(partial(self._withdraw, pending))
        return given_up

    def release(self, message: Message) -> None:
        """Release an object of the other side, and wait for the answer for a limited time.

        Raises the same errors as `call`. After an error, the other side may release the object later.
        """
        self.check_usable()
        pending = PendingCall(message, on_late=self._answers_again)
        limit = Deadline.after(self._patience).left()
        self._mailbox.post(partial(self._begin, pending))
        if not pending.wait(limit) and pending.stop_waiting():
            self._leave_by = min(self._leave_by, time.monotonic())
            raise pending.deadline_error(limit)
        pending.result()

    def _answers_again(self, reply: Message) -> None:
        if not self._closed:
            self._leave_by = math.inf

    def call_without_answer(
        self, message: Message, fds: Sequence[int] = (), on_failure: Callable[[NNBurstError], None] = lambda error: None
    ) -> None:
        """Make a call without waiting for its answer. Finalisers may call it, too, but without descriptors.

        Args:
            message: The request.
            fds: See `call`.
            on_failure: Called in the owner thread with the error, if the call fails.

        Raises:
            ResourceExhausted: The descriptors cannot be copied.
        """
        if self.alive:
            pending = PendingCall(message, FdBundle.duplicate(fds) if fds else None, on_failure=on_failure)
            pending.stop_waiting()
            self._mailbox.post(partial(self._begin, pending, is_attended=False))

    @property
    def _patience(self) -> float:
        """Seconds that the message which releases an object may take."""
        return max(0.0, min(LEAVING, self._leave_by - time.monotonic()))

    def _join_workers(self, deadline: Deadline) -> bool:
        return all(workers.join(deadline) for workers in self._workers)

    # -- the owner: the loop ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._launch_peer()
            self._serve_until_end()
        except EndOfStream as error:
            self._note(str(error))
        except ConnectionError as error:
            self._note(f"the connection broke: {error.strerror}")
        except calls.Malformed as error:
            self._drop(f"malformed message: {error}")
        except Exception as error:
            self._note(f"internal error: {error!r}")
            _log.exception("connection closed")
        finally:
            self._finish()

    def _launch_peer(self) -> None:
        try:
            if self._child is not None:
                self._pidfd = self._child.start()
            self._launched.set_result(None)
        except Exception as error:
            self._note("the other process could not be started")
            self._launched.set_exception(error)

    def _note(self, reason: str) -> None:
        """Store the first reason why the connection has to end."""
        self._stop_reason = self._stop_reason or reason

    def _serve_until_end(self) -> None:
        poll = select.poll()
        ended = self._pidfd.fds[:1]  # it is readable once the peer has ended; the exit status is read then
        for fd in (self._mailbox.fileno(), *ended):
            poll.register(fd, select.POLLIN)
        while not self._stop_reason:
            poll.register(self._sock.fileno(), select.POLLIN | (select.POLLOUT if self._outbox.is_full else 0))
            ready = {fd for fd, _ in poll.poll(self._milliseconds())}
            if self._mailbox.fileno() in ready:
                self._mailbox.do_all()
            if self._sock.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._receive()
            self._send()
            if not ready.isdisjoint(ended):
                # Messages that the peer sent before its death still count.
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._receive()
                raise EndOfStream("the other process ended")
            self._check_time()

    def _milliseconds(self) -> int | None:
        """Return the milliseconds until the owner must check its time limits; None if there are none."""
        moment = min(self._outbox.next_look, self._leave_by if self._farewell else math.inf)
        return None if moment == math.inf else math.ceil(max(0.0, moment - time.monotonic()) * 1000)

    def _check_time(self) -> None:
        now = time.monotonic()
        if self._farewell is not None and now >= self._leave_by:
            self._note("closed by this side")
        if now >= self._outbox.gives_up_at:
            self._drop("the peer does not read its socket")

    def _drop(self, reason: str) -> None:
        """End the connection because the peer broke the protocol, and log the reason."""
        self._note(reason)
        self._serving.part(self._stop_reason)
        _log.warning("%s is disconnected: %s", self._peer, reason)

    def _finish(self) -> None:
        """End the connection. Idempotent. Called by the owner thread, or by `close` if no owner thread started."""
        if self._ended:
            return
        if self._child is not None and not self._closed and (how := _ending(self._child.exit_status())):
            self._exit = replace(how, reason=self._stop_reason) if self._stop_reason.startswith(TOLD) else how
        self._ended = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # the peer sees the end even if forked children have copies
        for workers in self._workers:
            workers.stop()
        self._outbox.end()
        self._calls.end(self._failure)
        self._mailbox.end()
        for key in tuple(self._listeners):
            self._call_listener(key)
        try:
            self._on_end()
        except Exception:
            _log.exception("cleaning up after a connection failed")
        if self._child is not None:
            self._child.reap(self._patience)
        self._join_workers(Deadline.after(WORKER_PATIENCE))
        self._pidfd = FdSet()  # the last reference closes it: another thread may be using it
        self._outbox.close()

    def _failure(self, pending: PendingCall) -> NNBurstError:
        message = f"{pending.call.name} was not answered: {self.ending.reason}"
        return BadState(message) if self._closed else self.ending.error(message)

    # -- the owner: posted jobs ---------------------------------------------------------------------------------------

    def _leave(self, farewell: Message | None) -> None:
        if self._ended or self._farewell is not None:
            return
        if farewell is None:
            self._note("closed by this side")
            return
        self._leave_by = min(self._leave_by, time.monotonic() + LEAVING)
        self._farewell = PendingCall(farewell, on_late=self._on_farewell_answer, on_failure=self._on_farewell_answer)
        self._farewell.stop_waiting()
        self._begin(self._farewell)

    def _on_farewell_answer(self, answer: object) -> None:
        self._note("closed by this side")

    def _on_link(self, key: object) -> None:
        if self._ended:
            self._call_listener(key)

    def _unlink(self, key: object) -> None:
        self._listeners.pop(key, None)

    def _call_listener(self, key: object) -> None:
        try:
            self._listeners.pop(key, lambda: None)()
        except Exception:
            _log.exception("a death listener failed")

    def _begin(self, pending: PendingCall, *, is_attended: bool = True) -> None:
        if self._ended:
            pending.fail(self._failure(pending))
            return
        try:
            pending.body = calls.encode_request(pending.message)
            self._calls.add(pending, is_attended=is_attended)
        except NNBurstError as error:
            pending.fail(error)

    def _withdraw(self, pending: PendingCall) -> None:
        """Withdraw a call whose caller no longer waits. If it was sent, it stays in flight until it is answered."""
        if not pending.is_sent:
            self._calls.remove(pending)
            if pending.outgoing is not None:
                self._outbox.remove(pending.outgoing)
            pending.fds.close()

    # -- the owner: sending -------------------------------------------------------------------------------------------

    def _send(self) -> None:
        for pending in self._calls.admit():
            try:
                self._outbox.put(pending.pack())
            except NNBurstError as error:
                self._fail(pending, error)
        while (failed := self._outbox.send()) is not None:
            self._cannot_send(*failed)

    def _cannot_send(self, message: Outgoing, error: NNBurstError) -> None:
        message.close()
        if message.kind is Kind.REQUEST:
            pending = self._calls.find(message.number)
            if pending is not None:
                self._fail(pending, error)
        elif message.kind is Kind.REPLY:  # too many descriptors may be in flight: the error becomes the answer
            self._outbox.put_first(refusal(message.number, error))
        else:
            self._note(f"an answer cannot be sent: {error}")
            self._outbox.clear()

    def _fail(self, pending: PendingCall, error: NNBurstError) -> None:
        self._calls.remove(pending)
        pending.fail(error)

    # -- the owner: receiving -----------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            self._dispatch(receive(self._sock))
        except DescriptorsLost as lost:  # this process is at its limit, which is not the peer's fault
            error = ResourceExhausted(f"descriptors of a message were lost: {meaning(errno.EMFILE)}")
            if lost.kind is Kind.REQUEST:
                self._serving.refuse(lost.call_id, error)
            elif (pending := self._calls.find(lost.call_id)) is not None:
                self._fail(pending, error)

    def _dispatch(self, packet: Packet) -> None:
        try:
            if packet.kind is Kind.REQUEST:
                self._serving.accept(packet)
            else:
                self._complete(packet)
        except BaseException:
            packet.fds.close()
            raise

    def _complete(self, packet: Packet) -> None:
        pending = self._calls.find(packet.call_id)
        if pending is None:
            raise calls.Malformed(f"a reply to call {packet.call_id}, which was not made")
        reply: Message | None = None
        error: NNBurstError | None = None
        if packet.kind is Kind.ERROR:
            error = calls.error_of(calls.decode_error(packet.body))
            if self._closed and isinstance(error, GeneralFailure):  # the answer came after `close`
                error = BadState(f"{pending.call.name}: the connection to the service is closed")
            wanted = 0
        else:
            reply = calls.decode_reply(pending.call, packet.body)
            wanted = pending.call.reply_fds(reply)
        if wanted != len(packet.fds):
            raise calls.Malformed(f"a reply needs {wanted} descriptors, {len(packet.fds)} came")
        self._calls.remove(pending)
        pending.finish(reply, error, packet.fds)
