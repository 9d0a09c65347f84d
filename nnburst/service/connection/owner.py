"""The half of a connection that one thread has: it sends, receives, completes calls and ends the connection.

What its peer calls it hands to a few worker threads, which send the answers, so a long `prepare_model` delays no other
call. However a connection ends, `finish` runs once: pending calls fail, then every death listener is called once, then
`on_end`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from ..._core.deadline import Deadline
from ..._core.errno import meaning
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING
from ...errors import BadState, Ending, ErrorStatus, GeneralFailure, NNBurstError, ResourceExhausted, error_for
from ..wire import protocol as calls
from ..wire.packets import DescriptorsLost, EndOfStream, Kind, Outgoing, Packet, receive
from ..wire.values import Message
from .mailbox import Mailbox
from .outbox import Outbox
from .pending import PendingCall, PendingCalls
from .serving import Serving, refusal
from .workers import Workers

_log = logging.getLogger(__name__)

TOLD = "the service ended: "
"""Before a reason that the other side has told; its exit status says less."""
WORKER_PATIENCE = 1.0
"""Seconds that the end of a connection waits for handlers which are still busy."""


def _ending(status: int | None) -> Ending | None:
    """Say how a process ended; None if that is not known."""
    if status is None:
        return None
    if status >= 0:
        return Ending(f"the other process ended with status {status}", exit_status=status)
    names = {each.value: each.name for each in signal.Signals}
    return Ending(f"the other process was killed by {names.get(-status, f'signal {-status}')}", signal=-status)


@dataclass(eq=False)
class Owner:
    """Runs a connection in one thread; others post what it is to do to its mailbox. For arguments see `Connection`.

    Attributes:
        calls: Of this side.
        closed: Whether this side has closed the connection; set by any thread.
        ended: Whether the connection has ended.
        hello_by: When the peer must have said hello; infinite once it has, set by any thread.
        launched: When the peer is, or what kept it from that.
        releases: Calls that let go of something and are not answered.
    """

    sock: socket.socket
    pidfd: FdSet
    mailbox: Mailbox
    outbox: Outbox
    workers: Sequence[Workers]
    serving: Serving
    launch: Callable[[], int] | None
    hello_by: float
    exit_status: Callable[[], int | None]
    on_end: Callable[[float], None] | None
    peer: str

    def __post_init__(self) -> None:
        self.launched: Future[None] = Future()
        self.closed = self.ended = False
        self.releases: set[PendingCall] = set()
        self.calls = PendingCalls()
        self._leave_by = math.inf
        """When leaving has taken long enough: for the releases that are not answered, or for the whole connection."""
        self._farewell: PendingCall | None = None
        self._listeners: dict[int, list[Callable[[], None]]] = {}
        self._stop_reason = ""
        self._exit: Ending | None = None

    # -- any thread ------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> Ending:
        """How the connection ended."""
        return (self._exit or Ending(self._stop_reason)) if self.ended else Ending()

    @property
    def patience(self) -> float:
        """Seconds that letting go of something may take."""
        return max(0.0, min(LEAVING, self._leave_by - time.monotonic()))

    def join_workers(self, deadline: Deadline) -> bool:
        return all(workers.join(deadline) for workers in self.workers)

    def close_copies(self) -> None:
        """In a forked child: the connection is the parent's and goes on."""
        self.pidfd.close()
        self.sock.close()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._launch_peer()
            self._serve_until_end()
        except EndOfStream as error:
            self.note(str(error))
        except ConnectionError as error:
            self.note(f"the connection broke: {error.strerror}")
        except calls.Malformed as error:
            self.break_off(error)
        except Exception as error:
            self.note(f"internal error: {error!r}")
            _log.exception("connection closed")
        finally:
            self.finish()

    def _launch_peer(self) -> None:
        try:
            if self.launch is not None:
                self.pidfd = FdSet((self.launch(),))
            self.launched.set_result(None)
        except Exception as error:
            self.note("the other process could not be started")
            self.launched.set_exception(error)

    def note(self, reason: str) -> None:
        """End the connection; the first reason counts."""
        self._stop_reason = self._stop_reason or reason

    def break_off(self, error: calls.Malformed) -> None:
        """End the connection with a peer that breaks the protocol, and say why: whoever wrote it has to know."""
        self.note(f"malformed message: {error}")
        self.serving.part(self._stop_reason)
        _log.warning("%s is disconnected: malformed message: %s", self.peer, error)

    def _serve_until_end(self) -> None:
        poll = select.poll()
        for fd in (self.sock.fileno(), self.mailbox.fileno(), *self.pidfd.fds):
            poll.register(fd, select.POLLIN)
        was_full = False
        while not self._stop_reason:
            ready = {fd for fd, _ in poll.poll(self._milliseconds())}
            if self.mailbox.fileno() in ready:
                self.mailbox.do_all()
            if self.sock.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self._receive()
            self._send()
            if was_full != self.outbox.is_full:
                was_full = not was_full
                poll.modify(self.sock.fileno(), select.POLLIN | (select.POLLOUT if was_full else 0))
            if not ready.isdisjoint(self.pidfd.fds):
                # Messages from before its death still count.
                with contextlib.suppress(BlockingIOError):
                    while True:
                        self._receive()
                raise EndOfStream("the other process ended")
            self._check_time()

    def _milliseconds(self) -> int | None:
        """Until `_check_time` has something to say."""
        moment = min(self.outbox.next_look, self._leave_by if self._farewell else math.inf, self.hello_by)
        return None if moment == math.inf else math.ceil(max(0.0, moment - time.monotonic()) * 1000)

    def _check_time(self) -> None:
        now = time.monotonic()
        if now >= self.hello_by:
            self._drop("the peer has not said hello")
        if self._farewell is not None and now >= self._leave_by:
            self.note("closed by this side")
        if now >= self.outbox.gives_up_at:
            self._drop("the peer does not read its socket")

    def _drop(self, reason: str) -> None:
        self.note(reason)
        self.serving.part(reason)
        _log.warning("%s is disconnected: %s", self.peer, reason)

    def finish(self) -> None:
        """The end, once: in the owner, or in `close` if that never started."""
        if self.ended:
            return
        if not self.closed and (how := _ending(self.exit_status())):
            self._exit = replace(how, reason=self._stop_reason) if self._stop_reason.startswith(TOLD) else how
        self.ended = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)  # ends it for the peer even if forked children hold copies
        for workers in self.workers:
            workers.stop()
        self.outbox.end()
        self.calls.end(self._failure)
        self.mailbox.end()
        while self._listeners:
            self._tell(self._listeners.popitem()[1])
        if self.on_end is not None:
            try:
                self.on_end(self.patience)
            except Exception:
                _log.exception("cleaning up after a connection failed")
        self.join_workers(Deadline.after(WORKER_PATIENCE))
        self.pidfd.close()
        self.outbox.close()

    def _failure(self, pending: PendingCall) -> NNBurstError:
        message = f"{pending.call.name} was not answered: {self.ending.reason}"
        return BadState(message) if self.closed else self.ending.error(message)

    # -- posted jobs, for the methods of `Connection` ----------------------------------------------------------------

    def leave(self, farewell: Message | None) -> None:
        if self.ended or self._farewell is not None:
            return
        if farewell is None:
            self.note("closed by this side")
            return
        self._leave_by = min(self._leave_by, time.monotonic() + LEAVING)
        self._farewell = PendingCall(farewell)
        self._farewell.on_done = partial(self.note, "closed by this side")
        self.begin(self._farewell)

    def link(self, entry: list[Callable[[], None]]) -> None:
        if self.ended:
            self._tell(entry)
        else:
            self._listeners[id(entry)] = entry

    def unlink(self, entry: list[Callable[[], None]]) -> None:
        self._listeners.pop(id(entry), None)

    def _tell(self, entry: list[Callable[[], None]]) -> None:
        try:
            listener = entry.pop()
        except IndexError:  # unlinked
            return
        try:
            listener()
        except Exception:
            _log.exception("a death listener failed")

    def begin(self, pending: PendingCall, *, is_attended: bool = True) -> None:
        if self.ended:
            pending.fail(self._failure(pending))
            return
        try:
            pending.body = calls.encode_request(pending.message)
            self.calls.add(pending, is_attended=is_attended)
        except NNBurstError as error:
            pending.fail(error)

    def release(self, pending: PendingCall) -> None:
        if not self.releases and self._farewell is None:
            self._leave_by = time.monotonic() + LEAVING
        self.releases.add(pending)
        pending.on_done = partial(self._released, pending)
        self.begin(pending)

    def _released(self, pending: PendingCall) -> None:
        self.releases.discard(pending)
        if not self.releases and self._farewell is None:
            self._leave_by = math.inf

    def withdraw(self, pending: PendingCall) -> None:
        """Its caller has given up. A request that was sent keeps its place until it is answered."""
        if not pending.is_sent:
            self.calls.remove(pending)
            if pending.outgoing is not None:
                self.outbox.remove(pending.outgoing)
            pending.fds.close()

    # -- the owner: sending --------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send the queued messages, as far as the socket takes them."""
        for pending in self.calls.admit():
            try:
                self.outbox.put(pending.pack())
            except NNBurstError as error:
                self._fail(pending, error)
        while (failed := self.outbox.send()) is not None:
            self._cannot_send(*failed)

    def _cannot_send(self, message: Outgoing, error: NNBurstError) -> None:
        message.close()
        if message.kind is Kind.REQUEST:
            pending = self.calls.find(message.number)
            if pending is not None:
                self._fail(pending, error)
        elif message.kind is Kind.REPLY:  # e.g. too many descriptors in flight: say so without them
            self.outbox.put_first(refusal(message.number, error))
        else:
            self.note(f"an answer cannot be sent: {error}")
            self.outbox.clear()

    def _fail(self, pending: PendingCall, error: NNBurstError) -> None:
        self.calls.remove(pending)
        pending.fail(error)

    # -- the owner: receiving ------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            self._dispatch(receive(self.sock))
        except DescriptorsLost as lost:  # this process has as many as it may; that is not the peer's doing
            error = ResourceExhausted(f"descriptors of a message were lost: {meaning(errno.EMFILE)}")
            if lost.kind is Kind.REQUEST:
                self.serving.refuse(lost.call_id, error)
            elif (pending := self.calls.find(lost.call_id)) is not None:
                self._fail(pending, error)

    def _dispatch(self, packet: Packet) -> None:
        try:
            if packet.kind is Kind.REQUEST:
                self.serving.accept(packet)
            else:
                self._complete(packet)
        except BaseException:
            packet.fds.close()
            raise

    def _complete(self, packet: Packet) -> None:
        pending = self.calls.find(packet.call_id)
        if pending is None:
            raise calls.Malformed(f"a reply to call {packet.call_id}, which was not made")
        reply: Message | None = None
        error: NNBurstError | None = None
        if packet.kind is Kind.ERROR:
            answer = calls.decode_error(packet.body)
            error = error_for(ErrorStatus(answer.status), answer.message, answer.output_shapes)
            if self.closed and isinstance(error, GeneralFailure):  # it came after the farewell
                error = BadState(f"{pending.call.name}: the connection to the service is closed")
            wanted = 0
        else:
            reply = calls.decode_reply(pending.call, packet.body)
            wanted = pending.call.reply_fds(reply)
        if wanted != len(packet.fds):
            raise calls.Malformed(f"a reply needs {wanted} descriptors, {len(packet.fds)} came")
        self.calls.remove(pending)
        pending.finish(reply, error, packet.fds)
