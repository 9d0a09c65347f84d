"""Serving of the peer's calls: each is decoded, carried out in a worker thread, and answered."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from ..._core.deadline import Deadline
from ..._core.threads import start_daemon
from ...errors import DeadObject, GeneralFailure, NNBurstError, ResourceExhausted
from ..wire import protocol as calls
from ..wire.packets import FdBundle, Kind, Outgoing, Packet
from ..wire.protocol import MAX_INLINE, Message
from .mailbox import Mailbox
from .outbox import Outbox
from .pending import MAX_PENDING

_log = logging.getLogger(__name__)
_MAX_QUEUED_FDS = 2048
_END = -1
"""Rank of the queue entry that ends a thread. All jobs have a higher rank."""


class Workers:
    """Up to `limit` daemon threads that run jobs. They start as needed. Only the connection's owner uses this object.

    The waiting job of the highest rank runs next; jobs of equal rank run in order. A job that never returns does not
    keep the process alive.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None], under_way: int, rank: int = 0) -> None:
        """Queue a job.

        Args:
            under_way: Number of jobs that are queued or running, including this one.
            rank: Rank of the job, 0 or more. Jobs of the highest rank run first.

        Raises:
            ResourceExhausted: There is no worker thread, and the system cannot start one. The job is dropped.
        """
        if len(self._threads) < min(under_way, self._limit):
            try:
                self._threads.append(start_daemon(self._run, name=f"{self._name}-{len(self._threads)}", what="a call"))
            except ResourceExhausted:  # a running thread will do the job later
                if not self._threads:
                    raise
        self._put(rank, job)

    def stop(self) -> None:
        """Drop the jobs that no thread has started. Each thread finishes its current job and ends."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._put(_END, None)

    def join(self, deadline: Deadline) -> bool:
        """Wait until all threads but the calling one have ended. Return False at the deadline."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left())
                if thread.is_alive():
                    return False
        return True

    def _put(self, rank: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((-rank, next(self._numbers), job))

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                job()
            except BaseException:  # SystemExit is caught, too: this may be the only thread for the next job
                _log.exception("a job of %s failed", self._name)
            job = None  # an idle thread must not keep objects of its last job alive


class ConnectionEnds(DeadObject):
    """The error of a call whose connection is ending. The call gets no answer."""


class ServedCalls:
    """Counter of the peer's calls in progress, with a limit, so that messages cannot fill this process's memory."""

    def __init__(self) -> None:
        self.count = self._fds = 0
        self._has_long = False
        self._lock = threading.Lock()

    def begin(self, n_fds: int = 0, is_long: bool = False, waiting: int = 0) -> None:
        """Count a received request.

        Args:
            n_fds: Descriptors that came with the request.
            is_long: True if the request did not fit into a datagram.
            waiting: Number of answers that wait to be sent.

        Raises:
            Malformed: The peer has more calls in progress than any correct peer.
        """
        with self._lock:
            if self.count + waiting >= 2 * MAX_PENDING or self._fds + n_fds > _MAX_QUEUED_FDS:
                raise calls.Malformed("too many calls at once")
            if is_long and self._has_long:
                raise calls.Malformed("two long calls at once")
            self.count += 1
            self._fds += n_fds
            self._has_long = self._has_long or is_long

    def end(self, n_fds: int = 0, is_long: bool = False) -> None:
        """Stop counting a request whose answer is ready. Its message had `n_fds` descriptors, or was long."""
        with self._lock:
            self.count -= 1
            self._fds -= n_fds
            self._has_long = self._has_long and not is_long


class Serving:
    """The server of one connection's calls. The connection's owner passes each call to `accept`.

    Args:
        side: The end that serves the calls.
        handler: Object with the methods that `CALLS` names for this side. Optional methods: `admit(call)` runs before
            each call, and `rank(message)` orders waiting calls. `charge_answer(nbytes, n_fds)` charges an answer, and
            returns a function that releases the charge.
        workers: Two groups of threads: for calls that do not compute, and for calls that compute.
        outbox: Queue of the answers.
        mailbox: The owner's mailbox.
        break_off: Function that ends the connection for a given reason.
    """

    def __init__(
        self,
        side: calls.Side,
        handler: object,
        workers: Sequence[Workers],
        outbox: Outbox,
        mailbox: Mailbox,
        break_off: Callable[[str], None],
    ) -> None:
        self._side = side
        self._handlers = {call: getattr(handler, call.handler) for call in calls.CALLS if call.side is side}
        self._admit: Callable[[calls.Call], None] | None = getattr(handler, "admit", None)
        self._rank: Callable[[Message], int] = getattr(handler, "rank", lambda message: 0)
        self._charge: Callable[[int, int], Callable[[], None]] | None = getattr(handler, "charge_answer", None)
        self._workers = workers
        self._outbox = outbox
        self._mailbox = mailbox
        self._break_off = break_off
        self._served = ServedCalls()

    # -- the owner -----------------------------------------------------------------------------------------------------

    def accept(self, packet: Packet) -> None:
        """Pass a request to a worker thread.

        Raises:
            Malformed: The message is not a request, or there are too many requests.
        """
        call, message = calls.decode_request(packet.body, self._side)
        number, fds = packet.call_id, packet.fds
        if call.request_fds(message) != len(fds):
            raise calls.Malformed(f"{call.name} needs {call.request_fds(message)} descriptors, {len(fds)} came")
        n_fds, is_long = len(fds), packet.is_long
        self._served.begin(n_fds, is_long, self._outbox.answers)

        def job() -> None:
            with fds:
                answer = self._serve(call, message, fds)
            self._served.end(n_fds, is_long)  # the call ends before the peer gets the answer and sends another
            if answer is not None:
                self._answer(number, *answer)

        try:
            self._workers[call.computes].submit(job, self._served.count, self._rank(message))
        except ResourceExhausted as error:
            fds.close()
            self._served.end(n_fds, is_long)
            self._outbox.put(refusal(number, error))

    def refuse(self, number: int, error: NNBurstError) -> None:
        """Send an error for a request whose descriptors were lost."""
        self._served.begin(waiting=self._outbox.answers)
        self._served.end()
        self._outbox.put(refusal(number, error))

    def part(self, reason: str) -> None:
        """Tell a client why it is disconnected, if its socket has room."""
        if self._side is calls.Side.SERVICE:
            self._outbox.send_now(Outgoing(Kind.REQUEST, 0, calls.encode(calls.EndNotice(calls.sendable(reason)))))

    # -- the workers ---------------------------------------------------------------------------------------------------

    def _serve(self, call: calls.Call, message: Message, received: FdBundle) -> tuple[Kind, bytes, FdBundle] | None:
        """Serve a call, and return the answer, which owns its descriptors; None if the connection has to end."""
        fds = FdBundle()
        try:
            if self._admit is not None:
                self._admit(call)
            answer = self._handlers[call](message, received)
            reply, fds = answer if isinstance(answer, tuple) else (answer, fds)
            return Kind.REPLY, calls.encode_reply(call, reply), fds
        except calls.Malformed as error:
            self._mailbox.post(partial(self._break_off, f"malformed message: {error}"))
            return None
        except ConnectionEnds:
            return None
        except NNBurstError as error:
            failure = error
        except BaseException as error:  # SystemExit of a function is answered, too: the peer must not wait for ever
            _log.exception("%s failed", call.name)
            failure = GeneralFailure(f"{call.name} failed: {type(error).__name__}: {error}")
        fds.close()
        return Kind.ERROR, calls.encode(calls.error_reply(failure)), FdBundle()

    def _answer(self, number: int, kind: Kind, body: bytes, fds: FdBundle) -> None:
        """Send an answer, unless `number` is 0. If a quota counts the answer, wait until it is received or dropped."""
        if not number:
            fds.close()
            return
        is_long = len(body) > MAX_INLINE
        if not (fds or is_long) and self._outbox.send_now(Outgoing(kind, number, body)):
            return
        received, held = threading.Event(), ExitStack()
        held.callback(received.set)
        try:
            if self._charge is not None:
                held.callback(self._charge(len(body), len(fds) + is_long))
            message = Outgoing(kind, number, body, fds)
            message.release = None if self._charge is None else held.close
        except NNBurstError as error:
            held.close()
            fds.close()
            message = refusal(number, error)
        self._mailbox.post(partial(self._outbox.put, message))
        if message.release is not None:
            received.wait()


def refusal(number: int, error: NNBurstError) -> Outgoing:
    return Outgoing(Kind.ERROR, number, calls.encode(calls.error_reply(error)))
