"""What a worker takes that neither its own side nor the kernel limits: threads, lines of the log."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator

from ..._core.errno import system
from ..._core.fds import close_fds
from ..._core.leaving import LEAVING
from ..._core.threads import start
from ...watch import Row, usage_of
from ..host.quotas import NO_LIMIT, Quotas
from .cgroup import Group
from .limited_log import LONGEST, LimitedHandler

_LOOK = 1.0
"""Seconds from one look at a worker to the next."""
_BYTES = 4 * LONGEST
"""Of a line, in as many characters at least."""
_LAST_WORDS = 1 << 16
"""Bytes that a pipe holds."""


class Account:
    """Of one worker. Its log is written by a thread; all else is the main thread's.

    Args:
        pid: Of the worker.
        what: It is, for people.
        quotas: Of its user.
        log: Where it can be read what the worker says; owned from now on.
        row: Where others see lines and limits; owned from now on.
        has_limits: Whether it is a user's own.
        group: Where the kernel counts what it takes. Threads that it does not count there, `look` does.

    Attributes:
        next_look: When `look` has something to do.

    Raises:
        ResourceExhausted: There is no thread or descriptor for it.
    """

    def __init__(
        self,
        pid: int,
        what: str,
        quotas: Quotas,
        log: int,
        row: Row | None,
        *,
        has_limits: bool,
        group: Group | None = None,
    ) -> None:
        self.pid, self.group = pid, group
        self._what, self._row, self._quotas = what, row, quotas
        limits = {"threads": quotas.process_threads, "fds": quotas.process_fds, "bytes": quotas.process_bytes}
        for name, most in {**limits, "processors": quotas.processors}.items() if has_limits else ():
            self._count(f"most_{name}", most if most < NO_LIMIT else 0)
        self._count("most_log_lines", quotas.log_lines)
        looks = has_limits and (group is None or "pids" not in group.held)
        self.next_look = time.monotonic() + _LOOK if looks else math.inf
        fds = [log]
        try:
            fds.append(system(os.pidfd_open, pid))
            self._writer = threading.Thread(target=self._write, args=fds, name="nnburst-log", daemon=True)
            start(self._writer, "the log of a worker")
        except BaseException:
            self.close()
            close_fds(fds)
            raise

    def look(self) -> str:
        """Return why the worker is to be ended, or nothing.

        What the kernel counts: a worker that a model has taken over would not count itself.
        """
        now = time.monotonic()
        if now < self.next_look:
            return ""
        self.next_look = now + _LOOK
        if (usage := usage_of(self.pid)) is None:  # it has gone, or there are no descriptors to look with
            return ""
        if usage.threads > self._quotas.process_threads:
            return (
                f"{self._what} has {usage.threads} threads, and may have {self._quotas.process_threads} (nnburst serve "
                "--quota user.process_threads=N)"
            )
        return ""

    def _count(self, name: str, n: int = 1) -> None:
        if self._row is not None:
            self._row.count(name, n)

    def _write(self, log: int, pidfd: int) -> None:
        """Write what the worker says to this process's log, as much as it may, and nothing that a terminal obeys."""
        handler = LimitedHandler(self._quotas.log_lines)
        with open(log, "rb", 0), open(pidfd, "rb", 0), contextlib.closing(handler):
            for line in _lines(log, pidfd):
                self._count("log_lines")
                text = "".join(c if c.isprintable() else " " for c in line.decode(errors="replace"))
                handler.handle(logging.LogRecord("nnburst", logging.WARNING, self._what, 0, "%s", (text,), None))

    def close(self, *, wait: bool = False) -> None:
        """Count the worker no more, which ends. Idempotent.

        Args:
            wait: For its last words: it has ended.
        """
        self.next_look = math.inf
        if self.group is not None:
            self.group.leave(self.pid)
        if self._row is not None:
            self._row.close()
        if wait:
            self._writer.join(LEAVING)


def _lines(log: int, pidfd: int) -> Iterator[bytes]:
    """Yield what comes until the process has ended: others, to whom it may have given the pipe, say nothing more."""
    poll = select.poll()
    for fd in (log, pidfd):
        poll.register(fd, select.POLLIN)
    rest, most = b"", math.inf
    while most > 0:
        ready = dict(poll.poll())
        if pidfd in ready and most == math.inf:
            most = _LAST_WORDS
        if log not in ready or not (said := os.read(log, _BYTES)):
            break
        most -= len(said)
        *lines, rest = (rest + said).split(b"\n")
        if len(rest) >= _BYTES:
            lines, rest = [*lines, rest], b""
        yield from lines
    if rest:
        yield rest
