"""A model whose parts run one after the other on several devices, behind the interface of one prepared model.

Values between parts share one pool, where later values overwrite values that are no longer needed. A burst on the
whole model opens another burst for each part that runs in another process.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ..burst.client.controller import ExecutionBurstController
from ..burst.client.request import BoundRequest
from ..burst.interfaces import BurstCallback, BurstContext, BurstExecutorWithCache
from ..burst.kernel import Kernel, run_until
from ..burst.server.server import ExecutionBurstServer
from ..errors import Ending, ErrorStatus, GeneralFailure, NNBurstError, OutputInsufficientSize, OutputShape
from ..fmq.descriptor import MQDescriptor
from ..memory.memory import Memory
from ..model._validate_request import validate_request
from ..model.dimensions import combine_dimensions
from ..model.extensions import Extension
from ..model.operand_types import operand_nbytes
from ..model.operation_types import operation_name
from ..model.partition import Part, has_known_size, regions, split_model
from ..model.performance import operation_cost
from ..model.running import ExecutionResult, Failure, RunOptions, failure_of, reason_of
from ..model.types import (
    NO_TIMING,
    Capabilities,
    DataLocation,
    MeasureTiming,
    MemoryLike,
    Model,
    Named,
    Request,
    RequestArgument,
    Timing,
)
from ..model.validate import validate_model
from .common import all_extensions
from .deadline import require_time
from .interfaces import CompileJob, Device, PreparedModel
from .local import LocalModel

_HAND_OVER = 4
"""Cost of the transition between two parts, as a number of small operations."""


class Step(Struct, frozen=True):
    """A part of a model and the device that runs it."""

    device: Device
    part: Part


class PartitionedDevice(Device):
    """Several devices, in order of preference, that run parts of a model. The caller keeps and closes them."""

    name = "nnburst-partitioned"

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = tuple(devices)

    @property
    def version_string(self) -> str:
        return ", ".join(f"{device.name} {device.version_string}" for device in self.devices)

    @property
    def capabilities(self) -> Capabilities:
        return self.devices[0].capabilities

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        return all_extensions(self.devices)

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        """Return, for each operation, True if at least one device supports it."""
        answers = [device.get_supported_operations(model) for device in self.devices]
        return tuple(any(by_device) for by_device in zip(*answers, strict=True))

    def plan(
        self,
        model: Model,
        supported: Sequence[Sequence[bool]] | None = None,
        capabilities: Sequence[Capabilities] | None = None,
    ) -> tuple[Step, ...]:
        """Cut a model into parts. Each operation goes to the first device that supports it.

        Args:
            supported: Result of `get_supported_operations` from each device, if known.
            capabilities: Capabilities of each device. If given, an operation goes to the fastest device that supports
                it.

        Raises:
            InvalidArgument: The model breaks a rule.
            GeneralFailure: No device supports an operation, or a value between two parts has no known size.
        """
        if supported is None:
            supported = [device.get_supported_operations(model) for device in self.devices]
        chosen = []
        for n, by_device in enumerate(zip(*supported, strict=True)):
            if not any(by_device):
                name = operation_name(model.main.operations[n].type)
                names = ", ".join(device.name for device in self.devices)
                raise GeneralFailure(f"operation {n} ({name}) is supported by none of {names}")
            able = [k for k, can in enumerate(by_device) if can]
            if capabilities is not None:
                operation = model.main.operations[n]
                able.sort(key=lambda k: operation_cost(model, model.main, operation, capabilities[k]))
            chosen.append(able[0])
        return tuple(Step(self.devices[part.device], part) for part in split_model(model, chosen))

    def cost(self, model: Model, steps: Sequence[Step], capabilities: Sequence[Capabilities]) -> float:
        total = 0.0
        for step in steps:
            speed = capabilities[self.devices.index(step.device)]
            operations = (model.main.operations[n] for n in step.part.operations)
            total += _HAND_OVER * speed.operation_time
            total += sum(operation_cost(model, model.main, operation, speed) for operation in operations)
        return total

    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PartitionedModel:
        """Compile every part on its device. The job's cache files are ignored."""
        validate_model(model)
        steps, prepared = self.plan(model), []
        try:
            for step in steps:
                prepared.append(step.device.prepare_model(step.part.model, replace(job, cache=None)))
        except BaseException:
            for each in prepared:
                each.close()
            raise
        return PartitionedModel(model, [step.part for step in steps], prepared)


class PartitionedModel(PreparedModel):
    """A prepared model that consists of prepared parts.

    Args:
        parts: The parts in running order.
        prepared: One prepared model per part, which this object owns.
    """

    def __init__(self, model: Model, parts: Sequence[Part], prepared: Sequence[PreparedModel]) -> None:
        self.model = model
        self.parts = tuple(parts)
        self.prepared = tuple(prepared)
        outer = {*model.main.input_indexes, *model.main.output_indexes}
        handed = [i for part in self.parts for i in part.outputs if i not in outer]
        sizes = [operand_nbytes(model.main.operands[i].type, model.main.operands[i].dimensions) for i in handed]
        lives = [
            (
                next(k for k, part in enumerate(self.parts) if i in part.outputs),
                max(k for k, part in enumerate(self.parts) if i in part.inputs),
            )
            for i in handed
        ]
        offsets, self.scratch_size = regions(sizes, lives)
        self._handed = {i: (offset, size) for i, offset, size in zip(handed, offsets, sizes, strict=True)}

    # ---- requests --------------------------------------------------------------------------------------------

    def scratch(self) -> Memory:
        return Memory.ashmem(max(1, self.scratch_size), "nnburst-parts")

    def requests(self, request: Request, scratch: Memory) -> list[Request]:
        """Make one request for each part, with only the pools that this part needs."""
        main = self.model.main
        arguments = dict(zip(main.input_indexes, request.inputs, strict=True))
        arguments |= dict(zip(main.output_indexes, request.outputs, strict=True))
        made = []
        for part in self.parts:
            pools: dict[int, MemoryLike | Named] = {}  # The key is the pool's `id()`.

            def argument(i: int, pools: dict[int, MemoryLike | Named] = pools) -> RequestArgument:
                outer = arguments[i] if i in arguments else RequestArgument(location=DataLocation(0, *self._handed[i]))
                if outer.has_no_value:
                    return outer
                pool = request.pools[outer.location.pool_index] if i in arguments else scratch
                pools.setdefault(id(pool), pool)
                return replace(outer, location=replace(outer.location, pool_index=list(pools).index(id(pool))))

            inputs, outputs = tuple(map(argument, part.inputs)), tuple(map(argument, part.outputs))
            made.append(Request(inputs, outputs, tuple(pools.values())))
        return made

    def combine(self, request: Request, results: Sequence[ExecutionResult], measured: bool) -> ExecutionResult:
        """Combine the results of the parts. The last result may be a failure."""
        main, shapes = self.model.main, dict[int, OutputShape]()
        for part, (_, reported, _) in zip(self.parts, results, strict=False):
            shapes |= dict(zip(part.outputs, reported, strict=False))
        status, timing = results[-1][0], _total(results) if measured else NO_TIMING
        if status is ErrorStatus.NONE and not shapes:
            return status, (), timing
        if status not in (ErrorStatus.NONE, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE):
            return results[-1]
        every = tuple(
            shapes.get(i) or OutputShape(combine_dimensions(main.operands[i].dimensions, argument.dimensions))
            for i, argument in zip(main.output_indexes, request.outputs, strict=True)
        )
        return (status, every, timing) if status is ErrorStatus.NONE else Failure(status, reason_of(results[-1]), every)

    # ---- running ---------------------------------------------------------------------------------------------

    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        try:
            validate_request(self.model, request)
            require_time(options.deadline_ns)
            with self.scratch() as scratch:
                results = []
                for prepared, inner in zip(self.prepared, self.requests(request, scratch), strict=True):
                    results.append(prepared.execute_synchronously(inner, options))
                    if results[-1][0] is not ErrorStatus.NONE:
                        break
                return self.combine(request, results, options.measure == MeasureTiming.YES)
        except (MemoryError, NNBurstError) as error:
            return failure_of(error)

    def bind_fenced(self, request: Request, options: RunOptions) -> Callable[[RunOptions], ExecutionResult]:
        validate_request(self.model, request, allow_unspecified_output=False)
        return super().bind_fenced(request, options)

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext:
        """Serve a burst. Each remote part gets its own burst, with the same limit for WHILE loops."""
        executor = _PartsExecutor(self, callback.loop_timeout_ns)
        return ExecutionBurstServer.create(
            callback, request_channel, result_channel, executor, polling_window=polling_window
        )

    def burst_executor(self) -> BurstExecutorWithCache:
        return _PartsExecutor(self)

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> Ending:
        """The `Ending` of the first part whose process has ended. Its reason is empty while all processes live."""
        endings = [prepared.ending for prepared in self.prepared]
        return next((ending for ending in endings if ending.reason), Ending())

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` at the first death of a part's process. Return a function that cancels the call."""
        once = threading.Lock()  # The lock is never released, so only one thread calls.
        unlink = [
            prepared.link_to_death(lambda: on_death() if once.acquire(blocking=False) else None)
            for prepared in self.prepared
        ]

        def unlink_all() -> None:
            once.acquire(blocking=False)
            for each in unlink:
                each()

        return unlink_all

    def close(self) -> None:
        for prepared in self.prepared:
            prepared.close()


def _total(results: Sequence[ExecutionResult]) -> Timing:
    times = [(timing.time_on_device, timing.time_in_driver) for _, _, timing in results]
    sums = [None if None in column else sum(filter(None, column)) for column in zip(*times, strict=True)]
    return Timing(*sums)


class _ThroughBurst:
    """A kernel that runs a part in another process."""

    def __init__(self, bound: BoundRequest) -> None:
        self._bound = bound

    def __call__(self) -> ExecutionResult:
        self._bound.run()
        return self._bound.result

    def run_until(self, deadline_ns: int) -> ExecutionResult:
        self._bound.timeout = max(0, deadline_ns - time.monotonic_ns()) / 1e9
        try:
            return self()
        finally:
            self._bound.timeout = None


class _PartsKernel:
    """A kernel that runs the parts of a request in order. With `tells`, it returns the request's combined result."""

    def __init__(
        self, model: PartitionedModel, request: Request, kernels: Sequence[Kernel], measured: bool, *, tells: bool
    ) -> None:
        self._model, self._request, self._kernels = model, request, tuple(kernels)
        self._measured, self._tells = measured, tells

    def __call__(self) -> ExecutionResult | None:
        return self.run_until(0)

    def run_until(self, deadline_ns: int) -> ExecutionResult | None:
        """Run the parts, which share a deadline (0 for none)."""
        results: list[ExecutionResult] = []
        for run in self._kernels:
            require_time(deadline_ns)
            try:
                results.append(run_until(run, deadline_ns) or (ErrorStatus.NONE, (), NO_TIMING))
            except OutputInsufficientSize as error:
                if not self._tells:
                    raise
                results.append(failure_of(error))
                break
        return self._model.combine(self._request, results, self._measured) if self._tells else None


class _PartsExecutor(BurstExecutorWithCache):
    """An executor of a burst: it runs local parts of a request directly, and remote parts through further bursts."""

    def __init__(self, model: PartitionedModel, loop_timeout_ns: int = 0) -> None:
        super().__init__(self._bound)
        self._model = model
        self._scratch = model.scratch()
        self._bursts: dict[PreparedModel, ExecutionBurstController] = {}
        try:
            for prepared in model.prepared:
                if not isinstance(prepared, LocalModel):
                    loop_timeout = loop_timeout_ns / 1e9 or None
                    self._bursts[prepared] = ExecutionBurstController.create(prepared, loop_timeout=loop_timeout)
        except BaseException:
            self.close()
            raise

    def _bound(self, request: Request, options: RunOptions) -> Kernel:
        main = self._model.model.main
        validate_request(self._model.model, request)
        inner = self._model.requests(request, self._scratch)
        measured = options.measure == MeasureTiming.YES
        kernels: list[Kernel] = [
            prepared.plan(each, options).call
            if isinstance(prepared, LocalModel)
            else _ThroughBurst(self._bursts[prepared].bind(each, measure=measured))
            for prepared, each in zip(self._model.prepared, inner, strict=True)
        ]
        fixed = all(has_known_size(main.operands[i]) for i in main.output_indexes)
        return _PartsKernel(self._model, request, kernels, measured, tells=measured or not fixed)

    def remove_cache_entry(self, slot: int) -> None:
        memory = self._entries.get(slot)
        super().remove_cache_entry(slot)
        if memory is not None and not any(other is memory for other in self._entries.values()):
            for burst in self._bursts.values():
                burst.forget(memory)

    def close(self) -> None:
        super().close()
        while self._bursts:
            self._bursts.popitem()[1].close()
        self._scratch.close()
