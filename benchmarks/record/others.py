"""Measurement of the CPU time that other programs take."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path


def watch_others(cpus: Collection[int]) -> Callable[[], float]:
    """Return a function that returns the share of CPU time that other programs and the host took since this call."""
    start, busy = time.monotonic(), _busy_seconds(cpus) - _own_seconds()

    def share() -> float:
        others = _busy_seconds(cpus) - _own_seconds() - busy
        return max(0.0, others / (time.monotonic() - start) / len(cpus))

    return share


def _busy_seconds(cpus: Collection[int]) -> float:
    """Return the seconds that these CPUs have been busy since the machine started, including time taken by the host.

    Source: proc_stat(5).
    """
    names = {f"cpu{cpu}" for cpu in cpus}
    rows = map(str.split, Path("/proc/stat").read_text(encoding="ascii").splitlines())
    ticks = (sum(map(int, (*row[1:4], *row[6:9]))) for row in rows if row[0] in names)  # idle and iowait do not count
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """Return the processor seconds of this process and its descendants, including ended ones.

    Source: proc_pid_stat(5).
    """
    below: dict[str, list[str]] = {}
    ticks = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            below.setdefault(fields[1], []).append(file.parent.name)
            ticks[file.parent.name] = sum(map(int, fields[11:15]))
    own = [str(os.getpid())]
    for pid in own:
        own += below.get(pid, [])
    return sum(ticks[pid] for pid in own) / os.sysconf("SC_CLK_TCK")
