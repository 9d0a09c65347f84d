"""The shape of onnxruntime's session, on a model in another process."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from .._core import checked_timeout
from ..burst import BurstStats, ExecutionBurstController
from ..errors import BadState, GeneralFailure, InvalidArgument, NNBurstError, OutputInsufficientSize
from ..model import ExecutionPreference, Model, Priority, operation_name
from ._arguments import NodeArg, answer_length, imported_arguments, model_arguments, place
from ._bound import BoundExecution
from ._caching import CacheReport, Job, cache_source, compile_with_cache
from ._import import devices_for, imported
from ._repeated import RepeatedRun
from ._service import Service, launch
from ._stateful import StatefulExecution, StatePair, state_pairs

if TYPE_CHECKING:
    from types import TracebackType

    import numpy.typing as npt

    from ..devices import Device, PreparedModel

__all__ = ["NodeArg", "Session"]

_KEPT_SHAPES = 8
_MOST_RERUNS = 8


def _member(kind: type[Any], value: object, what: str) -> Any:
    if isinstance(value, kind):
        return value
    try:
        return kind[str(value).upper()]
    except KeyError:
        choices = ", ".join(repr(member.name.lower()) for member in kind)
        raise InvalidArgument(f"{what}={value!r}; choose one of {choices}") from None


class Session:
    """A model, compiled and ready to run in a service process, through a burst.

    Thread-safe in that a second concurrent `run` gets `BadState`: open one session per thread; sessions may share a
    service. Context manager.

    Args:
        model: The path of a file (``"detector.onnx"``), the bytes of one, a `Model` from `ModelBuilder`, or the name of
            a model that a device of `service` has.
        service: Where to run; None starts a service process for this session alone, which ends with it.
        device: Name of the device, with options after a colon if the service is the session's own; None takes the
            first that supports every operation.
        preference: ``"fast_single_answer"``, ``"sustained_speed"`` or ``"low_power"`` (which never polls).
        priority: ``"low"``, ``"medium"`` or ``"high"``.
        polling_window: Seconds that both ends poll before they sleep; None for the default (50 µs with two CPUs or
            more), 0 to never poll.
        timeout: Seconds that one run may take; None for no limit.
        cache_dir: Directory where the result of compiling is kept and restored from; None: not cached, unless there is
            a token: then the user's cache directory. See `Compilation.set_caching` and `cache_report`.
        token: 32 bytes that differ for models that differ; None: made from the model itself.

    Raises:
        InvalidArgument: The model or an argument breaks a rule.
        DeviceUnavailable: No such device, or the service could not start.
        GeneralFailure: No device supports the model.
    """

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
        cache_dir: str | os.PathLike[str] | None = None,
        token: bytes | None = None,
    ) -> None:
        if not isinstance(model, Model | str | os.PathLike | bytes):
            raise InvalidArgument(
                f"model is {type(model).__name__}; give the path of a file, or a Model of nnburst.ModelBuilder"
            )
        wish = _member(ExecutionPreference, preference, "preference")
        rank = _member(Priority, priority, "priority")
        if polling_window is None and wish is ExecutionPreference.LOW_POWER:
            polling_window = 0.0
        self._timeout = checked_timeout(timeout)
        self._cache = cache_source(cache_dir, token)
        if isinstance(model, os.PathLike):
            model = os.fspath(model)
        owned = launch(devices=devices_for(model, device)) if service is None else None
        try:
            home = service or owned
            assert home is not None
            chosen = device if device is None or owned is None else device.partition(":")[0]
            self._device, prepared = self._prepare(home, chosen, model, wish, rank)
            try:
                burst = ExecutionBurstController.create(
                    prepared, polling_window=polling_window, result_channel_length=answer_length(self._outputs)
                )
            except BaseException:
                prepared.close()
                raise
        except BaseException:
            if owned is not None:
                owned.close()
            raise
        self._service = home
        self._burst = burst
        self._prepared = prepared
        self._running = threading.Lock()
        self._bound: dict[tuple[tuple[int, ...], ...], BoundExecution] = {}
        self._repeated: RepeatedRun | None = None
        self._output_bytes: dict[str, int] = {}
        self._owned = owned
        # Whoever drops a session does not wait for its end: the collector may run in any thread. Its parts let go of
        # what they hold in the service by themselves.
        self._finalizer = weakref.finalize(self, burst.hang_up)
        self._finalizer.atexit = False

    def _prepare(
        self,
        service: Service,
        name: str | None,
        model: Model | str | bytes,
        preference: ExecutionPreference,
        priority: Priority,
    ) -> tuple[Device, PreparedModel]:
        """Choose the device, learn what the arguments are, and compile."""
        if isinstance(model, Model):
            device = _choose(service, name, model)
            self._inputs, self._outputs = model_arguments(model, device.get_supported_extensions())
            prepared = self._compile(device, model, preference, priority)
        else:
            with imported(service, name, model) as (device, found):
                self._inputs, self._outputs = imported_arguments(found, device.get_supported_extensions())
                prepared = self._compile(device, found.model, preference, priority)
        self._input_names = {argument.name: argument for argument in self._inputs}
        self._has_open_outputs = any(argument.is_open for argument in self._outputs)
        return device, prepared

    def _compile(
        self, device: Device, model: Model, preference: ExecutionPreference, priority: Priority
    ) -> PreparedModel:
        prepared, self._report = compile_with_cache(Job(device, model, preference, priority, 0), self._cache)
        return prepared

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
        if output_names is None and self._repeated is not None:
            repeated = self._repeated(inputs)
            if repeated is not None:
                return repeated
        arrays = self._checked_inputs(inputs)
        wanted = self._checked_outputs(output_names)
        if self._running.locked():
            raise BadState("another thread is running this session; open one session per thread")
        with self._running:  # `with`, because a signal handler may raise after any other way to take a lock
            for _ in range(_MOST_RERUNS):
                bound = self._execution_for(arrays)
                for name, array in arrays.items():
                    bound.inputs[name][...] = array
                try:
                    bound.run()
                    if not any(argument.is_open for argument in self._outputs):
                        self._repeated = RepeatedRun(bound, self._inputs, self._outputs, self._running)
                    return self._collect(bound, wanted)
                except OutputInsufficientSize as error:
                    self._grow(bound, error)
            raise GeneralFailure(f"an output still does not fit after {_MOST_RERUNS} runs with ever more room")

    def _checked_inputs(self, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
        if not isinstance(inputs, Mapping):
            raise InvalidArgument(f"inputs are a dict of arrays by name, not {type(inputs).__name__}")
        if inputs.keys() != self._input_names.keys():
            missing = sorted(self._input_names.keys() - inputs.keys())
            extra = sorted(str(name) for name in inputs.keys() - self._input_names.keys())
            raise InvalidArgument(
                f"inputs {missing} missing, {extra} unknown; this model takes {list(self._input_names)}"
            )
        return {name: argument.check(inputs[name]) for name, argument in self._input_names.items()}

    def _checked_outputs(self, names: Sequence[str] | None) -> list[int]:
        if isinstance(names, str):
            raise InvalidArgument(f"output_names is a list of names; for one output give [{names!r}]")
        if names is None:
            return list(range(len(self._outputs)))
        known = {argument.name: i for i, argument in enumerate(self._outputs)}
        try:
            return [known[name] for name in names]
        except (KeyError, TypeError):
            raise InvalidArgument(f"no outputs {names!r}; this model has {list(known)}") from None

    def _execution_for(self, arrays: Mapping[str, np.ndarray[Any, np.dtype[Any]]]) -> BoundExecution:
        key = tuple(array.shape for array in arrays.values())
        bound = self._bound.get(key)
        if bound is None:
            if len(self._bound) >= _KEPT_SHAPES:
                self._repeated = None
                self._bound.pop(next(iter(self._bound))).forget()
            shapes = {a.name: arrays[a.name].shape for a in self._inputs if a.is_open}
            bound = self._bound[key] = self._bind_plain(shapes, measure=False)
        return bound

    def _collect(self, bound: BoundExecution, wanted: Sequence[int]) -> list[np.ndarray[Any, np.dtype[Any]]]:
        if not self._has_open_outputs:
            return [bound.outputs[self._outputs[i].name].copy() for i in wanted]
        shapes = bound.output_shapes
        out = []
        for i in wanted:
            argument, view = self._outputs[i], bound.outputs[self._outputs[i].name]
            if argument.is_open:
                shape = shapes[i].dimensions
                size = int(np.prod(shape, dtype=np.int64)) * argument.dtype.itemsize
                view = view[:size].view(argument.dtype).reshape(shape)
            out.append(view.copy())
        return out

    def _grow(self, bound: BoundExecution, error: OutputInsufficientSize) -> None:
        """Make room for what the last run needed, and forget every execution with less."""
        for argument, shape in zip(self._outputs, error.output_shapes, strict=False):
            have = bound.outputs[argument.name].nbytes
            need = int(np.prod(shape.dimensions, dtype=np.int64)) * argument.dtype.itemsize
            if not shape.is_sufficient:
                if not argument.is_open:
                    raise error
                self._output_bytes[argument.name] = max(need, 2 * have)
        self._repeated = None
        for old in self._bound.values():
            old.forget()
        self._bound.clear()

    @overload
    def bind(
        self, *, shapes: Mapping[str, Sequence[int]] | None = None, measure: bool = False, state: None = None
    ) -> BoundExecution: ...
    @overload
    def bind(
        self,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        state: Mapping[str, str],
        initial_state: Mapping[str, npt.ArrayLike] | None = None,
    ) -> StatefulExecution: ...
    def bind(
        self,
        *,
        shapes: Mapping[str, Sequence[int]] | None = None,
        measure: bool = False,
        state: Mapping[str, str] | None = None,
        initial_state: Mapping[str, npt.ArrayLike] | None = None,
    ) -> BoundExecution | StatefulExecution:
        """Return an execution with shared input and output arrays of its own.

        Args:
            shapes: Complete shapes, by name, of arguments that the model leaves open.
            measure: Whether ``timing`` of the execution is filled.
            state: ``{output: input}``: what a run leaves in the output, the next one reads as the input. It stays
                in the device, in driver-managed buffers.
            initial_state: Arrays by input name for the first run; default zero.

        Raises:
            InvalidArgument: A shape is missing or contradicts the model; the two ends of a state differ.
            GeneralFailure: The device cannot keep state; copy it with `run`.
            BadState: The session is closed.
        """
        for name, value in (("state", state), ("shapes", shapes), ("initial_state", initial_state)):
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgument(f"{name} is a dict by name, not {type(value).__name__}")
        if state and measure:
            raise InvalidArgument("an execution with a state cannot be measured; time its run()")
        if initial_state is not None and not state:
            raise InvalidArgument("initial_state needs state, which says what is kept")
        if state:
            return self._bind_state(state_pairs(self._inputs, self._outputs, state), shapes or {}, initial_state)
        return self._bind_plain(shapes or {}, measure).own(self)

    def _bind_plain(self, shapes: Mapping[str, Sequence[int]], measure: bool) -> BoundExecution:
        placement = place(self._inputs, self._outputs, shapes, self._output_bytes)
        try:
            execution = self._burst.bind(placement.request, measure=measure, kind=BoundExecution)
        except BaseException:
            placement.memory.close()
            raise
        execution.timeout = self._timeout
        return execution.attach(placement)

    def _bind_state(
        self,
        pairs: Sequence[StatePair],
        shapes: Mapping[str, Sequence[int]],
        initial: Mapping[str, npt.ArrayLike] | None,
    ) -> StatefulExecution:
        pools = {pair.target.name: 1 + 2 * i for i, pair in enumerate(pairs)}
        written = {pair.source.name: 2 + 2 * i for i, pair in enumerate(pairs)}
        clash = sorted(pools.keys() & written.keys())
        if clash:
            raise InvalidArgument(f"inputs and outputs of a state need names of their own, not {clash} for both")
        placement = place(self._inputs, self._outputs, shapes, self._output_bytes, {**pools, **written})
        home = self, self._burst, self._device, self._prepared
        return StatefulExecution(*home, pairs, placement, initial, self._timeout)

    # ---- looking ---------------------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Names, shapes and types of the inputs."""
        return list(self._inputs)

    def get_outputs(self) -> list[NodeArg]:
        """Names, shapes and types of the outputs."""
        return list(self._outputs)

    @property
    def device(self) -> Device:
        """The device that the model was compiled for."""
        return self._device

    @property
    def service(self) -> Service:
        """The service that runs it."""
        return self._service

    @property
    def cache_report(self) -> CacheReport:
        """What caching did when the session was opened."""
        return self._report

    @property
    def stats(self) -> BurstStats:
        """Counters of this end of the burst."""
        return self._burst.stats

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._finalizer.alive

    def close(self) -> None:
        """Release the burst and the model; a service of the session's own ends. Idempotent."""
        if self._finalizer.detach() is None:
            return
        self._burst.refuse()
        # A service of its own goes first: nobody waits then for what it still does.
        for part in (self._owned, self._burst, self._prepared):
            if part is not None:
                with contextlib.suppress(NNBurstError):  # dead, or a forked child that must leave its parent's alone
                    part.close()
        for execution in self._bound.values():
            execution.release()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _choose(service: Service, name: str | None, model: Model) -> Device:
    """The named device, or the first that supports every operation.

    Raises:
        GeneralFailure: None does; the message lists what is missing.
    """
    candidates = (service.device(name),) if name is not None else service.devices
    reasons = []
    for device in candidates:
        supported = device.get_supported_operations(model)
        if all(supported):
            return device
        missing = {operation_name(op.type) for op, ok in zip(model.main.operations, supported, strict=True) if not ok}
        reasons.append(f"{device.name} lacks {', '.join(sorted(missing))}")
    raise GeneralFailure(f"no device can run this model: {'; '.join(reasons)}")
