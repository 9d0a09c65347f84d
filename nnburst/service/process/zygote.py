"""The zygote: a process that has imported what services import, and is forked to become one, or ahead of that.

It serves one client, and knows nothing of it but what its requests say. It has no thread and no data, so that its
children may go on with everything. Requests: see `forked`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..._core._nnburst import lib
from ..._core.backoff import Backoff
from ..._core.errno import check
from ..._core.leaving import LEAVING
from ...burst import ExecutionBurstServer, ListenerGroup  # noqa: F401 (a room reads it with the first burst)
from ...devices import DeviceInfo, LocalDevice, create_device
from ...errors import NNBurstError
from ..host.host import ServiceHost
from . import child
from .sandbox import find_code

_LONGEST = 1 << 20
_MOST_FDS = 16


@dataclass
class _Child:
    pid: int
    end: socket.socket
    """Where its client is told how it ended; of one that has no client yet, where it waits for one."""

    def reap(self) -> None:
        """Tell how it ended."""
        _, status = os.waitpid(self.pid, 0)
        with self.end, contextlib.suppress(OSError):  # the client may not care any more
            self.end.send(str(os.waitstatus_to_exitcode(status)).encode())


class _Zygote:
    """The process."""

    def __init__(self, control: socket.socket, client: int) -> None:
        self._control = control
        self._client = client
        self._children: dict[int, _Child] = {}  # by pidfd
        self._ahead: list[str] = []  # devices of which one is to be forked ahead
        self._waiting: _Child | None = None  # that one
        self._pause = Backoff()
        self._poll = select.poll()
        for fd in (control.fileno(), client):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> argparse.Namespace:
        """Return in a child, with its options; the zygote itself ends in here."""
        while True:
            is_due = bool(self._ahead) and self._waiting is None
            ready = {fd for fd, _ in self._poll.poll(self._pause.left * 1000 + 1 if is_due else None)}
            for fd in ready & self._children.keys():
                self._poll.unregister(fd)
                os.close(fd)
                ended = self._children.pop(fd)
                if ended is self._waiting:
                    self._waiting = None
                    self._pause.ended(0)
                ended.reap()
            if self._client in ready:  # children that are stopped cannot see it
                for pidfd in self._children:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os._exit(0)
            options = None
            if self._control.fileno() in ready:
                data, fds, flags, _ = socket.recv_fds(self._control, _LONGEST, _MOST_FDS)
                options = self._answer(json.loads(data), fds) if data and not flags & socket.MSG_CTRUNC else None
                for each in fds if options is None else ():
                    os.close(each)
                if not data:
                    self._poll.unregister(self._control)
                    self._control.close()
                    self._ahead.clear()
                    if self._waiting is not None:
                        os.kill(self._waiting.pid, signal.SIGKILL)
            elif is_due and not self._pause.left:
                options = self._fork_ahead()
            if options is not None:
                return options
            if self._control.fileno() < 0 and not self._children:
                os._exit(0)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> argparse.Namespace | None:
        """Do what a request says; in a child return its options."""
        devices = request["devices"]
        self._pause.ended(math.inf)
        if not fds:
            self._ahead = devices
            return None
        numbers = [f"--{name}=0" for name in request["names"]]  # which are known in the child
        options = child.parse_options([*numbers, *request["options"], *devices])
        request["options"] = vars(options)
        with socket.socket(fileno=fds.pop(0)) as told:
            if self._waiting is not None and self._ahead == devices and self._hand_over(request, told, fds):
                return None
            try:
                for spec in devices:
                    _load(spec, options.warm)
                if not _is_alone():
                    told.send(b"threads")
                    return None
                if self._fork(told, fds) is not None:
                    return None
            except OSError:  # no child, as the client sees; or it has given up
                return None
            return self._become(request, told, fds)

    def _hand_over(self, request: dict[str, Any], told: socket.socket, fds: list[int]) -> bool:
        """Have the child that waits become a client's. Returns whether it is there."""
        assert self._waiting is not None
        waiting, self._waiting = self._waiting, None
        with contextlib.suppress(OSError), waiting.end:  # it has died
            socket.send_fds(waiting.end, [json.dumps(request).encode()], [told.fileno(), *fds])
            waiting.end = socket.socket(fileno=told.detach())
            return True
        return False

    def _fork_ahead(self) -> argparse.Namespace | None:
        """Have a child wait for a request; in the child return its options when it has come."""
        self._pause.ended(0)
        for spec in self._ahead:
            _load(spec, True)
        if not _is_alone():
            self._ahead.clear()
            return None
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with ours:
                self._waiting = self._fork(ours, [])
        except OSError:
            return None
        with theirs:
            if self._waiting is not None:
                return None
            _rehearse(self._ahead)
            data, fds, _, _ = socket.recv_fds(theirs, _LONGEST, _MOST_FDS)
        if not data:
            os._exit(0)
        return self._become(json.loads(data), socket.socket(fileno=fds.pop(0)), fds)

    def _fork(self, end: socket.socket, fds: list[int]) -> _Child | None:
        """Fork a child, which keeps nothing of the zygote's but these descriptors; in it, return None."""
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            self._control.close()
            for pidfd, other in self._children.items():
                os.close(pidfd)
                other.end.close()
            return None
        forked = _Child(pid, socket.socket(fileno=end.detach()))
        while fds:  # now, which makes room
            os.close(fds.pop())
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it cannot be watched
            os.kill(pid, signal.SIGKILL)
            forked.reap()
            raise
        self._children[pidfd] = forked
        self._poll.register(pidfd, select.POLLIN)
        return forked

    def _become(self, request: dict[str, Any], told: socket.socket, fds: list[int]) -> argparse.Namespace:
        """Take what the client gives, and answer it. Return the options, with the descriptors by name."""
        directory, stderr, *named = fds
        os.setsid()
        os.dup2(stderr, 1)
        os.dup2(stderr, 2)
        with contextlib.suppress(OSError):  # it may not enter what its client is in
            os.fchdir(directory)
        for fd in (directory, stderr):
            os.close(fd)
        signal.pthread_sigmask(signal.SIG_SETMASK, map(int, request["blocked"]))
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, map(int, request["cpus"]))
        pidfd = os.pidfd_open(os.getpid())
        with told, contextlib.suppress(OSError):  # the client has given up
            socket.send_fds(told, [str(os.getpid()).encode()], [pidfd])
        os.close(pidfd)
        given = dict(zip(request["names"], named, strict=True))
        return argparse.Namespace(**{**request["options"], **given, "client": self._client})


def _rehearse(devices: Sequence[str]) -> None:
    """Serve a first client, itself: what that has a process copy and keep ready, later ones find."""
    from ...model import ModelBuilder, OperandType  # which those that are forked at once do without
    from ..client.connection import ServiceConnection

    builder = ModelBuilder()
    builder.output("y", builder.relu(builder.input("x", OperandType.TENSOR_FLOAT32, (1, 4))))
    model = builder.build()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    host = ServiceHost([*map(create_device, devices)], listeners=ListenerGroup())
    host.serve(theirs)
    with ServiceConnection(ours) as client:
        for device in client.devices:
            with contextlib.suppress(NNBurstError):
                device.prepare_model(model)
    host.close()
    ends = time.monotonic() + LEAVING
    while len(os.listdir("/proc/self/task")) > 1:  # threads that have returned, but are not gone
        if time.monotonic() > ends:
            os._exit(1)  # walls would not hold for them
        time.sleep(0.001)


@cache
def _load(spec: str, warm: bool) -> None:
    """Import what a device needs, for this start and all later ones."""
    with contextlib.suppress(Exception):  # of which the child will tell
        device = create_device(spec)
        DeviceInfo.of(device)  # which finds out about versions and capabilities
        if warm and isinstance(device, LocalDevice):
            device.load_libraries()
    find_code.cache_clear()
    find_code()


def _is_alone() -> bool:
    """Whether this process has one thread. A library that has started others may end them before a fork, for good."""
    if len(os.listdir("/proc/self/task")) > 1:
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1


def main() -> int:
    """Be the zygote, and then one of its children."""
    control, parent = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    check(lib.nnb_signal_when_orphaned(signal.SIGCONT))  # one that is stopped goes on, and sees it
    client = child.pidfd_of_parent(parent)
    if client < 0:
        return 0
    os.chdir("/")
    return child.serve(_Zygote(socket.socket(fileno=control), client).serve())
