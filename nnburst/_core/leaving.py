"""Closing objects: four verbs, a time limit, and safety against interrupts.

Four verbs, which mean the same everywhere:

* ``close`` waits and frees everything on both sides. It is idempotent; after an interrupt the next call finishes.
* ``hang_up`` ends an object at once without waiting: from any thread, a signal handler, a finaliser.
* ``forget`` drops one thing without waiting for the service.
* ``abandon`` is for objects that a forked child inherits: its copies are dropped, the originals stay with the parent.

**Time.** `Deadline.call` gives one deadline to all that a function waits for, however deep. Leaving takes `LEAVING`
seconds at most. Each release may take as long; after a release without an answer in time, a connection does not wait
for others until that answer comes. So closing many objects waits only once for a service that does not answer. After a
deadline has passed, the same peer is never waited for: `forget`.

**Interrupts.** A signal handler may run, and raise, between any two steps of a thread; a finaliser may run in any
thread between any two steps, too, also below a lock. Four rules follow.

* An object that several threads change belongs to one thread. The others post jobs to it, which is one step of a
  deque, and wait for an answer of their own (`nnburst.service.connection.mailbox`). A handler that interrupts them may
  post and wait, too.
* A finaliser only posts.
* A ``close`` of several steps keeps them in a `Leaving`: an interrupt ends the waiting, not the leaving.
* A lock is a `process_lock`, and no thread waits while it has one.
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
"""Total seconds that leaving waits for a silent service. A child process that still runs then is killed."""


class Leaving:
    """The remaining steps of a ``close``: call it to take them.

    Each step is done at least once, in order, even if another failed. An `NNBurstError` of a step is dropped: the other
    side has ended or does not answer. Any other exception is raised after the last step. If a signal handler raises,
    the rest is done without waiting; if another one raises even then, the next call does the remaining steps.

    Args:
        steps: Different functions that may be called again after an interrupt or a return.
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
    """A base class of context managers that are closed at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """Release everything. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OneProcess:
    """An object of one process: pickling or copying it raises an error with the alternative."""

    __slots__ = ()
    _instead = "make one in each process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Refuse to pickle.

        Raises:
            InvalidArgument: Always.
        """
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
    """Return a re-entrant lock that is free again in a forked child, where the thread that held it does not exist.

    A signal handler or a finaliser may need the lock in the thread that holds it.
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
