"""The execution: arguments for a compiled model, and the ways to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from .._core.errno import flag
from .._core.leaving import Closing
from ..burst import loop_timeout_ns
from ..burst.client.client_end import ClientEnd
from ..errors import InvalidArgument, OutputInsufficientSize
from ..memory import Memory
from ..model import Array
from .compile.compilation import Compilation
from .display import described
from .request.device_memory import DeviceMemory
from .request.node_args import SharedArrays
from .request.shared_arguments import SharedArguments
from .run import event_loop
from .run.computation import Computation
from .run.futures import submit

if TYPE_CHECKING:
    from concurrent.futures import Future

    import numpy.typing as npt

    from .run.route import OpenBurst, Replacements


class Execution(Computation, Closing):
    """Arguments for a compiled model. Context manager.

    `Session.bind` and `Burst.bind` make one whose arguments are shared arrays: fill ``inputs``, `run`, use ``outputs``;
    nothing is copied, and ``run()`` is one call into C. Or make one from a `Compilation`, give each argument with
    `set_input`, `set_output` and their like, and run it with `compute`, `start_compute` or `burst_compute`, once, or
    again and again if it is reusable.

    Args:
        compilation: Finished.
        reusable: Whether it may run again after it has ended.

    Attributes:
        inputs: Shared arrays by input name. Write into them (``x.inputs["image"][:] = frame``), not over them. An input
            that is a state, or was given by a ``set_`` method, is not among them.
            What is no array of numbers is copied instead: ``x.inputs["words"] = ["a", "b"]``.
        outputs: Shared arrays by output name, valid from the end of a run until the next one begins, which writes over
            them: keep ``x.outputs["scores"].copy()``. An output whose shape only a run tells is flat bytes;
            `output_shapes` tells its dimensions. Each look at what is no array of numbers makes a new value.

    Raises:
        BadState: The compilation is not finished or has failed.
        InvalidArgument: It is no `Compilation`.

    Example:
        >>> with nnburst.Session(model) as session, session.bind() as execution:
        ...     execution.inputs["x"][:] = [[-1, 0, 1, 2]]
        ...     execution.run()
        ...     execution.outputs["y"].copy()
        array([[0., 0., 1., 2.]], dtype=float32)
    """

    def __init__(self, compilation: Compilation, *, reusable: bool = False) -> None:
        if not isinstance(compilation, Compilation):
            raise InvalidArgument("an execution needs a Compilation")
        super().__init__(compilation, reusable)
        self._shown: tuple[Mapping[str, Any], Mapping[str, Any]] = SharedArrays(), SharedArrays()
        self._shared: SharedArguments | None = None
        self._feeds: tuple[tuple[str, np.dtype[Any] | None, tuple[int, ...], Array], ...] = ()
        self._copies: tuple[Callable[[], Array], ...] | None = None
        self._keep: object = None

    @property
    def inputs(self) -> Mapping[str, Any]:
        """See the class."""
        return self._shown[0]

    @property
    def outputs(self) -> Mapping[str, Any]:
        """See the class."""
        return self._shown[1]

    @property
    def compilation(self) -> Compilation:
        """Of which it is; after a restart of the service that of the session."""
        return self._arguments.compilation

    # ---- shared arrays ---------------------------------------------------------------------------------------

    def _share(
        self, arguments: SharedArguments, burst: OpenBurst, *, measure: bool, keep: object, pool: Replacements | None
    ) -> None:
        """Take arguments that are all there, and bind the request. Called by `Burst.bind`.

        Args:
            arguments: Of the compilation.
            burst: Where to.
            measure: Whether `timing` is filled.
            keep: Kept alive by this execution.
            pool: Where it finds another burst when this one is busy; None: a run is refused then.
        """
        self.reusable, self._keep, self._measure = True, keep, flag(measure, "measure")
        self._arguments = arguments
        self._route.begin(arguments, burst, pool)
        self._shared, self._feeds, self._copies = arguments, arguments.feeds, arguments.copies
        self._shown = arguments.shown
        self._route.bind(self, burst._controller)

    def _feed(self, inputs: object) -> bool:
        """Copy arrays into `inputs`; False if they are not a dict with exactly these names, dtypes and shapes."""
        feeds = self._feeds
        if type(inputs) is not dict or len(inputs) != len(feeds):
            return False
        for name, dtype, shape, view in feeds:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.dtype is not dtype or array.shape != shape:
                return False
            view[...] = array
        return True

    def _fits(self, arrays: Mapping[str, Array]) -> bool:
        """Whether arrays that `checked_inputs` returned have the shapes of `inputs`."""
        wired = self._wired
        return wired.keys() == arrays.keys() and all(wired[name].shape == each.shape for name, each in arrays.items())

    def _fill(self, arrays: Mapping[str, Array]) -> None:
        """Copy such arrays to `inputs`."""
        for name, array in arrays.items():
            self._wired[name][...] = array

    @property
    def _wired(self) -> dict[str, Array]:
        """The arrays of the inputs as they cross to the service."""
        assert self._shared is not None
        return self._shared.inputs

    def _copied(self) -> list[Array]:
        """Return copies of all outputs, of the shapes that the last run gave them."""
        if self._copies is None:
            assert self._shared is not None
            return self._shared.copied(self.output_shapes)
        copies = []  # a comprehension would be a call more
        for copy in self._copies:
            copies.append(copy())
        return copies

    def _needed_rooms(self, error: OutputInsufficientSize) -> dict[str, int]:
        """See `SharedArguments.needed_rooms`."""
        assert self._shared is not None
        return self._shared.needed_rooms(error)

    # ---- state -----------------------------------------------------------------------------------------------

    def reset_state(self, values: Mapping[str, npt.ArrayLike] | None = None) -> None:
        """Set the state for the next run.

        Args:
            values: Arrays by *input* name; inputs that are left out become zero (the zero point, if quantised).

        Raises:
            InvalidArgument: A name, dtype or shape is wrong; the state is as it was then.
            DeadObject: The service has ended, and the session does not start it again.
            MissedDeadline: It takes longer than setting up may (``open_timeout`` of the session).
        """
        self._route.setting_up(self).call(self._reset_state, values)

    def _reset_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        self._check_not_closed()
        self._route.write_states(self, self._arguments.states.checked(values))

    def _start_state(self, values: Mapping[str, npt.ArrayLike] | None) -> None:
        """As `reset_state`, and so it is again when the service has died and was started again."""
        self._reset_state(values)
        self._arguments.states.initial = {name: np.array(value) for name, value in (values or {}).items()}

    def get_state(self) -> dict[str, Array]:
        """Return copies of the state that the next run will read, by input name; raises as `reset_state`."""
        self._check_not_closed()
        return self._route.setting_up(self).call(self._arguments.states.read, self._turn)

    # ---- arguments, one by one -------------------------------------------------------------------------------

    def set_input(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Give an input as an array, which is copied when the execution runs; None omits it.

        Args:
            index: Position among the model's inputs.
            array: Of the operand's dtype; C-contiguous data is not required.
            dimensions: Given where the model leaves some open; default: the array's shape.

        Raises:
            InvalidArgument: The index, dtype, size or dimensions are wrong.
            BadState: The input has a value already, or the execution was started.
        """
        self._put("input", index, self._arguments.of_array("input", index, array, dimensions))

    def set_output(self, index: int, array: Array | None, *, dimensions: Sequence[int] | None = None) -> None:
        """Give the array that an output is copied to (C-contiguous, writable); arguments as for `set_input`.

        Where the model leaves dimensions open the array is only room: `get_output_dimensions` tells the shape.
        """
        self._put("output", index, self._arguments.of_array("output", index, array, dimensions))

    def set_input_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Let an input lie in a pool.

        Raises as `set_input`.

        Args:
            index: Of the input.
            memory: The pool, or memory of the device.
            offset, length: Bytes; both 0 for an image or a `DeviceMemory`, used whole.
            dimensions: As for `set_input`.
        """
        self._put("input", index, self._arguments.of_memory("input", index, memory, (offset, length), dimensions))

    def set_output_from_memory(
        self,
        index: int,
        memory: Memory | DeviceMemory,
        offset: int = 0,
        length: int = 0,
        *,
        dimensions: Sequence[int] = (),
    ) -> None:
        """Let an output lie in a pool; arguments as for `set_input_from_memory`."""
        self._put("output", index, self._arguments.of_memory("output", index, memory, (offset, length), dimensions))

    def set_measure_timing(self, measure: bool) -> None:
        """Say whether to measure durations, for `get_duration` and `timing`.

        Args:
            measure: Whether.

        Raises:
            InvalidArgument: The compilation is not for exactly one device.
            BadState: The execution was started.
        """
        with self._changing("timing"):
            self._measure = flag(measure, "measure")
            if self._burst is not None:
                self._route.bind(self, self._burst)

    def set_timeout(self, seconds: float | None) -> None:
        """Limit the time of a run. Raises as `set_measure_timing`.

        Args:
            seconds: None for no limit.
        """
        with self._changing("a timeout"):
            self.timeout = seconds

    def set_loop_timeout(self, seconds: float | None) -> None:
        """Limit the time that each WHILE of a run may take.

        A loop that takes longer ends the run with `MissedDeadline`. The requests of a burst do not carry it: there
        ``Burst(loop_timeout=)`` applies, or ``Session(loop_timeout=)``.

        Args:
            seconds: None for the default of 2 s; more than 15 s is cut to 15.

        Raises:
            InvalidArgument: It is no number above 0.
            BadState: The execution was started.
        """
        longest = loop_timeout_ns(seconds)
        with self._changing():
            self._route.loop_timeout_ns = longest

    # ---- running ---------------------------------------------------------------------------------------------

    async def arun(self, timeout: float | EllipsisType | None = ...) -> None:
        """As `run`, awaited in asyncio or Trio; no thread is made.

        A task that is cancelled gives the run up: until that has landed its arrays are in use; its answer is dropped.

        Args:
            timeout: As for `run`.

        Raises:
            BadState: It is in flight, also one that was given up; or there is no event loop.
            GeneralFailure: The service takes one request at a time.
            NNBurstError: As `run`.
        """
        await event_loop.run(self, timeout)

    def submit(self, timeout: float | EllipsisType | None = ...) -> Future[Execution]:
        """Start a run of the shared arrays; they are the service's until the future is done.

        Its result is this execution. One thread for each burst completes futures, and ends when there are none. When
        its time is over, waiting behind other runs included, the future has `MissedDeadline`; the execution stays in
        flight until its late answer has landed.

        Args:
            timeout: As for `run`.

        Returns:
            A future that cannot be cancelled.

        Raises:
            BadState: It is closed, in flight, or not bound by `Session.bind` or `Burst.bind`.
            ResourceExhausted: The system has no thread for the first future.
            GeneralFailure: The service takes one request at a time.
        """
        with self._limited(timeout):
            return submit(self)

    # ---- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Execution:
        self._check_not_closed()
        return self

    def close(self) -> None:
        """Give the memory and the state back on both sides; arrays that you still hold stay readable. Idempotent."""
        self._end(ClientEnd.free_memory)

    def forget(self) -> None:
        """As `close`, but do not wait for the service."""
        self._end(ClientEnd.forget)

    def __repr__(self) -> str:
        arguments = "shared arrays" if self._arguments.is_shared else "arguments one by one"
        return f"<Execution of {described(self.compilation)}, {'closed' if self._route.ends else arguments}>"
