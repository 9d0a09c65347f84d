"""Files of a directory as inputs: each gets its outputs or its own error, whatever the others do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import nnburst
from nnburst.cli.run.many import Outcome, input_files, run_directory, run_files, targets
from nnburst.cli.tensors import as_saved
from nnburst.errors import DeadObject, GeneralFailure, InvalidArgument

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
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[nnburst.Session]:
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
def test_files_that_fail_cost_themselves(session: nnburst.Session, write: Callable[..., Path], batch: int) -> None:
    directory = write(a=1, b=2, c=7, d=3, e="not a file of NumPy's", f=4, g=5, h=6)
    np.savez(directory / "i.npz", x=np.zeros((1, 3), np.float32))
    np.savez(directory / "j.npz", z=np.zeros((1, 2), np.float32))
    np.savez(directory / "k.npz", x=np.full((6, 2), 8, np.float32))  # more rows than a batch, or another shape
    (directory / "notes.txt").write_text("no input")
    found = said(run_files(session, input_files(directory), batch))
    assert list(found) == list("abcdefghijk")
    wrong = {"c": GeneralFailure, "e": InvalidArgument, "i": InvalidArgument, "j": InvalidArgument}
    assert found == dict(zip("abdfghk", (2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0), strict=True)) | wrong


def test_files_that_kill_the_service_are_named_and_the_others_run(
    session: nnburst.Session, write: Callable[..., Path]
) -> None:
    before = len(session.restarts)
    found = said(run_files(session, input_files(write(a=1, b=13, c=13, d=2, e="no array")), 1))
    assert found == {"a": 2.0, "b": DeadObject, "c": DeadObject, "d": 4.0, "e": InvalidArgument}
    assert len(session.restarts) > before


@pytest.mark.parametrize(("texts", "as_json"), [(["a", "é\0b"], False), (["a\0", "b"], True), ([], False)])
def test_strings_are_saved_whole(texts: list[str], as_json: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", as_saved(np.array([texts], object)))
    saved = np.load(tmp_path / "y.npy")
    assert (json.loads(saved.item()) if as_json else saved.tolist()) == [texts]


def test_outputs_are_saved_under_their_names(
    session: nnburst.Session, write: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = input_files(write(a=1, b=7))
    places = targets(files, tmp_path / "out")
    assert not run_directory(session, files, places, 1, as_json=False)
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
