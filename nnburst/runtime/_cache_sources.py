"""Where the files of compilations are: in a cache directory, in one as NNAPI has it, or open already."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..cache import (
    PRIORITY_CODE,
    SPOILT,
    Cache,
    CacheReason,
    CacheRejected,
    EntryInfo,
    Staged,
    checked_token,
    device_token_v1,
    device_token_v2,
    entry_name,
    file_names,
    model_fingerprint,
)
from ..devices import CacheFiles, CompileJob, Device, PreparedModel
from ..errors import DeadObject, InvalidArgument, NNBurstError
from ..model import Lifetime, Model

__all__ = ["Attempt", "CacheSource", "DescriptorCache", "DirectoryCache", "FlatCache", "Job", "cache_source"]

_PATIENCE = 30.0
"""Seconds to wait for somebody else who compiles the same."""
_REFUSALS = (CacheReason.DECLINED, CacheReason.TOO_BIG, CacheReason.NOT_WORTH_IT)
"""What a device says against saving a model; after a few times nobody asks again."""


@dataclass(frozen=True, slots=True)
class Job:
    """One compilation for one device."""

    device: Device
    model: Model
    asked: CompileJob

    @property
    def counts(self) -> tuple[int, int]:
        """Model and data files."""
        return self.device.get_number_of_cache_files_needed()


class Attempt(Protocol):
    """What a source can do for a compilation."""

    seen: set[str]
    """Generations that were looked at."""

    def restore(self) -> bool:
        """Look again at what there is. True: the model is there, nothing needs to be compiled."""

    def compile(self, files: CacheFiles | None) -> PreparedModel:
        """Compile, and save if there are files.

        Raises:
            NNBurstError: Compiling failed.
        """


class CacheSource(Protocol):
    """Where the files of compilations are."""

    def token(self, job: Job) -> bytes:
        """Return the token for the device."""

    def fingerprint(self, job: Job) -> bytes:
        """Return what is expected to be in the files, or empty."""

    def existing(self, job: Job, token: bytes) -> Generator[tuple[CacheFiles, str], None, None]:
        """Open what there is, the newest first, with its generation; the iterator closes it.

        Raises:
            CacheRejected: There is nothing, or nothing that can be opened.
        """

    def compile(self, job: Job, token: bytes, attempt: Attempt) -> CacheReason:
        """Compile into files that are new or empty, or without any, and say what became of them.

        HIT: somebody else compiled the same meanwhile, and that was restored.
        """

    def note(self, reason: CacheReason, token: bytes, generation: str = "", nbytes: int = 0) -> None:
        """Count an outcome, with the size of an entry that was used; forget one that was not accepted."""


class DirectoryCache:
    """Files in a `Cache` directory.

    Args:
        cache: The directory.
        token: Of the application, 32 bytes; None: from the model itself, constants included.
        always: Save also what compiles faster than it would be verified.
    """

    def __init__(self, cache: Cache, token: bytes | None, *, always: bool = False) -> None:
        self._cache = cache
        self._given = token
        self._always = always
        self._was_refused = False
        self._fingerprint: bytes | None = None

    def fingerprint(self, job: Job) -> bytes:
        if self._fingerprint is None:
            self._fingerprint = model_fingerprint(job.model)
        return self._fingerprint

    def token(self, job: Job) -> bytes:
        return device_token_v2(
            self._given if self._given is not None else self.fingerprint(job),
            device=job.device.name,
            version=job.device.version_string,
            epoch=job.device.cache_epoch,
            preference=int(job.asked.preference),
            priority=PRIORITY_CODE[job.asked.priority],
            relaxed=job.model.relax_computation_float32_to_float16,
            files=job.counts,
        )

    def existing(self, job: Job, token: bytes) -> Generator[tuple[CacheFiles, str], None, None]:
        for opened in self._cache.look_up(entry_name(token), job.counts):
            with contextlib.closing(opened):
                fds = tuple(opened.model_fds), tuple(opened.data_fds)
                yield CacheFiles(*fds, token, self.fingerprint(job)), opened.generation

    def compile(self, job: Job, token: bytes, attempt: Attempt) -> CacheReason:
        try:
            staged = self._staged(job, entry_name(token), attempt)
        except CacheRejected as error:
            self._was_refused = error.reason in _REFUSALS
            attempt.compile(None)
            return error.reason
        if staged is None:
            return CacheReason.HIT
        with contextlib.closing(staged):
            started = time.perf_counter()
            fds, fingerprint = (tuple(staged.model_fds), tuple(staged.data_fds)), self.fingerprint(job)
            files = CacheFiles(*fds, token, fingerprint, staged=True, only_if_worth=not self._always)
            result = attempt.compile(files).cache_result
            reason = CacheReason.DECLINED if result is None else result.reason
            if reason in (CacheReason.SAVED, CacheReason.LATER) and _has_changed(job.model, fingerprint):
                return CacheReason.CHANGED
            if result is None or not result.saved:
                if reason is CacheReason.LATER:
                    self._publish_empty(staged, job)
                    self._cache.enforce_limits()
                    return reason
                if reason in _REFUSALS:
                    self._cache.index.decline(staged.entry, reason)
                self._cache.give_up(reason)
                return reason
            if result.nbytes > self._cache.limits.max_entry_bytes > 0:
                return CacheReason.TOO_BIG
            compile_ms = (time.perf_counter() - started - result.seconds) * 1e3
            info = EntryInfo(
                staged.entry, result.generation.hex(), job.device.name, job.device.version_string,
                job.device.cache_epoch.hex(), sum(job.counts), result.nbytes, int(time.time()),
                compile_ms=max(0.0, compile_ms),
            )  # fmt: skip
            try:
                staged.publish(result.generation, info)
                if not job.device.confirm_cache(token, result.generation):
                    return CacheReason.NO_ROW  # the service has lost it; an older generation may be good
                staged.finish()
            except DeadObject:
                raise
            except (OSError, NNBurstError):
                return CacheReason.IO_ERROR
        self._cache.enforce_limits()
        return CacheReason.SAVED

    def _staged(self, job: Job, entry: str, attempt: Attempt) -> Staged | None:
        """Make files for an entry, or return None if somebody else had it written meanwhile, and it was restored.

        Raises:
            CacheRejected: Somebody is writing it all the time, or nothing can be written.
        """
        until = time.monotonic() + _patience(job.asked.deadline_ns)
        for last in (False, True):
            staged = self._cache.stage(entry, job.counts, patience=max(0.0, until - time.monotonic()))
            with contextlib.ExitStack() as undo:
                undo.callback(staged.close)
                if staged.waited or self._cache.generations(entry) - attempt.seen:
                    if not last:  # nobody else who waited has to wait for this, too
                        staged.close()
                    if attempt.restore():
                        return None
                    if not last:
                        continue
                undo.pop_all()
                break
        return staged

    def _publish_empty(self, staged: Staged, job: Job) -> None:
        """Make files visible that the device has duplicates of and will fill: until then they are a cut-off save."""
        generation = os.urandom(16)
        info = EntryInfo(
            staged.entry, generation.hex(), job.device.name, job.device.version_string,
            job.device.cache_epoch.hex(), sum(job.counts), 0, int(time.time()),
        )  # fmt: skip
        with contextlib.suppress(OSError):
            staged.publish(generation, info)
            staged.finish()

    def note(self, reason: CacheReason, token: bytes, generation: str = "", nbytes: int = 0) -> None:
        was_refused, self._was_refused = self._was_refused, False
        if reason is CacheReason.DISABLED or was_refused:  # the latter was counted when it was tried
            return
        self._cache.index.count(reason)
        if reason is CacheReason.HIT:
            self._cache.index.hit(entry_name(token), nbytes)
        elif generation and reason in SPOILT:  # whatever else went wrong, the entry is as good as it was
            with contextlib.suppress(OSError, CacheRejected):
                self._cache.remove(entry_name(token), generation)


def _has_changed(model: Model, fingerprint: bytes) -> bool:
    """Whether the memory or a file that constants refer to was written since; a device may not have looked."""
    operands = (operand for subgraph in (model.main, *model.referenced) for operand in subgraph.operands)
    if all(operand.lifetime != Lifetime.CONSTANT_REFERENCE for operand in operands):
        return False
    try:
        return model_fingerprint(model) != fingerprint
    except NNBurstError:
        return True


class FlatCache:
    """Files as NNAPI names them, directly in a directory, written in place, nothing ever removed.

    Args:
        directory: Where; nothing is checked until a compilation needs it.
        token: Of the application, 32 bytes.
    """

    def __init__(self, directory: str, token: bytes) -> None:
        if "\0" in directory:
            raise InvalidArgument(f"the cache directory {directory!r} cannot be a path: it contains a NUL")
        self._directory = directory
        self._given = token

    def fingerprint(self, job: Job) -> bytes:
        return b""

    def token(self, job: Job) -> bytes:
        return device_token_v1(
            self._given,
            job.device.name,
            job.device.version_string,
            int(job.asked.preference),
            PRIORITY_CODE[job.asked.priority],
        )

    @contextlib.contextmanager
    def _open(self, job: Job, token: bytes, flags: int) -> Iterator[CacheFiles]:
        fds: tuple[list[int], list[int]] = ([], [])
        try:
            for given, names in zip(fds, file_names(token, *job.counts), strict=True):
                for name in names:
                    path = os.path.join(self._directory, name)
                    given.append(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600))
            yield CacheFiles(tuple(fds[0]), tuple(fds[1]), token)
        finally:
            for fd in (*fds[0], *fds[1]):
                os.close(fd)

    def existing(self, job: Job, token: bytes) -> Generator[tuple[CacheFiles, str], None, None]:
        try:
            with self._open(job, token, 0) as files:
                yield files, ""
        except OSError as error:
            raise CacheRejected(CacheReason.MISSING, str(error)) from error

    def compile(self, job: Job, token: bytes, attempt: Attempt) -> CacheReason:
        with contextlib.ExitStack() as stack:
            try:
                files = stack.enter_context(self._open(job, token, os.O_CREAT))
            except OSError:
                attempt.compile(None)
                return CacheReason.IO_ERROR
            return _saved(attempt.compile(files))

    def note(self, reason: CacheReason, token: bytes, generation: str = "", nbytes: int = 0) -> None:
        pass


class DescriptorCache:
    """Files that the caller has open. They are duplicated here, and closed by `close`.

    Args:
        model_fds: One per model file of the device.
        data_fds: One per data file.
        token: 32 bytes; used as it is.

    Raises:
        InvalidArgument: A descriptor is not open.
    """

    def __init__(self, model_fds: Sequence[int], data_fds: Sequence[int], token: bytes) -> None:
        self._given = token
        self._fds: tuple[list[int], list[int]] = ([], [])
        try:
            for mine, given in zip(self._fds, (model_fds, data_fds), strict=True):
                mine.extend(os.dup(fd) for fd in given)
        except (OSError, TypeError) as error:
            self.close()
            raise InvalidArgument(f"a cache file descriptor cannot be used: {error}") from error

    def close(self) -> None:
        """Close the duplicates. Idempotent."""
        for fds in self._fds:
            while fds:
                os.close(fds.pop())

    def fingerprint(self, job: Job) -> bytes:
        return b""

    def token(self, job: Job) -> bytes:
        return self._given

    @property
    def _files(self) -> CacheFiles:
        return CacheFiles(tuple(self._fds[0]), tuple(self._fds[1]), self._given)

    def _fits(self, job: Job) -> bool:
        return (len(self._fds[0]), len(self._fds[1])) == job.counts

    def existing(self, job: Job, token: bytes) -> Generator[tuple[CacheFiles, str], None, None]:
        if not self._fits(job):
            raise CacheRejected(CacheReason.BAD_FD, "the device needs another number of files")
        if not any(os.fstat(fd).st_size for fd in self._fds[0] + self._fds[1]):
            raise CacheRejected(CacheReason.MISSING, "the files are empty")
        yield self._files, ""

    def compile(self, job: Job, token: bytes, attempt: Attempt) -> CacheReason:
        if not self._fits(job):
            attempt.compile(None)
            return CacheReason.BAD_FD
        return _saved(attempt.compile(self._files))

    def note(self, reason: CacheReason, token: bytes, generation: str = "", nbytes: int = 0) -> None:
        pass


def _saved(prepared: PreparedModel) -> CacheReason:
    """Return what the device says; one that says nothing may have saved or not."""
    return CacheReason.DECLINED if prepared.cache_result is None else prepared.cache_result.reason


def _patience(deadline_ns: int) -> float:
    """Seconds to wait for somebody else; half of what is left, so that there is time to compile all the same."""
    if not deadline_ns:
        return _PATIENCE
    return min(_PATIENCE, max(0.0, (deadline_ns - time.monotonic_ns()) / 2e9))


def cache_source(directory: str | os.PathLike[str] | None, token: bytes | None) -> CacheSource | None:
    """Return where a session caches, or None.

    Raises:
        InvalidArgument: The directory is no path; the token has not 32 bytes.
    """
    if directory is None and token is None:
        return None
    if directory is not None and not isinstance(directory, str | os.PathLike):
        raise InvalidArgument(f"cache_dir is {type(directory).__name__}; give the path of a directory")
    return DirectoryCache(Cache(directory), None if token is None else checked_token(token))
