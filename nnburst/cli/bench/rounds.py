"""Rounds of a benchmark. A round measures every row of the table for a short time, with L before and after each row.

L is the round trip of one cache line between two CPUs. If the host moves a virtual machine's CPUs, L is several times
as long for a while. So rows are compared within a round.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..._core._nnburst import lib
from ...errors import MissedDeadline
from ..progress import progress
from .sampling import Result, Round, Samples, from_c

POLLING_WINDOW = 50e-6
"""Polling window of benchmarks that poll, in seconds."""
_LINE_COUNT = 400
_CALIBRATION_CALLS = 5
_MOST_SAMPLES = 1000
"""Maximum number of samples of a benchmark in a round."""


class Cpus(NamedTuple):
    """The CPU of the client and the CPU of the servers. If this process may use only one CPU, both are equal."""

    client: int
    server: int

    @property
    def two(self) -> bool:
        return self.client != self.server


def allowed_cpus() -> Cpus:
    """Return the first two CPUs of this process's affinity."""
    cpus = sorted(os.sched_getaffinity(0))
    return Cpus(cpus[0], cpus[1] if len(cpus) > 1 else cpus[0])


def pin_process(pid: int, cpus: set[int]) -> None:
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(thread, cpus)


@dataclass(frozen=True, slots=True)
class Subject:
    """A row of the benchmark, ready to be measured.

    Attributes:
        sample: Function that takes a given number of samples.
        server_pid: Process to pin to the server's CPU; None if there is no process, or it is pinned already.
    """

    sample: Callable[[int], Samples]
    server_pid: int | None = None


@dataclass(frozen=True, slots=True)
class Case:
    """The definition of a row of the benchmark.

    Attributes:
        key: Name for ``--only`` and in the JSON file.
        group: Paragraph of the table, by its letter in ``docs/benchmarks.md``.
        title: Name in the table.
        wait: ``poll`` (checks in a loop) or ``block`` (sleeps in the kernel).
        payload_bytes: Bytes that the caller sends per round trip.
        open: Context manager that prepares the row and yields its `Subject`.
        one_core: True if client and server share a CPU.
    """

    key: str
    group: str
    title: str
    wait: str
    payload_bytes: int
    open: Callable[[], AbstractContextManager[Subject]]
    one_core: bool = False


def line_samples(cpus: Cpus, count: int, warmup: int = 100) -> Samples:
    """Send a cache line back and forth between two C threads. Return each round trip in nanoseconds, int64[count]."""
    return from_c(count, "cache line ping-pong", lambda out: lib.nnb_bench_line(*cpus, warmup, count, out))


def _line(cpus: Cpus) -> float:
    try:
        return float(np.median(line_samples(cpus, _LINE_COUNT))) if cpus.two else math.nan
    except MissedDeadline:  # the two threads did not run at the same time
        return math.inf


def _run_round(case: Case, subject: Subject, cpus: Cpus, seconds: float) -> Round:
    before = _line(cpus)
    if subject.server_pid is not None:
        pin_process(os.getpid(), {cpus.client})
        pin_process(subject.server_pid, {cpus.client if case.one_core else cpus.server})
    try:
        # The first calls wake the server and warm its caches. The next calls tell how many samples fit into `seconds`.
        subject.sample(_CALIBRATION_CALLS)
        each = float(np.median(subject.sample(_CALIBRATION_CALLS)))
        count = max(_CALIBRATION_CALLS, min(_MOST_SAMPLES, int(seconds * 1e9 / each)))
        subject.sample(max(1, count // 10))
        samples = subject.sample(count)
    except MissedDeadline:  # the machine was too busy
        return Round(np.empty(0, np.int64), math.inf, math.inf)
    return Round(samples, before, _line(cpus))


def run(cases: Sequence[Case], rounds: int, seconds: float) -> dict[str, Result]:
    """Measure each row of a benchmark once in every round.

    A row that fails gets a note instead of figures. A round has no samples if the machine was too busy.

    Args:
        cases: The rows.
        rounds: Number of rounds.
        seconds: Approximate duration of a row in a round.

    Returns:
        A result per row, by key, in the order of `cases`.
    """
    cpus, results = allowed_cpus(), {case.key: Result() for case in cases}
    subjects: dict[str, Subject] = {}
    with ExitStack() as stack:
        stack.callback(pin_process, os.getpid(), os.sched_getaffinity(0))
        for case in cases:
            with _note_failure(results[case.key]):
                subjects[case.key] = stack.enter_context(case.open())
        turns = [case for _ in range(rounds) for case in cases]
        for case in progress(turns, len(turns), "measuring", draws_between=True):
            if not (result := results[case.key]).note:
                with _note_failure(result):
                    result.rounds.append(_run_round(case, subjects[case.key], cpus, seconds))
    return results


@contextmanager
def _note_failure(result: Result) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        result.note = f"failed: {error}"
        result.rounds.clear()
