"""Jobs that threads, signal handlers and finalisers give to the one thread that owns a connection.

A signal handler runs in the main thread between any two of its steps, and may raise there, or make a call of its own
and wait for the answer. A finaliser runs in whatever thread the collector chooses, below any lock. So the threads that
use a connection touch no part of it: they post a job, and the connection's owner does it.

Posting is one append to a deque, which the interpreter does not divide, and a ring of a bell: an interrupt comes before
or after. No signal handler runs in the owner, which is not the main thread, so its code is plain: no locks, and no care
for an interrupt between two steps. The owner must not wait for an answer; a finaliser that the collector runs in it
only posts.

One exception: a worker, which is not the main thread either, sends its answer itself (see `outbox`).

When the owner has ended, a thread that posts does the job itself: such a job only reports the end.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from ..._core.errno import system
from ..._core.fds import FdSet

Job = Callable[[], None]


class Mailbox:
    """Jobs for the owner of a connection."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._bell: FdSet | None = FdSet((system(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK),))

    def fileno(self) -> int:
        """Return a descriptor that is readable while jobs wait."""
        assert self._bell is not None
        return self._bell.fds[0]

    def post(self, job: Job) -> None:
        """Have the owner do a job, in the order of posting. From anywhere; never waits."""
        self._jobs.append(job)
        bell = self._bell  # held by this frame, too: its number cannot become another file's meanwhile
        if bell is None:
            self._do_all()
        else:
            with contextlib.suppress(BlockingIOError):  # it has rung more often than it can count
                os.eventfd_write(bell.fds[0], 1)

    def do_all(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fileno())
        self._do_all()

    def _do_all(self) -> None:
        while True:
            try:
                job = self._jobs.popleft()
            except IndexError:
                return
            job()

    def end(self) -> None:
        """End with the owner: the poster of a later job does it at once."""
        self._bell = None
        self._do_all()

    def abandon(self) -> None:
        """Do no more jobs: this is a forked child."""
        self._jobs = deque()
        if self._bell is not None:
            self._bell.close()
