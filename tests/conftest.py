"""Every test leaves the process as it found it: no descriptor, thread, child or /dev/shm entry more than before."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing import resource_tracker

import pytest

_PATIENCE_S = 5.0
"""How long threads and children may take to end after a test. A hang becomes a failure; nothing sleeps this long."""


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaks(reason): do not check what the module leaves behind, and why")
    # A service that a test starts imports the package: from bytecode in half the time. The tests start hundreds.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    # Started by the first use of multiprocessing and meant to stay: must not look like the leak of one test.
    resource_tracker.ensure_running()


def _descriptors() -> dict[str, str]:
    found: dict[str, str] = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that listed the directory
            continue
    return found


def _children() -> set[str]:
    children: set[str] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                children.update(file.read().split())
        except FileNotFoundError:  # a thread that ended meanwhile
            continue
    return children


def _shm() -> set[str]:
    """Entries of ours: other programs on the machine come and go as they like."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if "nnburst" in name}


def _leftovers(before: tuple[dict[str, str], set[threading.Thread], set[str], set[str]]) -> list[str]:
    fds, threads, children, shm = before
    now = _descriptors()
    # A number that names something else than before is not a leak if the old one is gone; count what is new.
    extra = [f"fd {fd} -> {what}" for fd, what in now.items() if fds.get(fd) != what]
    out = extra if len(now) > len(fds) else []
    # A connection that outlives the test (a fixture of the module has it) starts its workers when it needs them.
    connected = any(thread.name.startswith("nnburst-client") for thread in threads)
    new = [thread.name for thread in set(threading.enumerate()) - threads if thread.name != "nnburst-alarm"]
    out += [f"thread {name}" for name in new if not (connected and name.startswith("nnburst-client-worker"))]
    out += [f"child {pid}" for pid in _children() - children]
    out += [f"/dev/shm/{name}" for name in _shm() - shm]
    return out


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compare descriptors, threads, children and shared memory before and after the test."""
    if request.node.get_closest_marker("leaks"):
        yield
        return
    before = _descriptors(), set(threading.enumerate()), _children(), _shm()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while rest := _leftovers(before):
        if time.monotonic() > deadline:
            pytest.fail("left behind: " + ", ".join(rest))
        gc.collect()  # reference cycles are no leaks
        time.sleep(0.005)
