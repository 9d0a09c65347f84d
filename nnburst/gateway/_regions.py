"""Shared memory of clients, by name: tensors that are not sent but lie there.

A region is only ever read and written with the system's calls, and each tensor once: what a client does to its memory
meanwhile changes numbers, never the gateway.
"""

from __future__ import annotations

import os
import re
import stat
import threading
from dataclasses import dataclass

import posix_ipc

from ..errors import BadState, DeviceUnavailable, InvalidArgument, NNBurstError, ResourceExhausted

_MOST_REGIONS = 1024
_MOST_NAME = 255
_KEY = re.compile(r"/?[^/\0]+")


@dataclass(frozen=True)
class RegisteredRegion:
    """One registered region.

    Attributes:
        name: What requests call it.
        key: Name of the POSIX shared memory.
        offset, byte_size: The part of it that is the region.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    fd: int


class Regions:
    """What clients have registered. Any thread.

    Args:
        allowed: Whether clients may register memory at all.
    """

    def __init__(self, allowed: bool) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._regions: dict[str, RegisteredRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a part of a POSIX shared memory.

        Raises:
            BadState: The name is taken.
            DeviceUnavailable: The gateway takes no shared memory.
            InvalidArgument: The name or key is none, or the memory is not there or not as large.
            ResourceExhausted: Too many regions.
        """
        if not self._allowed:
            raise DeviceUnavailable("this gateway takes no shared memory; start it with --oip-shared-memory")
        if not name or len(name) > _MOST_NAME:
            raise InvalidArgument(f"the name of a region has 1 to {_MOST_NAME} characters, got {len(name)}")
        if not _KEY.fullmatch(key) or key.strip("/") in (".", "..") or len(key) > _MOST_NAME:
            raise InvalidArgument(f"region {name!r}: {key!r} is no name of a POSIX shared memory (like '/tensors')")
        if offset < 0 or byte_size < 1:
            raise InvalidArgument(f"region {name!r}: offset {offset} and size {byte_size} are no part of a memory")
        try:
            memory = posix_ipc.SharedMemory(key if key.startswith("/") else f"/{key}")
        except (posix_ipc.Error, OSError, ValueError) as error:
            raise InvalidArgument(f"region {name!r}: cannot open the shared memory {key!r}: {error}") from None
        region = RegisteredRegion(name, key, offset, byte_size, memory.fd)
        try:
            found = os.fstat(memory.fd)
            if not stat.S_ISREG(found.st_mode) or offset + byte_size > found.st_size:
                raise InvalidArgument(
                    f"region {name!r}: the shared memory {key!r} has {found.st_size} bytes, not {offset} + {byte_size}"
                )
            with self._lock:
                if name in self._regions:
                    raise BadState(f"a region {name!r} is registered already; unregister it first")
                if len(self._regions) >= _MOST_REGIONS:
                    raise ResourceExhausted(f"{_MOST_REGIONS} regions are registered; unregister some")
                self._regions[name] = region
        except NNBurstError:
            os.close(memory.fd)
            raise

    def unregister(self, name: str) -> None:
        """Forget a region; all of them for an empty name. One that is not there is forgotten already."""
        with self._lock:
            gone = [self._regions.pop(key) for key in ([name] if name else list(self._regions)) if key in self._regions]
        for region in gone:
            os.close(region.fd)

    def status(self, name: str) -> list[RegisteredRegion]:
        """Return one region, or all for an empty name.

        Raises:
            InvalidArgument: There is none of this name.
        """
        with self._lock:
            if name and name not in self._regions:
                raise InvalidArgument(f"no region {name!r} is registered")
            return [self._regions[name]] if name else list(self._regions.values())

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """Copy a tensor out of a region.

        Raises:
            InvalidArgument: No such region, or no such part of it; or its owner made it shorter.
        ResourceExhausted: There is no memory for it.
        """
        fd, start = self._part(name, offset, byte_size)
        try:
            data = _all(lambda at: os.pread(fd, byte_size - at, start + at), byte_size)
        except MemoryError:
            raise ResourceExhausted(f"no memory for {byte_size} bytes of region {name!r}") from None
        finally:
            os.close(fd)
        if len(data) != byte_size:
            raise InvalidArgument(f"region {name!r} ended after {len(data)} of {byte_size} bytes; its owner cut it")
        return data

    def write(self, name: str, offset: int, byte_size: int, data: memoryview) -> None:
        """Copy a tensor into a region; raises as `read`, also if it has no room for it."""
        if len(data) > byte_size:
            raise InvalidArgument(f"an output of {len(data)} bytes does not fit into {byte_size} of region {name!r}")
        fd, start = self._part(name, offset, byte_size)
        try:
            if start + len(data) > os.fstat(fd).st_size:
                raise InvalidArgument(f"region {name!r} is shorter than when it was registered; its owner cut it")
            written = 0
            while written < len(data):
                written += os.pwrite(fd, data[written:], start + written)
        except OSError as error:
            raise InvalidArgument(f"region {name!r} cannot be written: {error.strerror}") from None
        finally:
            os.close(fd)

    def close(self) -> None:
        """Forget all."""
        self.unregister("")

    def _part(self, name: str, offset: int, byte_size: int) -> tuple[int, int]:
        """Return a descriptor of its own, which outlives an `unregister` meanwhile, and where the part begins."""
        with self._lock:
            region = self._regions.get(name)
            if region is None:
                raise InvalidArgument(f"no region {name!r} is registered")
            if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
                raise InvalidArgument(
                    f"region {name!r} has {region.byte_size} bytes, which {byte_size} at {offset} are not part of"
                )
            return os.dup(region.fd), region.offset + offset


def _all(read: object, size: int) -> bytes:
    assert callable(read)
    parts: list[bytes] = []
    got = 0
    while got < size and (part := read(got)):
        parts.append(part)
        got += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
