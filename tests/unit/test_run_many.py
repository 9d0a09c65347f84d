"""Many inputs, or files, of which some cannot be run: each failure costs itself and says what it is of."""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import ModelBuilder, OperandType
from nnburst.cli.run.many import Outcome, input_files, run_directory, run_files, targets
from nnburst.cli.tensors import as_saved
from nnburst.errors import DeadObject, GeneralFailure, InvalidArgument
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


# ---- files of a directory ------------------------------------------------------------------------------------------


SOURCE = """
import os
from nnburst.devices.function import Tensor, declare

@declare(inputs=[Tensor("x", "float32", ("n", 2))], outputs=[Tensor("file", "float32", ("n", 2))])
def double(x):
    if (x == 13).any():
        os._exit(3)
    if (x == 7).any():
        raise ValueError("not seven")
    return x * 2
"""


@pytest.fixture(scope="module")
def doubles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nnburst.Session]:
    path = tmp_path_factory.mktemp("functions")
    (path / "doubles.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        with nnburst.launch(devices=["nnburst-function:call=doubles:double"], log_level="error") as service:
            with service.session("double", on_death="restart") as session:
                yield session
    sys.modules.pop("doubles", None)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write(**values: float | str) -> Path:
        (tmp_path / "in").mkdir()
        for name, value in values.items():
            if isinstance(value, str):
                (tmp_path / "in" / f"{name}.npz").write_text(value)
            else:
                np.save(tmp_path / "in" / f"{name}.npy", np.full((1, 2), value, np.float32))
        return tmp_path / "in"

    return write


def said(outcomes: Iterator[Outcome]) -> dict[str, object]:
    """The first number of each file's output, or the class of its error."""
    return {
        file.stem: type(outcome) if isinstance(outcome, Exception) else float(outcome[0][0, 0])
        for file, outcome in outcomes
    }


@pytest.mark.parametrize("batch", [1, 4])
def test_files_that_fail_cost_themselves(doubles: nnburst.Session, write: Callable[..., Path], batch: int) -> None:
    directory = write(a=1, b=2, c=7, d=3, e="not a file of NumPy's", f=4, g=5, h=6)
    np.savez(directory / "i.npz", x=np.zeros((1, 3), np.float32))
    np.savez(directory / "j.npz", z=np.zeros((1, 2), np.float32))
    np.savez(directory / "k.npz", x=np.full((6, 2), 8, np.float32))  # more rows than a batch, or another shape
    (directory / "notes.txt").write_text("no input")
    found = said(run_files(doubles, input_files(directory), batch))
    assert list(found) == list("abcdefghijk")
    wrong = {"c": GeneralFailure, "e": InvalidArgument, "i": InvalidArgument, "j": InvalidArgument}
    assert found == dict(zip("abdfghk", (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0), strict=True)) | wrong


def test_files_that_kill_the_service_are_named_and_the_others_run(
    doubles: nnburst.Session, write: Callable[..., Path]
) -> None:
    before = len(doubles.restarts)
    found = said(run_files(doubles, input_files(write(a=1, b=13, c=13, d=2, e="no array")), 1))
    assert found == {"a": 2.0, "b": DeadObject, "c": DeadObject, "d": 4.0, "e": InvalidArgument}
    assert len(doubles.restarts) > before


@pytest.mark.parametrize(("texts", "as_json"), [(["a", "é\0b"], False), (["a\0", "b"], True), ([], False)])
def test_strings_are_saved_whole(texts: list[str], as_json: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", as_saved(np.array([texts], object)))
    saved = np.load(tmp_path / "y.npy")
    assert (json.loads(saved.item()) if as_json else saved.tolist()) == [texts]


def test_outputs_are_saved_under_their_names(
    doubles: nnburst.Session, write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = input_files(write(a=1, b=7))
    places = targets(files, tmp_path / "out")
    assert not run_directory(doubles, files, places, 1, as_json=False)
    assert os.listdir(tmp_path / "out") == ["a.npz"]
    with np.load(tmp_path / "out" / "a.npz") as saved:
        assert saved["file"].tolist() == [[2, 2]]
    out, err = capsys.readouterr()
    assert out.startswith("1 of 2 files in ")
    assert err.startswith(f"{files[1]}: GeneralFailure: ")
    assert "not seven" in err


def test_places_that_cannot_be_are_refused_before_anything_runs(write: Callable[..., Path], tmp_path: Path) -> None:
    directory = write(a=1)
    np.savez(directory / "a.npz", x=np.zeros((1, 2), np.float32))
    with pytest.raises(InvalidArgument, match=r"would both become a\.npz"):
        targets(input_files(directory), tmp_path / "out")
    (directory / "a.npy").unlink()
    with pytest.raises(InvalidArgument, match="where the inputs are"):
        targets(input_files(directory), directory)
    with pytest.raises(InvalidArgument, match=r"no \.npy and no \.npz files"):
        input_files(tmp_path)
