"""The directory where a client keeps the files of its compilations.

::

    CACHEDIR.TAG   index.sqlite3   locks/<hh>.build   locks/<hh>.pub   pins/<entry>
    objects/<hh>/<entry>.<generation>/{model.NN, data.NN, MANIFEST}
    staging/<random>/

An entry is written in `staging` and becomes visible by one rename; files are never written in place. Readers hold
the shared `pub` lock of an entry's shard, writers the `build` lock, who publishes or removes the exclusive `pub` lock.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from msgspec.structs import asdict, replace

from .._core.fds import close_fds
from ..errors import InvalidArgument
from .eviction import prune
from .files import FileLock, directory, lock, open_file, opened, reason_of, remove_tree, subdirectory
from .index import EntryInfo, Index
from .limits import Limits
from .places import default_cache_directory
from .reasons import CacheReason, CacheRejected

_log = logging.getLogger("nnburst.cache")
_TAG = "Signature: 8a477f597d28d172789f06886806bc55\n# Compilation cache of nnburst; may be deleted at any time.\n"
_DECLINED_OFTEN = 3
_TRASH = "trash-"
_HEX = set("0123456789abcdef")
_OFF = (CacheReason.READ_ONLY, CacheReason.DISK_FULL)
_UNUSABLE = (
    CacheReason.IO_ERROR,
    CacheReason.MISSING,
    CacheReason.NO_STORE,
    CacheReason.REMOTE_FILES,
    CacheReason.UNSAFE_PATH,
)
_BY_DESCRIPTOR = "/proc/self/fd/"
_given_up: dict[tuple[object, ...], CacheReason] = {}
"""Directories in which this process keeps nothing any more."""
_warned_of: set[CacheReason] = set()


class OpenedEntry:
    """An entry that is open; it is not removed meanwhile."""

    def __init__(self, generation: str, model_fds: list[int], data_fds: list[int], held: FileLock) -> None:
        self.generation = generation
        self.model_fds = model_fds
        self.data_fds = data_fds
        self._held = held

    def close(self) -> None:
        """Close the files and let go. Idempotent."""
        close_fds(self.model_fds)
        close_fds(self.data_fds)
        self._held.close()


class StagedEntry:
    """An entry that is being written: empty files that others do not see yet.

    Attributes:
        waited: Whether another process was writing before.
    """

    def __init__(self, cache: Cache, entry: str) -> None:
        self._cache = cache
        self.entry = entry
        self._name = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._directory: list[int] = []  # one, while it is open
        self._held: FileLock | None = None
        self.waited = False
        self._published: tuple[str, FileLock] | None = None
        self.model_fds: list[int] = []
        self.data_fds: list[int] = []

    def _open(self, counts: tuple[int, int], held: FileLock) -> None:
        """Make the files. Whatever fails, `close` cleans up."""
        self._held = held
        with self._cache._tree("staging", create=True) as staging:
            self._directory.append(subdirectory(staging, self._name, create=True))
        for fds, kind, count in ((self.model_fds, "model", counts[0]), (self.data_fds, "data", counts[1])):
            for i in range(count):
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fds.append(os.open(f"{kind}.{i:02}", flags, 0o600, dir_fd=self._directory[0]))

    @property
    def nbytes(self) -> int:
        return sum(os.fstat(fd).st_size for fd in (*self.model_fds, *self.data_fds))

    def publish(self, generation: bytes, info: EntryInfo) -> None:
        """Make the entry visible, in one step. Older generations stay until `finish`.

        Raises:
            OSError: It could not be done; the entry stays staged.
        """
        fd = os.open("MANIFEST", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=self._directory[0])
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(info), file)
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self._directory[0])
        self._cache.hook("staged")
        self._published = self._cache._publish(self._name, self.entry, generation.hex(), info)

    def finish(self) -> None:
        """The device knows the new generation: remove older ones, and let go."""
        if self._published is not None:
            self._cache._retire(self.entry, self._published[0])
        self.close()

    def close(self) -> None:
        """Let go; unpublished files are removed. Idempotent."""
        for fds in (self.model_fds, self.data_fds, self._directory):
            close_fds(fds)
        published, held, self._held = self._published, self._held, None
        if published is not None:
            published[1].close()
        elif held is not None:
            self._cache._discard(self._name)
        if held is not None:
            held.close()


class Cache:
    """A cache directory of this user. Several processes may share it; thread safe.

    Args:
        root: The directory; made with mode 0700 when something is saved. Or a descriptor of it.
        hook: Called with the name of each step of a publication, for tests of what happens if it ends there.

    Raises:
        InvalidArgument: The root cannot be a path, or `limits` is something else.
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
        except CacheRejected as error:  # raised when something is asked of the cache
            self._root, self._nowhere = "", error
        if "\0" in self._root:
            raise InvalidArgument(f"the cache directory {self._root!r} cannot be a path: it contains a NUL")
        if not isinstance(limits, Limits | None):
            raise InvalidArgument(f"limits is {type(limits).__name__}; give nnburst.cache.Limits")
        self.limits = limits or Limits.from_environment()
        self.hook = hook
        self.index = Index(self._tree)

    @property
    def path(self) -> str:
        """The directory; `CacheRejected` if there is none (see `default_cache_directory`)."""
        if self._nowhere is not None:
            raise self._nowhere
        return self._root

    # ---- finding -----------------------------------------------------------------------------------------------

    @contextmanager
    def _tree(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open a directory of the tree; every component is opened by name below the one before it."""
        if self._nowhere is not None:
            raise self._nowhere
        with ExitStack() as stack:
            fd = directory(self._root, create=create)
            stack.callback(os.close, fd)
            for name in names:
                fd = subdirectory(fd, name, create=create)
                stack.callback(os.close, fd)
            yield fd

    def _lock(self, entry: str, kind: str, *, shared: bool, patience: float = 0.0) -> FileLock | None:
        with self._tree("locks", create=True) as locks:
            return lock(locks, f"{entry[:2]}.{kind}", shared=shared, patience=patience)

    @contextmanager
    def place(self) -> Iterator[int]:
        """Open the directory, by which a device tells it from others (see `place_of`)."""
        with ExitStack() as stack:
            try:
                root = stack.enter_context(self._tree())
            except OSError as error:
                raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error
            yield root

    def look_up(self, entry: str, counts: tuple[int, int]) -> Iterator[OpenedEntry]:
        """Open the generations of an entry, the newest first. Usually there is one. The caller closes each.

        Raises:
            CacheRejected: There is none, or none that can be opened; the reason says why.
        """
        self._check_on()
        try:
            with self._tree("objects", entry[:2]) as shard:
                names = _generations(shard, entry)
                names.sort(key=lambda name: os.stat(name, dir_fd=shard, follow_symlinks=False).st_mtime_ns)
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error
        if not names:
            raise CacheRejected(CacheReason.MISSING, "there is no such entry")
        for name in reversed(names):
            yield self._open(entry, name, counts)

    def generations(self, entry: str) -> set[str]:
        """Return the generations of an entry that there are now."""
        with suppress(OSError, CacheRejected), self._tree("objects", entry[:2]) as shard:
            return {name.partition(".")[2] for name in _generations(shard, entry)}
        return set()

    def _open(self, entry: str, name: str, counts: tuple[int, int]) -> OpenedEntry:
        fds: tuple[list[int], list[int]] = ([], [])
        held: FileLock | None = None
        try:
            held = self._lock(entry, "pub", shared=True, patience=5.0)
            if held is None:
                raise CacheRejected(CacheReason.BUSY, "the entry is being replaced")
            with self._tree("objects", entry[:2], name) as place:
                for given, kind, count in zip(fds, ("model", "data"), counts, strict=True):
                    for i in range(count):
                        given.append(open_file(place, f"{kind}.{i:02}"))
            return OpenedEntry(name.partition(".")[2], *fds, held)
        except BaseException as error:
            for fd in (*fds[0], *fds[1]):
                os.close(fd)
            if held is not None:
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
        reason = _given_up.get(self._identity)
        if reason is not None:
            raise CacheRejected(reason, "caching was given up for this directory")

    def give_up(self, reason: CacheReason, why: object = "") -> None:
        """Warn, once a reason, that this directory cannot be used. If the reason will not go away, stop caching in it,
        in this process."""
        if reason in _UNUSABLE or (reason in _OFF and _given_up.setdefault(self._identity, reason) is reason):
            level = logging.DEBUG if reason in _warned_of else logging.WARNING
            _warned_of.add(reason)
            how_long = " in this process any more" * (reason in _OFF)
            _log.log(level, "%s: nothing is cached here%s: %s", self._root, how_long, why or reason.value)

    @property
    def _identity(self) -> tuple[object, ...]:
        """Names the directory in this process; a number of a descriptor is used again, so its inode does."""
        if self._root.startswith(_BY_DESCRIPTOR):
            with suppress(OSError):
                status = os.stat(self._root)
                return status.st_dev, status.st_ino
        return (os.path.abspath(self._root),)

    def stage(
        self, entry: str, counts: tuple[int, int], *, patience: float = 30.0, always: bool = False
    ) -> StagedEntry:
        """Make empty files for an entry.

        Args:
            counts: Of model and data files.
            patience: Seconds to wait for another process that is writing it.
            always: Also if it was not worth it three times.

        Raises:
            CacheRejected: BUSY, DISK_FULL, READ_ONLY, …: compile without saving.
        """
        self._check_on()
        often, reason = self.index.declined(entry)
        if often >= _DECLINED_OFTEN and not (always and reason is CacheReason.NOT_WORTH_IT):
            raise CacheRejected(reason, "the device declined to save this three times")
        staged = StagedEntry(self, entry)
        try:
            with self._tree(create=True) as root:
                self.sweep(self.litter())
                self._make_room(root)
                with suppress(FileExistsError):
                    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                    with os.fdopen(os.open("CACHEDIR.TAG", flags, 0o600, dir_fd=root), "w") as tag:
                        tag.write(_TAG)
            held = self._lock(entry, "build", shared=False)
            waited = held is None
            if held is None:
                self.hook("waits")
                held = self._lock(entry, "build", shared=False, patience=patience)
            if held is None:
                raise CacheRejected(CacheReason.BUSY, "another process is writing this entry")
            staged._open(counts, held)
            staged.waited = waited
            return staged
        except BaseException as error:
            staged.close()
            if not isinstance(error, OSError):
                raise
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error

    def _make_room(self, root: int) -> None:
        floor = self.limits.min_free
        if floor and _free(root) < floor:
            with suppress(OSError, CacheRejected):
                prune(self, max_bytes=0)
            if _free(root) < floor:
                raise CacheRejected(CacheReason.DISK_FULL, f"less than {floor >> 20} MiB are free")

    def _publish(self, name: str, entry: str, generation: str, info: EntryInfo) -> tuple[str, FileLock]:
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
            for name in _generations(shard, entry):
                if name != f"{entry}.{generation}":
                    remove_tree(shard, name)
                    self.index.remove(entry, name.partition(".")[2])

    def _discard(self, name: str) -> None:
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            remove_tree(staging, name)

    def remove(self, entry: str, generation: str) -> int:
        """Remove a generation that is not in use. Returns the bytes, or -1 if it is."""
        held = self._lock(entry, "pub", shared=False)
        if held is None:
            return -1
        try:
            with self._tree("objects", entry[:2]) as shard, self._tree("staging", create=True) as staging:
                trash = f"{_TRASH}{os.urandom(8).hex()}"
                os.rename(f"{entry}.{generation}", trash, src_dir_fd=shard, dst_dir_fd=staging)
                freed = remove_tree(staging, trash)
        except FileNotFoundError:
            freed = 0
        finally:
            held.close()
        self.index.remove(entry, generation)
        return freed

    def enforce_limits(self) -> None:
        """Evict the least valuable entries, if there are too many. Never raises: the entry that was saved is good."""
        limits = self.limits
        try:
            infos = self._measured(self.index.all()) if self.index.is_complete else self.entries()
            if (limits.max_bytes and sum(info.nbytes for info in infos) > limits.max_bytes) or (
                limits.max_entries and len(infos) > limits.max_entries
            ):
                prune(self)
        except Exception as error:
            _log.warning("%s: the limits of the cache were not enforced: %s", self._root, error)

    def pin(self, entries: Iterable[str], pinned: bool) -> int:
        """Keep entries from being evicted, or not any more; returns how many."""
        chosen = list(entries)
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with self._tree("pins", create=True) as pins:
            for entry in chosen:
                if pinned:
                    os.close(os.open(entry, flags, 0o600, dir_fd=pins))
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry, dir_fd=pins)
        return len(chosen)

    # ---- looking -------------------------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Return all entries that are there, with what the index or else the entry itself says of them.

        Sizes and pins come from the files, and the index learns of entries that it did not know.

        Raises:
            CacheRejected: The directory cannot be read.
        """
        known = self.index.all()
        try:
            with self._tree("objects") as objects:
                shards = sorted(name for name in os.listdir(objects) if len(name) == 2 and set(name) <= _HEX)
                found = [info for shard in shards for info in self._of_shard(objects, shard, known)]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error
        pins: set[str] = set()
        with suppress(OSError, CacheRejected), self._tree("pins") as place:
            pins.update(os.listdir(place))
        found = [replace(info, pinned=info.entry in pins) for info in found]
        self._learn(known, found, complete=True)
        return found

    def _learn(self, known: Mapping[tuple[str, str], EntryInfo], found: list[EntryInfo], *, complete: bool) -> None:
        now = {(info.entry, info.generation): info for info in found}
        changed = [info for key, info in now.items() if known.get(key) != info]
        gone = [key for key in known if key not in now]
        if changed or gone or (complete and not self.index.is_complete):
            self.index.learn(changed, gone, complete=complete)

    def _measured(self, known: Mapping[tuple[str, str], EntryInfo]) -> list[EntryInfo]:
        """Return the notes, with sizes where they had none: a deferred save does not tell how large it became."""
        found = []
        for info in known.values():
            nbytes = info.nbytes
            if not nbytes:
                with suppress(OSError, CacheRejected), self._tree("objects", info.entry[:2]) as shard:
                    nbytes = _size(shard, f"{info.entry}.{info.generation}")
            found.append(replace(info, nbytes=nbytes))
        self._learn(known, found, complete=False)
        return found

    def _of_shard(self, objects: int, shard: str, known: Mapping[tuple[str, str], EntryInfo]) -> Iterator[EntryInfo]:
        """Yield the entries of a shard; none of one that cannot be read."""
        with suppress(OSError, CacheRejected), opened(objects, shard) as place:
            for name in sorted(os.listdir(place)):
                entry, _, generation = name.partition(".")
                if len(entry) == 64 and len(generation) == 32 and set(entry + generation) <= _HEX:
                    info = known.get((entry, generation)) or _from_manifest(place, entry, generation)
                    nbytes = _size(place, name)
                    yield info if info.nbytes == nbytes else replace(info, nbytes=nbytes)

    def files_of(self, info: EntryInfo) -> OpenedEntry:
        """Open the files of an entry, as many as there are; raises as `look_up`."""
        with self._tree("objects", info.entry[:2], f"{info.entry}.{info.generation}") as place:
            names = os.listdir(place)
        models, data = (sum(name.startswith(kind) for name in names) for kind in ("model.", "data."))
        return self._open(info.entry, f"{info.entry}.{info.generation}", (models, data))

    def stats(self) -> dict[str, int]:
        """Return how often each outcome came about, by reason."""
        return self.index.counters()

    def find(self, prefix: str) -> list[EntryInfo]:
        """Return the entries whose name begins so."""
        return [info for info in self.entries() if info.entry.startswith(prefix.lower())] if prefix else []

    def litter(self) -> list[str]:
        """Return what is left in `staging`: of removals, and of saves that were cut off more than an hour ago."""
        old, found = time.time() - 3600, []
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            for name in os.listdir(staging):
                with suppress(FileNotFoundError):  # the process that works there has just finished
                    if name.startswith(_TRASH) or os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < old:
                        found.append(name)
        return found

    def sweep(self, names: Sequence[str]) -> int:
        """Remove litter; returns the bytes."""
        with suppress(OSError, CacheRejected), self._tree("staging") as staging:
            return sum(remove_tree(staging, name) for name in names)
        return 0


def _generations(shard: int, entry: str) -> list[str]:
    return [name for name in os.listdir(shard) if name.startswith(entry + ".")]


def _free(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize


def _from_manifest(shard: int, entry: str, generation: str) -> EntryInfo:
    """Read what an entry says of itself, as far as it makes sense."""
    values: object = None
    created = 0
    with suppress(OSError, ValueError, RecursionError, CacheRejected), opened(shard, f"{entry}.{generation}") as place:
        created = int(os.fstat(place).st_mtime)
        with os.fdopen(open_file(place, "MANIFEST"), "rb") as file:
            values = json.loads(file.read(1 << 16))
    said = values if isinstance(values, dict) else {}
    return EntryInfo.from_values({**said, "entry": entry, "generation": generation}, created=created)


def _size(shard: int, name: str) -> int:
    """Bytes of the files of an entry, as far as they can be seen."""
    total = 0
    with suppress(OSError, CacheRejected), opened(shard, name) as place:
        for file in os.listdir(place):
            if file.startswith(("model.", "data.")):
                total += os.stat(file, dir_fd=place, follow_symlinks=False).st_size
    return total
