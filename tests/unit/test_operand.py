"""What methods of `ModelBuilder` return: operands with operators, of one builder."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nnburst
from nnburst import InvalidArgument, Model, ModelBuilder, Operand, OperandType, OperationType
from nnburst.devices.reference.device import ReferenceDevice
from support.operations import F16, F32, Q8, Array, outputs_of, run_model

X = np.array([[1, -2, 4], [3, 5, -6]], np.float32)
ROW = np.array([2, 4, 8], np.float32)
DOUBLES = np.array([0.1, 0.2, 0.3])


def inputs(*types: OperandType) -> tuple[ModelBuilder, list[Operand]]:
    b = ModelBuilder()
    return b, [b.input(f"x{i}", kind, (2, 3), scale=0.5 if kind == Q8 else 0.0) for i, kind in enumerate(types)]


def result_of(make: Callable[..., Operand], *arrays: Array) -> Array:
    (found,) = outputs_of(lambda b, *operands: make(*operands), *arrays)
    return found


@pytest.mark.parametrize("function", [operator.add, operator.sub, operator.mul, operator.truediv])
@pytest.mark.parametrize(
    "other", [2, 2.5, ROW, ROW.tolist(), np.float32(4)], ids=["int", "float", "array", "list", "np"]
)
def test_operators_take_constants_on_either_side(function: Callable[[Any, Any], Any], other: Any) -> None:
    beside = np.array(other, np.float32)
    np.testing.assert_allclose(result_of(lambda x: function(x, other), X), function(X, beside), rtol=1e-6)
    np.testing.assert_allclose(result_of(lambda x: function(other, x), X), function(beside, X), rtol=1e-6)


def test_numbers_have_the_type_of_the_operand_beside_them() -> None:
    whole, half = X.astype(np.int32), X.astype(np.float16)
    np.testing.assert_array_equal(result_of(lambda x: 10 - x * 2, whole), 10 - whole * 2)
    np.testing.assert_array_equal(result_of(lambda x: 1.5 * x, half), half * np.float16(1.5))
    np.testing.assert_array_equal(result_of(operator.neg, X), -X)
    with pytest.raises(InvalidArgument, match=r"0\.5.* does not fit into int32"):
        result_of(lambda x: x + 0.5, whole)


def test_an_operand_knows_shape_type_and_quantisation() -> None:
    b, (x, q) = inputs(F16, Q8)
    assert (x.shape, x.type, x.dtype, x.scale, x.zero_point) == ((2, 3), F16, np.float16, 0.0, 0)
    assert (q.dtype, q.scale) == (np.uint8, 0.5)
    assert b.mean(x, 1, keep=True).shape == (2, 1)
    assert repr(x) == "<Operand 0: TENSOR_FLOAT16 [2, 3]>"
    assert x == b.operand(0) != q
    assert nnburst.Operand is Operand


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda b, x, q, other: x + other, InvalidArgument, r"Operand 0: TENSOR_FLOAT32 \[2, 3\]> belongs to another"),
        (lambda b, x, q, other: b.relu(other), InvalidArgument, "belongs to another ModelBuilder"),
        (lambda b, x, q, other: b.output("y", other), InvalidArgument, "belongs to another ModelBuilder"),
        (lambda b, x, q, other: b.add_operation(OperationType.RELU, [other], [x]), InvalidArgument, "another ModelB"),
        (lambda b, x, q, other: b.conv_2d(x.index, x), InvalidArgument, r"got 0; .* operand\(\) of an index"),
        (lambda b, x, q, other: b.output("y", 0), InvalidArgument, "expected an Operand as output 'y', got 0"),
        (lambda b, x, q, other: b.constant(x), InvalidArgument, "an operand already"),
        (lambda b, x, q, other: q + q, InvalidArgument, r"ADD: .* needs scale= .* add\(…, scale=0.5\)"),
        (lambda b, x, q, other: q + 1, InvalidArgument, r"b=1 beside TENSOR_QUANT8_ASYMM has no scale; give constant"),
        (lambda b, x, q, other: -q, InvalidArgument, "NEG: input 0 .* is TENSOR_QUANT8_ASYMM"),
        (lambda b, x, q, other: x + q, InvalidArgument, "ADD: input 1 .* is TENSOR_QUANT8_ASYMM"),
        (lambda b, x, q, other: x + "1", TypeError, r"unsupported operand type.* 'Operand' and 'str'"),
        (lambda b, x, q, other: x + True, TypeError, "unsupported operand type"),
        (lambda b, x, q, other: x**2, TypeError, "unsupported operand type"),
        (lambda b, x, q, other: bool(x), TypeError, "no value while its model is built"),
        (lambda b, x, q, other: [1, 2][x], TypeError, "must be integers .* not Operand"),
        (lambda b, x, q, other: int(x), TypeError, "not 'Operand'"),
        (lambda b, x, q, other: b.operation("a.b", x), InvalidArgument, "a.b 0: its outputs cannot be inferred; give"),
        (lambda b, x, q, other: b.operation("A.b", x), InvalidArgument, "'A.b' is no name of an extension"),
        (lambda b, x, q, other: b.operation("a", x), InvalidArgument, "'a': .* OperationType, .* name of an extension"),
        (lambda b, x, q, other: b.operation("a.b", x, number=70000), InvalidArgument, "have the numbers 0 … 65535"),
    ],
)
def test_what_no_operation_stands_for_is_refused(call: Callable[..., Any], error: type[Exception], says: str) -> None:
    b, (x, q) = inputs(F32, Q8)
    _, (other,) = inputs(F32)
    with pytest.raises(error, match=says):
        call(b, x, q, other)


def test_the_layer_below_takes_an_operand_for_its_index() -> None:
    b, (x,) = inputs(F32)
    y = b.add_operand(F32, (2, 3))
    assert isinstance(y, int)
    b.add_operation(OperationType.RELU, [x], [y])
    b.output("z", b.operand(y) + x)
    _, (found,), _ = run_model(b.build(), [X])
    np.testing.assert_array_equal(found, np.maximum(X, 0) + X)


@pytest.mark.parametrize(
    "use",
    [
        lambda b, x: b.constant(DOUBLES),
        lambda b, x: x + DOUBLES,
        lambda b, x: DOUBLES * x,
        lambda b, x: b.maximum(x, DOUBLES),
        lambda b, x: b.fully_connected(x, np.zeros((4, 3))),
        lambda b, x: b.fully_connected(x, np.zeros((4, 3), np.float32), np.zeros(4)),
        lambda b, x: b.operation(OperationType.MAXIMUM, x, DOUBLES),
    ],
)
def test_float64_arrays_are_refused_with_what_to_write(use: Callable[[ModelBuilder, Operand], Any]) -> None:
    b, (x,) = inputs(F32)
    with pytest.raises(InvalidArgument, match=r"float64 .*astype\(np\.float32\), or constant\(array, np\.float32\)"):
        use(b, x)


def test_float64_is_converted_where_the_call_says_so_and_lists_always() -> None:
    b, (x,) = inputs(F32)
    y = x + b.constant(DOUBLES, np.float32) + b.constant(DOUBLES, F32) + DOUBLES.tolist()
    b.output("y", y)
    _, (found,), _ = run_model(b.build(), [X])
    np.testing.assert_allclose(found, X + 3 * DOUBLES, rtol=1e-6)


def blur(kind: OperandType = F32) -> Model:
    b, (x,) = inputs(kind)
    (y,) = b.operation("com.example.blur", x, number=7, outputs=[{"type": x.type, "dimensions": x.shape}])
    b.output("y", y * 2)
    return b.build()


def test_an_operation_of_an_extension_is_part_of_a_valid_model() -> None:
    model = blur()
    assert model.extension_name_to_prefix == {"com.example.blur": 1}
    assert [operation.type for operation in model.main.operations] == [1 << 16 | 7, OperationType.MUL]
    assert ReferenceDevice().get_supported_operations(model) == (False, True)


def test_types_of_extensions_go_with_their_operations() -> None:
    b = ModelBuilder()
    kind = b.extension_code("com.example.fibonacci", 1)
    n = b.input("n", kind, (4,))
    (y,) = b.operation("com.example.fibonacci", n, outputs=[{"type": kind, "dimensions": (4,)}])
    assert (y.type, y.dtype) == (1 << 16 | 1, None)
    b.output("y", y)
    assert b.build().main.operations[0].type == 1 << 16


def test_extensions_of_an_inner_model_keep_their_names() -> None:
    b = ModelBuilder()
    b.extension_code("com.example.other", 0)
    condition, x = b.input("condition", OperandType.TENSOR_BOOL8, (1,)), b.input("x", F32, (2, 3))
    b.output("y", b.branch(condition, blur(), blur(), [x])[0])
    model = b.build()
    assert model.extension_name_to_prefix == {"com.example.other": 1, "com.example.blur": 2}
    assert [inner.operations[0].type for inner in model.referenced] == [2 << 16 | 7] * 2


def test_indexes_are_those_of_the_graph_builder() -> None:
    b = ModelBuilder()
    x, y = b.add_operand(F32, (2, 3)), b.add_operand(F32, (2, 3))
    b.add_operation(OperationType.RELU, [x], [y])
    b.identify_inputs_and_outputs([x], [y])
    _, (found,), _ = run_model(b.finish(), [X])
    np.testing.assert_array_equal(found, np.maximum(X, 0))
    with pytest.raises(InvalidArgument, match="index of an operand, or an Operand, got 'x'"):
        ModelBuilder().add_operation(OperationType.RELU, ["x"], [0])  # type: ignore[list-item]
