"""The format of a message, which is one datagram: header, body, descriptors.

    0        1        2          4            8
    | kind   | flags  | n_fds    | call id    | body (MessagePack)                      |   little-endian

kind 0 = request, 1 = reply, 2 = error reply. Call id 0 = no answer wanted. If bit 0 of flags is set, the body is in a
sealed memfd, which is the last descriptor and is not counted in n_fds. The eight bytes after the header are then the
body's length. Descriptors are passed by SCM_RIGHTS.
"""

from __future__ import annotations

import array
import enum
import errno
import fcntl
import os
import socket
import struct
import termios
from collections.abc import Callable, Iterable

from msgspec import Struct

from ..._core.errno import meaning, system
from ..._core.fds import FdSet, close_fds
from ..._core.leaving import Closing
from ...errors import GeneralFailure, InvalidArgument, ResourceExhausted
from .protocol import MAX_BODY, MAX_FDS, MAX_INLINE, EndClients, Hello, LoadModel, Malformed, decode_first

_HEADER = struct.Struct("<BBHI")
_SEND_FLAGS = socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT
_LENGTH = struct.Struct("<Q")
_MOST_FIRST = 8192
_SPILLED = 1
_MAX_DATAGRAM = _HEADER.size + MAX_INLINE
_ANCILLARY = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class EndOfStream(Exception):
    """The peer closed its end."""


class DescriptorsLost(Exception):
    """A message lost some of its descriptors, because this process has reached its limit."""

    def __init__(self, kind: Kind, call_id: int) -> None:
        super().__init__(kind, call_id)
        self.kind = kind
        self.call_id = call_id


class Kind(enum.IntEnum):
    """The kind of a datagram."""

    REQUEST = 0
    REPLY = 1
    ERROR = 2


class FdBundle(FdSet, Closing):
    """The descriptors of a message. A handler owns the descriptors that it takes; `close` closes the others."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._owned)

    def take(self, count: int) -> tuple[int, ...]:
        """Remove and return the next `count` descriptors. Raises `InvalidArgument` if fewer are left."""
        if count > len(self):
            raise InvalidArgument(f"{count} descriptors wanted, {len(self)} left in the message")
        return self.disown(slice(count))

    def take_last(self) -> int:
        return self.disown(slice(-1, None))[0]


class Packet(Struct, frozen=True):
    """A received datagram."""

    kind: Kind
    call_id: int
    body: bytes
    fds: FdBundle
    is_long: bool = False
    """True if the body did not fit into the datagram."""


def _spill(body: bytes) -> int:
    """Return a sealed memfd that contains `body`."""
    fd = system(os.memfd_create, "nnburst-message", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(body)
        while view:
            view = view[os.write(fd, view) :]
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError as error:
        os.close(fd)
        raise ResourceExhausted(f"no memory for a message of {len(body)} bytes: {error.strerror}") from error
    return fd


def _unspill(fd: int, length: int) -> bytes:
    """Return the body that a sealed memfd contains, and close `fd`."""
    try:
        if length > MAX_BODY:
            raise Malformed(f"a body of {length} bytes is longer than {MAX_BODY}")
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise Malformed("a spilled body is not in a sealed memfd")
        if os.fstat(fd).st_size != length:
            raise Malformed(f"a spilled body has {os.fstat(fd).st_size} bytes, not the {length} announced")
        return os.pread(fd, length, 0)  # the file is sealed, so it cannot be shorter
    except OSError as error:
        raise Malformed(f"a spilled body cannot be read: {error}") from None
    finally:
        close_fds([fd])


class Outgoing:
    """An encoded message, which owns its descriptors until `close`.

    Args:
        fds: At most 253 descriptors, 252 when the body is longer than 64 KiB.

    Attributes:
        size: Bytes of the datagram.
        n_fds: Number of the message's descriptors.
        is_sent: True once the message was sent.
        release: Function to call when the message is received or dropped. It takes the message out of the client's
            quotas. None for a message that no quota counts.

    Raises:
        InvalidArgument: There are too many descriptors.
        ResourceExhausted: The body is too long, or the process lacks a descriptor or memory for a long body.
    """

    def __init__(self, kind: Kind, number: int, body: bytes, fds: FdBundle | None = None) -> None:
        self.kind = kind
        self.number = number
        self.is_sent = False
        self.is_long = len(body) > MAX_INLINE
        self.release: Callable[[], None] | None = None
        self._fds = FdBundle() if fds is None else fds
        n_fds = len(self._fds)
        try:
            if len(body) > MAX_BODY:
                raise ResourceExhausted(
                    f"a message of {len(body)} bytes is longer than {MAX_BODY}: put constants into a pool"
                )
            if n_fds + self.is_long > MAX_FDS:
                raise InvalidArgument(
                    f"{n_fds} descriptors do not fit into one message (at most {MAX_FDS - self.is_long}): "
                    "use fewer, larger pools"
                )
            header = _HEADER.pack(kind, _SPILLED if self.is_long else 0, n_fds, number)
            self._data = (header, _LENGTH.pack(len(body)) if self.is_long else body)
            passed = [*self._fds.fds, *([self._fds.add(_spill(body))] if self.is_long else ())]
        except BaseException:
            self.close()
            raise
        self.size, self.n_fds = sum(map(len, self._data)), len(passed)
        self._ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", passed))] if passed else []

    def close(self) -> None:
        """Close the descriptors and release the charge. Idempotent."""
        self._fds.close()
        release, self.release = self.release, None
        if release is not None:
            release()

    def try_send(self, sock: socket.socket) -> None:
        """Send the message as one datagram, without waiting, and close its descriptors.

        Raises:
            BlockingIOError: The socket is full; nothing was sent.
            ResourceExhausted: The kernel has no room, or the user's limit of descriptors in flight is reached.
            ConnectionError: The peer has ended.
        """
        try:
            sock.sendmsg(self._data, self._ancillary, _SEND_FLAGS)
            self.is_sent = True
            self._fds.close()
        except (BlockingIOError, ConnectionError):
            raise
        except OSError as error:
            if error.errno == errno.ENOTCONN:
                raise BrokenPipeError(errno.EPIPE, "the connection is closed") from error
            if error.errno in (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                raise ResourceExhausted(f"the message cannot be queued: {meaning(error.errno)}") from error
            raise GeneralFailure(f"the message cannot be sent: {error}") from error


def unread_bytes(sock: socket.socket) -> int:
    """Return the bytes that unread datagrams take in the kernel, including the kernel's overhead."""
    answer = array.array("i", [0])
    fcntl.ioctl(sock, termios.TIOCOUTQ, answer)
    return answer[0]


def receive(sock: socket.socket) -> Packet:
    """Receive one message, whose descriptors are close-on-exec. After an error, all descriptors are closed.

    Raises:
        BlockingIOError: No message has come.
        EndOfStream: The peer closed its end, or the connection broke.
        DescriptorsLost: The message's descriptors exceed this process's limit.
        Malformed: The datagram breaks the format.
    """
    try:
        data, ancillary, flags, _ = sock.recvmsg(
            _MAX_DATAGRAM, _ANCILLARY, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
        )
    except BlockingIOError:
        raise
    except OSError as error:
        raise EndOfStream(f"the connection broke: {error.strerror}") from None
    bundle = FdBundle(_descriptors(ancillary))
    try:
        if flags & socket.MSG_TRUNC:
            raise Malformed(f"a datagram is longer than {_MAX_DATAGRAM} bytes")
        if not data and not bundle:
            raise EndOfStream("the other process closed the connection")
        if len(data) < _HEADER.size:
            raise Malformed(f"a datagram of {len(data)} bytes has no header")
        kind, spilled, n_fds, call_id = _HEADER.unpack_from(data)
        if kind not in Kind.__members__.values() or spilled > _SPILLED:
            raise Malformed(f"a datagram of unknown kind {kind} or flags {spilled:#x}")
        if flags & socket.MSG_CTRUNC and len(bundle) < n_fds + spilled <= MAX_FDS:
            raise DescriptorsLost(Kind(kind), call_id)
        if n_fds + spilled != len(bundle):
            raise Malformed(f"{len(bundle)} descriptors came, {n_fds + spilled} were announced")
        body = data[_HEADER.size :]
        if spilled:
            if len(body) != _LENGTH.size:
                raise Malformed("a spilled body without its length")
            body = _unspill(bundle.take_last(), *_LENGTH.unpack(body))
        return Packet(Kind(kind), call_id, body, bundle, bool(spilled))
    except BaseException:
        bundle.close()
        raise


def peek_first(sock: socket.socket) -> tuple[int, Hello | EndClients | LoadModel]:
    """Return (call id, message) of a client's first message, without receiving the message.

    Raises:
        BlockingIOError: No message has come.
        EndOfStream: The peer closed its end.
        Malformed: The first message is not a valid `Hello`, `EndClients` or `LoadModel`.
    """
    data = sock.recvmsg(_MOST_FIRST, 0, socket.MSG_PEEK | socket.MSG_DONTWAIT)[0]
    if not data:
        raise EndOfStream("the other process closed the connection")
    first = decode_first(data[_HEADER.size :])
    return int(_HEADER.unpack_from(data)[3]), first


def _descriptors(ancillary: Iterable[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return fds.tolist()
