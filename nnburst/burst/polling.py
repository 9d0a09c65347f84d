"""Constants of a burst and how long its ends poll."""

from __future__ import annotations

import os
from collections.abc import Iterable

import numpy as np

from .._core.deadline import checked_timeout
from .._core.errno import is_real
from ..errors import InvalidArgument

CHANNEL_LENGTH = 1024
"""Datums in each channel unless asked otherwise."""

DATUM = np.dtype((np.void, 24))
"""One element of a burst channel: a 24-byte FmqRequestDatum or FmqResultDatum (docs/WIRE.md)."""

WINDOW_VARIABLE = "NNBURST_POLLING_WINDOW_US"
_DEFAULT_WINDOW = 50e-6
_LONGEST_WINDOW = 60.0  # also the bound of the control plane
_REAL_TIME = {os.SCHED_FIFO, os.SCHED_RR}


def allowed_cpus() -> frozenset[int]:
    """CPUs that this thread may run on."""
    return frozenset(os.sched_getaffinity(0))


def is_real_time() -> bool:
    """Whether this thread gives way to none of the usual policy."""
    return os.sched_getscheduler(0) & 0xFF in _REAL_TIME  # above are flags


def default_polling_window(peer_cpus: Iterable[int] = ()) -> float:
    """Seconds that an end polls before it sleeps: `NNBURST_POLLING_WINDOW_US`, else 50 µs, else 0 on one CPU.

    If both ends may run on one CPU only, the same one, then the peer cannot run while we poll.

    Args:
        peer_cpus: CPUs that the other end may run on, as far as they are known.

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
    """Return `seconds` if it can be a polling window: 0 to 60; else raise `InvalidArgument`."""
    if not is_real(seconds) or not 0 <= seconds <= _LONGEST_WINDOW:
        raise InvalidArgument(
            f"polling_window={seconds!r}: give seconds between 0 (never poll) and {_LONGEST_WINDOW:.0f}"
        )
    return float(seconds)


def loop_timeout_ns(seconds: float | None) -> int:
    """Turn the longest time of a loop into nanoseconds, 0 for the default; `InvalidArgument` if it is not above 0."""
    limit = checked_timeout(seconds)
    if limit == 0:
        raise InvalidArgument("a loop timeout must be above 0 s; None restores the default")
    return 0 if limit is None else max(1, int(min(limit, 1e9) * 1e9))


def window_ns(seconds: float | None, peer_cpus: Iterable[int]) -> int:
    """Polling window in nanoseconds; None means the default towards a peer on those CPUs.

    A thread of a real-time policy is taken off its CPU for no usual one. It polls only towards a peer that has a CPU
    which this thread does not use, whatever was asked for: the peer may be what it keeps from running.
    """
    peer = frozenset(peer_cpus)
    window = default_polling_window(peer) if seconds is None else checked_window(seconds)
    return 0 if is_real_time() and peer <= allowed_cpus() else round(window * 1e9)
