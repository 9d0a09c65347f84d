"""The zygote: a process that has imported a service's modules. A client's services are forked from it."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from functools import cache
from typing import Any

from ..._core._nnburst import lib
from ..._core.errno import check
from ..._core.fds import wait_readable
from ...burst.server.group import ListenerGroup  # noqa: F401 (before a fork, not at the first burst)
from ...burst.server.server import ExecutionBurstServer  # noqa: F401 (before a fork, not at the first burst)
from ...devices.described import DeviceInfo
from ...devices.local import LocalDevice
from ...devices.registry import create_device
from . import child
from .options import ServiceOptions
from .sandbox import find_code

_LONGEST = 1 << 20
_MOST_FDS = 16
_QUIET = 0.2
"""Seconds without a request after which remaining modules are loaded."""


def _serve(control: socket.socket, client: int) -> ServiceOptions:
    """Fork children. Return each child's options in the child; never return in the zygote."""
    children: dict[int, tuple[int, socket.socket]] = {}
    """(process id, socket for the exit status) of each child, by pidfd."""
    later = dict[str, bool]()
    """Option `warm`, by device. The remaining modules of these devices are loaded when no requests come."""
    while True:
        found = wait_readable((control.fileno(), client, *children), _QUIET if later else None)
        while later and not found:
            _load(*later.popitem(), rest=True)
        for pidfd in found & children.keys():
            pid, status_socket = children.pop(pidfd)
            os.close(pidfd)
            with status_socket, contextlib.suppress(OSError):  # the client may have ended
                status_socket.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
        data, fds, flags = b"", list[int](), 0
        if control.fileno() in found:
            data, fds, flags, _ = socket.recv_fds(control, _LONGEST, _MOST_FDS)
        if client in found or (control.fileno() in found and not data):
            for pid, _ in children.values():  # a stopped child cannot notice the client's end
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if data and not flags & socket.MSG_CTRUNC:
            request = json.loads(data)
            options = ServiceOptions.read(request["options"])
            forked = _fork(options)
            if forked == 0:
                for fd in (control.detach(), *children, *(end.detach() for _, end in children.values())):
                    os.close(fd)
                return _receive_options(client, request, fds)
            if forked is not None:
                status_socket = socket.socket(fileno=fds.pop(0))
                os.close(fds.pop())  # this frees a descriptor for the pidfd
                children[os.pidfd_open(forked)] = forked, status_socket
                later |= dict.fromkeys(options.devices, options.warm)
        for fd in fds:
            os.close(fd)


def _fork(options: ServiceOptions) -> int | None:
    """Fork this process. Return the child's process id, 0 in the child, or None if the system refuses."""
    for spec in options.devices:
        _load(spec, options.warm)
    with contextlib.suppress(OSError):
        if len(os.listdir("/proc/self/task")) == 1:
            gc.freeze()
            return os.fork()
    return None


def _receive_options(client: int, request: dict[str, Any], fds: list[int]) -> ServiceOptions:
    """Take the client's descriptors and answer its request. Return the options, with the descriptors."""
    status_fd, stderr, *named = fds
    os.environ.update(request["env"])
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.dup2(stderr, 1)
    os.dup2(stderr, 2)
    os.close(stderr)
    pidfd = os.pidfd_open(os.getpid())
    with socket.socket(fileno=status_fd) as end, contextlib.suppress(OSError):  # the client may have given up
        socket.send_fds(end, [b"!"], [pidfd])
    os.close(pidfd)
    return ServiceOptions.read(request["options"], client=client, **dict(zip(request["names"], named, strict=True)))


@cache
def _load(spec: str, warm: bool, rest: bool = False) -> None:
    with contextlib.suppress(Exception):  # the child will report the error
        device = create_device(spec)
        DeviceInfo.of(device)  # this finds versions and capabilities before the fork
        if warm and isinstance(device, LocalDevice):
            device.load_libraries(rest)
    find_code.cache_clear()
    find_code()


def main() -> int:
    """Run as the zygote and, in each forked child, as a service."""
    control, parent = map(int, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the kernel drops the exit status of children
    check(lib.nnb_signal_when_orphaned(signal.SIGCONT))  # a stopped zygote continues, and notices the client's end
    client = child.pidfd_of_parent(parent)
    return 0 if client < 0 else child.serve(_serve(socket.socket(fileno=control), client))
