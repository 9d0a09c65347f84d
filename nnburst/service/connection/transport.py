"""A connection: calls in both directions over one SOCK_SEQPACKET socket, and the peer's death.

Any thread calls; one thread owns the connection (`owner`; why: see `mailbox`).
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..._core.deadline import Deadline
from ..._core.fds import FdSet
from ..._core.leaving import LEAVING, abandon_when_forked
from ..._core.threads import start
from ...errors import BadState, Ending, NNBurstError
from ..wire import protocol as calls
from ..wire.packets import FdBundle
from ..wire.values import Message
from .mailbox import Mailbox
from .outbox import Outbox
from .owner import WORKER_PATIENCE, Owner
from .pending import PendingCall
from .serving import Serving
from .workers import Workers

SEND_TIMEOUT = 10.0
"""Seconds after which a peer that does not read its answers is given up."""


class Connection:
    """One end of a connection. Start it with `start`, end it with `close`.

    Args:
        sock: A connected SOCK_SEQPACKET socket; the connection owns it.
        side: Which calls this end serves.
        handler: See `Serving`.
        peer_pidfd: pidfd of the peer's process, if there is one. The connection owns it.
        launch: Starts the peer's process and returns its pidfd, in the thread that owns the connection: the kernel ends
            a child with the thread that started it, and this one outlives it.
        workers: Calls that are served at the same time, of those that compute and of the others.
        send_timeout: Seconds after which a peer that does not read its answers is given up.
        hello_timeout: Seconds that the peer has to say hello; None for no limit.
        exit_status: Called when the peer has ended the connection: returns its exit status, or minus the signal that
            has killed it; None if it lives on, or that is not known.
        on_end: Called once, after all death listeners, with the seconds that it may take.
        peer: It is, for the log.
    """

    def __init__(
        self,
        sock: socket.socket,
        side: calls.Side,
        handler: object,
        *,
        peer_pidfd: FdSet | None = None,
        launch: Callable[[], int] | None = None,
        workers: int = 4,
        send_timeout: float = SEND_TIMEOUT,
        hello_timeout: float | None = None,
        exit_status: Callable[[], int | None] = lambda: None,
        on_end: Callable[[float], None] | None = None,
        name: str = "nnburst",
        peer: str = "the peer",
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._mailbox = Mailbox()
        self._outbox = Outbox(sock, send_timeout)
        pools = tuple(Workers(workers, f"{name}-{kind}") for kind in ("worker", "computing"))
        self._serving = Serving(side, handler, pools, self._outbox, self._mailbox, self._break_off)
        hello_by = math.inf if hello_timeout is None else time.monotonic() + hello_timeout
        pidfd = peer_pidfd or FdSet()
        self._owner = Owner(
            sock, pidfd, self._mailbox, self._outbox, pools, self._serving, launch, hello_by, exit_status, on_end, peer
        )
        self._thread = threading.Thread(target=self._owner.run, name=f"{name}-reader", daemon=True)
        self._abandoned = False
        abandon_when_forked(self)

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Launch the peer, if that is to be done, and start to read. To be called once.

        Raises:
            ResourceExhausted: The system has no thread for it; the connection is to be closed.
            Exception: What `launch` raised; likewise.
        """
        start(self._thread, "a connection")
        self._owner.launched.result()

    def greet(self) -> None:
        """The peer has said hello."""
        self._owner.hello_by = math.inf

    @property
    def alive(self) -> bool:
        """False once the connection has ended, is closed, or in a forked child."""
        return not (self._owner.ended or self._owner.closed or self._abandoned)

    @property
    def end_reason(self) -> str:
        """Why the connection ended, empty before."""
        return self.ending.reason

    @property
    def ending(self) -> Ending:
        """How the connection ended."""
        return self._owner.ending

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Wait until the connection has ended and `on_end` has returned."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self, reason: str) -> None:
        """End the connection without waiting. The first reason counts."""
        self._mailbox.post(partial(self._owner.note, reason))

    def _break_off(self, error: calls.Malformed) -> None:
        self._mailbox.post(partial(self._owner.break_off, error))

    def hang_up(self, farewell: Message | None = None) -> None:
        """End the connection from anywhere, without waiting; nothing can be called from now on.

        Args:
            farewell: A last call; the end comes with its answer, or when leaving has taken long enough.
        """
        if not self._abandoned:
            self._owner.closed = True
            self._mailbox.post(partial(self._owner.leave, farewell))

    def close(self, timeout: float | None = None, farewell: Message | None = None) -> bool:
        """`hang_up`, and wait for the threads. Idempotent. An interrupt ends the waiting, not the leaving.

        Returns:
            False if a thread (a handler or listener that does not return) was still busy after `timeout` seconds, by
            default a little more than leaving may take.
        """
        if self._abandoned:
            return True
        self.hang_up(farewell)
        if self._thread.ident is None:
            self._owner.note("closed by this side")
            self._owner.finish()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        deadline = Deadline.after(LEAVING + WORKER_PATIENCE if timeout is None else timeout)
        return self.wait_ended(deadline.left()) and self._owner.join_workers(deadline)

    def linger(self) -> None:
        """Wait, in `on_end`, until nothing is left of what counts for the peer, or this side closes. See `Outbox`."""
        self._outbox.linger(lambda: self._owner.closed)

    def abandon(self) -> None:
        """In a forked child: close the copies of the descriptors; the connection is the parent's and goes on."""
        self._abandoned = True
        self._mailbox.abandon()
        self._owner.close_copies()

    def check_usable(self) -> None:
        """Raise what a call would raise now.

        Raises:
            BadState: Closed, or inherited by a forked child.
            DeadObject: The peer is gone.
        """
        if self._abandoned:
            raise BadState(
                "this connection to a service was inherited through fork() and belongs to the parent process: "
                "start or connect to a service in the child"
            )
        if self._owner.closed:
            raise BadState("the connection to the service is closed")
        if self._owner.ended:
            raise self.ending.error(self.end_reason)

    def link_to_death(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` once when the connection ends, at once if it has ended. Returns a function that unlinks.

        It runs in a thread of the connection and is held strongly until it was called or unlinked.
        """
        if self._abandoned:
            self.check_usable()
        entry = [listener]
        self._mailbox.post(partial(self._owner.link, entry))

        def unlink() -> None:
            entry.clear()
            if not self._abandoned:
                self._mailbox.post(partial(self._owner.unlink, entry))

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
            timeout: Seconds for everything, None for no limit but that of `Deadline.call`.
            on_late: Called with the reply (in the owner) if it comes after this call gave up.

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
        limit = Deadline.after(timeout).left()
        pending = PendingCall(message, FdBundle.duplicate(fds), on_late)
        try:
            self._mailbox.post(partial(self._owner.begin, pending))
            answered = pending.wait(limit)
        except BaseException:  # of a signal handler: the reply has no taker now
            if not self._give_up(pending):
                pending.discard()
            raise
        if not answered and self._give_up(pending):
            raise pending.missed(limit, has_room=self._owner.calls.has_room_for(pending))
        return pending.result()

    def _give_up(self, pending: PendingCall) -> bool:
        given_up = pending.give_up()
        if given_up:
            self._mailbox.post(partial(self._owner.withdraw, pending))
        return given_up

    def release(self, message: Message) -> None:
        """Have the other side let go of something, and wait for its answer as long as leaving may take.

        Raises as `call`; it is let go of later then, or with the connection.
        """
        self.check_usable()
        pending = PendingCall(message)
        limit = Deadline.after(self._owner.patience).left()
        self._mailbox.post(partial(self._owner.release, pending))
        if not pending.wait(limit) and pending.give_up():
            raise pending.missed(limit, has_room=self._owner.calls.has_room_for(pending))
        pending.result()

    def forget(
        self,
        message: Message,
        fds: Sequence[int] = (),
        on_failure: Callable[[NNBurstError], None] = lambda error: None,
    ) -> None:
        """Make a call whose answer nobody needs, without waiting. From anywhere, without descriptors a finaliser, too.

        Args:
            message: Mostly to let go of something.
            fds: Descriptors that go with it; they stay the caller's.
            on_failure: Called (in the owner) with what comes instead of an answer.

        Raises:
            ResourceExhausted: There are no copies of them to be had.
        """
        if self.alive:
            pending = PendingCall(message, FdBundle.duplicate(fds) if fds else None, on_failure=on_failure)
            pending.give_up()
            self._mailbox.post(partial(self._owner.begin, pending, is_attended=False))
