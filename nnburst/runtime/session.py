"""The shape of onnxruntime's session, on a model in another process."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from .._core.deadline import Deadline, checked_timeout
from .._core.errno import flag
from .._core.leaving import Leaving
from .._core.one_process import OneProcess
from ..burst import BurstStats
from ..errors import (
    BadState,
    DeadObject,
    GeneralFailure,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    OutputInsufficientSize,
    ResourceExhausted,
)
from ..memory import Memory
from ..model import ExecutionPreference, ImportedModel, Model, Priority
from ..watch import Latency
from .compile.cache_sources import CacheSource, cache_source
from .compile.caching import CacheReport
from .compile.compilation import Compilation, member
from .compile.model_files import check_source, devices_for, imported
from .display import described, nodes_table
from .execution import Execution, setting_up
from .request.node_args import NodeArg, checked_inputs
from .run import event_loop
from .run.batching import run_many
from .run.burst_pool import Bursts
from .run.permits import Permit, Permits
from .run.pipeline import KeptPipelines, Pipeline
from .run.recovery import Recovery, Restart
from .service import Service, launch

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from ..devices import Device
    from .run.burst import Burst

_OPENING = 60.0
"""Seconds for opening a session whose runs have a limit, if the caller names no other."""
_KEPT = 8
"""Executions for different shapes that a permit keeps."""
_MOST_PERMITS = 4096
_MOST_RERUNS = 8
Array = np.ndarray[Any, np.dtype[Any]]
T = TypeVar("T")


class Session(OneProcess):
    """A model, compiled and ready to run in a service process, through a burst.

    `run` may be called from any number of threads, and so may executions of `bind`, each from one thread at a time.
    Sessions may share a service. Context manager.

    Args:
        model: The path of a file (``"detector.onnx"``), the bytes of one, a `Model` from `ModelBuilder`, or the name of
            a model that a device of `service` has.
        service: Where to run; None starts a service process for this session alone, which ends with it.
        device: Name of the device, with options after a colon if the service is the session's own; None takes the
            first that supports every operation.
        preference: ``"fast_single_answer"``, ``"sustained_speed"`` or ``"low_power"``; what it does is said in
            `Compilation.set_preference`.
        priority: ``"low"``, ``"medium"`` or ``"high"``: whose waiting runs a shared service takes first.
        concurrency: How many calls of `run` may be in the service at once, each with arrays of its own, which are made
            when they are needed; None for as many as the service has CPUs. Further callers wait.
        polling_window, loop_timeout: As for `Burst`.
        timeout: Seconds that one run may take, with its wait for others; None for no limit, 0 for an answer that is
            there at once. Each way to run takes one of its own, too. Setting up does not count.
        open_timeout: Seconds that setting up may take: opening the session, with the start of a service of its own;
            `bind` and `pipeline`; and what a run needs first, such as another burst or arrays for other shapes. None is
            no limit; if `timeout` is given, it is a minute, and for what a run needs first a second, or `timeout` if
            that is longer.
        cache_dir: Directory where the result of compiling is kept and restored from; None: not cached, unless there is
            a token: then the user's cache directory. See `Compilation.set_caching` and `cache_report`.
        token: 32 bytes that differ for models that differ; None: made from the model itself.
        cache_always: Keep also what compiles faster than it would be verified, which is measured each time it is
            saved, so that a busy machine may decide otherwise (``NOT_WORTH_IT``). Needs ``cache_dir`` or ``token``.
        on_death: ``"raise"``: when the service dies, the session is dead, too, and calls get `DeadObject`.
            ``"restart"``: runs that were under way get `DeadObject`; the next call starts the service again, or
            connects to it, within `open_timeout`, and prepares the model, from the cache if there is one. Opening on a
            `service` that has died does so at once. Executions of `bind` go on with their arrays; a state is lost,
            which the next run says with a `DeadObject` before it begins anew. See `restarts`.
        retry: How often a run that the death has ended is repeated, within its time, before it gets `DeadObject`: for
            models that give the same answer twice. A run with a state is never repeated.
        spare: With ``on_death="restart"`` and no `service`: as for `launch`.

    Raises:
        InvalidArgument: The model or an argument breaks a rule.
        DeviceUnavailable: No such device, or the service could not start.
        GeneralFailure: No device supports the model.
        MissedDeadline: Opening took too long.
    """

    _instead = "open one in each process, on a service of that process"

    def __init__(
        self,
        model: Model | str | os.PathLike[str] | bytes,
        *,
        service: Service | None = None,
        device: str | None = None,
        preference: str | ExecutionPreference = ExecutionPreference.FAST_SINGLE_ANSWER,
        priority: str | Priority = Priority.MEDIUM,
        concurrency: int | None = None,
        polling_window: float | None = None,
        loop_timeout: float | None = None,
        timeout: float | None = None,
        open_timeout: float | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
        cache_always: bool = False,
        on_death: str = "raise",
        retry: int = 0,
        spare: bool = False,
    ) -> None:
        check_source(model)
        if not isinstance(service, Service | None):
            raise InvalidArgument(f"service is {type(service).__name__}; give what launch() or connect() returns")
        if not isinstance(on_death, str) or on_death not in ("raise", "restart"):
            raise InvalidArgument(f"on_death={on_death!r}; choose 'raise' or 'restart'")
        if not isinstance(retry, int) or retry < 0 or (retry and on_death == "raise"):
            raise InvalidArgument(f"retry={retry!r}; give a number from 0, and on_death='restart' with it")
        if flag(spare, "spare") and (on_death == "raise" or service is not None):
            raise InvalidArgument(
                "spare=True needs on_death='restart', and a service of the session's own: no service="
            )
        if concurrency is not None and (not isinstance(concurrency, int) or not 1 <= concurrency <= _MOST_PERMITS):
            raise InvalidArgument(f"concurrency={concurrency!r}; give a number from 1 to {_MOST_PERMITS}")
        wish = member(ExecutionPreference, preference, "preference")
        rank = member(Priority, priority, "priority")
        self._timeout = checked_timeout(timeout)
        self._open_timeout = limit = checked_timeout(open_timeout)
        if limit is None and self._timeout is not None:
            limit = max(self._timeout, _OPENING)
        self._open_limit = limit
        cache = cache_source(cache_dir, token, flag(cache_always, "cache_always"))
        source = os.fspath(model) if isinstance(model, os.PathLike) else model
        settings = _Settings(source, device, wish, rank, cache)
        Deadline.after(limit).call(
            self._open, settings, service, polling_window, loop_timeout, on_death == "restart", spare
        )
        if on_death == "restart":
            this = weakref.ref(self)  # its bursts must not keep it alive
            self._bursts.recovery = Recovery(lambda: _open_again(this()), limit or _OPENING)
            self._bursts.retry = retry
        self._leaving: Leaving | None = None
        self._permits = Permits(concurrency or len(self._bursts.first.controller.cpus))
        self._bursts.most_at_home = self._permits.number
        self._idle, self._waiting = self._permits.idle, self._permits.waiting
        self._rooms: dict[str, int] = {}
        self._pipelines = KeptPipelines(self._bursts)
        self._output_indexes = {node.name: i for i, node in enumerate(self._compilation.outputs)}
        # A session that is dropped does not wait for its end: the collector may run in any thread. Its parts let go of
        # what they hold in the service by themselves.
        self._finalizer = weakref.finalize(self, self._bursts.hang_up)
        self._finalizer.atexit = False
        if type(self) is Session and "opentelemetry.trace" in sys.modules:  # the program uses it: runs are spans
            from .spans import TracedSession

            self.__class__ = TracedSession

    def _open(
        self,
        settings: _Settings,
        service: Service | None,
        polling_window: float | None,
        loop_timeout: float | None,
        restarts: bool,
        spare: bool,
    ) -> None:
        with contextlib.ExitStack() as opened:
            self._owned: Service | None = None
            if service is None:
                names = devices_for(settings.model, settings.device)
                service = self._owned = opened.enter_context(launch(devices=names, spare=spare))
                settings = replace(settings, device=settings.device and settings.device.partition(":")[0])
            elif restarts:
                Deadline.after(_OPENING).call(service.revive)
            self._service, self._settings = service, settings
            self._compilation = opened.enter_context(settings.compiled(service))
            self._bursts = Bursts(self._compilation, polling_window, loop_timeout, self._open_timeout)
            opened.pop_all()

    def _open_again(self) -> str:
        """The service has died: start it again and compile the model. Returns what caching did."""
        self._service.revive()
        compilation, old = self._settings.compiled(self._service), self._compilation
        try:
            if (compilation.inputs, compilation.outputs) != (old.inputs, old.outputs):
                raise GeneralFailure("the model has other inputs or outputs than before; open another session")
            self._bursts.begin_again(compilation)
            self._pipelines.drop()
        except BaseException:
            compilation.close()
            raise
        self._compilation = compilation
        return compilation.cache_report.outcome

    # ---- running ---------------------------------------------------------------------------------------------

    def run(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, npt.ArrayLike],
        timeout: float | EllipsisType | None = ...,
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Copy the inputs in, run, copy the outputs out. From any thread; it waits while ``concurrency`` others run.

        Args:
            output_names: Which outputs to return, in which order; None for all.
            inputs: An array for each input, of exactly its dtype and shape (`get_inputs`).
            timeout: Seconds that this run may take; None for no limit. By default those of the session.

        Returns:
            New arrays, one per name.

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the message names the operand and the remedy.
            BadState: The session is closed, or as many runs as there may be are below this signal handler, or belong to
                tasks of this thread's event loop.
            DeadObject: The service has ended.
            MissedDeadline: Its time was over, or that for setting up what it needed first (`open_timeout`).
        """
        wanted = None if output_names is None else self._checked_outputs(output_names)
        limit = self._timeout if timeout is ... else checked_timeout(timeout)
        try:
            permit = self._idle.pop()
        except IndexError:
            permit, limit = self._waited_for(limit)
        try:
            execution = permit.execution
            if execution is None or not execution.feed(inputs):
                execution = setting_up(self._open_timeout, limit).call(self._fed, permit, inputs)
            try:
                if limit is self._timeout:
                    execution.run()
                else:
                    execution.run(limit)
                outputs = execution.copied()
            except OutputInsufficientSize as error:
                outputs = self._with_more_room(permit, execution, error, limit)
        finally:
            self._idle.append(permit)
            if self._waiting:
                self._permits.hand_over()
        return outputs if wanted is None else [outputs[i] for i in wanted]

    async def arun(
        self,
        output_names: Sequence[str] | None,
        inputs: Mapping[str, npt.ArrayLike],
        timeout: float | EllipsisType | None = ...,
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """As `run`, awaited in asyncio or Trio. Runs make no thread; one opens bursts while more are needed.

        Any number of tasks may await it; ``concurrency`` of their runs are under way at once. A task that is cancelled
        gives its run up; what it has used is used again when the run has landed.

        Raises:
            BadState: There is no event loop, or as `run`.
            NNBurstError: As `run`.
        """
        wanted = None if output_names is None else self._checked_outputs(output_names)
        limit = self._timeout if timeout is ... else checked_timeout(timeout)
        deadline = Deadline.after(limit)
        permit = await self._permits.atake(deadline.left())
        if permit is None:
            raise self._not_started(limit)
        permit.loop_thread = threading.get_ident()
        held = [permit]

        def give() -> None:
            with contextlib.suppress(IndexError):  # it was given back
                self._permits.give(held.pop())

        async def patiently(step: Callable[[], T]) -> T:
            """Take a step that waits for the service if no burst is free, for another service if this one has died."""
            nonlocal deadline
            first, begin = self._bursts.first.controller, time.monotonic_ns()
            opening = setting_up(self._open_timeout, limit)
            if first.flights is None or (not first.ending.reason and self._bursts.free()):
                result = opening.call(step)
            else:
                landed, error = await event_loop.aside(
                    first.flights, lambda: opening.call(step), partial(self._permits.give, held.pop())
                )
                held.append(permit)
                if error is not None:
                    raise error
                result = cast(T, landed)
            deadline = deadline.postponed(begin)
            return result

        execution: Execution | None = None
        try:
            execution = permit.execution
            if execution is None or not execution.feed(inputs):
                execution = await patiently(lambda: self._fed(permit, inputs))
            for _ in range(_MOST_RERUNS):
                if not execution.burst_is_free:
                    with contextlib.suppress(ResourceExhausted):  # then it shares the burst
                        await patiently(partial(execution._find_way, errno.EBUSY, deadline))
                try:
                    await event_loop.run(execution, ... if limit is self._timeout is None else deadline.left(), give)
                except OutputInsufficientSize as error:
                    execution = await patiently(partial(self._larger, permit, execution, error))
                else:
                    outputs = execution.copied()
                    break
            else:
                raise GeneralFailure(f"an output still does not fit after {_MOST_RERUNS} runs with ever more room")
        finally:
            permit.loop_thread = 0
            if execution is None or not event_loop.is_busy(execution):  # else when what was given up has ended
                give()
        return outputs if wanted is None else [outputs[i] for i in wanted]

    def _not_started(self, limit: float | None) -> MissedDeadline:
        within = "" if limit is None else f" within {limit:.3g} s"
        return MissedDeadline(
            f"not started{within}: {self._permits.number} runs were under way. Give more time (timeout=), or let more "
            "of them run at once (concurrency=)"
        )

    def _waited_for(self, limit: float | None) -> tuple[Permit, float | None]:
        """Wait for a permit. Returns it and the time that is then left for the run."""
        number = self._permits.number
        below, awaited = _runs_below(self), self._permits.awaited_in(threading.get_ident())
        if below + awaited >= number:
            who = "tasks of this thread's event loop have" if awaited else "this is a signal handler over"
            raise BadState(
                f"{who} {number} runs of the session, which do not go on while it waits here; open the session with a "
                f"higher concurrency{', or await arun()' if awaited else ''}"
            )
        deadline = Deadline.after(limit)
        permit = self._permits.take(deadline.left())
        if permit is None:
            raise self._not_started(limit)
        return permit, deadline.left()

    def _fed(self, permit: Permit, inputs: object) -> Execution:
        """Return an execution for the shapes of these inputs, filled with them."""
        arrays = self._checked_inputs(inputs)
        if permit.execution is not None:
            permit.others.append(permit.execution)
            permit.execution = None
        for execution in reversed(permit.others):
            if all(execution.inputs[name].shape == array.shape for name, array in arrays.items()):
                permit.others.remove(execution)
                break
        else:
            while len(permit.others) >= _KEPT:
                permit.others.pop(0).forget()
            execution = self._kept(
                {node.name: arrays[node.name].shape for node in self._compilation.inputs if node.is_open}
            )
        permit.execution = execution
        for name, array in arrays.items():
            execution.inputs[name][...] = array
        return execution

    def _kept(self, shapes: Mapping[str, Sequence[int]]) -> Execution:
        return self._bursts.spare().bind(shapes=shapes, timeout=self._timeout, rooms=self._rooms, home=self._bursts)

    def _with_more_room(
        self, permit: Permit, small: Execution, error: OutputInsufficientSize, limit: float | None
    ) -> list[Array]:
        """Make room for what the last run needed, forget the permit's executions, which have less, and run again."""
        for _ in range(_MOST_RERUNS):
            left = small.deadline.left()
            larger = setting_up(self._open_timeout, limit).call(self._larger, permit, small, error)
            try:
                larger.run(left)
                return larger.copied()
            except OutputInsufficientSize as more:
                small, error = larger, more
        raise GeneralFailure(f"an output still does not fit after {_MOST_RERUNS} runs with ever more room")

    def _larger(self, permit: Permit, small: Execution, error: OutputInsufficientSize) -> Execution:
        larger = self.with_more_room(small, error, self._kept)
        permit.forget()
        permit.execution = larger
        return larger

    def with_more_room(
        self,
        small: Execution,
        error: OutputInsufficientSize,
        bind: Callable[[Mapping[str, Sequence[int]]], Execution],
    ) -> Execution:
        """Return an execution with the room that the last run of another one needed, filled as that; end that one."""
        for name, nbytes in small.needed_rooms(error).items():
            self._rooms[name] = max(nbytes, self._rooms.get(name, 0))
        larger = bind({name: view.shape for name, view in small.inputs.items()})
        for name, view in small.inputs.items():
            larger.inputs[name][...] = view
        small.forget()
        return larger

    def _checked_inputs(self, inputs: object) -> dict[str, Array]:
        return checked_inputs(self._compilation.inputs, inputs)

    def _checked_outputs(self, names: Sequence[str]) -> list[int]:
        if isinstance(names, str):
            raise InvalidArgument(f"output_names is a list of names; for one output give [{names!r}]")
        try:
            return [self._output_indexes[name] for name in names]
        except (KeyError, TypeError):
            raise InvalidArgument(f"no outputs {names!r}; this model has {list(self._output_indexes)}") from None

    def bind(
        self,
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        measure: bool = False,
        state: Mapping[str, str] | None = None,
        initial_state: Mapping[str, npt.ArrayLike] | None = None,
        memory: Mapping[str, Memory | Array] | None = None,
        steps: int | None = None,
        timeout: float | EllipsisType | None = ...,
    ) -> Execution:
        """Return an execution with shared input and output arrays of its own, for one step or several. It keeps the
        session alive. Each run writes over the outputs of the one before: copy what is to stay.

        One thread at a time may run it: another one gets `BadState`. Executions do not wait for each other: one that
        finds its burst busy moves to another burst, which is opened if there is none.

        The arguments, and what is raised, are those of `Burst.bind`; the timeout of its runs is the session's if none
        is given. Binding itself takes `open_timeout` seconds at most.
        """

        def bound() -> Execution:
            return self._bursts.living().bind(
                shapes=shapes,
                measure=measure,
                state=state,
                initial_state=initial_state,
                memory=memory,
                steps=steps,
                timeout=self._timeout if timeout is ... else timeout,
                rooms=self._rooms,
                keep=self,
                home=self._bursts,
            )

        return self._opening().call(bound)

    def _opening(self) -> Deadline:
        """Return the deadline of what is opened now."""
        return Deadline.after(self._open_limit)

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
        on_error: str,
    ) -> Generator[list[Array] | NNBurstError, None, None]: ...

    def run_many(
        self,
        inputs: Iterable[Mapping[str, npt.ArrayLike]],
        *,
        batch: int = 1,
        timeout: float | EllipsisType | None = ...,
        on_error: str = "raise",
    ) -> Generator[Any, None, None]:
        """Run the model on each of many inputs, several under way; yield a list of all outputs for each, in order.

        The arrays for what is under way, 16 inputs or four batches, are kept for the next call with such shapes; those
        of the last four calls that differ.

        Args:
            inputs: Arrays by name, as for `run`; taken while the service runs those before.
            batch: Rows that are run at once, where every input's first dimension is symbolic. An input of many has one
                row, or a few, and its outputs have as many.
            timeout: As for `run`; of each run, whose time begins when it is given to the service.
            on_error: ``"raise"``: an input that is wrong, or whose run fails, ends it; the outputs of those before it
                are yielded first. ``"return"``: its exception is yielded in place of its outputs, and the next ones
                follow. The message names the index of the input either way.

        Raises:
            InvalidArgument: An input is wrong, or the model takes no batches.
            DeadObject: The service has ended, whatever `on_error` says.
            NNBurstError: A run failed, as `run` says.
        """
        if not isinstance(batch, int) or batch < 1:
            raise InvalidArgument(f"batch={batch!r}; give a number of rows, 1 or more")
        if not isinstance(on_error, str) or on_error not in ("raise", "return"):
            raise InvalidArgument(f"on_error={on_error!r}; choose 'raise' or 'return'")
        limit = self._timeout if timeout is ... else checked_timeout(timeout)
        return run_many(self, inputs, batch, limit, on_error == "return")

    def lent_pipeline(
        self, depth: int, shapes: Mapping[str, tuple[int, ...]], timeout: float | None = None
    ) -> AbstractContextManager[Pipeline]:
        """As `pipeline`, but lent: it is kept for the next use like it. Called by `run_many`."""
        rooms = self._rooms

        def make(burst: Burst) -> Pipeline:
            return burst.pipeline(depth, shapes=shapes, timeout=timeout, rooms=rooms)

        key = depth, tuple(shapes.items()), timeout, tuple(rooms.items())
        return self._pipelines.lend(key, make, self._opening())

    def pipeline(
        self,
        depth: int = 16,
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        timeout: float | EllipsisType | None = ...,
    ) -> Pipeline:
        """Return executions that take turns, so that the service finds the next request when one has ended.

        A pipeline has a burst of its own until it is closed or dropped; runs that are in flight then are given up if it
        was dropped. One that was open when the service died stays dead, also with ``on_death="restart"``: take another.

        Args:
            depth: How many, 2 to 64. They share no memory; each has arrays of its own.
            shapes: As for `bind`.
            timeout: Likewise.

        Raises:
            InvalidArgument: The depth is out of range, or as `bind`.
            ResourceExhausted: The service gives this client no more bursts; close pipelines that are not needed.
        """
        limit = self._timeout if timeout is ... else checked_timeout(timeout)
        deadline = self._opening()
        burst = deadline.call(self._bursts.lend)
        try:
            pipeline = deadline.call(
                partial(burst.pipeline, depth, shapes=shapes, timeout=limit, rooms=self._rooms, keep=self)
            )
        except BaseException:
            self._bursts.give_back(burst)
            raise
        pipeline.when_closed(self._bursts.give_back, burst)
        return pipeline

    # ---- looking ---------------------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Names, shapes and types of the inputs."""
        return list(self._compilation.inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Names, shapes and types of the outputs."""
        return list(self._compilation.outputs)

    @property
    def compilation(self) -> Compilation:
        """What the session runs; for executions made step by step."""
        return self._compilation

    @property
    def burst(self) -> Burst:
        """The burst that was opened first; runs that do not come at once go through it."""
        return self._bursts.first

    @property
    def device(self) -> Device:
        """The device that the model was compiled for."""
        return self._compilation.device

    @property
    def service(self) -> Service:
        """The service that runs it."""
        return self._service

    @property
    def cache_report(self) -> CacheReport:
        """What caching did when the session was opened."""
        return self._compilation.cache_report

    @property
    def restarts(self) -> tuple[Restart, ...]:
        """The deaths of the service that the session has got over, with ``on_death="restart"``."""
        return () if self._bursts.recovery is None else self._bursts.recovery.restarts

    def reopen(self) -> None:
        """Get over a death of the service now rather than with the next run. Does nothing while it lives.

        Raises:
            DeadObject: It does not come back, or the session was not opened with ``on_death="restart"``.
            NNBurstError: As a run that has to wait for it.
        """
        if not self._service.alive and not self._bursts.recover(self._bursts.first):
            raise DeadObject("the service is gone; open the session with on_death='restart' to have it started again")

    @property
    def timeout(self) -> float | None:
        """Seconds that one run may take, as given when the session was opened; None for no limit."""
        return self._timeout

    @property
    def stats(self) -> BurstStats:
        """Counters of this end of all bursts."""
        return self._bursts.stats

    def latency(self) -> Latency:
        """Say how long the runs of this session took: p50, p99 and max in seconds, and where the time went.

        Counted always, at no cost to speak of: in a fast loop one run in 256 is timed and stands for the others, and
        every run that is not answered at once. Runs without a burst are not among them.
        """
        return self._bursts.latency()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{self.stats.received:,} runs, {self.latency()!r}"
        return f"<Session of {described(self._compilation)} on {self._compilation.device.name}, {state}>"

    def _repr_html_(self) -> str:
        about = f"session on {self._compilation.device.name}, {self._service!r}"
        parts = [nodes_table(about, self._compilation), self.latency()._repr_html_(), self.stats._repr_html_()]
        return "".join(parts)

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._leaving is not None

    def close(self) -> None:
        """Release the burst and the model; a service of the session's own ends. Idempotent."""
        # A service of its own goes first: then nothing waits for its unfinished work.
        self._leaving = self._leaving or Leaving(
            self._bursts.refuse,
            self._end_recovery,
            self._owned.close if self._owned is not None else lambda: None,
            self._bursts.close,
            lambda: self._compilation.close(),  # the one that a restart has just made, too
            self._permits.forget,
            self._pipelines.close,
            self._finalizer.detach,
        )
        self._leaving()

    def _end_recovery(self) -> None:
        if self._bursts.recovery is not None:
            self._bursts.recovery.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Settings(Struct, frozen=True):
    """What a model is compiled from, also once more."""

    model: Model | str | bytes
    device: str | None
    preference: ExecutionPreference
    priority: Priority
    cache: CacheSource | None

    def compiled(self, service: Service) -> Compilation:
        with contextlib.ExitStack() as reading:
            found: Model | ImportedModel
            devices: Service | Sequence[Device]
            if isinstance(self.model, Model):
                found, devices = self.model, service if self.device is None else (service.device(self.device),)
            else:
                chosen, found = reading.enter_context(imported(service, self.device, self.model))
                devices = (chosen,)
            compilation = Compilation(found, devices)
            try:
                compilation.set_preference(self.preference)
                compilation.set_priority(self.priority)
                compilation.set_cache_source(self.cache)
                compilation.finish()
            except BaseException:
                compilation.close()
                raise
            return compilation


def _open_again(session: Session | None) -> str:
    if session is None:
        raise BadState("the session was dropped")
    return session._open_again()


def _runs_below(session: Session) -> int:
    """How many runs of a session this thread is in already, below a signal handler."""
    count = 0
    frame = sys._getframe(2).f_back  # below the call that asks
    while frame is not None:
        count += frame.f_code is Session.run.__code__ and frame.f_locals.get("self") is session
        frame = frame.f_back
    return count
