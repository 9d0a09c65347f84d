"""What the device keeps of a compilation: the same answers in every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from nnburst.cache.reasons import CacheReason, CacheRejected
from nnburst.cache.sealed_copy import anonymous_memory
from nnburst.devices.encoded import Bytes
from nnburst.devices.onnxruntime.graph import SessionSettings, compile_graph
from nnburst.devices.onnxruntime.importer import import_graph
from nnburst.devices.onnxruntime.packed import load_graph, pack, read_contents
from nnburst.errors import GeneralFailure
from support.onnx_models import FLOAT, RNG, TensorProto, graph, helper, mlp, node, onnx, run_graph

LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
ONE = SessionSettings(threads=1)


class Packed(NamedTuple):
    model: bytes
    data: Bytes


def packed_and_compiled(data: bytes, files: Any = None) -> tuple[Packed, Any, Any]:
    model = import_graph(data).model
    return Packed(*pack(model, data, files or {}, ONE)), compile_graph(data, files or {}, ONE), model


def same_answers(data: bytes, inputs: dict[str, np.ndarray], files: Any = None) -> Packed:
    packed, compiled, model = packed_and_compiled(data, files)
    contents = read_contents(memoryview(packed.model))
    restored, loaded = contents.model, load_graph(contents, packed.data.data, ONE)
    assert (restored.main, restored.input_names, restored.output_names, dict(restored.extension_name_to_prefix)) == (
        model.main, model.input_names, model.output_names, dict(model.extension_name_to_prefix),
    )  # fmt: skip
    assert (loaded.inputs, loaded.outputs, loaded.exposed) == (compiled.inputs, compiled.outputs, compiled.exposed)
    for ours, theirs in zip(run_graph(loaded, inputs), run_graph(compiled, inputs), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.tobytes() == theirs.tobytes()
    return packed


@pytest.mark.check
@pytest.mark.parametrize("name", ["densenet121", "inception_v2", "resnet50", "shufflenet", "squeezenet"])
def test_network_that_was_kept_answers_bit_for_bit(name: str) -> None:
    data = (LIGHT / f"light_{name}.onnx").read_bytes()
    (argument,) = import_graph(data).model.input_names
    shape = compile_graph(data, {}, ONE).inputs[0].dimensions
    same_answers(data, {argument: RNG.random(shape, np.float32)})


def test_weights_are_kept_beside_the_graph() -> None:
    data = mlp(128, 2).SerializeToString()
    packed = same_answers(data, {"x": RNG.normal(size=(1, 128)).astype(np.float32)})
    assert packed.data.nbytes >= 2 * 128 * 128 * 4
    assert len(packed.model) < 8192


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint8, np.int32, np.int64])
def test_tensors_are_kept_bit_for_bit(dtype: Any) -> None:
    values = np.array([0, 1, 2, 0, 1] if np.issubdtype(dtype, np.integer) else [-0.0, 0.0, np.nan, 0, -0.0])
    runs = np.resize(values.astype(dtype), (80, 100))
    noise = RNG.integers(0, 2, (80, 100)).astype(dtype)
    element = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    weights = {"runs": runs, "noise": noise}
    joined = [node("Concat", [name, "x"], [f"y_{name}"], axis=0) for name in weights]  # copies bits: Where has no -0.0
    outputs = [(f"y_{name}", element, (160, 100)) for name in weights]
    model = graph(joined, [("x", element, (80, 100))], outputs, weights)
    packed = same_answers(model.SerializeToString(), {"x": noise})
    assert 2 * noise.nbytes <= packed.data.nbytes < 2 * noise.nbytes + 128
    assert len(packed.model) < noise.nbytes


def test_names_of_what_needs_a_copy_are_kept() -> None:
    outputs = [("y", FLOAT, (2,)), ("i", TensorProto.INT64, (2,))]
    data = graph([node("TopK", ["x", "k"], ["y", "i"])], [("x", FLOAT, (9,))], outputs, {"k": np.int64([2])})
    packed = same_answers(data.SerializeToString(), {"x": RNG.random(9, np.float32)})
    assert load_graph(read_contents(memoryview(packed.model)), packed.data.data, ONE).exposed == {"x", "y", "i"}


def test_external_data_is_kept_too(tmp_path: Path) -> None:
    onnx.save(mlp(64, 2), tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    files = {"w.bin": np.fromfile(tmp_path / "w.bin", np.uint8)}
    same_answers((tmp_path / "m.onnx").read_bytes(), {"x": RNG.normal(size=(1, 64)).astype(np.float32)}, files)


def test_inner_graphs_and_odd_types_are_kept() -> None:
    def branch(name: str, array: np.ndarray) -> Any:
        constant = onnx.numpy_helper.from_array(array, name)
        value = helper.make_tensor_value_info(name, FLOAT, array.shape)
        return helper.make_graph([node("Add", [name, "o"], [f"{name}_out"])], name, [], [
            helper.make_tensor_value_info(f"{name}_out", FLOAT, array.shape)
        ], [constant], value_info=[value])  # fmt: skip

    half = RNG.normal(size=2000).astype(np.float16)
    model = graph(
        [
            node("If", ["c"], ["y"], then_branch=branch("a", RNG.normal(size=2000).astype(np.float32)),
                 else_branch=branch("b", np.zeros(2000, np.float32))),
            node("Add", ["h", "half"], ["z"]),
            node("Add", ["k", "big"], ["l"]),
        ],
        [
            ("c", TensorProto.BOOL, ()), ("o", FLOAT, (2000,)),
            ("h", TensorProto.FLOAT16, (2000,)), ("k", TensorProto.INT64, (2000,)),
        ],
        [("y", FLOAT, (2000,)), ("z", TensorProto.FLOAT16, (2000,)), ("l", TensorProto.INT64, (2000,))],
        {"half": half, "big": np.arange(2000, dtype=np.int64)},
    )  # fmt: skip
    for c in (True, False):
        try:
            pack(import_graph(model.SerializeToString()).model, model.SerializeToString(), {}, ONE)
        except GeneralFailure as error:
            if "name is not unique" not in str(error):
                raise
            pytest.skip("this ONNX Runtime writes inner graphs that it does not read: such models are not kept")
        inputs = {"c": np.array(c), "o": np.ones(2000, np.float32), "h": half, "k": np.arange(2000, dtype=np.int64)}
        same_answers(model.SerializeToString(), inputs)


def permissions(address: int) -> str:
    """What this process may do with a page."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return line.split()[1]
    raise AssertionError("nothing is mapped there")


def opened_as_owner(packed: Packed) -> tuple[Any, dict[str, str]]:
    """A graph that may give memory back, and what became of the middle of each tensor."""
    memory = anonymous_memory(packed.data.nbytes)
    memory[:] = packed.data.tobytes()
    raw = np.frombuffer(memory, np.uint8)
    contents = read_contents(memoryview(packed.model))
    loaded = load_graph(contents, raw.data, ONE, own=True)
    middles = {t.name: raw.ctypes.data + t.offset + t.length // 2 for t in contents.tensors if t.length}
    return loaded, {name: permissions(address) for name, address in middles.items()}


def test_matrix_that_is_rearranged_is_given_back() -> None:
    data, x = mlp(256, 3).SerializeToString(), RNG.normal(size=(1, 256)).astype(np.float32)
    packed, compiled, _ = packed_and_compiled(data)
    assert b"prepacked" not in packed.model  # the copies are not kept
    loaded, found = opened_as_owner(packed)
    assert found == {
        "w0": "---p",
        "w1": "---p",
        "w2": "---p",
        **{f"b{i}": "rw-p" for i in range(3) if f"b{i}" in found},
    }
    for _ in range(2):
        assert run_graph(loaded, {"x": x})[0].tobytes() == run_graph(compiled, {"x": x})[0].tobytes()


def test_matrix_with_another_use_is_not_given_back() -> None:
    size = 128
    w = RNG.normal(size=(size, size)).astype(np.float32)
    model = graph(
        [node("MatMul", ["x", "w"], ["h"]), node("Add", ["h", "w"], ["y"])],
        [("x", FLOAT, (size, size))], [("y", FLOAT, (size, size))], {"w": w},
    )  # fmt: skip
    data, x = model.SerializeToString(), RNG.normal(size=(size, size)).astype(np.float32)
    packed, compiled, _ = packed_and_compiled(data)
    loaded, found = opened_as_owner(packed)
    assert found == {"w": "rw-p"}
    assert run_graph(loaded, {"x": x})[0].tobytes() == run_graph(compiled, {"x": x})[0].tobytes()


def test_matrix_that_an_inner_graph_may_use_is_not_given_back() -> None:
    def branch(name: str, kind: str) -> Any:
        value = helper.make_tensor_value_info(name, FLOAT, (128, 128))
        return helper.make_graph([node(kind, ["x", "w"], [name])], name, [], [value])

    model = graph(
        [
            node("MatMul", ["x", "w"], ["y"]),
            node("If", ["c"], ["z"], then_branch=branch("a", "Add"), else_branch=branch("b", "Mul")),
        ],
        [("c", TensorProto.BOOL, ()), ("x", FLOAT, (128, 128))],
        [("y", FLOAT, (128, 128)), ("z", FLOAT, (128, 128))],
        {"w": RNG.normal(size=(128, 128)).astype(np.float32)},
    )
    _, found = opened_as_owner(packed_and_compiled(model.SerializeToString())[0])
    assert found == {"w": "rw-p"}


@pytest.mark.parametrize("number", [0.25, -0.0, np.nan])
def test_matrix_of_one_number_is_kept_as_that_number(number: float) -> None:
    model = graph(
        [node("Concat", ["x", "w"], ["c"], axis=0), node("MatMul", ["c", "w"], ["y"])],
        [("x", FLOAT, (1, 512))], [("c", FLOAT, (513, 512)), ("y", FLOAT, (513, 512))],
        {"w": np.full((512, 512), number, np.float32)},
    )  # fmt: skip
    packed = same_answers(model.SerializeToString(), {"x": RNG.normal(size=(1, 512)).astype(np.float32)})
    assert packed.data.nbytes == 64


@pytest.mark.check
@pytest.mark.parametrize("name", ["bvlc_alexnet", pytest.param("vgg19", marks=pytest.mark.soak)])
def test_network_of_large_matrices_answers_bit_for_bit(name: str) -> None:
    data = (LIGHT / f"light_{name}.onnx").read_bytes()
    packed, compiled, model = packed_and_compiled(data)
    loaded, _ = opened_as_owner(packed)
    x = {model.input_names[0]: RNG.random(compiled.inputs[0].dimensions, np.float32)}
    assert run_graph(loaded, x)[0].tobytes() == run_graph(compiled, x)[0].tobytes()


def test_what_was_not_packed_here_is_refused() -> None:
    packed, _, _ = packed_and_compiled(mlp(64, 1).SerializeToString())
    for model in (b"", packed.model[:-10], b"\x93" + packed.model[1:]):
        with pytest.raises(CacheRejected) as caught:
            read_contents(memoryview(model))
        assert caught.value.reason is CacheReason.BAD_CONTENT
