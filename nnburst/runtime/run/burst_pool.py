"""The bursts of a session, and their replacement after a crash."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct

from ..._core.deadline import OPENING, Deadline
from ..._core.leaving import LEAVING, abandon_when_forked, process_lock
from ..._core.log import warn
from ..._core.threads import start_daemon
from ...burst.client.request import INHERITED
from ...burst.stats import BurstStats
from ...errors import BadState, DeadObject, Ending, MissedDeadline
from ...watch.stats import Latency
from ..compile.compilation import Compilation
from .burst import Burst
from .ring import Ring

if TYPE_CHECKING:
    from ..execution import Execution
    from ..request.node_args import Sizes
    from ..session import Options

_CLOSED = "the session is closed, or its service is; open another one"
_MOST_KEPT = 4


class Restart(Struct, frozen=True):
    """A restart of a service after its death, or a new connection to a shared service that was started again.

    Attributes:
        reason: The reason why the service ended.
        signal: See `DeadObject`.
        exit_status: See `DeadObject`.
        cache: Cache result of the new compilation, such as ``"HIT"``: the ``outcome`` of a `CacheReport`.
        seconds: Time from the first call that needed the service until the service was ready.

    Example:
        >>> with nnburst.launch() as service, service.session(model, on_death="restart") as session:
        ...     service.kill()
        ...     session.reopen()
        ...     session.restarts[0].signal
        9
    """

    reason: str
    signal: int | None
    exit_status: int | None
    cache: str
    seconds: float


class BurstPool:
    """A pool of bursts on one compilation. If an execution's burst is busy, the execution moves to a free burst.

    The pool opens another burst only if runs overlap: without overlap, there is one burst. A `Ring` cannot move, so
    it has its own burst, which ends with the ring.

    Args:
        options: Options of the session.
        open_again: Function that reopens the model after the service's death, calls this pool's `restart`, and
            returns the cache result.

    Attributes:
        restarts: Restarts of the service so far.
    """

    def __init__(self, compilation: Compilation, options: Options, open_again: Callable[[], str]) -> None:
        self.options = options
        self._open_again = open_again
        self._refusal = ""  # the reason for opening no more bursts
        self._bursts: list[Burst] = []
        self._of_rings: list[Burst] = []
        self._open(compilation, self._bursts)
        self._ended: deque[Burst] = deque()
        self._past: tuple[BurstStats, Latency] | None = None
        self._lock = process_lock()  # no thread waits while it holds this lock
        self.restarts: tuple[Restart, ...] = ()
        self._attempt: tuple[threading.Thread, list[BaseException]] | None = None
        self._rings: dict[Hashable, Ring] = {}
        abandon_when_forked(self)

    def abandon(self) -> None:
        """Reset the pool in a forked child. The pool refuses new bursts, and forgets the parent's rings."""
        self._refusal, self._attempt, self._rings = INHERITED, None, {}

    def _check_open(self) -> None:
        if self._refusal:
            raise BadState(self._refusal)

    def _open(self, compilation: Compilation, others: list[Burst]) -> Burst:
        self._check_open()
        window, timeout = self.options.polling_window, self.options.timeout or None  # a loop limit of 0 would fail
        others.append(burst := Burst(compilation, polling_window=window, loop_timeout=timeout))
        try:
            self._check_open()
        except BadState:  # another thread has closed the session
            burst.close()
            raise
        return burst

    def restart(self, compilation: Compilation) -> None:
        """Replace dead bursts by a burst on a new compilation. Executions move to this burst at their next run."""
        bursts: list[Burst] = []
        self._open(compilation, bursts)
        self._bursts, self._of_rings, self._rings = bursts, [], {}

    def replacement(self, burst: Burst, *, died: bool) -> Burst | None:
        """Return a burst that replaces a busy or dead burst; None if a dead burst has no replacement.

        Raises the same errors as `get_free_burst`.
        """
        return None if died and not self.recover(burst) else self.get_free_burst()

    def recover(self, dead: Burst) -> bool:
        """Wait until the service is restarted and dead bursts are replaced. Return False if no restart is allowed.

        One thread does the work for all callers. A caller stops waiting at its own deadline.

        Raises:
            DeadObject: The model could not be opened again. The next call tries once more.
            MissedDeadline: The caller's deadline has passed; the work continues.
            BadState: The session is closed.
        """
        ending = dead.controller.ending
        if self._refusal:
            return False
        if dead.controller.end_reason and not ending.reason:  # the burst has ended, not the service
            return True
        if not self.options.restarts:
            return False
        with self._lock:
            self._check_open()
            if dead not in self._bursts:
                return True
            attempt = self._attempt
            if attempt is None or not attempt[0].is_alive():
                what, failures = "a service that starts again", list[BaseException]()
                attempt = start_daemon(self._restart, failures, ending, name="nnburst-restart", what=what), failures
                self._attempt = attempt
        thread, failures = attempt
        thread.join(Deadline.after().left())  # the lock is free meanwhile: a signal handler could need it
        if failures:
            failure = f"the service is gone ({ending.reason}) and does not come back: {failures[0]}"
            raise DeadObject(failure, signal=ending.signal, exit_status=ending.exit_status) from failures[0]
        if thread.is_alive():
            raise MissedDeadline(f"the service is gone ({ending.reason}) and is still being started again; come later")
        return True

    def _restart(self, failures: list[BaseException], how: Ending) -> None:
        begin, deadline = time.monotonic(), Deadline.after(self.options.open_limit or OPENING)
        try:
            try:
                cache = deadline.call(self._open_again)
            except DeadObject:  # the new service may have died, too
                cache = deadline.call(self._open_again)
        except BaseException as error:  # the waiting threads raise it
            failures.append(error)
            return
        restart = Restart(how.reason, how.signal, how.exit_status, cache, time.monotonic() - begin)
        self.restarts += (restart,)
        message = "a service died (%s); after %.2f s another one runs its model"
        warn("nnburst.runtime", message, how.reason, restart.seconds)

    def end_restart(self) -> None:
        """Wait for a running restart, within the time limit for closing."""
        if self._attempt is not None:
            self._attempt[0].join(Deadline.after(LEAVING).left())

    @property
    def first(self) -> Burst:
        """The burst that was opened first."""
        return self._bursts[0]

    def get_live_burst(self) -> Burst:
        """Return a free burst like `get_free_burst`. If the service has died, wait until it is restarted."""
        if self.first.controller.ending.reason:
            self.recover(self.first)
        return self.get_free_burst()

    def free(self) -> Burst | None:
        """Return a free burst; None if all are busy."""
        for burst in self._bursts:
            if burst.controller.is_free and burst.controller.is_sound:
                return burst
        return None

    def get_free_burst(self) -> Burst:
        """Return a free burst. If all are busy, open another.

        Raises:
            BadState: The pool is closed.
            ResourceExhausted: The service refuses another burst.
            MissedDeadline: The service did not answer in time.
        """
        return self.free() or self._open_another(lambda: self._bursts)

    def _open_another(self, others: Callable[[], list[Burst]]) -> Burst:
        self._close_ended()
        first = self.first
        try:
            return self._open(first.compilation, others())
        except DeadObject:
            if not self.recover(first):
                raise
        return self._open_another(others)

    def _ring(self, make: Callable[[Burst], Sequence[Execution]]) -> Ring:
        burst = self._open_another(lambda: self._of_rings)
        try:
            return Ring(make(burst), partial(self._end, burst))
        except BaseException:
            self._end(burst)
            raise

    def _end(self, burst: Burst) -> None:
        """End a burst; a later call of another method closes it. Safe in a finaliser."""
        with contextlib.suppress(ValueError):  # `restart` has removed it
            self._of_rings.remove(burst)
        if self._refusal != INHERITED:
            burst.controller.hang_up()
        self._ended.append(burst)

    @contextlib.contextmanager
    def lend_ring(
        self, key: Hashable, sizes: Sizes, make: Callable[[Ring | None, Burst], Sequence[Execution]], deadline: Deadline
    ) -> Iterator[Ring]:
        """Lend a `Ring`, if possible one of an earlier call: a new ring costs more than many runs.

        Args:
            key: Key of the ring. Rings with equal keys can replace each other.
            sizes: Shapes of the ring's arguments.
            make: Function that returns executions on a burst. The first argument is the ring of an earlier
                call that could not be lent, for example because its arrays are too small; None if there is none.
        """
        ring = small = self._rings.pop(key, None)
        if ring is None or not ring.is_idle or not ring.reshape(sizes):
            ring = deadline.call(self._ring, partial(make, small))
        try:
            yield ring
        finally:
            if ring.is_idle and not self._refusal:
                self._rings[key] = ring
                for oldest in list(self._rings)[:-_MOST_KEPT]:
                    self._rings.pop(oldest, None)

    def _close_ended(self) -> None:
        """Close bursts that have ended, and add up their counters."""
        with contextlib.suppress(IndexError):
            while True:
                burst = self._ended.popleft()
                burst.close()
                stats, latency = burst.stats, burst.controller.latency()
                with self._lock:
                    if self._past is not None:
                        stats, latency = stats + self._past[0], latency + self._past[1]
                    self._past = stats, latency

    @property
    def stats(self) -> BurstStats:
        self._close_ended()
        past = () if self._past is None else (self._past[0],)
        return sum((*past, *(burst.stats for burst in self._all[1:])), self.first.stats)

    def latency(self) -> Latency:
        """Return the latencies of the runs of all bursts."""
        self._close_ended()
        past = () if self._past is None else (self._past[1],)
        return sum((*past, *(burst.controller.latency() for burst in self._all[1:])), self.first.controller.latency())

    @property
    def _all(self) -> tuple[Burst, ...]:
        return (*self._bursts, *self._of_rings, *self._ended)

    def refuse(self) -> None:
        """Refuse further runs, and return at once. Calls that wait for executions in flight raise `BadState`."""
        self._refusal = self._refusal or _CLOSED
        for burst in self._all:
            burst._refuse()

    def hang_up(self) -> None:
        """End all bursts without waiting. Safe in any thread and finaliser."""
        self._rings = {}
        for burst in self._all:
            burst.controller.hang_up()

    def close(self) -> None:
        self._rings = {}
        for burst in self._all:
            burst.close()
