"""The runtime's part of compilation caching: when to ask for what, and what came of it.

Workflows and fall-throughs are those of the facts sheet `caching.md` §1.4, §1.5: whatever a look-up brings but success,
the model is compiled; only compiling can fail.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from dataclasses import dataclass, replace

from ..cache import CacheReason, CacheRejected
from ..devices import CacheFiles, PreparedModel
from ..errors import DeadObject, ErrorStatus, NNBurstError
from ..model import DeviceStatus
from ._cache_sources import CacheSource, DescriptorCache, DirectoryCache, FlatCache, Job, cache_source

__all__ = [
    "CacheReport",
    "CacheSource",
    "DescriptorCache",
    "DirectoryCache",
    "FlatCache",
    "Job",
    "cache_source",
    "compile_with_cache",
]

_log = logging.getLogger("nnburst.cache")
_MOST_COUNT = 32
_PASSING = {
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: CacheReason.DEADLINE,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: CacheReason.DEADLINE,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: CacheReason.BUSY,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: CacheReason.BUSY,
    ErrorStatus.DEVICE_UNAVAILABLE: CacheReason.BUSY,
}
"""What errors of a look-up mean that say nothing about the entry."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What caching did for one compilation.

    Attributes:
        outcome: ``HIT``, ``SAVED``, ``NOT_SAVED`` (compiled, nothing written), ``REJECTED`` (files were there and not
            accepted; compiled and not saved) or ``DISABLED`` (nobody asked, or the device does not cache).
        reason: More precisely.
        rejected: Why files that were there were not accepted; None if there were none, or they were.
        nbytes: Of the files that were used or written.
        lookup_ms: Milliseconds of the look-up.
        compile_ms: Of the compilation, with the save; 0 after a hit.
        save_ms: Of the save alone.
    """

    outcome: str
    reason: CacheReason
    rejected: CacheReason | None = None
    nbytes: int = 0
    lookup_ms: float = 0.0
    compile_ms: float = 0.0
    save_ms: float = 0.0


NO_CACHE = CacheReport("DISABLED", CacheReason.NO_INFO)


class _Attempt:
    """One compilation with caching: what was tried, and what came of it. See `Attempt`."""

    def __init__(self, job: Job, source: CacheSource, token: bytes) -> None:
        self._job, self._source, self._token = job, source, token
        self.seen: set[str] = set()
        self.prepared: PreparedModel | None = None
        self.nbytes = 0
        self.rejected: CacheReason | None = None
        self.missing = CacheReason.MISSING
        self.failed = False
        """Whether it is compiling that failed."""
        self._suspect: str | None = None
        """The entry that the device was restoring when its process ended."""

    def restore(self) -> bool:
        """Look at everything that there is until something is accepted. Nothing is raised."""
        refusals: list[tuple[CacheReason, str]] = []
        try:
            with contextlib.closing(self._source.existing(self._job, self._token)) as candidates:
                for files, generation in candidates:
                    self.seen.add(generation)
                    refused = self._restored(files, generation)
                    if refused is None:
                        break
                    refusals.append((refused, generation))
                    if refused is CacheReason.DEAD_SERVICE:
                        break
        except CacheRejected as error:
            self.missing = error.reason
        except Exception as error:
            _log.warning("a cached compilation was not looked for: %s", error)
            self.missing = CacheReason.IO_ERROR
        for reason, generation in refusals:
            if generation != self._suspect:
                self.note(reason, generation)
        self.rejected = refusals[-1][0] if refusals else self.rejected
        return self.prepared is not None

    def _restored(self, files: CacheFiles, generation: str) -> CacheReason | None:
        """Have the device restore an entry; return why it did not."""
        job, alive = self._job, False
        with contextlib.suppress(Exception):  # a service that is stuck must not cost more than the deadline
            alive = not job.asked.deadline_ns and job.device.status is not DeviceStatus.OFFLINE
        try:
            prepared = job.device.prepare_model_from_cache(files, job.asked.deadline_ns)
            self.nbytes = sum(os.fstat(fd).st_size for fd in (*files.model_fds, *files.data_fds))
        except DeadObject:
            if not alive:  # it may have been dead before: the entry is to blame if the device works without it
                self._suspect = generation
            return CacheReason.DEAD_SERVICE
        except CacheRejected as error:
            return error.reason
        except NNBurstError as error:
            return _PASSING.get(error.status, CacheReason.IO_ERROR)
        except Exception as error:
            _log.warning("%s could not restore a compilation: %s", job.device.name, error)
            return CacheReason.IO_ERROR
        self.prepared = prepared
        return None

    def compile(self, files: CacheFiles | None) -> PreparedModel:
        """Compile, and save if there are files; raises what the device raises."""
        job = self._job
        try:
            prepared = job.device.prepare_model(job.model, replace(job.asked, cache=files))
        except BaseException:
            self.failed = True
            raise
        self.prepared = prepared
        if self._suspect is not None:
            self.note(CacheReason.DEAD_SERVICE, self._suspect)
        return prepared

    def saved(self) -> CacheReason:
        """Have the source compile. Whatever goes wrong with its files, the model is compiled.

        Raises:
            NNBurstError: Compiling failed, or the process of the device ended.
        """
        try:
            return self._source.compile(self._job, self._token, self)
        except Exception as error:
            if self.failed or isinstance(error, DeadObject):
                raise
            _log.warning("a compilation was not kept: %s", error)
            if self.prepared is None:
                self.compile(None)
            return CacheReason.IO_ERROR

    def note(self, reason: CacheReason, generation: str = "", nbytes: int = 0) -> None:
        """Tell the source of an outcome."""
        try:
            self._source.note(reason, self._token, generation, nbytes)
        except Exception as error:
            _log.warning("the outcome of a look-up was not noted: %s", error)


def compile_with_cache(job: Job, source: CacheSource | None) -> tuple[PreparedModel, CacheReport]:
    """Restore a compilation if that works, else compile and save if that works.

    Raises:
        NNBurstError: Compiling failed.
    """

    def uncached(reason: CacheReason) -> tuple[PreparedModel, CacheReport]:
        prepared = job.device.prepare_model(job.model, job.asked)
        return prepared, replace(NO_CACHE, reason=reason)

    if source is None:
        return uncached(CacheReason.NO_INFO)
    if not 0 < sum(job.counts) or max(job.counts) > _MOST_COUNT:
        return uncached(CacheReason.UNSUPPORTED)
    started = time.perf_counter()
    try:
        token = source.token(job)
        source.fingerprint(job)
    except NNBurstError:  # a constant that this process may not read: caching is off for this model
        return uncached(CacheReason.NO_INFO)
    attempt = _Attempt(job, source, token)
    reason = CacheReason.HIT if attempt.restore() else None
    lookup_ms, started = _since(started), time.perf_counter()
    if reason is None:
        reason = attempt.saved()
    attempt.note(reason, nbytes=attempt.nbytes)
    prepared = attempt.prepared
    assert prepared is not None
    if reason is CacheReason.HIT:
        return prepared, CacheReport("HIT", reason, None, attempt.nbytes, lookup_ms)
    result = prepared.cache_result
    outcome = "SAVED" if reason is CacheReason.SAVED else "REJECTED" if attempt.rejected else "NOT_SAVED"
    report = CacheReport(
        outcome, reason, attempt.rejected, result.nbytes if result and result.saved else 0, lookup_ms, _since(started),
        result.seconds * 1e3 if result else 0.0,
    )  # fmt: skip
    if attempt.missing is CacheReason.DISABLED:
        report = replace(report, outcome="DISABLED", reason=CacheReason.DISABLED)
    return prepared, report


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
