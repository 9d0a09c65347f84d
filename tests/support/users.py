"""Functions that run code as another user, for tests that root runs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
GUEST, OTHER_GUEST = 65534, 65532
"""Ids of two users without other processes or files."""


@contextlib.contextmanager
def open_directory() -> Iterator[Path]:
    """Make a directory that all users can list. They cannot list pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="nnburst-", dir="/tmp", ignore_cleanup_errors=True) as place:
        os.chmod(place, 0o755)
        yield Path(place)


def become(uid: int, saved: int | None = None) -> None:
    """Become another user. With `saved`, `os.seteuid(saved)` returns to the user `saved`."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid if saved is None else saved)


def as_user(uid: int | None, function: Callable[[], object]) -> str:
    """Run a function in a forked child, as user `uid` if given. Return its result or error as text."""
    with _child(uid, lambda tell, stay: tell(str(function()))) as said:
        return said()


def in_forked_child(check: Callable[[], object]) -> None:
    """Run checks in a forked child. Fail if a check fails."""
    assert (said := as_user(None, check)) == "None", said


@contextlib.contextmanager
def beside(uid: int | None, doing: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Keep a forked child inside the context `doing()` during the ``with`` block, as user `uid` if given."""

    def child(tell: Callable[[str], None], stay: Callable[[], None]) -> None:
        with doing():
            tell("there")
            stay()

    with _child(uid, child) as said:
        assert (answer := said()) == "there", answer
        yield


@contextlib.contextmanager
def _child(
    uid: int | None, function: Callable[[Callable[[str], None], Callable[[], None]], None]
) -> Iterator[Callable[[], str]]:
    reading, writing = os.pipe()
    waiting, leaving = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(leaving)
        os.close(reading)

        def tell(said: str) -> None:
            with open(writing, "w") as answer:
                answer.write(said)

        try:
            if uid is not None:
                become(uid)
            function(tell, lambda: os.read(waiting, 1) and None)
        except BaseException as error:
            with contextlib.suppress(OSError):
                tell(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)
    os.close(writing)
    os.close(waiting)
    try:
        with open(reading) as answer:
            yield answer.read
    finally:
        os.close(leaving)
        os.waitpid(pid, 0)
