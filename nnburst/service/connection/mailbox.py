"""Jobs that threads, signal handlers and finalisers give to the one thread that owns a connection.

A signal handler may interrupt the main thread between any two steps. It may raise there, or make a call itself and
wait for the answer. A finaliser runs in any thread, whatever locks that thread holds. So the threads that use a
connection touch no part of it: they post a job, and the connection's owner does it.

Posting is one append to a deque, which is atomic in the interpreter, and one write to an eventfd. The owner is not
the main thread, so no signal handler interrupts it, and its code needs no locks. The owner must not wait for an
answer; a finaliser that the collector runs in the owner only posts.

There is one exception: a worker thread sends its answer itself (see `outbox`).

Once the owner has ended, the thread that posts does the job itself; the job then only reports the end.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from ..._core.fds import FdSet

Job = Callable[[], None]


class Mailbox:
    """Jobs for the owner of a connection."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._bell: FdSet | None = FdSet.made(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return a descriptor that is readable while jobs wait."""
        assert self._bell is not None
        return self._bell.fds[0]

    def post(self, job: Job) -> None:
        """Have the owner do a job, in the order of posting. May be called from anywhere; never waits."""
        self._jobs.append(job)
        bell = self._bell  # this reference keeps the descriptor open: its number stays taken
        if bell is None:
            self._do_all()
        else:
            with contextlib.suppress(BlockingIOError):  # the eventfd's counter is full
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
        """Note that the owner ends: later jobs are done at once, by the thread that posts them."""
        self._bell = None
        self._do_all()

    def abandon(self) -> None:
        """Drop all jobs, now and later: this is a forked child."""
        self._jobs = deque()
        if self._bell is not None:
            self._bell.close()
