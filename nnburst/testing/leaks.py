"""A check for leaks of descriptors, threads, processes, mappings, shared memory and files."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from ..memory.named import made
from ..service.process import forked

_PATIENCE = 30.0


class Snapshot:
    """A snapshot of everything in this process that can leak.

    Args:
        directories: Directories whose entries are included.

    Example:
        >>> from nnburst.testing.leaks import Snapshot
        >>> before = Snapshot()
        >>> with open("/dev/null"):
        ...     len(Snapshot().added_since(before))
        1
    """

    def __init__(self, directories: Iterable[str | os.PathLike[str]] = ()) -> None:
        self.fds = _descriptors()
        self.threads = set(threading.enumerate())
        self.children = _children()
        self.mappings = _mappings()
        self.files = _files(directories)

    def added_since(self, before: Snapshot) -> list[str]:
        """Return the names of things that an earlier snapshot lacks.

        Args:
            before: An earlier snapshot.
        """
        out: list[str] = []
        if len(self.fds) > len(before.fds):  # descriptors that were only replaced are no leak
            out += [f"fd {fd} -> {what}" for fd, what in self.fds.items() if before.fds.get(fd) != what]
        # An older connection can start its worker threads at any time.
        connected = any(thread.name.startswith("nnburst-client") for thread in before.threads)
        for name in sorted(thread.name for thread in self.threads - before.threads):
            if not (connected and name.startswith("nnburst-client-worker")):
                out.append(f"thread {name}")
        out += [f"child {pid}" for pid in self.children - before.children]
        out += [f"mapping of {name}" for name in (self.mappings - before.mappings).elements()]
        out += [f"file {path}" for path in self.files - before.files]
        return out


@contextlib.contextmanager
def assert_nothing_left(
    directories: Iterable[str | os.PathLike[str]] = (), *, timeout: float = _PATIENCE
) -> Iterator[None]:
    """Return a context manager that fails if its block leaks anything.

    The check covers descriptors, threads, child processes (also zombies), mappings of nnburst's shared memory, and
    names in ``/dev/shm`` that this process made with nnburst.

    An array in shared memory keeps the mapping, even after its session is closed. Delete such variables before the
    end of the block, or put the block's body into a function.

    Args:
        directories: Directories that are checked too. No other program may use them during the block.
        timeout: Seconds to wait for leaks to vanish, such as threads that are about to end.

    Raises:
        AssertionError: Something leaked. The message names the leaks.

    Example:
        >>> from nnburst.testing import assert_nothing_left
        >>> with assert_nothing_left():
        ...     nnburst.Memory.ashmem(16).close()
    """
    watched = tuple(directories)
    before = Snapshot(watched)
    yield
    deadline = time.monotonic() + timeout
    while rest := Snapshot(watched).added_since(before):
        if time.monotonic() > deadline:
            raise AssertionError("left behind: " + ", ".join(rest))
        gc.collect()  # objects in reference cycles are not leaks
        time.sleep(0.005)


def _descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    zygote = forked.current
    for fd in set(os.listdir("/proc/self/fd")) - ({str(zygote.control.fileno())} if zygote else set()):
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is closed by now
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return found


def _children() -> set[str]:
    """Return the children of this process and of the zygote (which forks services), without the zygote itself."""
    zygote = {str(forked.current.process.pid)} if forked.current else set[str]()
    return set().union(*map(_children_of, {"self", *zygote})) - zygote


def _children_of(pid: str) -> set[str]:
    children: set[str] = set()
    with contextlib.suppress(FileNotFoundError):  # a thread or process has ended since
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/task/{task}/children") as file:
                children.update(file.read().split())
    return children


def _mappings() -> Counter[str]:
    names: Counter[str] = Counter()
    with open("/proc/self/maps") as file:
        for line in file:
            fields = line.split(maxsplit=5)
            if len(fields) > 5 and "s" in fields[1] and "nnburst" in fields[5]:
                names[fields[5].strip()] += 1
    return names


def _files(directories: Iterable[str | os.PathLike[str]]) -> set[str]:
    """Return the directories' entries, and the names of shared memory that this process made."""
    found: set[str] = set()
    for directory in directories:
        found.update(os.path.join(directory, name) for name in os.listdir(directory))
    found.update(path for path in (f"/dev/shm{name}" for name in tuple(made)) if os.path.exists(path))
    return found
