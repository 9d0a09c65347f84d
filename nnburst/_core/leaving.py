"""How things end, and how long that may take.

Four verbs, which mean the same everywhere:

* ``close`` waits and gives everything back, on both sides. Idempotent. What an interrupted one left, the next one does.
* ``hang_up`` ends it at once and waits for nothing: from any thread, a signal handler, a finaliser.
* ``forget`` lets go of one thing and does not wait until the service has done so, too.
* ``abandon`` is for objects that a forked child inherits: its copies go, the originals stay with the parent.

**Time.** `Deadline.call` gives one deadline to all that a function waits for, however deep. To leave takes `LEAVING`
seconds at most: each release may take them, and after one that did not get its answer in time a connection waits for
no other until that answer comes, so that a service that does not answer is waited for once, however many things of it
are closed. A deadline that has passed is never followed by a wait for the same peer: `forget`.

**Interrupts.** A signal handler may run, and raise, between any two steps of a thread; a finaliser may run in any
thread between any two steps, too, also below a lock. Four rules follow.

* What several threads change belongs to one thread. The others post jobs to it, which is one step of a deque, and wait
  for an answer of their own (`nnburst.service.connection.mailbox`). A handler that interrupts them may post and
  wait, too.
* A finaliser only posts.
* A ``close`` that has steps of its own keeps them in a `Leaving`: an interrupt ends the waiting, not the leaving.
* A lock is a `process_lock`, and nothing is waited for below it.
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
"""Seconds that leaving waits for a service that does not answer, in all. A child that is not gone then is killed."""


class Leaving:
    """The remaining steps of a ``close``: call it to take them.

    Each step is done at least once, in order, though another one failed. An `NNBurstError` of a step is dropped: the
    other side is gone or does not answer, and what it held goes with it. Another exception is raised when all is done.
    If a signal handler raises, the rest is done without waiting for anything; if another one does even then, what is
    left is done by the next call.

    Args:
        steps: Functions that may be called again after they were interrupted or have returned, each given once.
    """

    __slots__ = ("_steps",)

    def __init__(self, *steps: Callable[[], object]) -> None:
        self._steps = deque(steps)

    def __call__(self) -> None:
        try:
            self._go()
        except Exception:  # of a step; all have been done
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
            except Exception as error:  # perhaps of a signal handler, in the middle of the step
                failure = failure or error
                with contextlib.suppress(Exception):
                    Deadline.after(0).call(step)
            with contextlib.suppress(ValueError):  # another thread has done it as well
                self._steps.remove(step)
        if failure is not None:
            raise failure


class Closing:
    """A context manager that is closed at the end of the block."""

    __slots__ = ()

    def close(self) -> None:
        """Give everything back. Idempotent."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class OneProcess:
    """An object that cannot leave the process that made it: pickling or copying it says what to do instead."""

    __slots__ = ()
    _instead = "make one in each process"

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        """Refuse.

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
    """Have ``thing.abandon()`` called in each forked child, where only the thread that forked goes on.

    It must not wait. What another thread was about to change may be half changed.
    """
    _inherited.add(thing)


def process_lock() -> threading.RLock:
    """Return a lock of the whole process, which is free in a forked child: there the thread that holds it may not be.

    It is re-entrant, as a signal handler, or what the collector finds meanwhile, may need it in the same thread.
    """
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def _after_fork_in_child() -> None:
    failure: BaseException | None = None
    for step in (*(lock._at_fork_reinit for lock in _locks), *(thing.abandon for thing in _inherited)):
        try:
            step()
        except BaseException as error:  # what is not abandoned would use what is the parent's
            failure = error
    if failure is not None:
        raise failure


os.register_at_fork(after_in_child=_after_fork_in_child)
