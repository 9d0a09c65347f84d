"""The compilation of a model, as in NNAPI."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from msgspec import Struct

from ..._core.deadline import Deadline, check_timeout
from ..._core.errno import member
from ..._core.leaving import Closing, OneProcess
from ..._options import PreferenceName, PriorityName
from ...cache.names import check_cache_key
from ...devices.interfaces import CompileJob, Device, PreparedModel
from ...errors import BadState, GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError, error_for
from ...model.extensions import ImportedModel, ModelMetadata
from ...model.types import Capabilities, ExecutionPreference, Model, Priority
from ..request.node_args import NodeArg, imported_arguments, model_arguments
from ..service import Service, close_with
from .cache_sources import CacheSource, DescriptorCache, DirectoryCache, Job
from .caching import CacheReport, combined_report, compile_with_cache

if TYPE_CHECKING:
    from ...cache.directory import Limits
    from ...devices.partitioned import Step
    from ...model.partition import Part


_FINAL = (InvalidArgument, MissedDeadline, BadState)
"""Compilation errors that every device would raise."""


class StepReport(Struct, frozen=True):
    """A step of a model: operations that one device runs.

    Attributes:
        device: Name of the device.
        operations: Indexes in the main subgraph, in running order.
        cache: Result of caching for these operations.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     compilation.report.steps[0].operations
        (0,)
    """

    device: str
    operations: tuple[int, ...]
    cache: CacheReport


class CompilationReport(Struct, frozen=True):
    """The devices that run a model.

    Attributes:
        steps: The steps in running order; a single step if one device runs the whole model.
        refusals: (name, reason) for each device that failed to compile.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     len(compilation.report.steps), compilation.report.refusals
        (1, ())
    """

    steps: tuple[StepReport, ...]
    refusals: tuple[tuple[str, str], ...] = ()


class Compilation(OneProcess, Closing):
    """The compilation of a model. Set options, then call `finish` once. Context manager.

    Args:
        model: A model from `ModelBuilder`, or imported by a device.
        devices: Devices in order of preference. The first device that supports every operation compiles the model; if
            the device fails, the next one does. If no device supports every operation, the model is split among devices
            (see `report`). If a `Service` is given, the runtime chooses among the service's devices by measured speed,
            and can use shared memory instead of device memory.

    Raises:
        InvalidArgument: The model is not a `Model`; no device is given, or a device is given twice.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.set_preference("sustained_speed")
        ...     compilation.finish()
        ...     [node.name for node in compilation.inputs]
        ['x']
    """

    model: Model

    def __init__(self, model: Model | ImportedModel, devices: Sequence[Device] | Service) -> None:
        self._imported = model if isinstance(model, ImportedModel) else None
        if isinstance(model, ImportedModel):
            model = model.model
        if not isinstance(model, Model):
            raise InvalidArgument(f"model is {type(model).__name__}; build a Model with nnburst.ModelBuilder")
        self._names_devices = not isinstance(devices, Service)
        listed = devices.devices if isinstance(devices, Service) else devices
        chosen = tuple(listed) if isinstance(listed, Iterable) else (listed,)
        if not chosen:
            raise InvalidArgument("no device given; service.devices lists those of a service")
        if not all(isinstance(device, Device) for device in chosen):
            raise InvalidArgument("devices must be Device objects, for example service.devices")
        if len({id(device) for device in chosen}) != len(chosen):
            raise InvalidArgument("a device is given twice")
        self.model = model
        self._devices = chosen
        self._preference = ExecutionPreference.FAST_SINGLE_ANSWER
        self._priority = Priority.MEDIUM
        self._timeout: float | None = None
        self._finished = False
        self._prepared: PreparedModel | None = None
        self._refuses = False
        self._device: Device | None = None
        self._used: tuple[Device, ...] = ()
        self._cache: CacheSource | None = None
        self._report: CompilationReport | None = None
        self._parts: tuple[Part, ...] = ()
        self._lacks: list[str] = []

    @property
    def metadata(self) -> ModelMetadata:
        """The metadata of the model file. Raises `GeneralFailure` if there are none."""
        if self._imported is None or self._imported.metadata is None:
            raise GeneralFailure("the model has no metadata here: it is of no ONNX file, or they are too long")
        return self._imported.metadata

    def set_preference(self, preference: PreferenceName | ExecutionPreference) -> None:
        """Set the execution preference.

        The preference is passed to the device, and is part of the cache key. With ``LOW_POWER``, both ends of a `Burst`
        sleep instead of polling, unless the burst has a `polling_window`.

        Args:
            preference: An `ExecutionPreference`, or its name.

        Raises:
            InvalidArgument: The preference is unknown.
            BadState: The compilation is finished.
        """
        self._check_open()
        self._preference = member(ExecutionPreference, preference, "preference")

    @property
    def preference(self) -> ExecutionPreference:
        """The preference from `set_preference`."""
        return self._preference

    def set_priority(self, priority: PriorityName | Priority) -> None:
        """Set the priority of executions. A shared service runs waiting executions of higher priority first.

        Raises the same errors as `set_preference`.

        Args:
            priority: A `Priority`, or its name.
        """
        self._check_open()
        self._priority = member(Priority, priority, "priority")

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the duration of `finish`.

        Args:
            seconds: Longest duration; None for no limit.

        Raises:
            InvalidArgument: The compilation is not for exactly one device, or the number is negative.
            BadState: The compilation is finished.
        """
        self._check_open()
        if not self._has_one_device:
            raise InvalidArgument("a timeout needs a compilation for exactly one device")
        self._timeout = check_timeout(seconds)

    def finish(self) -> None:
        """Compile the model. The compilation is then finished, even after an error.

        Raises:
            BadState: The compilation is already finished.
            InvalidArgument: The model breaks a rule.
            GeneralFailure: No device supports every operation, or the compiler failed.
            MissedDeadline: The timeout passed.
        """
        self._check_open()
        self._finished = True
        try:
            Deadline.after(self._timeout).call(self._compile)
        finally:
            self._release_cache()

    def _compile(self) -> None:
        asked = CompileJob(self._preference, self._priority, Deadline.after().at_ns)
        able, refusals, failures = self._asked(), [], []
        while able:
            try:
                steps = self._steps(able)
            except GeneralFailure as error:
                if len(able) > 1:
                    self._lacks.append(str(error))
                break
            made: list[PreparedModel] = []
            reports: list[StepReport] = []
            try:
                for device, part, operations in steps:
                    named = tuple((0, n) for n in operations) if len(steps) > 1 else ()
                    prepared, report = compile_with_cache(Job(device, part, asked, named), self._cache)
                    made.append(prepared)
                    reports.append(StepReport(device.name, operations, report))
            except BaseException as error:
                for each in made:
                    each.close()
                if not isinstance(error, NNBurstError) or isinstance(error, _FINAL):
                    raise
                failures.append(error)
                refusals.append((device.name, str(error)))
                able = [(each, supported) for each, supported in able if each is not device]
                continue
            self._set_steps(steps, made, CompilationReport(tuple(reports), tuple(refusals)))
            return
        if len(self._devices) == 1 and failures:
            raise failures[0]
        if failures:
            reasons = "; ".join([*(f"{name}: {reason}" for name, reason in refusals), *self._lacks])
            raise error_for(failures[-1].status, f"no device is left: {reasons}")
        raise GeneralFailure(f"no device supports every operation of this model: {'; '.join(self._lacks)}")

    def _asked(self) -> list[tuple[Device, Sequence[bool]]]:
        operations, answers = self.model.main.operations, list[tuple[Device, Sequence[bool]]]()
        for device in self._devices:
            supported: tuple[bool, ...] = ()
            if self._imported is None:
                supported = device.get_supported_operations(self.model)
            missing = {each.type for each, known in zip(operations, supported, strict=False) if not known}
            if missing:
                from ...model.operation_types import operation_name

                self._lacks.append(f"{device.name} lacks {', '.join(sorted(map(operation_name, missing)))}")
            answers.append((device, supported))
        return answers

    def _steps(self, able: _Able) -> list[tuple[Device, Model, tuple[int, ...]]]:
        """Assign the model to one device, or split it if no device can run all of it or several devices are faster.

        Raises:
            GeneralFailure: All devices together cannot run the model.
        """
        chosen = self._names_devices or self._imported is not None
        speeds = None if chosen else [device.capabilities for device, _ in able]
        alone = _devices_for_whole(self.model, able, speeds)
        steps = _split(self.model, able, speeds, alone)
        if not steps:
            return [(alone[0][1], self.model, tuple(range(len(self.model.main.operations))))]
        self._parts = tuple(step.part for step in steps)
        return [(step.device, step.part.model, step.part.operations) for step in steps]

    def _set_steps(
        self,
        steps: Sequence[tuple[Device, Model, tuple[int, ...]]],
        made: Sequence[PreparedModel],
        report: CompilationReport,
    ) -> None:
        self._used = tuple(dict.fromkeys(device for device, _, _ in steps))
        if len(made) == 1:
            self._prepared, self._device = made[0], steps[0][0]
        else:
            from ...devices.partitioned import PartitionedDevice, PartitionedModel

            self._prepared = PartitionedModel(self.model, self._parts, made)
            self._device = PartitionedDevice(self._used)
        self._report = report
        close_with(self._used, self)

    @property
    def _has_one_device(self) -> bool:
        return len(self._devices) == 1

    def set_caching(
        self,
        directory: str | os.PathLike[str] | int,
        cache_key: bytes,
        *,
        limits: Limits | None = None,
        encrypt: bool = False,
    ) -> None:
        """Save the compiled model in files, and restore it next time. The last call before `finish` takes effect.

        Args:
            directory: Path or open descriptor of a directory that belongs to this user.
            cache_key: 32 bytes, different for each model. Zeros are allowed.
            limits: Limits on the size of the directory.
            encrypt: True to encrypt the files with the service's key, and to restore only encrypted files.

        Raises:
            InvalidArgument: An argument is None or has the wrong type, or the cache key does not have 32 bytes.
            BadState: The compilation is finished.
        """
        if not isinstance(directory, str | os.PathLike | int) or isinstance(directory, bool):
            raise InvalidArgument(f"the cache directory is {type(directory).__name__}; give a path or a descriptor")
        checked = check_cache_key(cache_key)
        self._check_open()
        from ...cache.directory import Cache

        self._set_cache_source(DirectoryCache(Cache(directory, limits), checked, encrypt=encrypt))

    def set_caching_auto(
        self,
        directory: str | os.PathLike[str] | int | None = None,
        *,
        limits: Limits | None = None,
        encrypt: bool = False,
    ) -> None:
        """Cache like `set_caching`. The cache key is made from the model, including its constants.

        Args:
            directory: The directory; None for ``NNBURST_CACHE_DIR`` or the user's cache directory.
            limits, encrypt: See `set_caching`.
        """
        self._check_open()
        from ...cache.directory import Cache

        self._set_cache_source(DirectoryCache(Cache(directory, limits), None, encrypt=encrypt))

    def _set_cache_source(self, source: CacheSource | None) -> None:
        """Set the source of cache files; None for no caching. Raises `BadState` if the compilation is finished."""
        if not isinstance(source, CacheSource | None):
            raise InvalidArgument(f"expected a CacheSource, got {source!r}; set_caching() takes a directory")
        self._check_open()
        self._release_cache()
        self._cache = source

    def set_caching_from_fds(self, model_fds: Sequence[int], data_fds: Sequence[int], cache_key: bytes) -> None:
        """Cache like `set_caching`, in files that the caller has opened for reading and writing.

        The descriptors are duplicated. If their number is wrong, nothing is cached.

        Args:
            model_fds: Descriptors of the device's model files.
            data_fds: Descriptors of the device's data files.
            cache_key: 32 bytes.

        Raises:
            InvalidArgument: A descriptor is not open, or the cache key does not have 32 bytes.
            BadState: The compilation is finished.
        """
        checked = check_cache_key(cache_key)
        self._check_open()
        self._set_cache_source(DescriptorCache(model_fds, data_fds, checked))

    @property
    def cache_report(self) -> CacheReport:
        """Result of caching. For a split model, the worst outcome and the sums of times and bytes.

        Raises the same errors as `report`.
        """
        return combined_report([step.cache for step in self.report.steps])

    @property
    def report(self) -> CompilationReport:
        """The devices that run the model, and the errors of other devices.

        Raises:
            BadState: The compilation is not finished, or failed.
        """
        if self._report is None:
            raise BadState("the compilation is not finished or has failed")
        return self._report

    def _release_cache(self) -> None:
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.close()

    @cached_property
    def _nodes(self) -> tuple[tuple[NodeArg, ...], tuple[NodeArg, ...]]:
        extensions = self.device.get_supported_extensions() if self.model.extension_name_to_prefix else ()
        if self._imported is not None:
            return imported_arguments(self._imported, extensions)
        return model_arguments(self.model, extensions)

    @property
    def inputs(self) -> tuple[NodeArg, ...]:
        """Names, shapes and types of the inputs.

        Raises:
            BadState: The compilation is not finished, or failed.
            InvalidArgument: NumPy has no equivalent of an argument's type.
        """
        return self._nodes[0]

    @property
    def outputs(self) -> tuple[NodeArg, ...]:
        """Names, shapes and types of the outputs. Raises the same errors as `inputs`."""
        return self._nodes[1]

    @property
    def prepared_model(self) -> PreparedModel:
        """The prepared model from `finish`.

        Raises:
            BadState: The compilation was not finished, has failed, or is closed.
        """
        if self._prepared is None or self._refuses:
            raise BadState("the compilation is not finished, has failed or is closed, or its service is")
        return self._prepared

    @property
    def device(self) -> Device:
        """The device that the model was compiled for. Raises the same errors as `prepared_model`."""
        if self._device is None:
            raise BadState("the compilation is not finished or has failed")
        return self._device

    def _refuse(self) -> None:
        self._refuses = True

    def close(self) -> None:
        """Release the prepared model. Idempotent."""
        self._release_cache()
        self._finished = True
        if self._prepared is not None:
            self._prepared.close()
        self._prepared = None

    def _check_open(self) -> None:
        if self._finished:
            raise BadState("the compilation is finished; make another one")


_Able = Sequence[tuple[Device, Sequence[bool]]]
"""Devices, each with a flag per operation: True if supported."""


def _devices_for_whole(model: Model, able: _Able, speeds: Sequence[Capabilities] | None) -> list[tuple[float, Device]]:
    """Return (time, device) for each device that can run a whole model. With `speeds`, the fastest device is first."""
    if speeds is None:
        return [(0.0, device) for device, supported in able if all(supported)]
    from ...model.performance import NEVER, operation_cost

    def time_on(k: int) -> float:
        found = sum(operation_cost(model, model.main, each, speeds[k]) for each in model.main.operations)
        return found if found < NEVER else math.inf

    found = [(time_on(k), device) for k, (device, supported) in enumerate(able) if all(supported)]
    return sorted(found, key=lambda pair: pair[0])


def _split(
    model: Model, able: _Able, speeds: Sequence[Capabilities] | None, alone: Sequence[tuple[float, Device]]
) -> Sequence[Step]:
    """Split a model if no device can run all of it or a split is faster. Otherwise return no parts."""
    if alone and (speeds is None or len(alone) == len(able)):
        return ()
    from ...devices.partitioned import PartitionedDevice

    together = PartitionedDevice([device for device, _ in able])
    try:
        steps = together.plan(model, [supported for _, supported in able], speeds)
    except GeneralFailure:
        if alone:
            return ()
        raise
    return () if alone and speeds and together.cost(model, steps, speeds) >= alone[0][0] else steps
