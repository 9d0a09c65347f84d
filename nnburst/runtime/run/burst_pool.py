"""The bursts of a session: as many as have been needed at once."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from ..._core.leaving import ProcessLock
from ...burst.stats import BurstStats
from ...errors import BadState, DeadObject
from ...watch import Latency
from ..compile.compilation import Compilation
from .burst import Burst
from .recovery import Recovery

_CLOSED = "the session is closed, or its service is; open another one"


class Bursts:
    """Bursts on one compilation. A burst runs one execution at a time; one that finds it busy moves to a free one.

    So a program with one thread has one burst, and what is hot stays hot; one with many has as many as run at once.
    A pipeline cannot move: it is lent a burst that nothing else uses meanwhile.

    Args:
        compilation: Finished.
        polling_window, loop_timeout: As for `Burst`.
        open_timeout: Seconds that a run may take to set up what it needs first; None: see `setting_up`.

    Attributes:
        recovery: Opens the model again when the service has died; None: executions get `DeadObject` then.
        retry: How often a run that a death has ended is repeated.
        most_at_home: So many of those that were lent and given back are kept; the others are ended.
    """

    def __init__(
        self,
        compilation: Compilation,
        polling_window: float | None,
        loop_timeout: float | None = None,
        open_timeout: float | None = None,
    ) -> None:
        self.open_timeout = open_timeout
        self._polling_window = polling_window
        self._loop_timeout = loop_timeout
        self._refuses = False
        self._bursts = [self._open(compilation)]
        self._lendable: list[Burst] = []
        self._at_home: list[Burst] = []
        self._ended: deque[Burst] = deque()
        self._past: tuple[BurstStats, Latency] | None = None
        self._adding = ProcessLock()  # to `_past`; a signal handler may come while it is held
        self.most_at_home = 1
        self.recovery: Recovery | None = None
        self.retry = 0

    def _open(self, compilation: Compilation) -> Burst:
        if self._refuses:
            raise BadState(_CLOSED)
        return Burst(compilation, polling_window=self._polling_window, loop_timeout=self._loop_timeout)

    def begin_again(self, compilation: Compilation) -> None:
        """Take the place of bursts that have died; executions move when they run next."""
        self._lendable, self._at_home = [], []
        self._bursts = [self._accepted(self._open(compilation))]

    def _accepted(self, burst: Burst) -> Burst:
        if self._refuses:  # closed meanwhile
            burst.close()
            raise BadState(_CLOSED)
        return burst

    def recover(self, dead: Burst) -> bool:
        """Wait until there are others in place of one that has died; False if there will be none.

        Raises:
            NNBurstError: As `Recovery.wait`.
        """
        if self.recovery is None or self._refuses:
            return False
        self.recovery.wait(lambda: dead in self._bursts, dead.controller.ending)
        return True

    @property
    def first(self) -> Burst:
        """The one that there is from the beginning."""
        return self._bursts[0]

    def living(self) -> Burst:
        """As `spare`, after a death that is to be got over first: for what is bound to stay where it is.

        Raises:
            NNBurstError: As `spare`, and as `Recovery.wait`.
        """
        first = self.first
        if first.controller.ending.reason:
            self.recover(first)
        return self.spare()

    def free(self) -> Burst | None:
        """Return one that runs nothing now, if there is one."""
        for burst in self._bursts:
            if burst.controller.is_free and burst.controller.is_sound:
                return burst
        return None

    def spare(self) -> Burst:
        """Return one that runs nothing now; another one if all do, for which the service is waited for.

        Raises:
            BadState: They are closed.
            ResourceExhausted: The service gives this client no more bursts.
            MissedDeadline: The service did not answer in time.
        """
        return self.free() or self._another(lambda: self._bursts)

    def _another(self, where: Callable[[], list[Burst]]) -> Burst:
        """Open another one, after a death that is to be got over first."""
        self._bury()
        first, others = self.first, where()  # before it is opened: if it dies meanwhile it must not be among the new
        try:
            burst = self._open(first.compilation)
        except DeadObject:
            if self.recover(first):
                return self._another(where)
            raise
        others.append(burst)
        return self._accepted(burst)

    def lend(self) -> Burst:
        """Return one that nothing else uses until `give_back`.

        Raises:
            NNBurstError: As `living`.
        """
        first = self.first
        if first.controller.ending.reason:
            self.recover(first)
        with contextlib.suppress(IndexError):
            while not (burst := self._at_home.pop()).controller.is_sound:
                self._end(burst)
            return burst
        return self._another(lambda: self._lendable)

    def lend_again(self, burst: Burst) -> bool:
        """Lend this very one; False if it is lent to another pipeline, or has died."""
        with contextlib.suppress(ValueError):
            self._at_home.remove(burst)
            return True
        return False

    def give_back(self, burst: Burst) -> bool:
        """Have one that was lent lent again; False if it has ended, or ends now. Also in a finaliser."""
        at_home = self._at_home  # before the look: `begin_again` may come in between
        if burst not in self._lendable:
            return False
        if len(at_home) < self.most_at_home and burst.controller.is_sound:
            at_home.append(burst)
            return True
        self._end(burst)
        return False

    def _end(self, burst: Burst) -> None:
        """Use it no more. Also in a finaliser, so it is closed later."""
        with contextlib.suppress(ValueError):  # `begin_again` came in between
            self._lendable.remove(burst)
        burst.controller.hang_up()
        self._ended.append(burst)

    def _bury(self) -> None:
        """Close those that have ended; what they have counted stays."""
        with contextlib.suppress(IndexError):
            while True:
                burst = self._ended.popleft()
                burst.close()
                stats, latency = burst.stats, burst.controller.latency()
                with self._adding.lock:
                    if self._past is not None:
                        stats, latency = stats + self._past[0], latency + self._past[1]
                    self._past = stats, latency

    @property
    def stats(self) -> BurstStats:
        """Sums of the counters of the clients' ends."""
        self._bury()
        past = () if self._past is None else (self._past[0],)
        return sum((*past, *(burst.stats for burst in self._others)), self.first.stats)

    def latency(self) -> Latency:
        """Say how long the runs of all took."""
        self._bury()
        past = () if self._past is None else (self._past[1],)
        return sum((*past, *(burst.controller.latency() for burst in self._others)), self.first.controller.latency())

    @property
    def _others(self) -> tuple[Burst, ...]:
        return (*self._bursts[1:], *self._lendable, *self._ended)

    def refuse(self) -> None:
        """Run nothing any more; executions in flight get `BadState`. Waits for nothing."""
        self._refuses = True
        if self.recovery is not None:
            self.recovery.refuse()
        for burst in (self.first, *self._others):
            burst.refuse()

    def hang_up(self) -> None:
        """End all without waiting, from any thread, also in a finaliser."""
        for burst in (self.first, *self._others):
            burst.controller.hang_up()

    def close(self) -> None:
        """End all of them. Idempotent."""
        for burst in (self.first, *self._others):
            burst.close()
