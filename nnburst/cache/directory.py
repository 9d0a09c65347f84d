"""The directory in which a client keeps the cache files of its compilations.

::

    CACHEDIR.TAG   declined   locks/<hh>.build   locks/<hh>.pub
    objects/<hh>/<entry>.<generation>/{model.NN, data.NN}
    staging/<random>/

An entry is written in `staging` and becomes visible by one rename. `<hh>` are the first two digits of the entry: its
shard. A shard has two locks. Writers take the `build` lock. Readers share the `pub` lock. Publishers and removers take
the `pub` lock exclusively.
The modification time of an entry's directory is the time of the entry's last use.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache

from msgspec import Struct

from .._core.fds import close_fds
from ..errors import InvalidArgument
from .files import FileLock, default_cache_directory, lock, open_directory, open_file, open_in, reason_of, remove_tree
from .reasons import CacheReason, CacheRejected

_log = logging.getLogger("nnburst.cache")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Compilation cache of nnburst; may be deleted at any time.\n"
_DECLINED_OFTEN = 3
_MOST_DECLINED = 1 << 20
"""Largest size of the file `declined` in bytes; a larger file is removed."""
_DOWN_TO = 0.8
"""Fraction of an exceeded limit at which eviction stops, so that the next saves need no eviction."""
_TRASH = "trash-"
_HEX = set("0123456789abcdef")
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_UNUSABLE = (
    CacheReason.DISK_FULL,
    CacheReason.IO_ERROR,
    CacheReason.MISSING,
    CacheReason.NO_STORE,
    CacheReason.READ_ONLY,
    CacheReason.REMOTE_FILES,
    CacheReason.UNSAFE_PATH,
)
_BY_DESCRIPTOR = "/proc/self/fd/"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_warned_of: set[CacheReason] = set()


def amount(text: str) -> int | None:
    """Read a size with or without a unit, for example ``500M`` or ``2 GiB``; None for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([kmgt]?)(?:i?b)?", text.strip().lower())
    number = float(match[1]) * _UNITS[match[2]] if match is not None else math.inf
    return int(number) if math.isfinite(number) else None


class Limits(Struct, frozen=True):
    """Limits of a cache directory.

    Attributes:
        max_bytes: Bytes of all entries; 0 turns caching off.
        max_entries: Number of entries.
    """

    max_bytes: int = 2 << 30
    max_entries: int = 10_000

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the default limits. ``NNBURST_CACHE_MAX_BYTES``, such as 500M, replaces the default `max_bytes`."""
        text = os.environ.get("NNBURST_CACHE_MAX_BYTES", "") if os.getuid() == os.geteuid() else ""
        if not text:
            return cls()
        size = amount(text)
        if size is None:
            _warn_of(text)
            return cls()
        return cls(max_bytes=size)


@cache
def _warn_of(text: str) -> None:
    _log.warning("NNBURST_CACHE_MAX_BYTES=%r is not a size and is ignored; give a number, or one like 500M", text)


class EntryInfo(Struct, frozen=True):
    """One entry of a cache directory.

    Attributes:
        entry: Name: 64 hex digits.
        generation: 32 hex digits.
        nbytes: Bytes of all files.
        used: Time of the save or last use; seconds since 1970.
    """

    entry: str
    generation: str
    nbytes: int
    used: int


class Pruned(Struct, frozen=True):
    """The result of a clean-up: number and bytes of removed entries, and number of entries that were in use."""

    entries: int
    nbytes: int
    busy: int


class OpenedEntry(Struct, frozen=True):
    """An entry open for reading. No process removes the entry before `close`, which is idempotent."""

    generation: str
    model_fds: list[int]
    data_fds: list[int]
    close: Callable[[], None]


@dataclass(frozen=True)
class StagedEntry:
    """An entry that is being written and is not visible yet.

    Attributes:
        waited: True if `stage` had to wait for another process that wrote the entry.
    """

    entry: str
    model_fds: list[int]
    data_fds: list[int]
    waited: bool
    _cache: Cache
    _name: str
    _directory: int
    _held: ExitStack

    def publish(self, generation: bytes) -> None:
        """Make the entry visible in one step. Older generations stay until `finish`.

        Raises:
            OSError, CacheRejected: The entry cannot be published, and stays staged.
        """
        os.fsync(self._directory)
        self._cache.hook("staged")
        held = self._cache._lock(self.entry, "pub", shared=False, timeout=10.0)
        if held is None:
            raise CacheRejected(CacheReason.BUSY, "the entry is in use all the time")
        self._held.callback(held.close)
        with (
            self._cache.place("staging") as staging,
            self._cache.place("objects", self.entry[:2], create=True) as shard,
        ):
            os.rename(self._name, f"{self.entry}.{generation.hex()}", src_dir_fd=staging, dst_dir_fd=shard)
            os.fsync(shard)
        self._cache.hook("published")

    def finish(self, generation: bytes) -> None:
        """Remove older generations, and close. Call this after the device has confirmed the published generation."""
        self._cache.hook("confirmed")
        with suppress(CacheRejected), self._cache.place("objects", self.entry[:2]) as shard:
            for name in _generations(shard, self.entry):
                if name != f"{self.entry}.{generation.hex()}":
                    remove_tree(shard, name)
        self.close()

    def close(self) -> None:
        """Release the lock, and remove unpublished files. Idempotent."""
        self._held.close()


class Cache:
    """A cache directory of this user, which several processes can share. Thread safe.

    Args:
        root: The directory, or a descriptor of it. The first save makes a missing directory, with mode 0700.
        limits: Largest size and number of entries; None for the limits that the environment sets.
        hook: Called with the name of each step of a publication, for tests.

    Raises:
        InvalidArgument: `root` or `limits` has a wrong type.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | int | None = None,
        limits: Limits | None = None,
        *,
        hook: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._nowhere: CacheRejected | None = None
        try:
            place = default_cache_directory() if root is None or (isinstance(root, str) and not root) else root
            if isinstance(place, bool) or not isinstance(place, str | bytes | os.PathLike | int):
                raise InvalidArgument(f"the cache directory is {type(place).__name__}; give a path or a descriptor")
            self._root = f"{_BY_DESCRIPTOR}{place}" if isinstance(place, int) else os.fsdecode(place)
        except CacheRejected as error:  # The first use of the cache raises the error.
            self._root, self._nowhere = "", error
        if "\0" in self._root:
            raise InvalidArgument(f"the cache directory {self._root!r} cannot be a path: it contains a NUL")
        if not isinstance(limits, Limits | None):
            raise InvalidArgument(f"limits is {type(limits).__name__}; give nnburst.cache.directory.Limits")
        self.limits = limits or Limits.from_environment()
        self.hook = hook

    @property
    def path(self) -> str:
        """The directory. Raises `CacheRejected` if there is none (see `default_cache_directory`)."""
        if self._nowhere is not None:
            raise self._nowhere
        return self._root

    @contextmanager
    def place(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open the directory, or the subdirectory `names`, for a with block.

        An `OSError`, even in the with block, becomes a `CacheRejected`.
        """
        try:
            with ExitStack() as stack:
                fd = open_directory(self.path, create=create)
                stack.callback(os.close, fd)
                for name in names:
                    fd = stack.enter_context(open_in(fd, name, create=create))
                yield fd
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error

    def _lock(self, entry: str, kind: str, *, shared: bool, timeout: float = 0.0) -> FileLock | None:
        with self.place("locks", create=True) as locks:
            return lock(locks, f"{entry[:2]}.{kind}", shared=shared, timeout=timeout)

    # ---- finding -----------------------------------------------------------------------------------------------

    def look_up(self, entry: str, counts: tuple[int, int]) -> Iterator[OpenedEntry]:
        """Open the generations of an entry, newest first; usually there is one. The caller closes each `OpenedEntry`.

        Args:
            counts: See `stage`.

        Raises:
            CacheRejected: There is no generation, or a generation cannot be opened: see the error's `reason`.
        """
        self._check_on()
        with self.place("objects", entry[:2]) as shard:
            names = _generations(shard, entry)
            names.sort(key=lambda name: os.stat(name, dir_fd=shard, follow_symlinks=False).st_mtime_ns)
        if not names:
            raise CacheRejected(CacheReason.MISSING, "there is no such entry")
        for name in reversed(names):
            yield self._open(entry, name, counts)

    def generations(self, entry: str) -> set[str]:
        with suppress(CacheRejected), self.place("objects", entry[:2]) as shard:
            return {name.partition(".")[2] for name in _generations(shard, entry)}
        return set()

    def _open(self, entry: str, name: str, counts: tuple[int, int]) -> OpenedEntry:
        held = self._lock(entry, "pub", shared=True, timeout=5.0)
        if held is None:
            raise CacheRejected(CacheReason.BUSY, "the entry is being replaced")
        with ExitStack() as stack:
            stack.callback(held.close)
            fds: list[int] = []
            stack.callback(close_fds, fds)
            try:
                with self.place("objects", entry[:2], name) as place:
                    for file in _file_names(counts):
                        fds.append(open_file(place, file))
            except CacheRejected as error:
                if error.reason is not CacheReason.MISSING:
                    raise
                raise CacheRejected(CacheReason.PARTIAL_SET, "some files of the entry are missing") from error
            models = counts[0]
            return OpenedEntry(name.partition(".")[2], fds[:models], fds[models:], stack.pop_all().close)

    def note_use(self, entry: str, generation: str) -> None:
        """Record the current time as an entry's last use."""
        with suppress(CacheRejected), self.place("objects", entry[:2], f"{entry}.{generation}") as place:
            os.utime(place)

    # ---- saving ------------------------------------------------------------------------------------------------

    def _check_on(self) -> None:
        if self.limits.max_bytes == 0 or os.environ.get("NNBURST_CACHE") == "0":
            raise CacheRejected(CacheReason.DISABLED, "caching is turned off")

    def warn_of(self, reason: CacheReason, why: object = "") -> None:
        """Warn once if `reason` makes this directory unusable. The warning says `why`, or the reason."""
        if reason in _UNUSABLE:
            level = logging.DEBUG if reason in _warned_of else logging.WARNING
            _warned_of.add(reason)
            _log.log(level, "%s: nothing is cached here: %s", self._root, why or reason.value)

    def decline(self, entry: str, reason: CacheReason) -> None:
        """Record that a device declined to save an entry."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(CacheRejected), self.place(create=True) as root:
            with os.fdopen(os.open("declined", flags, 0o600, dir_fd=root), "a") as file:
                file.write(f"{entry} {reason.value}\n")
                full = file.tell() > _MOST_DECLINED
            if full:
                os.unlink("declined", dir_fd=root)

    def _read_declined(self, entry: str) -> list[CacheReason]:
        with suppress(CacheRejected, ValueError), self.place() as root, os.fdopen(open_file(root, "declined")) as file:
            return [CacheReason(line[len(entry) :].strip()) for line in file if line.startswith(entry)]
        return []

    def stage(self, entry: str, counts: tuple[int, int], *, timeout: float = 30.0) -> StagedEntry:
        """Make empty files for a new generation of an entry.

        Args:
            counts: Number of model files and of data files.
            timeout: Seconds to wait while another process writes the entry.

        Raises:
            CacheRejected: The files cannot be made (BUSY, DISK_FULL, READ_ONLY, …): compile without saving.
        """
        self._check_on()
        reasons = self._read_declined(entry)
        if len(reasons) >= _DECLINED_OFTEN:
            raise CacheRejected(reasons[-1], "the device declined to save this three times")
        with self.place(create=True) as root:
            self.sweep()
            with suppress(FileExistsError), os.fdopen(os.open("CACHEDIR.TAG", _NEW, 0o600, dir_fd=root), "wb") as tag:
                tag.write(_TAG)
        held = self._lock(entry, "build", shared=False)
        waited = held is None
        if held is None:
            self.hook("waits")
            held = self._lock(entry, "build", shared=False, timeout=timeout)
        if held is None:
            raise CacheRejected(CacheReason.BUSY, "another process is writing this entry")
        with ExitStack() as stack:
            stack.callback(held.close)
            name = f"{os.getpid()}-{os.urandom(8).hex()}"
            stack.callback(self._discard, name)
            fds: list[int] = []
            with self.place("staging", create=True) as staging:
                directory = stack.enter_context(open_in(staging, name, create=True))
                stack.callback(close_fds, fds)
                for file in _file_names(counts):
                    fds.append(os.open(file, _NEW, 0o600, dir_fd=directory))
            models, data = fds[: counts[0]], fds[counts[0] :]
            return StagedEntry(entry, models, data, waited, self, name, directory, stack.pop_all())

    def _discard(self, name: str) -> None:
        with suppress(CacheRejected), self.place("staging") as staging:
            remove_tree(staging, name)

    def remove(self, entry: str, generation: str) -> int:
        """Remove a generation and return its size in bytes; return -1 if it is in use."""
        held = self._lock(entry, "pub", shared=False)
        if held is None:
            return -1
        try:
            with (
                closing(held),
                self.place("objects", entry[:2]) as shard,
                self.place("staging", create=True) as staging,
            ):
                trash = f"{_TRASH}{os.urandom(8).hex()}"
                os.rename(f"{entry}.{generation}", trash, src_dir_fd=shard, dst_dir_fd=staging)
                return remove_tree(staging, trash)
        except CacheRejected as error:
            if error.reason is not CacheReason.MISSING:
                raise
            return 0

    def enforce_limits(self) -> None:
        """Remove entries beyond the limits. Log errors instead of raising them."""
        try:
            self.prune()
        except Exception as error:
            _log.warning("%s: the limits of the cache were not enforced: %s", self._root, error)

    def prune(self, max_bytes: int | None = None) -> Pruned:
        """Remove files of interrupted saves, and the least recently used entries beyond the limits.

        Args:
            max_bytes: Limit in place of `limits.max_bytes`; 0 removes all entries that are not in use.
        """
        self.sweep()
        there = sorted(self.entries(), key=lambda info: info.used)
        total, count, busy = sum(info.nbytes for info in there), len(there), 0
        most_bytes = self.limits.max_bytes if max_bytes is None else max_bytes
        most_entries = 0 if max_bytes == 0 else self.limits.max_entries
        if total > most_bytes:
            most_bytes = int(most_bytes * _DOWN_TO)
        if count > most_entries:
            most_entries = int(most_entries * _DOWN_TO)
        for info in there:
            if total <= most_bytes and count <= most_entries:
                break
            if self.remove(info.entry, info.generation) < 0:
                busy += 1
            else:
                total -= info.nbytes
                count -= 1
        return Pruned(len(there) - count, sum(info.nbytes for info in there) - total, busy)

    def sweep(self) -> None:
        """Remove from `staging` all files of deleted entries, and files of incomplete saves after an hour."""
        old = time.time() - 3600
        with suppress(CacheRejected), self.place("staging") as staging:
            for name in os.listdir(staging):
                with suppress(FileNotFoundError):  # Another process has just removed the directory.
                    if name.startswith(_TRASH) or os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < old:
                        remove_tree(staging, name)

    # ---- looking -----------------------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Return all entries. Raises `CacheRejected` if the directory cannot be listed."""
        found = []
        try:
            with self.place("objects") as objects:
                for shard in sorted(name for name in os.listdir(objects) if len(name) == 2 and set(name) <= _HEX):
                    with suppress(OSError, CacheRejected), open_in(objects, shard) as place:
                        found += [_describe(place, name) for name in sorted(os.listdir(place)) if _is_entry(name)]
        except CacheRejected as error:
            if error.reason is not CacheReason.MISSING:
                raise
        return found


def _describe(shard: int, name: str) -> EntryInfo:
    """Describe the entry whose directory `name` is in the directory `shard`. Its size is 0 if it cannot be read."""
    entry, _, generation = name.partition(".")
    nbytes = used = 0
    with suppress(OSError, CacheRejected), open_in(shard, name) as place:
        used = int(os.fstat(place).st_mtime)
        nbytes = sum(os.stat(file, dir_fd=place, follow_symlinks=False).st_size for file in os.listdir(place))
    return EntryInfo(entry, generation, nbytes, used)


def _file_names(counts: tuple[int, int]) -> Iterator[str]:
    return (f"{kind}.{i:02}" for kind, count in zip(("model", "data"), counts, strict=True) for i in range(count))


def _is_entry(name: str) -> bool:
    entry, _, generation = name.partition(".")
    return len(entry) == 64 and len(generation) == 32 and set(entry + generation) <= _HEX


def _generations(shard: int, entry: str) -> list[str]:
    return [name for name in os.listdir(shard) if name.startswith(entry + ".")]
