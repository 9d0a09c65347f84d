"""The broker of a shared service: it accepts connections and hands them to workers."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import math
import os
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from msgspec import Struct

from ..._core.errno import meaning
from ..._core.fds import close_fds
from ..._core.leaving import LEAVING
from ...errors import BadState, DeadObject, GeneralFailure, InvalidArgument, NNBurstError, ResourceExhausted
from ..host.quotas import Charge, Ledger
from ..wire import protocol as calls
from ..wire.packets import EndOfStream, Kind, peek_first, unread_bytes
from .discovery import Peer, peer_of
from .workers import AcceptedClient, WorkerPool

_log = logging.getLogger(__name__)
_FIRST_ACTIVATED_FD = 3
_MOST_REFUSALS = 16
"""Maximum number of refused peers that are told the reason at the same time; others are only disconnected."""
_HELLO_PATIENCE = 10.0
"""Seconds within which an accepted peer must send hello."""
_NEW = 10.0
"""Seconds that a connection counts as new in its user's quota."""
_UNREAD = 1.0
"""Seconds between two checks whether a client has read its last message."""
_STARVED = 0.1
"""Seconds until the next try to accept connections, after descriptors have run out."""


class AccessPolicy(Struct, frozen=True):
    """The users that a service serves, besides its own user and root.

    Attributes:
        uids: Ids of other users.
        gids: Ids of groups whose members are served.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    @property
    def wider(self) -> bool:
        """True if users other than the service's user and root may connect."""
        return bool(self.uids or self.gids)

    def admits(self, peer: Peer) -> bool:
        return peer.uid in (0, os.geteuid()) or peer.uid in self.uids or not self.gids.isdisjoint(peer.groups)


class Broker:
    """The process that accepts a shared service's clients and hands them to workers, which run models.

    The broker reads only the first message of a client. After SIGTERM or SIGINT, the workers finish their
    runs and tell the clients the reason, and `run` returns. SIGHUP reloads the named models.

    Args:
        listeners: Listening SOCK_SEQPACKET sockets; the caller keeps and closes them.
        workers: Function that returns the `WorkerPool` of this broker.
        policy: The users that are served.
        idle_exit: Seconds without any connection after which `run` returns; None for no such limit.

    Attributes:
        workers: The worker processes.

    Raises:
        NNBurstError: The shared worker does not start, or a model cannot be published.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        workers: Callable[[Broker], WorkerPool],
        *,
        policy: AccessPolicy | None = None,
        idle_exit: float | None = None,
    ) -> None:
        self._listeners = {listener.fileno(): listener for listener in listeners}
        for listener in listeners:
            listener.setblocking(False)  # a connection may end before it is accepted
        self._policy = policy or AccessPolicy()
        self._idle_exit = idle_exit
        self._changes = ThreadPoolExecutor(1, "nnburst-models")
        self._numbers = itertools.count(1)
        self._users: weakref.WeakValueDictionary[int, Ledger] = weakref.WeakValueDictionary()
        self._awaited: dict[int, AcceptedClient] = {}
        """By descriptor: clients that have not sent `Hello` yet, and dismissed clients that are still connected."""
        self._new: deque[tuple[float, Charge]] = deque()
        """(time, charge) of each recent connection."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._wake, self._woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stop_reason = ""
        self.workers = workers(self)

    def stop(self, reason: str) -> None:
        """Make `run` return. Any thread or signal handler may call it."""
        self._stop_reason = self._stop_reason or reason
        self._wake_loop()

    def run(
        self,
        when_ready: Callable[[], None] = lambda: None,
        *,
        change: Callable[[str | None, bool], None] = lambda name, unload: None,
        finish: Callable[[], None] = lambda: None,
    ) -> str:
        """Serve until `stop` or a signal, then end the workers.

        Args:
            when_ready: Called once signals are handled, to report that the service is ready.
            change: Function (name, unload) that reloads or unloads a named model; the name None reloads all models. It
                runs in a separate thread.
            finish: Called before the workers end, to close the clients in this process, such as the gateway.

        Returns:
            The reason why the service ended.
        """
        self._change = change
        with contextlib.ExitStack() as ending:
            ending.enter_context(_signals(self._woken))  # they stay until the end: a second SIGTERM has no effect
            ending.callback(self._changes.shutdown)
            ending.callback(self.close)
            ending.callback(finish)
            ending.callback(self._changes.shutdown, wait=False, cancel_futures=True)
            self._changes.submit(int)  # this starts the thread
            when_ready()
            self._loop()
        return self._stop_reason

    def post(self, job: Callable[[], None]) -> None:
        """Give the main thread a job. Any thread may call it."""
        self._jobs.append(job)
        self._wake_loop()

    def _wake_loop(self) -> None:
        with contextlib.suppress(OSError):  # the pipe is full, so the main thread will wake up anyway
            os.write(self._woken, b"\0")

    # ---- the loop --------------------------------------------------------------------------------------------

    @property
    def _is_used(self) -> bool:
        return bool(self._awaited) or any(worker.clients for worker in self.workers)

    def _loop(self) -> None:
        idle_since = time.monotonic()
        while not self._stop_reason:
            next_look = self.workers.look()
            if self._is_used:
                idle_since = math.inf
            elif idle_since == math.inf:
                idle_since = time.monotonic()
            moment = min(next_look, self._next_moment(idle_since))
            ready = self._poll(None if moment == math.inf else max(0.0, moment - time.monotonic()))
            self._handle_signals(ready)
            for _ in range(len(self._jobs)):  # only jobs that are queued now are done: a worker could post without end
                self._jobs.popleft()()
            for fd in ready:
                if fd in self._listeners:
                    self._accept(self._listeners[fd])
                elif fd in self._awaited:
                    self._handle_first_message(self._awaited.pop(fd))
            self._drop_late()
            if not self._is_used and self._idle_exit and time.monotonic() >= idle_since + self._idle_exit:
                self._stop_reason = self._stop_reason or f"no client for {self._idle_exit:g} s"

    def _next_moment(self, idle_since: float) -> float:
        moments = [client.until for client in self._awaited.values()]
        if self._idle_exit is not None:
            moments.append(idle_since + self._idle_exit)
        return min(moments, default=math.inf)

    def _poll(self, timeout: float | None) -> list[int]:
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        for fd in self._listeners:
            poll.register(fd, select.POLLIN)
        for fd, client in self._awaited.items():
            # A dismissed client is not read any more: its messages could contain sockets whose close blocks.
            poll.register(fd, 0 if client.is_dismissed else select.POLLIN)
        return [fd for fd, _ in poll.poll(None if timeout is None else int(timeout * 1000) + 1)]

    def _handle_signals(self, ready: list[int]) -> None:
        if self._wake not in ready:
            return
        with contextlib.suppress(BlockingIOError):
            numbers = set(os.read(self._wake, 4096))
            if numbers & {signal.SIGTERM, signal.SIGINT}:
                self._stop_reason = self._stop_reason or "it was told to stop"
            if signal.SIGHUP in numbers:
                self.reload_models()

    def reload_models(self) -> None:
        """Let another thread reload all named models whose files have changed."""

        def reload() -> None:
            try:
                self._change(None, False)
            except DeadObject:  # the next worker loads the models again
                pass
            except Exception:
                _log.exception("reloading failed; what was served before is still served")

        self._changes.submit(reload)

    # ---- clients ---------------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                raise
            _log.warning("no connection can be taken: %s", meaning(error.errno))
            time.sleep(_STARVED)
            return
        sock.setblocking(False)
        peer = peer_of(sock)
        user = self._users.setdefault(peer.uid, Ledger(self.workers.quotas, f"user {peer.uid}"))
        client = AcceptedClient(next(self._numbers), sock, peer, user.charge())
        if not self._policy.admits(peer):
            self.refuse(client, f"this service does not serve user {peer.uid}: start it with --allow-uid {peer.uid}")
            return
        try:
            client.charge = self._charge_connection(user, peer.uid)
        except ResourceExhausted as error:
            self.refuse(client, str(error))
            return
        self._await(client, _HELLO_PATIENCE)

    def _charge_connection(self, user: Ledger, uid: int) -> Charge:
        """Charge a connection to its user. If the quota would be exceeded, first release closed connections."""
        now = time.monotonic()
        while self._new and self._new[0][0] <= now - _NEW:
            self._new.popleft()[1].release()
        self._new.append((now, user.charge(new_connections=1)))
        try:
            return user.charge(connections=1)
        except ResourceExhausted:
            handed = (client for worker in self.workers for client in list(worker.clients.values()))
            for client in itertools.chain(handed, self._awaited.values()):
                if client.peer.uid == uid and client.has_gone:
                    client.charge.release()
            return user.charge(connections=1)

    def end_client(self, client: AcceptedClient, reason: str) -> None:
        """Tell a client the reason, and disconnect it."""
        self._dismiss(client, calls.EndNotice(calls.sendable(reason)))

    def _dismiss(self, client: AcceptedClient, last: calls.Message, kind: Kind = Kind.REQUEST, number: int = 0) -> None:
        client.send_last(last, kind, number)
        self._await(client, LEAVING)

    def _await(self, client: AcceptedClient, timeout: float) -> None:
        client.until = time.monotonic() + timeout
        if client.sock.fileno() >= 0:
            self._awaited[client.sock.fileno()] = client

    def refuse(self, client: AcceptedClient, reason: str) -> None:
        """Tell a client why it is not served. If too many clients are being told, only disconnect this one."""
        _log.warning("%s is refused: %s", client.peer, reason)
        if sum(other.is_dismissed and other.worker is None for other in self._awaited.values()) >= _MOST_REFUSALS:
            client.close()
        else:
            self.end_client(client, reason)

    def _handle_first_message(self, client: AcceptedClient) -> None:
        if client.is_dismissed:
            client.close()
            return
        try:
            number, first = peek_first(client.sock)
        except BlockingIOError:
            self._awaited[client.sock.fileno()] = client
        except calls.Malformed as error:
            _log.warning("%s is disconnected: malformed message: %s", client.peer, error)
            self.end_client(client, f"malformed message: {error}")
        except (EndOfStream, OSError):
            client.close()
        else:
            if not isinstance(first, calls.Hello):
                self._carry_out(client, number, first)
            elif first.own and not self.workers.runs_own:
                self.refuse(client, "this service runs no models of its clients")
            else:
                self.workers.add_client(client, own=first.own)

    def _carry_out(self, client: AcceptedClient, number: int, order: calls.EndClients | calls.LoadModel) -> None:
        """Carry out and answer a client's order."""
        uid, of_user = client.peer.uid, isinstance(order, calls.EndClients) and order.uid is not None

        def answer(reply: calls.Message) -> None:
            self._dismiss(client, reply, Kind.ERROR if isinstance(reply, calls.ErrorReply) else Kind.REPLY, number)

        def change(name: str, unload: bool) -> None:
            reply: calls.Message = calls.Done()
            try:
                self._change(name, unload)
            except NNBurstError as error:
                reply = calls.error_reply(error)
            except Exception as error:
                _log.exception("loading %r failed", name)
                reply = calls.error_reply(GeneralFailure(f"loading {name!r} failed: {error!r}"))
            self.post(partial(answer, reply))

        if uid not in (0, os.geteuid()):
            may = f"user {uid} may not order that of this service: user {os.geteuid()}, who runs it, may, and root"
            answer(calls.error_reply(InvalidArgument(may)))
        elif isinstance(order, calls.EndClients):
            whom = f"user {order.uid}" if of_user else f"process {order.pid}"
            reason = f"for {whom} alone, by order of user {uid} (nnburst kick)"
            answer(calls.EndClientsReply(self.kick(client.peer.pid if of_user else order.pid, reason, order.uid)))
        else:
            client.is_dismissed = True  # it receives nothing but the answer to its order
            self._await(client, math.inf)
            self._changes.submit(change, order.name, order.unload)

    def _drop_late(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, client in self._awaited.items() if client.until <= now]:
            client = self._awaited[fd]
            if client.worker is not None and unread_bytes(client.sock):
                client.until = now + _UNREAD  # it counts until then: its socket may contain descriptors
                continue
            del self._awaited[fd]
            if not client.is_dismissed:
                _log.warning("%s is disconnected: it has not said hello", client.peer)
            client.close()

    def kick(self, pid: int, reason: str, uid: int | None) -> int:
        """End the connections of process `pid`, and return their number.

        With `uid`, spare process `pid`, and end the connections of all other processes of that user.
        """
        ended = 0
        for worker in self.workers:
            for client in list(worker.clients.values()):
                if client.peer.pid == pid if uid is None else client.peer.uid == uid and client.peer.pid != pid:
                    worker.clients.pop(client.number, None)
                    worker.idle_since = time.monotonic()
                    self.end_client(client, reason)
                    ended += 1
            if uid is not None and worker.uid == uid and not worker.clients:
                self.workers.kill(worker)
        return ended

    def close(self) -> None:
        """End the workers. They finish their runs, and tell their clients the reason. Idempotent."""
        for client in self._awaited.values():
            client.close()
        self._awaited.clear()
        self.workers.close()
        close_fds([self._wake, self._woken] if self._wake >= 0 else [])
        self._wake = -1


@contextlib.contextmanager
def _signals(wake_fd: int) -> Iterator[None]:
    """Unblock SIGTERM, SIGINT and SIGHUP inside a ``with`` block. Each signal only writes its number to `wake_fd`."""
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
    """Return the listening sockets that a service manager passed. Delete the environment variables that describe them.

    Raises:
        BadState: A passed descriptor is not a listening SOCK_SEQPACKET socket.
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


def notify_systemd() -> None:
    """Send ``READY=1`` to the service manager (``NOTIFY_SOCKET``), if there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address.startswith("@"):
        address = "\0" + address[1:]
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(b"READY=1", address)
