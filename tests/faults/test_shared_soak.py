"""Many clients with several bursts each, for minutes: all of them run, about equally, and the service does not grow."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import nnburst
from support import ROOT

sys.path.append(str(ROOT / "benchmarks"))
from clients import program
from programs import shared_service, together

pytestmark = pytest.mark.check

MOST_GROWTH = 4 << 20
MOST_RATIO = 2.0


@dataclass(frozen=True)
class Footprint:
    """What a process has of the system."""

    at: float
    threads: int
    descriptors: int
    resident: int


def footprint(pid: int) -> Footprint:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Footprint(time.monotonic(), int(status["Threads"]), descriptors, int(status["VmRSS"].split()[0]) << 10)


def half_of(pages: list[Footprint], which: int, key: Callable[[Footprint], int]) -> float:
    middle = len(pages) // 2
    return statistics.median(key(page) for page in (pages[middle:] if which else pages[:middle]))


@pytest.mark.parametrize(
    ("clients", "bursts", "seconds"),
    [(3, 2, 1.0), pytest.param(64, 4, 300.0, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["a few", "many for minutes"],
)
def test_many_clients_share_a_service_that_does_not_grow(clients: int, bursts: int, seconds: float) -> None:
    pages: list[Footprint] = []
    done = threading.Event()
    with shared_service("--device", "nnburst-noop", "--isolate", "none") as address:
        with nnburst.connect(address) as service:
            pid = service.pid
        idle = footprint(pid)
        together(clients, 1.0, program, address, bursts)  # until allocators and threads have what they need

        def sample() -> None:
            while not done.wait(seconds / 50):
                pages.append(footprint(pid))

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            runs = together(clients, seconds, program, address, bursts)
        finally:
            done.set()
            sampler.join()
    usual = statistics.mode(page.descriptors for page in pages if page.descriptors > idle.descriptors)
    full = [at for at, page in enumerate(pages) if page.descriptors == usual]
    busy = pages[full[0] : full[-1] + 1]  # all clients are there
    assert busy[-1].at - busy[0].at >= seconds / 2, "descriptors grow"
    assert half_of(busy, 1, lambda page: page.threads) <= half_of(busy, 0, lambda page: page.threads) + 1
    assert half_of(busy, 1, lambda page: page.resident) <= half_of(busy, 0, lambda page: page.resident) + MOST_GROWTH
    assert min(runs) > 0
    if seconds >= 60:  # in less, an interruption by another program is a large part
        assert max(runs) / min(runs) <= MOST_RATIO
