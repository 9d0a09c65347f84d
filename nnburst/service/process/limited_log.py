"""The log of a service. Lines that clients cause repeatedly are written a few times, then only counted."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from ..._core.fds import FdSet, wait_readable

LINES = 10
"""Maximum number of lines from one place in the code in a `PERIOD`; further lines are only counted."""
PERIOD = 10.0
LONGEST = 4000
"""Maximum characters of a line with its traceback; the rest is cut off."""
_BYTES = 4 * LONGEST
_LAST_WORDS = 1 << 16
"""Maximum bytes of output to read after a process has ended: as many as fit into a pipe."""
_OWN_LINE = re.compile(r"nnburst service \d+: (DEBUG|INFO|WARNING|ERROR|CRITICAL): (.*)")


@dataclass(slots=True)
class _Place:
    """A place in the code that logs lines.

    Attributes:
        left_out: Lines left out and not yet reported.
    """

    since: float
    written: int = 0
    left_out: int = 0


class LimitedHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler that writes to stderr, with a limit, so that clients cannot flood the log.

    Args:
        lines: Maximum number of lines from one place in the code in a period.
    """

    def __init__(self, lines: int = LINES) -> None:
        super().__init__()
        self._lines = lines
        self._places: dict[tuple[str, int], _Place] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or only count it if there are too many. Report earlier counts first."""
        now = time.monotonic()
        self._report_left_out(now - PERIOD)
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now))
        if now - place.since >= PERIOD:
            place.since, place.written = now, 0
        if place.written < self._lines:
            place.written += 1
            super().emit(record)
        else:
            place.left_out += 1

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if isinstance(self.formatter, JsonLines):  # this formatter cuts each field instead
            return text
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}… ({len(text) - LONGEST} characters more)"

    def close(self) -> None:
        """Report the lines that were left out and not yet reported."""
        self.acquire()
        try:
            self._report_left_out(time.monotonic())
        finally:
            self.release()
        super().close()

    def _report_left_out(self, ended: float) -> None:
        """Report the lines left out in periods that began at or before `ended`."""
        for (path, line), place in self._places.items():
            if place.left_out and place.since <= ended:
                where = f"{os.path.basename(path)}:{line}" if line else path
                text = f"%d lines from {where}, like those before, were left out"
                super().emit(logging.LogRecord("nnburst", logging.WARNING, path, line, text, (place.left_out,), None))
                place.left_out = 0


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage()[:LONGEST],
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[-LONGEST:]
        return msgspec.json.encode(entry).decode()


def begin_log(who: str, level: str | int, form: str = "text") -> None:
    """Log to stderr from now on, as text that begins with the process's name, or as JSON."""
    handler = LimitedHandler()
    text = f"{who} %(process)d: %(levelname)s: %(message)s"
    handler.setFormatter(JsonLines() if form == "json" else logging.Formatter(text))
    logging.basicConfig(level=level, handlers=[handler])
    each = logging.StreamHandler()  # it has no limit, because the operator asks for a line per request
    each.setFormatter(handler.formatter)
    requests = logging.getLogger("nnburst.access")
    requests.addHandler(each)
    requests.propagate = False


def forward_output(fds: FdSet, what: str, most: int, count: Callable[[], object]) -> None:
    """Copy a process's output to this process's log. Control characters become spaces.

    Args:
        fds: The readable end of the output, and a pidfd of the process. This function closes them.
        what: Name of the process in the log.
        most: Maximum number of lines in a period; further lines are left out.
        count: Called for each line, even if it is left out.
    """
    with contextlib.closing(fds), contextlib.closing(LimitedHandler(most)) as handler:
        if any(isinstance(each.formatter, JsonLines) for each in logging.getLogger().handlers):
            handler.setFormatter(JsonLines())
        for text in _lines(*fds.fds):
            count()
            handler.handle(logging.LogRecord("nnburst", logging.WARNING, what, 0, "%s", (text,), None))


def log_lines(fds: FdSet, logger: logging.Logger) -> None:
    """Log a service's lines at the levels that they name. For `fds`, see `forward_output`."""
    with contextlib.closing(fds):
        for text in _lines(*fds.fds):
            own = _OWN_LINE.match(text)
            level, text = (logging.getLevelNamesMapping()[own[1]], own[2]) if own else (logging.WARNING, text)
            logger.log(level, "%s", text)


def _lines(log: int, pidfd: int) -> Iterator[str]:
    for line in _read_lines(log, pidfd):
        yield "".join(c if c.isprintable() else " " for c in line.decode(errors="replace"))


def _read_lines(log: int, pidfd: int) -> Iterator[bytes]:
    """Yield lines until the process has ended. Lines that other processes write to the pipe later are not read."""
    rest, most = b"", math.inf
    while most > 0:
        found = wait_readable((log, pidfd))
        if pidfd in found and most == math.inf:
            most = _LAST_WORDS
        if log not in found or not (data := os.read(log, _BYTES)):
            break
        most -= len(data)
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) >= _BYTES:
            lines, rest = [*lines, rest], b""
        yield from lines
    if rest:
        yield rest
