"""The other end of a queue: a second process that does what the test tells it, one call after the other.

Run as a program it is that process; imported, it offers `QueuePeer`. Calls and answers are pickled datagrams over a
Unix socket; a descriptor travels as plain parts plus SCM_RIGHTS, as it does between a client and a service.
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
    """What a peer can do. Elements are int32; ``start, count`` stands for start, start+1, … (count of them)."""

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
        """Write `times` packets of `count`, numbered on."""
        for i in range(times):
            self.q.write_blocking(_numbers(start + i * count, count), timeout)
        return times

    def read(self, count: int) -> list[int] | None:
        data = self.q.read(count)
        return None if data is None else data.tolist()

    def read_blocking(self, start: int, count: int, timeout: float | None, times: int = 1) -> int:
        """Read `times` packets of `count` and return how many held the numbers expected."""
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
        """Write through slots; return the lengths of the two regions."""
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
    """Answer calls until the test hangs up."""
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
        """Begin a call; `finish` gives its result."""
        socket.send_fds(self._socket, [pickle.dumps((name, args))], fds)

    def finish(self) -> Any:
        """Return what the call that was started has returned, or raise what it raised."""
        answer = pickle.loads(self._socket.recv(_ROOM))
        if isinstance(answer, NNBurstError):
            raise answer
        return answer

    def call(self, name: str, *args: Any) -> Any:
        """Make the peer do something and wait for it."""
        self.start(name, *args)
        return self.finish()

    def attach(self, descriptor: MQDescriptor) -> None:
        """Give the peer a queue; its previous one is closed. The descriptor is closed here."""
        with descriptor:
            parts = descriptor.grantors, descriptor.quantum, descriptor.flags
            self.start("attach", parts, fds=descriptor.fds)
            self.finish()

    def close(self) -> None:
        """Hang up and wait for the end of the process; kill it if it does not end."""
        self._socket.close()
        watchdog = threading.Timer(10, self._process.kill)
        watchdog.start()
        self._process.wait()
        watchdog.cancel()
        watchdog.join()


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
