"""Rounds: every row gets a short turn in each, with L measured right before and right after its turn.

The CPUs of a virtual machine move while a benchmark runs, and a cache line then takes several times as long for a
while. So the rows take turns, each turn knows its own L, and rows are compared within a round.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np

from ...errors import MissedDeadline
from .case import Bench, Case, Subject
from .placement import Cpus, keep_affinity, pin_process, scratch_directory
from .sampling import Result, Round, line_samples

_WATCHDOG_SECONDS = 60.0
_LINE_COUNT = 400
_CALIBRATION_CALLS = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        rounds: How many turns every row gets.
        count: Samples per row over all rounds, unless they take too long.
        turn_seconds: A turn is cut to about this long.
    """

    rounds: int
    count: int
    turn_seconds: float


class _Hang(Exception):
    """The watchdog: a peer gave no answer."""


def _on_alarm(signum: int, frame: FrameType | None) -> None:
    raise _Hang(f"no answer within {_WATCHDOG_SECONDS:.0f} s")


@contextmanager
def _watchdog() -> Iterator[None]:
    """Break a turn that hangs (main thread only; every wait in a row is interruptible by a signal)."""
    before = signal.signal(signal.SIGALRM, _on_alarm)
    signal.setitimer(signal.ITIMER_REAL, _WATCHDOG_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _line(bench: Bench) -> float:
    if not bench.cpus.two:
        return math.nan
    try:
        return float(np.median(line_samples(bench.cpus, _LINE_COUNT)))
    except MissedDeadline:  # two threads did not get the two CPUs
        return math.inf


def _turn(case: Case, subject: Subject, bench: Bench, plan: Plan) -> Round:
    before = _line(bench)
    if subject.unpark:
        subject.unpark()
    try:
        if subject.server_pid is not None:
            pin_process(os.getpid(), {bench.cpus.client})
            pin_process(subject.server_pid, {bench.cpus.of_server(case.placement)})
        # The first calls wake the server and warm its caches; the second handful tells how long the turn may be.
        subject.sample(_CALIBRATION_CALLS)
        each = float(np.median(subject.sample(_CALIBRATION_CALLS)))
        wanted = max(1, plan.count // plan.rounds)
        count = max(_CALIBRATION_CALLS, min(wanted, int(plan.turn_seconds * 1e9 / each)))
        subject.sample(max(1, count // 10))
        samples = subject.sample(count)
    finally:
        if subject.park:
            subject.park()
    return Round(samples, before, _line(bench))


def run_all(cases: Sequence[Case], cpus: Cpus, plan: Plan, polling_window: float) -> dict[str, Result]:
    """As `run`, with a progress bar; all that was set up is undone at the end."""
    from rich.console import Console
    from rich.progress import Progress

    # The bar draws between turns only: a refreshing thread would disturb the rows.
    bar = Progress(console=Console(stderr=True), transient=True, auto_refresh=False)
    with keep_affinity(), scratch_directory() as directory, bar, ExitStack() as stack:
        task = bar.add_task("", total=len(cases) * (plan.rounds + 1))

        def progress(what: str) -> None:
            bar.update(task, advance=1, description=what, refresh=True)

        return run(cases, Bench(cpus, directory, polling_window, stack), plan, stack, progress)


def run(
    cases: Sequence[Case], bench: Bench, plan: Plan, stack: ExitStack, progress: Callable[[str], None]
) -> dict[str, Result]:
    """Measure rows in turns.

    A row that cannot be set up, fails or hangs gets a note instead of figures; the others go on. A turn for which the
    machine is too busy has no samples.

    Args:
        stack: What has been set up is undone with it.
        progress: Called with the name of what comes next, once per row set up and once per turn.

    Returns:
        A result per row, by key, in the order of `cases`.
    """
    results = {case.key: Result(note=case.why_not(bench.cpus)) for case in cases}
    subjects: dict[str, Subject] = {}
    for case in cases:
        progress(f"set up {case.key}")
        if not results[case.key].note:
            try:
                with _watchdog():
                    subjects[case.key] = stack.enter_context(case.open(bench))
            except Exception as error:
                results[case.key].note = f"failed: {error}"
    for number in range(plan.rounds):
        for case in cases:
            progress(f"round {number + 1} of {plan.rounds}: {case.key}")
            if case.key in subjects:
                try:
                    with _watchdog():
                        results[case.key].rounds.append(_turn(case, subjects[case.key], bench, plan))
                except MissedDeadline:
                    results[case.key].rounds.append(Round(np.empty(0, np.int64), math.inf, math.inf))
                except Exception as error:
                    results[case.key] = Result(note=f"failed: {error}")
                    del subjects[case.key]
    for case, result in zip(cases, results.values(), strict=True):
        missed = sum(not len(r.samples) for r in result.rounds)
        if missed:
            result.note = f"{missed} of {len(result.rounds)} turns without samples: the machine was too busy"
            result.rounds = result.rounds if missed < len(result.rounds) else []
        result.failed = not result.rounds and not case.why_not(bench.cpus)
    return results
