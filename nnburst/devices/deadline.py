"""Deadlines of calls to a device, in absolute nanoseconds of CLOCK_MONOTONIC; 0 for none."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from .._core.threads import start
from ..errors import MissedDeadline

_NEVER = 2**63 - 1


def is_limit(deadline_ns: int) -> bool:
    """Return True if a deadline is a limit: neither 0 nor the largest time."""
    return 0 < deadline_ns < _NEVER


def deadline_passed(deadline_ns: int) -> bool:
    return is_limit(deadline_ns) and time.monotonic_ns() >= deadline_ns


def require_time(deadline_ns: int) -> None:
    if deadline_passed(deadline_ns):
        raise MissedDeadline("the deadline has passed; give it more time")


def earlier(one: int, other: int) -> int:
    return min(one, other) if one and other else one or other


@contextlib.contextmanager
def call_at(deadline_ns: int, call: Callable[[], object]) -> Iterator[None]:
    """Call a function in another thread at a deadline, unless the with block ends first.

    The call may still happen just after the block.

    Raises:
        ResourceExhausted: The system cannot start a thread.
    """
    left = max(0, deadline_ns - time.monotonic_ns()) / 1e9
    timer = threading.Timer(min(left, threading.TIMEOUT_MAX), call)
    timer.daemon = True
    start(timer, "a deadline")
    try:
        yield
    finally:
        timer.cancel()
