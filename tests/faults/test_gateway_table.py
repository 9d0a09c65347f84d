"""The table of docs/coming/triton.md that says what Triton's calls do here is what a gateway answers.

NNBURST_TEST_WRITE=1 python -m pytest tests/faults/test_gateway_table.py    # writes the table
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("onnx", reason="needs the extra nnburst[onnx]")
pytest.importorskip("tritonclient", reason="needs the extra nnburst[oip]")

import grpc
from google.protobuf.json_format import ParseDict
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

from support import ROOT
from support.gateways import MARKS, Gateway, X, asked

pytestmark = [pytest.mark.check, *MARKS]
PAGE = ROOT / "docs" / "coming" / "triton.md"
METHODS = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
OPTIONS = ("--oip-control", "--oip-shared-memory")


class Asked(NamedTuple):
    """A call, as both protocols have it: the fields of its message, the path, and a body unless it is a GET."""

    call: str
    fields: dict[str, Any]
    path: str
    body: dict[str, Any] | None = None


RELU = {"name": "relu"}
MEMORY: dict[str, Any] = {"key": f"/nnburst-table-{os.getpid()}", "byte_size": 4096}
REGION = "/v2/{}sharedmemory/region/http/"
CALLS = [
    Asked("ServerLive", {}, "/v2/health/live"),
    Asked("ServerReady", {}, "/v2/health/ready"),
    Asked("ServerMetadata", {}, "/v2"),
    Asked("ModelReady", RELU, "/v2/models/relu/ready"),
    Asked("ModelMetadata", RELU, "/v2/models/relu"),
    Asked("ModelConfig", RELU, "/v2/models/relu/config"),
    Asked("ModelStatistics", RELU, "/v2/models/relu/stats"),
    Asked("ModelInfer", {}, "/v2/models/relu/infer", asked()),
    Asked("ModelStreamInfer", {}, "/v2/models/relu/generate_stream", asked()),
    Asked("RepositoryIndex", {}, "/v2/repository/index", {}),
    Asked("RepositoryModelLoad", {"model_name": "relu"}, "/v2/repository/models/relu/load", {}),
    Asked("RepositoryModelUnload", {"model_name": "types"}, "/v2/repository/models/types/unload", {}),
    Asked("SystemSharedMemoryStatus", {}, "/v2/systemsharedmemory/status"),
    Asked("SystemSharedMemoryRegister", {"name": "all", **MEMORY}, REGION.format("system") + "register", MEMORY),
    Asked("SystemSharedMemoryUnregister", {"name": "all"}, REGION.format("system") + "unregister", {}),
    Asked("CudaSharedMemoryStatus", {}, "/v2/cudasharedmemory/status"),
    Asked("CudaSharedMemoryRegister", {"name": "all"}, REGION.format("cuda") + "register", {}),
    Asked("CudaSharedMemoryUnregister", {"name": "all"}, REGION.format("cuda") + "unregister", {}),
    Asked("TraceSetting", {}, "/v2/trace/setting", {}),
    Asked("LogSettings", {}, "/v2/logging", {}),
]


def infer(model: str = "relu", version: str = "", **changes: Any) -> Asked:
    """A request that is right but for some changes: of the whole, or of its input, if that has such a key."""
    whole = asked()
    for key, value in changes.items():
        (whole["inputs"][0] if key in whole["inputs"][0] or key == "region" else whole)[key] = value
    place = f"/versions/{version}" if version else ""
    return Asked("ModelInfer", {}, f"/v2/models/{model}{place}/infer", whole)


REFUSED = {
    ("NOT_FOUND", "404"): {
        "no model 'other'": infer("other"),
        "model 'relu' has the versions ['1'], not '7'": infer(version="7"),
    },
    ("UNAVAILABLE", "503"): {"model 'types' was unloaded": infer("types")},
    ("INVALID_ARGUMENT", "400"): {
        "sequence_id: sequences are not served": infer(parameters={"sequence_id": 7}),
        "output 'y': classification is not served": infer(outputs=[{"name": "y", "parameters": {"classification": 2}}]),
        "input 'z' is unknown": infer(name="z"),
        "input 'x' is FP32, got INT32": infer(datatype="INT32"),
        "input 'x' has shape ('n', 8), got (1, 16)": infer(shape=[1, 16]),
        "output 'z' is unknown": infer(outputs=[{"name": "z"}]),
        "no region 'none' is registered": infer(outputs=[{"name": "y", "parameters": {
            "shared_memory_region": "none", "shared_memory_byte_size": 64}}]),
        "there are no files of a model 'other'": Asked(
            "RepositoryModelLoad", {"model_name": "other"}, "/v2/repository/models/other/load", {}
        ),
        "a model is loaded as it is, not with ['config']": Asked(
            "RepositoryModelLoad", {"model_name": "relu", "parameters": {"config": {"string_param": "{}"}}},
            "/v2/repository/models/relu/load", {"parameters": {"config": "{}"}},
        ),
    },
}  # fmt: skip
"""Requests by gRPC's and HTTP's status, and by the beginning of the sentence that both protocols answer."""


def message(what: Asked) -> Any:
    """The message of a call; that of an inference from the body that HTTP has."""
    if what.body is None or not what.call.endswith("Infer"):
        return ParseDict(what.fields, getattr(pb, METHODS[what.call].input_type.name)())
    _, _, _, model, *rest = what.path.split("/")
    request = pb.ModelInferRequest(model_name=model, model_version=rest[1] if len(rest) > 1 else "")
    given = what.body["inputs"][0]
    request.inputs.add(name=given["name"], datatype=given["datatype"], shape=given["shape"])
    request.raw_input_contents.append(X.tobytes())
    for output in what.body.get("outputs", []):
        put(request.outputs.add(name=output["name"]), output)
    put(request, what.body)
    return request


def put(place: Any, given: dict[str, Any]) -> None:
    for name, value in given.get("parameters", {}).items():
        setattr(place.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)


def over_grpc(gateway: Gateway, what: Asked) -> tuple[str, str]:
    """Return the code and the sentence that a call is answered with."""
    with grpc.insecure_channel(gateway.url("grpc")) as channel:
        call = getattr(stubs.GRPCInferenceServiceStub(channel), what.call)
        try:
            if what.call == "ModelStreamInfer":
                (answer,) = call(iter([message(what)]), timeout=60)
                return ("OK", "") if not answer.error_message else ("", answer.error_message)
            call(message(what), timeout=60)
        except grpc.RpcError as error:
            return error.code().name, str(error.details())
    return "OK", ""


def over_http(gateway: Gateway, what: Asked) -> tuple[str, str]:
    data = None if what.body is None else json.dumps(what.body).encode()
    url = f"http://{gateway.url('rest')}{what.path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as answer:
            return str(answer.status), ""
    except urllib.error.HTTPError as error:
        with error:
            return str(error.code), str(json.loads(error.read())["error"])


def cell(answer: tuple[str, str]) -> str:
    return "served" if answer[0] in ("OK", "200") else answer[0]


def clause(sentence: str, end: str = "; ") -> str:
    """The beginning of a sentence, which names the situation."""
    return re.split(end, sentence)[0].replace("|", r"\|")


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Gateway, Gateway]]:
    """One as it is, and one with the options that let clients do more."""
    with contextlib.ExitStack() as stack:
        memory = SharedMemory(MEMORY["key"], create=True, size=MEMORY["byte_size"])
        stack.callback(memory.unlink)
        stack.callback(memory.close)
        plain, more = (
            stack.enter_context(contextlib.closing(Gateway(tmp_path_factory.mktemp("gateway"), *options)))
            for options in ((), OPTIONS)
        )
        yield plain, more


def calls(plain: Gateway, more: Gateway) -> Iterator[str]:
    yield "| call | gRPC | HTTP | needs, or is answered |"
    for what in CALLS:
        answers = over_grpc(plain, what), over_http(plain, what)
        if {*map(cell, answers)} == {"served"}:
            continue
        said = clause(answers[0][1] or answers[1][1], "[;:] ")
        if cell(answers[0]) != "served" and cell(over_grpc(more, what)) == "served":
            assert cell(over_http(more, what)) == "served", what
            said = f"`{'--oip-control' if 'Repository' in what.call else '--oip-shared-memory'}`, else {said}"
        yield f"| {what.call} | {cell(answers[0])} | {cell(answers[1])} | {said} |"


def test_table_is_what_is_answered(gateways: tuple[Gateway, Gateway]) -> None:
    head, *rows = calls(*gateways)
    made = "\n".join([head, re.sub(r"[^|]+", "---", head), *rows])
    page = PAGE.read_text(encoding="utf-8")
    between = re.compile(r"(<!-- observed: calls -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
    wanted, found = between.subn(lambda match: match[1] + made + match[2], page)
    assert found == 1
    if os.environ.get("NNBURST_TEST_WRITE"):
        PAGE.write_text(wanted, encoding="utf-8")
    assert page == wanted, f"{Path(__file__).name} says how to write it:\n{made}"


def test_refusal_has_the_same_sentence_over_both_protocols(gateways: tuple[Gateway, Gateway]) -> None:
    _, more = gateways
    over_http(more, next(what for what in CALLS if what.call == "RepositoryModelUnload"))
    for statuses, requests in REFUSED.items():
        for said, what in requests.items():
            (status, sentence), (code, same) = over_grpc(more, what), over_http(more, what)
            assert (clause(sentence), status, code) == (said, *statuses)
            assert same == sentence


def test_table_has_every_call() -> None:
    assert {what.call for what in CALLS} == set(METHODS)
