"""Base classes of devices and prepared models in this process."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from ..burst.cancellation import CancelFlag, present_cancel_flag, use_cancel_flag
from ..burst.interfaces import BurstExecutorWithCache
from ..burst.kernel import Kernel, run_until
from ..cache.device_cache import VerifiedEntry
from ..cache.names import check_cache_key
from ..cache.reasons import SaveResult
from ..errors import BadState, ErrorStatus, GeneralFailure
from ..memory.managed import BufferTracker
from ..memory.staging import check_pools
from ..model._validate_request import validate_request
from ..model.operation_types import operation_name
from ..model.running import ExecutionResult, RunOptions, failure_of
from ..model.types import NO_TIMING, BufferDesc, BufferRole, Capabilities, Model, Operation, Request
from ..model.validate import validate_model
from .buffers import allocate_buffer, bind_buffers
from .caching import DeviceCacheHome, build_epoch
from .common import build_version, capabilities_of, check_preparation, readable_operations
from .deadline import require_time
from .interfaces import Buffer, CacheFiles, CompileJob, Device, PreparedModel
from .plan import Plan
from .steps import SteppedKernel

_numbers = itertools.count(1)


class LocalDevice(Device):
    """A device in this process, which can cache its compilations."""

    has_buffers = True
    cache_format = 0
    """Version of the format of cache files; 0 for a device without caching."""

    def __init__(self) -> None:
        self._cache = DeviceCacheHome(self.name, lambda: self.cache_epoch, 1, 1)
        self._tracker = BufferTracker()

    # ---- what a device implements ----------------------------------------------------------------------------

    @abc.abstractmethod
    def why_not(self, model: Model, operation: Operation) -> str:
        """Return why this device cannot run an operation of a valid model; empty if it can."""

    @abc.abstractmethod
    def compile(self, model: Model) -> LocalModel:
        """Compile a valid model whose operations are all supported. The compilation may still raise an error."""

    def load_libraries(self, rest: bool = False) -> None:
        """Load the libraries that every model needs; with `rest`, also the libraries that only some models need."""

    def save(self, prepared: LocalModel, files: CacheFiles) -> SaveResult | None:
        """Save a compilation to cache files. Never raises."""
        return None

    def restore(self, cache_key: bytes, entry: VerifiedEntry) -> LocalModel:
        """Restore a model that `save` wrote. Raises the errors of `Device.prepare_model_from_cache`."""
        raise NotImplementedError

    # ---- common parts ----------------------------------------------------------------------------------------

    @property
    def version_string(self) -> str:
        return build_version()

    @property
    def capabilities(self) -> Capabilities:
        return capabilities_of()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        validate_model(model)
        return tuple(not reason for reason in self._reasons(model))

    def reasons(self, model: Model) -> Sequence[str]:
        """Return `why_not` of each operation. A device can override this method to check all at once."""
        return [self.why_not(model, operation) for operation in model.main.operations]

    def _reasons(self, model: Model) -> list[str]:
        rows = zip(self.reasons(model), readable_operations(model), strict=True)
        return [why if can_read else "a constant of it lies in memory that cannot be read" for why, can_read in rows]

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> LocalModel:
        """Validate, compile and, if the job has cache files, save a model; see `Device.prepare_model`."""
        validate_model(model)
        check_preparation(job)
        check_pools(model.pools, "model")
        for position, reason in enumerate(self._reasons(model)):
            if reason:
                name = operation_name(model.main.operations[position].type)
                raise GeneralFailure(
                    f"{self.name} cannot run operation {position} ({name}): {reason}; "
                    "get_supported_operations says which operations it can"
                )
        prepared = self.compile(model)
        try:
            require_time(job.deadline_ns)
            if job.cache is not None:
                check_cache_key(job.cache.cache_key)
                prepared.cache_result = self.save(prepared, job.cache)
        finally:
            prepared.forget_source()
        return prepared

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        return self._cache.counts if self.cache_format else (0, 0)

    @property
    def cache_epoch(self) -> bytes:
        """The result of `build_epoch` for this device's name, version and `cache_format`."""
        return build_epoch(self.name, self.version_string, f"format {self.cache_format}")

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> PreparedModel:
        if not self.cache_format:
            return super().prepare_model_from_cache(cache, deadline_ns)
        prepared = self.restore(cache.cache_key, self._cache.load(cache))
        require_time(deadline_ns)
        return prepared

    def confirm_cache(self, cache_key: bytes, generation: bytes) -> bool:
        return not self.cache_format or self._cache.get().confirm(cache_key, generation)

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """Allocate a buffer of any NNAPI type, even with unknown dimensions; see `Device.allocate`."""
        if not self.has_buffers:
            return super().allocate(desc, prepared_models, input_roles, output_roles)
        return allocate_buffer(self._tracker, desc, prepared_models, input_roles, output_roles)


class LocalModel(PreparedModel):
    """A prepared model of a device in this process. Subclasses implement `bind`.

    Attributes:
        number: Unique number, by which roles of buffers refer to the model.
    """

    takes_steps = True  # A kernel can be called repeatedly.

    def __init__(self, model: Model, tracker: BufferTracker) -> None:
        self.model = model
        self.number = next(_numbers)
        self.tracker = tracker
        self._closed = False
        for pool in model.pools:
            getattr(pool, "identity", None)  # Once asked for, the identity stays known after the pool is closed.

    @abc.abstractmethod
    def bind(self, request: Request, options: RunOptions) -> Kernel:
        """Return a kernel for a request; see `nnburst.devices.plan.Bind`."""

    def plan(self, request: Request, options: RunOptions = RunOptions(), *, fenced: bool = False) -> Plan:
        """Check a request and bind it for any number of runs. If `fenced`, all output dimensions must be known.

        Raises:
            InvalidArgument: The request does not fit the model.
            GeneralFailure: An argument is missing, or memory can be neither mapped nor copied.
            ResourceExhausted: There is not enough memory for the execution.
            BadState: The model is closed.
        """
        if self._closed:
            raise BadState("the prepared model is closed")
        validate_request(self.model, request, allow_unspecified_output=not fenced)
        steps = request.steps
        flag = present_cancel_flag()
        one = self.bind if flag is None else partial(self._bind_for, flag)
        bind = one if steps is None else partial(SteppedKernel, one, steps, flag)
        return Plan(bind, request, options, bind_buffers(self, request))

    def _bind_for(self, flag: CancelFlag, request: Request, options: RunOptions) -> Kernel:
        kernel = self.bind(request, options)
        flag.add(kernel)
        return kernel

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        try:
            plan = self.plan(request, options)
        except BadState:
            raise
        except Exception as error:
            return failure_of(error)
        return _run(plan, options)

    def bind_fenced(self, request: Request, options: RunOptions) -> Callable[[RunOptions], ExecutionResult]:
        """Bind a fenced request; see `PreparedModel.bind_fenced`. Only the run checks that buffers have contents."""
        plan, flag = self.plan(request, options, fenced=True), present_cancel_flag()

        def run(final: RunOptions) -> ExecutionResult:
            if final == options:
                return _run(plan, final)
            with use_cancel_flag(flag):
                return self.execute_synchronously(request, final)

        return run

    def burst_executor(self) -> BurstExecutorWithCache:
        """Return an executor that keeps memory mapped and requests bound."""

        def bind(request: Request, options: RunOptions) -> Kernel:
            return self.plan(request, options).call

        return BurstExecutorWithCache(bind)

    def forget_source(self) -> None:
        """Release memory that was needed only to compile and save the model."""

    def close(self) -> None:
        """Refuse new requests. Requests that are bound already can still run."""
        self._closed = True
        self.model = replace(self.model, pools=())


def _run(plan: Plan, options: RunOptions) -> ExecutionResult:
    try:
        require_time(options.deadline_ns)
        result = run_until(plan, options.deadline_ns)
    except Exception as error:
        return failure_of(error)
    return (ErrorStatus.NONE, (), NO_TIMING) if result is None else result
