"""The resources of a process, as the kernel counts them."""

from __future__ import annotations

import os
import time

from msgspec import Struct

_CLOCK_OF_PROCESS = 2
_DATA = 5  # index of the field in /proc/PID/statm


class Usage(Struct, frozen=True):
    """The resources that a process uses.

    Attributes:
        bytes: Private memory, as RLIMIT_DATA counts it.
        threads, fds: Number of threads and of descriptors.
        processor_ns: Processor time in nanoseconds.
    """

    bytes: int
    threads: int
    fds: int
    processor_ns: int


def usage_of(pid: int) -> Usage | None:
    """Return a process's usage; None if the process has ended or cannot be examined."""
    directory = f"/proc/{pid}"
    try:
        with open(f"{directory}/statm", "rb") as statm:
            pages = int(statm.read().split()[_DATA])
        # From Linux 6.2 on, `st_size` is the number of descriptors.
        fds = os.stat(f"{directory}/fd").st_size or len(os.listdir(f"{directory}/fd"))
        threads = os.stat(f"{directory}/task").st_nlink - 2
        return Usage(
            pages * os.sysconf("SC_PAGE_SIZE"), threads, fds, time.clock_gettime_ns(~pid << 3 | _CLOCK_OF_PROCESS)
        )
    except (OSError, IndexError):
        return None
