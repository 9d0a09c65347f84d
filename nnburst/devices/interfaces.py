"""The interfaces of devices and prepared models, local or in another process.

A local device and a client's proxy of a remote device implement the same classes. So code for one works with the other.
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .._core.leaving import Closing
from ..burst.interfaces import BurstCallback, BurstContext, BurstExecutorWithCache
from ..cache.reasons import CacheReason, CacheRejected, SaveResult
from ..errors import Ending, GeneralFailure, InvalidArgument
from ..fmq.descriptor import MQDescriptor
from ..memory.memory import Memory
from ..model.extensions import Extension, ImportedModel
from ..model.running import ExecutionResult, RunOptions
from ..model.types import (
    BufferDesc,
    BufferRole,
    Capabilities,
    DeviceStatus,
    DeviceType,
    ExecutionPreference,
    Model,
    Priority,
    Request,
)
from .deadline import require_time

if TYPE_CHECKING:
    from ..burst.server.group import Batcher
from .fence import Fence
from .fenced import FencedExecution, LocalFenced, check_fences

Descriptors = Annotated[tuple[int, ...], msgspec.Meta(max_length=32)]
Bytes32 = Annotated[bytes, msgspec.Meta(max_length=32)]


class CacheFiles(Struct, frozen=True):
    """The cache files that a client passes to a device, and their properties.

    Attributes:
        model_fds: Descriptors of model files, as many as the device needs. In a message, a number here is a position
            in the list of descriptors that are sent with the message.
        data_fds: Descriptors of data files, like `model_fds`.
        cache_key: Name of the cache entry (32 bytes).
        fingerprint: Digest of the model (32 bytes), or empty. A device refuses an entry whose model has another digest.
        staged: True if the client publishes the files after a save and then calls `Device.confirm_cache`.
        place_fds: Empty, or one descriptor of the directory where a save replaces the entry of this key.
        priority: Priority of a restored model's executions. For a compiled model, see `CompileJob`.
        encrypt: True to write and accept only encrypted files.
    """

    model_fds: Descriptors
    data_fds: Descriptors
    cache_key: Bytes32
    fingerprint: Bytes32 = b""
    staged: bool = False
    place_fds: Annotated[tuple[int, ...], msgspec.Meta(max_length=1)] = ()
    priority: Priority = Priority.MEDIUM
    encrypt: bool = False

    @property
    def fds(self) -> tuple[int, ...]:
        return *self.model_fds, *self.data_fds, *self.place_fds

    def with_fds(self, fds: Sequence[int]) -> CacheFiles:
        """Return a copy with other descriptors, in the same order."""
        models = len(self.model_fds)
        files = models + len(self.data_fds)
        return replace(
            self, model_fds=tuple(fds[:models]), data_fds=tuple(fds[models:files]), place_fds=tuple(fds[files:])
        )


class CompileJob(Struct, frozen=True):
    """Options of a compilation.

    Attributes:
        preference: Goal of the optimisation.
        priority: Hint for scheduling.
        deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds, 0 for none.
        cache: Files to save the compilation to; None to save nothing.
    """

    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    deadline_ns: Annotated[int, msgspec.Meta(ge=0)] = 0
    cache: CacheFiles | None = None


class PreparedModel(abc.ABC):
    """A compiled model. Several threads may use it at once."""

    cache_result: SaveResult | None = None
    """The outcome of saving or restoring the cache entry; None without cache files."""
    label = ""
    """The model's name in messages, or empty."""
    takes_steps = False
    """True if requests may have `Steps` among their pools."""
    batcher: Batcher | None = None
    """The batcher that combines requests of several bursts; None if each request runs alone."""

    def run_together(self, most: int) -> None:
        """Let requests of equal shapes run as one batch of at most `most` rows.

        Raises:
            InvalidArgument: The model has no known batch dimension.
        """
        raise InvalidArgument("its device runs each request by itself")

    @abc.abstractmethod
    def execute_synchronously(self, request: Request, options: RunOptions = RunOptions()) -> ExecutionResult:
        """Run the model once and wait until it ends.

        Args:
            request: Arguments, which are checked before the run.
            options: Options of the run.

        Returns:
            Status, output shapes, timing. A bad request or failed execution gives a status instead of an
            exception.
        """

    def bind_fenced(self, request: Request, options: RunOptions) -> Callable[[RunOptions], ExecutionResult]:
        """Prepare a fenced execution before its fences are signalled; return the function that runs it.

        The returned function takes the run's options, which contain its deadline. By default, the function calls
        `execute_synchronously`.

        Raises:
            InvalidArgument: The request does not fit the model, or a dimension of an output is unknown.
        """
        return partial(self.execute_synchronously, request)

    def execute_fenced(
        self,
        request: Request,
        wait_for: Sequence[Fence] = (),
        options: RunOptions = RunOptions(),
        duration_ns: int = 0,
        on_end: Callable[[], None] | None = None,
    ) -> FencedExecution:
        """Launch an execution that begins when all fences are signalled, and return at once.

        By default, a new thread waits and then calls `execute_synchronously`. A device that can wait for fences
        overrides this method.

        Args:
            request: Arguments. All dimensions of outputs must be known. The memory must stay open until the execution
                ends.
            wait_for: Fences, which the caller keeps and closes.
            options: Options of the run. The deadline also limits the wait for fences.
            duration_ns: Time limit in nanoseconds after the signal of the last fence; 0 for none.
            on_end: Function that another thread calls just before the fence reports the end. Never called if this
                method raises an error.

        Returns:
            The launched execution.

        Raises:
            InvalidArgument: An argument breaks a rule, or a fence is in error.
            MissedDeadline: The deadline has passed.
            ResourceExhausted: No thread can be started, or the process has too many open files.
            BadState: The model is closed.
        """
        fences = check_fences(wait_for, duration_ns)
        require_time(options.deadline_ns)
        run = LocalFenced(self.bind_fenced(request, options), fences, options, duration_ns)
        return run.start(on_end or (lambda: None))

    def configure_execution_burst(
        self,
        callback: BurstCallback,
        request_channel: MQDescriptor,
        result_channel: MQDescriptor,
        polling_window: float | None = None,
    ) -> BurstContext:
        """Serve a burst on this model.

        By default, a listener thread of this process serves the burst. Devices usually override `burst_executor`
        instead of this method.

        Raises:
            InvalidArgument: A channel is unusable.
        """
        from ..burst.server.server import ExecutionBurstServer

        executor = self.burst_executor()
        return ExecutionBurstServer.create(
            callback,
            request_channel,
            result_channel,
            self if executor is None else executor,
            polling_window=polling_window,
        )

    def burst_executor(self) -> BurstExecutorWithCache | None:
        """Return a new executor for one burst; None to run each request with `execute_synchronously`."""
        return None

    @property
    def ending(self) -> Ending:
        """The `Ending` of the process that contains this model. Its reason is empty while the process lives."""
        return Ending()

    def link_to_death(self, on_death: Callable[[], None]) -> Callable[[], None]:
        """Call `on_death` once when the model's process dies. Return a function that cancels the call.

        A local model never calls `on_death`, because it is in the caller's process.
        """
        return lambda: None

    def close(self) -> None:
        """Release the model. Idempotent."""


class Buffer(Closing, abc.ABC):
    """A driver-managed buffer. Context manager.

    Attributes:
        timeout: Longest duration in seconds of a copy by another process; None for no limit. A longer copy raises
            `MissedDeadline`.
    """

    timeout: float | None = 60.0

    @property
    @abc.abstractmethod
    def id(self) -> int:
        """The positive number of the buffer in this device's requests (`BufferId`)."""

    @abc.abstractmethod
    def copy_to(self, memory: Memory) -> int:
        """Copy the contents to a memory of equal size. Return the contents' generation, which each change increases.

        Raises:
            InvalidArgument: The memory has another size than the contents.
            GeneralFailure: The buffer has no contents, or the memory cannot be mapped.
            ResourceExhausted: The buffer is being written.
        """

    @abc.abstractmethod
    def copy_from(self, memory: Memory, dimensions: tuple[int, ...] = ()) -> None:
        """Copy new contents from a memory. After a failure the buffer has no contents.

        Args:
            memory: Source, exactly as large as contents of these dimensions.
            dimensions: Dimensions of the contents. They can be empty if the allocation specified every dimension.

        Raises:
            InvalidArgument: The size or dimensions do not fit.
            ResourceExhausted: The buffer is in use.
        """

    @abc.abstractmethod
    def copy_buffer(self, source: Buffer) -> None:
        """Replace the contents by the contents of another buffer of this device.

        Raises:
            InvalidArgument: The source belongs to another device, has no contents, or differs in type or dimensions.
        """

    def account_to(self, account: Callable[[int], None]) -> None:
        """Report the buffer's size to a function, now and after each growth.

        Args:
            account: Function to call with the number of added bytes. If it raises an error, the buffer does not grow.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Release the buffer. Idempotent; an execution that uses it finishes first."""


class Needs(Struct, frozen=True):
    """The rights that a device or function needs while it runs, besides using memory and reading its code.

    A service process drops all other rights before its first model. Files that a device's constructor opens stay open.

    Attributes:
        read: Files to read, and directories with everything in them.
        write: Files to write, and directories in which to create, write and remove files.
        programs: Programs to start. They get the rights of the service.
        network: True to use TCP or UDP.

    Example:
        >>> from nnburst.devices.function import Needs
        >>> print(Needs(read=["/data/words.txt"], network=True))
        reads /data/words.txt; uses the network
    """

    read: Sequence[str] = ()
    write: Sequence[str] = ()
    programs: Sequence[str] = ()
    network: bool = False

    def __post_init__(self) -> None:
        for paths in (self.read, self.write, self.programs):
            if isinstance(paths, str) or not all(isinstance(path, str) and os.path.isabs(path) for path in paths):
                raise InvalidArgument(f"Needs: give absolute paths in a list, not {paths!r}")

    @classmethod
    def sum(cls, needs: Iterable[Needs]) -> Needs:
        """Combine several needs.

        Args:
            needs: Needs of several devices or functions.
        """
        every = tuple(needs)
        read, write, programs = (
            tuple(path for each in every for path in getattr(each, kind)) for kind in ("read", "write", "programs")
        )
        return cls(read, write, programs, any(each.network for each in every))

    def __str__(self) -> str:
        lists = {"reads": self.read, "writes": self.write, "starts": self.programs}
        phrases = [f"{verb} {', '.join(paths)}" for verb, paths in lists.items() if paths]
        return "; ".join([*phrases, "uses the network"] if self.network else phrases) or "nothing"


class Device(abc.ABC):
    """A device that compiles and runs models."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the device, ``vendor-device``, with exactly one dash, neither first nor last."""

    @property
    @abc.abstractmethod
    def version_string(self) -> str:
        """A non-empty text that differs between builds of the device."""

    @property
    def needs(self) -> Needs:
        """The rights that the device needs; none by default. A service reads them after constructing the device."""
        return Needs()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the models that ``import_model("name:NAME")`` opens."""
        return ()

    @property
    def type(self) -> DeviceType:
        """The kind of hardware that the device runs on."""
        return DeviceType.CPU

    @property
    def status(self) -> DeviceStatus:
        """The device's present readiness for work."""
        return DeviceStatus.AVAILABLE

    @property
    @abc.abstractmethod
    def capabilities(self) -> Capabilities:
        """The declared speed for each operand type."""

    @abc.abstractmethod
    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        """Return, for each operation of the main subgraph, True if the device can run it.

        Raises:
            InvalidArgument: The model breaks a rule of `validate_model`.
        """

    def get_supported_extensions(self) -> tuple[Extension, ...]:
        """Return the extensions whose operations and types the device supports."""
        return ()

    def import_model(self, source: str, pools: Sequence[Memory] = ()) -> ImportedModel:
        """Convert a model file or a named model to a `Model`.

        Args:
            source: A file format (``"onnx"``), or ``"name:NAME"`` for one of `names`.
            pools: The file's bytes, if `source` is a format.

        Returns:
            The model without its pools, and the names of the files that become its pools.

        Raises:
            InvalidArgument: The file has another format, or the device has no model of this name.
            GeneralFailure: The device does not read this format, has no named models, or cannot run the contents.
        """
        raise GeneralFailure(f"{self.name} does not import {source!r}")

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        """Return the numbers of model files and data files in a cache entry; (0, 0) for no caching."""
        return (0, 0)

    @abc.abstractmethod
    def prepare_model(self, model: Model, job: CompileJob = CompileJob()) -> PreparedModel:
        """Compile a model.

        Args:
            model: The model. The caller may release it after this call.
            job: Options of the compilation.

        Raises:
            InvalidArgument: The model or an argument breaks a rule. Bad cache files raise no error.
            GeneralFailure: The device cannot run this model.
            MissedDeadline: The deadline passed before the model was compiled.
        """

    @property
    def cache_epoch(self) -> bytes:
        """A version (32 bytes) of the device's cache files. Builds with equal versions can read each other's files."""
        from hashlib import sha256

        return sha256(f"{len(self.name)} {self.name} {self.version_string}".encode()).digest()

    def prepare_model_from_cache(self, cache: CacheFiles, deadline_ns: int = 0) -> PreparedModel:
        """Restore a compilation that an earlier `prepare_model` saved. This needs no model.

        Args:
            cache: The saved files with their cache key, and the wanted model's fingerprint.
            deadline_ns: Absolute CLOCK_MONOTONIC nanoseconds, 0 for none.

        Raises:
            CacheRejected: The files are not from the device's last save under this cache key. Compile the model
                instead.
            InvalidArgument: The cache key does not have 32 bytes.
            MissedDeadline: The deadline passed before the model was restored.
        """
        raise CacheRejected(CacheReason.UNSUPPORTED, f"{self.name} does not cache")

    def confirm_cache(self, cache_key: bytes, generation: bytes) -> bool:
        """Accept published files of an entry, and from now on no other files of the entry in the same directory.

        Return False for unknown files. By default, does nothing and returns True.
        """
        return True

    def allocate(
        self,
        desc: BufferDesc,
        prepared_models: Sequence[PreparedModel],
        input_roles: Sequence[BufferRole],
        output_roles: Sequence[BufferRole],
    ) -> Buffer:
        """Allocate a driver-managed buffer.

        Args:
            desc: Dimensions, which the device merges with the dimensions of the roles' operands.
            prepared_models: Prepared models of this device, to which the roles refer.
            input_roles: Inputs that may use the buffer.
            output_roles: Outputs that may use the buffer.

        Raises:
            InvalidArgument: The models, the roles or the dimensions break a rule.
            GeneralFailure: The device cannot allocate the buffer.
        """
        raise GeneralFailure(f"{self.name} cannot allocate buffers; use shared memory")

    def close(self) -> None:
        """Release the device. Idempotent."""
