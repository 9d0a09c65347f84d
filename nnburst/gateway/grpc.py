"""The protocol over gRPC. Its messages and calls are those that `open_inference.proto` describes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import ParseDict
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection, reflection_pb2

from .. import __version__
from .._core.tokens import EVERYONE, Tokens
from ..errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
)
from ..runtime.spans import below
from .budget import RETRY_S, Budget
from .inference import (
    Answers,
    Inference,
    InputTensor,
    OutputTensor,
    RegionPlace,
    Terms,
    ask,
    elsewhere,
    extensions,
    infer,
)
from .models import Models, NoSuchModel
from .regions import Regions
from .tensors import BRISK, PIECE, as_sent, is_long

_Result = TypeVar("_Result")
_MOST_BYTES = 256 << 20
"""Of one message."""
_MOST_STREAMS = 64
"""Requests under way on one connection. One client alone cannot have all that the gateway takes."""

(_DESCRIPTION,) = FileDescriptorSet.FromString(Path(__file__).with_name("open_inference.binpb").read_bytes()).file
_POOL = DescriptorPool()  # of this module, so that a program may also have a client's messages of the same names
_OTHERS = health_pb2.DESCRIPTOR.serialized_pb, reflection_pb2.DESCRIPTOR.serialized_pb
for _file in (_DESCRIPTION.SerializeToString(), *_OTHERS):
    _POOL.AddSerializedFile(_file)
_CALLS = _POOL.FindServiceByName("inference.GRPCInferenceService")
pb = SimpleNamespace(**{name: GetMessageClass(one) for name, one in _CALLS.file.message_types_by_name.items()})
_SERVICE = _CALLS.full_name
_OPEN = (f"/{_SERVICE}/ServerLive", f"/{_SERVICE}/ServerReady", f"/{health.SERVICE_NAME}/Check")
_CODES: tuple[tuple[type[NNBurstError], grpc.StatusCode], ...] = (
    (NoSuchModel, grpc.StatusCode.NOT_FOUND),
    (InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (BadState, grpc.StatusCode.ALREADY_EXISTS),
    (MissedDeadline, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeviceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadObject, grpc.StatusCode.UNAVAILABLE),
)
_TRANSIENT = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)
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
"""The field of single elements for each datatype, and their dtype there; others come as raw bytes only."""


def status_code(error: NNBurstError) -> grpc.StatusCode:
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


async def _abort(context: Any, error: NNBurstError) -> None:
    """End a call with an error; one that may not come again in a moment says when to try."""
    code = status_code(error)
    hint = (("grpc-retry-pushback-ms", str(RETRY_S * 1000)),) if code in _TRANSIENT else ()
    await context.abort(code, str(error), hint)


class Servicer:
    """Answers every call of the protocol that a model on a CPU has."""

    def __init__(self, models: Models, regions: Regions, budget: Budget) -> None:
        self._models = models
        self._regions = regions
        self._budget = budget

    async def _answer(
        self, context: Any, work: Callable[[], _Result], do: Callable[[Callable[[], _Result]], Awaitable[_Result]] = ask
    ) -> _Result:
        """Do something, which may wait for the service unless `do` says otherwise; an error becomes a status."""
        try:
            return await do(work)
        except NNBurstError as error:
            await _abort(context, error)
            raise

    # ---- health and metadata ---------------------------------------------------------------------------------

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._models.once("", self._models.is_ready))

    async def ModelReady(self, request: Any, context: Any) -> Any:
        try:
            await self._models.require(request.name, request.version)
        except NNBurstError:
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(
            name="nnburst", version=__version__, extensions=extensions(self._models, self._regions)
        )

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        described = await self._answer(context, lambda: self._models.describe(request.name, request.version))
        return pb.ModelMetadataResponse(**described)

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        config = await self._answer(context, lambda: self._models.configure(request.name, request.version))
        return ParseDict({"config": config}, pb.ModelConfigResponse())

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        statistics = await self._answer(context, lambda: self._models.statistics(request.name, request.version))
        return pb.ModelStatisticsResponse(model_stats=statistics)

    # ---- the repository --------------------------------------------------------------------------------------

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        index = await self._answer(context, lambda: self._models.index(only_ready=request.ready))
        return pb.RepositoryIndexResponse(models=index)

    async def RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        def load() -> None:
            if request.parameters:
                raise InvalidArgument(f"a model is loaded as it is, not with {sorted(request.parameters)}")
            self._models.change(request.model_name, unload=False)

        async with self._models.changing:
            await self._answer(context, load)
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        async with self._models.changing:
            await self._answer(context, lambda: self._models.change(request.model_name, unload=True))
        return pb.RepositoryModelUnloadResponse()

    # ---- inference -------------------------------------------------------------------------------------------

    async def ModelInfer(self, data: bytes, context: Any) -> Any:
        answer = pb.ModelInferResponse()
        try:
            await self._infer(data, answer, context)
        except NNBurstError as error:
            await _abort(context, error)
        return answer

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """One answer for each request, in their order; an error is an answer, too."""
        async for data in requests:
            answer = pb.ModelStreamInferResponse()
            try:
                await self._infer(data, answer.infer_response, context)
            except NNBurstError as error:
                answer.error_message = str(error)
                with contextlib.suppress(InvalidArgument):
                    answer.infer_response.id = _message(data).id
            yield answer

    async def _infer(self, data: bytes, answer: Any, context: Any) -> None:
        with self._budget.request() as share:
            share.take(size := len(data))
            message = _message(data)
            if size > BRISK and not message.raw_input_contents:
                request = await elsewhere(lambda: _request(message, size))
            else:
                request = _request(message, size)
            with below(lambda: dict(context.invocation_metadata())):
                version, answers = await infer(self._models, self._regions, request.inference, context.time_remaining())
            if any(is_long(array) for *_, array in answers):
                await elsewhere(lambda: _fill(answer, request, version, answers))
            else:
                _fill(answer, request, version, answers)

    # ---- shared memory ---------------------------------------------------------------------------------------

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        register = self._regions.register
        given = request.name, request.key, request.offset, request.byte_size
        await self._answer(context, lambda: register(*given), elsewhere)
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        self._regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await self._answer(context, lambda: self._regions.status(request.name), elsewhere):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()

    def handlers(self) -> dict[str, Any]:
        """Return what answers each call. Requests for inference come as bytes, to be counted first."""
        made = {}
        for call in _CALLS.methods:
            read = GetMessageClass(call.input_type).FromString if call.input_type.name != "ModelInferRequest" else None
            write = GetMessageClass(call.output_type).SerializeToString
            kinds = grpc.unary_unary_rpc_method_handler, grpc.stream_stream_rpc_method_handler
            made[call.name] = kinds[call.server_streaming](getattr(self, call.name), read, write)
        return made


class _Request(NamedTuple):
    """A request for inference.

    Attributes:
        id: The client's name for it, which its answer has, too.
        is_last_told: Whether the client wants to be told that no other answer follows.
    """

    inference: Inference
    id: str
    is_last_told: bool


def _message(data: bytes) -> Any:
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the request cannot be read: {error}") from None


def _request(message: Any, size: int) -> _Request:
    parameters = _parameters(message) if message.parameters else {}
    is_last_told = parameters.get("triton_enable_empty_final_response") is True
    return _Request(_inference(message, size, Terms.of(parameters)), message.id, is_last_told)


def _fill(answer: Any, request: _Request, version: str, answers: Answers) -> None:
    answer.model_name, answer.model_version, answer.id = request.inference.model, version, request.id
    for (name, place), datatype, shape, array in answers:
        output, elements = answer.outputs.add(name=name, datatype=datatype, shape=shape), as_sent(array)
        if place is None:
            answer.raw_output_contents.append(elements.tobytes())
            continue
        output.parameters["shared_memory_region"].string_param = place.region
        output.parameters["shared_memory_byte_size"].int64_param = elements.nbytes
        if place.offset:
            output.parameters["shared_memory_offset"].int64_param = place.offset
    if request.is_last_told:
        answer.parameters["triton_final_response"].bool_param = True


def _parameters(tensor: Any) -> Mapping[str, Any]:
    given = tensor.parameters
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "", None) for name, value in given.items()}


def _inference(request: Any, size: int, terms: Terms) -> Inference:
    contents = request.raw_input_contents
    raw = iter(contents) if contents else None
    inputs = []
    for tensor in request.inputs:
        place = RegionPlace.of(_parameters(tensor), "input", tensor.name) if tensor.parameters else None
        if (place or raw is not None) and tensor.HasField("contents") and tensor.contents.ListFields():
            where = "in a region" if place else "in raw_input_contents"
            raise InvalidArgument(f"input {tensor.name!r} comes twice, {where} and in contents; send it once")
        if place is None and raw is not None:
            data: Any = next(raw, None)
            if data is None:
                raise InvalidArgument("there are fewer raw_input_contents than inputs without a region")
        else:
            data = place or _elements(tensor)
        inputs.append(InputTensor(tensor.name, tensor.datatype, tuple(tensor.shape), data))
    if raw is not None and (left := sum(1 for _ in raw)):
        raise InvalidArgument(f"{left} raw_input_contents belong to no input")
    outputs = [OutputTensor.of(tensor.name, _parameters(tensor)) for tensor in request.outputs]
    to_convert = size if raw is None else 0
    return Inference(request.model_name, request.model_version, inputs, outputs, to_convert, terms)


def _elements(tensor: Any) -> Any:
    """Return the elements of a tensor that came one by one."""
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


class _Health(HealthServicer):  # type: ignore[misc]
    """``grpc.health.v1``: of the server, and of a model by its name to those with a token."""

    def __init__(self, models: Models, tokens: Tokens) -> None:
        self._models = models
        self._tokens = tokens

    async def Check(self, request: Any, context: Any) -> Any:
        name = "" if request.service == _SERVICE else request.service
        if name and not _is_admitted(self._tokens, context.invocation_metadata()):
            await _refuse(request, context)
        try:
            if name:
                await self._models.require(name)
            is_ready = bool(name) or await self._models.once("", self._models.is_ready)
        except NoSuchModel as error:
            await _abort(context, error)
        except NNBurstError:
            is_ready = False
        return HealthCheckResponse(status=HealthCheckResponse.SERVING if is_ready else HealthCheckResponse.NOT_SERVING)

    async def Watch(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "this call is not served")

    List = Watch  # a client that is refused the former takes the server for healthy


def _is_admitted(tokens: Tokens, metadata: Any) -> bool:
    return tokens.admit({key: value for key, value in metadata if key == "authorization"}.get("authorization"))


async def _refuse(request: Any, context: Any) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "this gateway asks for a token: send authorization: Bearer TOKEN"
    )


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses calls without a token, but those after the health of the server."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        if details.method in _OPEN or _is_admitted(self._tokens, details.invocation_metadata):
            return await continuation(details)
        return grpc.unary_unary_rpc_method_handler(_refuse)


async def serve(
    models: Models,
    regions: Regions,
    budget: Budget,
    address: str,
    *,
    tokens: Tokens = EVERYONE,
) -> tuple[Any, int | str]:
    """Start to answer at ``HOST:PORT``, where port 0 takes a free one, or at ``unix:PATH``.

    Returns:
        The server, and its port or its address.

    Raises:
        DeviceUnavailable: The address cannot be had.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=budget.most_requests,
        options=[
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_send_message_length", _MOST_BYTES),
            ("grpc.so_reuseport", 0),
            ("grpc.max_allowed_incoming_connections", budget.most_connections),
            ("grpc.max_concurrent_streams", _MOST_STREAMS),
            ("grpc.http.overload_protection", 0),  # which resets streams of a client that has not heard of an end yet
        ],
        interceptors=[_Guard(tokens)],
    )
    server.add_registered_method_handlers(_SERVICE, Servicer(models, regions, budget).handlers())
    add_HealthServicer_to_server(_Health(models, tokens), server)
    reflection.enable_server_reflection((_SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server, _POOL)
    try:
        port = server.add_insecure_port(address)
    except (RuntimeError, UnicodeError) as error:
        raise DeviceUnavailable(f"cannot listen at {address}: {error}") from None
    await server.start()
    return server, address if address.startswith("unix:") else port
