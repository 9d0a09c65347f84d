"""Jobs that threads, signal handlers and finalisers give to the one thread that owns a connection.

Because signal handlers and finalisers may interrupt threads (`nnburst._core.leaving`), only one thread changes a
connection. Posting is one append to a deque, which is atomic in the interpreter, and one write to an eventfd. No
signal handler interrupts the owner, so its code needs no locks. The owner must not wait for an answer.

When the owner has ended, each thread that posts a job does the job itself. The job then only reports the end.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable

from ..._core.fds import FdSet

Job = Callable[[], None]


class Mailbox:
    """Jobs for the thread that owns a connection."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._bell: FdSet | None = FdSet.create(os.eventfd, 0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def fileno(self) -> int:
        """Return a descriptor that is readable while jobs wait."""
        assert self._bell is not None
        return self._bell.fds[0]

    def post(self, job: Job) -> None:
        """Give the owner a job, without waiting. Any thread, signal handler or finaliser may call it."""
        self._jobs.append(job)
        bell = self._bell  # this reference keeps the descriptor open, so that its number is not reused
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
        """Do the remaining jobs, because the owner ends. A thread that posts a job later does the job itself."""
        self._bell = None
        self._do_all()

    def abandon(self) -> None:
        """Drop all jobs, because this is a forked child."""
        self._jobs = deque()
        if self._bell is not None:
            self._bell.close()
