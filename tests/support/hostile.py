"""Wrong messages, derived from the types of correct messages, and descriptors of every kind."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import msgspec.inspect as types

from support.waiting import PATIENCE

SCALARS: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 7, 127, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1,
    -(2**31), -(2**63), 0.0, -0.5, 1e308, math.inf, -math.inf, math.nan, "", "x", "é\0", "name:", "x" * 70_000, b"",
    b"\0" * 32, b"\xff" * 5000, [], {}, [[]], [None] * 300, {"a": {"b": []}}, {1: 2},
)  # fmt: skip
MOST_LINGERING = 24
NUMBERS = (0, 0, 0, 1, 1, 1, 2, 3, 4, 5, 6, 7, 8, 64, 4096, 65536)
"""Numbers for random fields. The small ones are ids of existing objects and devices."""


class Values:
    """Generator of random values of a type. Most values fit the type, because the decoder would reject others."""

    def __init__(self, dice: random.Random) -> None:
        self.dice = dice

    def of(self, kind: Any) -> Any:
        """Return a random value of a type of `msgspec.inspect`, in the form of decoded MessagePack."""
        return getattr(self, "_" + type(kind).__name__)(kind)

    def _IntType(self, kind: types.IntType) -> int:
        least = -(2**63) if kind.ge is None else kind.ge
        most = 2**64 - 1 if kind.le is None else kind.le
        choice = self.dice.choice([*NUMBERS, least, most, most // 2, self.dice.randrange(2**16)])
        return min(max(choice, least), most)

    def _FloatType(self, kind: types.FloatType) -> float:
        return self.dice.choice([0.0, 0.5, 1e-300, 1e300, math.inf, math.nan, -1.0, 60.0])

    def _BoolType(self, kind: types.BoolType) -> bool:
        return self.dice.random() < 0.5

    def _NoneType(self, kind: types.NoneType) -> None:
        return None

    def _StrType(self, kind: types.StrType) -> str:
        most = kind.max_length or 4096
        text = self.dice.choice(
            ["", "ashmem", "mmap_fd", "dmabuf", "hardware_buffer_blob", "name:x", "onnx", "\0", "é"]
        )
        return (text * self.dice.choice([1, 1, 1, 1, 999]))[:most]

    def _BytesType(self, kind: types.BytesType) -> bytes:
        size = self.dice.choice([0, 1, 16, 32, 32, 64, 4096])
        return self.dice.randbytes(min(size, kind.max_length or size))

    def _RawType(self, kind: types.RawType) -> Any:
        return self.dice.choice(SCALARS)

    def _EnumType(self, kind: types.EnumType) -> Any:
        return self.dice.choice(list(kind.cls)).value

    def _UnionType(self, kind: types.UnionType) -> Any:
        return self.of(self.dice.choice(kind.types))

    def _VarTupleType(self, kind: types.VarTupleType) -> list[Any]:
        count = self.dice.choice([0, 1, 1, 2, 3, 4, 17])
        return [self.of(kind.item_type) for _ in range(max(kind.min_length or 0, count))]

    def _TupleType(self, kind: types.TupleType) -> list[Any]:
        return [self.of(each) for each in kind.item_types]

    def _DictType(self, kind: types.DictType) -> dict[Any, Any]:
        return {self.of(kind.key_type): self.of(kind.value_type) for _ in range(self.dice.randrange(3))}

    def _StructType(self, kind: types.StructType) -> dict[str, Any]:
        found = {kind.tag_field: kind.tag} if kind.tag_field else {}
        for field in kind.fields:
            if field.required or self.dice.random() < 0.7:
                found[field.encode_name] = self.of(field.type)
        return found


def mutated(dice: random.Random, value: Any) -> Any:
    """Return a copy of decoded MessagePack with one changed value, at any depth."""
    if isinstance(value, dict) and value and dice.random() < 0.9:
        copy = dict(value)
        name = dice.choice(list(copy))
        how = dice.random()
        if how < 0.05:
            del copy[name]
        elif how < 0.1:
            copy["surplus"] = dice.choice(SCALARS)
        else:
            copy[name] = mutated(dice, copy[name])
        return copy
    if isinstance(value, list) and value and dice.random() < 0.8:
        items = list(value)
        i = dice.randrange(len(items))
        how = dice.random()
        if how < 0.1:
            del items[i]
        elif how < 0.2:
            items *= dice.choice([2, 3, 50])
        else:
            items[i] = mutated(dice, items[i])
        return items
    if isinstance(value, int) and not isinstance(value, bool) and dice.random() < 0.7:
        return dice.choice([value + 1, value - 1, value ^ 1 << dice.randrange(32), 2 * value, dice.choice(NUMBERS)])
    return dice.choice(SCALARS)


class Descriptors:
    """Maker of descriptors of every kind that a process can send. Peers of sockets stay open until `close`."""

    def __init__(self, dice: random.Random, directory: Path) -> None:
        self.dice = dice
        self.directory = directory
        self._slow: set[int] = set()
        self._closers: list[threading.Thread] = []
        self._kept: list[socket.socket] = []
        self._full: list[socket.socket] = []
        (directory / "file").write_bytes(bytes(5000))
        self.kinds: dict[str, Callable[[], int]] = {
            name.removeprefix("_make_"): getattr(self, name) for name in dir(self) if name.startswith("_make_")
        } | {
            "listening": lambda: socket.create_server(("127.0.0.1", 0)).detach(),
            "directory": lambda: os.open(directory, os.O_RDONLY | os.O_DIRECTORY),
            "eventfd": lambda: os.eventfd(dice.choice([0, 1])),
            "device": lambda: os.open(dice.choice(["/dev/null", "/dev/zero", "/dev/full", "/dev/urandom"]), os.O_RDWR),
            "process": lambda: os.pidfd_open(os.getpid()),
            "of proc": lambda: os.open(
                dice.choice(["/proc/self/mem", "/proc/self/maps", "/proc/self/ns/mnt"]), os.O_RDONLY
            ),
        }

    def any(self, *, slow: bool = True) -> int:
        """Return a new descriptor of a random kind. A slow one, whose close may block, must be passed to `let_go`."""
        kinds = [name for name in self.kinds if slow or name not in ("lingering", "parcel")]
        make = self.kinds[self.dice.choice(kinds)]
        try:
            return make()
        except OSError:  # this system lacks the kind
            return os.open(os.devnull, os.O_RDWR)

    def forget(self, fds: list[int]) -> None:
        """Close descriptors that were sent. The message keeps their files open, so that no close blocks."""
        self._slow.difference_update(fds)
        for fd in fds:
            os.close(fd)

    def let_go(self, fds: list[int]) -> None:
        """Close descriptors. Slow ones are closed in a thread, because closing them may block."""
        for fd in fds:
            if fd in self._slow:
                self._slow.remove(fd)
                closer = threading.Thread(target=os.close, args=(fd,), daemon=True)
                closer.start()
                self._closers.append(closer)
            else:
                os.close(fd)

    def close(self) -> None:
        """Close the peers of sockets, and wait for the threads that close slow descriptors."""
        for sock in (*self._kept, *self._full):
            sock.close()
        for closer in self._closers:
            closer.join(PATIENCE)
            assert not closer.is_alive()

    def _make_pipe(self) -> int:
        ends = list(os.pipe())
        fd = ends.pop(self.dice.randrange(2))
        os.close(ends[0])
        return fd

    def _make_memory(self) -> int:
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, self.dice.choice([0, 1, 100, 4096, 65536, 65536, 1 << 20, 1 << 40]))
        for seal in (fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE, fcntl.F_SEAL_SEAL):
            if self.dice.random() < 0.5:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seal)
        return fd

    def _make_queue_like(self) -> int:
        """Return memory that is sealed like a queue's and begins with random counters."""
        fd = os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
        os.write(fd, self.dice.randbytes(64) + bytes(65536 - 64))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return fd

    def _make_pair(self) -> int:
        kind = self.dice.choice([socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
        ours, theirs = socket.socketpair(socket.AF_UNIX, kind)
        with ours, contextlib.suppress(OSError):
            if self.dice.random() < 0.5:
                ours.send(b"x")
        return theirs.detach()

    def _make_bell(self) -> int:
        ours, theirs = socket.socketpair()
        if len(self._kept) < 200:
            self._kept.append(ours)
        else:
            ours.close()
        return theirs.detach()

    def _make_parcel(self) -> int:
        """Return a local socket with a message that contains a lingering socket."""
        if len(self._full) >= MOST_LINGERING:
            return self._make_pair()
        ours, theirs = socket.socketpair()
        fd = self.lingering()
        socket.send_fds(ours, [b"x"], [fd])
        self.let_go([fd])
        ours.close()
        self._slow.add(theirs.fileno())
        return theirs.detach()

    def lingering(self) -> int:
        """Return a TCP socket with unsent data, whose close waits for an hour."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            sock = socket.create_connection(server.getsockname())
            peer, _ = server.accept()
        self._full.append(peer)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock.send(bytes(1 << 16))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
        self._slow.add(sock.fileno())
        return sock.detach()

    def _make_lingering(self) -> int:
        return self.lingering() if len(self._full) < MOST_LINGERING else self._make_pair()

    def _make_file(self) -> int:
        flags = self.dice.choice([os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_PATH])
        return os.open(self.directory / "file", flags)

    def _make_epoll(self) -> int:
        epoll, inner = select.epoll(), select.epoll()
        epoll.register(inner.fileno(), select.EPOLLIN)
        fd = os.dup(epoll.fileno())
        epoll.close()
        inner.close()
        return fd


def encoded(value: Any) -> bytes:
    """Encode a value as MessagePack."""
    return msgspec.msgpack.encode(value)
