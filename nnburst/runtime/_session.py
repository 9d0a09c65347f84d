"""The shape of onnxruntime's session, on a model in another process."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core._errno import checked_timeout
from .._core._leaving import Leaving, within
from .._core._one_process import OneProcess
from ..burst import BurstStats
from ..errors import GeneralFailure, InvalidArgument, OutputInsufficientSize
from ..model import ExecutionPreference, ImportedModel, Model, Priority
from ._arguments import NodeArg
from ._burst import Burst
from ._cache_sources import CacheSource, cache_source
from ._caching import CacheReport
from ._compilation import Compilation, member
from ._execution import Execution
from ._import import check_source, devices_for, imported
from ._service import Service, launch

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from ..devices import Device

_OPENING = 60.0
"""Seconds for opening a session whose runs have a limit, if the caller names no other."""
_KEPT = 8
_MOST_RERUNS = 8
Array = np.ndarray[Any, np.dtype[Any]]


class Session(OneProcess):
    """A model, compiled and ready to run in a service process, through a burst.

    Thread-safe in that a second concurrent `run` gets `BadState`: open one session per thread; sessions may share a
    service. Context manager.

    Args:
        model: The path of a file (``"detector.onnx"``), the bytes of one, a `Model` from `ModelBuilder`, or the name of
            a model that a device of `service` has.
        service: Where to run; None starts a service process for this session alone, which ends with it.
        device: Name of the device, with options after a colon if the service is the session's own; None takes the
            first that supports every operation.
        preference: ``"fast_single_answer"``, ``"sustained_speed"`` or ``"low_power"``; what it does is said in
            `Compilation.set_preference`.
        priority: ``"low"``, ``"medium"`` or ``"high"``. It does nothing yet but reach the device.
        polling_window: As for `Burst`.
        timeout: Seconds that one run may take; None for no limit, 0 for an answer that is there at once.
        open_timeout: Seconds that opening may take, with the start of a service of its own. None is no limit, but a
            minute if `timeout` is given and not longer.
        cache_dir: Directory where the result of compiling is kept and restored from; None: not cached, unless there is
            a token: then the user's cache directory. See `Compilation.set_caching` and `cache_report`.
        token: 32 bytes that differ for models that differ; None: made from the model itself.

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
        polling_window: float | None = None,
        timeout: float | None = None,
        open_timeout: float | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
    ) -> None:
        check_source(model)
        wish = member(ExecutionPreference, preference, "preference")
        rank = member(Priority, priority, "priority")
        self._timeout = checked_timeout(timeout)
        limit = checked_timeout(open_timeout)
        if limit is None and self._timeout is not None:
            limit = max(self._timeout, _OPENING)
        cache = cache_source(cache_dir, token)
        source = os.fspath(model) if isinstance(model, os.PathLike) else model
        within(limit, self._open, source, service, device, wish, rank, polling_window, cache)
        self._leaving: Leaving | None = None
        self._idle: list[Execution] = []  # kept by `run`; those that are running are not in it
        self._rooms: dict[str, int] = {}
        self._output_indexes = {node.name: i for i, node in enumerate(self._compilation.outputs)}
        # A session that is dropped does not wait for its end: the collector may run in any thread. Its parts let go of
        # what they hold in the service by themselves.
        self._finalizer = weakref.finalize(self, self._burst.controller.hang_up)
        self._finalizer.atexit = False

    def _open(
        self,
        model: Model | str | bytes,
        service: Service | None,
        device: str | None,
        preference: ExecutionPreference,
        priority: Priority,
        polling_window: float | None,
        cache: CacheSource | None,
    ) -> None:
        with contextlib.ExitStack() as reading, contextlib.ExitStack() as opened:
            self._owned: Service | None = None
            if service is None:
                service = self._owned = opened.enter_context(launch(devices=devices_for(model, device)))
                device = device and device.partition(":")[0]
            self._service = service
            found: Model | ImportedModel
            devices: Service | Sequence[Device]
            if isinstance(model, Model):
                found, devices = model, service if device is None else (service.device(device),)
            else:
                chosen, found = reading.enter_context(imported(service, device, model))
                devices = (chosen,)
            self._compilation = opened.enter_context(Compilation(found, devices))
            self._compilation.set_preference(preference)
            self._compilation.set_priority(priority)
            self._compilation.set_cache_source(cache)
            self._compilation.finish()
            self._burst = Burst(self._compilation, polling_window=polling_window)
            opened.pop_all()

    # ---- running ---------------------------------------------------------------------------------------------

    def run(
        self, output_names: Sequence[str] | None, inputs: Mapping[str, npt.ArrayLike]
    ) -> list[np.ndarray[Any, np.dtype[Any]]]:
        """Copy the inputs in, run, and copy the outputs out.

        Args:
            output_names: Which outputs to return, in which order; None for all.
            inputs: An array for each input, of exactly its dtype and shape (`get_inputs`).

        Returns:
            New arrays, one per name.

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the message names the operand and the remedy.
            BadState: The session is closed, or another thread is running it.
            DeadObject: The service has ended.
            MissedDeadline: ``timeout`` passed.
        """
        wanted = None if output_names is None else self._checked_outputs(output_names)
        try:
            execution: Execution | None = self._idle.pop()  # no other thread fills it meanwhile
        except IndexError:
            execution = None
        if execution is None or not execution.feed(inputs):
            execution = self._fed(execution, inputs)
        try:
            execution.run()
            outputs = execution.copied()
        except OutputInsufficientSize as error:
            outputs = self._with_more_room(execution, error)
        except BaseException:
            self._idle.append(execution)
            raise
        else:
            self._idle.append(execution)
        return outputs if wanted is None else [outputs[i] for i in wanted]

    def _fed(self, execution: Execution | None, inputs: object) -> Execution:
        """Return an execution for the shapes of these inputs, filled with them."""
        if execution is not None:
            self._idle.append(execution)
        arrays = self._checked_inputs(inputs)
        for execution in reversed(self._idle.copy()):
            if all(execution.inputs[name].shape == array.shape for name, array in arrays.items()):
                with contextlib.suppress(ValueError):  # another thread took it
                    self._idle.remove(execution)
                    break
        else:
            while len(self._idle) >= _KEPT:
                self._idle.pop(0).forget()
            execution = self._kept(
                {node.name: arrays[node.name].shape for node in self._compilation.inputs if node.is_open}
            )
        for name, array in arrays.items():
            execution.inputs[name][...] = array
        return execution

    def _kept(self, shapes: Mapping[str, Sequence[int]]) -> Execution:
        return self._burst.bind(shapes=shapes, timeout=self._timeout, rooms=self._rooms)

    def _with_more_room(self, small: Execution, error: OutputInsufficientSize) -> list[Array]:
        """Make room for what the last run needed, forget every execution with less, and run again."""
        for _ in range(_MOST_RERUNS):
            self._rooms.update(small.needed_rooms(error))
            _forget_all(self._idle)
            larger = self._kept({name: view.shape for name, view in small.inputs.items()})
            for name, view in small.inputs.items():
                larger.inputs[name][...] = view
            small.forget()
            try:
                larger.run()
                outputs = larger.copied()
            except OutputInsufficientSize as more:
                small, error = larger, more
            else:
                self._idle.append(larger)
                return outputs
        small.forget()
        raise GeneralFailure(f"an output still does not fit after {_MOST_RERUNS} runs with ever more room")

    def _checked_inputs(self, inputs: object) -> dict[str, Array]:
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(f"inputs are a dict of arrays by name, not {type(inputs).__name__}")
        nodes = {node.name: node for node in self._compilation.inputs}
        if inputs.keys() != nodes.keys():
            missing = sorted(nodes.keys() - inputs.keys())
            extra = sorted(str(name) for name in inputs.keys() - nodes.keys())
            raise InvalidArgument(f"inputs {missing} missing, {extra} unknown; this model takes {list(nodes)}")
        return {name: node.check(inputs[name]) for name, node in nodes.items()}

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
    ) -> Execution:
        """Return an execution with shared input and output arrays of its own. It keeps the session alive.

        The arguments, and what is raised, are those of `Burst.bind`; the timeout is the session's.
        """
        return self._burst.bind(
            shapes=shapes,
            measure=measure,
            state=state,
            initial_state=initial_state,
            timeout=self._timeout,
            rooms=self._rooms,
            keep=self,
        )

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
        """The burst that it runs through."""
        return self._burst

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
    def stats(self) -> BurstStats:
        """Counters of this end of the burst."""
        return self._burst.stats

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._leaving is not None

    def close(self) -> None:
        """Release the burst and the model; a service of the session's own ends. Idempotent."""
        # A service of its own goes first: then nothing waits for its unfinished work.
        self._leaving = self._leaving or Leaving(
            self._burst.controller.refuse,
            self._owned.close if self._owned is not None else lambda: None,
            self._burst.close,
            self._compilation.close,
            partial(_forget_all, self._idle),
            self._finalizer.detach,
        )
        self._leaving()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _forget_all(executions: list[Execution]) -> None:
    while executions:
        executions.pop().forget()
