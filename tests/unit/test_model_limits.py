"""Numbers of a hostile model are checked before anything is computed from them.

Without the limits each of these calls computes for minutes: the timeout of the test ends it.
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from nnburst import Model, ModelBuilder, OperandType, OperationType
from nnburst.errors import InvalidArgument
from nnburst.model import Operation, Request
from nnburst.model._validate_request import validate_request
from nnburst.model.dimensions import combine_dimensions
from nnburst.model.extensions import extension_code
from nnburst.model.operand_types import operand_nbytes
from nnburst.model.types import DataLocation, Lifetime, OperandDesc, RequestArgument, Subgraph
from nnburst.model.validate import validate_model

T, O, L = OperandType, OperationType, Lifetime  # noqa: E741
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
