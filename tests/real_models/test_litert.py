"""LiteRT's device: files of two packages and files made here, to the bit as in process; its kernels as a second oracle.

Skipped where the extra ``litert`` or a package with models is missing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import nnburst
from nnburst import DeviceUnavailable, GeneralFailure, InvalidArgument, ModelBuilder, Operand, OperandType
from nnburst.cli import main
from nnburst.devices.registry import create_device
from support import ROOT
from support.processes import run_python
from support.services import shared_service

needs_litert = pytest.mark.skipif(find_spec("ai_edge_litert") is None, reason="needs the extra litert")
DEVICE = "nnburst-litert"
INT8 = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
RNG = np.random.default_rng(39)


def models_of(package: str) -> Path:
    return Path(str(pytest.importorskip(package).__file__)).parent / "models"


def interpreter(source: Path | bytes) -> Any:
    content = source if isinstance(source, bytes) else source.read_bytes()
    return importlib.import_module("ai_edge_litert.interpreter").Interpreter(model_content=content)


class File:
    """A .tflite file in the making; tensors are numbers."""

    def __init__(self) -> None:
        self.s = importlib.import_module("ai_edge_litert.schema_py_generated")
        self.graph = self.s.SubGraphT(tensors=[], inputs=[], outputs=[], operators=[])
        self.model = self.s.ModelT(version=3, operatorCodes=[], subgraphs=[self.graph], buffers=[self.s.BufferT()])
        self.model.signatureDefs = []

    def tensor(self, kind: str, shape: tuple[int, ...], scale: float = 0, zero: int = 0, data: Any = None) -> int:
        s = self.s
        made = s.TensorT(name=f"t{len(self.graph.tensors)}", type=getattr(s.TensorType, kind), hasRank=True)
        made.shape, made.shapeSignature = [max(size, 1) for size in shape], list(shape)
        if scale:
            made.quantization = s.QuantizationParametersT(scale=[scale], zeroPoint=[zero])
        if data is not None:
            made.buffer = len(self.model.buffers)
            self.model.buffers.append(s.BufferT(data=list(np.asarray(data).tobytes())))
        self.graph.tensors.append(made)
        return len(self.graph.tensors) - 1

    def operation(self, name: str, inputs: list[int], output: int, options: str = "", **values: Any) -> None:
        s, code = self.s, getattr(self.s.BuiltinOperator, name)
        deprecated = min(code, 127)
        self.model.operatorCodes.append(s.OperatorCodeT(deprecatedBuiltinCode=deprecated, builtinCode=code, version=3))
        made = s.OperatorT(opcodeIndex=len(self.model.operatorCodes) - 1, inputs=inputs, outputs=[output])
        if options:
            made.builtinOptionsType = getattr(s.BuiltinOptions, options)
            made.builtinOptions = getattr(s, options + "T")()
            for key, value in values.items():
                setattr(made.builtinOptions, key, value)
        self.graph.operators.append(made)

    def signature(self, key: str, inputs: dict[str, int], outputs: dict[str, int]) -> None:
        s = self.s
        taken, given = ([s.TensorMapT(name=n, tensorIndex=i) for n, i in each.items()] for each in (inputs, outputs))
        self.model.signatureDefs.append(s.SignatureDefT(signatureKey=key, inputs=taken, outputs=given, subgraphIndex=0))

    def bytes(self, inputs: list[int], outputs: list[int]) -> bytes:
        builder = importlib.import_module("flatbuffers").Builder()
        self.graph.inputs, self.graph.outputs = inputs, outputs
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def doubled(shape: tuple[int, ...], *signatures: str) -> bytes:
    """y = x + x, of floats."""
    file = File()
    x, y = file.tensor("FLOAT32", shape), file.tensor("FLOAT32", shape)
    file.operation("ADD", [x, x], y, "AddOptions")
    for key in signatures:
        file.signature(key, {"x": x}, {key: y})
    return file.bytes([x], [y])


@needs_litert
@pytest.mark.check
@pytest.mark.parametrize("package", ["pymicro_wakeword", "pyopen_wakeword"])
def test_each_model_gives_the_bits_of_the_interpreter_in_process(package: str) -> None:
    for file in sorted(models_of(package).glob("*.tflite")):
        runner = interpreter(file).get_signature_runner()
        with nnburst.Session(file) as session:
            (taken,), (given,) = session.get_inputs(), session.get_outputs()
            said = [*runner.get_input_details().values(), *runner.get_output_details().values()]
            scales = [(np.float32(arg.scale), arg.zero_point) for arg in (taken, given)]
            assert scales == [(np.float32(each["quantization"][0]), each["quantization"][1]) for each in said]
            for number in range(8):  # state, and other shapes
                shape = [size if isinstance(size, int) else 1 + number % 2 for size in taken.shape or ()]
                if taken.shape == (None, None):
                    shape = [1, 1280 + 160 * (number % 3)]
                x = RNG.integers(-128, 128, shape) if taken.dtype == np.int8 else RNG.normal(size=shape)
                x = x.astype(taken.dtype)
                want, got = runner(**{taken.name: x})[given.name], session.run(None, {taken.name: x})[0]
                assert (got.dtype, got.shape, got.tobytes()) == (want.dtype, want.shape, want.tobytes()), file.name
            if taken.shape == (None, None):
                with pytest.raises(GeneralFailure, match=r"shapes \{'input': \(1, 1\)\}"):
                    session.run(None, {"input": np.zeros((1, 1), np.float32)})


@needs_litert
def test_file_without_signatures_open_shapes_and_bind() -> None:
    with nnburst.in_process(devices=[f"{DEVICE}:threads=2"]) as service, service.session(doubled((-1, 2))) as session:
        assert [arg.shape for arg in (*session.get_inputs(), *session.get_outputs())] == [(None, 2)] * 2
        for rows in (1, 3, 3, 2):
            x = np.arange(2 * rows, dtype=np.float32).reshape(rows, 2)
            np.testing.assert_array_equal(session.run(None, {"t0": x})[0], x * 2)
    with nnburst.in_process(devices=[DEVICE]) as service, service.session(doubled((1, 2))) as session:
        bound = session.bind()
        for value in (1, 2):
            bound.inputs["t0"][...] = value
            bound.run()
            assert bound.outputs["t1"].tolist() == [[2 * value] * 2]


@needs_litert
def test_signature_is_chosen_by_the_option() -> None:
    data = doubled((1, 2), "first", "second")
    with nnburst.in_process(devices=[f"{DEVICE}:signature=second"]) as service, service.session(data) as session:
        assert session.run(None, {"x": np.ones((1, 2), np.float32)})[0].tolist() == [[2, 2]]
        assert session.get_outputs()[0].name == "second"
    for device, said in ((DEVICE, "choose one"), (f"{DEVICE}:signature=third", "no signature 'third'")):
        with nnburst.in_process(devices=[device]) as service, pytest.raises(InvalidArgument, match=said):
            service.session(data)


@needs_litert
@pytest.mark.check
def test_hostile_files_end_in_errors_and_at_worst_their_service() -> None:
    whole = doubled((1, 2), "serving")
    places = RNG.integers(8, len(whole), 6)
    for data in [whole[:40], *(whole[:at] + b"\xff" + whole[at + 1 :] for at in map(int, places))]:
        try:
            with nnburst.Session(data) as session:
                session.run(None, {arg.name: np.zeros((1, 2), np.float32) for arg in session.get_inputs()})
        except nnburst.NNBurstError:
            pass
    with nnburst.Session(whole) as session:
        assert session.run(None, {"x": np.ones((1, 2), np.float32)})[0].tolist() == [[2, 2]]
    with nnburst.in_process(devices=[DEVICE]) as service, pytest.raises(InvalidArgument, match=r"cannot read.*utf-8"):
        service.session(doubled((1, 2)).replace(b"t1", b"\xff1"))


@needs_litert
@pytest.mark.check
def test_run_and_serve_choose_the_device(tmp_path: Path) -> None:
    file = tmp_path / "doubled.tflite"
    file.write_bytes(doubled((1, 2), "serving"))
    done = CliRunner().invoke(main, ["run", str(file), "--show"])
    assert (done.exit_code, "serving" in done.output) == (0, True), done.output
    with shared_service(tmp_path, "--model", f"twice={file}") as shared:
        with nnburst.connect(shared.address) as service, service.session("twice") as session:
            assert session.run(None, {"x": np.ones((1, 2), np.float32)})[0].tolist() == [[2, 2]]


def test_missing_extra_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nnburst.devices.litert.find_spec", lambda name: None)
    with pytest.raises(DeviceUnavailable, match=r"pip install 'nnburst\[litert\]'"):
        create_device(DEVICE)


@needs_litert
@pytest.mark.parametrize("threads", ["-1", "many", "1025"])
def test_options_are_checked(threads: str) -> None:
    with pytest.raises(InvalidArgument, match="LiteRT's own choice"):
        create_device(f"{DEVICE}:threads={threads}")
    with pytest.raises(GeneralFailure, match="reads one 'tflite' file, not 0 'onnx'"):
        create_device(DEVICE).import_model("onnx")


@needs_litert
@pytest.mark.check
def test_pipeline_of_three_models_agrees_with_this_process() -> None:
    pytest.importorskip("pyopen_wakeword")
    done = run_python(str(ROOT / "examples" / "wake_word.py"))
    assert "26 probabilities" in done.stdout, done.stderr


# -- the second oracle ------------------------------------------------------------------------------------------------

SCALES = {"x": (0.05, -3), "y": (0.11, 4)}
Made = tuple[Operand, int]


class Pair:
    """One operation on an input of 8 bits, as a model of ours and as a file."""

    def __init__(self, kind: str, shape: tuple[int, ...]) -> None:
        self.b, self.file, self.shape = ModelBuilder(), File(), shape
        self.signed = kind == "INT8"
        self.kind, self.type = kind, INT8 if self.signed else OperandType.TENSOR_QUANT8_ASYMM
        self.dtype = np.int8 if self.signed else np.uint8
        self.x = self.b.input("x", self.type, shape, scale=0.05, zero_point=self.zero(-3))
        self.t = self.file.tensor(kind, shape, 0.05, self.zero(-3))

    def zero(self, point: int) -> int:
        return point if self.signed else point + 128

    def numbers(self, shape: tuple[int, ...]) -> Any:
        return (RNG.integers(-128, 128, shape) + self.zero(0)).astype(self.dtype)

    def constant(self, shape: tuple[int, ...], scale: float, zero: int) -> Made:
        data = self.numbers(shape)
        return (
            self.b.constant(data, self.type, scale=scale, zero_point=self.zero(zero)),
            self.file.tensor(self.kind, shape, scale, self.zero(zero), data),
        )

    def bias(self, count: int, scale: float) -> Made:
        data = RNG.integers(-500, 500, count).astype(np.int32)
        return (
            self.b.constant(data, OperandType.TENSOR_INT32, scale=scale, zero_point=0),
            self.file.tensor("INT32", (count,), scale, 0, data),
        )

    def output(self, y: Operand, name: str, constants: list[int], scale: float, zero: int, **options: Any) -> None:
        self.b.output("y", y)
        self.out = self.file.tensor(self.kind, y.shape, scale, self.zero(zero))
        self.file.operation(name, [self.t, *constants], self.out, **options)


def _same(name: str) -> Callable[[str], Pair]:
    """An operation of two tensors of one shape."""

    def make(kind: str) -> Pair:
        shape = int(RNG.integers(1, 9)), int(RNG.integers(1, 9))
        pair = Pair(kind, shape)
        other, constant = pair.constant(shape, 0.07, 5)
        y = getattr(pair.b, name)(pair.x, other, type=pair.type, dimensions=shape, scale=0.11, zero_point=pair.zero(4))
        pair.output(y, name.upper(), [constant], *SCALES["y"], options=f"{name.title()}Options")
        return pair

    return make


def _fully_connected(kind: str) -> Pair:
    rows, depth = int(RNG.integers(1, 9)), int(RNG.integers(1, 9))
    pair = Pair(kind, (rows, depth))
    (w, weights), (c, bias) = pair.constant((6, depth), 0.02, 0), pair.bias(6, 0.05 * 0.02)
    y = pair.b.fully_connected(pair.x, w, c, scale=0.11, zero_point=pair.zero(4))
    pair.output(y, "FULLY_CONNECTED", [weights, bias], *SCALES["y"], options="FullyConnectedOptions")
    return pair


def _convolution(depthwise: bool) -> Callable[[str], Pair]:
    name = "depthwise_conv_2d" if depthwise else "conv_2d"

    def make(kind: str) -> Pair:
        pair = Pair(kind, (1, int(RNG.integers(3, 9)), int(RNG.integers(3, 9)), 4))
        shape = (1, 3, 3, 4) if depthwise else (5, 3, 3, 4)
        depth = shape[3] if depthwise else shape[0]
        (w, weights), (c, bias) = pair.constant(shape, 0.02, 0), pair.bias(depth, 0.05 * 0.02)
        y = getattr(pair.b, name)(pair.x, w, c, padding="same", stride=2, scale=0.11, zero_point=pair.zero(4))
        values = {"padding": 0, "strideW": 2, "strideH": 2, "dilationWFactor": 1, "dilationHFactor": 1}
        if depthwise:
            values["depthMultiplier"] = 1
        options = "DepthwiseConv2DOptions" if depthwise else "Conv2DOptions"
        pair.output(y, name.upper(), [weights, bias], *SCALES["y"], options=options, **values)
        return pair

    return make


def _pool(name: str) -> Callable[[str], Pair]:
    def make(kind: str) -> Pair:
        pair = Pair(kind, (1, int(RNG.integers(3, 9)), int(RNG.integers(3, 9)), 4))
        y = getattr(pair.b, name)(pair.x, 3, stride=1, padding="valid")  # of nine no half can come
        values = {"padding": 1, "strideW": 1, "strideH": 1, "filterWidth": 3, "filterHeight": 3}
        pair.output(y, name.upper(), [], *SCALES["x"], options="Pool2DOptions", **values)
        return pair

    return make


CASES = {
    "add": _same("add"),
    "mul": _same("mul"),
    "fully_connected": _fully_connected,
    "conv_2d": _convolution(False),
    "depthwise_conv_2d": _convolution(True),
    "average_pool_2d": _pool("average_pool_2d"),
    "max_pool_2d": _pool("max_pool_2d"),
}


@needs_litert
@pytest.mark.parametrize("kind", ["INT8", "UINT8"])
@pytest.mark.parametrize("name", CASES)
def test_reference_device_agrees_with_litert(name: str, kind: str) -> None:
    """They differ in exact halves alone, which LiteRT rounds to the even neighbour."""
    for _ in range(12):
        pair = CASES[name](kind)
        value = pair.numbers(pair.shape)
        results = []
        for model, device in ((pair.b.build(), "nnburst-reference"), (pair.file.bytes([pair.t], [pair.out]), DEVICE)):
            with nnburst.in_process(devices=[device]) as service, service.session(model) as session:
                results.append(session.run(None, {session.get_inputs()[0].name: value})[0].astype(int))
        assert results[0].shape == results[1].shape
        differ = results[0] != results[1]
        assert np.abs(results[0] - results[1]).max() <= 1
        assert not (results[1][differ] % 2).any()
