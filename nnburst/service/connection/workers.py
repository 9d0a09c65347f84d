"""A few threads that serve the calls of one connection."""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable

from ..._core.deadline import Deadline
from ..._core.threads import start_daemon
from ...errors import ResourceExhausted

_log = logging.getLogger(__name__)
_END = -1
"""What is to be done after all jobs."""


class Workers:
    """Runs jobs on at most `limit` daemon threads, which start when they are needed. Used by one thread, their owner.

    Jobs that wait are taken up by their rank, the highest first, and in order among equals.

    Daemon threads, because a job may be inside a device that never returns, and that must not keep a process alive.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: queue.PriorityQueue[tuple[int, int, Callable[[], None] | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._threads: list[threading.Thread] = []

    def submit(self, job: Callable[[], None], under_way: int, rank: int = 0) -> None:
        """Queue a job.

        Args:
            under_way: Jobs that are queued or running, with this one.
            rank: 0 or more.

        Raises:
            ResourceExhausted: The system has no thread, and there is none yet; the job is dropped.
        """
        if len(self._threads) < min(under_way, self._limit):
            try:
                self._threads.append(start_daemon(self._run, name=f"{self._name}-{len(self._threads)}", what="a call"))
            except ResourceExhausted:  # those that are there will come to the job
                if not self._threads:
                    raise
        self._put(rank, job)

    def stop(self) -> None:
        """Drop the jobs that no thread has taken up, and let the threads end after their present one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        for _ in self._threads:
            self._put(_END, None)

    def join(self, deadline: Deadline) -> bool:
        """Wait for the threads to end; never for the calling one."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(deadline.left())
                if thread.is_alive():
                    return False
        return True

    def _put(self, rank: int, job: Callable[[], None] | None) -> None:
        self._jobs.put((-rank, next(self._numbers), job))

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            try:
                job()
            except BaseException:  # also SystemExit: there is no one else to do the next job
                _log.exception("a job of %s failed", self._name)
            job = None  # an idle thread must not keep what its last job held
