"""Where things run: CPUs, pinning of whole processes, a directory, and the conditions of a run in words."""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

APART = "apart"
"""Client and server on a CPU each."""

ONE_CORE = "one core"
"""Client and server share the client's CPU."""


@dataclass(frozen=True, slots=True)
class Cpus:
    """The pair of CPUs of a run.

    Attributes:
        client: Runs the caller, and the servers of the one-core rows.
        server: Runs the servers of the rows that are apart; equal to `client` if there is only one CPU.
    """

    client: int
    server: int

    @property
    def two(self) -> bool:
        return self.client != self.server

    def of_server(self, placement: str) -> int:
        """Return the CPU that a server of this placement is pinned to."""
        return self.server if placement == APART else self.client


def allowed_cpus() -> Cpus:
    """Return the first two CPUs that this process may use."""
    cpus = sorted(os.sched_getaffinity(0))
    return Cpus(cpus[0], cpus[1] if len(cpus) > 1 else cpus[0])


def _threads(pid: int) -> set[int]:
    return {int(entry) for entry in os.listdir(f"/proc/{pid}/task")}


def pin_process(pid: int, cpus: set[int]) -> None:
    """Pin every thread of a process, including those that appear meanwhile."""
    pinned: set[int] = set()
    while new := _threads(pid) - pinned:
        for thread in new:
            with suppress(ProcessLookupError):  # a thread may end between the listing and the call
                os.sched_setaffinity(thread, cpus)
        pinned |= new


@contextmanager
def keep_affinity() -> Iterator[None]:
    """Put every thread of this process back on the CPUs that it had on entry."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        pin_process(os.getpid(), before)


@contextmanager
def scratch_directory() -> Iterator[str]:
    """Make a directory for the files of a run. It goes, whenever a signal ends the run: also while it is made."""
    path = os.path.join(tempfile.gettempdir(), f"nnburst-bench-{secrets.token_hex(16)}")
    try:
        os.mkdir(path, 0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _cpu_model() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Processor", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()


def _first_line(path: str, default: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return default


def _is_virtual() -> bool:
    with suppress(OSError):
        return "hypervisor" in Path("/proc/cpuinfo").read_text()
    return False


def _bytecode() -> str:
    """Say whether the package's modules lie there compiled; if not, each process of a run compiles them anew."""
    specs = [module.__spec__ for name, module in sorted(sys.modules.items()) if name.partition(".")[0] == "nnburst"]
    kept = [os.path.exists(spec.cached) for spec in specs if spec is not None and spec.cached]
    words = f"{sum(kept)} of {len(kept)} modules lie in __pycache__ compiled"
    return words + ("; PYTHONDONTWRITEBYTECODE keeps the rest from it" if sys.dont_write_bytecode else "")


def conditions(cpus: Cpus, polling_window: float) -> dict[str, str | int | float | list[int]]:
    """Describe the machine and the placement of a run."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "virtual_machine": _is_virtual(),
        "allowed_cpus": sorted(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "clocksource": _first_line("/sys/devices/system/clocksource/clocksource0/current_clocksource", "unknown"),
        "governor": _first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "not exposed"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "bytecode": _bytecode(),
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "client_cpu": cpus.client,
        "server_cpu": cpus.server,
        "polling_window_us": polling_window * 1e6,
    }
