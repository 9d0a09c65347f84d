"""A few threads that serve the calls of one connection."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

from ..errors import ResourceExhausted

__all__ = ["Workers"]

_log = logging.getLogger(__name__)


class Workers:
    """Runs jobs on at most `limit` daemon threads, which start when they are needed.

    Daemon threads, because a job may be inside a device that never returns, and that must not keep a process alive.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._condition = threading.Condition()
        self._jobs: deque[Callable[[], None]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    @property
    def backlog(self) -> int:
        """Jobs that no thread has taken up yet."""
        return len(self._jobs)

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job; False (and the job is not taken) once `stop` was called."""
        with self._condition:
            if self._closed:
                return False
            self._jobs.append(job)
            if self._idle >= len(self._jobs):
                self._condition.notify()
            elif len(self._threads) < self._limit:
                self._start_thread()
            return True

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name=f"{self._name}-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread for us; those that are there will come to the job
            if not self._threads:
                self._jobs.clear()
                raise ResourceExhausted(f"{self._name}: {error}") from error
            return
        self._threads.append(thread)

    def stop(self) -> list[Callable[[], None]]:
        """Let the threads end after their present job; returns the jobs that will not run. Idempotent."""
        with self._condition:
            self._closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._condition.notify_all()
        return left

    def join(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds in all for the threads to end; never waits for the calling one."""
        return all(_join(thread, timeout) for thread in self._threads if thread is not threading.current_thread())

    def _run(self) -> None:
        while True:
            with self._condition:
                self._idle += 1
                while not self._jobs and not self._closed:
                    self._condition.wait()
                self._idle -= 1
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            try:
                job()
            except BaseException:  # also SystemExit: there is no one else to do the next job
                _log.exception("a job of %s failed", self._name)
            del job  # an idle thread must not keep what its last job held


def _join(thread: threading.Thread, timeout: float) -> bool:
    thread.join(timeout)
    return not thread.is_alive()
