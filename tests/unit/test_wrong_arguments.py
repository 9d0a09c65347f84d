"""What people get wrong is refused where they wrote it, in one sentence, with the way out; it costs nobody anything."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import functools
import inspect
import math
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
from nnburst import BadState, InvalidArgument, Memory, ModelBuilder, Needs, Operand, OperandType, OperationType
from nnburst._options import SessionKeywords
from nnburst.burst import ExecutionBurstController
from nnburst.cli import main
from nnburst.cli.serve.command import _batching
from nnburst.cli.serve.repository import Repository
from nnburst.devices import registry
from nnburst.devices.function import declare
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.model import Request, RunOptions
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, RequestArgument
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process.discovery import claim
from nnburst.service.process.launch import start_child
from support.models import compiled, relu
from support.users import as_user

X = np.ones(4, np.float32)
FLOATS = OperandType.TENSOR_FLOAT32
MEMORY = Memory.ashmem(64)
KERNEL = np.ones((1, 1, 1, 1), np.float32)


@pytest.fixture(scope="module")
def session() -> Iterator[nnburst.Session]:
    with nnburst.launch(devices=["nnburst-reference"]) as service, service.session(relu()) as session:
        session.run(None, {"x": X})
        yield session


def image() -> tuple[ModelBuilder, Operand]:
    b = ModelBuilder()
    return b, b.input("x", FLOATS, (1, 4, 4, 1))


def of_image(method: str, *arguments: Any, **options: Any) -> Any:
    b, x = image()
    return getattr(b, method)(x, *arguments, **options)


def relu_with(outputs: Any) -> Any:
    b, x = image()
    return b.operation(OperationType.RELU, x, outputs=outputs)


def compilation(session: nnburst.Session) -> nnburst.nnapi.Compilation:
    return nnburst.nnapi.Compilation(relu(), session.service)


def execution(session: nnburst.Session) -> nnburst.Execution:
    return nnburst.nnapi.Execution(session.compilation)


class Tensor:
    """Looks like a torch.Tensor with gradients."""

    def __array__(self, *_: object, **__: object) -> np.ndarray:
        raise RuntimeError("Use tensor.detach().numpy() instead.")


NO_MODEL = "give a path.* torch.*@nnburst.declare"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda s: s.run(None, [X]), "dict of arrays"),
        (lambda s: s.run(None, None), "dict of arrays"),
        (lambda s: s.run(None, X), "dict of arrays"),
        (lambda s: s.run(None, {"x": [[1], [1, 2]]}), "'x' cannot be made an array"),
        (lambda s: s.run(None, {"x": None}), "'x' has no array, but None; give one of float32"),
        (lambda s: s.run(None, {"x": Tensor()}), r"'x' cannot be made an array: Use tensor\.detach\(\)\.numpy"),
        (lambda s: s.run(None, {"x": [Tensor()]}), r"'x' cannot be made an array: Use tensor\.detach\(\)\.numpy"),
        (lambda s: s.run(None, {"y": X}), r"^no inputs \['y'\]; inputs \['x'\] are missing; .* takes \['x'\]$"),
        (lambda s: s.run(None, {}), r"^inputs \['x'\] are missing; this model takes \['x'\]$"),
        (lambda s: s.run("y", {"x": X}), r"give \['y'\]"),
        (lambda s: s.run([0], {"x": X}), "no outputs"),
        (lambda s: s.run(X), r"output_names is a ndarray; .*session\.run\(None, inputs\)"),
        (lambda s: s.run([["y"]], {"x": X}), "no outputs"),
        (lambda s: s.run(None), r"^inputs \['x'\] are missing; this model takes \['x'\]$"),
        (lambda s: Repository({"m.onnx": "FILE"}), "sessions take 'm.onnx' for a file; call the model 'm'"),
        (lambda s: s.bind(state=["y"]), "state is a dict"),
        (lambda s: s.bind(shapes=[("x", 4)]), "shapes is a dict"),
        (lambda s: s.bind(initial_state={"x": X}), "needs state"),
        (lambda s: Memory.ashmem(4.0), "whole number of bytes"),
        (lambda s: Memory.ashmem("4"), "whole number of bytes"),
        (lambda s: nnburst.launch(devices=[]), "at least one device"),
        (lambda s: nnburst.in_process(devices=[]), "at least one device"),
        (lambda s: nnburst.in_process(devices=None), "devices=None"),
        (lambda s: nnburst.launch(devices=[None]), "at least one device"),
        (lambda s: nnburst.launch(devices="nnburst\0"), "at least one device"),
        (lambda s: nnburst.launch(quotas=["models"]), "give a dict"),
        (lambda s: nnburst.launch(quotas={"connections": 2}), "connections=2: give a whole number for one of models"),
        (lambda s: nnburst.Session(relu(), service=1), "service is int"),
        (lambda s: s.service.session(bytearray(b"x")), f"model is a bytearray; {NO_MODEL}"),
        (lambda s: s.service.session(X), f"model is a ndarray; {NO_MODEL}"),
        (lambda s: s.service.session(ModelBuilder()), f"model is a ModelBuilder; {NO_MODEL}"),
        (lambda s: create_device("nnburst-onnxruntime:threds=2"), r"has no option 'threds'; it has .*threads"),
        (lambda s: create_device("nnburst-reference:x=1"), "has no option 'x'; it has none"),
        (lambda s: nnburst.nnapi.Compilation(relu(), 1), "must be Device objects"),
        (lambda s: list(s.run_many(1)), "iterable of dicts"),
        (lambda s: s.bind(state={"y": []}), "give {output: input}"),
        (lambda s: s.service.link_to_death("x"), "on_death is str"),
        (lambda s: execution(s).set_input("0", X), "input '0'"),
        (lambda s: s.burst.free_memory("x"), "expected a Memory, got 'x'"),
        (lambda s: execution(s).set_input(0, X, dimensions=1), "input 0: dimensions=1"),
        (lambda s: execution(s).set_input(0, X, dimensions="4"), "input 0: a dimension is '4'"),
        (lambda s: execution(s).set_output(0, np.zeros((4, 2), np.float32)[:, 0]), "0: the array must be C-contiguous"),
        (lambda s: execution(s).set_input_from_memory(0, MEMORY, "0", 16), "input 0: offset is '0'"),
        (lambda s: execution(s).set_output_from_memory(0, MEMORY, 0, None), "output 0: length is None"),
        (lambda s: execution(s).start_compute_with_dependencies(None), "wait_for is NoneType"),
        (lambda s: compilation(s).set_caching_auto(1.5), "cache directory is float"),
        (lambda s: compilation(s).set_caching_auto("cache", limits=1), "limits is int"),
        (lambda s: Memory.ashmem(4, None), "name of a memory"),
        (lambda s: Memory.mmap_fd(2**31, 4), "file descriptor 2147483648"),
        (lambda s: Memory.mmap_fd(0, 4, offset=None), "offset is None"),
        (lambda s: Memory.mmap_fd(0, 4, prot="rw"), "prot is 'rw'"),
        (lambda s: Memory.posix_shm(None, 4), "expected a name"),
        (lambda s: Memory.unlink_posix_shm("\ud800"), "expected a name"),
        (lambda s: Memory.hardware_buffer(4, 4, []), "image format"),
        (lambda s: Memory.from_image(0, 1), "expected an ImageLayout"),
        (lambda s: ModelBuilder().input("x", FLOATS, 4), "dimensions=4"),
        (lambda s: ModelBuilder().input("x", FLOATS, ("n",)), "a dimension is 'n'"),
        (lambda s: ModelBuilder().input("x", FLOATS, (4,), scale="1"), "scale='1'"),
        (lambda s: ModelBuilder().input(["x"], FLOATS, (4,)), "name of an input"),
        (lambda s: ModelBuilder().add_operand("float32", (1, 4)), "type='float32': give a member of OperandType, such"),
        (lambda s: image()[0].operation("RELU", image()[1]), "'RELU': give a member of OperationType, such as Operat"),
        (lambda s: image()[0].add_operation("RELU", [0], [0]), "give a member of OperationType"),
        (lambda s: ModelBuilder().output("y", None), "expected an Operand as output 'y', got None"),
        (lambda s: ModelBuilder().relu(None), "x=None; give an Operand"),
        (lambda s: image()[0].branch(0, relu(), relu(), 0), "operands=0; give a list"),
        (lambda s: image()[0].loop(None, relu(), []), "expected a Model"),
        (lambda s: image()[0].branch(0, relu(), relu(), []), "expected an Operand or an array, got 0"),
        (lambda s: image()[0].loop(relu(), relu(), 0), "operands=0; give a list"),
        (lambda s: of_image("max_pool_2d", None), "give a whole number or a pair"),
        (lambda s: of_image("max_pool_2d", 2, padding=3), "padding is 3"),
        (lambda s: of_image("max_pool_2d", 2, activation=[]), "activation is"),
        (lambda s: of_image("softmax", "x"), "'x' does not fit into FLOAT32"),
        (lambda s: s.service.session(relu(), on_death=X), "choose 'raise' or 'restart'"),
        (lambda s: nnburst.launch(restart=X), "restart is True or False, not ndarray"),
        (lambda s: s.bind(measure=X), "measure is True or False, not ndarray"),
        (lambda s: Memory.from_handle("x", []), "expected a MemoryHandle, got 'x'"),
        (lambda s: Memory.from_handle(None, ()), "expected a MemoryHandle, got None"),
        (lambda s: Memory.from_handle(MEMORY.handle, None), "expected file descriptors, got None"),
        (lambda s: Memory.from_handle(MEMORY.handle, ["3"]), r"expected file descriptors, got \['3'\]"),
        (lambda s: Memory.from_handle(MEMORY.handle, [2**31]), "expected file descriptors"),
        (lambda s: compilation(s)._set_cache_source("cache"), "expected a CacheSource, got 'cache'"),
        (lambda s: of_image("conv_2d", KERNEL, "x"), "bias='x'; give an array of numbers, or an Operand"),
        (lambda s: of_image("conv_2d", KERNEL, [[1], [1, 2]]), "bias=.*different lengths"),
        (lambda s: of_image("conv_2d", KERNEL, True), "a constant tensor has rank 1 or more"),
        (lambda s: of_image("depthwise_conv_2d", KERNEL, {}), "bias={}; give an array of numbers"),
        (lambda s: of_image("fully_connected", np.ones((1, 16), np.float32), "x"), "bias='x'"),
        (lambda s: of_image("conv_2d", X), "filter has rank 1; it must be 4"),
        (lambda s: relu_with(outputs="x"), "outputs='x'; give a list"),
        (lambda s: relu_with(outputs=[1]), "outputs has 1; give a dict for each"),
        (lambda s: relu_with(outputs=[{"typ": 1}]), "outputs has typ; give a dict for each, of type, dimensions"),
        (lambda s: relu_with(outputs=[{"type": "x"}]), "give a member of OperandType"),
        (lambda s: relu_with(outputs=[{"dimensions": 1}]), "dimensions=1; give a list"),
        (lambda s: relu_with(outputs=[{}, {}]), "outputs describes 2, but it has 1"),
        (lambda s: of_image("relu", dimensions=1), "dimensions=1; give a list"),
    ],
)
def test_wrong_argument_is_named(call: Callable[[Any], Any], says: str, session: nnburst.Session) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(session)
    assert session.run(None, {"x": X})[0][0] == 1


@pytest.mark.parametrize(
    "arguments",
    [("foo", (1,)), ("V0", (2,)), ("S0", (2,)), (np.float32, ("a",)), (np.float32, (1.5,)), (np.float32, (2,), 1.0)],
)
def test_view_that_cannot_be_is_refused(arguments: tuple[Any, ...]) -> None:
    with Memory.ashmem(64) as memory, pytest.raises(InvalidArgument):
        memory.array(*arguments)


def test_shape_of_one_axis_may_be_a_number() -> None:
    with Memory.ashmem(64) as memory:
        assert memory.array(np.float32, 8).shape == (8,)  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [np.float32(30), np.int64(30), 30, math.inf, 1e300, None])
def test_timeout_is_any_number_of_seconds(timeout: Any, session: nnburst.Session) -> None:
    with session.service.session(relu(), timeout=timeout, polling_window=np.float32(0)) as other:
        assert other.run(None, {"x": X})[0][0] == 1


def test_service_may_take_as_long_as_it_likes() -> None:
    for timeout in (math.inf, None):
        nnburst.launch(devices=["nnburst-noop"], open_timeout=timeout).close()


def test_one_device_may_be_given_by_its_name() -> None:
    with nnburst.in_process(devices="nnburst-noop") as service:
        assert service.devices[0].name == "nnburst-noop"


@pytest.fixture(scope="module")
def connection() -> Iterator[ServiceConnection]:
    with start_child(["nnburst-reference"]) as connection:
        yield connection


def one(memory: Any, **changes: Any) -> Request:
    fields: dict[str, Any] = {"has_no_value": False, "location": DataLocation(0, 0, 16), "dimensions": ()} | changes
    return Request((RequestArgument(**fields),), (RequestArgument(False, DataLocation(0, 16, 16)),), (memory,))


def test_arguments_that_no_message_can_carry_do_not_end_the_service(connection: ServiceConnection) -> None:
    """The other side would take it for an attack; so it is refused here."""
    device = connection.devices[0]
    with device.prepare_model(relu()) as prepared, Memory.ashmem(32) as memory:
        roles = [BufferRole(0, 0)]
        attempts: dict[str, Callable[[], Any]] = {
            "long source": lambda: device.import_model("x" * 5000),
            "token": lambda: prepared.execute_synchronously(one(BufferId(-1))),
            "big token": lambda: prepared.execute_synchronously(one(BufferId(2**31))),
            "deadline": lambda: prepared.execute_synchronously(one(memory), RunOptions(deadline_ns=-5)),
            "loop timeout": lambda: prepared.execute_synchronously(one(memory), RunOptions(loop_timeout_ns=-1)),
            "measure": lambda: prepared.execute_synchronously(one(memory), RunOptions(7)),  # type: ignore[arg-type]
            "preparation deadline": lambda: device.prepare_model(relu(), CompileJob(deadline_ns=-1)),
            "rank": lambda: device.allocate(BufferDesc((1,) * 1000), [prepared], roles, []),
            "roles": lambda: device.allocate(BufferDesc(), [prepared], [BufferRole(0, 0, "x")], []),  # type: ignore[arg-type]
            "copy dimensions": lambda: device.allocate(BufferDesc(), [prepared], roles, []).copy_from(
                memory, (1,) * 1000
            ),
            "float dimensions": lambda: prepared.execute_synchronously(one(memory, dimensions=(8 / 2,))),
            "pool index": lambda: prepared.execute_synchronously(one(memory, location=DataLocation("a", 0, 16))),  # type: ignore[arg-type]
        }
        for wrong, attempt in attempts.items():
            with contextlib.suppress(InvalidArgument, nnburst.MissedDeadline):
                assert attempt()[0] is not nnburst.errors.ErrorStatus.NONE, wrong
            assert connection.alive, wrong
            assert prepared.execute_synchronously(one(memory))[0] is nnburst.errors.ErrorStatus.NONE


def test_token_that_no_message_can_carry_does_not_end_a_burst(connection: ServiceConnection) -> None:
    with connection.devices[0].prepare_model(relu()) as prepared, ExecutionBurstController.create(prepared) as burst:
        assert burst.compute(one(BufferId(-1)), timeout=20)[0] is not nnburst.errors.ErrorStatus.NONE
        with Memory.ashmem(32) as memory:
            assert burst.compute(one(memory), timeout=20)[0] is nnburst.errors.ErrorStatus.NONE


def test_there_is_no_result_before_the_first_run(connection: ServiceConnection) -> None:
    with (
        connection.devices[0].prepare_model(relu()) as prepared,
        ExecutionBurstController.create(prepared) as burst,
        Memory.ashmem(32) as memory,
    ):
        execution = burst.bind(one(memory))
        with pytest.raises(BadState, match="not run"):
            _ = execution.result
        execution.run()
        assert execution.result[0] is nnburst.errors.ErrorStatus.NONE


# ---- sentences with the way out ------------------------------------------------------------------------------------


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
    with compiled(relu((2, 3)), service) as compilation:
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
        (b"\x18\0\0\0ORTM\0", r"in ONNX Runtime's own format: take the \.onnx file that it was made from$"),
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
            lambda: session.run(inputs),
            lambda: asyncio.run(session.arun(inputs)),
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
