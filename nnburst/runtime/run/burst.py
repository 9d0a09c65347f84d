"""A burst on a compilation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core.leaving import Closing, OneProcess
from ...burst.client.controller import ExecutionBurstController
from ...burst.stats import BurstStats
from ...errors import InvalidArgument
from ...memory.memory import Memory
from ...model.types import ExecutionPreference
from ..compile.compilation import Compilation
from ..execution import Execution
from ..request.arguments import Arguments, find_buffers, given_shapes, nbytes_by_name, solve_arguments
from ..request.node_args import channel_lengths
from ..request.state import States, check_steps, make_states, steps_of
from ..service import close_with, service_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ...nnapi.device_memory import DeviceMemory
    from ...watch.trace import Recording
    from .burst_pool import BurstPool


class Burst(OneProcess, Closing):
    """A channel for executions in rapid succession, one at a time. Context manager.

    Args:
        compilation: A finished compilation, which must outlive the burst.
        polling_window: Seconds that both ends poll before they sleep; 0 to never poll. None for 50 µs, or for 0 if the
            compilation prefers ``LOW_POWER`` or both ends can run only on the same CPU.
        loop_timeout: Longest duration of each WHILE in seconds, at most 15; None for 2. A longer loop ends the run with
            `MissedDeadline`.

    Raises:
        InvalidArgument: `compilation` is not a `Compilation`, or the polling window or loop timeout is out of range.
        BadState: The compilation is not finished or has failed.

    Example:
        >>> with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        ...     compilation.finish()
        ...     with nnburst.nnapi.Burst(compilation) as burst, burst.bind() as execution:
        ...         execution.inputs["x"][:] = 2
        ...         execution.run()
        ...         execution.outputs["y"].copy()
        array([[2., 2., 2., 2.]], dtype=float32)
    """

    compilation: Compilation

    def __init__(
        self, compilation: Compilation, *, polling_window: float | None = None, loop_timeout: float | None = None
    ) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("a burst needs a Compilation")
        self.compilation = compilation
        self._outputs = {node.name for node in compilation.outputs}
        if polling_window is None and compilation.preference is ExecutionPreference.LOW_POWER:
            polling_window = 0.0
        requests, results = channel_lengths(compilation.inputs, compilation.outputs)
        self.controller = ExecutionBurstController.create(
            compilation.prepared_model,
            polling_window=polling_window,
            loop_timeout=loop_timeout,
            channel_length=requests,
            result_channel_length=results,
        )
        self._recording: Recording | None = None
        if os.environ.get("NNBURST_TRACE"):
            self._record()
        close_with(compilation._used, self)

    def _record(self) -> None:
        from ...watch.trace import recorder

        service, compilation = service_of(self.compilation.device), self.compilation
        names = [", ".join(node.name for node in nodes) for nodes in (compilation.inputs, compilation.outputs)]
        label = f"{compilation.device.name}: {' → '.join(names)}"
        self._recording = recorder().start_recording(
            label, (os.getpid(), "") if service is None else (service.pid, service.what)
        )
        self.controller.record(self._recording.pointer)

    def bind(
        self,
        *,
        shapes: Mapping[str, int | Sequence[int]] | None = None,
        room: Mapping[str, int | Sequence[int]] | None = None,
        measure: bool = False,
        state: Mapping[str, str] | None = None,
        initial_state: Mapping[str, npt.ArrayLike] | None = None,
        memory: Mapping[str, Memory | np.ndarray[Any, np.dtype[Any]]] | None = None,
        steps: int | None = None,
        timeout: float | None = None,
        # For sessions: bytes of outputs of unknown shape, least bytes of arguments of known shapes, an object that the
        # execution keeps alive, and the source of another burst when this one is busy.
        _rooms: Mapping[str, int] = MappingProxyType({}),
        _least: Mapping[str, int] = MappingProxyType({}),
        _keep: object = None,
        _pool: BurstPool | None = None,
    ) -> Execution:
        """Return an execution with its own shared input and output arrays.

        Args:
            shapes: Shapes that the model leaves open: sizes by name of a dimension (``{"batch": 8}``), complete shapes
                by name of an argument (``{"image": (8, 3, 224, 224)}``). An optional input gets an array only if some
                parameter of this method names the input.
            room: The largest shapes for `Execution.reshape`, in the form of `shapes`. Without `shapes`, the execution
                starts with these shapes. A state whose input is named here can change its shape in each run.
            measure: True to fill `Execution.timing`.
            state: ``{output: input}`` for each output that is an input of the next run. The state stays in the
                device. It has the shape of the input, completed by `shapes`. If `room` names the input, the state
                begins with the shape of its array in `initial_state`.
            initial_state: Arrays by input name for the first run; default zero.
            memory: Your own memory for inputs and outputs, by name, used without copies. Give a view of shared memory
                that has the argument's dtype and shape: ``ring.array("uint8", (480, 640, 3), offset)``. Or give a
                `Memory`: the argument is at the beginning of the memory, or is the whole image in a memory for images.
                Keep the memory open until the first run. The service maps the memory until the last execution with this
                memory is closed.
            steps: Number of times that a run calls the model. This number is the first dimension of inputs and outputs,
                and a state passes from step to step. `shapes` are those of one step. If a step fails, the error names
                the step, and the state is as before the run. The timeout applies to the whole run, and is checked
                between steps.
            timeout: Longest duration of a run in seconds; None for no limit, 0 to accept only an immediate answer.

        Raises:
            InvalidArgument: A shape is missing or contradicts the model; output and input of a state differ; a view is
                not of shared memory, not dense, or has another dtype; or, with steps, an output's shape is unknown.
            GeneralFailure: The device does not support steps, or cannot keep state: copy the state with `Session.run`.
            BadState: The burst is closed.
        """
        by_name = {"state": state, "shapes": shapes, "room": room, "memory": memory, "initial_state": initial_state}
        for name, value in by_name.items():
            if value is not None and not isinstance(value, Mapping):
                raise InvalidArgument(f"{name} is a dict by name, not {type(value).__name__}")
        if initial_state is not None and not state:
            raise InvalidArgument("initial_state needs state, which says what is kept")
        compilation = self.compilation
        if steps is not None:
            check_steps(compilation, steps)
        buffers = find_buffers(compilation.inputs, compilation.outputs, memory or {}, state or {})
        targets = list((state or {}).values())
        grow = [name for name in room or {} if name in targets]
        least = _least
        if room is not None and len(room) > len(grow):
            largest = solve_arguments(compilation, given_shapes(room, buffers, steps), buffers, state or {}, grow)
            least = nbytes_by_name(compilation, largest, steps or 1)
            if shapes is None:
                shapes = {name: size for name, size in room.items() if name not in (*self._outputs, *grow)}
        values = {name: np.shape(value) for name, value in (initial_state or {}).items() if name in grow}
        given = given_shapes({**values, **(shapes or {})}, buffers, steps)
        sizes = solve_arguments(compilation, given, buffers, state or {}, grow)
        rooms = {name: nbytes for name, nbytes in _rooms.items() if name not in given}
        rows = zip(compilation.inputs, sizes.inputs, strict=True)
        known = {node.name: shape for node, shape in rows if shape is not None}
        states = States(make_states(compilation, state or {}, known, grow))
        execution = None
        try:
            stepped = None if steps is None else steps_of(compilation, sizes, states.all, rooms, steps)
            arguments = Arguments(compilation, sizes, states, buffers, rooms, stepped, least)
            execution = Execution(self, arguments, pool=_pool, timeout=timeout, measure=measure, keep=_keep)
            if states.all:
                execution._reset_state(initial_state)
        except BaseException:
            if execution is not None:
                execution.forget()
            states.close()
            raise
        return execution

    @property
    def stats(self) -> BurstStats:
        """The client's counters of the burst."""
        return self.controller.stats

    def free_memory(self, memory: Memory | DeviceMemory) -> bool:
        """Release a memory in client and service. Return True if the burst had used the memory.

        Args:
            memory: A memory that requests of this burst have used.

        Raises:
            InvalidArgument: `memory` is not a memory.
        """
        pool = memory if isinstance(memory, Memory) else getattr(memory, "pool", None)
        if pool is None:
            raise InvalidArgument(f"expected a Memory, got {memory!r}")
        return self.controller.free_memory(pool)

    def _refuse(self) -> None:
        """Refuse further runs, without waiting for a run in flight, which raises `BadState` in its own thread."""
        self.controller.refuse()

    def close(self) -> None:
        """End the burst. The memories that it used can be closed earlier or later. Idempotent."""
        try:
            self.controller.close()
        finally:
            if self._recording is not None:
                self._recording.finish()
