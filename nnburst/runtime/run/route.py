"""Where a request is bound, and where else it runs when its burst is busy or dead, or its device fails."""

from __future__ import annotations

import errno
import time
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..._core._nnburst import lib
from ..._core.deadline import Deadline
from ..._core.errno import check
from ..._core.leaving import Leaving, ProcessLock
from ...burst import BoundRequest
from ...burst.client.client_end import ClientEnd
from ...errors import BadState, DeadObject, MissedDeadline
from ...memory import Memory
from ...model import Array, BufferToken, MeasureTiming, Named, RunOptions
from ..request.arguments import Arguments
from ..request.node_args import answer_length
from ..request.state import States, check_steps

if TYPE_CHECKING:
    from ...burst.client.client_end import MemoryUse
    from ...errors import NNBurstError
    from ...model import ExecutionResult
    from ..compile.compilation import Compilation

_A_MOMENT = 0.0005
MIN_SETUP_SECONDS = 1.0
"""What a run needs first takes this long at least to be tried; shorter limits are raised to it."""


class OpenBurst(Protocol):
    """A burst that requests are bound to."""

    @property
    def compilation(self) -> Compilation: ...
    @property
    def _controller(self) -> ClientEnd: ...


class Replacements(Protocol):
    """Where there are other bursts."""

    @property
    def open_timeout(self) -> float | None:
        """Seconds that a run may take to set up what it needs first; None: see `setting_up`."""

    @property
    def retry(self) -> int:
        """How often a run that a death has ended is repeated."""

    @property
    def restarts_service(self) -> bool:
        """Whether it gets over a death of the service."""

    def replacement(self, burst: OpenBurst, *, died: bool) -> OpenBurst | None:
        """Return a burst in place of one that is busy or has died; None if there is none."""


def setting_up(open_timeout: float | None, timeout: float | None) -> Deadline:
    """Return the deadline for what a run needs first: another burst, arrays for other shapes, a state.

    Args:
        open_timeout: Seconds that it may take, if the caller has said so.
        timeout: Seconds of the run, which begins afterwards.
    """
    if open_timeout is None and timeout is not None:
        open_timeout = max(timeout, MIN_SETUP_SECONDS)
    return Deadline.after(open_timeout)


class Route:
    """The way of the requests of one execution.

    Attributes:
        begun: How a run that is not through a burst was begun; None if none is under way.
        loop_timeout_ns: Nanoseconds that each WHILE of a run without a burst may take; 0: the default.
    """

    def __init__(self, arguments: Arguments, lock: ProcessLock) -> None:
        self.begun: RunOptions | None = None
        self.loop_timeout_ns = 0
        self._arguments = arguments
        self._lock = lock
        self._burst: OpenBurst | None = None
        self._pool: Replacements | None = None
        self.prepared = arguments.compilation.prepared_model
        self._uses: dict[ClientEnd, list[MemoryUse]] = {}  # of memory of the caller's
        self._known: dict[ClientEnd, list[Memory | Named]] = {}  # what each burst has slots for
        self._finalizer = weakref.finalize(self, _drop, self._known)
        self._finalizer.atexit = False
        self._leaving: Leaving | None = None

    # ---- through a burst -------------------------------------------------------------------------------------

    def begin(self, arguments: Arguments, burst: OpenBurst, pool: Replacements | None) -> None:
        """Begin at a burst, with other arguments.

        Args:
            burst: Where the request is going to be bound first.
            pool: Where it finds another burst; None: nowhere, so that a run is refused if this one is busy.
        """
        self._arguments, self._burst, self._pool = arguments, burst, pool

    def bind(self, request: BoundRequest, controller: ClientEnd) -> None:
        """Bind the arguments to a burst."""
        arguments, layout = self._arguments, self._arguments.layout
        if arguments.is_shared:
            named = [place for argument in arguments.all for place in argument.memories]
            uses = self._uses[controller] = [controller.use(memory) for memory in named if isinstance(memory, Memory)]
            if arguments.steps is not None:
                uses.append(controller.use(arguments.steps))
        own = [] if layout.memory is None else [layout.memory]
        self._known[controller] = [*own, *arguments.states.pools]
        longest = answer_length(arguments.compilation.outputs)
        request._bind_to(controller, layout.requests, measure=request._measure, answer_length=longest)

    @property
    def retries(self) -> int:
        """As the pool says; a run with a state is never repeated."""
        return 0 if self._pool is None or self._arguments.states.all else self._pool.retry

    @property
    def restarts(self) -> bool:
        return self._pool is not None and self._pool.restarts_service

    def again(self, request: BoundRequest, number: int, deadline: Deadline) -> Deadline | None:
        """Move to a burst that is free, or to a service that has come back; see `Elsewhere`.

        Raises:
            DeadObject: The state was lost with the service. The next run begins with the initial one.
            MissedDeadline: There is none in time, or a run that was given up takes longer than this one may.
        """
        ending, begin = self.prepared.ending, time.monotonic_ns()
        generation = self._arguments.states.generation
        moved = self.setting_up(request).call(self._move, request, number)
        if self._arguments.states.generation != generation:
            names = ", ".join(map(repr, self._arguments.states.all))
            raise ending.error(
                f"the service died ({ending.reason}), and with it the state {names}; it is as bind() made it, and runs "
                "go on from there"
            )
        if moved == -errno.EAGAIN:  # a run that was given up comes first, on its burst
            if deadline.left() == 0:
                raise MissedDeadline(
                    f"not started {request._in_time}: the run before, which was given up, has not ended"
                )
            time.sleep(_A_MOMENT)
            return deadline
        return None if moved is None else deadline.postponed(begin)

    def setting_up(self, request: BoundRequest) -> Deadline:
        """Return the deadline for what a run that begins now needs first."""
        return setting_up(None if self._pool is None else self._pool.open_timeout, request._allowed)

    def _move(self, request: BoundRequest, number: int) -> int | None:
        """Move to another burst: 0, or -EAGAIN if it has to stay for the moment, None if there is no other."""
        pointer, here, arguments = request._pointer, self._burst, self._arguments
        if self._pool is None or here is None or self._leaving is not None:
            return None
        burst = self._pool.replacement(here, died=number not in (errno.EBUSY, errno.ESTALE))
        if burst is None or (burst is here and number == errno.EBUSY):  # no longer
            return None if burst is None else 0
        states = arguments.states
        if burst.compilation is not arguments.compilation:
            if arguments.steps is not None:
                check_steps(burst.compilation, arguments.steps.count)
            if states.all:
                states = states.renewed(burst.compilation, request._turn)
        with self._lock.lock:
            if request._pointer is not pointer:  # another thread has moved it
                return 0
            left = lib.nnb_execution_leave(pointer)
            if left == 0:
                try:
                    self._settle_on(request, burst, states)
                except BaseException:
                    lib.nnb_execution_return(pointer)
                    raise
        busy = {errno.EALREADY: BadState("the execution is running; bind one for each thread")}
        return left if left == -errno.EAGAIN else check(left, "execution", busy)

    def _settle_on(self, request: BoundRequest, burst: OpenBurst, states: States) -> None:
        """Bind the request to another burst, perhaps of the model that was compiled anew."""
        if states is not self._arguments.states:
            self._arguments.put_states(states)
        if burst.compilation is not self._arguments.compilation:
            self._known.clear()  # the dead hold nothing
            self._uses.clear()
            self._arguments.compilation, self.prepared = burst.compilation, burst.compilation.prepared_model
        self._burst = burst
        self.bind(request, burst._controller)

    def write_states(self, request: BoundRequest, values: Mapping[str, Array]) -> None:
        """Set the state for the next run, on a service that has come back if it has died; raises as `reset_state`."""
        try:
            self._arguments.states.write(request._turn, values)
        except DeadObject:
            if self._move(request, errno.ENOTCONN) is None:
                raise
            self._arguments.states.write(request._turn, values)

    # ---- around it -------------------------------------------------------------------------------------------

    def options(self, request: BoundRequest, deadline: Deadline) -> RunOptions:
        """Return those of a run without a burst."""
        measure = MeasureTiming.YES if request._measure else MeasureTiming.NO
        return RunOptions(measure, deadline.at_ns, self.loop_timeout_ns)

    def on_another_device(self, request: BoundRequest, failure: NNBurstError) -> ExecutionResult | None:
        """See `Elsewhere`; if the choice of the device was not the caller's."""
        asked = self._arguments.request(request._turn)
        if any(isinstance(pool, BufferToken) for pool in asked.pools):
            return None  # they are the first device's
        options = self.begun or self.options(request, request._deadline)
        return self._arguments.compilation._run_elsewhere(asked, options, failure)

    # ---- life ------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def end(self, give_back: Callable[[ClientEnd, Memory | Named], object]) -> None:
        """Give memory and states back on both sides; the first call says how. Idempotent."""
        if self._leaving is None:
            known = [(controller, pool) for controller, pools in self._known.items() for pool in pools]
            own = self._arguments.memory
            self._leaving = Leaving(
                *(partial(give_back, *pair) for pair in known),
                self._uses.clear,
                *(controller.forget_dropped for controller in self._known),
                *(() if own is None else (own.close,)),
                self._arguments.states.close,
            )
        self._finalizer.detach()
        self._leaving()

    @property
    def ends(self) -> bool:
        """Whether `end` was called, or is just being."""
        return self._leaving is not None

    def forget(self) -> None:
        """Give back what a run needed whose arrays are the caller's."""
        memory = self._arguments.drop_layout()
        _drop(self._known, ClientEnd.forget)
        if memory is not None:
            memory.close()


def _drop(
    known: dict[ClientEnd, list[Memory | Named]],
    give_back: Callable[[ClientEnd, Memory | Named], Any] = ClientEnd.forget_soon,
) -> None:
    """For an execution that was not closed; buffers go with the last reference to them."""
    while known:
        controller, pools = known.popitem()
        for pool in pools:
            give_back(controller, pool)
