"""Functions that start threads, and a thread for blocking jobs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial

from ..errors import BadState, ResourceExhausted
from .deadline import Deadline
from .leaving import process_lock
from .log import warn

_LINGER = 1.0
"""Seconds that a thread waits for the next job before it ends."""

_PATCHED = (
    ("threading", "get_ident"),
    ("queue", "SimpleQueue"),
    ("select", "select"),
    ("os", "fork"),
    ("subprocess", "Popen"),
)
"""The modules that gevent and eventlet can patch, each with the name of a function or class that a patch replaces."""


def start(thread: threading.Thread, what: str) -> None:
    """Start a thread for the work that `what` names in error messages.

    Raises:
        BadState: gevent or eventlet would start a greenlet, which does not run while another thread waits in C.
        ResourceExhausted: The system cannot start another thread.
    """
    for module, name in _PATCHED:
        found = getattr(sys.modules.get(module), name, None)
        library = getattr(found, "__module__", "").partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise BadState(
                f"{what} needs a thread, and {library} has patched {module}: use workers with threads "
                f"(gunicorn -k gthread), or have it patch sockets alone (docs/faq.md)"
            )
    try:
        if sys.is_finalizing():  # Before Python 3.12, start() would wait forever.
            raise RuntimeError("can't create new thread at interpreter shutdown")
        thread.start()
    except (RuntimeError, MemoryError) as error:
        raise ResourceExhausted(f"{what} needs a thread: {error}") from error


def start_daemon(target: Callable[..., object], *args: object, name: str, what: str) -> threading.Thread:
    """Start a daemon thread, so that a device call that never returns does not keep the process alive."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    start(thread, what)
    return thread


class JobThread:
    """A thread that runs blocking jobs one by one, each when it is due. It ends after a second without jobs."""

    def __init__(self) -> None:
        self._changed = threading.Condition(process_lock())
        self._jobs: dict[object, tuple[int, Callable[[], None]]] = {}
        self._thread: threading.Thread | None = None

    def do(self, job: Callable[[], None], due: Deadline = Deadline.never) -> Callable[[], object]:
        """Pass a job to the thread.

        If no thread can be started, a job that is due at once runs in the calling thread. Any other job is dropped with
        a warning.

        Args:
            job: A function that raises nothing.
            due: Time to start the job. With `Deadline.never`, it starts at once.

        Returns:
            A function that cancels the job if it has not begun.
        """
        key = object()
        take_back = partial(self._jobs.pop, key, None)
        with self._changed:
            self._jobs[key] = due.at_ns, job
            self._changed.notify_all()
            if self._thread is not None and self._thread.is_alive():
                return take_back
            try:
                self._thread = start_daemon(self._run, name="nnburst-jobs", what="what a run came to")
                return take_back
            except ResourceExhausted as error:
                take_back()
                if due.at_ns:
                    warn("nnburst.runtime", "a time limit does not hold: %s", error)
        if not due.at_ns:
            job()
        return take_back

    def _run(self) -> None:
        while (job := self._wait_for_job()) is not None:
            job()
            del job  # The job's references must not live until the next job.

    def _wait_for_job(self) -> Callable[[], None] | None:
        """Wait for the next due job and return it; None after `_LINGER` seconds without a job."""
        end = Deadline.after(_LINGER)
        with self._changed:
            while True:
                first = min(self._jobs.copy().items(), key=lambda item: item[1][0], default=None)
                left = end.left() if first is None else Deadline(first[1][0]).left()
                if left:
                    self._changed.wait(min(left, _LINGER))  # A cancelled job sends no wake-up.
                elif first is None:
                    self._thread = None
                    return None
                elif (job := self._jobs.pop(first[0], None)) is not None:
                    return job[1]
