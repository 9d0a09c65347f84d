"""What people get wrong: one sentence each, with the way out. What a message recommends exists."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import inspect
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import nnburst
import nnburst.fmq
import nnburst.testing
from nnburst import InvalidArgument, ModelBuilder, Needs, OperandType
from nnburst.burst import ExecutionBurstController
from nnburst.cli import main
from nnburst.cli.serve.command import _batching
from nnburst.devices import registry
from nnburst.devices.function import declare
from nnburst.devices.registry import create_device
from nnburst.options import SessionKeywords
from nnburst.service.process.discovery import claim
from nnburst.service.process.launch import start_child
from support.models import relu
from support.users import as_user

PACKAGE = Path(nnburst.__file__).parent


@pytest.fixture(scope="module")
def service() -> Iterator[nnburst.Service]:
    with nnburst.launch(devices=["nnburst-reference"]) as service:
        yield service


def kept(service: nnburst.Service) -> Iterator[tuple[str, Any]]:
    """Yield one of each object that belongs to its process, with what its message recommends."""
    with service.session(relu((2, 3))) as session, session.bind() as execution:
        yield "open one in each process.*nnburst serve.*connect", session
        yield "in each process", execution
    yield "launch one in each process.*nnburst serve.*connect", service
    with nnburst.nnapi.Compilation(relu((2, 3)), service) as compilation:
        compilation.finish()
        yield "in each process", compilation
        with nnburst.nnapi.Burst(compilation) as burst:
            yield "in each process", burst
    with start_child(["nnburst-noop"]) as connection:
        yield "in each process", connection
        prepared = connection.devices[0].prepare_model(relu((2, 3)))
        with ExecutionBurstController.create(prepared) as controller:
            yield "in each process", controller


def test_closed_session_says_what_is_closed(service: nnburst.Service) -> None:
    session = service.session(relu((2, 3)))
    session.close()
    inputs = {"x": np.zeros((2, 3), np.float32)}
    for use in (
        lambda: session.run(None, inputs),
        session.bind,
        lambda: list(session.run_many([inputs])),
        session.__enter__,
    ):
        with pytest.raises(nnburst.BadState, match="the session is closed"):
            use()


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_of_one_process_say_what_to_do_instead(service: nnburst.Service, how: Callable[[Any], Any]) -> None:
    for remedy, thing in kept(service):
        with pytest.raises(InvalidArgument, match=rf"{type(thing).__name__} objects belong to the process.*{remedy}"):
            how(thing)


@pytest.mark.parametrize("with_service", [False, True])
@pytest.mark.parametrize(
    ("name", "says", "is_missing"),
    [
        ("saved", r"no device reads the directory '.*saved'; give a file whose name ends with \.onnx", False),
        ("net.pt", r"no device reads '.*net\.pt'; give a .* with \.onnx or \.tflite: torch\.onnx\.export", False),
        (
            "none.pt",
            r"^there is no file '.*none\.pt'; devices read files whose names end with \.onnx or \.tflite$",
            True,
        ),
    ],
)
def test_path_that_no_device_reads(
    service: nnburst.Service, tmp_path: Path, with_service: bool, name: str, says: str, is_missing: bool
) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "net.pt").write_bytes(b"x")
    with pytest.raises(InvalidArgument, match=says) as raised:
        nnburst.Session(tmp_path / name, service=service if with_service else None)
    assert isinstance(raised.value, FileNotFoundError) is is_missing


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"version https://git-lfs.github.com/spec/v1\n", "fetch the file itself with git lfs pull$"),
        (b"<!DOCTYPE html>", "but a page of the web: fetch the file itself$"),
        (b"PK\x03\x04", r"as torch\.save\(\) writes one: export the model with torch\.onnx\.export\(\)$"),
        (b"no model", "fetch it again if it was cut off, else export it anew$"),
        (b"\x08\x0a", "it has no graph; fetch it again"),
    ],
)
def test_file_that_is_no_onnx_model_is_named_with_the_way_out(tmp_path: Path, data: bytes, says: str) -> None:
    pytest.importorskip("onnxruntime")
    path = tmp_path / "net.onnx"
    with nnburst.in_process(devices=["nnburst-onnxruntime"]) as service:
        with pytest.raises(FileNotFoundError, match=r"net\.onnx' cannot be opened: No such file"):
            service.session(path)
        path.write_bytes(data)
        for source, what in ((path, rf"model file '{path}'"), (data, "the bytes of the model")):
            with pytest.raises(InvalidArgument, match=f"^{what}: this is no ONNX model.*{says}"):
                service.session(source)


def test_inputs_in_the_wrong_place_are_not_printed(service: nnburst.Service) -> None:
    inputs: Any = {"x": np.full((2, 3), 7, np.float32)}
    with service.session(relu((2, 3))) as session, session.bind() as execution:
        for wrong in (
            lambda: execution.run(inputs),
            lambda: execution.run(inputs["x"]),
            lambda: execution.run(None, inputs),  # type: ignore[call-arg]
            lambda: session.run(None, inputs, inputs),
            lambda: session.run(inputs, None),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidArgument, match=r"session\.run\(None, inputs\)") as raised:
                wrong()
            assert "7." not in str(raised.value)


@pytest.mark.parametrize(
    ("wanted", "shape", "remedy"),
    [
        ((1, 3), (3,), "; add a batch dimension: array[None]"),
        ((0, 3, 4), (3, 4), "; add a batch dimension: array[None]"),
        ((0, 3, 4), (5, 3), ""),
        ((2, 3), (3,), ""),
        ((1, 3), (1, 4), ""),
    ],
)
def test_remedy_for_a_shape_is_one_that_works(
    service: nnburst.Service, wanted: tuple[int, ...], shape: tuple[int, ...], remedy: str
) -> None:
    with service.session(relu(wanted)) as session:
        with pytest.raises(InvalidArgument, match=r"^input 'x' has shape") as raised:
            session.run(None, {"x": np.zeros(shape, np.float32)})
    assert str(raised.value).endswith(f"got {shape}{remedy}")


def test_part_of_a_state_that_does_not_fit_is_named(service: nnburst.Service) -> None:
    b = ModelBuilder()
    x = b.input("x", OperandType.TENSOR_QUANT8_ASYMM, (2, 3), scale=0.5, zero_point=3)
    b.output("y", b.relu(x))
    b.output("z", b.dequantize(b.input("q", OperandType.TENSOR_QUANT8_ASYMM, (2, 3), scale=0.25, zero_point=3)))
    with service.session(b.build()) as session:
        for state, says in (
            ({"y": "q"}, r"state 'y' → 'q': output and input differ in scale \(0\.5 and 0\.25\)$"),
            ({"z": "x"}, r"differ in dtype \(float32 and uint8\), type \(3 and 5\), scale \(0\.0 and 0\.5\)"),
        ):
            with pytest.raises(InvalidArgument, match=says):
                session.bind(state=state)


def test_connect_without_a_name_finds_what_serve_without_one_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNBURST_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(nnburst.DeviceUnavailable, match="no service runs at"):
        nnburst.connect(open_timeout=0)
    with contextlib.closing(claim("nnburst")), pytest.raises(nnburst.MissedDeadline):  # it says no hello
        nnburst.connect(open_timeout=0)


@pytest.mark.parametrize(("option", "rows", "waits"), [("--batch", ["8"], ()), ("--batch-wait", (), ["m=1ms"])])
def test_batches_of_no_model_are_refused(option: str, rows: Sequence[str], waits: Sequence[str]) -> None:
    says = f"^{option} [m=18s]+: there is no model; give --model NAME=FILE or --models DIR$"
    with pytest.raises(InvalidArgument, match=says):
        _batching({}, None, rows, waits)


def test_trace_of_no_program_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text("of yesterday")
    for name in ("trace.json", "new.json"):
        done = CliRunner().invoke(main, ["trace", "-o", str(tmp_path / name), "no-such-program"])
        assert (done.exit_code, done.output) == (1, "Error: no-such-program cannot be run: there is no such program\n")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("trace.json", "of yesterday")]


def test_arrays_of_another_type_and_arrays_without_elements(service: nnburst.Service) -> None:
    with service.session(relu((0, 3))) as session:
        with pytest.raises(InvalidArgument, match=r"'x' is float32, got bool; convert it with \.astype\('float32'\)"):
            session.run(None, {"x": np.zeros((2, 3), bool)})
        with pytest.raises(InvalidArgument, match=r"'x' has no elements \(shape \(0, 3\)\).*; leave the run out"):
            session.run(None, {"x": np.zeros((0, 3), np.float32)})


def test_argument_that_is_too_large_is_named(service: nnburst.Service) -> None:
    with service.session(relu((0,))) as session:
        with pytest.raises(InvalidArgument, match=r"'[xy]' of shape \(4294967295,\) takes 17179869180 bytes; .*4 GiB"):
            session.bind(shapes={"x": (2**32 - 1,), "y": (2**32 - 1,)})


def test_forked_child_is_told_what_to_open_instead(service: nnburst.Service) -> None:
    with service.session(relu((2, 3))) as session, session.bind() as execution:
        for use in (execution.run, session.bind):
            said = as_user(None, use)
            assert said.startswith("BadState: ")
            assert "inherited through fork()" in said
            assert "open a session" in said
            assert "ECHILD" not in said


def test_shared_arrays_are_written_into_not_replaced(service: nnburst.Service) -> None:
    with service.session(relu((2, 3))) as session, session.bind() as execution:
        arrays: Any = execution.inputs
        with pytest.raises(InvalidArgument, match=r"write into it: \['x'\]\[:\] = …"):
            arrays["x"] = np.zeros(3, np.float32)
        for change in (lambda: arrays.update(x=1), lambda: arrays.pop("x"), arrays.clear):
            with pytest.raises(InvalidArgument, match="none can be added, replaced or removed"):
                change()
        with pytest.raises(InvalidArgument, match="none can be"):
            del arrays["x"]
        for kind in (KeyError, InvalidArgument):
            with pytest.raises(kind, match=r"^no shared array 'image'; there are \['x'\]$"):
                arrays["image"]
        execution.run()


# ---- what messages recommend ---------------------------------------------------------------------------------------


@functools.cache
def texts() -> list[tuple[str, str]]:
    """Return file and text of all strings outside of the command line, with … for what is put in; no docstrings."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        if "cli" in path.relative_to(PACKAGE).parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = ""  # a docstring
            elif isinstance(node, ast.JoinedStr):
                parts = (str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
                found.append((path.name, "".join(parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
                found.append((path.name, node.value))
    return found


def options() -> set[str]:
    """Names of the parameters of everything that users call, and of the options of devices."""
    things = [
        *(getattr(room, name) for room in (nnburst, nnburst.fmq, nnburst.testing) for name in room.__all__),
        start_child,
        Needs,
        declare,
    ]
    things += [getattr(import_module(module), factory) for module, factory in registry._BUILT_IN.values()]
    found = {*SessionKeywords.__annotations__}
    for thing in things:
        for member in [thing, *(getattr(thing, inner) for inner in dir(thing) if not inner.startswith("_"))]:
            if callable(member):
                with contextlib.suppress(ValueError):  # builtins
                    found |= inspect.signature(member).parameters.keys()
    return found


def test_options_that_messages_name_exist() -> None:
    named = {
        (option, file)
        for file, text in texts()
        if not re.search('^PRAGMA|^<|</|">|TypedDict', text)  # SQL, HTML, generated code
        for option in re.findall(r"(?<![\w.-])([a-z_]{3,})=(?![=\d(])", text)
    }
    known = options()
    assert {"timeout", "log_level"} <= {option for option, _ in named}
    assert not {(option, file) for option, file in named if option not in known}


def test_functions_that_messages_name_exist() -> None:
    known = set(nnburst.__all__) | {name for part in nnburst.__all__ for name in dir(getattr(nnburst, part))}
    named = {
        (name, file)
        for file, text in texts()
        for name in re.findall(r"\b(?:nnburst|Memory|Session)\.([A-Za-z_]\w+)", text)
    }
    assert named
    modules = {path.stem for path in PACKAGE.rglob("*")} | {"devices", "cache"}
    assert not {(name, file) for name, file in named if name not in known | modules}


def test_devices_that_messages_name_exist() -> None:
    names = {
        name for _, text in texts() for name in re.findall(r"\bnnburst-(?:reference|onnxruntime|function|noop)\b", text)
    }
    for name in names:
        create_device(name).close()
