"""The directory where a client keeps the files of its compilations (facts sheet `caching.md` §8.4, §8.7, §8.10).

::

    CACHEDIR.TAG   index.sqlite3   locks/<hh>.build   locks/<hh>.pub
    objects/<hh>/<entry>.<generation>/{model.NN, data.NN, MANIFEST}
    staging/<random>/

An entry is written in `staging` and becomes visible by one rename; files are never written in place. Readers hold
the shared `pub` lock of an entry's shard, writers the `build` lock, who publishes or removes the exclusive `pub` lock.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._files import Lock, directory, lock, open_file, opened, reason_of, remove_tree, subdirectory
from ._index import EntryInfo, Index
from ._reasons import CacheReason, CacheRejected

__all__ = ["Cache", "Limits", "Opened", "Staged", "default_cache_directory"]

_log = logging.getLogger("nnburst.cache")
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Compilation cache of nnburst; may be deleted at any time.\n"
_DECLINED_OFTEN = 3
_HEX = set("0123456789abcdef")
_OFF = (CacheReason.READ_ONLY, CacheReason.DISK_FULL)


def default_cache_directory() -> Path:
    """Where compilations are cached: ``NNBURST_CACHE_DIR``, else the user's cache home."""
    if (given := os.environ.get("NNBURST_CACHE_DIR")) and os.getuid() == os.geteuid():
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nnburst" / "v1"


@dataclass(frozen=True, slots=True)
class Limits:
    """What a cache directory may take; 0 means no limit, but for `max_bytes`, where it means no caching.

    Attributes:
        max_bytes: Of all entries.
        max_entry_bytes: Of one.
        max_entries: How many.
        max_age: Seconds since an entry was last used.
        min_free: Bytes that the file system keeps free.
        policy: ``value`` (compile time saved per byte, decaying) or ``lru``.
    """

    max_bytes: int = 2 << 30
    max_entry_bytes: int = 512 << 20
    max_entries: int = 10_000
    max_age: float = 90 * 86400.0
    min_free: int = 256 << 20
    policy: str = "value"

    @classmethod
    def from_environment(cls) -> Limits:
        """Return the defaults, with ``NNBURST_CACHE_MAX_BYTES``."""
        given = os.environ.get("NNBURST_CACHE_MAX_BYTES", "") if os.getuid() == os.geteuid() else ""
        return cls(max_bytes=int(given)) if given.isdigit() else cls()


class Opened:
    """An entry that is open; nobody removes it meanwhile."""

    def __init__(self, generation: str, model_fds: list[int], data_fds: list[int], held: Lock) -> None:
        self.generation = generation
        self.model_fds = model_fds
        self.data_fds = data_fds
        self._held = held

    def close(self) -> None:
        """Close the files and let go. Idempotent."""
        fds, self.model_fds, self.data_fds = [*self.model_fds, *self.data_fds], [], []
        for fd in fds:
            os.close(fd)
        self._held.close()


class Staged:
    """An entry that is being written: empty files that nobody else sees."""

    def __init__(self, cache: Cache, entry: str, name: str, fd: int, counts: tuple[int, int], held: Lock) -> None:
        self._cache = cache
        self.entry = entry
        self._name = name
        self._fd = fd
        self._held = held
        self._published: tuple[str, Lock] | None = None
        self.model_fds: list[int] = []
        self.data_fds: list[int] = []
        for fds, kind, count in ((self.model_fds, "model", counts[0]), (self.data_fds, "data", counts[1])):
            for i in range(count):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fds.append(os.open(f"{kind}.{i:02}", flags, 0o600, dir_fd=fd))

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        return sum(os.fstat(fd).st_size for fd in (*self.model_fds, *self.data_fds))

    def publish(self, generation: bytes, info: EntryInfo) -> None:
        """Make the entry visible, in one step. Older generations stay until `finish`.

        Raises:
            OSError: It could not be done; the entry stays staged.
        """
        values = {name: getattr(info, name) for name in info.__slots__}
        fd = os.open("MANIFEST", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._fd)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(values, file)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self._fd)
        self._cache.hook("staged")
        self._published = self._cache._publish(self._name, self.entry, generation.hex(), info)

    def finish(self) -> None:
        """The device knows the new generation: remove older ones, and let go."""
        if self._published is not None:
            self._cache._retire(self.entry, self._published[0])
        self.close()

    def close(self) -> None:
        """Let go; what was not published is removed. Idempotent."""
        if self._fd < 0:
            return
        fds, self.model_fds, self.data_fds = [*self.model_fds, *self.data_fds], [], []
        for fd in (*fds, self._fd):
            os.close(fd)
        self._fd = -1
        if self._published is not None:
            self._published[1].close()
        else:
            self._cache._discard(self._name)
        self._held.close()


class Cache:
    """A cache directory of this user. Several processes may share it; thread safe.

    Args:
        root: The directory; made with mode 0700 when something is saved. Or a descriptor of it.
        limits: What it may take.
        hook: Called with the name of each step of a publication, for tests of what happens if it ends there.
    """

    def __init__(
        self,
        root: str | os.PathLike[str] | int | None = None,
        limits: Limits | None = None,
        *,
        hook: Callable[[str], None] = lambda step: None,
    ) -> None:
        self._root = f"/proc/self/fd/{root}" if isinstance(root, int) else os.fspath(root or default_cache_directory())
        self.limits = limits or Limits.from_environment()
        self.hook = hook
        self.index = Index(os.path.join(self._root, "index.sqlite3"))
        self._off: CacheReason | None = None
        self._warned = threading.Lock()

    @property
    def path(self) -> str:
        """The directory."""
        return self._root

    # ---- finding -----------------------------------------------------------------------------------------------

    @contextmanager
    def _tree(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open a directory of the tree; every component is opened by name below the one before it."""
        with ExitStack() as stack:
            fd = directory(self._root, create=create)
            stack.callback(os.close, fd)
            for name in names:
                fd = subdirectory(fd, name, create=create)
                stack.callback(os.close, fd)
            yield fd

    def _lock(self, entry: str, kind: str, *, shared: bool, patience: float = 0.0) -> Lock | None:
        with self._tree("locks", create=True) as locks:
            return lock(locks, f"{entry[:2]}.{kind}", shared=shared, patience=patience)

    def look_up(self, entry: str, counts: tuple[int, int]) -> Iterator[Opened]:
        """Open the generations of an entry, the newest first. Usually there is one. The caller closes each.

        Raises:
            CacheRejected: There is none, or none that can be opened; the reason says why.
        """
        self._check_on()
        try:
            with self._tree("objects", entry[:2]) as shard:
                names = [name for name in os.listdir(shard) if name.startswith(entry + ".")]
                names.sort(key=lambda name: os.stat(name, dir_fd=shard, follow_symlinks=False).st_mtime_ns)
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error
        if not names:
            raise CacheRejected(CacheReason.MISSING, "there is no such entry")
        for name in reversed(names):
            yield self._open(entry, name, counts)

    def _open(self, entry: str, name: str, counts: tuple[int, int]) -> Opened:
        held = self._lock(entry, "pub", shared=True, patience=5.0)
        if held is None:
            raise CacheRejected(CacheReason.BUSY, "the entry is being replaced")
        fds: tuple[list[int], list[int]] = ([], [])
        try:
            with self._tree("objects", entry[:2], name) as place:
                for given, kind, count in zip(fds, ("model", "data"), counts, strict=True):
                    for i in range(count):
                        given.append(open_file(place, f"{kind}.{i:02}"))
            return Opened(name.partition(".")[2], *fds, held)
        except BaseException as error:
            for fd in (*fds[0], *fds[1]):
                os.close(fd)
            held.close()
            if isinstance(error, FileNotFoundError):
                raise CacheRejected(CacheReason.PARTIAL_SET, "some files of the entry are missing") from error
            if isinstance(error, OSError):
                raise CacheRejected(reason_of(error), f"{name}: {error.strerror}") from error
            raise

    # ---- saving ------------------------------------------------------------------------------------------------

    def _check_on(self) -> None:
        if self.limits.max_bytes == 0 or os.environ.get("NNBURST_CACHE") == "0":
            raise CacheRejected(CacheReason.DISABLED, "caching is turned off")
        if self._off is not None:
            raise CacheRejected(self._off, "caching was given up for this directory")

    def give_up(self, reason: CacheReason) -> None:
        """Stop caching in this directory if the reason will not go away; say so once."""
        with self._warned:
            if reason in _OFF and self._off is None:
                self._off = reason
                _log.warning("%s: caching is off for this process: %s", self._root, reason.value)

    def stage(self, entry: str, counts: tuple[int, int], *, patience: float = 30.0) -> Staged:
        """Make empty files for an entry.

        Args:
            entry: Its name.
            counts: Of model and data files.
            patience: Seconds to wait for somebody else who is writing it.

        Raises:
            CacheRejected: BUSY, DISK_FULL, READ_ONLY, …: compile without saving.
        """
        self._check_on()
        often, reason = self.index.declined(entry)
        if often >= _DECLINED_OFTEN:
            raise CacheRejected(reason, "the device declined to save this three times")
        held: Lock | None = None
        name = f"{os.getpid()}-{os.urandom(8).hex()}"
        try:
            with self._tree(create=True) as root:
                self._make_room(root)
                with suppress(FileExistsError):
                    tag = os.open("CACHEDIR.TAG", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=root)
                    os.write(tag, _TAG.encode())
                    os.close(tag)
            held = self._lock(entry, "build", shared=False, patience=patience)
            if held is None:
                raise CacheRejected(CacheReason.BUSY, "another process is writing this entry")
            with self._tree("staging", create=True) as staging:
                fd = subdirectory(staging, name, create=True)
            return Staged(self, entry, name, fd, counts, held)
        except OSError as error:
            if held is not None:
                held.close()
            self._discard(name)
            self.give_up(reason_of(error))
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error

    def _make_room(self, root: int) -> None:
        floor = self.limits.min_free
        if floor and _free(root) < floor:
            from ._eviction import prune

            prune(self, max_bytes=0)
            if _free(root) < floor:
                raise CacheRejected(CacheReason.DISK_FULL, f"less than {floor >> 20} MiB are free")

    def _publish(self, name: str, entry: str, generation: str, info: EntryInfo) -> tuple[str, Lock]:
        held = self._lock(entry, "pub", shared=False, patience=10.0)
        if held is None:
            raise OSError(16, "the entry is in use all the time")
        try:
            with self._tree("staging") as staging, self._tree("objects", entry[:2], create=True) as shard:
                target = f"{entry}.{generation}"
                os.rename(name, target, src_dir_fd=staging, dst_dir_fd=shard)
                os.fsync(shard)
        except BaseException:
            held.close()
            raise
        self.hook("published")
        self.index.put(info)
        return generation, held

    def _retire(self, entry: str, generation: str) -> None:
        """Remove other generations; with the exclusive lock held."""
        self.hook("confirmed")
        with suppress(OSError, CacheRejected), self._tree("objects", entry[:2]) as shard:
            for name in os.listdir(shard):
                if name.startswith(entry + ".") and name != f"{entry}.{generation}":
                    remove_tree(shard, name)
                    self.index.remove(entry, name.partition(".")[2])

    def _discard(self, name: str) -> None:
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            remove_tree(staging, name)

    def remove(self, entry: str, generation: str, *, patience: float = 0.0) -> int:
        """Remove a generation that nobody uses. Returns the bytes, or -1 if somebody does."""
        held = self._lock(entry, "pub", shared=False, patience=patience)
        if held is None:
            return -1
        try:
            with self._tree("objects", entry[:2]) as shard, self._tree("staging", create=True) as staging:
                trash = f"trash-{os.urandom(8).hex()}"
                os.rename(f"{entry}.{generation}", trash, src_dir_fd=shard, dst_dir_fd=staging)
                freed = remove_tree(staging, trash)
        except FileNotFoundError:
            freed = 0
        finally:
            held.close()
        self.index.remove(entry, generation)
        return freed

    def enforce_limits(self) -> None:
        """Evict what is worth least, if there is too much."""
        from ._eviction import prune

        limits, entries = self.limits, self.index.all().values()
        if (limits.max_bytes and sum(info.nbytes for info in entries) > limits.max_bytes) or (
            limits.max_entries and len(entries) > limits.max_entries
        ):
            with suppress(CacheRejected, OSError):
                prune(self)

    # ---- looking -------------------------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Return all entries that are there, with what the index or else the entry itself says of them.

        Raises:
            CacheRejected: The directory cannot be read.
        """
        known = self.index.all()
        found: list[EntryInfo] = []
        try:
            with self._tree("objects") as objects:
                for shard in sorted(os.listdir(objects)):
                    with opened(objects, shard) as place:
                        for name in sorted(os.listdir(place)):
                            entry, _, generation = name.partition(".")
                            if len(entry) == 64 and len(generation) == 32 and set(entry + generation) <= _HEX:
                                info = known.get((entry, generation)) or self._from_manifest(place, entry, generation)
                                found.append(info)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error
        return found

    def _from_manifest(self, shard: int, entry: str, generation: str) -> EntryInfo:
        """Read what an entry says of itself, and note it again."""
        values: dict[str, Any] = {}
        with suppress(OSError, ValueError, CacheRejected), opened(shard, f"{entry}.{generation}") as place:
            fd = open_file(place, "MANIFEST")
            with os.fdopen(fd, "rb") as file:
                values = json.loads(file.read(1 << 16))
        info = EntryInfo(entry, generation)
        wanted = {name: type(getattr(info, name)) for name in info.__slots__}
        if isinstance(values, dict) and all(type(values.get(name)) is kind for name, kind in wanted.items()):
            info = EntryInfo(**{**{name: values[name] for name in wanted}, "entry": entry, "generation": generation})
            self.index.put(info)
        return info

    def files_of(self, info: EntryInfo, counts: Sequence[int] | None = None) -> Opened:
        """Open the files of an entry, as many as there are; raises as `look_up`."""
        if counts is None:
            with self._tree("objects", info.entry[:2], f"{info.entry}.{info.generation}") as place:
                names = os.listdir(place)
            counts = [sum(name.startswith(kind) for name in names) for kind in ("model.", "data.")]
        return self._open(info.entry, f"{info.entry}.{info.generation}", (counts[0], counts[1]))

    def stats(self) -> dict[str, int]:
        """Return how often each outcome came about, by reason."""
        return self.index.counters()

    def find(self, prefix: str) -> list[EntryInfo]:
        """Return the entries whose name begins so."""
        return [info for info in self.entries() if info.entry.startswith(prefix.lower())] if prefix else []

    def litter(self) -> list[str]:
        """Return what is left in `staging` of saves that were cut off more than an hour ago."""
        old = time.time() - 3600
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            return [n for n in os.listdir(staging) if os.stat(n, dir_fd=staging, follow_symlinks=False).st_mtime < old]
        return []

    def sweep(self, names: Sequence[str]) -> int:
        """Remove litter; returns the bytes."""
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            return sum(remove_tree(staging, name) for name in names)
        return 0


def _free(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
