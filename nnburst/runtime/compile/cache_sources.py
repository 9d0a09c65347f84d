"""Sources of cache files: a cache directory, or files that the caller has opened.

A source yields offers: entries to restore, then files for a new entry. A caller takes the next offer only after a
failure. The files of an offer are closed when the source yields the next offer, or when the generator is closed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from ..._core.deadline import Deadline
from ..._core.fds import FdSet
from ...cache.names import PRIORITY_CODE, device_cache_key, entry_name, model_fingerprint
from ...cache.reasons import SPOILT, CacheReason, CacheRejected
from ...devices.interfaces import CacheFiles, CompileJob, Device, PreparedModel
from ...errors import DeadObject, InvalidArgument, NNBurstError
from ...model.types import Lifetime, Model

if TYPE_CHECKING:
    from ...cache.directory import Cache, StagedEntry

_PATIENCE = 30.0
"""Seconds to wait for another process that compiles the same model."""
_REFUSALS = (CacheReason.DECLINED, CacheReason.TOO_BIG)
"""Reasons why a device declines to save a model. After three refusals, the model is not saved again."""


class Job(Struct, frozen=True):
    """A compilation of a model, or of a part of a model, for one device.

    Attributes:
        model: The model or the part.
        part: Operations of the part in the whole model, as (subgraph, index).
    """

    device: Device
    model: Model
    asked: CompileJob
    part: tuple[tuple[int, int], ...] = ()

    @property
    def counts(self) -> tuple[int, int]:
        """The numbers of model files and data files."""
        return self.device.get_number_of_cache_files_needed()


class Entry(Struct, frozen=True):
    """The files of an earlier compilation.

    Attributes:
        generation: Id of the save that wrote the files, if known.
        close: Function to call if the entry is not restored. Closes its files.
    """

    files: CacheFiles
    generation: str = ""
    close: Callable[[], None] = lambda: None


def _outcome_of(files: CacheFiles, prepared: PreparedModel) -> CacheReason:
    """Return the outcome of a save as the device reports it; DECLINED if there is no report."""
    return CacheReason.DECLINED if prepared.cache_result is None else prepared.cache_result.reason


class Room(Struct, frozen=True):
    """The files for a new entry. A source yields them after all entries, for use if none could be restored.

    Attributes:
        files: Open files, whose content is overwritten.
        keep: Function that turns the files into an entry after compiling, and returns the outcome.
    """

    files: CacheFiles
    keep: Callable[[CacheFiles, PreparedModel], CacheReason] = _outcome_of


class CacheSource:
    """A source of cache files."""

    def find_entries(self, job: Job) -> Generator[Entry | Room, None, None]:
        """Yield the entries that may be restored, newest first, then a `Room` for a new entry.

        Raises:
            CacheRejected: There is no `Room`."""
        raise NotImplementedError

    def note(self, reason: CacheReason, entry: Entry) -> None:
        """Record the use of an entry, or remove an entry that can never be restored.

        Args:
            reason: HIT if the entry was restored; otherwise the reason why it was not restored.
        """

    def close(self) -> None:
        """Close the files that the source keeps open for all its compilations."""


class DirectoryCache(CacheSource):
    """A source of cache files in a `Cache` directory.

    Args:
        cache_key: The application's cache key, 32 bytes; None for a key made from the model, including its constants.
        encrypt: True to make the device encrypt the files.
    """

    def __init__(self, cache: Cache, cache_key: bytes | None, *, encrypt: bool = False) -> None:
        self._cache = cache
        self._cache_key = cache_key
        self._encrypt = encrypt

    def cache_key(self, job: Job, fingerprint: bytes) -> bytes:
        """Return the cache key for the device."""
        return device_cache_key(
            self._cache_key if self._cache_key is not None else fingerprint,
            device=job.device.name,
            version=job.device.version_string,
            epoch=job.device.cache_epoch,
            preference=int(job.asked.preference),
            priority=PRIORITY_CODE[job.asked.priority],
            relaxed=job.model.relax_computation_float32_to_float16,
            files=job.counts,
            part=job.part,
        )

    def find_entries(self, job: Job) -> Generator[Entry | Room, None, None]:
        try:
            fingerprint = model_fingerprint(job.model)
        except NNBurstError as error:
            raise CacheRejected(CacheReason.NO_INFO, f"a constant cannot be read: {error}") from error
        cache_key = self.cache_key(job, fingerprint)
        entry, seen = entry_name(cache_key), set[str]()

        def files(models: Sequence[int], data: Sequence[int], place: int) -> CacheFiles:
            return CacheFiles(
                tuple(models), tuple(data), cache_key, fingerprint, True, place_fds=(place,), encrypt=self._encrypt
            )

        def existing() -> Iterator[Entry]:
            with contextlib.suppress(CacheRejected), self._cache.place() as place:
                for opened in self._cache.look_up(entry, job.counts):
                    with contextlib.closing(opened):
                        if opened.generation not in seen:
                            seen.add(opened.generation)
                            yield Entry(
                                files(opened.model_fds, opened.data_fds, place), opened.generation, opened.close
                            )

        yield from existing()
        left = Deadline(job.asked.deadline_ns).left()
        until = Deadline.after(_PATIENCE if left is None else min(_PATIENCE, left / 2))  # this leaves time to compile
        for last in (False, True):
            with contextlib.closing(self._stage(entry, job, until)) as staged:
                if staged.waited or self._cache.generations(entry) - seen:  # another process may have written the entry
                    if not last:  # closing lets waiting processes read the entry, too
                        staged.close()
                    yield from existing()
                    if not last:
                        continue
                with self._cache.place() as place:
                    yield Room(files(staged.model_fds, staged.data_fds, place), partial(self._keep, job, staged))
                return

    def _stage(self, entry: str, job: Job, until: Deadline) -> StagedEntry:
        try:
            return self._cache.stage(entry, job.counts, timeout=until.left() or 0.0)
        except CacheRejected as error:
            self._cache.warn_of(error.reason, error)
            raise

    def _keep(self, job: Job, staged: StagedEntry, files: CacheFiles, prepared: PreparedModel) -> CacheReason:
        reason = self._published(job, staged, files, prepared)
        if reason is CacheReason.SAVED:
            self._cache.enforce_limits()
        elif reason in _REFUSALS:
            self._cache.decline(staged.entry, reason)
        self._cache.warn_of(reason)
        return reason

    def _published(self, job: Job, staged: StagedEntry, files: CacheFiles, prepared: PreparedModel) -> CacheReason:
        from ...cache.container import is_encrypted  # few clients need this import

        result, reason = prepared.cache_result, _outcome_of(files, prepared)
        if result is None or not result.saved:
            return reason
        if _has_changed(job.model, files.fingerprint):
            return CacheReason.CHANGED
        if result.nbytes > self._cache.limits.max_bytes:
            return CacheReason.TOO_BIG
        if self._encrypt and not all(map(is_encrypted, (*staged.model_fds, *staged.data_fds))):
            return CacheReason.DECLINED  # the service or device cannot encrypt
        generation = result.generation
        try:
            staged.publish(generation)
            if not job.device.confirm_cache(files.cache_key, generation):
                return CacheReason.NO_ROW  # the service forgot the save; an older entry may work
            staged.finish(generation)
        except DeadObject:
            raise
        except (OSError, NNBurstError):
            return CacheReason.IO_ERROR
        return reason

    def note(self, reason: CacheReason, entry: Entry) -> None:
        name = entry_name(entry.files.cache_key)
        if reason is CacheReason.HIT:
            self._cache.note_use(name, entry.generation)
        elif reason in SPOILT:  # after other failures the entry may be good
            with contextlib.suppress(CacheRejected):
                self._cache.remove(name, entry.generation)


def _has_changed(model: Model, fingerprint: bytes) -> bool:
    """Return True if memory or files of constants changed since the save."""
    operands = (operand for subgraph in (model.main, *model.referenced) for operand in subgraph.operands)
    if all(operand.lifetime != Lifetime.CONSTANT_REFERENCE for operand in operands):
        return False
    try:
        return model_fingerprint(model) != fingerprint
    except NNBurstError:
        return True


class DescriptorCache(CacheSource):
    """A source of files that the caller has opened. The source duplicates the descriptors.

    Args:
        cache_key: The cache key, 32 bytes, used unchanged.

    Raises:
        InvalidArgument: A descriptor is not open.
    """

    def __init__(self, model_fds: Sequence[int], data_fds: Sequence[int], cache_key: bytes) -> None:
        self._cache_key = cache_key
        try:
            self._fds = FdSet.duplicate(model_fds), FdSet.duplicate(data_fds)
        except TypeError as error:
            raise InvalidArgument(f"the cache file descriptors are given in two lists: {error}") from None

    def close(self) -> None:
        for fds in self._fds:
            fds.close()

    def find_entries(self, job: Job) -> Generator[Entry | Room, None, None]:
        if job.part:
            raise CacheRejected(CacheReason.UNSUPPORTED, "a model in parts needs a directory: each part has files")
        models, data = (each.fds for each in self._fds)
        if (len(models), len(data)) != job.counts:
            raise CacheRejected(CacheReason.BAD_FD, "the device needs another number of files")
        files = CacheFiles(models, data, self._cache_key)
        if any(os.fstat(fd).st_size for fd in (*models, *data)):
            yield Entry(files)
        yield Room(files)
