"""Who gets more of the processors: what the kernel is told, and how often."""

from __future__ import annotations

import errno
import math
import os
import time
from pathlib import Path

import pytest

from nnburst.model import Priority
from nnburst.service.process import share
from nnburst.service.process.cgroup import Group
from nnburst.service.process.share import Balance, Share

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


class Measured(Share):
    """A share whose load is made up, and that keeps what the kernel is told."""

    def __init__(self, load: float, priority: Priority = MEDIUM, group: Group | None = None, error: int = 0) -> None:
        super().__init__(os.getpid(), group)
        self.made_up, self.priority, self.error = load, priority, error
        self.said: list[int] = []

    def measure(self, seconds: float) -> None:
        self.load = 0.0 if seconds == math.inf else self.made_up

    def _set(self, wanted: int) -> None:
        self.said.append(wanted)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


@pytest.fixture
def balance(monkeypatch: pytest.MonkeyPatch) -> Balance:
    """Looks each time."""
    monkeypatch.setattr(share, "_LOOK", 0.0)
    return Balance()


@pytest.mark.parametrize(
    ("loads", "way"),
    [
        ((1.5, 0.2), (9, 0)),
        ((1.5, 0.2, 1.0), (9, 0, 9)),
        ((1.0, 0.6), (0, 0)),  # equal ones, as far as a second tells
        ((0.4, 0.1), (0, 0)),  # there is room for both
        ((1.5, 0.001), (0, 0)),  # one that does nothing
    ],
)
def test_who_computes_little_beside_one_that_computes_much_goes_first(
    loads: tuple[float, ...], way: tuple[int, ...], balance: Balance
) -> None:
    shares = [Measured(load) for load in loads]
    balance.look(shares, is_shared=True)
    assert [sum(each.said) for each in shares] == list(way)
    for each in shares:
        each.made_up = 1.0
    balance.look(shares, is_shared=True)
    assert [each.said for each in shares] == [[each, 0] if each else [] for each in way]


def test_low_priority_goes_before_nobody_and_gives_way(balance: Balance) -> None:
    shares = [Measured(1.8, HIGH), Measured(0.2, LOW)]
    balance.look(shares, is_shared=True)
    assert [each.said for each in shares] == [[], [10]]
    shares.append(Measured(0.2))
    balance.look(shares, is_shared=True)
    assert [each.said for each in shares] == [[9], [10, 19], []]


def test_group_weighs_less_while_it_gives_way(balance: Balance, tmp_path: Path) -> None:
    group = Group(tmp_path / "user-7", frozenset(("cpu",)), None)
    shares = [Measured(1.8, HIGH, group), Measured(1.8, MEDIUM, group), Measured(1.8, LOW, group), Measured(0.1)]
    balance.look(shares, is_shared=True)
    assert [each.said for each in shares] == [[37], [12], [3], []]
    Share(12, group).tell(gives_way=True)
    assert (tmp_path / "user-7" / "cpu.weight").read_text() == "12"


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EACCES, errno.EPERM, errno.EAGAIN])
def test_kernel_that_refuses_is_asked_again_if_it_was_too_soon(number: int) -> None:
    balance, own = Balance(), Measured(0.0, LOW, error=number)
    assert balance.next_look == math.inf, "a service without users has a timer"
    balance.change()
    balance.look([own], is_shared=False)
    assert own.said == [10]
    assert (balance.next_look < math.inf) == (number == errno.EAGAIN)
    own.priority = MEDIUM
    balance.change()
    assert time.monotonic() < balance.next_look < math.inf, "a worker may have it weighed without pause"
