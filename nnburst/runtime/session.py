"""`Session`: a model in another process, with ONNX Runtime's interface."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import get_ident
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex, Unpack, overload

import numpy as np
from msgspec import Struct
from msgspec.structs import force_setattr

from .._core.deadline import OPENING, Deadline, check_timeout
from .._core.errno import flag, member, one_of
from .._core.leaving import Closing, Leaving, OneProcess
from .._options import OnDeath, OnError, SandboxMode, SessionKeywords
from ..errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    NNBurstError,
    OutputInsufficientSize,
    ResourceExhausted,
)
from ..model.types import Array, ExecutionPreference, Priority
from .compile.model_files import FUNCTIONS, ModelSource, checked_source, devices_for, find_model
from .display import describe
from .service import Service, child
from .spans import find_tracer

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..burst.stats import BurstStats
    from ..devices.interfaces import Device
    from ..memory.memory import Memory
    from ..watch.stats import Latency
    from .compile.cache_sources import CacheSource
    from .compile.caching import CacheReport
    from .compile.compilation import Compilation
    from .execution import Execution
    from .request.node_args import NodeArg
    from .run.burst import Burst
    from .run.burst_pool import Restart
    from .run.permits import Permit
    from .run.ring import Ring

_MOST_PERMITS = 4096
_NONE: list[Permit] = []  # new callers find no permit while others wait


class Options(Struct, frozen=True, kw_only=True):
    """The checked options of `Session`."""

    device: str | None = None
    preference: ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER
    priority: Priority = Priority.MEDIUM
    concurrency: int | None = None
    polling_window: float | None = None
    timeout: float | None = None
    open_timeout: float | None = None
    cache_dir: str | os.PathLike[str] | None = None
    cache_key: bytes | None = None
    cache_encrypt: bool = False
    on_death: OnDeath = "raise"
    retry: int = 0

    def __post_init__(self) -> None:
        one_of(self.on_death, "on_death", ("raise", "restart"))
        if not isinstance(self.retry, int) or self.retry < 0 or (self.retry and not self.restarts):
            raise InvalidArgument(f"retry={self.retry!r}; give a number from 0, and on_death='restart' with it")
        wanted = self.concurrency
        if wanted is not None and (not isinstance(wanted, int) or not 1 <= wanted <= _MOST_PERMITS):
            raise InvalidArgument(f"concurrency={wanted!r}; give a number from 1 to {_MOST_PERMITS}")
        force_setattr(self, "preference", member(ExecutionPreference, self.preference, "preference"))
        force_setattr(self, "priority", member(Priority, self.priority, "priority"))
        force_setattr(self, "timeout", check_timeout(self.timeout))
        force_setattr(self, "open_timeout", check_timeout(self.open_timeout))

    @property
    def restarts(self) -> bool:
        """True if a dead service is restarted."""
        return self.on_death == "restart"

    @property
    def open_limit(self) -> float | None:
        """Time limit for opening in seconds; None for no limit."""
        if self.open_timeout is None and self.timeout is not None:
            return max(self.timeout, OPENING)
        return self.open_timeout

    @property
    def cache(self) -> CacheSource | None:
        """The cache of the compilation; None for no caching."""
        encrypt = flag(self.cache_encrypt, "cache_encrypt")
        if self.cache_dir is None and self.cache_key is None:
            if encrypt:
                raise InvalidArgument("cache_encrypt=True, but nothing is cached: give cache_dir= or cache_key=")
            return None
        if not isinstance(self.cache_dir, str | os.PathLike | None):
            raise InvalidArgument(f"cache_dir is {type(self.cache_dir).__name__}; give the path of a directory")
        from ..cache.directory import Cache
        from ..cache.names import check_cache_key
        from .compile.cache_sources import DirectoryCache

        cache_key = None if self.cache_key is None else check_cache_key(self.cache_key)
        return DirectoryCache(Cache(self.cache_dir), cache_key, encrypt=encrypt)


class Session(OneProcess, Closing):
    """A compiled model that runs in another process, a service. Context manager.

    Any number of threads may call `run`. Only one thread at a time may use an execution from `bind`. Several sessions
    can share a service.

    A session on a service from `connect` can be pickled. The pickle contains the service's address, the model and the
    options. A process that reads several pickles of a session opens the session once.

    Args:
        model: Path of a file (``"detector.onnx"``), bytes of a file, a `Model` from `ModelBuilder`, or the name of a
            model in `service`. Without a `service`, also a function or a torch module. A function declared with
            `nnburst.declare` is sent to the session's service. A torch module is exported to ONNX; if the export fails,
            the module is sent to the service (`device` can require one of the two ways).
        example_inputs: For a torch module: a tensor, a tuple of tensors, or a dict of tensors by name. The inputs of
            every run must have the same shapes as these tensors.
        service: Service to run on; None for the session's own service, which ends with the session.
        device: Name of the device, with options after a colon if the session has its own service; None for the first
            device that supports every operation.
        preference: ``"fast_single_answer"``, ``"sustained_speed"`` or ``"low_power"``: see
            `nnapi.Compilation.set_preference`.
        priority: ``"low"``, ``"medium"`` or ``"high"``. A shared service runs waiting runs of higher priority first.
        concurrency: Maximum number of simultaneous runs in the service; None for the number of the service's CPUs.
            Further callers wait.
        polling_window: See `nnapi.Burst`.
        timeout: Default time limit of a run in seconds; None for no limit, 0 to accept only an immediate answer. The
            limit includes waits for other runs, but not the preparation of the run. A WHILE loop has the same limit,
            but at most 15 seconds; if `timeout` is None, 2 seconds.
        open_timeout: Time limit in seconds for opening the session (including the start of its own service), for
            `bind`, and for preparing a run, such as opening a burst or allocating arrays. By default, the limit is
            `timeout`, but not less than a second for preparing a run, or a minute for opening and `bind`. Without
            `timeout`, there is no limit.
        cache_dir: Directory where the compiled model is saved, to be restored next time. With a `cache_key`,
            None means the user's cache directory. Without a `cache_key`, None turns caching off. See
            `nnapi.Compilation.set_caching` and `cache_report`.
        cache_key: 32 bytes, different for each model; None for a key made from the model.
        cache_encrypt: True to encrypt cache files with the service's key, and to restore only encrypted files. Needs
            ``cache_dir`` or ``cache_key``.
        on_death: ``"raise"``: after the service's death, all calls raise `DeadObject`. ``"restart"``: runs in progress
            raise `DeadObject`; the next call restarts the service, or connects to it again, within `open_timeout`, and
            compiles or restores the model. A new session with ``"restart"`` also restarts a dead `service`. Executions
            of `bind` continue with their arrays. Executions with a state raise `DeadObject`: the state is lost. See
            `restarts`.
        retry: Number of times that a run is repeated if the service dies, within the run's timeout. Only for models
            without side effects. After the last repetition, the run raises `DeadObject`. A run with a state is never
            repeated.
        sandbox: Sandbox of the session's own service, as for `launch`; None for the default.

    Raises:
        InvalidArgument: The model or an argument breaks a rule. If a file is missing, also a `FileNotFoundError`.
        DeviceUnavailable: The device is unknown, or the service could not start.
        GeneralFailure: No device supports the model.
        MissedDeadline: Opening took too long.

    Example:
        >>> with nnburst.Session(model) as session:
        ...     (y,) = session.run(None, {"x": np.array([[-1, 0, 1, 2]], np.float32)})
        >>> y
        array([[0., 0., 1., 2.]], dtype=float32)
    """

    _instead = (
        "open one in each process, on a service of that process, or start one service for all with `nnburst serve`: "
        "sessions of nnburst.connect(…) pickle"
    )

    def __init__(
        self,
        model: ModelSource,
        example_inputs: object = None,
        *,
        service: Service | None = None,
        sandbox: SandboxMode | None = None,
        **options: Unpack[SessionKeywords],
    ) -> None:
        if not isinstance(service, Service | None):
            raise InvalidArgument(f"service is {type(service).__name__}; give what launch() or connect() returns")
        device = options.get("device")
        model, self._functions = checked_source(model, example_inputs, device, has_service=service is not None)
        if sandbox is not None and service is not None:
            raise InvalidArgument(
                f"sandbox={sandbox!r} needs a service of the session's own: no service=; give it to launch()"
            )
        known = sorted(Options.__struct_fields__)
        if unknown := sorted(options.keys() - set(known)):
            raise TypeError(f"a session has no option {unknown[0]!r}; it has {', '.join(known)}")
        self._options = Options(**options)  # type: ignore[arg-type]  # names become members
        self._cache = self._options.cache
        self._model = model
        self._timeout = self._options.timeout
        self._leaving: Leaving | None = None
        opening = self._open_deadline()
        try:
            opening.call(self._open, service, sandbox)
        except DeadObject:  # the service has died: opening restarts it
            if service is None or not self._options.restarts:
                raise
            opening.call(self._open, service, sandbox)
        from .run.runs import Runs

        concurrency = self._options.concurrency or len(self._pool.first.controller.cpus)
        self._runs = Runs(self._pool, self._timeout, concurrency)
        self._idle, self._waiting = self._runs.permits.idle, self._runs.permits.waiting
        self._output_indexes = {node.name: i for i, node in enumerate(self._compilation.outputs)}
        self._spans = find_tracer()
        # A dropped session ends without waiting: the collector may run in any thread.
        self._finalizer = weakref.finalize(self, self._pool.hang_up)
        self._finalizer.atexit = False

    def _open(self, service: Service | None, sandbox: SandboxMode | None) -> None:
        self._device = self._options.device
        if service is None:
            names = (FUNCTIONS,) if self._functions else devices_for(self._model, self._device)
            from ..service.process.forked import find_zygote

            with contextlib.suppress(OSError, NNBurstError):  # starting the service reports the error
                find_zygote(names)  # the zygote imports modules in the background
        from .run.burst_pool import BurstPool

        with contextlib.ExitStack() as opened:
            self._owned: Service | None = None
            if service is None:
                mode = "on" if sandbox is None else sandbox
                started = child(names, sandbox=mode, warm=len(names) == 1, functions=self._functions)
                service = self._owned = opened.enter_context(Service(*started))
                self._device = self._device and self._device.partition(":")[0]
            elif self._options.restarts:
                Deadline.after(OPENING).call(service._revive)
            self._service = service
            self._compilation = opened.enter_context(self._compiled())
            this = weakref.ref(self)  # bursts must not keep the session alive
            self._pool = BurstPool(self._compilation, self._options, lambda: _reopen(this()))
            opened.pop_all()

    def _compiled(self) -> Compilation:
        from .compile.compilation import Compilation

        with find_model(self._service, self._device, self._model) as (model, devices):
            compilation = Compilation(model, devices)
            try:
                compilation.set_preference(self._options.preference)
                compilation.set_priority(self._options.priority)
                compilation._set_cache_source(self._cache)
                compilation.finish()
            except BaseException:
                compilation.close()
                raise
            return compilation

    # ---- running ---------------------------------------------------------------------------------------------

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, npt.ArrayLike] = {},
        timeout: float | EllipsisType | None = ...,
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Copy the inputs, run the model, and return copies of the outputs.

        Any thread may call `run`, which waits while ``concurrency`` other runs are in progress.

        Args:
            output_names: Outputs to return, in order; None or an empty list for all.
            inputs: Arrays by name, of exactly the input's dtype and shape (see `get_inputs`). Inputs with a default
                (see `get_overridable_initializers`) are optional. A number or list of numbers becomes an array of the
                input's dtype if the dtype can represent all numbers.
            timeout: Time limit of this run in seconds; None for no limit. By default, the session's ``timeout``.

        Returns:
            New arrays, one per name.

        Raises:
            InvalidArgument: A name, dtype or shape is wrong. The message names the input and a remedy.
            BadState: The session is closed. Or a signal handler or an event loop calls `run` while all ``concurrency``
                runs belong to the same thread: waiting would never end.
            DeadObject: The service has ended.
            MissedDeadline: The run or its preparation (see `open_timeout`) took too long.
        """
        if self._spans is not None and self._spans.wanted:
            with self._spans.record_run(self):
                return self.run(output_names, inputs, timeout)
        wanted = None if output_names is None else self._checked_outputs(output_names)
        limit = self._timeout if timeout is ... else check_timeout(timeout)
        try:
            permit = (_NONE if self._waiting else self._idle).pop()
        except IndexError:
            permit, limit = self._runs.wait_for_permit(limit)
        try:
            permit.thread = get_ident()
            execution = permit.execution
            if execution is None or not execution._set_inputs(inputs):
                execution = self._runs.prepare(permit, inputs, limit)
            try:
                if limit is self._timeout:
                    execution.run()
                else:
                    execution.run(limit)
                outputs = execution._copied()
            except OutputInsufficientSize as error:
                outputs = self._runs.run_again(permit, execution, error, limit)
        except ResourceExhausted:
            self._runs.forget(permit)
            raise
        finally:
            permit.thread = 0
            self._idle.append(permit)
            if self._waiting:
                self._runs.permits.wake()
        return outputs if wanted is None else [outputs[i] for i in wanted]

    async def arun(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, npt.ArrayLike] = {},
        timeout: float | EllipsisType | None = ...,
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Run the model without blocking the event loop of asyncio or Trio. The arguments are those of `run`.

        Runs need no thread, except to open a burst. Any number of tasks may call `arun`; up to ``concurrency`` runs are
        in progress at a time. Cancelling a task abandons its run, whose arrays stay in use until its end.

        Raises:
            BadState: There is no event loop; or see `run`.
            NNBurstError: See `run`.
        """
        if self._spans is not None and self._spans.wanted:
            with self._spans.record_run(self):
                return await self.arun(output_names, inputs, timeout)
        wanted = None if output_names is None else self._checked_outputs(output_names)
        outputs = await self._runs.arun(inputs, self._timeout if timeout is ... else check_timeout(timeout))
        return outputs if wanted is None else [outputs[i] for i in wanted]

    def _checked_outputs(self, names: Sequence[str]) -> list[int] | None:
        """Return the indexes of the named outputs. Return None, which means all outputs, if there are no names."""
        if isinstance(names, Mapping) or hasattr(names, "__array__"):
            what = type(names).__name__
            raise InvalidArgument(f"output_names is a {what}; inputs come second, by name: session.run(None, inputs)")
        if isinstance(names, str):
            raise InvalidArgument(f"output_names is a list of names; for one output give [{names!r}]")
        try:
            return [self._output_indexes[name] for name in names] or None
        except (KeyError, TypeError):
            raise InvalidArgument(f"no outputs {names!r}; this model has {list(self._output_indexes)}") from None

    def bind(
        self,
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        room: Mapping[str, int | Sequence[int]] | None = None,
        measure: bool = False,
        state: Mapping[str, str] | None = None,
        initial_state: Mapping[str, npt.ArrayLike] | None = None,
        memory: Mapping[str, Memory | Array] | None = None,
        steps: int | None = None,
        timeout: float | EllipsisType | None = ...,
    ) -> Execution:
        """Return an execution with its own shared input and output arrays.

        The execution keeps the session alive. Each run overwrites the last run's outputs. Only one thread at a time may
        run an execution; other threads get `BadState`. Executions do not wait for each other: if the burst is busy, an
        execution moves to a free burst, or opens another.

        The arguments are those of `nnapi.Burst.bind`, with the same errors. By default, runs have the session's
        ``timeout``. `bind` takes at most ``open_timeout`` seconds.
        """

        def bound() -> Execution:
            return self._pool.get_live_burst().bind(
                shapes=shapes,
                room=room,
                measure=measure,
                state=state,
                initial_state=initial_state,
                memory=memory,
                steps=steps,
                timeout=self._timeout if timeout is ... else timeout,
                _rooms=self._runs.rooms,
                _keep=self,
                _pool=self._pool,
            )

        return self._open_deadline().call(bound)

    def _open_deadline(self) -> Deadline:
        return Deadline.after(self._options.open_limit)

    @overload
    def run_many(
        self,
        inputs: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        batch: int = 1,
        timeout: float | EllipsisType | None = ...,
        on_error: Literal["raise"] = "raise",
    ) -> Generator[list[Array], None, None]: ...

    @overload
    def run_many(
        self,
        inputs: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        batch: int = 1,
        timeout: float | EllipsisType | None = ...,
        on_error: OnError,
    ) -> Generator[list[Array] | NNBurstError, None, None]: ...

    def run_many(
        self,
        inputs: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        batch: int = 1,
        timeout: float | EllipsisType | None = ...,
        on_error: OnError = "raise",
    ) -> Generator[Any, None, None]:
        """Run the model on many inputs, several at the same time. Yield a list of all outputs for each input, in order.

        Four inputs or batches are in progress at a time.

        Args:
            inputs: Dicts of arrays by name, as for `run`. The iterable is read while the service runs earlier inputs.
            batch: Rows (elements of the first dimension) per run, for models whose inputs all have a symbolic first
                dimension. Each of the `inputs` has one or more rows, and its outputs have the same number of rows.
            timeout: See `run`. The time begins when the service gets the run.
            on_error: ``"raise"``: stop at the first wrong input or failed run, after all earlier outputs. ``"return"``:
                yield the error in place of the outputs, and continue. The message contains the index of the input.

        Raises:
            InvalidArgument: An input is wrong, or the model cannot run batches.
            DeadObject: The service has ended; also with ``on_error="return"``.
            NNBurstError: A run failed; see `run`.
        """
        if not isinstance(batch, int) or batch < 1:
            raise InvalidArgument(f"batch={batch!r}; give a number of rows, 1 or more")
        one_of(on_error, "on_error", ("raise", "return"))
        limit = self._timeout if timeout is ... else check_timeout(timeout)
        from .run.batching import run_many

        outcomes = run_many(self, inputs, batch, limit, on_error == "return")
        return outcomes if self._spans is None else self._spans.record_stream(self, outcomes)

    def _lend_ring(
        self, depth: int, shapes: Mapping[str, tuple[int, ...]], timeout: float | None = None
    ) -> AbstractContextManager[Ring]:
        """Lend a ring of executions. Afterwards, the ring is kept for calls with the same inputs and ranks."""
        rooms, sizes = self._runs.rooms, self._runs.sizes(shapes)

        def make(small: Ring | None, burst: Burst) -> list[Execution]:
            least = self._runs.least if small is None else small.current._arguments.room_for(sizes)
            return [burst.bind(shapes=shapes, timeout=timeout, _rooms=rooms, _least=least) for _ in range(depth)]

        key = depth, sizes.form, timeout, tuple(rooms.items())
        return self._pool.lend_ring(key, sizes, make, self._open_deadline())

    # ---- looking ---------------------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Return names, shapes and types of the required inputs."""
        return [node.user_view for node in self._compilation.inputs if not node.is_optional]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return names, shapes and types of the inputs with a default, which callers can omit."""
        return [node.user_view for node in self._compilation.inputs if node.is_optional]

    def get_outputs(self) -> list[NodeArg]:
        """Return names, shapes and types of the outputs."""
        return [node.user_view for node in self._compilation.outputs]

    @property
    def compilation(self) -> Compilation:
        """The session's compilation, for use with `nnapi`."""
        return self._compilation

    @property
    def burst(self) -> Burst:
        """The burst that was opened first, which all runs use unless they overlap."""
        return self._pool.first

    @property
    def device(self) -> Device:
        """The device that the model was compiled for."""
        return self._compilation.device

    @property
    def cache_report(self) -> CacheReport:
        """Result of caching when the session was opened."""
        return self._compilation.cache_report

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """One `Restart` for each restart of the service so far. Empty without ``on_death="restart"``."""
        return self._pool.restarts

    def reopen(self) -> None:
        """Restart a dead service now, not only at the next run. Do nothing if the service runs.

        Raises:
            DeadObject: The restart failed, or the session was not opened with ``on_death="restart"``.
            NNBurstError: As for a run after the service's death.
        """
        if not self._service.alive and not self._pool.recover(self._pool.first):
            raise DeadObject("the service is gone; open the session with on_death='restart' to have it started again")

    @property
    def stats(self) -> BurstStats:
        """The client's counters, summed over all bursts."""
        return self._pool.stats

    def latency(self) -> Latency:
        """Return the latency of this session's runs: p50, p99 and max in seconds, and histograms of a run's parts.

        In a fast loop, one run in 256 is timed and represents the others. Otherwise, every run is timed.
        Runs without a burst are not counted.
        """
        return self._pool.latency()

    @property
    def service(self) -> Service:
        """The service that runs the model."""
        return self._service

    @property
    def timeout(self) -> float | None:
        """Default time limit of a run in seconds; None for no limit."""
        return self._timeout

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Pickle a session as address, model and options. Raises `InvalidArgument` if the service is not shared."""
        if self._service.shared is None:
            return super().__reduce_ex__(protocol)
        from .pickled import reduce_session

        return reduce_session(self)

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.stats.received:,} runs, {self.latency()!r}"
        return f"<Session of {describe(self._compilation)} on {self._compilation.device.name}, {state}>"

    # ---- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Session:
        if self.closed:
            raise BadState("the session is closed; open another one")
        return self

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._leaving is not None

    def close(self) -> None:
        """Release the burst and the model, and end the session's own service. Idempotent."""
        # The session's own service ends first: nothing then waits for unfinished work.
        self._leaving = self._leaving or Leaving(
            self._pool.refuse,
            self._pool.end_restart,
            self._owned.close if self._owned is not None else lambda: None,
            self._pool.close,
            lambda: self._compilation.close(),  # a restart may replace it, so it is looked up late
            self._runs.permits.forget,
            self._finalizer.detach,
        )
        self._leaving()


def _reopen(session: Session | None) -> str:
    """Restart a session's dead service and compile the model. Return the cache result."""
    if session is None:
        raise BadState("the session was dropped")
    session._service._revive()
    compilation, old = session._compiled(), session._compilation
    try:
        if (compilation.inputs, compilation.outputs) != (old.inputs, old.outputs):
            raise GeneralFailure("the model has other inputs or outputs than before; open another session")
        session._pool.restart(compilation)
    except BaseException:
        compilation.close()
        raise
    session._compilation = compilation
    return compilation.cache_report.outcome
