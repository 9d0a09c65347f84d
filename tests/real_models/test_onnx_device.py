"""The ONNX Runtime device against models and requests that no well-meaning client sends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import nnburst
from nnburst import Memory, Model, OperandType
from nnburst.devices import Device
from nnburst.devices.interfaces import CompileJob
from nnburst.devices.registry import create_device
from nnburst.errors import ErrorStatus, GeneralFailure, InvalidArgument, MissedDeadline
from nnburst.model import Request, RunOptions
from nnburst.model.types import DataLocation, Lifetime, MeasureTiming, OperandDesc, RequestArgument
from nnburst.service.process.launch import start_child
from support.onnx_models import FLOAT, RNG, TensorProto, graph, in_process, mlp, node, onnx


@pytest.fixture(scope="module", params=["in_process", pytest.param("service", marks=pytest.mark.check)])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param == "in_process":
        with_options = create_device("nnburst-onnxruntime:threads=1")
        yield with_options
        with_options.close()
        return
    connection = start_child(devices=("nnburst-onnxruntime:threads=1",))
    try:
        yield connection.devices[0]
    finally:
        connection.close()


def pool_of(data: bytes) -> Memory:
    memory = Memory.ashmem(len(data))
    memory.buffer[:] = data
    return memory


def imported(device: Device, proto: Any) -> Model:
    pool = pool_of(proto.SerializeToString())
    return replace(device.import_model("onnx", [pool]).model, pools=(pool,))


@pytest.fixture
def model(device: Device) -> Iterator[Model]:
    """x float [1, 16], k int64 [2] → y float [1, 16], k2 int64 [2]."""
    proto = graph(
        [node("Relu", ["x"], ["y"]), node("Add", ["k", "k"], ["k2"])],
        [("x", FLOAT, (1, 16)), ("k", TensorProto.INT64, (2,))],
        [("y", FLOAT, (1, 16)), ("k2", TensorProto.INT64, (2,))],
    )
    made = imported(device, proto)
    yield made
    made.pools[0].close()  # type: ignore[attr-defined]


def edit(model: Model, index: int, **changes: Any) -> Model:
    operands = list(model.main.operands)
    operands[index] = replace(operands[index], **changes)
    return replace(model, main=replace(model.main, operands=tuple(operands)))


def twice(model: Model) -> Model:
    first = model.main.operations[0]
    more = tuple(
        replace(o, lifetime=Lifetime.TEMPORARY_VARIABLE, number_of_consumers=0) for o in model.main.operands[-2:]
    )
    operands = tuple(replace(o, number_of_consumers=2 * o.number_of_consumers) for o in model.main.operands)
    again = replace(first, outputs=(len(operands), len(operands) + 1))
    return replace(model, main=replace(model.main, operands=operands + more, operations=(first, again)))


def swapped(model: Model) -> Model:
    file, x, k = model.main.operations[0].inputs
    operation = replace(model.main.operations[0], inputs=(file, k, x))
    return replace(model, main=replace(model.main, operations=(operation,)))


def other_operation(model: Model) -> Model:
    operation = replace(model.main.operations[0], type=model.main.operations[0].type + 1)
    return replace(model, main=replace(model.main, operations=(operation,)))


def file_twice(model: Model) -> Model:
    main = model.main
    operands = (*main.operands, main.operands[0])
    operation = replace(main.operations[0], inputs=(0, len(operands) - 1, *main.operations[0].inputs[1:]))
    return replace(model, main=replace(main, operands=operands, operations=(operation,)))


WRONG_MODELS: dict[str, tuple[Callable[[Model], Model], str]] = {
    "input has another type": (lambda m: edit(m, 1, type=OperandType.TENSOR_INT32), "was imported with"),
    "input has another rank": (lambda m: edit(m, 1, dimensions=(16,)), "was imported with"),
    "input has another size": (lambda m: edit(m, 1, dimensions=(1, 17)), "was imported with"),
    "extension type is another": (lambda m: edit(m, 2, type=m.main.operands[2].type + 4), "was imported with"),
    "output has another type": (lambda m: edit(m, 3, type=OperandType.TENSOR_FLOAT16), "was imported with"),
    "inputs in another order": (swapped, "was imported with"),
    "file is cut off": (lambda m: edit(m, 0, location=DataLocation(0, 0, 40)), "no ONNX model"),
    "file is there twice": (file_twice, "was imported with"),
    "two operations": (twice, "one GRAPH"),
    "unknown operation": (other_operation, "one GRAPH"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_model_that_contradicts_its_graph_is_refused(device: Device, model: Model, case: str) -> None:
    change, message = WRONG_MODELS[case]
    with pytest.raises((InvalidArgument, GeneralFailure), match=message):
        device.prepare_model(change(model))
    device.prepare_model(model).close()


def test_model_without_its_external_file_does_not_look_for_it_on_disk(
    device: Device, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    onnx.save(mlp(16, 1), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    monkeypatch.chdir(tmp_path)  # where ONNX Runtime would find it for the device of this process
    pool = pool_of((tmp_path / "m.onnx").read_bytes())
    found = device.import_model("onnx", [pool])
    assert found.files == ("", "w.bin")
    alone = replace(found.model, pools=(pool,))
    operation = replace(alone.main.operations[0], inputs=(0, *alone.main.input_indexes))
    operands = list(alone.main.operands)
    operands[1] = OperandDesc(OperandType.FLOAT32, lifetime=Lifetime.NO_VALUE)
    main = replace(alone.main, operands=tuple(operands), operations=(operation,))
    with pytest.raises(InvalidArgument, match=r"'w\.bin', which is missing"):
        device.prepare_model(replace(alone, main=main))
    pool.close()


def test_mutated_files_are_refused_or_run(device: Device) -> None:
    random = np.random.default_rng(11)
    outside = mlp(16, 2)
    for tensor in outside.graph.initializer:
        onnx.external_data_helper.set_external_data(tensor, "weights.bin")
        tensor.ClearField("raw_data")
    seeds = [mlp(16, 1, "n").SerializeToString(), outside.SerializeToString()]
    outcomes = set()
    for _ in range(300):
        data = bytearray(seeds[int(random.integers(len(seeds)))])
        for _ in range(int(random.integers(1, 4))):
            place = int(random.integers(len(data) if random.random() < 0.5 else min(len(data), 300)))
            if random.random() < 0.7:
                data[place] = int(random.integers(256))
            else:
                del data[place : place + int(random.integers(1, 5))]
        with pool_of(bytes(data)) as pool:
            try:
                found = device.import_model("onnx", [pool])
                device.prepare_model(replace(found.model, pools=(pool,) * len(found.files))).close()
                outcomes.add("ran")
            except (InvalidArgument, GeneralFailure) as error:
                assert "failed:" not in str(error)  # what the service says of errors that nobody foresaw
                outcomes.add(type(error).__name__)
    assert outcomes == {"ran", "InvalidArgument", "GeneralFailure"}


def test_operation_that_is_not_lowered_is_not_supported(device: Device) -> None:
    from nnburst import ModelBuilder

    builder = ModelBuilder()
    h = builder.relu(builder.input("x", OperandType.TENSOR_FLOAT32, (4,)))
    builder.output("y", builder.reduce_prod(h, [0], True))
    made = builder.build()
    assert device.get_supported_operations(made) == (True, False)
    with pytest.raises(GeneralFailure, match=r"operation 1 \(REDUCE_PROD\): it is not lowered"):
        device.prepare_model(made)


@pytest.mark.parametrize("source", ["", "onnx2", "name:x"])
def test_other_formats_are_not_imported(device: Device, source: str) -> None:
    with pool_of(b"x") as pool, pytest.raises(GeneralFailure, match="reads one 'onnx' file"):
        device.import_model(source, [pool])
    with pytest.raises(GeneralFailure, match="reads one 'onnx' file"):
        device.import_model("onnx", [])


# -- requests ----------------------------------------------------------------------------------------------------------


def argument(offset: int, length: int, pool: int = 0, dims: tuple[int, ...] = ()) -> RequestArgument:
    return RequestArgument(False, DataLocation(pool, offset, length), dims)


GOOD_INPUTS = (argument(0, 64), argument(64, 16))
GOOD_OUTPUTS = (argument(128, 64), argument(192, 16))
OMITTED = RequestArgument(has_no_value=True)


def run(device: Device, model: Model, inputs: Any, outputs: Any, pools: tuple[Memory, ...], **options: Any) -> Any:
    with closing(device.prepare_model(model)) as prepared:
        return prepared.execute_synchronously(Request(inputs, outputs, pools), RunOptions(**options))


@pytest.mark.parametrize(
    ("inputs", "outputs", "status"),
    [
        (GOOD_INPUTS, GOOD_OUTPUTS, ErrorStatus.NONE),
        ((GOOD_INPUTS[0], argument(64, 15)), GOOD_OUTPUTS, ErrorStatus.INVALID_ARGUMENT),
        ((GOOD_INPUTS[0], argument(64, 8)), GOOD_OUTPUTS, ErrorStatus.INVALID_ARGUMENT),
        ((GOOD_INPUTS[0], argument(64, 24, dims=(3,))), GOOD_OUTPUTS, ErrorStatus.INVALID_ARGUMENT),
        ((GOOD_INPUTS[0], argument(64, 16, dims=(1, 2))), GOOD_OUTPUTS, ErrorStatus.INVALID_ARGUMENT),
        (GOOD_INPUTS, (GOOD_OUTPUTS[0], argument(192, 8)), ErrorStatus.INVALID_ARGUMENT),
        (GOOD_INPUTS, (GOOD_OUTPUTS[0], argument(192, 16, dims=(4,))), ErrorStatus.INVALID_ARGUMENT),
        ((OMITTED, GOOD_INPUTS[1]), GOOD_OUTPUTS, ErrorStatus.GENERAL_FAILURE),
        (GOOD_INPUTS, (OMITTED, OMITTED), ErrorStatus.GENERAL_FAILURE),
        (GOOD_INPUTS, (OMITTED, GOOD_OUTPUTS[1]), ErrorStatus.NONE),
        ((GOOD_INPUTS[0], argument(67, 16)), (argument(131, 64), argument(201, 16)), ErrorStatus.NONE),
    ],
)
def test_request_is_checked_against_the_graph(
    device: Device, model: Model, inputs: Any, outputs: Any, status: ErrorStatus
) -> None:
    with Memory.ashmem(256) as pool:
        x = RNG.normal(size=(1, 16)).astype(np.float32)
        pool.array(np.float32, (1, 16))[:] = x
        offset = inputs[1].location.offset
        pool.buffer[offset : offset + 16] = np.int64([3, -4]).tobytes()
        got, _, _ = run(device, model, inputs, outputs, (pool,))
        assert got is status
        if status is ErrorStatus.NONE:
            where = outputs[1].location.offset
            assert np.frombuffer(bytes(pool.buffer[where : where + 16]), np.int64).tolist() == [6, -8]
            if not outputs[0].has_no_value:
                where = outputs[0].location.offset
                y = np.frombuffer(bytes(pool.buffer[where : where + 64]), np.float32)
                assert np.array_equal(y, np.maximum(x[0], 0))


def test_output_that_is_an_input_needs_as_much_room(device: Device) -> None:
    made = imported(device, graph([], [("x", FLOAT, ("n",))], [("x", FLOAT, ("n",))]))
    with Memory.ashmem(256) as pool:
        pool.array(np.float32, (4,))[:] = [1, 2, 3, 4]
        for room, expected in ((16, ErrorStatus.NONE), (12, ErrorStatus.OUTPUT_INSUFFICIENT_SIZE)):
            inputs, outputs = (argument(0, 16, dims=(4,)),), (argument(128, room),)
            status, shapes, _ = run(device, made, inputs, outputs, (pool,))
            assert status is expected
            assert [(shape.dimensions, shape.is_sufficient) for shape in shapes] == [((4,), room == 16)]
        assert pool.array(np.float32, (4,), 128).tolist() == [1, 2, 3, 4]
        (status, shapes, _) = run(device, made, inputs, (argument(128, 12, dims=(3,)),), (pool,))
        assert status is ErrorStatus.OUTPUT_INSUFFICIENT_SIZE
        assert [(shape.dimensions, shape.is_sufficient) for shape in shapes] == [((4,), False)]
    made.pools[0].close()  # type: ignore[attr-defined]


def test_memory_that_could_be_truncated_is_copied(device: Device, model: Model, tmp_path: Any) -> None:
    path = tmp_path / "pool"
    path.write_bytes(np.full(16, -1, np.float32).tobytes() + np.int64([5, 6]).tobytes() + bytes(176))
    with open(path, "r+b") as file, Memory.mmap_fd(file.fileno(), 256) as pool:
        status, _, _ = run(device, model, GOOD_INPUTS, GOOD_OUTPUTS, (pool,))
        assert status is ErrorStatus.NONE
        file.seek(192)
        assert np.frombuffer(file.read(16), np.int64).tolist() == [10, 12]


def test_times_and_deadlines(device: Device, model: Model) -> None:
    with Memory.ashmem(256) as pool:
        status, _, timing = run(device, model, GOOD_INPUTS, GOOD_OUTPUTS, (pool,), measure=MeasureTiming.YES)
        assert status is ErrorStatus.NONE
        assert timing.time_on_device is not None
        status, _, _ = run(device, model, GOOD_INPUTS, GOOD_OUTPUTS, (pool,), deadline_ns=1)
        assert status is ErrorStatus.MISSED_DEADLINE_TRANSIENT
        with pytest.raises(MissedDeadline):
            device.prepare_model(model, CompileJob(deadline_ns=1))


def test_extension_is_described_with_sizes_and_types(device: Device) -> None:
    (extension,) = device.get_supported_extensions()
    assert extension.name == "org.nnburst.onnx"
    by_name = {(row.element().name, row.is_tensor): row.byte_size for row in extension.operand_types if row.dtype}
    for name in ("int64", "uint64", "float64", "bool", "uint32"):
        for is_tensor in (True, False):
            assert by_name[name, is_tensor] == np.dtype(name).itemsize
    assert len({row.type for row in extension.operand_types}) == len(extension.operand_types)


@pytest.mark.parametrize("declared", [(2, 4), (2, 2), (6,), ("n", 3), (40, 30)], ids=str)
@pytest.mark.parametrize("known", [True, False], ids=["by the graph", "by a run"])
def test_output_that_is_declared_with_another_shape_than_it_has_is_computed_all_the_same(
    declared: tuple[Any, ...], known: bool
) -> None:
    """ONNX Runtime warns, and answers what there is; a RESHAPE to an input can only be known when it runs."""
    nodes = [node("Relu", ["x"], ["y"] if known else ["h"]), *([] if known else [node("Reshape", ["h", "s"], ["y"])])]
    inputs = [("x", FLOAT, ("n", 3)), *([] if known else [("s", TensorProto.INT64, (2,))])]
    model = graph(nodes, inputs, [("y", FLOAT, declared)])
    given = {"x": np.float32([[-1, 2, 3], [4, -5, 6]])} | ({} if known else {"s": np.int64([3, 2])})
    (wanted,) = in_process(model.SerializeToString(), given)
    assert wanted.shape == ((2, 3) if known else (3, 2))
    with nnburst.in_process(devices=["nnburst-onnxruntime:threads=1"]) as service:
        with service.session(model.SerializeToString()) as session:
            for _ in range(3):
                (y,) = session.run(None, given)
                assert y.shape == wanted.shape
                assert y.tobytes() == wanted.tobytes()
