"""ModelBuilder, dimensions, tables: what needs no device."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Memory, Model, ModelBuilder, OperandType, OperationType
from nnburst.errors import BadState, InvalidArgument
from nnburst.model import Operation, Request
from nnburst.model._validate_request import validate_request
from nnburst.model.builder import INLINE_LIMIT
from nnburst.model.dimensions import combine_dimensions
from nnburst.model.extensions import extension_code
from nnburst.model.operand_types import operand_nbytes
from nnburst.model.rows import OPERATIONS
from nnburst.model.types import DataLocation, Lifetime, OperandDesc, RequestArgument, Subgraph
from nnburst.model.validate import validate_model

T, O, L = OperandType, OperationType, Lifetime  # noqa: E741
F32 = T.TENSOR_FLOAT32


def test_every_operation_of_the_facts_sheet_is_in_the_table() -> None:
    assert sorted(OPERATIONS) == [*range(102)]


def test_operand_nbytes() -> None:
    assert operand_nbytes(F32, (2, 3)) == 24
    assert operand_nbytes(T.INT32, ()) == 4
    assert operand_nbytes(F32, ()) == operand_nbytes(F32, (2, 0)) == 0
    assert operand_nbytes(T.TENSOR_QUANT8_ASYMM, (2**16, 2**16 - 1)) == 2**32 - 2**16
    with pytest.raises(InvalidArgument, match=r"2\^32"):
        operand_nbytes(T.TENSOR_QUANT8_ASYMM, (2**16, 2**16))


def test_constants_up_to_the_limit_are_inline_and_larger_ones_share_one_sealed_pool() -> None:
    b = ModelBuilder()
    x = b.input("x", F32, (1, 33))
    small = np.arange(INLINE_LIMIT // 4, dtype=np.float32)
    large = [np.full((33,), k, np.float32) for k in (1, 2)]
    y = x
    for value in large:
        y = b.add(y, value)
    b.output("y", y)
    b.output("z", b.add(b.input("w", F32, small.shape), small))
    model = b.build()
    operands = model.main.operands
    copies = [o for o in operands if o.lifetime == Lifetime.CONSTANT_COPY and o.type == F32]
    references = [o for o in operands if o.lifetime == Lifetime.CONSTANT_REFERENCE]
    assert [o.location.length for o in copies] == [128]
    assert len(model.pools) == 1
    assert [o.location.offset % 64 for o in references] == [0, 0]
    for operand, value in zip(references, large, strict=True):
        np.testing.assert_array_equal(model.pools[0].array(np.float32, (33,), operand.location.offset), value)
    assert isinstance(model.pools[0], Memory)
    assert model.pools[0].mappable
    assert model.input_names == ("x", "w")
    assert model.output_names == ("y", "z")


def test_value_from_memory_is_not_copied() -> None:
    with Memory.ashmem(4096) as memory:
        memory.array(np.float32, (3,), 64)[:] = [1, 2, 3]
        b = ModelBuilder()
        w = b.operand(b.add_operand(F32, (3,)))
        b.set_operand_value_from_memory(w, memory, 64, 12)
        with pytest.raises(InvalidArgument, match="12 bytes"):
            b.set_operand_value_from_memory(w, memory, 64, 16)
        with pytest.raises(InvalidArgument, match="not in 4096"):
            b.set_operand_value_from_memory(w, memory, 4090, 12)
        b.output("y", b.add(b.input("x", F32, (3,)), w))
        model = b.build()
        assert model.pools == (memory,)
        assert model.main.operands[w.index].location.offset == 64


def test_operations_are_sorted_into_execution_order() -> None:
    b = ModelBuilder()
    x, y, z = (b.add_operand(F32, (2,)) for _ in range(3))
    b.add_operation(O.RELU, [y], [z])
    b.add_operation(O.TANH, [x], [y])
    b.identify_inputs_and_outputs([x], [z])
    assert [operation.type for operation in b.finish().main.operations] == [O.TANH, O.RELU]


def test_cycle_is_refused_and_spoils_the_builder() -> None:
    b = ModelBuilder()
    x, y, z = (b.add_operand(F32, (2,)) for _ in range(3))
    act = b.scalar(0)
    b.add_operation(O.ADD, [x, z, act], [y])
    b.add_operation(O.RELU, [y], [z])
    b.identify_inputs_and_outputs([x], [])
    with pytest.raises(InvalidArgument, match="cycle"):
        b.finish()
    with pytest.raises(BadState):
        b.finish()


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ([(0, 2)], "reads operand 0 before an operation writes it; set a value or identify it as an input"),
        ([(1, 0)], "operand 2 .* no operation writes it; set a value or identify it as an input"),
        ([(1, 2), (1, 2)], "writes operand 2, which is already written"),
    ],
)
def test_operands_that_nothing_or_too_much_writes_are_named(operations: list[tuple[int, int]], message: str) -> None:
    b = ModelBuilder()
    for _ in range(3):
        b.add_operand(F32, (2,))
    for x, y in operations:
        b.add_operation(O.RELU, [x], [y])
    b.identify_inputs_and_outputs([1], [2])
    with pytest.raises(InvalidArgument, match=message):
        b.finish()


def test_nothing_can_change_after_finish() -> None:
    b = ModelBuilder()
    x = b.input("x", F32, (2,))
    b.output("y", b.relu(x))
    b.build()
    for call in (
        lambda: b.add_operand(F32, (2,)),
        lambda: b.set_operand_value(0, np.zeros(2, np.float32)),
        lambda: b.add_operation(O.RELU, [0], [0]),
        lambda: b.identify_inputs_and_outputs([0], [1]),
        lambda: b.output("z", x),
        b.build,
    ):
        with pytest.raises(BadState):
            call()


def _inputs() -> tuple[ModelBuilder, int]:
    b = ModelBuilder()
    return b, b.input("x", F32, (1, 4, 4, 2))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b, x: b.input("x", F32, (1,)), "input 'x' already"),
        (lambda b, x: b.add_operand(T.INT32, (1,)), "scalar has no dimensions"),
        (lambda b, x: b.add_operand(T.TENSOR_QUANT8_ASYMM, (1,)), "scale is 0.0; it must be positive"),
        (lambda b, x: b.add_operand(77, (1,)), "unknown operand type 77"),
        (lambda b, x: b.output("y", x), "result of an operation"),
        (lambda b, x: b.constant(np.zeros(2, complex)), "complex128"),
        (lambda b, x: b.constant(np.zeros(2, np.uint8)), "needs scale="),
        (lambda b, x: b.constant(1.0), "use scalar"),
        (lambda b, x: b.constant(np.array([2**40])), "outside int32"),
        (lambda b, x: b.scalar(2**40), "does not fit into INT32"),
        (lambda b, x: b.set_operand_value(x, np.zeros((1, 4), np.float32)), r"shape \[1, 4\]"),
        (lambda b, x: b.set_operand_value(x, np.zeros((1, 4, 4, 2), np.int32)), r"astype"),
        (lambda b, x: b.set_operand_value(99, None), "no operand 99"),
        (lambda b, x: b.operation(O.RELU, x, x), "2 inputs, but it takes 1"),
        (lambda b, x: b.relu(1.0), r"input 0 \(x\) is FLOAT32, not"),
        (lambda b, x: b.operation(O.RELU, 1.0), r"scalar\(\) makes an operand of a number"),
        (lambda b, x: b.operation(O.SOFTMAX, x, b.scalar(1)), r"input 1 \(beta\) is INT32, not FLOAT32"),
        (lambda b, x: b.operation(O.OEM_OPERATION, x), "give outputs="),
        (lambda b, x: b.conv_2d(x, np.zeros((1, 2, 2, 3), np.float32)), "input depth is 3; it must be 2"),
        (lambda b, x: b.conv_2d(x, np.zeros((1, 5, 5, 2), np.float32)), "does not fit"),
        (
            lambda b, x: b.conv_2d(x, np.zeros((1, 2, 2, 2), np.float32), np.zeros(3, np.float32)),
            "bias' length is 3; it must be 1",
        ),
        (lambda b, x: b.conv_2d(x, np.zeros((1, 2, 2, 2), np.float32), padding="full"), "'same', 'valid'"),
        (lambda b, x: b.conv_2d(x, np.zeros((1, 2, 2, 2), np.float32), activation="gelu"), "relu6"),
        (lambda b, x: b.conv_2d(x, np.zeros((1, 2, 2, 2), np.float32), layout="CHWN"), "'NHWC' or 'NCHW'"),
        (lambda b, x: b.max_pool_2d(x, 2, padding=((2, 0), (0, 0))), "smaller than the filter"),
        (lambda b, x: b.reshape(x, (5, -1)), r"32 elements cannot be reshaped to \[5, -1\]"),
        (
            lambda b, x: b.fully_connected(x, np.zeros((3, 5), np.float32)),
            "not a multiple of the filter's input size 5",
        ),
        (
            lambda b, x: b.concatenation([x, np.zeros((1, 4, 3, 2), np.float32)], 1),
            "dimension 2 of an input is 3; it must be 4",
        ),
        (lambda b, x: b.add(x, np.zeros(3, np.float32)), "cannot be broadcast"),
        (lambda b, x: b.quantize(x), "needs scale="),
        (lambda b, x: b.build(), "no output"),
    ],
)
def test_errors_name_what_and_the_remedy(call: Callable[[ModelBuilder, int], object], message: str) -> None:
    b, x = _inputs()
    with pytest.raises(InvalidArgument, match=message):
        call(b, x)


def test_a_refused_operation_leaves_the_builder_usable() -> None:
    b, x = _inputs()
    with pytest.raises(InvalidArgument):
        b.relu(x, type=T.TENSOR_FLOAT16)
    b.output("y", b.relu(x))
    assert len(b.build().main.operations) == 1


def test_unknown_batch_is_inferred_through() -> None:
    b = ModelBuilder()
    x = b.input("x", F32, (0, 8, 8, 1))
    h = b.conv_2d(x, np.zeros((4, 3, 3, 1), np.float32), padding="same", stride=2)
    h = b.average_pool_2d(h, 2)
    h = b.reshape(h, (-1, 16))
    h = b.softmax(b.fully_connected(h, np.zeros((10, 16), np.float32)))
    b.output("y", h)
    model = b.build()
    assert model.main.operands[model.main.output_indexes[0]].dimensions == (0, 10)


def test_unknown_image_size_is_inferred_through() -> None:
    b = ModelBuilder()
    x = b.input("x", F32, (1, 0, 8, 1))
    h = b.max_pool_2d(b.conv_2d(x, np.zeros((4, 3, 3, 1), np.float32), padding="same"), 2)
    b.output("y", h)
    assert b.build().main.operands[h.index].dimensions == (1, 0, 4, 4)


def test_equal_scalars_share_an_operand() -> None:
    b = ModelBuilder()
    assert b.scalar(1) == b.scalar(1)
    assert len({b.scalar(1), b.scalar(1.0), b.scalar(True), b.scalar(2), b.scalar(0.0), b.scalar(-0.0)}) == 6


def test_float_bias_of_a_quantised_convolution_is_quantised_with_its_scale() -> None:
    b = ModelBuilder()
    x = b.input("x", T.TENSOR_QUANT8_ASYMM, (1, 2, 2, 1), scale=0.5, zero_point=3)
    w = b.constant(np.ones((2, 1, 1, 1), np.uint8), scale=0.25)
    b.output("y", b.conv_2d(x, w, np.array([1.0, -2.5]), scale=1.0))
    model = b.build()
    (bias,) = (o for o in model.main.operands if o.type == T.TENSOR_INT32)
    assert bias.scale == 0.125
    raw = model.operand_values[bias.location.offset : bias.location.offset + bias.location.length]
    assert np.frombuffer(raw, np.int32).tolist() == [8, -20]


# ---- numbers of a hostile model are checked before anything is computed from them ----------------------------------


MANY = (2**32 - 1,) * 1_000_000


def relu(dims: tuple[int, ...], code: int = T.TENSOR_FLOAT32) -> Model:
    x = OperandDesc(code, dims, 1, lifetime=L.SUBGRAPH_INPUT)
    y = OperandDesc(code, dims, 0, lifetime=L.SUBGRAPH_OUTPUT)
    return Model(Subgraph((x, y), (Operation(O.RELU, (0,), (1,)),), (0,), (1,)))


def test_a_high_rank_is_refused_before_the_product() -> None:
    with pytest.raises(InvalidArgument, match="at most 64 axes"):
        operand_nbytes(T.TENSOR_FLOAT32, MANY)


def test_dimensions_of_two_sources_are_limited() -> None:
    with pytest.raises(InvalidArgument, match="at most 64 axes"):
        combine_dimensions(MANY, MANY)
    with pytest.raises(InvalidArgument, match="at most 64 axes"):
        combine_dimensions((), MANY)
    with pytest.raises(InvalidArgument, match="2\\^32-1"):
        combine_dimensions((), (2**32,))


@pytest.mark.parametrize("code", [T.TENSOR_FLOAT32, extension_code(1, 0)], ids=["base", "extension"])
def test_a_model_whose_operand_has_a_million_dimensions_is_refused(code: int) -> None:
    model = replace(relu(MANY, code), extension_name_to_prefix={"com.example.types": 1})
    with pytest.raises(InvalidArgument, match=r"V2: operand 0 .* at most 64 axes"):
        validate_model(model)


def test_a_request_whose_argument_has_a_million_dimensions_is_refused() -> None:
    class Pool:
        kind, size, prot = "ashmem", 4096, 3

    region = DataLocation(0, 0, 4)
    request = Request((RequestArgument(False, region, MANY),), (RequestArgument(False, region),), (Pool(),))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"input 0 .*at most 64 axes"):
        validate_request(relu(()), request)


def test_regions_of_a_pool_without_an_identity_are_where_they_say() -> None:
    x, y, overlapping = (RequestArgument(location=DataLocation(0, offset, 16)) for offset in (64, 128, 72))
    pools: Any = (SimpleNamespace(size=256),)
    validate_request(relu((4,)), Request((x,), (y,), pools))
    with pytest.raises(InvalidArgument, match="overlaps"):
        validate_request(relu((4,)), Request((x,), (overlapping,), pools))


def test_the_target_of_a_reshape_is_limited() -> None:
    b = ModelBuilder()
    with pytest.raises(InvalidArgument, match="at most 64 axes"):
        b.reshape(b.input("x", T.TENSOR_FLOAT32, (2, 3)), np.full(1_000_000, 2**31 - 1, np.int32))  # type: ignore[arg-type]


def test_a_concatenation_of_very_many_inputs_is_matched_in_one_walk() -> None:
    count = 400_000
    x = OperandDesc(T.TENSOR_FLOAT32, (1,), count, lifetime=L.SUBGRAPH_INPUT)
    axis = OperandDesc(T.INT32, (), 1, lifetime=L.SUBGRAPH_INPUT)
    y = OperandDesc(T.TENSOR_FLOAT32, (count,), 0, lifetime=L.SUBGRAPH_OUTPUT)
    operation = Operation(O.CONCATENATION, (0,) * count + (1,), (2,))
    validate_model(Model(Subgraph((x, axis, y), (operation,), (0, 1), (2,))))


def test_a_message_about_lists_is_short_whatever_their_length() -> None:
    x = OperandDesc(T.TENSOR_FLOAT32, (1,), 1, lifetime=L.SUBGRAPH_INPUT)
    y = OperandDesc(T.TENSOR_FLOAT32, (1,), 0, lifetime=L.SUBGRAPH_OUTPUT)
    operands = (x, y, *[replace(x, number_of_consumers=0)] * 100_000)
    main = Subgraph(operands, (Operation(O.RELU, (0,), (1,)),), tuple({*range(100_000)} - {1}), (1,))
    with pytest.raises(InvalidArgument, match="operand 100000 is not in the list") as caught:
        validate_model(Model(main))
    assert len(str(caught.value)) < 1000
