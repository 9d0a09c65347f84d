"""Many inputs of which some cannot be run: the others lose nothing, and each failure says which input it is of."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst.runtime.execution import Execution
from support.models import relu
from support.processes import stopped
from support.waiting import PATIENCE

Inputs = dict[str, np.ndarray]
BAD: Inputs = {"x": np.zeros((1, 3), np.float32)}
OF_DOUBLES: Inputs = {"x": np.full((1, 4), 0.1)}


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


@pytest.fixture(params=["one by one", "in batches"])
def batch(request: pytest.FixtureRequest) -> int:
    return 1 if request.param == "one by one" else 8


@pytest.fixture
def session(service: nnburst.Service) -> Iterator[nnburst.Session]:
    with service.session(relu((0, 4))) as session:
        yield session


def rows(value: int, count: int = 1) -> Inputs:
    return {"x": np.full((count, 4), value, np.float32)}


def values(outcomes: Iterable[Any]) -> list[Any]:
    return [outcome if isinstance(outcome, Exception) else int(outcome[0][0, 0]) for outcome in outcomes]


@pytest.mark.parametrize("at", [0, 1, 7, 8, 19, 29, 30])
@pytest.mark.parametrize("kind", [list, iter])
def test_all_that_precedes_a_wrong_input_is_yielded_and_the_error_says_which_it_is(
    session: nnburst.Session, batch: int, at: int, kind: Callable[[Any], Any]
) -> None:
    inputs = [rows(i) for i in range(30)]
    inputs.insert(at, BAD)
    got = []
    with pytest.raises(nnburst.InvalidArgument, match=rf"inputs\[{at}\]: input 'x' has shape"):
        for (y,) in session.run_many(kind(inputs), batch=batch):
            got.append(int(y[0, 0]))
    assert got == list(range(at))


@pytest.mark.parametrize("wrong", [(0,), (30,), (5, 6, 7), (3, 20), tuple(range(40))])
@pytest.mark.parametrize("kind", [list, iter])
def test_wrong_inputs_can_be_returned_while_the_others_are_run(
    session: nnburst.Session, batch: int, wrong: tuple[int, ...], kind: Callable[[Any], Any]
) -> None:
    inputs = [(BAD if i % 2 else OF_DOUBLES) if i in wrong else rows(i) for i in range(40)]
    outcomes = values(session.run_many(kind(inputs), batch=batch, on_error="return"))
    assert len(outcomes) == 40
    for i, outcome in enumerate(outcomes):
        if i in wrong:
            assert isinstance(outcome, nnburst.InvalidArgument)
            assert f"inputs[{i}]: " in str(outcome)
        else:
            assert outcome == i


def test_runs_that_fail_can_be_returned_while_the_others_are_run(service: nnburst.Service, batch: int) -> None:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_INT32, (0, 1))
    b.output("y", b.gather(np.arange(10, dtype=np.float32), 0, x))
    with service.session(b.build()) as session:
        inputs = [{"x": np.full((1, 1), 99 if i in (4, 17) else i % 10, np.int32)} for i in range(30)]
        outcomes = list(session.run_many(inputs, batch=batch, on_error="return"))
        failures = {i: outcome for i, outcome in enumerate(outcomes) if isinstance(outcome, nnburst.NNBurstError)}
        assert list(failures) == [4, 17]
        assert {failure.__traceback__ for failure in failures.values()} == {None}  # it keeps nothing of the run alive
        assert "inputs[17]: " in str(outcomes[17])
        assert int(outcomes[29][0][0, 0]) == 9
        with pytest.raises(nnburst.NNBurstError, match=r"inputs\[4\]: "):
            list(session.run_many(inputs, batch=batch))


def test_outputs_that_cannot_be_read_are_an_error_of_their_input(
    session: nnburst.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = Execution._copied

    def contradicted(execution: Execution) -> list[Any]:
        (y,) = copied(execution)
        if y[0, 0] in (4, 29):
            raise nnburst.GeneralFailure("the service told another shape")
        return [y]

    monkeypatch.setattr(Execution, "_copied", contradicted)
    outcomes = values(session.run_many(map(rows, range(30)), on_error="return"))
    assert [i for i, outcome in enumerate(outcomes) if isinstance(outcome, nnburst.GeneralFailure)] == [4, 29]
    assert "inputs[29]: " in str(outcomes[29])


def test_what_the_iterator_raises_comes_after_the_outputs_before_it(session: nnburst.Session, batch: int) -> None:
    def inputs() -> Iterator[Inputs]:
        yield from (rows(i) for i in range(21))
        raise LookupError("the camera is gone")

    for on_error in ("raise", "return"):
        got = []
        with pytest.raises(LookupError, match="camera"):
            for (y,) in session.run_many(inputs(), batch=batch, on_error=on_error):
                got.append(int(y[0, 0]))
        assert got == list(range(21))


def test_inputs_of_other_shapes_are_run_among_the_others(service: nnburst.Service, batch: int) -> None:
    with service.session(relu((0, 0))) as session:
        inputs = [{"x": np.full((1, 2 + i // 5 % 3), i, np.float32)} for i in range(40)]
        outputs = list(session.run_many(inputs, batch=batch))
        assert values(outputs) == list(range(40))
        assert [y.shape for (y,) in outputs] == [arrays["x"].shape for arrays in inputs]


def test_runs_that_took_too_long_can_be_returned_and_the_next_ones_are_run(
    service: nnburst.Service, batch: int
) -> None:
    with service.session(relu((0, 4)), open_timeout=PATIENCE) as session:
        many = session.run_many(map(rows, itertools.count()), batch=batch, timeout=0.2, on_error="return")
        outcomes = enumerate(many)
        next(outcomes)
        with stopped(service.pid):
            i, error = next((i, outcome) for i, outcome in outcomes if isinstance(outcome, Exception))
        assert isinstance(error, nnburst.MissedDeadline)
        assert f"inputs[{i}]: " in str(error)
        i, answer = next((i, outcome) for i, outcome in outcomes if not isinstance(outcome, Exception))
        assert int(answer[0][0, 0]) == i
        many.close()


def test_wrong_choices_are_refused(session: nnburst.Session) -> None:
    for wrong in ("ignore", None, 1):
        with pytest.raises(nnburst.InvalidArgument, match="choose 'raise' or 'return'"):
            session.run_many([], on_error=wrong)  # type: ignore[call-overload]
