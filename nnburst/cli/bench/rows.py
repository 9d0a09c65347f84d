"""Every row, in the order of the table, which is also the order inside a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial

from .burst import BURST_CASES, PAYLOAD_CASES
from .case import Bench, Case, Subject
from .flights import FLIGHT_CASES
from .peers import PEER_CASES
from .sampling import line_samples


@contextmanager
def _open_line(bench: Bench) -> Iterator[Subject]:
    yield Subject(partial(line_samples, bench.cpus))


def all_cases() -> tuple[Case, ...]:
    """Return every row. Rows that are compared with each other stand close together."""
    line = Case("line", "a", "L: one cache line, C", "poll", 8, _open_line)
    return (line, *BURST_CASES, *FLIGHT_CASES, *PEER_CASES, *PAYLOAD_CASES)


def select(cases: tuple[Case, ...], patterns: tuple[str, ...]) -> tuple[Case, ...]:
    """Return the rows whose key or group matches any of the patterns (``*`` allowed), or all of them for none."""
    if not patterns:
        return cases
    return tuple(c for c in cases if any(fnmatch(c.key, p) or c.group == p for p in patterns))
