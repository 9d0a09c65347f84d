"""The zygote: a process that has imported what services import, and is forked to become one.

It serves one client, and knows nothing of it but what its requests say. It has no thread and no data, so that its
children may go on with everything. Requests: see `forked`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import select
import signal
import socket
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from ..._core._nnburst import lib
from ..._core.errno import check
from ...burst import ExecutionBurstServer, ListenerGroup  # noqa: F401 (a room reads it with the first burst)
from ...devices import DeviceInfo, LocalDevice, create_device
from . import child
from .sandbox import find_code

_LONGEST = 1 << 20
_MOST_FDS = 16


@dataclass
class _Child:
    pid: int
    end: socket.socket
    """Where its client is told how it ended."""

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
        self._poll = select.poll()
        for fd in (control.fileno(), client):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> argparse.Namespace:
        """Return in a child, with its options; the zygote itself ends in here."""
        while True:
            ready = {fd for fd, _ in self._poll.poll()}
            for fd in ready & self._children.keys():
                self._poll.unregister(fd)
                os.close(fd)
                self._children.pop(fd).reap()
            if self._client in ready:  # children that are stopped cannot see it
                for pidfd in self._children:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                os._exit(0)
            if self._control.fileno() in ready:
                data, fds, flags, _ = socket.recv_fds(self._control, _LONGEST, _MOST_FDS)
                options = self._answer(json.loads(data), fds) if data and not flags & socket.MSG_CTRUNC else None
                if options is not None:
                    return options
                for each in fds:
                    os.close(each)
                if not data:
                    self._poll.unregister(self._control)
                    self._control.close()
            if self._control.fileno() < 0 and not self._children:
                os._exit(0)

    def _answer(self, request: dict[str, Any], fds: list[int]) -> argparse.Namespace | None:
        """Do what a request says; in a child return its options."""
        devices = request["devices"]
        numbers = [f"--{name}=0" for name in request["names"]]  # which are known in the child
        options = child.parse_options([*numbers, *request["options"], *devices])
        with socket.socket(fileno=fds.pop(0)) as told:
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
            return self._become(request, options, told, fds)

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

    def _become(
        self, request: dict[str, Any], options: argparse.Namespace, told: socket.socket, fds: list[int]
    ) -> argparse.Namespace:
        """Take what the client gives, and answer it. Return the options, with the descriptors by name."""
        directory, stderr, *named = fds
        os.environ.update(request["env"])
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
        return argparse.Namespace(**{**vars(options), **given, "client": self._client})


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
