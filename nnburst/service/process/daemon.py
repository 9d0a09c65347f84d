"""The loop of a service that programs share: takes connections from a socket until it is told to stop."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from ..._core.errno import meaning
from ..._core.fds import close_fds
from ...errors import BadState, DeviceUnavailable, NNBurstError
from ..host.host import ServiceHost
from ..wire.packets import EndOfStream, Kind, Outgoing, receive_number
from ..wire.protocol import Malformed, encode, error_reply
from .discovery import Peer, peer_of, peer_pidfd

_log = logging.getLogger(__name__)
_FIRST_ACTIVATED_FD = 3
_MOST_REFUSALS = 16
"""Peers at a time that are told why they are refused; others are only disconnected."""
_REFUSAL_PATIENCE = 2.0
"""Seconds that a refused peer has to say hello, so that it can be answered."""
_HELLO_PATIENCE = 10.0
"""Seconds that a peer that is served has to say hello. How many a user may have, its quota of connections says."""
_STARVED = 0.1
"""Seconds without descriptors or threads before connections are taken again."""


class AccessPolicy(Struct, frozen=True):
    """Which users a service serves: its own, root, and those named here.

    Attributes:
        uids: Other users.
        gids: Groups, any member of which is served.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @property
    def wider(self) -> bool:
        """Whether users other than the service's own may connect."""
        return bool(self.uids or self.gids)

    def admits(self, peer: Peer) -> bool:
        """Whether a peer is served."""
        return peer.uid in (0, os.geteuid()) or peer.uid in self.uids or not self.gids.isdisjoint(peer.groups)


@dataclass(slots=True)
class _Refused:
    sock: socket.socket
    reason: str
    until: float = field(default_factory=lambda: time.monotonic() + _REFUSAL_PATIENCE)


class Daemon:
    """Serves every connection that a listening socket brings, from the main thread of a process.

    SIGTERM and SIGINT end `run` in order: what runs is finished and clients are told. SIGHUP calls `reload`. Between
    events it sleeps without a timer.

    Args:
        host: What is served; closed by `run`.
        listeners: Listening SOCK_SEQPACKET sockets; stay the caller's.
        policy: Who is served.
        idle_exit: Seconds without any connection after which `run` returns; None never.
        reload: Called for SIGHUP, in the main thread; what it raises is logged.
        finish: Called when no more clients are accepted, before the host is closed: clients that this service runs
            itself end first.
    """

    def __init__(
        self,
        host: ServiceHost,
        listeners: Sequence[socket.socket],
        *,
        policy: AccessPolicy | None = None,
        idle_exit: float | None = None,
        reload: Callable[[], None] | None = None,
        finish: Callable[[], None] = lambda: None,
    ) -> None:
        self._host = host
        self._listeners = {listener.fileno(): listener for listener in listeners}
        for listener in listeners:
            listener.setblocking(False)  # a connection may be gone before it is taken
        self._policy = policy or AccessPolicy()
        self._idle_exit = idle_exit
        self._reload = reload
        self._finish = finish
        self._refused: dict[int, _Refused] = {}
        self._starved_until = 0.0
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop_reason = ""

    def stop(self, reason: str) -> None:
        """Have `run` return. Any thread; also a signal handler."""
        self._stop_reason = self._stop_reason or reason
        self._poke()

    def run(self, when_ready: Callable[[], None] = lambda: None) -> str:
        """Serve until stopped, then close the host.

        Args:
            when_ready: Called once signals are handled: who hears that the service is ready may stop it at once.

        Returns:
            Why it ended.
        """
        unlink = self._host.when_idle(self._poke)
        with contextlib.ExitStack() as ending:
            ending.callback(os.close, self._wake)
            ending.callback(os.close, self._woken)
            ending.enter_context(_signals(self._woken))  # until all has ended: a second SIGTERM changes nothing
            ending.callback(lambda: self._host.close(self._stop_reason))
            ending.callback(self._disconnect_refused)
            ending.callback(unlink)
            ending.callback(self._finish)
            when_ready()
            self._loop()
        return self._stop_reason

    def _disconnect_refused(self) -> None:
        for refused in self._refused.values():
            _disconnect(refused.sock)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway
            os.write(self._woken, b"\0")

    # ---- the loop --------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        idle_since: float | None = time.monotonic()
        while not self._stop_reason:
            if self._host.connections:
                idle_since = None
            elif idle_since is None:
                idle_since = time.monotonic()
            moment = self._next_moment(idle_since)
            now = time.monotonic()
            ready = self._poll(None if moment is None else max(0.0, moment - now))
            self._handle_signals(ready)
            for fd in ready:
                if fd in self._listeners:
                    self._accept(self._listeners[fd])
                elif fd in self._refused:
                    self._explain(fd)
            self._drop_late_refusals()
            idle_for = 0.0 if idle_since is None else time.monotonic() - idle_since
            if self._idle_exit is not None and not self._host.connections and idle_for >= self._idle_exit > 0:
                self._stop_reason = self._stop_reason or f"no client for {self._idle_exit:g} s"

    def _next_moment(self, idle_since: float | None) -> float | None:
        moments = [refused.until for refused in self._refused.values()]
        if self._starved_until > time.monotonic():
            moments.append(self._starved_until)
        if self._idle_exit is not None and idle_since is not None:
            moments.append(idle_since + self._idle_exit)
        return min(moments, default=None)

    def _poll(self, timeout: float | None) -> list[int]:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        if time.monotonic() >= self._starved_until:
            for fd in self._listeners:
                poll.register(fd, select.POLLIN)
        for fd in self._refused:
            poll.register(fd, select.POLLIN)
        return [fd for fd, _ in poll.poll(None if timeout is None else int(timeout * 1000) + 1)]

    def _handle_signals(self, ready: list[int]) -> None:
        if self._wake not in ready:
            return
        with contextlib.suppress(BlockingIOError):
            numbers = set(os.read(self._wake, 4096))
            if numbers & {signal.SIGTERM, signal.SIGINT}:
                self._stop_reason = self._stop_reason or "it was told to stop"
            if signal.SIGHUP in numbers and self._reload is not None:
                try:
                    self._reload()
                except Exception:
                    _log.exception("reloading failed; what was served before is still served")

    # ---- connections -----------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            _log.warning("no connection can be taken: %s", meaning(error.errno))
            self._starved_until = time.monotonic() + _STARVED
            return
        peer = peer_of(sock)
        if not self._policy.admits(peer):
            self._refuse(sock, f"this service does not serve user {peer.uid}: start it with --allow-uid {peer.uid}")
            return
        try:
            self._host.serve(sock, peer_pidfd=peer_pidfd(sock), hello_timeout=_HELLO_PATIENCE)
        except BadState:
            _disconnect(sock)
        except NNBurstError as error:
            _log.warning("process %d of user %d is refused: %s", peer.pid, peer.uid, error)
            self._refuse(sock, str(error))

    def _refuse(self, sock: socket.socket, reason: str) -> None:
        """Answer the peer's hello with the reason, if it says hello soon."""
        if sock.fileno() < 0 or len(self._refused) >= _MOST_REFUSALS:
            _disconnect(sock)
            return
        sock.setblocking(False)
        self._refused[sock.fileno()] = _Refused(sock, reason)

    def _explain(self, fd: int) -> None:
        refused = self._refused.pop(fd)
        try:
            number = receive_number(refused.sock)
            answer = Outgoing(Kind.ERROR, number, encode(error_reply(DeviceUnavailable(refused.reason))))
            try:
                answer.try_send(refused.sock)
            finally:
                answer.close()
        except (NNBurstError, Malformed, EndOfStream, OSError):
            return  # it is disconnected without an answer
        finally:
            _disconnect(refused.sock)

    def _drop_late_refusals(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, refused in self._refused.items() if refused.until <= now]:
            _disconnect(self._refused.pop(fd).sock)


def _disconnect(sock: socket.socket) -> None:
    """Close a connection that is not served, not in place: what its peer has sent may linger, and ends with it."""
    if sock.fileno() >= 0:
        close_fds([sock.detach()])


@contextlib.contextmanager
def _signals(wake_fd: int) -> Iterator[None]:
    """Have SIGTERM, SIGINT and SIGHUP written to a descriptor, by number, instead of raising; also blocked ones."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    old_fd = signal.set_wakeup_fd(wake_fd, warn_on_full_buffer=False)
    old_mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)
        signal.set_wakeup_fd(old_fd)
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- systemd ---------------------------------------------------------------------------------------------------


def activated_sockets() -> list[socket.socket]:
    """Take over the listening sockets that a service manager passed (``LISTEN_FDS``), and forget the variables.

    Raises:
        BadState: One of them is not a listening SOCK_SEQPACKET socket.
    """
    pid, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or not count.isdigit():
        return []
    sockets = []
    for fd in range(_FIRST_ACTIVATED_FD, _FIRST_ACTIVATED_FD + int(count)):
        os.set_inheritable(fd, False)
        sock = socket.socket(fileno=fd)
        is_listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if sock.family != socket.AF_UNIX or sock.type != socket.SOCK_SEQPACKET or not is_listening:
            raise BadState(
                f"descriptor {fd} from the service manager is not a listening Unix SOCK_SEQPACKET socket: use "
                "ListenSequentialPacket= in the socket unit"
            )
        sockets.append(sock)
    return sockets


def tell_manager() -> None:
    """Say ``READY=1`` to the service manager (``NOTIFY_SOCKET``), if there is one.

    Not in a sandbox: a socket that takes messages for other addresses, too, would lead out of it.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(b"READY=1", address)
