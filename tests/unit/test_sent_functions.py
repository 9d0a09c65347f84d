"""Functions that a program sends to a service of its own: by value, into the sandbox, and to no other service."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import DeviceUnavailable, GeneralFailure, InvalidArgument, OperandType, Tensor
from nnburst.devices.function import SentFunction
from nnburst.runtime.request.node_args import as_array
from support.models import relu
from support.processes import run_python
from support.services import shared_service
from support.waiting import until

ONE = {"x": np.ones(1, np.float32)}
FILTERS = """
import nnburst
from nnburst import Tensor

@nnburst.declare(inputs=[Tensor("x", "float32", (1,))], outputs=[Tensor("y", "float32", (1,))])
def double(x):
    return 2 * x
"""
declared = nnburst.declare(inputs=[Tensor("x", "float32", (1,))], outputs=[Tensor("y", "float32", (1,))])
pytest.importorskip("cloudpickle", reason="needs the extra nnburst[functions]")


def plus(n: int) -> Callable[[Any], Any]:
    """A function that no module has."""

    def add(x: Any) -> Any:
        return x + np.float32(n)

    return declared(add)


class Opening:
    """A value whose pickle opens a file for writing when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def opens_when_read(path: Path) -> Callable[[Any], Any]:
    value = Opening(path)
    return declared(lambda x: value and x)


def test_session_of_a_function_is_a_session_of_its_own_service() -> None:
    with nnburst.Session(plus(2)) as session:
        assert session.device.name == "nnburst-function"
        assert session.run(None, ONE)[0].tolist() == [3]
        assert repr(session).startswith("<Session of x (1) float32 → y (1) float32 on nnburst-function")


def test_program_with_thousands_of_places_for_modules_sends_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/nowhere/{i:0200}" for i in range(2000))])
    with nnburst.Session(plus(1)) as session:
        assert session.run(None, ONE)[0].tolist() == [2]


def test_function_is_sent_again_after_a_death() -> None:
    with nnburst.Session(plus(2), on_death="restart") as session:
        session.service.kill()
        until(lambda: not session.service.alive)
        assert session.run(None, ONE)[0].tolist() == [3]
        assert len(session.restarts) == 1


def test_launched_service_has_functions_by_their_names() -> None:
    three = nnburst.declare(inputs=[Tensor("x", np.float64, ())], outputs=[Tensor("y", "int64", ())], name="three")
    with nnburst.launch(functions=[plus(1), three(lambda x: np.int64(3))]) as service:
        assert service.devices[0].name == "nnburst-reference"
        with service.session("add") as add, service.session("three") as other:
            assert add.run(None, ONE)[0].tolist() == [2]
            assert other.run(None, {"x": 1})[0] == 3
        with pytest.raises(InvalidArgument, match=r"only the functions \['add', 'three'\]$"):
            service.session("four")
        with pytest.raises(InvalidArgument, match=r"'add' is code.*leave out service=.*nnburst serve"):
            service.session(plus(1))


def test_log_has_the_traceback_of_an_exception(tmp_path: Path) -> None:
    log, f = tmp_path / "log", declared(lambda x: x["no"])
    with nnburst.launch(functions=[f], log=log, log_level="info") as service, service.session("<lambda>") as session:
        with pytest.raises(GeneralFailure):
            session.run(None, ONE)
    assert f'File "{__file__}", line {f.__code__.co_firstlineno}, in <lambda>\n' in log.read_text()


def test_function_of_a_library_is_declared_by_the_program_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np.flip, "__nnburst__", None, raising=False)  # undone with what `declare` sets
    with nnburst.Session(declared(np.flip)) as session:
        assert session.run(None, ONE) == [1]


@pytest.mark.parametrize("function", [ONE.get, len, int])
def test_function_with_no_room_for_a_declaration_says_what_to_do(function: Any) -> None:
    says = rf"'{function.__name__}', a \w+, has no room for a declaration; declare a function that calls it"
    with pytest.raises(InvalidArgument, match=says):
        declared(function)


def test_two_of_one_name_and_a_device_of_functions_beside_them_are_refused() -> None:
    with pytest.raises(DeviceUnavailable, match="there is a function 'add' already"):
        nnburst.launch(functions=[plus(1), plus(2)])
    with pytest.raises(InvalidArgument, match="function 3 does not say what it takes and gives"):
        nnburst.launch(functions=3)
    with pytest.raises(InvalidArgument, match=r"function 'filters\.py:edges' does not say"):
        nnburst.launch(functions="filters.py:edges")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="name the functions there, or give functions=, not both"):
        nnburst.launch(devices=["nnburst-function:call=a.py:f"], functions=plus(1))


@pytest.mark.parametrize("wrong", [lambda x: x, np.abs, Opening])
def test_function_that_is_not_declared_says_what_to_do(wrong: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"put @nnburst\.declare\(inputs=\[…\], outputs=\[…\]\) above it"):
        nnburst.Session(wrong)


def test_function_of_the_program_is_sent_by_a_process_that_it_has_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    main = ModuleType("__mp_main__")
    exec(FILTERS, vars(main))
    monkeypatch.setitem(sys.modules, "__mp_main__", main)
    with nnburst.Session(main.double) as session:
        assert session.run(None, ONE) == [2]


@pytest.mark.parametrize(
    ("make", "why"),
    [(threading.Lock, "cannot pickle"), (lambda: nnburst.Memory.ashmem(8), "it refers to a Memory; declare")],
)
def test_what_cannot_be_pickled_is_named(make: Callable[[], object], why: str) -> None:
    value = make()
    with pytest.raises(InvalidArgument, match=rf"function '<lambda>' cannot be sent.*TypeError: {why}"):
        nnburst.Session(declared(lambda x: value and x))


def test_pickle_that_no_message_can_carry_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.devices.function._MOST_BYTES", 4096)
    table = np.zeros(1024, np.float32)
    with pytest.raises(InvalidArgument, match=r"'<lambda>' cannot be sent .* has \d,\d+ bytes, more than 4,096"):
        nnburst.Session(declared(lambda x: x + table[:1]))


def test_object_that_is_called_like_a_function_has_the_name_of_its_class() -> None:
    class Scale:
        def __init__(self, factor: int) -> None:
            self.factor = np.float32(factor)

        def __call__(self, x: Any) -> Any:
            return self.factor * x

    scale = declared(Scale(3))
    assert scale.__nnburst__.name == "Scale"  # type: ignore[attr-defined]
    with nnburst.Session(scale) as session:
        assert session.run(None, ONE) == [3]


def test_example_inputs_are_for_torch_modules() -> None:
    with pytest.raises(InvalidArgument, match="example_inputs are for torch modules"):
        nnburst.Session(plus(1), np.ones(1))


def test_without_cloudpickle_functions_of_modules_are_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    (tmp_path / "own_filters.py").write_text(FILTERS)
    monkeypatch.syspath_prepend(tmp_path)
    double = __import__("own_filters").double
    with nnburst.Session(double) as session:
        assert session.run(None, ONE)[0].tolist() == [2]
    double.__module__ = "__main__"
    with pytest.raises(
        DeviceUnavailable, match=r"'double' is sent with cloudpickle.*pip install 'nnburst\[functions\]'"
    ):
        nnburst.Session(double)
    del sys.modules["own_filters"]


def test_module_beside_the_program_in_the_home_directory_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "home_filters.py").write_text(FILTERS)
    (tmp_path / "app.py").write_text("import nnburst, home_filters\nnnburst.Session(home_filters.double)")
    done = run_python(str(tmp_path / "app.py"), env={**os.environ, "HOME": str(tmp_path)})
    assert "No module named 'home_filters'; its sandbox has" in done.stderr
    assert "except those in the home directory itself: move such a module into a folder" in done.stderr


# ---- attacks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "attempt",
    [
        'open("/etc/passwd").read()',
        'open(PLACE, "w")',
        '__import__("subprocess").run(["/bin/true"])',
        '__import__("socket").create_connection(("127.0.0.1", 9))',
        '__import__("os").kill(PARENT, 0)',
    ],
)
def test_sandbox_holds_for_a_function_that_was_sent(attempt: str, tmp_path: Path) -> None:
    place, parent = str(tmp_path / "made"), os.getpid()

    def tries(x: Any) -> Any:
        eval(attempt, {"PLACE": place, "PARENT": parent})
        return x

    with nnburst.Session(declared(tries)) as session:
        with pytest.raises(GeneralFailure, match=r"PermissionError.*sandbox"):
            session.run(None, ONE)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("sandbox", ["on", "off"])
def test_pickle_of_a_function_is_read_in_the_sandbox(sandbox: Any, tmp_path: Path) -> None:
    def opened() -> None:
        with nnburst.Session(opens_when_read(tmp_path / "made"), sandbox=sandbox) as session:
            assert session.run(None, ONE)[0].tolist() == [1]

    if sandbox == "off":
        opened()
    else:
        says = r"'<lambda>' cannot be read in its service: PermissionError.*: the sandbox .* @declare\(needs="
        with pytest.raises(GeneralFailure, match=says):
            opened()
    assert (tmp_path / "made").exists() is (sandbox == "off")


def test_module_that_opens_a_session_on_import_is_told_to_do_it_as_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "opens_on_import.py").write_text(f"{FILTERS}\nsession = nnburst.Session(double)\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = r"'double' cannot be read in its service: its module uses nnburst on import .* if __name__ == \"__main__\":"
    with pytest.raises(GeneralFailure, match=says):
        importlib.import_module("opens_on_import")


def test_service_of_a_module_that_launched_another_on_import_ends_without_a_traceback(tmp_path: Path) -> None:
    launches = "with nnburst.launch(devices=['nnburst-noop']):\n    pass\n"
    (tmp_path / "launches_on_import.py").write_text(f"{FILTERS}\n{launches}")
    with shared_service(tmp_path, f"{tmp_path}/launches_on_import.py:double") as shared:
        with nnburst.connect(shared.address) as service, service.session("double") as session:
            assert session.run(None, ONE)[0].tolist() == [2]
    assert "Traceback" not in shared.log.read_text()


def test_shared_service_gets_no_code(tmp_path: Path) -> None:
    evil, made = SentFunction.of(opens_when_read(tmp_path / "made")).code, tmp_path / "made"
    (tmp_path / "filters.py").write_text(FILTERS)

    with (
        shared_service(tmp_path, f"{tmp_path}/filters.py:double", "--sandbox=off") as shared,
        nnburst.connect(shared.address) as service,
    ):
        with pytest.raises(InvalidArgument, match="'<lambda>' is code"):
            service.session(opens_when_read(made))
        device = next(each for each in service.devices if _has_double(each))
        model = device.import_model("name:double").model
        for data in (evil, b"double" + evil):
            operands = list(model.main.operands)
            operands[0] = replace(operands[0], location=replace(operands[0].location, length=len(data)))
            forged = replace(model, operand_values=data, main=replace(model.main, operands=tuple(operands)))
            with pytest.raises(GeneralFailure, match=r"opens .*'double'.*, as imported|models are one CALL"):
                device.prepare_model(forged)
        with service.session("double") as session:
            assert session.run(None, ONE)[0].tolist() == [2]
    assert not made.exists()


def _has_double(device: Any) -> bool:
    with contextlib.suppress(GeneralFailure, InvalidArgument):
        return bool(device.import_model("name:double"))
    return False


# ---- dtypes and DLPack -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", np.float32, np.dtype("float32"), OperandType.TENSOR_FLOAT32])
def test_builder_and_tensor_take_dtypes_alike(dtype: Any) -> None:
    b = nnburst.ModelBuilder()
    assert b.input("x", dtype, (1, 4)).type is OperandType.TENSOR_FLOAT32
    assert Tensor("x", dtype) == Tensor("x", "float32")


@pytest.mark.parametrize(
    ("dtype", "says"),
    [
        ("float64", "give 'float32'"),
        (np.int64, "give 'int32'"),
        ("nonsense", "give an OperandType"),
        (None, "'float32'"),
    ],
)
def test_dtype_of_an_input_that_no_operand_has_is_refused(dtype: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=f"input 'x'.*{says}"):
        nnburst.ModelBuilder().input("x", dtype, (1, 4))


class Foreign:
    """An array of another library, which has DLPack and nothing of NumPy's."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **more: Any) -> Any:
        return self._array.__dlpack__(**more)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def test_tensor_of_a_gpu_is_refused_by_name_with_the_remedy() -> None:
    class OnGpu(Foreign):
        def __dlpack__(self, **more: Any) -> Any:
            raise BufferError("no such device")

        def __dlpack_device__(self) -> Any:
            return 2, 0

    tensor: Any = OnGpu(np.zeros((1, 3), np.float32))
    says = "'x' cannot be made an array: no such device; copy it to the CPU first"
    with nnburst.in_process() as service, service.session(relu((1, 3))) as session:
        with pytest.raises(InvalidArgument, match=f"^input {says}"):
            session.run(None, {"x": tensor})
        with pytest.raises(InvalidArgument, match=f"^memory of {says}"):
            session.bind(memory={"x": tensor})


def test_array_without_a_device_is_refused_with_its_own_words() -> None:
    class Deleted(Foreign):
        def __dlpack__(self, **more: Any) -> Any:
            raise RuntimeError("it has been deleted")

        def __dlpack_device__(self) -> Any:
            raise TypeError

    with pytest.raises(InvalidArgument, match=r"^input 'x' cannot be made an array: it has been deleted$"):
        as_array(Deleted(ONE), "input 'x'")


def test_arrays_with_dlpack_go_in_and_come_out_without_a_copy() -> None:
    x = np.array([[-1, 0, 2]], np.float32)
    with nnburst.in_process() as service, service.session(relu((1, 3))) as session, nnburst.Memory.ashmem(12) as memory:
        assert session.run(None, {"x": Foreign(x)})[0].tolist() == [[0, 0, 2]]  # type: ignore[dict-item]
        view = memory.array(np.float32, (1, 3))
        view[:] = x
        with session.bind(memory={"x": Foreign(view)}) as execution:  # type: ignore[dict-item]
            execution.run()
            out = np.from_dlpack(execution.outputs["y"])
            assert np.shares_memory(out, execution.outputs["y"])
            view[:] = 5
            execution.run()
            assert out.tolist() == [[5, 5, 5]]
        del view, out
