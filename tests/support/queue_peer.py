"""The other end of a queue: a second process that makes the calls that a test sends, one after the other.

As a program, this file is the second process. A test imports `QueuePeer` from it. Calls and answers are pickled
datagrams over a Unix socket. A queue descriptor is sent as plain values and SCM_RIGHTS, as clients and services do.
"""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nnburst.errors import NNBurstError
from nnburst.fmq import MessageQueue, MQDescriptor

_ROOM = 1 << 20


class Servant:
    """The calls that a peer can make. Elements are int32; ``start, count`` means `count` numbers from `start` on."""

    def __init__(self) -> None:
        self.queue: MessageQueue | None = None
        self.errors = 0

    @property
    def q(self) -> MessageQueue:
        assert self.queue is not None
        return self.queue

    def attach(self, fds: Sequence[int], parts: tuple[Any, ...]) -> None:
        self.close()
        grantors, quantum, flags = parts
        with MQDescriptor(grantors, fds, quantum, flags) as descriptor:
            self.queue = MessageQueue.attach(descriptor, np.int32)
        self.errors = 0
        self.queue.set_error_handler(self._count)

    def _count(self, message: str) -> None:
        self.errors += 1

    def close(self) -> None:
        if self.queue is not None:
            self.queue.close()
            self.queue = None

    def write(self, start: int, count: int) -> bool:
        return self.q.write(_numbers(start, count))

    def write_blocking(self, start: int, count: int, timeout: float | None, times: int = 1) -> int:
        """Write `times` packets of `count` consecutive numbers; each packet continues the one before."""
        for i in range(times):
            self.q.write_blocking(_numbers(start + i * count, count), timeout)
        return times

    def read(self, count: int) -> list[int] | None:
        data = self.q.read(count)
        return None if data is None else data.tolist()

    def read_blocking(self, start: int, count: int, timeout: float | None, times: int = 1) -> int:
        """Read `times` packets of `count` numbers. Return the number of packets with the expected numbers."""
        good = 0
        for i in range(times):
            data = self.q.read_blocking(count, timeout)
            good += bool(np.array_equal(data, _numbers(start + i * count, count)))
        return good

    def begin_read(self, count: int) -> list[int] | None:
        tx = self.q.begin_read(count)
        if tx is None:
            return None
        values = tx.copy_from().tolist()
        return values if tx.commit() else None

    def begin_write(self, start: int, count: int) -> list[int] | None:
        """Write elements one by one through a transaction. Return the lengths of its two parts."""
        tx = self.q.begin_write(count)
        if tx is None:
            return None
        for i in range(count):
            tx[i] = start + i
        tx.commit()
        return [len(tx.first), len(tx.second)]

    def available(self) -> list[int]:
        return [self.q.available_to_read, self.q.available_to_write]

    def error_count(self) -> int:
        return self.errors

    def read_only(self) -> bool:
        return self.q.read_only


def _numbers(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def serve(sock: socket.socket) -> None:
    """Answer calls until the test closes its socket."""
    servant = Servant()
    while True:
        message, fds, _, _ = socket.recv_fds(sock, _ROOM, 16)
        if not message:
            servant.close()
            return
        name, args = pickle.loads(message)
        try:
            first = [fds] if name == "attach" else []
            answer = getattr(servant, name)(*first, *args)
        except NNBurstError as error:
            answer = error
        sock.send(pickle.dumps(answer))


class QueuePeer:
    """A second process attached to a queue."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, str(Path(__file__).resolve()), str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._socket = ours
        self._socket.settimeout(30)

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, name: str, *args: Any, fds: Sequence[int] = ()) -> None:
        """Begin a call. `finish` returns its result."""
        socket.send_fds(self._socket, [pickle.dumps((name, args))], fds)

    def finish(self) -> Any:
        """Return the result of the call that `start` began, or raise its error."""
        answer = pickle.loads(self._socket.recv(_ROOM))
        if isinstance(answer, NNBurstError):
            raise answer
        return answer

    def call(self, name: str, *args: Any) -> Any:
        """Make a call in the peer. Return its result or raise its error."""
        self.start(name, *args)
        return self.finish()

    def attach(self, descriptor: MQDescriptor) -> None:
        """Attach the peer to a queue, and close the descriptor. The peer closes its previous queue."""
        with descriptor:
            parts = descriptor.grantors, descriptor.quantum, descriptor.flags
            self.start("attach", parts, fds=descriptor.fds)
            self.finish()

    def close(self) -> None:
        """Close the socket, and wait until the process ends. If it does not end, kill it."""
        self._socket.close()
        watchdog = threading.Timer(10, self._process.kill)
        watchdog.start()
        self._process.wait()
        watchdog.cancel()
        watchdog.join()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
