"""Python functions as models: declared, named when the service starts, run through a burst."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import DeviceUnavailable, GeneralFailure, InvalidArgument, Memory, OutputInsufficientSize
from nnburst.burst import ExecutionBurstController
from nnburst.devices.function import Tensor, declare
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus
from nnburst.model import Request
from nnburst.model.running import reason_of
from nnburst.model.types import NO_TIMING, DataLocation, OperandDesc, RequestArgument
from nnburst.runtime.compile.model_files import SUFFIXES
from support.models import built

SOURCE = '''
import numpy as np
from nnburst.devices.function import Tensor, declare

F = "float32"

@declare(
    inputs=[Tensor("a", F, (2, 3)), Tensor("b", F, (2, 3))],
    outputs=[Tensor("sum", F, (2, 3)), Tensor("n", "int64", ())],
)
def add(a, b):
    assert not a.flags.writeable
    return a + b, np.int64(a.size)

@declare(inputs=[Tensor("x", "float64", ("rows", None))], outputs=[Tensor("y", "float64", (None,))], name="row-sums")
def sums(x):
    return x.sum(axis=1)

@declare(inputs=[Tensor("how", "int32", (1,))], outputs=[Tensor("y", F, (1,))])
def broken(how):
    if how[0] == 0:
        raise KeyError("oh no")
    if how[0] < 0:
        np.linalg.inv(how)
    return [np.zeros(1), np.zeros((1, 1), F), (np.zeros(1, F),) * 2, np.full(1, 7, F), None][how[0] - 1]

@declare(inputs=[Tensor("x", "bool", ())], outputs=[Tensor("y", "bool", ())])
def invert(x):
    return ~x

@declare(inputs=[Tensor("x", F, (1, 4)), Tensor("h_in", F, (1, 4))], outputs=[Tensor("h_out", F, (1, 4))])
def accumulate(x, h_in):
    return x + h_in

def undeclared(x):
    return x
'''  # fmt: skip
FUNCTIONS = "+".join(f"mine_filters:{name}" for name in ("add", "sums", "broken", "invert", "accumulate"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("functions")
    (path / "mine_filters.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", f"{path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        yield path
    sys.modules.pop("mine_filters", None)


@pytest.fixture(scope="module", params=["in_process", "child"])
def service(request: pytest.FixtureRequest, directory: Path) -> Iterator[nnburst.Service]:
    start = nnburst.in_process if request.param == "in_process" else nnburst.launch
    with start(devices=["nnburst-reference", f"nnburst-function:call={FUNCTIONS}"]) as service:
        yield service


def test_function_runs_by_its_name(service: nnburst.Service) -> None:
    a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.full((2, 3), 10, np.float32)
    with service.session("add") as session:
        assert [argument.name for argument in session.get_inputs()] == ["a", "b"]
        for _ in range(3):
            total, n = session.run(None, {"a": a, "b": b})
            assert np.array_equal(total, a + b)
            assert (n, n.dtype, n.shape) == (6, np.int64, ())
        with session.bind(measure=True) as bound:
            bound.inputs["a"][:], bound.inputs["b"][:] = a, b
            bound.run()
            assert np.array_equal(bound.outputs["sum"], a + b)
            assert bound.timing.time_on_device < 10**9
        assert session.stats.fallbacks == 0


def test_sizes_that_are_open_follow_the_arrays(service: nnburst.Service) -> None:
    with service.session("row-sums") as session:
        assert session.get_inputs()[0].shape == ("rows", None)
        for rows in (2, 1000, 3):
            x = np.ones((rows, 4))
            assert session.run(None, {"x": x})[0].tolist() == [4.0] * rows
        assert session.run(None, {"x": np.zeros((0, 0))})[0].shape == (0,)
        assert session.run(None, {"x": np.zeros((0, 4))})[0].shape == (0,)
        with session.bind(shapes={"x": (5000, 4)}) as bound:
            bound.inputs["x"][:] = 1
            with pytest.raises(OutputInsufficientSize) as caught:
                bound.run()
            assert caught.value.output_shapes[0].dimensions == (5000,)


def test_scalar_booleans_pass(service: nnburst.Service) -> None:
    with service.session("invert") as session:
        assert session.run(None, {"x": np.array(True)})[0] == np.array(False)


def test_state_stays_in_the_device(service: nnburst.Service) -> None:
    with service.session("accumulate") as session, session.bind(state={"h_out": "h_in"}) as step:
        for _ in range(4):
            step.inputs["x"][:] = 2
            step.run()
        assert step.get_state()["h_in"].tolist() == [[8.0] * 4]


@pytest.mark.parametrize("way", ["session", "bound"])
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (0, "KeyError: 'oh no'"),
        (-1, r"broken \(.*/mine_filters\.py, line 24\): LinAlgError: "),
        (1, r"output 'y' is float64 \[1\], but is declared as float32 \[1\]; convert it: \.astype\('float32'\)"),
        (2, r"output 'y' is float32 \[1, 1\], but is declared as float32 \[1\]$"),
        (3, "broken returned 2 results for 1 outputs"),
        (5, "broken returned None; return an array for each of its outputs"),
    ],
)
def test_function_that_fails_or_breaks_its_word_says_how(
    service: nnburst.Service, how: int, reason: str, way: str
) -> None:
    """The sentence reaches the exception each time, and nothing of it remains."""
    with service.session("broken") as session, session.bind() as execution:

        def run(given: int) -> float:
            if way == "session":
                return float(session.run(None, {"how": np.int32([given])})[0][0])
            execution.inputs["how"][:] = given
            execution.run()
            return float(execution.outputs["y"][0])

        for _ in range(2):
            with pytest.raises(GeneralFailure, match=f"^the execution failed: .*{reason}"):
                run(how)
            assert run(4) == 7


def test_result_of_a_failed_run_carries_the_reason(service: nnburst.Service, directory: Path) -> None:
    device = service.device("nnburst-function")
    with (
        contextlib.closing(device.prepare_model(device.import_model("name:broken").model)) as prepared,
        Memory.ashmem(8) as memory,
        ExecutionBurstController.create(prepared) as burst,
    ):
        places = (RequestArgument(location=DataLocation(0, at, 4)) for at in (0, 4))
        request = Request((next(places),), (next(places),), (memory,))
        for run in (prepared.execute_synchronously, burst.compute):
            result = run(request)
            assert result == (ErrorStatus.GENERAL_FAILURE, (), NO_TIMING)
            assert reason_of(result) == f"broken ({directory}/mine_filters.py, line 22): KeyError: 'oh no'"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nnburst-function", "models are one "),
        ("nnburst-onnxruntime", r"dimensions \[0, 4\] of input 0 are not all known"),
    ],
)
def test_model_that_a_device_cannot_run_is_refused_with_the_name_of_the_operation(name: str, reason: str) -> None:
    if name == "nnburst-onnxruntime" and find_spec("onnxruntime") is None:
        pytest.skip("needs the extra nnburst[onnx]")
    model = built([OperandDesc(nnburst.OperandType.TENSOR_FLOAT32, (0, 4))], lambda b, x: b.softmax(x))
    with pytest.raises(GeneralFailure, match=rf"{name} cannot run operation 0 \(SOFTMAX\): {reason}"):
        create_device(name).prepare_model(model)


def test_unknown_name_says_what_there_is(service: nnburst.Service, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"no model 'ad': nnburst-function has .* \['accumulate', 'add'"):
        service.session("ad")
    with pytest.raises(InvalidArgument, match="no model 'add': nnburst-reference has no models by name"):
        service.session("add", device="nnburst-reference")
    with pytest.raises(InvalidArgument, match=r"there is no file .* needs service="):
        nnburst.Session("add")
    with pytest.raises(InvalidArgument, match=r"detectr.onnx' cannot be opened: No such file or directory"):
        nnburst.Session(str(tmp_path / "detectr.onnx"), device="nnburst-reference", service=service)
    for no_name, says in (
        ("", r"no model '': nnburst-function has only the functions \['accumulate', 'add', .*\]$"),
        ("/", "no device reads the directory '/'; give a file whose name ends with .onnx or .tflite"),
        ("models/add.pb", "there is no file 'models/add.pb'"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{says}"):
            service.session(no_name)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        ("mine_filters:undeclared", r"'undeclared' is not declared; .*put @nnburst\.declare\(inputs"),
        (
            "mine_filters:nothing",
            r"has no 'nothing'; it has the declared functions \['accumulate', 'add', .*@nnburst\.declare",
        ),
        ("no_such_module:f", r"no module 'no_such_module' .*the path of its file \(no_such_module.py:f\).* PYTHONPATH"),
        ("mine_filters", "give FILE.py:FUNCTION or package.module:FUNCTION$"),
        ("net.onnx", "a model in a file is --model NAME=net.onnx$"),
        ("no_such_file.py:f", "there is no file '.*/no_such_file.py'"),
    ],
)
def test_what_is_no_declared_function_is_refused_with_the_remedy(directory: Path, call: str, remedy: str) -> None:
    with pytest.raises(DeviceUnavailable, match=f"^{call}: .*{remedy}"):
        nnburst.in_process(devices=[f"nnburst-function:call={call}"])


@pytest.mark.parametrize("failing", ["1 / 0", "import no_such_module_here", "x = ("])
def test_module_that_cannot_be_imported_is_refused_with_the_line(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "fails_early.py").write_text(f"# a comment\n{failing}\n")
    with pytest.raises(DeviceUnavailable, match=r"cannot be imported: \w+Error: .*fails_early.py, line 2\)"):
        create_device(f"nnburst-function:call={tmp_path}/fails_early.py:f")
    assert "fails_early" not in sys.modules


def test_functions_of_a_file_find_the_files_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "beside_it.py").write_text("ONE = 1")
    declared = "@declare(inputs=[Tensor('x', 'int32', (1,))], outputs=[Tensor('y', 'int32', (1,))])\n"
    functions = "".join(f"{declared}def {name}(x):\n    return x + ONE\n" for name in ("first", "second"))
    (tmp_path / "of_a_file.py").write_text(
        f"from beside_it import ONE\nfrom nnburst.devices.function import Tensor, declare\n{functions}"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with nnburst.launch(devices=["nnburst-function:call=of_a_file.py:first+of_a_file.py:second"]) as service:
        for name in ("first", "second"):
            with service.session(name) as session:
                assert session.run(None, {"x": np.int32([4])})[0].tolist() == [5]


def test_file_whose_name_another_module_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "contextlib.py").write_text("")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(DeviceUnavailable, match=r"another module is called 'contextlib' \(.*\); rename the file"):
        create_device(f"nnburst-function:call={tmp_path}/contextlib.py:f")


def test_two_functions_of_one_name_are_refused(directory: Path) -> None:
    (directory / "more_filters.py").write_text(SOURCE)
    with pytest.raises(InvalidArgument, match="more_filters:add: there is a function 'add' already"):
        create_device("nnburst-function:call=mine_filters:add+mine_filters:add+more_filters:add")


def test_model_that_is_not_as_imported_is_refused(service: nnburst.Service) -> None:
    device = service.device("nnburst-function")
    model = device.import_model("name:add").model
    assert device.get_supported_operations(model) == (True,)
    changed = [replace(model, operand_values=other) for other in (b"sum", b"os.", b"\xff  ")]
    for index, change in ((1, {"dimensions": (2, 4)}), (2, {"type": 4}), (3, {"dimensions": (0, 3)})):
        operands = list(model.main.operands)
        operands[index] = replace(operands[index], **change)  # type: ignore[arg-type]
        changed.append(replace(model, main=replace(model.main, operands=tuple(operands))))
    for other in changed:
        assert device.get_supported_operations(other) == (False,)
        with pytest.raises(GeneralFailure, match="CALL"):
            device.prepare_model(other)


def test_declaration_of_what_cannot_be_passed_is_refused() -> None:
    x, y = Tensor("x", "float32"), Tensor("y", "float32")
    unnamed: Any = Tensor(3, "float32")  # type: ignore[arg-type]
    for inputs, outputs in (([x], []), ([x], [x]), ([x, x], [y]), ([unnamed], [y])):
        with pytest.raises(InvalidArgument, match="names of their own"):
            declare(inputs=inputs, outputs=outputs)
    for dtype in ("U5", "object", "float33", None):
        with pytest.raises(InvalidArgument, match=rf"^tensor 's' has dtype {dtype!r}; give that of numbers"):
            declare(inputs=[Tensor("s", dtype)], outputs=[y])
    wrong: Any
    for wrong in (3, "n", (-1,), (2**32,), (1.0,), (np.int64(3),), (True,)):
        with pytest.raises(InvalidArgument, match=r"^tensor 's' has shape .*; give its dimensions in a tuple"):
            declare(inputs=[Tensor("s", "float32", wrong)], outputs=[y])
    with pytest.raises(InvalidArgument, match=r"^needs is '/etc'; give nnburst\.Needs"):
        declare(inputs=[x], outputs=[y], needs="/etc")  # type: ignore[arg-type]
    for wrong in (x, "x", ["x"], None, iter([x])):
        with pytest.raises(InvalidArgument, match=r"^inputs is .*; give a list of nnburst\.Tensor\(name"):
            declare(inputs=wrong, outputs=[y])
        with pytest.raises(InvalidArgument, match=r"^outputs is .*; give a list of nnburst\.Tensor"):
            declare(inputs=[x], outputs=wrong)
    for wrong in (3, *(f"x{suffix.upper()}" for suffix in SUFFIXES)):
        with pytest.raises(InvalidArgument, match=rf"^name is {wrong!r}; give a string that does not end"):
            declare(inputs=[x], outputs=[y], name=wrong)
