"""The device itself: what it supports and how it prepares."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace

from ...cache import CacheReason, SaveResult, checked_token
from ...errors import GeneralFailure, InvalidArgument, MissedDeadline
from ...memory import BufferTracker, check_pools
from ...model import (
    BufferDesc,
    BufferRole,
    Capabilities,
    Model,
    Operation,
    operation_name,
    validate_model,
)
from .._buffers import LocalBuffer, allocate_buffer
from .._caching import DeviceCacheHome, build_epoch
from .._common import build_version, check_preparation, cpu_capabilities, deadline_passed, readable_operations
from .._interfaces import CacheFiles, CompileJob, Device, PreparedModel
from .._late import LateSave
from .kernels import KERNELS
from .prepared import ReferencePreparedModel
from .serial import FORMAT
from .stages import LaterStage

__all__ = ["ReferenceDevice"]

_STAGES = {"ahead": 1, "jit": 1, "multistage": 3}
_COUNTERS = ("validations", "lowerings", "transformations", "saves", "loads")


class ReferenceDevice(Device):
    """NNAPI operations in NumPy. Nothing is faster on purpose than it is right.

    Args:
        compilation: ``ahead``: everything is done when a model is prepared. ``jit``: weights are transformed with the
            first execution, and cache files written after it. ``multistage``: cache files are written at once without
            transformed weights, and again with them after some executions.
        after: Executions after which the later stage begins; default 1 for ``jit``, 3 for ``multistage``.

    Raises:
        InvalidArgument: No such way to compile, or no such number.
    """

    def __init__(self, compilation: str = "ahead", after: str | int = "") -> None:
        if compilation not in _STAGES:
            raise InvalidArgument(f"compilation={compilation!r}; choose one of {', '.join(_STAGES)}")
        if after and not (str(after).isdigit() and int(after) > 0):
            raise InvalidArgument(f"after={after!r}; give the number of executions, 1 or more")
        self._compilation = compilation
        self._after = int(after or _STAGES[compilation])
        self._tracker = BufferTracker()
        self._counters = dict.fromkeys(_COUNTERS, 0)
        self._counting = threading.Lock()
        self._cache = DeviceCacheHome(self.name, lambda: self.cache_epoch, 1, 1)

    def _count(self, **more: int) -> None:
        with self._counting:
            for name, number in more.items():
                self._counters[name] += number

    @property
    def name(self) -> str:
        """``nnburst-reference``."""
        return "nnburst-reference"

    @property
    def version_string(self) -> str:
        """Version of the package and of NumPy, which decides the last bits of results."""
        return build_version()

    @property
    def capabilities(self) -> Capabilities:
        """The CPU baseline."""
        return cpu_capabilities()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        """See `Device.get_supported_operations`."""
        validate_model(model)
        readable = readable_operations(model)
        return tuple(
            _is_supported(operation) and can_read
            for operation, can_read in zip(model.main.operations, readable, strict=True)
        )

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> ReferencePreparedModel:
        """Copy the constants and lower the graph; see `Device.prepare_model`."""
        started = time.perf_counter()
        validate_model(model)
        self._count(validations=1)
        check_preparation(job)
        check_pools(model.pools, "model")
        for position, operation in enumerate(model.main.operations):
            if not _is_supported(operation):
                raise GeneralFailure(
                    f"operation {position} ({operation_name(operation.type)}) is not built in {self.name};"
                    " ask get_supported_operations first"
                )
        ahead = self._compilation == "ahead"
        prepared = ReferencePreparedModel.compile(model, self._tracker, lower=ahead)
        self._count(lowerings=int(ahead), transformations=prepared.transformations)
        if deadline_passed(job.deadline_ns):
            raise MissedDeadline("the preparation finished after its deadline")
        cache = job.cache
        if cache is not None:
            checked_token(cache.token)
            seconds = time.perf_counter() - started
            if not ahead:
                late = LateSave(self._cache, cache)
                self._save_later(prepared, late)
                if self._compilation == "jit":
                    prepared.note_saved(SaveResult(False, late.refused or CacheReason.LATER))
                    return prepared
            result = self._cache.save(
                cache,
                prepared.packed,
                seconds=seconds if ahead else None,
                compiled=prepared.fingerprint,
            )
            prepared.note_saved(result)
            self._count(saves=int(result.saved))
        if ahead:
            prepared.forget_source()
        return prepared

    def _save_later(self, prepared: ReferencePreparedModel, late: LateSave, restored: bool = False) -> None:
        """Have weights transformed, and the files written with them, after some executions.

        Args:
            prepared: The model.
            late: Its files.
            restored: Its constants come from verified files, not from the client.
        """
        weak = weakref.ref(prepared)

        def work() -> None:
            model = weak()
            if model is None:
                return
            model.lower()
            result = late.save(model.packed, None if restored else model.fingerprint)
            model.note_saved(result)
            self._count(lowerings=1, transformations=model.transformations, saves=int(result.saved))

        stage = LaterStage(self._after, work)
        weakref.finalize(prepared, late.close)
        prepared.continue_with(stage)

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        """One for the graph, one for constants and what is made from them."""
        return self._cache.counts

    @property
    def cache_epoch(self) -> bytes:
        """Changes with the package, its library, NumPy, the machine's instructions and the format."""
        return build_epoch(self.name, self.version_string, f"format {FORMAT}")

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> ReferencePreparedModel:
        """Neither validation nor lowering nor transformation; see `Device.prepare_model_from_cache`."""
        entry = self._cache.load(cache)
        if deadline_passed(deadline_ns):
            raise MissedDeadline("the preparation finished after its deadline")
        prepared = ReferencePreparedModel.restore(entry.model[0], entry.data[0], self._tracker)
        self._count(loads=1)
        if self._compilation == "multistage" and not prepared.is_lowered:  # an earlier stage
            # What the entry was made from, not what this client believes; all zeros is a fingerprint like any other.
            self._save_later(prepared, LateSave(self._cache, replace(cache, fingerprint=entry.fingerprint)), True)
        return prepared

    def confirm_cache(self, token: bytes, generation: bytes) -> bool:
        """See `Device.confirm_cache`."""
        return self._cache.get().confirm(token, generation)

    def counters(self) -> dict[str, int]:
        """Validations, lowerings and transformations of weights; saves and loads of cache files."""
        with self._counting:
            return dict(self._counters)

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> LocalBuffer:
        """Any base type, also with open dimensions; see `Device.allocate`."""
        return allocate_buffer(self._tracker, desc, prepared_models, input_roles, output_roles)


def _is_supported(operation: Operation) -> bool:
    return operation.type in KERNELS
