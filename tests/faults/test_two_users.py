"""What a user's models leave in memory is found by no other one, whatever operator has a dimension of 0."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst.errors import DeadObject, GeneralFailure
from support import ROOT
from support.services import Shared, shared_service
from support.users import GUEST, OTHER_GUEST, as_root, as_user, beside

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")
sys.path.append(str(ROOT / "tests" / "real_models"))
import onnx_zero_sized as zero

from support.onnx_models import FLOAT, graph, node

pytestmark = pytest.mark.check

CANARY = b"\xa7" * 4
"""A float32 of its own, and two of any of 16 bits."""
_SIZES = [4**n for n in range(2, 10)]
_MOST_VARIANTS = 12
_TURN = 200
"""Runs of one user between two turns of the other: some two seconds."""


@contextlib.contextmanager
def canary_everywhere(address: str) -> Iterator[None]:
    """Have a service keep the canary: in weights, arguments and what lies between, of models that are there or gone."""
    value = np.frombuffer(CANARY, np.float32)[0]
    weights = {"w": np.full((256, 256), value, np.float32)}
    nodes = [node("Max", ["x", "x"], ["h0"])]
    nodes += [node("Max", [f"h{i}", "x"], [f"h{i + 1}"]) for i in range(6)]
    nodes += [node("Gather", ["w", "i"], ["rows"]), node("Max", ["h6", "h5"], ["y"])]
    inputs = [("x", FLOAT, ("n",)), ("i", 7, ("m",))]
    model = graph(nodes, inputs, [("y", FLOAT, ("n",)), ("rows", FLOAT, ("m", 256))], weights).SerializeToString()
    with nnburst.connect(address) as service, service.session(model) as stays:
        for session in (stays, *(service.session(model) for _ in range(3))):
            for n in _SIZES:
                given = {"x": np.full(n, value, np.float32), "i": np.arange(min(n, 256))}
                made, rows = session.run(None, given)
                assert made.tobytes() + rows.tobytes() == CANARY * (made.size + rows.size)
            if session is not stays:
                session.close()
        yield


Counts = dict[str, list[int]]
"""Of an operator: the runs that were answered, and those in whose results the canary was found."""


def look(address: str, cases: Iterable[zero.Case]) -> Counts:
    """Run cases and look for the canary in all that comes back. The rest says nothing."""
    counts: Counts = {}
    with contextlib.ExitStack() as stack:
        service = stack.enter_context(nnburst.connect(address))
        for _, model, variants in cases:
            ran = leaked = 0
            try:
                with service.session(model.SerializeToString(), timeout=10) as session:
                    for given in variants:
                        with contextlib.suppress(GeneralFailure):
                            found = session.run(None, given)
                            ran += 1
                            leaked += any(CANARY in array.tobytes() for array in found)
            except DeadObject:
                service = stack.enter_context(nnburst.connect(address))
            except (nnburst.NNBurstError, ValueError):
                pass
            for operator in {f"{one.domain}:{one.op_type}" for one in model.graph.node}:
                count = counts.setdefault(operator, [0, 0])
                count[0], count[1] = count[0] + ran, count[1] + leaked
    return counts


def turns(cases: Iterable[zero.Case]) -> Iterator[list[zero.Case]]:
    turn: list[zero.Case] = []
    for name, model, variants in cases:
        turn.append((name, model, variants[:_MOST_VARIANTS]))
        if sum(len(variants) for _, _, variants in turn) >= _TURN:
            yield turn
            turn = []
    yield turn


@pytest.fixture
def start(open_to_guests: Path) -> Iterator[Callable[..., Shared]]:
    options = ["--device", "nnburst-onnxruntime", "--max-run", "3", "--max-compile", "20"]
    options += [f"--allow-uid={user}" for user in (GUEST, OTHER_GUEST)]
    with contextlib.ExitStack() as stack:
        yield lambda isolation, **more: stack.enter_context(
            shared_service(open_to_guests, "--isolate", isolation, *options, **more)
        )


def search(shared: Shared, users: tuple[int, int], cases: Iterable[zero.Case]) -> Counts:
    """Have one user leave the canary everywhere, and the other look for it, in turns."""
    counts: Counts = {}
    first, second = users
    for turn in turns(cases):
        with beside(first, partial(canary_everywhere, shared.address)):
            said = as_user(second, lambda turn=turn: json.dumps(look(shared.address, turn)))  # type: ignore[misc]
        assert said.startswith("{"), said
        for operator, (ran, leaked) in json.loads(said).items():
            count = counts.setdefault(operator, [0, 0])
            count[0], count[1] = count[0] + ran, count[1] + leaked
    return counts


@as_root
def test_canary_is_found_in_one_process_where_results_may_stay_unwritten(
    start: Callable[..., Shared], tmp_path: Path
) -> None:
    module = "nnburst.devices.onnxruntime.graph"
    (tmp_path / "sitecustomize.py").write_text(f"import {module} as it\nit.add_guards = lambda proto: None\n")
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    shared = start("none", env={**os.environ, "PYTHONPATH": path, "NNBURST_STATE_DIR": str(tmp_path / "state")})
    cases = [case for case in zero._nested_cases() if case[0].startswith("plain:")]
    for _ in range(30):  # it is found in every other turn
        counts = search(shared, (GUEST, OTHER_GUEST), cases)
        if any(leaked for _, leaked in counts.values()):
            return
    pytest.fail(f"it is not found in {counts}")


@as_root
@pytest.mark.parametrize(
    ("isolation", "users"),
    [("user", (GUEST, OTHER_GUEST)), ("connection", (GUEST, GUEST)), ("none", (GUEST, OTHER_GUEST))],
    ids=["two users", "two connections", "one process"],
)
@pytest.mark.parametrize(
    ("tries", "least"),
    [(0, 60), pytest.param(10, 5000, marks=[pytest.mark.soak, pytest.mark.timeout(0)])],
    ids=["known", "all"],
)
def test_no_operator_with_a_dimension_of_zero_shows_what_another_user_had_in_memory(
    start: Callable[..., Shared], isolation: str, users: tuple[int, int], tries: int, least: int
) -> None:
    shared = start(isolation)
    cases = zero._nested_cases() if not tries else itertools.chain(zero._own_cases(), zero._guesses(tries))
    counts = search(shared, users, cases)
    answered = sorted(operator for operator, (ran, _) in counts.items() if ran)
    print(f"{len(answered)} operators of {len(counts)}, {sum(ran for ran, _ in counts.values())} runs")
    print("no case is answered of", *sorted(counts.keys() - set(answered)))
    assert not [operator for operator, (_, leaked) in counts.items() if leaked]
    assert sum(ran for ran, _ in counts.values()) >= least
