"""What people get wrong is refused where they wrote it, by name, and costs nobody anything."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import BadState, InvalidArgument, Memory, ModelBuilder, Operand, OperandType, OperationType
from nnburst.burst import ExecutionBurstController
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.model import Request, RunOptions
from nnburst.model.types import BufferDesc, BufferId, BufferRole, DataLocation, RequestArgument
from nnburst.service.client.connection import ServiceConnection
from nnburst.service.process.launch import start_child
from support.models import relu

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
        (lambda s: s.run([["y"]], {"x": X}), "no outputs"),
        (lambda s: s.bind(state=["y"]), "state is a dict"),
        (lambda s: s.bind(shapes=[("x", 4)]), "shapes is a dict"),
        (lambda s: s.bind(initial_state={"x": X}), "needs state"),
        (lambda s: Memory.ashmem(4.0), "whole number of bytes"),
        (lambda s: Memory.ashmem("4"), "whole number of bytes"),
        (lambda s: nnburst.launch(open_timeout=math.nan), "timeout"),
        (lambda s: nnburst.launch(open_timeout=-1), "timeout"),
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
        (lambda s: s.burst.bind(rooms=X), "rooms is a dict by name, not ndarray"),
        (lambda s: s.burst.bind(rooms=["y"]), "rooms is a dict by name, not list"),
        (lambda s: s.burst.bind(rooms={"y": "4"}), "room of output 'y' is '4'; give a whole number of bytes"),
        (lambda s: s.burst.bind(rooms={"y": -1}), "room of output 'y' is -1"),
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
                assert attempt()[0] is not nnburst.ErrorStatus.NONE, wrong
            assert connection.alive, wrong
            assert prepared.execute_synchronously(one(memory))[0] is nnburst.ErrorStatus.NONE


def test_token_that_no_message_can_carry_does_not_end_a_burst(connection: ServiceConnection) -> None:
    with connection.devices[0].prepare_model(relu()) as prepared, ExecutionBurstController.create(prepared) as burst:
        assert burst.compute(one(BufferId(-1)), timeout=20)[0] is not nnburst.ErrorStatus.NONE
        with Memory.ashmem(32) as memory:
            assert burst.compute(one(memory), timeout=20)[0] is nnburst.ErrorStatus.NONE


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
        assert execution.result[0] is nnburst.ErrorStatus.NONE
