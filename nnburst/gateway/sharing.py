"""One port that two processes listen at: every connection goes to the one that has listened longer.

The kernel spreads connections over the sockets of a port that share it (SO_REUSEPORT). A filter that always says "the
first" leaves the second one without any until the first is closed, however that process ends: from then on it is the
first. So a process that stands by needs not be told that it is its turn.

Source: socket(7), SO_ATTACH_REUSEPORT_CBPF; Linux, Documentation/networking/filter.rst
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator

from .._core import ffi
from ..errors import DeviceUnavailable

_SO_ATTACH_REUSEPORT_CBPF = 51
_RETURN_ZERO = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction, BPF_RET | BPF_K."""


def unix_path(address: str) -> str | None:
    """Return the path of ``unix:PATH``; None for another address."""
    return address.removeprefix("unix:") if address.startswith("unix:") else None


def share_port(port: int, *, joins: bool) -> None:
    """Let other processes of this user listen at a port, at which this one listens.

    Args:
        port: Of this process.
        joins: Whether another process listens there already, so that this one has set SO_REUSEPORT itself. Without it
            the port was this process's alone until now: nobody else could have it.

    Raises:
        DeviceUnavailable: The kernel cannot do that.
    """
    for sock in _listening(port):
        try:
            if joins:
                code = ffi.new("char[]", _RETURN_ZERO)
                program = struct.pack("HP", 1, int(ffi.cast("uintptr_t", code)))
                sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_REUSEPORT_CBPF, program)
            else:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        except OSError as error:
            raise DeviceUnavailable(f"port {port} cannot be shared: {error.strerror}") from error


def _listening(port: int) -> Iterator[socket.socket]:
    """Yield the sockets with which this process listens at a port: gRPC does not give its own."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            fd = os.dup(int(name))
        except OSError:  # closed meanwhile, as the one that listed them
            continue
        with socket.socket(fileno=fd) as sock:
            is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
            if is_tcp and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
                yield sock
