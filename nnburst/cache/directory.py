"""The directory where a client keeps the files of its compilations.

::

    CACHEDIR.TAG   declined   locks/<hh>.build   locks/<hh>.pub   pins/<entry>
    objects/<hh>/<entry>.<generation>/{model.NN, data.NN, MANIFEST}
    staging/<random>/

An entry is written in `staging` and becomes visible by one rename; files are never written in place. Readers hold
the shared `pub` lock of an entry's shard, writers the `build` lock, who publishes or removes the exclusive `pub` lock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .._core.fds import close_fds
from ..errors import InvalidArgument
from .entry import MANIFEST, EntryInfo, described
from .eviction import prune
from .files import FileLock, lock, open_directory, open_file, opened, reason_of, remove_tree
from .limits import Limits
from .places import default_cache_directory
from .reasons import CacheReason, CacheRejected

_log = logging.getLogger("nnburst.cache")
_TAG = b"Signature: 8a477f597d28d172789f06886806bc55\n# Compilation cache of nnburst; may be deleted at any time.\n"
_DECLINED_OFTEN = 3
_MOST_DECLINED = 1 << 20
"""Bytes of the list of what devices declined; then it begins anew."""
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
_warned_of: set[CacheReason] = set()


class OpenedEntry(Struct, frozen=True):
    """An entry that is open; it is not removed until it is closed. `close` is idempotent."""

    generation: str
    model_fds: list[int]
    data_fds: list[int]
    close: Callable[[], None]


@dataclass(frozen=True)
class StagedEntry:
    """An entry that is being written: empty files that others do not see yet.

    Attributes:
        waited: Whether another process was writing before.
    """

    entry: str
    model_fds: list[int]
    data_fds: list[int]
    waited: bool
    _cache: Cache
    _name: str
    _directory: int
    _held: ExitStack

    def publish(self, generation: bytes, info: EntryInfo) -> None:
        """Make the entry visible, in one step. Older generations stay until `finish`.

        Raises:
            OSError, CacheRejected: It could not be done; the entry stays staged.
        """
        with os.fdopen(os.open(MANIFEST, _NEW, 0o600, dir_fd=self._directory), "wb") as file:
            file.write(msgspec.json.encode(info))
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self._directory)
        self._cache.hook("staged")
        held = self._cache._lock(self.entry, "pub", shared=False, patience=10.0)
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
        """The device knows the published generation: remove older ones, and let go."""
        self._cache.hook("confirmed")
        with suppress(CacheRejected), self._cache.place("objects", self.entry[:2]) as shard:
            for name in _generations(shard, self.entry):
                if name != f"{self.entry}.{generation.hex()}":
                    remove_tree(shard, name)
        self.close()

    def close(self) -> None:
        """Let go; unpublished files are removed. Idempotent."""
        self._held.close()


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

    @property
    def path(self) -> str:
        """The directory; `CacheRejected` if there is none (see `default_cache_directory`)."""
        if self._nowhere is not None:
            raise self._nowhere
        return self._root

    @contextmanager
    def place(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open the directory, or one below it, for the duration of a with block.

        Every component is opened by name below the one before it. What the file system refuses, also in the with block,
        is raised as `CacheRejected`.
        """
        try:
            with ExitStack() as stack:
                fd = open_directory(self.path, create=create)
                stack.callback(os.close, fd)
                for name in names:
                    fd = stack.enter_context(opened(fd, name, create=create))
                yield fd
        except OSError as error:
            raise CacheRejected(reason_of(error), f"{self._root}: {error.strerror}") from error

    def _lock(self, entry: str, kind: str, *, shared: bool, patience: float = 0.0) -> FileLock | None:
        with self.place("locks", create=True) as locks:
            return lock(locks, f"{entry[:2]}.{kind}", shared=shared, patience=patience)

    # ---- finding -----------------------------------------------------------------------------------------------

    def look_up(self, entry: str, counts: tuple[int, int]) -> Iterator[OpenedEntry]:
        """Open the generations of an entry, the newest first. Usually there is one. The caller closes each.

        Raises:
            CacheRejected: There is none, or none that can be opened; the reason says why.
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
        """Return the generations of an entry that there are now."""
        with suppress(CacheRejected), self.place("objects", entry[:2]) as shard:
            return {name.partition(".")[2] for name in _generations(shard, entry)}
        return set()

    def _open(self, entry: str, name: str, counts: tuple[int, int]) -> OpenedEntry:
        held = self._lock(entry, "pub", shared=True, patience=5.0)
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
        """Remember that an entry was restored just now."""
        with suppress(CacheRejected), self.place("objects", entry[:2], f"{entry}.{generation}") as place:
            os.utime(MANIFEST, dir_fd=place, follow_symlinks=False)

    # ---- saving ------------------------------------------------------------------------------------------------

    def _check_on(self) -> None:
        if self.limits.max_bytes == 0 or os.environ.get("NNBURST_CACHE") == "0":
            raise CacheRejected(CacheReason.DISABLED, "caching is turned off")

    def warn_of(self, reason: CacheReason, why: object = "") -> None:
        """Say once a reason that this directory cannot be used, if it is one of those that say so."""
        if reason in _UNUSABLE:
            level = logging.DEBUG if reason in _warned_of else logging.WARNING
            _warned_of.add(reason)
            _log.log(level, "%s: nothing is cached here: %s", self._root, why or reason.value)

    def decline(self, entry: str, reason: CacheReason) -> None:
        """Note that a device did not want to save an entry."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with suppress(CacheRejected), self.place(create=True) as root:
            with os.fdopen(os.open("declined", flags, 0o600, dir_fd=root), "a") as file:
                file.write(f"{entry} {reason.value}\n")
                full = file.tell() > _MOST_DECLINED
            if full:
                os.unlink("declined", dir_fd=root)

    def _declined(self, entry: str) -> list[CacheReason]:
        """Return why devices did not want to save an entry, each time."""
        with suppress(CacheRejected, ValueError), self.place() as root, os.fdopen(open_file(root, "declined")) as file:
            return [CacheReason(line[len(entry) :].strip()) for line in file if line.startswith(entry)]
        return []

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
        reasons = self._declined(entry)
        if len(reasons) >= _DECLINED_OFTEN and not (always and reasons[-1] is CacheReason.NOT_WORTH_IT):
            raise CacheRejected(reasons[-1], "the device declined to save this three times")
        with self.place(create=True) as root:
            self.sweep(self.litter())
            self._make_room(root)
            with suppress(FileExistsError), os.fdopen(os.open("CACHEDIR.TAG", _NEW, 0o600, dir_fd=root), "wb") as tag:
                tag.write(_TAG)
        held = self._lock(entry, "build", shared=False)
        waited = held is None
        if held is None:
            self.hook("waits")
            held = self._lock(entry, "build", shared=False, patience=patience)
        if held is None:
            raise CacheRejected(CacheReason.BUSY, "another process is writing this entry")
        with ExitStack() as stack:
            stack.callback(held.close)
            name = f"{os.getpid()}-{os.urandom(8).hex()}"
            stack.callback(self._discard, name)
            fds: list[int] = []
            with self.place("staging", create=True) as staging:
                directory = stack.enter_context(opened(staging, name, create=True))
                stack.callback(close_fds, fds)
                for file in _file_names(counts):
                    fds.append(os.open(file, _NEW, 0o600, dir_fd=directory))
            models, data = fds[: counts[0]], fds[counts[0] :]
            return StagedEntry(entry, models, data, waited, self, name, directory, stack.pop_all())

    def _make_room(self, root: int) -> None:
        floor = self.limits.min_free
        if floor and _free(root) < floor:
            with suppress(CacheRejected):
                prune(self, max_bytes=0)
            if _free(root) < floor:
                raise CacheRejected(CacheReason.DISK_FULL, f"less than {floor >> 20} MiB are free")

    def _discard(self, name: str) -> None:
        with suppress(CacheRejected), self.place("staging") as staging:
            remove_tree(staging, name)

    def remove(self, entry: str, generation: str) -> int:
        """Remove a generation that is not in use. Returns the bytes, or -1 if it is."""
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
        """Evict the least valuable entries, if there are too many. Never raises: the entry that was saved is good."""
        limits = self.limits
        try:
            infos = self.entries()
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
        with self.place("pins", create=True) as pins:
            for entry in chosen:
                if pinned:
                    os.close(os.open(entry, flags, 0o600, dir_fd=pins))
                else:
                    with suppress(FileNotFoundError):
                        os.unlink(entry, dir_fd=pins)
        return len(chosen)

    # ---- looking -------------------------------------------------------------------------------------------------

    def entries(self) -> list[EntryInfo]:
        """Return all entries that are there, with what their files say; `CacheRejected` if they cannot be listed."""
        pins: set[str] = set()
        with suppress(CacheRejected), self.place("pins") as place:
            pins.update(os.listdir(place))
        found = []
        try:
            with self.place("objects") as objects:
                for shard in sorted(name for name in os.listdir(objects) if len(name) == 2 and set(name) <= _HEX):
                    with suppress(OSError, CacheRejected), opened(objects, shard) as place:
                        found += [described(place, name) for name in sorted(os.listdir(place)) if _is_entry(name)]
        except CacheRejected as error:
            if error.reason is not CacheReason.MISSING:
                raise
        return [replace(info, pinned=info.entry in pins) for info in found]

    def files_of(self, info: EntryInfo) -> OpenedEntry:
        """Open the files of an entry, as many as there are; raises as `look_up`."""
        name = f"{info.entry}.{info.generation}"
        with self.place("objects", info.entry[:2], name) as place:
            names = os.listdir(place)
        models, data = (sum(name.startswith(kind) for name in names) for kind in ("model.", "data."))
        return self._open(info.entry, name, (models, data))

    def find(self, prefix: str) -> list[EntryInfo]:
        """Return the entries whose name begins so."""
        return [info for info in self.entries() if info.entry.startswith(prefix.lower())] if prefix else []

    def litter(self) -> list[str]:
        """Return what is left in `staging`: of removals, and of saves that were cut off more than an hour ago."""
        old, found = time.time() - 3600, []
        with suppress(CacheRejected), self.place("staging") as staging:
            for name in os.listdir(staging):
                with suppress(FileNotFoundError):  # the process that works there has just finished
                    if name.startswith(_TRASH) or os.stat(name, dir_fd=staging, follow_symlinks=False).st_mtime < old:
                        found.append(name)
        return found

    def sweep(self, names: Sequence[str]) -> int:
        """Remove litter; returns the bytes."""
        with suppress(CacheRejected), self.place("staging") as staging:
            return sum(remove_tree(staging, name) for name in names)
        return 0


def _file_names(counts: tuple[int, int]) -> Iterator[str]:
    return (f"{kind}.{i:02}" for kind, count in zip(("model", "data"), counts, strict=True) for i in range(count))


def _is_entry(name: str) -> bool:
    entry, _, generation = name.partition(".")
    return len(entry) == 64 and len(generation) == 32 and set(entry + generation) <= _HEX


def _generations(shard: int, entry: str) -> list[str]:
    return [name for name in os.listdir(shard) if name.startswith(entry + ".")]


def _free(fd: int) -> int:
    status = os.fstatvfs(fd)
    return status.f_bavail * status.f_frsize
