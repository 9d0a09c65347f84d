"""Constants of bursts, and how long a process polls before it sleeps."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from .._core.deadline import check_timeout
from .._core.errno import is_real
from ..errors import InvalidArgument

CHANNEL_LENGTH = 1024
"""Default length of each channel in datums."""

DATUM = np.dtype((np.void, 24))
"""Type of an element of a burst channel: a 24-byte FmqRequestDatum or FmqResultDatum (docs/WIRE.md)."""

WINDOW_VARIABLE = "NNBURST_POLLING_WINDOW_US"
_DEFAULT_WINDOW = 50e-6
_LONGEST_WINDOW = 60.0  # the control plane has the same bound
_REAL_TIME = {os.SCHED_FIFO, os.SCHED_RR}


def allowed_cpus() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


def default_polling_window(peer_cpus: Iterable[int] = ()) -> float:
    """Return the default polling window in seconds: `NNBURST_POLLING_WINDOW_US`, or 50 µs.

    Without the variable, the window is 0 if both ends may only run on the same CPU.

    Args:
        peer_cpus: CPUs that the other end may run on, if known.

    Raises:
        InvalidArgument: The environment variable is not a number of microseconds.
    """
    text = os.environ.get(WINDOW_VARIABLE)
    if text is not None:
        try:
            return checked_window(float(text) * 1e-6)
        except ValueError as error:
            raise InvalidArgument(f"{WINDOW_VARIABLE}={text!r} is not a number of microseconds ≥ 0") from error
    return _DEFAULT_WINDOW if len(allowed_cpus().union(peer_cpus)) >= 2 else 0.0


def checked_window(seconds: float) -> float:
    """Return `seconds`. Raises `InvalidArgument` unless it is a polling window of 0 to 60 s."""
    if not is_real(seconds) or not 0 <= seconds <= _LONGEST_WINDOW:
        raise InvalidArgument(
            f"polling_window={seconds!r}: give seconds between 0 (never poll) and {_LONGEST_WINDOW:.0f}"
        )
    return float(seconds)


def loop_timeout_ns(seconds: float | None) -> int:
    """Return a loop timeout in nanoseconds; None, the default, becomes 0. Raises `InvalidArgument` for 0 s or less."""
    limit = check_timeout(seconds)
    if limit == 0:
        raise InvalidArgument("a loop timeout must be above 0 s; None restores the default")
    return 0 if limit is None else max(1, int(min(limit, 1e9) * 1e9))


def window_ns(seconds: float | None, peer_cpus: Iterable[int]) -> int:
    """Return a polling window in nanoseconds; None means the default.

    A real-time thread never polls if the peer may only run on the thread's CPUs, because polling could keep the peer
    from running.
    """
    peer = frozenset(peer_cpus)
    window = default_polling_window(peer) if seconds is None else checked_window(seconds)
    is_real_time = os.sched_getscheduler(0) & 0xFF in _REAL_TIME  # the upper bits are flags
    return 0 if is_real_time and peer <= allowed_cpus() else round(window * 1e9)
