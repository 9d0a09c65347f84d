"""Compilation caching in the runtime: restore an entry, or compile and save. A failed look-up is no error."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from ..._core.log import warn
from ...cache.reasons import CacheReason, CacheRejected
from ...devices.interfaces import CacheFiles, PreparedModel
from ...errors import DeadObject, ErrorStatus, NNBurstError
from ...model.types import DeviceStatus
from .cache_sources import CacheSource, Entry, Job, Room

_MOST_COUNT = 32
_PASSING = {
    ErrorStatus.MISSED_DEADLINE_TRANSIENT: CacheReason.DEADLINE,
    ErrorStatus.MISSED_DEADLINE_PERSISTENT: CacheReason.DEADLINE,
    ErrorStatus.RESOURCE_EXHAUSTED_TRANSIENT: CacheReason.BUSY,
    ErrorStatus.RESOURCE_EXHAUSTED_PERSISTENT: CacheReason.BUSY,
    ErrorStatus.DEVICE_UNAVAILABLE: CacheReason.BUSY,
}
"""The cache reason for the status of a failed restoration. Any other status is an IO_ERROR."""


class CacheReport(Struct, frozen=True):
    """Result of caching for one compilation.

    Attributes:
        outcome: ``HIT``, ``SAVED``, ``NOT_SAVED``, ``REJECTED`` (existing files were not accepted, and the compiled
            model was not saved) or ``DISABLED`` (not requested, or the device does not cache).
        reason: The outcome in detail.
        rejected: Reason why existing files were not accepted; None if they were accepted, or did not exist.
        nbytes: Bytes of the files that were read or written.
        lookup_ms: Duration of the look-up in milliseconds.
        compile_ms: Duration of the compilation, including the save; 0 after a hit.
        save_ms: Duration of the save in milliseconds.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     session.cache_report.outcome
        'DISABLED'
    """

    outcome: str
    reason: CacheReason
    rejected: CacheReason | None = None
    nbytes: int = 0
    lookup_ms: float = 0.0
    compile_ms: float = 0.0
    save_ms: float = 0.0


NO_CACHE = CacheReport("DISABLED", CacheReason.NO_INFO)


_WORST = ("REJECTED", "NOT_SAVED", "SAVED", "HIT", "DISABLED")


def combined_report(reports: Sequence[CacheReport]) -> CacheReport:
    """Return one report for all parts of a model, with the worst outcome and the sums of times and bytes."""
    worst = min(reports, key=lambda report: _WORST.index(report.outcome))
    sums = ("nbytes", "lookup_ms", "compile_ms", "save_ms")
    return replace(worst, **{name: sum(getattr(report, name) for report in reports) for name in sums})


class _Attempt:
    """A compilation that restores an `Entry` of a cache source. If that fails, it compiles and saves into a `Room`."""

    def __init__(self, job: Job, source: CacheSource) -> None:
        self._job, self._source = job, source
        self.prepared: PreparedModel | None = None
        self.nbytes = 0
        self.rejected: CacheReason | None = None
        self.compile_ms = 0.0
        self.failed = False
        self._suspect: Entry | None = None
        """The entry whose restoration ended the device's process."""

    def try_entry(self, offer: Entry | Room) -> CacheReason | None:
        """Restore an `Entry`, or compile and save the model in the files of a `Room`.

        Returns:
            The outcome; None if the entry cannot be restored, and the next one must be tried.
        """
        if isinstance(offer, Room):
            return offer.keep(offer.files, self.compile(offer.files))
        if self.rejected is CacheReason.DEAD_SERVICE:
            return None
        refused = self._restore(offer)
        if refused is None:
            self.nbytes = sum(os.fstat(fd).st_size for fd in (*offer.files.model_fds, *offer.files.data_fds))
            self._note(CacheReason.HIT, offer)
            return CacheReason.HIT
        self.rejected = refused
        offer.close()  # an open file cannot be removed
        if offer is not self._suspect:
            self._note(refused, offer)
        return None

    def _restore(self, entry: Entry) -> CacheReason | None:
        """Make the device restore an entry. Return None, or the reason of a failure."""
        device, deadline_ns, alive = self._job.device, self._job.asked.deadline_ns, False
        with contextlib.suppress(Exception):  # a hanging service must not exceed the deadline
            alive = not deadline_ns and device.status is not DeviceStatus.OFFLINE
        try:
            files = replace(entry.files, priority=self._job.asked.priority)
            self.prepared = device.prepare_model_from_cache(files, deadline_ns)
        except DeadObject:
            if not alive:  # the entry may be harmless: `compile` finds out
                self._suspect = entry
            return CacheReason.DEAD_SERVICE
        except CacheRejected as error:
            return error.reason
        except NNBurstError as error:
            return _PASSING.get(error.status, CacheReason.IO_ERROR)
        except Exception as error:
            warn("nnburst.cache", "%s could not restore a compilation: %s", device.name, error)
            return CacheReason.IO_ERROR
        return None

    def compile(self, files: CacheFiles | None) -> PreparedModel:
        started = time.perf_counter()
        try:
            prepared = self._job.device.prepare_model(self._job.model, replace(self._job.asked, cache=files))
        except BaseException:
            self.failed = True
            raise
        self.prepared, self.compile_ms = prepared, _ms_since(started)
        if self._suspect is not None:
            self._note(CacheReason.DEAD_SERVICE, self._suspect)
        return prepared

    def _note(self, reason: CacheReason, entry: Entry) -> None:
        try:
            self._source.note(reason, entry)
        except Exception as error:
            warn("nnburst.cache", "the outcome of a look-up was not noted: %s", error)


def compile_with_cache(job: Job, source: CacheSource | None) -> tuple[PreparedModel, CacheReport]:
    """Restore a compilation, or compile the model and try to save the result."""
    if source is None:
        return job.device.prepare_model(job.model, job.asked), NO_CACHE
    if not 0 < sum(job.counts) or max(job.counts) > _MOST_COUNT:
        return job.device.prepare_model(job.model, job.asked), replace(NO_CACHE, reason=CacheReason.UNSUPPORTED)
    reason = CacheReason.IO_ERROR
    attempt, started = _Attempt(job, source), time.perf_counter()
    try:
        with contextlib.closing(source.find_entries(job)) as offers:
            for offer in offers:
                found = attempt.try_entry(offer)
                if found is not None:
                    reason = found
                    break
    except CacheRejected as error:
        if attempt.failed:
            raise
        reason = error.reason
    except Exception as error:
        if attempt.failed or isinstance(error, DeadObject):
            raise
        warn("nnburst.cache", "a compilation was neither looked for nor kept: %s", error)
    prepared = attempt.prepared or attempt.compile(None)
    elapsed = _ms_since(started)
    if reason is CacheReason.HIT:
        return prepared, CacheReport("HIT", reason, None, attempt.nbytes, elapsed)
    result = prepared.cache_result
    outcome = "DISABLED"
    if reason not in (CacheReason.DISABLED, CacheReason.NO_INFO):
        outcome = "SAVED" if reason is CacheReason.SAVED else "REJECTED" if attempt.rejected else "NOT_SAVED"
    return prepared, CacheReport(
        outcome, reason, attempt.rejected, result.nbytes if result and result.saved else 0,
        elapsed - attempt.compile_ms, attempt.compile_ms, result.seconds * 1e3 if result else 0.0,
    )  # fmt: skip


def _ms_since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
