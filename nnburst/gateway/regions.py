"""Shared memory of clients, by name: tensors lie there, and are not sent.

A region is mapped behind the guard of `nnburst.memory`, and each tensor is copied once: what a client does to its
memory meanwhile changes numbers, never the gateway.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core.shm import shm_open
from ..errors import BadState, InvalidArgument, ResourceExhausted
from ..memory.memory import Memory

_MOST_REGIONS = 1024
_MOST_NAME = 255
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_KEY = re.compile(r"/?[^/\0]+")


@dataclass(frozen=True, slots=True)
class RegisteredRegion:
    """One registered region.

    Attributes:
        key: Name of the POSIX shared memory.
        offset, byte_size: The part of it that is the region.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    memory: Memory

    def check(self) -> None:
        """Check that the bytes that were read or written existed.

        Raises:
            InvalidArgument: The owner of the memory has made it shorter, or it has no room for what was written.
        """
        if self.memory.faults:
            raise _cut(self.name)


class Regions:
    """The regions that clients have registered. The loop's thread changes them; any thread may read and write parts.

    Args:
        allowed: True if clients may register memory at all.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, RegisteredRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> dict[str, Any]:
        """Register a part of a POSIX shared memory.

        Raises:
            BadState: The name is taken.
            InvalidArgument: The gateway takes no shared memory; the name or key is none, or the memory is not there or
                not as large.
            ResourceExhausted: Too many regions.
        """
        if not self.allowed:
            raise InvalidArgument("no shared memory is taken here; start it with --oip-shared-memory")
        if not name or len(name) > _MOST_NAME:
            raise InvalidArgument(f"the name of a region has 1 to {_MOST_NAME} characters, got {len(name)}")
        if not _KEY.fullmatch(key) or key.strip("/") in (".", "..") or len(key) > _MOST_NAME:
            raise InvalidArgument(f"region {name!r}: {key!r} is no name of a POSIX shared memory (like '/tensors')")
        if offset < 0 or byte_size < 1:
            raise InvalidArgument(f"region {name!r}: offset {offset} and size {byte_size} are no part of a memory")
        if name in self._regions:
            raise BadState(f"a region {name!r} is registered already; unregister it first")
        if len(self._regions) >= _MOST_REGIONS:
            raise ResourceExhausted(f"{_MOST_REGIONS} regions are registered; unregister some")
        memory = self._opened(name, key, offset, byte_size)
        self._regions[name] = RegisteredRegion(name, key, offset, byte_size, memory)
        return {}

    @staticmethod
    def _opened(name: str, key: str, offset: int, byte_size: int) -> Memory:
        try:
            fd = shm_open(key if key.startswith("/") else f"/{key}", os.O_RDWR)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"region {name!r}: cannot open the shared memory {key!r}: {error}") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or offset + byte_size > found.st_size:
                raise InvalidArgument(
                    f"region {name!r}: the shared memory {key!r} has {found.st_size} bytes, not {offset} + {byte_size}"
                )
            return Memory.mmap_fd(fd, byte_size, offset=offset, direct=True)
        finally:
            os.close(fd)

    def unregister(self, name: str) -> dict[str, Any]:
        """Forget a region; all of them for an empty name. An unknown name is not an error.

        Requests under way keep the memory until they have ended.
        """
        for each in [name] if name else list(self._regions):
            self._regions.pop(each, None)
        return {}

    def status(self, name: str) -> list[dict[str, Any]]:
        """Return one region, or all for an empty name.

        Raises:
            InvalidArgument: No region has this name.
        """
        found = [self._found(name)] if name else list(self._regions.values())
        return [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found]

    def part(self, name: str, offset: int, byte_size: int) -> tuple[_Bytes, RegisteredRegion]:
        """Return a part of a region, to be read or written once, and the region, to be checked after that.

        They can be used after the region was forgotten, until the request has ended.

        Raises:
            InvalidArgument: No such region, or no such part of it; or its owner has made it shorter.
            ResourceExhausted: The process has no room for it.
        """
        region = self._found(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InvalidArgument(
                f"region {name!r} has {region.byte_size} bytes, which {byte_size} at {offset} are not part of"
            )
        # Where a page ends with the memory there are zeros, and nothing that faults.
        if region.offset + region.byte_size > os.fstat(region.memory.fds[0]).st_size:
            raise _cut(name)
        whole = region.memory._map_for(writable=True).bytes()
        region.check()
        return whole[offset : offset + byte_size], region

    def _found(self, name: str) -> RegisteredRegion:
        if (region := self._regions.get(name)) is None:
            raise InvalidArgument(f"no region {name!r} is registered")
        return region


def _cut(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"region {name!r} has lost pages since it was registered: its owner cut it, or /dev/shm is full; "
        "register it again"
    )
