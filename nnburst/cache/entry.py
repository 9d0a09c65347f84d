"""An entry of a cache directory, as its files describe it: for people and for eviction, never for trust."""

from __future__ import annotations

import os
from contextlib import suppress

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .files import open_file, opened
from .reasons import CacheRejected

MANIFEST = "MANIFEST"
"""The file with what an entry says of itself. Its time of change is the time of the last use."""


class EntryInfo(Struct, frozen=True):
    """One entry of a cache directory.

    Attributes:
        entry: 64 hex digits that name it.
        generation: 32 hex digits.
        device: Name of the device.
        version: Its version string.
        epoch: Hex digits of its build.
        files: How many.
        nbytes: Of all files.
        created: Seconds since 1970.
        used: When it was restored last, or written; likewise.
        compile_ms: Milliseconds that compiling took.
        pinned: Whether it is never evicted.
    """

    entry: str
    generation: str
    device: str = "?"
    version: str = "?"
    epoch: str = ""
    files: int = 0
    nbytes: int = 0
    created: int = 0
    used: int = 0
    compile_ms: float = 0.0
    pinned: bool = False

    def __post_init__(self) -> None:
        if not (self.device + self.version + self.epoch).isprintable():
            raise ValueError("an entry is shown on terminals, so its texts are printable")
        if not (0 <= self.created < 1 << 40 and 0 <= self.files <= 64 and 0 <= self.compile_ms < 1 << 53):
            raise ValueError("a date, a count or a time is out of range")


def described(shard: int, name: str) -> EntryInfo:
    """Look at the entry in a directory of a shard, of which nothing needs to make sense."""
    entry, _, generation = name.partition(".")
    info, nbytes, used = EntryInfo(entry, generation), 0, 0
    with suppress(OSError, CacheRejected), opened(shard, name) as place:
        info = replace(info, created=int(os.fstat(place).st_mtime))
        for file in os.listdir(place):
            if file.startswith(("model.", "data.")):
                nbytes += os.stat(file, dir_fd=place, follow_symlinks=False).st_size
        with os.fdopen(open_file(place, MANIFEST), "rb") as manifest:
            used = int(os.fstat(manifest.fileno()).st_mtime)
            with suppress(ValueError, RecursionError):
                info = msgspec.json.decode(manifest.read(1 << 16), type=EntryInfo)
    return replace(info, entry=entry, generation=generation, nbytes=nbytes, used=used or info.created)
