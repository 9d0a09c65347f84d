"""Exceptions that are raised in running threads at any step, by the thousand: the next call is right, nothing hangs."""

from __future__ import annotations

import ctypes
import itertools
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import nnburst
from nnburst._core.deadline import Deadline
from nnburst._core.threads import start_daemon
from nnburst.runtime.run.permits import Permits
from support.models import relu
from support.waiting import PATIENCE


@pytest.fixture
def storm(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None], int], None]:
    """Calls a function in four threads, again and again, until KeyboardInterrupt has hit them so many times."""
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def storm(use: Callable[[int], None], times: int) -> None:
        ending, hits, failures = threading.Event(), list[int](), list[BaseException]()

        def run(which: int) -> None:
            while not ending.is_set():
                try:
                    while not ending.is_set():
                        use(which)
                except KeyboardInterrupt:
                    hits.append(which)
                except BaseException as error:
                    failures.append(error)

        threads: dict[int, threading.Thread] = {}
        for which in itertools.cycle(range(4)):
            if len(hits) >= times or failures:
                break
            if which not in threads or not threads[which].is_alive():  # it was hit outside
                threads[which] = start_daemon(run, which, name="interrupted", what="this test")
            number = ctypes.c_ulong(threads[which].ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(number, ctypes.py_object(KeyboardInterrupt))
            time.sleep(0)
        ending.set()
        for thread in threads.values():
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert failures == []

    return storm


def test_interrupts_at_any_step_of_threads_that_wait_for_permits_lose_none(storm: Callable[..., None]) -> None:
    home = Permits(2)

    def use(_: int) -> None:
        if (permit := home.take(Deadline.after(PATIENCE))) is not None:
            home.put_back(permit)

    storm(use, 1000)
    assert not home.waiting
    permits = [home.take(Deadline.after(PATIENCE)) for _ in range(2)]
    assert None not in permits
    assert home.take(Deadline.after(0)) is None


@pytest.mark.check
def test_interrupts_at_any_step_of_threads_that_run_leave_the_next_run_right(storm: Callable[..., None]) -> None:
    values, wrong = itertools.count(1), list[object]()
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(relu(), concurrency=2) as session:

        def use(which: int) -> None:
            value = next(values) % 4096
            inputs = {"x": np.full(4, value, np.float32)}
            got = session.run_many([inputs] * 6) if which == 0 else [session.run(None, inputs)]
            wrong.extend(y for (y,) in got if y.tolist() != [value] * 4)

        storm(use, 1000)
        assert wrong == []
        for way in (lambda x: session.run(None, x), lambda x: next(session.run_many([x]))):
            assert way({"x": np.ones(4, np.float32)})[0].tolist() == [1] * 4
        pool = session._pool
        assert len(pool._bursts) <= 2
        assert len(pool._of_rings) == 1  # an interrupted ring ends with its burst
        assert not session._runs.permits.waiting
