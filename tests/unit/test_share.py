"""Who gets more of the processors: what the kernel is told, and how often."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nnburst.model import Priority
from nnburst.service.process import share
from nnburst.service.process.cgroup import Group
from nnburst.service.process.share import Balance, Share

LOW, MEDIUM, HIGH = Priority.LOW, Priority.MEDIUM, Priority.HIGH


class Measured(Share):
    """A share whose load is made up, and that keeps what the kernel is told."""

    def __init__(
        self,
        load: float,
        priority: Priority = MEDIUM,
        *,
        user: object = None,
        group: Group | None = None,
        error: int = 0,
        **may: bool,
    ) -> None:
        super().__init__(os.getpid(), user or self, group, **may)
        self.made_up, self.priority, self.error = load, priority, error
        self.said: list[int] = []

    def measure(self, seconds: float) -> None:
        self.load = 0.0 if seconds == math.inf else self.made_up

    def _set(self, wanted: int) -> None:
        self.said.append(wanted)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))


class Clock:
    """Stands still unless it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(share.time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


Look = Callable[[list[Measured]], list[list[int]]]


@pytest.fixture
def look(clock: Clock) -> Look:
    balance = Balance()

    def look_again(shares: list[Measured]) -> list[list[int]]:
        clock.now += 1.0
        balance.look(shares, is_shared=True)
        return [each.said for each in shares]

    return look_again


@pytest.mark.parametrize(
    ("loads", "way"),
    [
        ((1.5, 0.2), (9, 0)),
        ((1.5, 0.2, 1.0), (9, 0, 9)),
        ((1.5, 0.2, 0.001), (9, 0, 0)),
        ((1.0, 0.6), (0, 0)),  # equal ones, as far as a second tells
        ((0.4, 0.1), (0, 0)),  # there is room for both
        ((1.5, 0.001), (0, 0)),  # one that does nothing
    ],
)
def test_who_computes_much_gives_way_to_one_who_computes_little(
    loads: tuple[float, ...], way: tuple[int, ...], look: Look
) -> None:
    shares = [Measured(load) for load in loads]
    assert [sum(said) for said in look(shares)] == list(way)
    for each in shares:
        each.made_up = 1.0
    look(shares)
    assert look(shares) == [[each, 0] if each else [] for each in way]


@pytest.mark.parametrize("ratio", [7.5, 2.2])
def test_two_who_compute_all_they_can_are_equal_whoever_came_first(ratio: float, look: Look) -> None:
    first, second = Measured(1.7), Measured(0.3)
    assert look([first, second]) == [[9], []]
    for _ in range(10):
        weights = [1 / ratio if each.said[-1:] == [9] else 1 for each in (first, second)]
        first.made_up, second.made_up = (2 * weight / sum(weights) for weight in weights)
        look([first, second])
    assert [first.said, second.said] == [[9, 0], []]


def test_one_who_computes_little_again_gives_way_no_longer(look: Look) -> None:
    shares = [Measured(0.9), Measured(0.9), Measured(0.1)]
    assert look(shares) == [[9], [9], []]
    shares[0].made_up = 0.1
    assert look(shares) == [[9, 0], [9], []]


def test_processes_of_a_user_are_judged_together(look: Look) -> None:
    many = [Measured(0.35, user="many") for _ in range(5)]
    assert look([*many, Measured(0.8, user="one")]) == [[9]] * 5 + [[]]


def test_nobody_gives_way_to_low_priority_or_a_broker_and_some_to_nobody(look: Look) -> None:
    busy, low, broker = Measured(1.8, HIGH), Measured(0.2, LOW), Measured(0.2, may_go_first=False)
    named = Measured(1.8, may_give_way=False)
    assert look([busy, low, broker, named]) == [[], [10], [], []]
    broker.made_up = low.made_up = 1.0
    assert look([busy, low, broker, named, Measured(0.2)]) == [[9], [10, 19], [9], [], []]


def test_group_weighs_less_while_its_user_gives_way(look: Look, tmp_path: Path) -> None:
    group = Group(tmp_path / "user-7", frozenset(("cpu",)), None)
    shares = [Measured(1.8, priority, user=7, group=group) for priority in (HIGH, MEDIUM, LOW)]
    assert look([*shares, Measured(0.1)]) == [[37], [12], [3], []]
    assert look(shares) == [[37, 300], [12, 100], [3, 30]]
    Share(12, 7, group).tell(gives_way=True)
    assert (tmp_path / "user-7" / "cpu.weight").read_text() == "12"


def test_weight_that_a_group_has_from_another_process_is_not_kept(tmp_path: Path) -> None:
    group = Group(tmp_path / "user-7", frozenset(("cpu",)), None)
    (tmp_path / "user-7" / "cpu.weight").write_text("12")
    Share(12, 7, group).tell(gives_way=False)
    assert (tmp_path / "user-7" / "cpu.weight").read_text() == "100"


def test_timer_runs_only_while_there_are_several_users(clock: Clock) -> None:
    balance, named, own = Balance(), Measured(0.9), Measured(0.1)
    balance.look([named], is_shared=False)
    assert balance.next_look == math.inf
    balance.look_soon()
    assert balance.next_look == clock.now + 0.1
    clock.now += 0.1
    balance.look([named, own], is_shared=True)
    assert balance.next_look == 101.0, "one second after the service began"
    clock.now += 1.0
    balance.look([named, own], is_shared=True)
    assert named.said == [9]
    clock.now += 1.0
    balance.look([named], is_shared=False)
    assert named.said == [9, 0]
    assert balance.next_look == math.inf


@pytest.mark.parametrize("number", [errno.ESRCH, errno.EACCES, errno.EPERM, errno.EAGAIN])
def test_kernel_that_refuses_is_asked_again_if_it_was_too_soon(number: int, clock: Clock) -> None:
    balance, own = Balance(), Measured(0.0, LOW, error=number)
    balance.look([own], is_shared=False)
    assert own.said == [10]
    assert balance.next_look == (clock.now + 0.1 if number == errno.EAGAIN else math.inf)
    balance.look_soon()
    assert balance.next_look == clock.now + 0.1, "a worker may have it weighed without pause"
