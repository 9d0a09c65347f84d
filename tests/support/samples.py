"""Sample models, requests and ways to run them, for the REQ-MODEL tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType
from nnburst.burst import ExecutionBurstController
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus, GeneralFailure, NNBurstError, OutputInsufficientSize, OutputShape
from nnburst.model import Request, RunOptions, Timing
from nnburst.model.operand_types import operand_info, operand_nbytes
from nnburst.model.types import DataLocation, MeasureTiming, RequestArgument

T, O = OperandType, OperationType  # noqa: E741 - short, for tables
Array = np.ndarray[Any, np.dtype[Any]]
WAYS = ("sync", "burst")
ALL_WAYS = (*WAYS, "fenced")
"""Ways to run a model whose outputs have known dimensions."""


@dataclass(frozen=True)
class Sample:
    """A model, inputs, and the expected outputs, computed without the package."""

    model: Model
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    atol: float = 1e-5


@dataclass
class Outcome:
    status: ErrorStatus
    shapes: tuple[OutputShape, ...]
    timing: Timing
    outputs: list[Array] = field(default_factory=list)


def make_request(
    model: Model,
    inputs: Sequence[Array],
    output_dims: Sequence[tuple[int, ...]] | None = None,
    *,
    short: int = 0,
    step: int = 64,
    make: Callable[[int], Memory] | None = None,
) -> tuple[Request, Memory]:
    """Return a request with arguments in one memory. If there are too few `inputs`, the last inputs are omitted.

    Args:
        output_dims: Dimensions of the outputs; None for the model's dimensions. An output of open size then gets
            64 KiB.
        short: Number of bytes by which the memory of output 0 is too small.
        step: Alignment of arguments in bytes.
        make: Function that makes a memory, called for the inputs and again for the outputs; None for one memory.
    """
    main, spots, end = model.main, [], 0
    sizes = [max(1, array.nbytes) for array in inputs]
    for which, index in enumerate(main.output_indexes):
        operand = main.operands[index]
        if output_dims is None:
            sizes.append(operand_nbytes(operand.type, operand.dimensions) or 1 << 16)
        else:
            sizes.append(max(1, operand_nbytes(operand.type, output_dims[which])))
    sizes[len(inputs)] -= short
    for size in sizes:
        spots.append(DataLocation(0, end, size))
        end += -(-size // step) * step
    pools = (Memory.ashmem(end),) if make is None else (make(end), make(end))
    memory, arguments = pools[0], []
    for array, index, spot in zip(inputs, main.input_indexes, spots, strict=False):
        memory.array(array.dtype, array.shape, spot.offset)[...] = array
        dims = () if 0 not in main.operands[index].dimensions and main.operands[index].dimensions else array.shape
        arguments.append(RequestArgument(location=spot, dimensions=dims))
    arguments += [RequestArgument(True)] * (len(main.input_indexes) - len(inputs))
    results = tuple(RequestArgument(location=replace(spot, pool_index=len(pools) - 1)) for spot in spots[len(inputs) :])
    return Request(tuple(arguments), results, pools), memory


def execute(
    prepared: PreparedModel,
    request: Request,
    way: str,
    measure: bool = False,
    deadline_ns: int = 0,
    loop_timeout_ns: int = 0,
) -> Outcome:
    """Run a request in one of `ALL_WAYS`."""
    options = RunOptions(MeasureTiming.YES if measure else MeasureTiming.NO, deadline_ns, loop_timeout_ns)
    if way == "sync":
        return Outcome(*prepared.execute_synchronously(request, options))
    if way == "fenced":
        try:
            run = prepared.execute_fenced(request, (), options)
        except NNBurstError as error:
            return Outcome(error.status, (), Timing())
        with run.fence as fence, contextlib.suppress(GeneralFailure):
            fence.wait(60)
        info = run.info()
        return Outcome(info.status, (), info.launched)
    with ExecutionBurstController.create(prepared, channel_length=256) as burst:
        try:
            return Outcome(*burst.compute(request, measure=measure))
        except OutputInsufficientSize as error:
            return Outcome(error.status, error.output_shapes, Timing())
        except NNBurstError as error:
            return Outcome(error.status, (), Timing())


def run(
    prepared: PreparedModel,
    model: Model,
    inputs: Sequence[Array],
    output_dims: Sequence[tuple[int, ...]] | None = None,
    way: str = "sync",
    make: Callable[[int], Memory] | None = None,
    **options: Any,
) -> Outcome:
    """Run a model once and read its outputs, with the reported dimensions or else with `output_dims`."""
    request, _ = make_request(model, inputs, output_dims, make=make)
    memory: Any = request.pools[-1]
    with contextlib.ExitStack() as stack:
        for pool in request.pools:
            stack.enter_context(pool)  # type: ignore[arg-type]
        outcome = execute(prepared, request, way, **options)
        if outcome.status is ErrorStatus.NONE:
            for i, index in enumerate(model.main.output_indexes):
                operand, offset = model.main.operands[index], request.outputs[i].location.offset
                dims = operand.dimensions if output_dims is None else output_dims[i]
                shape = outcome.shapes[i].dimensions if outcome.shapes else dims
                dtype = operand_info(operand.type).dtype
                outcome.outputs.append(np.empty(shape, dtype) if 0 in shape else memory.read(dtype, shape, offset))
        return outcome


def ran(device: Device, model: Model, *arguments: Any, **options: Any) -> Outcome:
    """Prepare a model, and run it with arguments of `run`."""
    with contextlib.closing(device.prepare_model(model)) as prepared:
        return run(prepared, model, *arguments, **options)


@contextlib.contextmanager
def placed(
    device: Device, model: Model, *arguments: Any, **options: Any
) -> Iterator[tuple[PreparedModel, Request, Memory]]:
    """Yield a prepared model, and the request and memory of `make_request`."""
    request, memory = make_request(model, *arguments, **options)
    with contextlib.closing(device.prepare_model(model)) as prepared, memory:
        yield prepared, request, memory


def check_outputs(sample: Sample, outcome: Outcome) -> None:
    assert outcome.status is ErrorStatus.NONE
    for found, wanted in zip(outcome.outputs, sample.outputs, strict=True):
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found.astype(np.float64), wanted.astype(np.float64), atol=sample.atol, rtol=1e-5)


def with_unspecified_outputs(model: Model) -> Model:
    """Return the model with outputs of known rank and unknown dimensions."""
    main = model.main
    operands = tuple(
        replace(operand, dimensions=(0,) * len(operand.dimensions)) if index in main.output_indexes else operand
        for index, operand in enumerate(main.operands)
    )
    return replace(model, main=replace(main, operands=operands))


# -- samples --------------------------------------------------------------------------------------------------------


def _rng() -> np.random.Generator:
    return np.random.default_rng(7)


def conv_float() -> Sample:
    """CONV_2D with VALID padding and RELU, then SOFTMAX. The constants are small enough to be copied."""
    x = _rng().normal(size=(1, 3, 3, 2)).astype(np.float32)
    w = _rng().normal(size=(2, 2, 2, 2)).astype(np.float32)
    bias = np.array([0.5, -0.25], np.float32)
    b = ModelBuilder()
    h = b.conv_2d(b.input("x", T.TENSOR_FLOAT32, x.shape), w, bias, activation="relu")
    b.output("y", b.softmax(h))
    conv = np.zeros((1, 2, 2, 2))
    for i in range(2):
        for j in range(2):
            patch = x[0, i : i + 2, j : j + 2].astype(np.float64)
            conv[0, i, j] = [max(0.0, float((patch * w[k]).sum()) + bias[k]) for k in range(2)]
    e = np.exp(conv)
    return Sample(b.build(), (x,), ((e / e.sum(-1, keepdims=True)).astype(np.float32),))


def conv_large_constant() -> Sample:
    """CONV_2D with a 1x1 filter in a pool, because it is too large to be copied."""
    x = _rng().normal(size=(2, 2, 2, 8)).astype(np.float32)
    w = _rng().normal(size=(8, 1, 1, 8)).astype(np.float32)
    b = ModelBuilder()
    b.output("y", b.conv_2d(b.input("x", T.TENSOR_FLOAT32, x.shape), w))
    return Sample(b.build(), (x,), (np.einsum("bhwi,oi->bhwo", x.astype(np.float64), w[:, 0, 0]).astype(np.float32),))


def three_adds() -> Sample:
    """relu6(x + y + constant + x), where operations depend on each other and x is read twice."""
    x, y = (_rng().normal(size=(2, 3)).astype(np.float32) for _ in range(2))
    b = ModelBuilder()
    i, j = b.input("x", T.TENSOR_FLOAT32, x.shape), b.input("y", T.TENSOR_FLOAT32, y.shape)
    s = b.add(i, j)
    t = b.add(s, np.array([1, 2, 3], np.float32))
    b.output("sum", b.add(t, i, activation="relu6"))
    wanted = np.clip(x + y + np.array([1, 2, 3], np.float32) + x, 0, 6)
    return Sample(b.build(), (x, y), (wanted,))


def two_outputs() -> Sample:
    """TANH and LOGISTIC of one float16 input."""
    x = _rng().normal(size=(4,)).astype(np.float16)
    b = ModelBuilder()
    i = b.input("x", T.TENSOR_FLOAT16, x.shape)
    b.output("tanh", b.tanh(i))
    b.output("logistic", b.logistic(i))
    wide = x.astype(np.float64)
    wanted = (np.tanh(wide).astype(np.float16), (1 / (1 + np.exp(-wide))).astype(np.float16))
    return Sample(b.build(), (x,), wanted, atol=5 / 1024)


def quant_chain(signed: bool = False) -> Sample:
    """Quantised DEPTHWISE_CONV_2D, MAX_POOL_2D and FULLY_CONNECTED. A result may differ by 1."""
    shift = 128 if signed else 0
    kind = T.TENSOR_QUANT8_ASYMM_SIGNED if signed else T.TENSOR_QUANT8_ASYMM
    rng = _rng()
    x, w = rng.integers(0, 256, (1, 4, 4, 2)), rng.integers(0, 256, (1, 2, 2, 2))
    m, bias = rng.integers(0, 256, (3, 2)), rng.integers(-500, 500, 2)

    def stored(values: Array) -> Array:
        return (values - shift).astype(np.int8 if signed else np.uint8)

    b = ModelBuilder()
    h = b.input("x", kind, x.shape, scale=0.5, zero_point=100 - shift)
    filter_ = b.constant(stored(w), kind, scale=0.25, zero_point=120 - shift)
    h = b.depthwise_conv_2d(h, filter_, bias.astype(np.int32), stride=2, scale=64.0, zero_point=128 - shift)
    h = b.max_pool_2d(h, 2)
    weights = b.constant(stored(m), kind, scale=0.125, zero_point=128 - shift)
    b.output("y", b.fully_connected(h, weights, scale=512.0, zero_point=128 - shift))

    def quantised(real: Array, scale: float) -> Array:
        return np.clip(np.trunc(real / scale + np.copysign(0.5, real)) + 128, 0, 255)

    conv = np.zeros((2, 2, 2))
    for i in range(2):
        for j in range(2):
            patch = x[0, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] - 100
            conv[i, j] = ((patch * (w[0] - 120)).sum((0, 1)) + bias) * 0.125
    pooled = quantised(conv, 64.0).max((0, 1))
    wanted = quantised(((pooled - 128) * 64.0) @ ((m - 128) * 0.125).T, 512.0)
    return Sample(b.build(), (stored(x),), (stored(wanted)[None],), atol=1)


def quant_chain_signed() -> Sample:
    """`quant_chain` in TENSOR_QUANT8_ASYMM_SIGNED."""
    return quant_chain(signed=True)


def per_channel() -> Sample:
    """CONV_2D with a filter that has a scale per output channel."""
    rng = _rng()
    x, w = rng.integers(0, 256, (1, 2, 2, 3)), rng.integers(-127, 128, (2, 1, 1, 3))
    scales = np.array([0.5, 0.125])
    b = ModelBuilder()
    filter_ = b.constant(w.astype(np.int8), channel_scales=scales)
    h = b.input("x", T.TENSOR_QUANT8_ASYMM, x.shape, scale=0.5, zero_point=10)
    b.output("y", b.conv_2d(h, filter_, np.array([3, -4], np.int32), scale=64.0, zero_point=128))
    real = (np.einsum("bhwi,oi->bhwo", x - 10, w[:, 0, 0]) + [3, -4]) * 0.5 * scales
    wanted = np.clip(np.trunc(real / 64 + np.copysign(0.5, real)) + 128, 0, 255).astype(np.uint8)
    return Sample(b.build(), (x.astype(np.uint8),), (wanted,), atol=1)


def shapes_and_types() -> Sample:
    """QUANTIZE, CONCATENATION, RESHAPE, RELU, DEQUANTIZE."""
    x, y = np.array([[-1.25, 0.25], [0.75, 3.0]], np.float32), np.array([[100, 140]], np.uint8)
    b = ModelBuilder()
    q = b.quantize(b.input("x", T.TENSOR_FLOAT32, x.shape), scale=0.5, zero_point=128)
    j = b.input("y", T.TENSOR_QUANT8_ASYMM, y.shape, scale=0.25, zero_point=128)
    c = b.concatenation([q, j], 0, scale=0.5, zero_point=128)
    r = b.relu(b.reshape(c, (-1,)))
    b.output("y", b.dequantize(r))
    wanted = np.array([0, 0.5, 1.0, 3.0, 0, 3.0], np.float32)
    return Sample(b.build(), (x, y), (wanted,), atol=0.5)


def int_arithmetic() -> Sample:
    """ADD and MUL of TENSOR_INT32."""
    x = np.array([[1, -2, 3]], np.int32)
    b = ModelBuilder()
    i = b.input("x", T.TENSOR_INT32, x.shape)
    b.output("y", b.mul(b.add(i, i), np.array([5, 6, 7], np.int32)))
    return Sample(b.build(), (x,), (2 * x * [5, 6, 7],), atol=0)


def average_and_l2() -> Sample:
    """AVERAGE_POOL_2D with SAME padding, then L2_POOL_2D with explicit padding, in NCHW."""
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    b = ModelBuilder()
    h = b.average_pool_2d(b.input("x", T.TENSOR_FLOAT32, x.shape), 2, stride=2, padding="same", layout="NCHW")
    b.output("y", b.l2_pool_2d(h, 2, stride=1, padding=((0, 0), (1, 0)), layout="NCHW"))
    mean = np.array([[2, 3.5], [6.5, 8]])
    wanted = np.sqrt([[(mean[:, 0] ** 2).mean(), (mean**2).mean()]])
    return Sample(b.build(), (x,), (wanted.astype(np.float32).reshape(1, 1, 1, 2),))


def optional_input() -> Sample:
    """TRANSPOSE and SQUEEZE whose optional second input has no value."""
    x = np.arange(6, dtype=np.float32).reshape(2, 1, 3)
    b = ModelBuilder()
    h = b.transpose(b.input("x", T.TENSOR_FLOAT32, x.shape))
    b.output("y", b.squeeze(h))
    return Sample(b.build(), (x,), (x.transpose()[:, 0, :].copy(),), atol=0)


def reductions() -> Sample:
    """PAD, MEAN, GATHER, GREATER, SELECT."""
    x = _rng().normal(size=(2, 3, 4)).astype(np.float32)
    b = ModelBuilder()
    i = b.input("x", T.TENSOR_FLOAT32, x.shape)
    m = b.mean(b.pad(i, [[0, 0], [1, 0], [0, 2]]), [1], keep=1)
    g = b.gather(m, 2, [0, 3, 5])
    b.output("y", b.select(b.greater(g, b.neg(g)), g, b.exp(g)))
    mean = np.pad(x, [(0, 0), (1, 0), (0, 2)]).mean(1, keepdims=True)[:, :, [0, 3, 5]]
    return Sample(b.build(), (x,), (np.where(mean > -mean, mean, np.exp(mean)),))


def quant_images() -> Sample:
    """SPACE_TO_DEPTH, RESIZE_NEAREST_NEIGHBOR, PRELU, ARGMAX on quantised data."""
    x = _rng().integers(0, 256, (1, 4, 4, 1)).astype(np.uint8)
    b = ModelBuilder()
    h = b.space_to_depth(b.input("x", T.TENSOR_QUANT8_ASYMM, x.shape, scale=0.5, zero_point=100), 2)
    h = b.resize_nearest_neighbor(h, 4, 2)
    slope = b.constant(np.full(4, 2, np.uint8), scale=0.25)
    h = b.prelu(h, slope, scale=0.5, zero_point=90)
    b.output("y", h)
    b.output("most", b.argmax(h, -1))
    parts = np.concatenate([x[:, i::2, j::2] for i in range(2) for j in range(2)], -1)[:, :, [0, 0, 1, 1]]
    real = (parts.astype(float) - 100) * 0.5
    real = np.where(real > 0, real, 0.5 * real)
    stored = np.clip(np.trunc(real / 0.5 + np.copysign(0.5, real)) + 90, 0, 255).astype(np.uint8)
    return Sample(b.build(), (x,), (stored, stored.argmax(-1)), atol=1)


def recurrent() -> Sample:
    """RNN, with two outputs."""
    rng = _rng()
    x, w, r = rng.normal(size=(2, 3)), rng.normal(size=(4, 3)), rng.normal(size=(4, 4))
    bias, state = rng.normal(size=4), rng.normal(size=(2, 4))
    x, w, r, bias, state = (a.astype(np.float32) for a in (x, w, r, bias, state))
    b = ModelBuilder()
    i, s = b.input("x", T.TENSOR_FLOAT32, x.shape), b.input("state", T.TENSOR_FLOAT32, state.shape)
    for name, index in zip(("next", "y"), b.rnn(i, w, r, bias, s, 4), strict=True):
        b.output(name, index)
    wanted = np.tanh(x @ w.T + state @ r.T + bias)
    return Sample(b.build(), (x, state), (wanted, wanted))


def unknown_batch() -> Sample:
    """FULLY_CONNECTED with a dimension that only the request specifies."""
    x = _rng().normal(size=(3, 4)).astype(np.float32)
    w = _rng().normal(size=(2, 4)).astype(np.float32)
    b = ModelBuilder()
    b.output("y", b.fully_connected(b.input("x", T.TENSOR_FLOAT32, (0, 4)), w))
    return Sample(b.build(), (x,), (x @ w.T,))


SAMPLES: dict[str, Callable[[], Sample]] = {
    make.__name__: make
    for make in (
        conv_float,
        conv_large_constant,
        three_adds,
        two_outputs,
        quant_chain,
        quant_chain_signed,
        per_channel,
        shapes_and_types,
        int_arithmetic,
        average_and_l2,
        optional_input,
        reductions,
        quant_images,
        recurrent,
        unknown_batch,
    )
}
