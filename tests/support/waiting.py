"""Waiting in tests. The time limit only ends a hang and never judges speed, so slow machines may raise it."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

PATIENCE = float(os.environ.get("NNBURST_TEST_PATIENCE", "60"))
"""Time limit in seconds. `make test-aarch64` sets the variable, because an emulator is slow and may pause for minutes.
The C tests also read it (`tests/c/check.h`)."""


def until(holds: Callable[[], Any], what: str | Callable[[], object] = "", seconds: float = PATIENCE) -> Any:
    """Call a function repeatedly until its result is true, and return the result.

    Args:
        holds: The function.
        what: Error message after the time limit, or a function that returns the message.
        seconds: Time limit.
    """
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, what() if callable(what) else what or "what is awaited does not come"
        time.sleep(0.001)
    return found


class Held:
    """A function whose calls wait for the event `go_on`, and then return `answer`."""

    def __init__(self, answer: object = None) -> None:
        self.answer = answer
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> Any:
        self.entered.set()
        assert self.go_on.wait(PATIENCE)
        return self.answer


class Background:
    """A call in a thread. `result` waits for its end, and returns its result or exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            self._outcome.append(call())
        except Exception as error:
            self._outcome.append(error)

    @property
    def native_id(self) -> int | None:
        return self._thread.native_id

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(PATIENCE)
        assert self._outcome, "the call did not come back"
        return self._outcome[0]


@contextlib.contextmanager
def handling(number: int, handler: Callable[..., object]) -> Iterator[None]:
    """Install a signal handler for the ``with`` block. At the end, stop the timer of `signal.setitimer`."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(number, before)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Turn off the garbage collector for the ``with`` block."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextlib.contextmanager
def meanwhile(work: Callable[[], Any]) -> Iterator[None]:
    """Repeat a call in a thread during the ``with`` block."""
    stop = threading.Event()

    def repeat() -> None:
        while not stop.is_set():
            work()

    running = Background(repeat)
    try:
        yield
    finally:
        stop.set()
        assert running.result() is None


def together(count: int, work: Callable[[int], Any]) -> None:
    """Call a function with each number below `count`, each in its own thread. Fail if a call raises."""
    running = [Background(functools.partial(work, number)) for number in range(count)]
    assert [each.result() for each in running] == [None] * count
