"""Shared memory that clients register by name, for tensors that are not sent over the network.

A client that writes to its memory during a request can change numbers in the request's tensors. A client that shortens
its memory cannot crash the gateway: `nnburst.memory` guards mappings, and each tensor is copied once.
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
    """A registered region of shared memory.

    Attributes:
        key: Name of the POSIX shared memory.
        offset, byte_size: Start and length of the region in the memory.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    memory: Memory

    def check(self) -> None:
        """Check, after a read or write, that the memory was long enough.

        Raises:
            InvalidArgument: The client has shortened the memory, or the system has no memory for the written bytes.
        """
        if self.memory.faults:
            raise _truncation_error(self.name)


class Regions:
    """The registered regions. Only the event loop's thread may register and remove regions. Any thread may read and
    write parts of regions.

    Args:
        allowed: True if clients may register memory.
    """

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed
        self._regions: dict[str, RegisteredRegion] = {}

    def register(self, name: str, key: str, offset: int, byte_size: int) -> dict[str, Any]:
        """Register a part of a POSIX shared memory.

        Raises:
            BadState: The name is taken.
            InvalidArgument: The gateway allows no shared memory, the name or key is invalid, or the memory does not
                exist or is too small.
            ResourceExhausted: There are too many regions.
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
        memory = self._open(name, key, offset, byte_size)
        self._regions[name] = RegisteredRegion(name, key, offset, byte_size, memory)
        return {}

    @staticmethod
    def _open(name: str, key: str, offset: int, byte_size: int) -> Memory:
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
        """Remove a region, or all regions if the name is empty. An unknown name is not an error.

        Requests in progress keep the memory until they end.
        """
        for each in [name] if name else list(self._regions):
            self._regions.pop(each, None)
        return {}

    def status(self, name: str) -> list[dict[str, Any]]:
        """Return the description of one region, or of all regions if the name is empty.

        Raises:
            InvalidArgument: No region has this name.
        """
        found = [self._get(name)] if name else list(self._regions.values())
        return [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in found]

    def part(self, name: str, offset: int, byte_size: int) -> tuple[_Bytes, RegisteredRegion]:
        """Return a part of a region, and the region. Read or write the part once, then call the region's `check`.

        Part and region stay usable until the request ends, even if the region is unregistered.

        Raises:
            InvalidArgument: The region is unknown, the part is outside it, or the client has shortened the memory.
            ResourceExhausted: The process cannot map the memory.
        """
        region = self._get(name)
        if offset < 0 or byte_size < 0 or offset + byte_size > region.byte_size:
            raise InvalidArgument(
                f"region {name!r} has {region.byte_size} bytes, which {byte_size} at {offset} are not part of"
            )
        # Beyond the end of shortened memory, the last page reads as zeros, without a fault.
        if region.offset + region.byte_size > os.fstat(region.memory.fds[0]).st_size:
            raise _truncation_error(name)
        whole = region.memory._map_for(writable=True).bytes()
        region.check()
        return whole[offset : offset + byte_size], region

    def _get(self, name: str) -> RegisteredRegion:
        if (region := self._regions.get(name)) is None:
            raise InvalidArgument(f"no region {name!r} is registered")
        return region


def _truncation_error(name: str) -> InvalidArgument:
    return InvalidArgument(
        f"region {name!r} has lost pages since it was registered: its owner cut it, or /dev/shm is full; "
        "register it again"
    )
