"""The runs of a session: waiting for a permit, executions for new shapes, repeats with more memory, `arun`."""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._core.deadline import Deadline
from ...errors import BadState, GeneralFailure, MissedDeadline, OutputInsufficientSize, ResourceExhausted
from ...model.types import Array
from ..execution import Execution, setup_deadline
from ..request.node_args import checked_inputs, complete_shapes
from . import event_loop
from .permits import Permit, Permits

if TYPE_CHECKING:
    from ..request.node_args import Sizes
    from .burst_pool import BurstPool

_KEPT = 8
"""Maximum number of executions that a permit keeps."""
_LEAST_ROOM = 4096
"""Minimum bytes for an argument whose shape the model leaves open."""
_MOST_KEPT = (32 << 20) - mmap.PAGESIZE
"""Largest block in bytes whose release raises glibc's mmap threshold (see mallopt(3))."""
_MOST_RERUNS = 8
_TOO_OFTEN = f"an output still does not fit after {_MOST_RERUNS} runs with ever more room"


class Runs:
    """The runs of a session.

    Args:
        timeout: Default timeout of a run in seconds.
        concurrency: Maximum number of runs at the same time.

    Attributes:
        permits: Permits to run, `concurrency` of them. A permit keeps the execution of an earlier run for reuse.
        rooms: Bytes that outputs of unknown shape have needed so far, by name.
        least: Minimum bytes of arguments with open shapes, by name.
    """

    def __init__(self, pool: BurstPool, timeout: float | None, concurrency: int) -> None:
        self.permits = Permits(concurrency)
        self.rooms: dict[str, int] = {}
        self._pool = pool
        compilation = pool.first.compilation
        self._nodes = compilation.inputs, compilation.outputs
        nodes = (*compilation.inputs, *compilation.outputs)
        self.least = {node.name: _LEAST_ROOM for node in nodes if node.is_open and not node.holds}
        self._optional = {node.name for node in compilation.inputs if node.is_optional}
        self._timeout = timeout

    # ---- permits ---------------------------------------------------------------------------------------------

    def wait_for_permit(self, limit: float | None) -> tuple[Permit, float | None]:
        """Wait for a permit. Return the permit, and the seconds left for the run.

        Raises:
            BadState: Only this thread could return a permit, so the wait would never end.
            MissedDeadline: No permit was free in time.
        """
        permits, deadline = self.permits, Deadline.after(limit)
        if permits.count_awaited(threading.get_ident()) >= permits.number:
            raise BadState(
                f"{permits.number} runs of the session are under way in this thread, below a signal handler or as "
                "tasks of its event loop, and do not go on while it waits here; open the session with a higher "
                "concurrency, or await arun()"
            )
        permit = permits.take(deadline)
        if permit is None:
            raise self._deadline_error(limit)
        return permit, deadline.left()

    def _deadline_error(self, limit: float | None) -> MissedDeadline:
        within = "" if limit is None else f" within {limit:.3g} s"
        return MissedDeadline(
            f"not started{within}: {self.permits.number} runs were under way. Give more time (timeout=), or let more "
            "of them run at once (concurrency=)"
        )

    # ---- attempts --------------------------------------------------------------------------------------------

    def forget(self, permit: Permit) -> None:
        """Free the memory that a permit keeps, because a quota was exceeded. Smaller inputs may then fit."""
        permit.forget()
        self.rooms.clear()

    def run_again(
        self, permit: Permit, failed: Execution, error: OutputInsufficientSize, limit: float | None
    ) -> list[Array]:
        """Repeat a run with more memory for outputs. `limit` is the run's time limit in seconds."""
        for _ in range(_MOST_RERUNS):
            left = failed._deadline.left()
            larger = self._setup_deadline(limit).call(self.enlarge, permit, failed, error)
            try:
                larger.run(left)
                return larger._copied()
            except OutputInsufficientSize as more:
                failed, error = larger, more
        raise GeneralFailure(_TOO_OFTEN)

    async def arun(self, inputs: object, limit: float | None) -> list[Array]:
        deadline, once, aside = Deadline.after(limit), threading.Lock(), False
        permit = await self.permits.atake(deadline)
        if permit is None:
            raise self._deadline_error(limit)
        permit.thread = threading.get_ident()

        def give() -> None:
            if once.acquire(blocking=False):
                self.permits.put_back(permit)

        async def set_up(step: Callable[[], Any]) -> Any:
            """Call `step` with a deadline: in another thread, if it may wait for a burst or a restart."""
            nonlocal deadline, aside
            first, begin = self._pool.first.controller, time.monotonic_ns()
            opening = self._setup_deadline(limit)
            if not first.ending.reason and self._pool.free():
                made = opening.call(step)
            else:
                flights = first.flights
                aside = True  # a cancelled task keeps the permit until `step` ends
                made, error = await event_loop.run_in_thread(flights, lambda: opening.call(step), give)
                aside = False
                if error is not None:
                    raise error
            deadline = deadline.postpone(begin)
            return made

        execution = permit.execution
        try:
            if execution is None or not execution._set_inputs(inputs):
                execution = await set_up(partial(self._prepare, permit, inputs))
            for _ in range(_MOST_RERUNS):
                if not execution.controller.is_free:
                    with contextlib.suppress(ResourceExhausted):  # without another burst, runs share this one
                        await set_up(partial(execution._rebind, errno.EBUSY, deadline))
                try:
                    await event_loop.run(execution, ... if limit is self._timeout is None else deadline.left(), give)
                    return execution._copied()
                except OutputInsufficientSize as error:
                    execution = await set_up(partial(self.enlarge, permit, execution, error))
            raise GeneralFailure(_TOO_OFTEN)
        except ResourceExhausted:
            self.forget(permit)
            raise
        finally:
            permit.thread = 0
            abandoned = execution is not None and (execution.is_in_flight or execution._concluding)
            if not aside and not abandoned:  # otherwise, the permit comes back when the step or run ends
                give()

    def _setup_deadline(self, limit: float | None) -> Deadline:
        return setup_deadline(self._pool.options.open_timeout, limit)

    # ---- executions ------------------------------------------------------------------------------------------

    def prepare(self, permit: Permit, inputs: object, limit: float | None) -> Execution:
        """Return an execution for the inputs' shapes, and copy the inputs. `limit`: the run's time limit in seconds."""
        return self._setup_deadline(limit).call(self._prepare, permit, inputs)

    def _prepare(self, permit: Permit, inputs: object) -> Execution:
        arrays = checked_inputs(self._nodes[0], inputs)
        sizes = self.sizes({name: array.shape for name, array in arrays.items()})
        form = sizes.form
        permit.execution, execution, least = None, permit.executions.pop(form, None), self.least
        if execution is not None and not execution._fill(arrays):
            least = execution._arguments.room_for(sizes)
            execution.forget()
            execution = None
        if execution is None:
            while len(permit.executions) >= _KEPT:
                permit.executions.pop(next(iter(permit.executions))).forget()
            execution = self._bound(arrays, least)
            execution._fill(arrays)
        permit.executions[form] = permit.execution = execution
        return execution

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
        return complete_shapes(*self._nodes, shapes, left_out=self._optional - shapes.keys())

    def _bound(self, arrays: Mapping[str, Array], least: Mapping[str, int]) -> Execution:
        execution = self._pool.get_free_burst().bind(
            shapes={name: array.shape for name, array in arrays.items()},
            timeout=self._timeout,
            _rooms=self.rooms,
            _least=least,
            _pool=self._pool,
        )
        # The C library returns freed pages to the kernel, so each run would have page faults for its outputs. Freeing
        # this block makes the C library keep up to twice as much.
        if (memory := execution._arguments.layout.memory) is not None:
            np.empty(min(memory.size, _MOST_KEPT), np.uint8)
        return execution

    def enlarge(self, permit: Permit, small: Execution, error: OutputInsufficientSize) -> Execution:
        """Replace a permit's execution by one that has enough memory for the outputs, and copy the inputs to it."""
        arguments = small._arguments
        for name, nbytes in arguments.needed_rooms(error).items():
            self.rooms[name] = max(nbytes, self.rooms.get(name, 0))
        larger = self._bound(small._wired, arguments.room_for(arguments.sizes))
        larger._fill(small._wired)
        permit.executions[arguments.sizes.form] = permit.execution = larger
        small.forget()
        return larger
