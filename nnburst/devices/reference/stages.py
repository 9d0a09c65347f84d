"""Compiling in stages, for a device that would rather begin than finish: nothing of the reference device knows of it.

Part of the work is done, and saved, only when executions show that it is worth it.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable

from msgspec.structs import replace

from ..._core.threads import start_daemon
from ...burst import Kernel
from ...cache import CacheReason, SaveResult, VerifiedEntry
from ...errors import InvalidArgument
from ...model import ExecutionResult, Model, Request, RunOptions
from ..deferred_save import DeferredSave
from ..interfaces import CacheFiles
from ..local import LocalModel
from .device import ReferenceDevice
from .graph import PreparedSubgraph
from .prepared import ReferencePreparedModel
from .program import Program

_AFTER = {"jit": 1, "multistage": 3}


def reference_device(compilation: str = "ahead", after: str | int = "") -> ReferenceDevice:
    """Return a reference device.

    Args:
        compilation: ``ahead``: everything is done when a model is prepared; else see `StagedReferenceDevice`.
        after: Likewise.

    Raises:
        InvalidArgument: No such way to compile, or no such number.
    """
    if compilation not in ("ahead", *_AFTER):
        raise InvalidArgument(f"compilation={compilation!r}; choose one of {', '.join(('ahead', *_AFTER))}")
    if after and not (str(after).isdigit() and int(after) > 0):
        raise InvalidArgument(f"after={after!r}; give the number of executions, 1 or more")
    return ReferenceDevice() if compilation == "ahead" else StagedReferenceDevice(compilation, int(after or 0))


class StagedReferenceDevice(ReferenceDevice):
    """Writes cache files, with transformed weights, after some executions.

    Args:
        compilation: ``jit``: not before. ``multistage``: also at once, without transformed weights.
        after: Executions after which the later stage begins; 0 for 1 with ``jit``, 3 with ``multistage``.
    """

    def __init__(self, compilation: str = "jit", after: int = 0) -> None:
        super().__init__()
        self._is_jit = compilation == "jit"
        self._after = after or _AFTER[compilation]

    def compile(self, model: Model) -> StagedModel:
        self.count(validations=1)
        return StagedModel.compile(model, self._tracker)

    def save(self, prepared: LocalModel, files: CacheFiles) -> SaveResult:
        """Save now, unless that is left to the later stage."""
        assert isinstance(prepared, StagedModel)
        late = DeferredSave(self._cache, files)
        self._save_later(prepared, late, prepared.fingerprint)
        return SaveResult(False, late.refused or CacheReason.LATER) if self._is_jit else super().save(prepared, files)

    def restore(self, entry: VerifiedEntry, cache: CacheFiles) -> StagedModel:
        """Go on where an earlier stage was saved."""
        prepared = StagedModel.restore(entry.model[0], entry.data[0], self._tracker)
        if not self._is_jit and not prepared.transformations:
            # What the entry was made from, not what this client believes; all zeros is a fingerprint like any other.
            self._save_later(prepared, DeferredSave(self._cache, replace(cache, fingerprint=entry.fingerprint)), None)
        return prepared

    def _save_later(self, prepared: StagedModel, late: DeferredSave, compiled: Callable[[], bytes] | None) -> None:
        """Have the files written after some executions, which have transformed the weights."""
        weak, checks = weakref.ref(prepared), compiled is not None

        def work() -> None:
            model = weak()
            if model is None:
                return
            result = late.save(model.packed, model.fingerprint if checks else None)
            model.note_saved(result)
            self.count(saves=int(result.saved))

        weakref.finalize(prepared, late.close)
        prepared.stage = LaterStage(self._after, work)


class StagedModel(ReferencePreparedModel):
    """A model that counts its executions if there is another stage.

    Attributes:
        stage: What comes after some executions; set before the model is given out.
    """

    stage: LaterStage | None = None

    def bind(self, request: Request, options: RunOptions) -> Kernel:
        stage = self.stage
        return super().bind(request, options) if stage is None else _Counted(self.graph, request, options, stage.ran)

    def close(self) -> None:
        """Release the constants. A later stage that has begun is finished first."""
        stage, self.stage = self.stage, None
        if stage is not None:
            stage.close()
        super().close()


class _Counted(Program):
    """A program that says when a run has ended."""

    def __init__(self, graph: PreparedSubgraph, request: Request, options: RunOptions, ran: Callable[[], None]) -> None:
        super().__init__(graph, request, options)
        self._ran = ran

    def _run(self) -> ExecutionResult | None:
        try:
            return super()._run()
        finally:
            self._ran()


class LaterStage:
    """Work that is done once, in the background, after a number of executions."""

    def __init__(self, after: int, work: Callable[[], None]) -> None:
        self._after = after
        self._work = work
        self._runs = itertools.count(1)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ended = False

    def ran(self) -> None:
        """An execution has ended. Any thread."""
        if next(self._runs) == self._after:
            with self._lock:
                if not self._ended:
                    self._thread = start_daemon(self._work, name="nnburst-later-stage", what="a later stage")

    def close(self) -> None:
        """Begin nothing any more, and wait for what has begun. Idempotent."""
        with self._lock:
            self._ended = True
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()
