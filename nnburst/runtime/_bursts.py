"""The bursts of a session: as many as have been needed at once."""

from __future__ import annotations

from functools import partial

from ..burst._stats import BurstStats
from ..errors import BadState
from ._burst import Burst
from ._compilation import Compilation


class Bursts:
    """Bursts on one compilation. A burst runs one execution at a time; one that finds it busy moves to a free one.

    So a program with one thread has one burst, and what is hot stays hot; one with many has as many as run at once.

    Args:
        compilation: Finished.
        polling_window: As for `Burst`.
    """

    def __init__(self, compilation: Compilation, polling_window: float | None) -> None:
        self._open = partial(Burst, compilation, polling_window=polling_window)
        self._bursts = [self._open()]
        self._refuses = False

    @property
    def first(self) -> Burst:
        """The one that there is from the beginning."""
        return self._bursts[0]

    def spare(self) -> Burst:
        """Return one that runs nothing now; another one if all do.

        Raises:
            BadState: They are closed.
            ResourceExhausted: The service gives this client no more bursts.
        """
        for burst in self._bursts:
            if burst.controller.is_free:
                return burst
        burst = self._open()
        self._bursts.append(burst)
        if self._refuses:  # closed meanwhile
            burst.close()
            raise BadState("the session is closed; open another one")
        return burst

    @property
    def stats(self) -> BurstStats:
        """Sums of the counters of the clients' ends."""
        return sum((burst.stats for burst in self._bursts[1:]), self.first.stats)

    def refuse(self) -> None:
        """Run nothing any more; executions in flight get `BadState`. Waits for nothing."""
        self._refuses = True
        for burst in self._bursts:
            burst.refuse()

    def hang_up(self) -> None:
        """End all without waiting, from any thread, also in a finaliser."""
        for burst in self._bursts:
            burst.controller.hang_up()

    def close(self) -> None:
        """End all of them. Idempotent."""
        for burst in self._bursts:
            burst.close()
