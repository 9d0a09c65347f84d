"""A burst on a compilation."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core.errno import whole
from ..._core.leaving import Closing, OneProcess
from ...burst import BurstStats, ExecutionBurstController
from ...errors import InvalidArgument
from ...memory import Memory
from ...model import ExecutionPreference
from ..compile.compilation import Compilation
from ..execution import Execution
from ..request.arguments import Arguments, find_buffers, given_shapes, nbytes_by_name, solved
from ..request.node_args import channel_lengths
from ..request.state import States, check_steps, make_states, steps_of
from ..service import closes_with, service_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from ...nnapi import DeviceMemory
    from ...watch.trace import Recording
    from .burst_pool import BurstPool


class Burst(OneProcess, Closing):
    """Announces that executions will come in rapid succession. One runs at a time. Context manager.

    Args:
        compilation: Finished; must outlive the burst.
        polling_window: Seconds that both ends poll before they sleep, 0 to never poll; None for 0 if the preference of
            the compilation is ``LOW_POWER``, else the default (50 µs with two CPUs or more).
        loop_timeout: Seconds that each WHILE of a run may take; None for the default of 2 s, more than 15 s is cut to
            15. A loop that takes longer ends its run with `MissedDeadline`.

    Raises:
        InvalidArgument: `compilation` is not a `Compilation`, or the window or the time of a loop is out of range.
        BadState: It is not finished or has failed.

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
        closes_with(compilation._used, self)

    def _record(self) -> None:
        from ...watch.trace import recorder

        service, compilation = service_of(self.compilation.device), self.compilation
        names = [", ".join(node.name for node in nodes) for nodes in (compilation.inputs, compilation.outputs)]
        label = f"{compilation.device.name}: {' → '.join(names)}"
        self._recording = recorder().follow(
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
        rooms: Mapping[str, int] | None = None,
        least: Mapping[str, int] | None = None,
        keep: object = None,
        pool: BurstPool | None = None,
    ) -> Execution:
        """Return an execution with shared input and output arrays of its own.

        Args:
            shapes: What the model leaves open: sizes by name of a dimension (``{"batch": 8}``), complete shapes by name
                of an argument (``{"image": (8, 3, 224, 224)}``). Outputs that only have dimensions of known names get
                their shape from them. An optional input is among the arrays if it is named here, or below.
            room: The largest shapes that `Execution.reshape` is going to give, as `shapes` are said, which are those of
                the inputs here if they are left out. An output may have room, too, though only a run tells its shape.
                A state of which the input is named here may have another shape after each run.
            measure: Whether `Execution.timing` is filled.
            state: ``{output: input}``: what a run leaves in the output, the next one reads as the input. It stays
                in the device, in driver-managed buffers. Its shape is the input's, which `shapes` completes, or that
                of its first value if it has `room`.
            initial_state: Arrays by input name for the first run; default zero.
            memory: Where inputs and outputs lie that are to lie elsewhere than in arrays of the execution's own, by
                name: a view of shared memory (``ring.array("uint8", (480, 640, 3), offset)``), whose dtype and shape
                are the argument's, or a `Memory`, which is used from its beginning; an image is used whole. Nothing is
                copied. It must stay open until the first run; from then on the service has it mapped, until the last
                execution that names it is closed.
            steps: Run the model so many times in one run, one step after the other: arrays of inputs and outputs have
                that leading dimension, a state goes from step to step. Shapes and types are those of one step. If a
                step fails, the exception says which; the state is as it was before the run then, and outputs of
                earlier steps may be there. The time limit is that of the run, and is looked at between steps.
            timeout: Seconds that a run may take; None for no limit, 0 for an answer that is there at once.
            rooms: Bytes by name of an output whose shape only a run tells; default 4096. A shape that is given wins.
            least: Bytes by name that arguments of known shapes have at least.
            keep: What the execution keeps alive.
            pool: Where the execution finds another burst when this one is busy; None: its run is refused then.

        Raises:
            InvalidArgument: A shape is missing or contradicts the model; the two ends of a state differ; a view is not
                of shared memory, not dense, or of another dtype; with steps, the shape of an output is not known.
            GeneralFailure: The device cannot keep state; copy it with `Session.run`. It takes no requests of steps.
            BadState: The burst is closed.
        """
        by_name = {"state": state, "shapes": shapes, "room": room, "memory": memory, "rooms": rooms}
        for name, value in (*by_name.items(), ("initial_state", initial_state)):
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
        if room is not None and len(room) > len(grow):
            largest = solved(compilation, given_shapes(room, buffers, steps), buffers, state or {}, grow)
            least = nbytes_by_name(compilation, largest, steps or 1)
            if shapes is None:
                shapes = {name: size for name, size in room.items() if name not in (*self._outputs, *grow)}
        values = {name: np.shape(value) for name, value in (initial_state or {}).items() if name in grow}
        given = given_shapes({**values, **(shapes or {})}, buffers, steps)
        sizes = solved(compilation, given, buffers, state or {}, grow)
        rooms = {name: _room(name, room) for name, room in (rooms or {}).items() if name not in given}
        rows = zip(compilation.inputs, sizes.inputs, strict=True)
        known = {node.name: shape for node, shape in rows if shape is not None}
        states = States(make_states(compilation, state or {}, known, grow))
        execution = None
        try:
            stepped = None if steps is None else steps_of(compilation, sizes, states.all, rooms, steps)
            arguments = Arguments(compilation, sizes, states, buffers, rooms, stepped, least or {})
            execution = Execution(self, arguments, pool=pool, timeout=timeout, measure=measure, keep=keep)
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
        """Counters of the client's end."""
        return self.controller.stats

    def free_memory(self, memory: Memory | DeviceMemory) -> bool:
        """Forget a memory on both sides. Returns whether the burst knew it.

        Args:
            memory: One that its requests have named.

        Raises:
            InvalidArgument: It is no memory.
        """
        pool = memory if isinstance(memory, Memory) else getattr(memory, "pool", None)
        if pool is None:
            raise InvalidArgument(f"expected a Memory, got {memory!r}")
        return self.controller.free_memory(pool)

    def _refuse(self) -> None:
        """Run nothing any more; an execution in flight gets `BadState`. Waits for nothing."""
        self.controller.refuse()

    def close(self) -> None:
        """End the burst; in any order relative to memories. Idempotent."""
        try:
            self.controller.close()
        finally:
            if self._recording is not None:
                self._recording.finish()


def _room(name: str, nbytes: object) -> int:
    room = whole(nbytes, f"the room of output {name!r}", " of bytes")
    if room < 0:
        raise InvalidArgument(f"the room of output {name!r} is {room}; give a whole number of bytes from 0")
    return room
