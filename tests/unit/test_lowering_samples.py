"""Each operation that is lowered, in each of its types, against the reference device: usual numbers and extremes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nnburst
from benchmarks.lowered_speed import mobilenet
from nnburst import Model, ModelBuilder
from nnburst.devices.reference.device import ReferenceDevice
from nnburst.errors import ErrorStatus
from nnburst.model.operand import Output
from nnburst.model.operand_types import operand_info
from nnburst.model.rows import OPERATIONS
from support.operations import (
    B8,
    F16,
    F32,
    FIXED_QUANTISATION,
    I32,
    QUANTS,
    SAME_QUANTISATION,
    Array,
    Fx,
    O,
    T,
    check_lowered,
    encoded,
    lowering_device,
    rng,
    run_model,
    run_on,
)

pytest.importorskip("onnxruntime", reason="needs the extra nnburst[onnx]")

from nnburst.devices.onnxruntime.lowering import Lowering
from nnburst.devices.onnxruntime.operations import LOWERED

U, N, S = 3, 2, 3
"""Units of cells, the batch, steps."""


def real(*shape: int, seed: int = 7) -> Array:
    return rng(seed + len(shape)).uniform(-2, 2, shape)


def weights(*shape: int) -> Array:
    return real(*shape) / 3


IMAGE, ROWS = real(1, 4, 4, 4), real(3, 4)
SAME = (1, 1, 1)  # padding, strides
POOL = (IMAGE, 1, 2, 2, 3, 3)
CELL = [weights(U, U) for _ in range(8)] + [None] * 3 + [weights(U) for _ in range(4)] + [None] * 2
STATES = [weights(N, U), weights(N, U)]
CLIPS = (4, Fx(0.0), Fx(0.0))
LOOP = (weights(U, U), weights(U, U), weights(U), weights(N, U))
CASES: dict[O, tuple[Any, ...]] = {
    **{O[name]: (ROWS,) for name in "ABS EXP FLOOR LOGISTIC NEG RELU RELU1 RELU6 SIN TANH HARD_SWISH RANK".split()},
    **{O[name]: (abs(ROWS) + 0.1,) for name in "LOG RSQRT SQRT".split()},
    **{O[name]: (ROWS, real(1, 4), 0) for name in "ADD MUL SUB".split()},
    **{O[name]: (ROWS, real(1, 4)) for name in "MAXIMUM MINIMUM PRELU".split()},
    **{
        O[name]: (ROWS, real(1, 4))
        for name in "EQUAL NOT_EQUAL LESS LESS_EQUAL GREATER GREATER_EQUAL LOGICAL_AND LOGICAL_OR".split()
    },
    **{O[name]: (ROWS, np.array([1]), True) for name in "REDUCE_MAX REDUCE_MIN REDUCE_SUM".split()},
    **{O[name]: (ROWS, np.array([1]), False) for name in "REDUCE_ALL REDUCE_ANY".split()},
    **{O[name]: (ROWS, 1) for name in "ARGMAX ARGMIN".split()},
    O.MEAN: (ROWS, np.array([1]), 1),
    O.DIV: (ROWS, abs(real(1, 4)) + 0.1, 0),
    O.POW: (abs(ROWS) + 0.1, real(1, 4)),
    O.LOGICAL_NOT: (ROWS,),
    O.DEQUANTIZE: (ROWS,),
    O.QUANTIZE: (ROWS,),
    O.CAST: (ROWS,),
    O.ELU: (ROWS, Fx(1.5)),
    O.SELECT: (np.array([True, False, True, False]).reshape(1, 4).repeat(3, 0), ROWS, real(3, 4, seed=9)),
    O.SOFTMAX: (ROWS, Fx(0.7)),
    O.LOG_SOFTMAX: (ROWS, Fx(0.7), 1),
    O.L2_NORMALIZATION: (ROWS,),
    O.INSTANCE_NORMALIZATION: (IMAGE, Fx(1.5), Fx(0.1), Fx(1e-3), False),
    O.AVERAGE_POOL_2D: (*POOL, 0),
    O.MAX_POOL_2D: (*POOL, 0),
    O.L2_POOL_2D: (*POOL, 0),
    O.CONV_2D: (IMAGE, weights(5, 3, 3, 4), weights(5), *SAME, 1),
    O.DEPTHWISE_CONV_2D: (IMAGE, weights(1, 3, 3, 4), weights(4), *SAME, 1, 3),
    O.GROUPED_CONV_2D: (IMAGE, weights(6, 3, 3, 2), weights(6), *SAME, 2, 0, False),
    O.TRANSPOSE_CONV_2D: (IMAGE, weights(5, 3, 3, 4), weights(5), np.array([1, 8, 8, 5]), 1, 2, 2, 0, False),
    O.FULLY_CONNECTED: (ROWS, weights(5, 4), weights(5), 0),
    O.RESHAPE: (ROWS, np.array([4, 3])),
    O.SQUEEZE: (real(3, 1, 4), np.array([1])),
    O.EXPAND_DIMS: (ROWS, 1),
    O.TRANSPOSE: (ROWS, np.array([1, 0])),
    O.SLICE: (ROWS, np.array([1, 0]), np.array([2, 3])),
    O.STRIDED_SLICE: (ROWS, np.array([0, 3]), np.array([3, 0]), np.array([2, -1]), 0, 0, 0),
    O.CONCATENATION: (ROWS, real(2, 4), 0),
    O.SPLIT: (ROWS, 1, 2),
    O.TILE: (ROWS, np.array([2, 1])),
    O.PAD: (ROWS, np.array([[1, 0], [0, 2]])),
    O.PAD_V2: (ROWS, np.array([[1, 0], [0, 2]]), Fx(1.0)),
    O.GATHER: (ROWS, 1, np.array([3, 0])),
    O.EMBEDDING_LOOKUP: (np.array([2, 0]), ROWS),
    O.FILL: (np.array([2, 3]), Fx(1.5)),
    O.TOPK_V2: (ROWS, 2),
    O.CHANNEL_SHUFFLE: (IMAGE, 2, 3),
    O.DEPTH_TO_SPACE: (IMAGE, 2),
    O.SPACE_TO_DEPTH: (IMAGE, 2),
    O.BATCH_TO_SPACE_ND: (real(4, 2, 2, 3), np.array([2, 2])),
    O.SPACE_TO_BATCH_ND: (IMAGE, np.array([2, 2]), np.array([[0, 0], [2, 0]])),
    O.RESIZE_BILINEAR: (IMAGE, 7, 6),
    O.RESIZE_NEAREST_NEIGHBOR: (IMAGE, 7, 6, False),
    O.RNN: (real(N, U), *LOOP, 4),
    O.SVDF: (real(N, U), weights(4, U), weights(4, 3), weights(2), weights(N, 12), 2, 0),
    O.LSTM: (real(N, U), *CELL, *STATES, *CLIPS),
    O.UNIDIRECTIONAL_SEQUENCE_RNN: (real(S, N, U), *LOOP, 4, 1),
    O.UNIDIRECTIONAL_SEQUENCE_LSTM: (real(S, N, U), *CELL, *STATES, *CLIPS, True, *[None] * 4),
    O.BIDIRECTIONAL_SEQUENCE_RNN: (real(S, N, U), *LOOP, *LOOP, *[None] * 3, 4, True, True),
    O.BIDIRECTIONAL_SEQUENCE_LSTM: (
        real(S, N, U), *CELL, *CELL, *STATES, *STATES, *[None] * 9, *CLIPS, True, True, *[None] * 8
    ),
}  # fmt: skip
MADE_OF_TYPES = {O.CAST: (F32, F16, I32, T.TENSOR_QUANT8_ASYMM), O.RANK: (F32, F16, I32, *QUANTS)}
"""Of operations that take any."""
EXACT = {
    O[name]
    for name in "BATCH_TO_SPACE_ND CAST CHANNEL_SHUFFLE DEPTH_TO_SPACE EMBEDDING_LOOKUP EXPAND_DIMS GATHER MAX_POOL_2D "
    "PAD PAD_V2 QUANTIZE REDUCE_MAX REDUCE_MIN RELU RELU1 RELU6 RESHAPE RESIZE_NEAREST_NEIGHBOR SLICE "
    "SPACE_TO_BATCH_ND SPACE_TO_DEPTH SPLIT SQUEEZE STRIDED_SLICE TILE TOPK_V2 TRANSPOSE".split()
}
"""Whose quantised results are the reference device's; others may differ by 1."""
REFUSED = {(O.DIV, I32)}
"""What is left to the reference device."""


def model_of(operation: O, kind: T, low: bool | None = None) -> tuple[Model, list[Array]]:
    """A model of a case: the first tensor is an input, the others are constants.

    Args:
        operation: The operation.
        kind: Its data type.
        low: Zero points at their lowest or highest, codes at either end; None for usual numbers.
    """
    b, inputs, operands = ModelBuilder(), list[Array](), list[Any]()
    info = operand_info(kind)
    scale, zero_point = (0.02, 128 if info.dtype == np.uint8 else 0) if info.is_quantised else (0.0, 0)
    if kind in QUANTS and low is not None:
        zero_point = int(np.iinfo(info.dtype).min if low else np.iinfo(info.dtype).max)
    quant: Any = {"scale": scale, "zero_point": zero_point} if info.is_quantised else {}
    for position, argument in enumerate(CASES[operation]):
        if argument is None:
            operands.append(b.omitted(kind))
        elif isinstance(argument, Fx):
            value: Any = argument.value
            if operation in (O.PAD_V2, O.FILL) and kind in (*QUANTS, I32):
                operands.append(b.scalar(int(value), T.INT32))
            else:
                operands.append(b.scalar(value, T.FLOAT16 if kind == F16 else T.FLOAT32))
        elif not isinstance(argument, np.ndarray):
            operands.append(b.scalar(argument))
        elif argument.dtype == np.int64:
            operands.append(b.constant(argument.astype(np.int32)))
        elif argument.dtype == np.bool_:
            operands.append(b.constant(argument.astype(np.uint8), B8))
        elif kind in QUANTS and argument.ndim == 1 and operation.name.endswith(("CONV_2D", "CONNECTED")):
            index = b.add_operand(I32, argument.shape, scale=scale * scale)
            b.set_operand_value(index, np.round(argument / scale**2).astype(np.int32))
            operands.append(b.operand(index))
        else:
            stored = encoded(argument * (1 if info.is_float or quant else 3), kind, scale, zero_point)
            if kind == B8:
                stored = (argument > 0).astype(np.uint8)
            if quant and low is not None:
                ends = np.iinfo(info.dtype)
                stored = np.where(argument > 0, ends.max, ends.min).astype(info.dtype)
            if inputs:
                operands.append(b.constant(stored, kind, **quant))
            else:
                operands.append(b.input(f"x{position}", kind, stored.shape, **quant))
                inputs.append(stored)
    said: Output = {}
    is_free = operation.name not in SAME_QUANTISATION | FIXED_QUANTISATION
    if operation in (O.QUANTIZE, O.CAST):
        said = {"type": T.TENSOR_QUANT8_ASYMM, "scale": 0.02, "zero_point": 100}
    elif kind in QUANTS and is_free and OPERATIONS[operation].outputs[0][0].kinds[0][0] == "T":
        said = {"scale": scale * 2, "zero_point": zero_point}
    for which, out in enumerate(b.operation(operation, *operands, outputs=[said] if said else None)):
        b.output(f"y{which}", out)
    return b.build(), inputs


ALL = [
    (O(operation), T(kind))
    for operation in sorted(LOWERED)
    for kind in MADE_OF_TYPES.get(O(operation), OPERATIONS[operation].types or (B8,))
    if kind not in (T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT8_SYMM_PER_CHANNEL)
]


def name_of(value: object) -> str:
    return str(getattr(value, "name", value))


def compare(model: Model, inputs: list[Array]) -> None:
    with np.errstate(all="ignore"):
        status, wanted, _ = run_model(model, inputs)
        assert status is ErrorStatus.NONE
        assert check_lowered(model, inputs, status, wanted), Lowering(model, LOWERED).reasons
        if model.main.operations[0].type in EXACT:
            device = lowering_device()
            assert device is not None
            _, found, _ = run_on(device, model, inputs)
            for index, out, want in zip(model.main.output_indexes, found, wanted, strict=True):
                if not operand_info(model.main.operands[index].type).is_float:
                    np.testing.assert_array_equal(out, want)


def test_every_operation_that_is_lowered_has_a_case() -> None:
    assert CASES.keys() == LOWERED.keys()
    assert len(ALL) > 250


@pytest.mark.parametrize(("operation", "kind"), ALL, ids=name_of)
def test_each_operation_is_lowered_in_each_type_and_agrees(operation: O, kind: T) -> None:
    model, inputs = model_of(operation, kind)
    if (operation, kind) in REFUSED:
        assert all(Lowering(model, LOWERED).reasons)
        return
    compare(model, inputs)


@pytest.mark.parametrize("low", [False, True], ids=["highest", "lowest"])
@pytest.mark.parametrize(("operation", "kind"), [each for each in ALL if each[1] in QUANTS], ids=name_of)
def test_codes_and_zero_points_at_the_ends_of_their_range_agree(operation: O, kind: T, low: bool) -> None:
    compare(*model_of(operation, kind, low))


@pytest.mark.parametrize(("operation", "kind"), [each for each in ALL if each[1] in (F32, F16)], ids=name_of)
def test_infinities_and_what_overflows_agree(operation: O, kind: T) -> None:
    model, (x, *_) = model_of(operation, kind)
    for first, last in ((np.inf, 1), (1, -np.inf), (np.inf, -np.inf), (6e4, 0), (0, -6e4)):
        x = x.copy()
        x.flat[0], x.flat[-1] = first, last
        compare(model, [x])


@pytest.mark.check
@pytest.mark.parametrize("quantised", [False, True], ids=["float32", "8 bits"])
def test_a_default_service_gives_a_model_with_enough_work_to_onnxruntime_unasked(
    quantised: bool,
) -> None:
    model, (image,) = mobilenet(quantised, size=64)
    with nnburst.launch() as service, nnburst.nnapi.Compilation(model, service) as compilation:
        compilation.finish()
        (step,) = compilation.report.steps
        assert (step.device, step.operations) == ("nnburst-onnxruntime", tuple(range(len(model.main.operations))))
        with nnburst.Session(model, service=service) as session:
            found = session.run(None, {"x": image})
    wanted = run_on(ReferenceDevice(), model, [image])[1]
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine.astype(float), theirs.astype(float), atol=1 if quantised else 1e-5, rtol=1e-5)


def share_of_differences(model: Model, inputs: list[Array]) -> float:
    """How many elements of the last result differ, which they may by 1."""
    device = lowering_device()
    assert device is not None
    wanted, found = (run_on(each, model, inputs)[1][-1].astype(int) for each in (ReferenceDevice(), device))
    assert np.abs(wanted - found).max() <= 1
    return float((wanted != found).mean())


@pytest.mark.parametrize("operation", [O.ADD, O.CONCATENATION, O.SUB], ids=name_of)
def test_most_halves_are_rounded_away_from_zero(operation: O) -> None:
    model, (x, *_) = model_of(operation, QUANTS[0])
    shares = [share_of_differences(model, [rng(i).integers(0, 256, x.shape).astype(np.uint8)]) for i in range(40)]
    assert np.mean(shares) < 0.12  # rounded to even, a quarter would differ


def test_differences_by_one_do_not_add_up_in_a_mobilenet_of_8_bits() -> None:
    model, (image,) = mobilenet(quantised=True, size=64)
    share_of_differences(model, [image])  # of the 1,000 results after 29 layers; by 1 at most
    codes = run_on(ReferenceDevice(), model, [image])[1][-1]
    assert np.ptp(codes) > 10  # so there is something to differ
