"""Closing objects: four verbs, a time limit, and safety against interrupts.

Four verbs mean the same everywhere:

* ``close`` waits, for a limited time, until both sides have released everything. It is idempotent. After an interrupt,
  call it again.
* ``hang_up`` ends an object at once, without waiting. Any thread, signal handler or finaliser may call it.
* ``forget`` drops an object without waiting for the service.
* ``abandon`` drops a forked child's copy of an object; the parent keeps the original.

**Time.** `Deadline.call` limits all waits in a function. Closing takes at most `LEAVING` seconds, and so does each
release of an object in the service. If a release is not answered in time, further releases on the same connection do
not wait while that answer is missing. So closing many objects waits only once for a silent service.

**Interrupts.** A signal handler may run, and raise, between any two steps of the main thread. A finaliser may run
between any two steps of any thread, even while the thread has a lock. So:

* If several threads change an object, one thread owns it. The other threads post jobs to the owner's deque and wait for
  the answers (`nnburst.service.connection.mailbox`). A signal handler may do so, too.
* A finaliser posts jobs and does not wait.
* A ``close`` of several steps keeps the steps in a `Leaving`, so that an interrupt skips no step.
* `process_lock` makes all locks. A thread that has a lock does not wait.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Self, SupportsIndex

from ..errors import InvalidArgument, NNBurstError
from .deadline import Deadline

LEAVING = 2.0
"""Seconds that closing waits for a silent service. A child process that still runs after that is killed."""


class Leaving:
    """The remaining steps of a ``close``. Calling this object takes the steps.

    Each step is taken at least once, in order, even if another step failed. An `NNBurstError` is ignored: the peer has
    ended or does not answer. Any other exception is raised after the last step. If a signal handler raises, the
    remaining steps do not wait for the peer. If a handler raises again, the next call takes the remaining steps.

    Args:
        steps: Different functions, each of which can safely be called again.
    """

    __slots__ = ("_steps",)

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = deque(steps)

    def __call__(self) -> None:
        try:
            self._go()
        except Exception:  # A step raised it, and all steps are done.
            raise
        except BaseException:
            Deadline.after(0).call(self._go)
            raise

    def _go(self) -> None:
        failure: Exception | None = None
        while self._steps:
            step = self._steps[0]
            try:
                step()
            except NNBurstError:
                pass
            except Exception as error:  # A signal handler may have raised it in the middle of the step.
                failure = failure or error
                with contextlib.suppress(Exception):
                    Deadline.after(0).call(step)
            with contextlib.suppress(ValueError):  # Another thread may have done the step, too.
                self._steps.remove(step)
        if failure is not None:
            raise failure


class Closing:
    """Base class of objects that a ``with`` block closes at its end."""

    __slots__ = ()

    def close(self) -> None:
        """Release everything. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OneProcess:
    """Base class of objects that cannot be pickled or copied; an attempt raises an error that names an alternative."""

    __slots__ = ()
    _instead = "make one in each process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Raise `InvalidArgument`."""
        raise InvalidArgument(
            f"{type(self).__name__} objects belong to the process that made them and cannot be pickled or copied; "
            f"{self._instead}"
        )


_inherited: weakref.WeakSet[Any] = weakref.WeakSet()
_locks: weakref.WeakSet[Any] = weakref.WeakSet()


def abandon_when_forked(thing: Any) -> None:
    """Call ``thing.abandon()`` in each forked child, where only the forking thread continues.

    `abandon` must not wait, and may find data that another thread had half changed.
    """
    _inherited.add(thing)


def process_lock() -> threading.RLock:
    """Return a re-entrant lock, which is free in a forked child.

    A signal handler or finaliser may take the lock in a thread that already has it.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    failure: BaseException | None = None
    for step in (*(lock._at_fork_reinit for lock in _locks), *(thing.abandon for thing in _inherited)):
        try:
            step()
        except BaseException as error:  # An object that is not abandoned would use the parent's resources.
            failure = error
    if failure is not None:
        raise failure


os.register_at_fork(after_in_child=_after_fork_in_child)
