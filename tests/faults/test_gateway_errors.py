"""What the gateway answers to requests that are wrong, and to services that fail."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import grpc
import tritonclient.http as triton_http
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs
from tritonclient.utils import InferenceServerException

from nnburst.errors import InvalidArgument
from nnburst.gateway.tensors import _DTYPES
from support.gateways import (
    MARKS,
    PROTOCOLS,
    Gateway,
    X,
    Y,
    conversions,
    placed,
    refused,
    refused_by_grpc,
    request_of,
    shared_memory,
    tensor,
)

pytestmark = MARKS


def test_input_that_is_missing_is_named(client: Any) -> None:
    with pytest.raises(InferenceServerException, match=r"inputs \['x'\] are missing; this model takes \['x'\]"):
        client.infer("relu", [])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"inputs": 1}',
        b'{"inputs": [{"name": "x", "shape": [2, 8], "datatype": "FP32"}]}',
        b'{"inputs": [{"name": "x", "shape": [-2, -8], "datatype": "FP32", "data": []}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [1, "2", [3]]}]}',
        b'{"inputs": [{"name": "x", "shape": ["a"], "datatype": "FP32", "data": [1]}]}',
        b'{"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": 99}}]}',
        b'{"inputs": [{"name": "x", "shape": [9999999999999, 8], "datatype": "FP32", "data": []}]}',
    ],
    ids=range(11),
)
def test_malformed_json_is_refused_with_a_sentence(infer_url: str, body: bytes) -> None:
    assert len(refused(infer_url, body)) > 10


@pytest.mark.parametrize(
    "shape",
    [(10**4000,) * 400, (1,) * 70, (2**70, 0), (0, 2**32 - 1, 2**32 - 1), (-1,)],
    ids=["huge", "deep", "wide", "empty", "negative"],
)
def test_shape_that_no_array_has_is_refused_before_any_arithmetic(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidArgument, match="dimensions"):
        conversions("FP32").array_of("FP32", shape, [1.0])


@pytest.mark.parametrize(
    "length", ["9" * 5000, "-1", "1e3", "\u0663", "99"], ids=["long", "negative", "real", "other", "more"]
)
def test_length_of_the_header_that_is_none_is_refused(infer_url: str, length: str) -> None:
    quoted = length.encode().decode("latin-1")
    assert "Inference-Header-Content-Length" in refused(infer_url, b"{}", **{"Inference-Header-Content-Length": quoted})


def test_numbers_that_json_has_not_are_refused_on_both_ways(gateway: Gateway, infer_url: str) -> None:
    for constant in ("NaN", "Infinity", "-Infinity"):
        given = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": [float(constant)] * 8}
        body = json.dumps({"inputs": [given]})
        assert "as NaN and Infinity, go as binary data" in refused(infer_url, body.encode())
    client = gateway.client("rest")
    infinite = tensor(triton_http, "x", np.full((1, 8), np.inf, np.float32))
    with pytest.raises(InferenceServerException, match="ask for binary data"):
        client.infer("relu", [infinite], outputs=[triton_http.InferRequestedOutput("y", binary_data=False)])
    answer = client.infer("relu", [infinite], outputs=[triton_http.InferRequestedOutput("y", binary_data=True)])
    assert np.isinf(answer.as_numpy("y")).all()
    client.close()


def test_size_of_a_part_is_compared_before_it_is_read(gateway: Gateway, client: Any, protocol: str) -> None:
    key = f"/nnburst-sparse-{os.getpid()}"
    with shared_memory(key, 1 << 40):
        client.register_system_shared_memory("sparse", key, 1 << 40)
        with pytest.raises(InferenceServerException, match=f"takes {X.nbytes} bytes, got {1 << 40}"):
            client.infer("relu", [placed(PROTOCOLS[protocol], size=1 << 40, name="sparse")])
        huge = PROTOCOLS[protocol].InferInput("x", [1 << 31, 8], "FP32")
        huge.set_shared_memory("sparse", 1 << 36)
        with pytest.raises(InferenceServerException, match="is larger than"):
            client.infer("relu", [huge])
        client.unregister_system_shared_memory("sparse")


@pytest.mark.parametrize(
    ("datatype", "elements", "said"),
    [
        ("FP32", ["1.5", 1.0], "the elements are FP32, got a str"),
        ("FP32", [1.0, True], "the elements are FP32, got a bool"),
        ("FP32", [None, 1.0], "the elements are FP32, got a NoneType"),
        ("FP32", [1e39, 0], "a number is beyond those of FP32"),
        ("FP64", [10**400, 0], "a number is beyond those of FP64"),
        ("FP64", json.loads("[1e999, 0]"), "a number is beyond those of FP64"),
        ("FP16", [65520, 0], "a number is beyond those of FP16"),
        ("INT32", [1.5, 2], "the elements are INT32, got a float"),
        ("INT32", [2**31, 0], "a number is beyond those of INT32"),
        ("UINT8", [0, -1], "a number is beyond those of UINT8"),
        ("UINT64", [10**4000, 0], "a number is beyond those of UINT64"),
        ("UINT8", np.array([300, 0], "u4"), "a number is beyond those of UINT8"),
        ("BOOL", [1, 0], "the elements are BOOL, got a int"),
        ("INT32", [[1], [2, 3]], "the elements are INT32, got a list"),
        ("INT32", [[1], 2], "the elements are INT32, got a list"),
        ("INT32", [1], "of shape [2] takes 2 elements, got 1"),
    ],
)
def test_elements_that_are_none_of_the_datatype_are_refused(datatype: str, elements: Any, said: str) -> None:
    with pytest.raises(InvalidArgument) as info:
        conversions(datatype).array_of(datatype, (2,), elements)
    assert str(info.value).removeprefix("input 'x'").lstrip(": ") == said


@pytest.mark.parametrize(
    ("datatype", "elements"),
    [
        ("FP16", [65504, -0.5]),
        ("FP32", [[1], [2.5]]),
        ("FP32", np.array([np.nan, np.inf], "f4")),
        ("UINT64", [0, 2**64 - 1]),
        ("INT8", np.array([-128, 127], "i4")),
        ("BOOL", [True, False]),
    ],
)
def test_elements_of_the_datatype_keep_their_values(datatype: str, elements: Any) -> None:
    array = conversions(datatype).array_of(datatype, (2,), elements)
    assert array.dtype == _DTYPES[datatype]
    np.testing.assert_array_equal(array, np.ravel(elements))


WRONG: dict[str, Callable[[Any], object]] = {
    "takes 64 bytes, got 60": lambda request: request.raw_input_contents.__setitem__(0, X.tobytes()[:-4]),
    "1 raw_input_contents belong to no input": lambda request: request.raw_input_contents.append(b""),
    "fewer raw_input_contents than inputs": lambda request: request.inputs.add(name="z", datatype="FP32", shape=[1]),
    "a region needs a name and a size": lambda request: (
        request.inputs[0].parameters["shared_memory_region"].MergeFrom(pb.InferParameter(string_param="nothing"))
    ),
}


@pytest.mark.parametrize("said", WRONG)
def test_wrong_message_says_what_is_wrong_and_the_next_one_is_answered(stub: Any, said: str) -> None:
    wrong = request_of()
    WRONG[said](wrong)
    assert said in refused_by_grpc(stub.ModelInfer, wrong)
    assert stub.ModelInfer(request_of()).raw_output_contents[0] == Y.tobytes()


def test_output_whose_shape_the_model_chooses_is_answered(stub: Any) -> None:
    for chosen in (2, 2, 2, 1, 2, 0):
        request = request_of(model="compress")
        request.raw_input_contents.append((np.arange(2) < chosen).tobytes())
        request.inputs.add(name="c", datatype="BOOL", shape=[2])
        answer = stub.ModelInfer(request)
        assert list(answer.outputs[0].shape) == [chosen, 8]
        assert answer.raw_output_contents[0] == X[:chosen].tobytes()
    counts = stub.ModelStatistics(pb.ModelStatisticsRequest(name="compress")).model_stats[0].inference_stats
    assert (counts.success.count, counts.fail.count) == (6, 0)


def test_requests_that_come_at_once_have_an_answer_each(gateway: Gateway) -> None:
    numbers = np.random.default_rng(7).normal(size=(400, 2, 8)).astype(np.float32)

    def request(i: int) -> Any:
        return request_of(numbers[i, : 1 + i // 2 % 2])  # two of one shape, two of another

    async def main() -> None:
        async with grpc.aio.insecure_channel(gateway.url("grpc")) as channel:
            infer = stubs.GRPCInferenceServiceStub(channel).ModelInfer
            answers = await asyncio.gather(*[infer(request(i)) for i in range(len(numbers))])
        for i, answer in enumerate(answers):
            assert list(answer.outputs[0].shape) == [1 + i // 2 % 2, 8]
            assert answer.raw_output_contents[0] == np.maximum(numbers[i, : 1 + i // 2 % 2], 0).tobytes()

    asyncio.run(main())


def test_stream_answers_in_order_and_says_which_request_failed(stub: Any) -> None:
    def request(number: int) -> Any:
        request = request_of(id=str(number))
        if number == 4:
            request.inputs[0].name = "y"
        return request

    answers = list(stub.ModelStreamInfer(map(request, range(6))))
    assert [answer.infer_response.id for answer in answers] == [str(number) for number in range(6)]
    assert [bool(answer.error_message) for answer in answers] == [number == 4 for number in range(6)]


def test_contents_of_another_datatype_are_refused(stub: Any) -> None:
    def refusal(name: str, datatype: str, **contents: Any) -> str:
        tensors = pb.InferTensorContents(**contents)
        given = pb.ModelInferRequest.InferInputTensor(name=name, datatype=datatype, shape=[3], contents=tensors)
        return refused_by_grpc(stub.ModelInfer, pb.ModelInferRequest(model_name="types", inputs=[given]))

    for name, datatype, contents, said in (
        ("u1", "UINT8", {"int_contents": [1, 2, 3]}, "UINT8 comes in uint_contents, not in int_contents"),
        ("u1", "UINT8", {"uint_contents": [1, 2, 300]}, "a number is beyond those of UINT8"),
        ("f2", "FP16", {"fp32_contents": [1, 2, 3]}, "FP16 comes in raw_input_contents, not in fp32_contents"),
        ("f8", "FP64", {"fp32_contents": [1, 2, 3]}, "FP64 comes in fp64_contents, not in fp32_contents"),
    ):
        assert refusal("in_" + name, datatype, **contents) == f"input 'in_{name}': {said}"
