"""The Open Inference Protocol over gRPC, as in `open_inference.proto`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_reflection.v1alpha import reflection, reflection_pb2

from .._core.tokens import EVERYONE, Tokens
from .._version import VERSION
from ..errors import DeviceUnavailable, InvalidArgument, NNBurstError
from ..runtime.spans import use_parent
from .budget import RETRY_S, Budget, seconds_for
from .certificate import Certificate
from .inference import CODES, Answers, Inference, InputTensor, OutputTensor, Terms, extensions, infer
from .listen import note_request, request_id
from .models import Models, NoSuchModel
from .regions import Regions
from .tensors import PIECE, convert_in_thread, text_size, to_wire

_log = logging.getLogger(__name__)
logging.getLogger("grpc._cython.cygrpc").addFilter(  # grpcio logs clients that leave early or send invalid text
    lambda record: not record.getMessage().startswith(("ExecuteBatchError", "Invalid encoding"))
)
_MOST_BYTES = 256 << 20
"""Maximum bytes of one message."""
_LEAST_PING_MS = 10_000
"""Minimum time between two keepalive pings of a client."""
_MOST_STREAMS = 64
"""Maximum number of requests in progress on one connection, so that no client exhausts the gateway's limit."""

(_DESCRIPTION,) = FileDescriptorSet.FromString(Path(__file__).with_name("open_inference.binpb").read_bytes()).file
_POOL = DescriptorPool()  # it is private, because a program may also load a client's messages of these names
_OTHERS = health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb
for _file in (_DESCRIPTION.SerializeToString(), *_OTHERS):
    _POOL.AddSerializedFile(_file)
_CALLS = _POOL.FindServiceByName("inference.GRPCInferenceService")
pb = SimpleNamespace(**{name: GetMessageClass(one) for name, one in _CALLS.file.message_types_by_name.items()})
_SERVICE = _CALLS.full_name
_OPEN = (f"/{_SERVICE}/ServerLive", f"/{_SERVICE}/ServerReady", f"/{health.SERVICE_NAME}/Check")
_CONTENTS = {
    "BOOL": ("bool_contents", "?"),
    **{f"INT{n}": ("int_contents", "i4") for n in (8, 16, 32)},
    **{f"UINT{n}": ("uint_contents", "u4") for n in (8, 16, 32)},
    "INT64": ("int64_contents", "i8"),
    "UINT64": ("uint64_contents", "u8"),
    "FP32": ("fp32_contents", "f4"),
    "FP64": ("fp64_contents", "f8"),
    "BYTES": ("bytes_contents", "O"),
}
"""Message field and dtype of each datatype's elements. Other datatypes are sent only as raw bytes."""


async def _abort(context: Any, error: NNBurstError) -> None:
    """End a call with an error. If the client should retry, the trailers say when."""
    code = next(code for kind, code, _ in CODES if isinstance(error, kind))
    hint = (("grpc-retry-pushback-ms", str(RETRY_S * 1000)),) if code in ("UNAVAILABLE", "RESOURCE_EXHAUSTED") else ()
    await context.abort(grpc.StatusCode[code], str(error), (*context.trailing_metadata(), *hint))


class Servicer:
    """The protocol's calls. Each call has a method. Most methods return the JSON form of the answer, a dict."""

    def __init__(self, models: Models, regions: Regions, budget: Budget, tokens: Tokens = EVERYONE) -> None:
        self._models = models
        self._regions = regions
        self._budget = budget
        self._tokens = tokens

    def handlers(self) -> dict[str, Any]:
        """Return the handler of each call. Inference requests arrive undecoded, so that their bytes can be limited."""
        made = {}
        for call in _CALLS.methods:
            work, answer = getattr(self, call.name), GetMessageClass(call.output_type)
            read, make = None, grpc.unary_unary_rpc_method_handler
            if call.server_streaming:
                make = grpc.stream_stream_rpc_method_handler
            elif call.name != "ModelInfer":
                read, work = GetMessageClass(call.input_type).FromString, partial(self._answer, work, answer)
            made[call.name] = make(work, read, answer.SerializeToString)
        return made

    @staticmethod
    async def _answer(work: Callable[[Any], Awaitable[Any]], answer: Any, request: Any, context: Any) -> Any:
        try:
            return ParseDict(await work(request), answer())
        except NNBurstError as error:
            await _abort(context, error)

    # ---- health and metadata ---------------------------------------------------------------------------------

    async def check_health(self, request: Any, context: Any) -> Any:
        """Answer ``grpc.health.v1`` for the server or a named model. For a model, the client needs a token."""
        name = "" if request.service == _SERVICE else request.service
        if name and not _is_admitted(self._tokens, context.invocation_metadata()):
            await _refuse(request, context)
        try:
            is_ready = bool(await self._models.open(name)) if name else await self._models.is_ready()
        except NoSuchModel as error:
            await _abort(context, error)
        except NNBurstError:
            is_ready = False
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING)

    async def ServerLive(self, request: Any) -> Any:
        return {"live": True}

    async def ServerReady(self, request: Any) -> Any:
        return {"ready": await self._models.is_ready()}

    async def ModelReady(self, request: Any) -> Any:
        try:
            await self._models.open(request.name, request.version)
        except NNBurstError:
            return {"ready": False}
        return {"ready": True}

    async def ServerMetadata(self, request: Any) -> Any:
        return {"name": "nnburst", "version": VERSION, "extensions": extensions(self._models, self._regions)}

    async def ModelMetadata(self, request: Any) -> Any:
        return await self._models.describe(request.name, request.version)

    async def ModelConfig(self, request: Any) -> Any:
        return {"config": await self._models.configure(request.name, request.version)}

    async def ModelStatistics(self, request: Any) -> Any:
        return await self._models.statistics(request.name, request.version)

    # ---- the repository --------------------------------------------------------------------------------------

    async def RepositoryIndex(self, request: Any) -> Any:
        return {"models": await self._models.index(only_ready=request.ready)}

    async def RepositoryModelLoad(self, request: Any) -> Any:
        return await self._models.load(request.model_name, request.parameters)

    async def RepositoryModelUnload(self, request: Any) -> Any:
        return await self._models.change(request.model_name, unload=True)

    # ---- shared memory ---------------------------------------------------------------------------------------

    async def SystemSharedMemoryRegister(self, request: Any) -> Any:
        return self._regions.register(request.name, request.key, request.offset, request.byte_size)

    async def SystemSharedMemoryUnregister(self, request: Any) -> Any:
        return self._regions.unregister(request.name)

    async def SystemSharedMemoryStatus(self, request: Any) -> Any:
        return {"regions": {region["name"]: region for region in self._regions.status(request.name)}}

    async def CudaSharedMemoryStatus(self, request: Any) -> Any:
        return {}

    CudaSharedMemoryUnregister = CudaSharedMemoryStatus

    # ---- inference -------------------------------------------------------------------------------------------

    async def ModelInfer(self, data: bytes, context: Any) -> Any:
        answer, answering = pb.ModelInferResponse(), contextlib.ExitStack()
        context.add_done_callback(lambda context: answering.close())
        try:
            await self._infer(answering, data, answer, context)
        except NNBurstError as error:
            await _abort(context, error)
        return answer

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """Yield one answer per request, in order: outputs or an error."""
        async for data in requests:
            answer = pb.ModelStreamInferResponse()
            with contextlib.ExitStack() as answering:
                try:
                    await self._infer(answering, data, answer.infer_response, context)
                except NNBurstError as error:
                    answer.error_message = str(error)
                yield answer

    async def _infer(self, answering: contextlib.ExitStack, data: bytes, answer: Any, context: Any) -> None:
        """Run a request, and fill the answer.

        The budget counts the request until `answering` is closed. If sending the answer takes too long, the call ends.
        """
        take = answering.enter_context(self._budget.request())
        take(len(data))
        try:
            request = pb.ModelInferRequest.FromString(data)
        except DecodeError as error:
            raise InvalidArgument(f"the request cannot be read: {error}") from None
        answer.id = request.id  # an error is answered with the id, too
        to_convert = 0 if request.raw_input_contents else len(data)
        inference = await convert_in_thread(to_convert, _inference, request, to_convert)
        with use_parent(lambda: dict(context.invocation_metadata())):
            version, answers = await infer(self._models, self._regions, inference, context.time_remaining())
        texts = sum(text_size(array) for *_, array in answers)
        size = texts + sum(array.nbytes for (_, place), *_, array in answers if place is None)
        take(size)
        await convert_in_thread(texts, _fill, answer, request, version, answers)
        task: Any = asyncio.current_task()
        answering.callback(asyncio.get_running_loop().call_later(seconds_for(size), task.cancel).cancel)


def _fill(answer: Any, request: Any, version: str, answers: Answers) -> None:
    answer.model_name, answer.model_version = request.model_name, version
    for (name, place), datatype, shape, array in answers:
        output, elements = answer.outputs.add(name=name, datatype=datatype, shape=shape), to_wire(array)
        if place is None:
            answer.raw_output_contents.append(elements.tobytes())
            continue
        output.parameters["shared_memory_region"].string_param = place.region
        output.parameters["shared_memory_byte_size"].int64_param = elements.nbytes
        if place.offset:
            output.parameters["shared_memory_offset"].int64_param = place.offset
    if request.parameters and _parameters(request).get("triton_enable_empty_final_response") is True:
        answer.parameters["triton_final_response"].bool_param = True


def _parameters(tensor: Any) -> Mapping[str, Any]:
    items = tensor.parameters.items()
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "", None) for name, value in items}


def _inference(request: Any, to_convert: int) -> Inference:
    raw = iter(request.raw_input_contents) if request.raw_input_contents else None
    inputs = []
    for tensor in request.inputs:
        parameters = _parameters(tensor) if tensor.parameters else {}
        data = None
        if raw is not None and "shared_memory_region" not in parameters:
            data = next(raw, None)
            if data is None:
                raise InvalidArgument("there are fewer raw_input_contents than inputs without a region")
        elements = _elements(tensor) if tensor.HasField("contents") or data is None else None
        inputs.append(InputTensor.of(tensor.name, tensor.datatype, tensor.shape, parameters, data, elements))
    if raw is not None and (left := sum(1 for _ in raw)):
        raise InvalidArgument(f"{left} raw_input_contents belong to no input")
    outputs = [OutputTensor.of(tensor.name, _parameters(tensor)) for tensor in request.outputs]
    terms = Terms.of(_parameters(request) if request.parameters else {})
    return Inference(request.model_name, request.model_version, inputs, outputs, to_convert, terms)


def _elements(tensor: Any) -> Any:
    """Return the elements of a tensor that was not sent as raw bytes."""
    filled = [(field.name, values) for field, values in tensor.contents.ListFields()]
    if not filled:
        return ()
    wanted, dtype = _CONTENTS.get(tensor.datatype, ("raw_input_contents", ""))
    for name, _ in filled:
        if name != wanted:
            raise InvalidArgument(f"input {tensor.name!r}: {tensor.datatype} comes in {wanted}, not in {name}")
    values = filled[0][1]
    elements = np.empty(len(values), dtype)
    for at in range(0, len(values), PIECE):
        elements[at : at + PIECE] = values[at : at + PIECE]
    return elements


def _is_admitted(tokens: Tokens, metadata: Any) -> bool:
    return tokens.admit(dict(metadata).get("authorization"))


async def _refuse(request: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "this gateway asks for a token: send authorization: Bearer TOKEN"
    )


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Interceptor that logs each call with an id, and refuses calls without a token, except health checks."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        metadata = dict(details.invocation_metadata)
        name, began = request_id(metadata.get("x-request-id")), time.monotonic()
        if details.method in _OPEN or self._tokens.admit(metadata.get("authorization")):
            handler = await continuation(details)
        else:
            handler = grpc.unary_unary_rpc_method_handler(_refuse)
        if handler is None:
            return None

        @contextlib.contextmanager
        def send_request_id(context: Any) -> Iterator[None]:
            context.set_trailing_metadata((("x-request-id", name),))
            status = "CANCELLED"
            try:
                yield
                status = "OK"
            except Exception:
                status = getattr(context.code(), "name", "UNKNOWN")
                raise
            finally:
                note_request(context.peer(), details.method, status, time.monotonic() - began, name)

        if handler.response_streaming:

            async def stream(requests: Any, context: Any) -> AsyncIterator[Any]:
                with send_request_id(context):
                    async for answer in handler.stream_stream(requests, context):
                        yield answer

            return handler._replace(stream_stream=stream)

        async def answer(request: Any, context: Any) -> Any:
            with send_request_id(context):
                return await handler.unary_unary(request, context)

        return handler._replace(unary_unary=answer)


def _credentials(certificate: Certificate) -> Any:
    """Return server credentials that give each new connection the newest certificate."""

    def current() -> Any:
        return grpc.ssl_server_certificate_configuration([certificate.pair])

    return grpc.dynamic_ssl_server_credentials(current(), current)


async def serve(
    models: Models,
    regions: Regions,
    budget: Budget,
    address: str,
    *,
    tokens: Tokens = EVERYONE,
    certificate: Certificate | None = None,
    keepalive: float = 75,
) -> tuple[Any, int | str]:
    """Start a server at ``HOST:PORT`` (port 0 for any free port) or ``unix:PATH``.

    Returns:
        The server; and its port or, for a Unix socket, its address.

    Raises:
        DeviceUnavailable: The address is unusable.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=budget.most_requests,
        options=[
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_send_message_length", _MOST_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", budget.most_connections),
            ("grpc.max_concurrent_streams", _MOST_STREAMS),
            ("grpc.keepalive_time_ms", int(keepalive * 1000)),
            ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
            ("grpc.http.overload_protection", 0),  # the protection would reset streams of well-behaved clients
        ],
        interceptors=[_Guard(tokens)],
    )
    servicer = Servicer(models, regions, budget, tokens)
    check = servicer.check_health, HealthCheckRequest.FromString, HealthCheckResponse.SerializeToString
    server.add_registered_method_handlers(_SERVICE, servicer.handlers())
    server.add_registered_method_handlers(health.SERVICE_NAME, {"Check": grpc.unary_unary_rpc_method_handler(*check)})
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server, _POOL)
    try:
        if certificate is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, _credentials(certificate))
    except (RuntimeError, UnicodeError) as error:
        or_tls = "" if certificate is None else ", or gRPC refuses the certificate (take one with an RSA or P-256 key)"
        raise DeviceUnavailable(f"cannot listen at {address}{or_tls}: {error}") from None
    await server.start()
    return server, address if address.startswith("unix:") else port


async def serve_again(start: Callable[[], Awaitable[Any]]) -> None:
    """Restart a server whenever grpcio's serving loop fails. A call whose path is not UTF-8 makes the loop fail."""
    lost, loop = asyncio.Event(), asyncio.get_running_loop()

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if isinstance(context.get("exception"), UnicodeDecodeError):
            lost.set()

    loop.set_exception_handler(failed)
    while await lost.wait():
        lost.clear()
        try:
            _server = await start()  # the server ends with its last reference
        except NNBurstError as error:
            _log.error("%s", error)
