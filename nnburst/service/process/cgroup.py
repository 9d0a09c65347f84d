"""Control groups for each user's workers, if a part of the cgroup hierarchy is delegated to the service."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Container
from pathlib import Path

from ..host.quotas import NO_LIMIT, Quotas

_log = logging.getLogger(__name__)
_OWN = Path("/proc/self")
_CONTROLLERS = "cpu", "memory", "pids"
_PERIOD = 100_000
"""Period of cpu.max, in microseconds."""
_MOST_TASKS = 1 << 22
_BROKER = "broker"
NICENESS = 5
"""Niceness of a user's group, relative to the group of the operator's models."""


class Group:
    """The control group of one user's workers, or of the shared worker.

    Args:
        directory: The group's directory in the cgroup hierarchy; it may already exist.
        held: Controllers that are enabled in the group.
        quotas: Quotas of the user; None for no limits.

    Raises:
        OSError: The kernel refuses the group or a limit.
    """

    def __init__(self, directory: Path, held: frozenset[str], quotas: Quotas | None) -> None:
        self.held, self._directory = held, directory
        directory.mkdir(exist_ok=True)
        for name, most in () if quotas is None else _limits(quotas).items():
            has_file = name != "memory.swap.max" or (directory / name).exists()  # it is absent if swap is not counted
            if name.partition(".")[0] in held and has_file:
                self.write(name, most)
        self._killed = self._events()

    def write(self, name: str, text: object) -> None:
        (self._directory / name).write_text(str(text))

    def _events(self) -> dict[str, int]:
        with contextlib.suppress(OSError):
            lines = (self._directory / "memory.events").read_text().splitlines()
            return {name: int(n) for name, n in map(str.split, lines)}
        return {}

    def why_killed(self) -> str:
        """Return a sentence if the kernel has killed a member for lack of memory since the last call, else ""."""
        before, self._killed = self._killed, self._events()
        rose = {name for name, n in self._killed.items() if n > before.get(name, 0)}
        if "oom_kill" not in rose:
            return ""
        if "oom" in rose:
            return (
                "the kernel ended it: the memory of its user, with shared memory that it was the first to use, went "
                "over process_bytes (nnburst serve --quota user.process_bytes=N)"
            )
        return "the kernel ended it, since the machine or the service's own group is short of memory"

    def remove(self) -> bool:
        """Remove the group. Return False if a process is still in it."""
        with contextlib.suppress(OSError):
            self._directory.rmdir()
        return not self._directory.exists()


class Groups:
    """The control groups of one service, below its own group. Safe to use from any thread.

    Args:
        directory: The service's own group.
        held: Controllers that the groups have.
    """

    def __init__(self, directory: Path, held: frozenset[str]) -> None:
        self.held, self._directory = held, directory
        self._lock = threading.Lock()
        self._groups: dict[str, Group] = {}

    def __str__(self) -> str:
        return f"{self._directory} ({', '.join(sorted(self.held)) or 'no controllers'})"

    def add_worker(self, pid: int, uid: int | None, quotas: Quotas) -> Group | None:
        """Move a worker into the group of user `uid`; None stands for the shared group, which has no limits.

        Returns:
            The group, or None if the kernel refuses it.
        """
        name = "named" if uid is None else f"user-{uid}"
        with self._lock:
            try:
                group = self._groups.get(name)
                if group is None:
                    limits = None if uid is None else quotas
                    group = self._groups[name] = Group(self._directory / name, self.held, limits)
                group.write("cgroup.procs", pid)
            except OSError as error:
                _log.warning("process %d is not in the group %s/%s: %s", pid, self._directory, name, error)
                return None
            return group

    def sweep(self, used: Container[Group | None]) -> bool:
        """Remove groups whose workers have ended. Return True if some still contain processes.

        Args:
            used: Groups to keep.
        """
        with self._lock:
            left = {name for name, group in self._groups.items() if group not in used}
            removed = {name for name in left if self._groups[name].remove()}
            for name in removed:
                del self._groups[name]
            return left != removed


def own_groups(own: Path = _OWN) -> Groups | None:
    """Return the groups of this service; None if no group is delegated to it.

    This process moves into a group of its own, beside the groups of the workers.

    A delegated group, such as a container's, is one that this process may change and that has no other processes. Root
    may change every group, so for root the service manager's mark (``Delegate=``) decides.

    Args:
        own: This process's directory in /proc.
    """
    try:
        directory = _own_directory(own)
        if directory is None or not _is_ours(directory):
            return None
        leaf = directory / _BROKER  # a group with controllers for subgroups may have no members itself
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        there = (directory / "cgroup.controllers").read_text().split()
        for controller in filter(there.__contains__, _CONTROLLERS):
            with contextlib.suppress(OSError):  # `held` shows which were enabled
                (directory / "cgroup.subtree_control").write_text(f"+{controller}")
        held = (directory / "cgroup.subtree_control").read_text().replace("+", "").split()
        return Groups(directory, frozenset(held) & frozenset(_CONTROLLERS))
    except OSError as error:
        _log.warning("accounts are not the kernel's: %s", error)
        return None


def _own_directory(own: Path) -> Path | None:
    groups = (line.partition("::") for line in (own / "cgroup").read_text().splitlines())
    path = next((path for number, _, path in groups if number == "0"), "")
    for line in (own / "mountinfo").read_text().splitlines() if path else ():
        mount, _, kind = line.partition(" - ")
        root, place = mount.split()[3:5]
        if kind.startswith("cgroup2 ") and Path(path).is_relative_to(root):
            return Path(place) / Path(path).relative_to(root)
    return None


def _is_ours(directory: Path) -> bool:
    if not (directory / "cgroup.events").exists():  # this is the machine's root group
        return False
    if (directory / "cgroup.procs").read_text().split() != [str(os.getpid())]:
        return False
    is_root_of_container = os.path.ismount(directory)
    if os.geteuid() == 0 and not is_root_of_container and not _is_marked(directory):
        return False
    files = (directory, directory / "cgroup.procs", directory / "cgroup.subtree_control")
    return all(os.access(file, os.W_OK) for file in files)


def _is_marked(directory: Path) -> bool:
    """Return True if the service manager has marked a group as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        with contextlib.suppress(OSError):
            if os.getxattr(directory, name) == b"1":
                return True
    return False


def _limits(quotas: Quotas) -> dict[str, object]:
    def below(number: int, no_limit: int, times: int = 1) -> object:
        return number * times if number < no_limit else "max"

    return {
        "memory.max": below(quotas.process_bytes, NO_LIMIT),
        "memory.swap.max": "max" if quotas.process_bytes >= NO_LIMIT else 0,
        "pids.max": below(quotas.process_threads, _MOST_TASKS),
        "cpu.weight.nice": NICENESS,
        "cpu.max": f"{below(max(quotas.processors, 1), os.cpu_count() or 1, _PERIOD)} {_PERIOD}",
    }
