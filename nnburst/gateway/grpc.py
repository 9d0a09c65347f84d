"""The protocol over gRPC. Messages and stubs are those of the package ``tritonclient``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc as stubs

from .. import __version__
from ..errors import (
    BadState,
    DeadObject,
    DeviceUnavailable,
    InvalidArgument,
    MissedDeadline,
    NNBurstError,
    ResourceExhausted,
)
from .budget import Budget
from .inference import (
    BRISK,
    Answers,
    Inference,
    InputTensor,
    OutputTensor,
    RegionPlace,
    Terms,
    elsewhere,
    extensions,
    infer,
)
from .models import VERSION, Models, check_version
from .regions import Regions
from .sharing import share_port

_Result = TypeVar("_Result")
_MOST_BYTES = 256 << 20
"""Of one message."""
_SERVICE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
_PIECE = 1 << 14
"""Elements that are converted before another thread may have the interpreter."""
_CODES: tuple[tuple[type[NNBurstError], grpc.StatusCode], ...] = (
    (InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (BadState, grpc.StatusCode.ALREADY_EXISTS),
    (MissedDeadline, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ResourceExhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeviceUnavailable, grpc.StatusCode.UNAVAILABLE),
    (DeadObject, grpc.StatusCode.UNAVAILABLE),
)
_CONTENTS = {
    "BOOL": ("bool_contents", "?"),
    **{f"INT{n}": ("int_contents", "i4") for n in (8, 16, 32)},
    **{f"UINT{n}": ("uint_contents", "u4") for n in (8, 16, 32)},
    "INT64": ("int64_contents", "i8"),
    "UINT64": ("uint64_contents", "u8"),
    "FP32": ("fp32_contents", "f4"),
    "FP64": ("fp64_contents", "f8"),
}
"""The field of single elements for each datatype, and their dtype there; others come as raw bytes only."""


def status_code(error: NNBurstError) -> grpc.StatusCode:
    """Return what an error is to a client."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


class Servicer(stubs.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers every call of the protocol that a model on a CPU has; others are UNIMPLEMENTED."""

    def __init__(self, models: Models, regions: Regions, budget: Budget) -> None:
        self._models = models
        self._regions = regions
        self._budget = budget

    async def _answer(self, context: Any, work: Callable[[], _Result]) -> _Result:
        """Do something that may wait for the service; an error becomes a status."""
        try:
            return await elsewhere(work)
        except NNBurstError as error:
            await context.abort(status_code(error), str(error))
            raise

    # ---- health and metadata ---------------------------------------------------------------------------------

    async def ServerLive(self, request: Any, context: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: Any) -> Any:
        return pb.ServerReadyResponse(ready=await self._answer(context, self._models.is_ready))

    async def ModelReady(self, request: Any, context: Any) -> Any:
        if request.name not in self._models.names or request.version not in ("", VERSION):
            return pb.ModelReadyResponse(ready=False)
        await self._answer(context, lambda: self._models.open(request.name))
        return pb.ModelReadyResponse(ready=True)

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return pb.ServerMetadataResponse(name="nnburst", version=__version__, extensions=extensions(self._regions))

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        def described() -> dict[str, Any]:
            check_version(request.name, request.version)
            return self._models.describe(request.name)

        return pb.ModelMetadataResponse(**await self._answer(context, described))

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        return pb.RepositoryIndexResponse(models=self._models.index())

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        def statistics() -> list[dict[str, Any]]:
            found = self._models.statistics(request.name)
            if request.name:
                check_version(request.name, request.version)
            return found

        return pb.ModelStatisticsResponse(model_stats=await self._answer(context, statistics))

    # ---- inference -------------------------------------------------------------------------------------------

    async def ModelInfer(self, data: bytes, context: Any) -> bytes:
        try:
            return await self._infer(data, context)
        except NNBurstError as error:
            await context.abort(status_code(error), str(error))
            raise

    async def ModelStreamInfer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        """One answer for each request, in their order; an error is an answer, too."""
        async for data in requests:
            answer = pb.ModelStreamInferResponse()
            try:
                answer.infer_response.MergeFromString(await self._infer(data, context))
            except NNBurstError as error:
                answer.error_message = str(error)
                with contextlib.suppress(InvalidArgument):
                    answer.infer_response.id = _message(data).id
            yield answer

    async def _infer(self, data: bytes, context: Any) -> bytes:
        size = len(data)
        self._budget.begin(size)
        try:
            message = _message(data)
            if size > BRISK and not message.raw_input_contents:
                request = await elsewhere(lambda: _request(message, size))
            else:
                request = _request(message, size)
            answers = await infer(self._models, self._regions, request.inference, context.time_remaining())
            return _response(request, answers)
        finally:
            self._budget.end(size)

    # ---- shared memory ---------------------------------------------------------------------------------------

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:
        register = self._regions.register
        await self._answer(context, lambda: register(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        self._regions.unregister(request.name)
        return pb.SystemSharedMemoryUnregisterResponse()

    async def SystemSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        answer = pb.SystemSharedMemoryStatusResponse()
        for region in await self._answer(context, lambda: self._regions.status(request.name)):
            status = answer.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.byte_size
        return answer

    async def CudaSharedMemoryStatus(self, request: Any, context: Any) -> Any:
        return pb.CudaSharedMemoryStatusResponse()

    async def CudaSharedMemoryUnregister(self, request: Any, context: Any) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()


class _Request(NamedTuple):
    """A request for inference.

    Attributes:
        inference: What is to be run.
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


@lru_cache(maxsize=256)
def _head(model: str, *outputs: tuple[OutputTensor, str, tuple[int, ...], int]) -> bytes:
    """Return an answer but for its elements, given the datatype, shape and bytes of each output."""
    answer = pb.ModelInferResponse(model_name=model, model_version=VERSION)
    for (name, place), datatype, shape, nbytes in outputs:
        output = answer.outputs.add(name=name, datatype=datatype, shape=shape)
        if place is not None:
            output.parameters["shared_memory_region"].string_param = place.region
            output.parameters["shared_memory_byte_size"].int64_param = nbytes
            if place.offset:
                output.parameters["shared_memory_offset"].int64_param = place.offset
    return bytes(answer.SerializeToString())


_TAG_OF_ELEMENTS: bytes = pb.ModelInferResponse(raw_output_contents=[b""]).SerializeToString()[:-1]


def _before_elements(nbytes: int) -> bytes:
    """Return what stands in an answer before so many bytes of elements: their tag, and their number as a varint.

    Source: https://protobuf.dev/programming-guides/encoding/
    """
    digits = []
    while nbytes > 0x7F:
        digits.append(nbytes & 0x7F | 0x80)
        nbytes >>= 7
    return _TAG_OF_ELEMENTS + bytes((*digits, nbytes))


def _response(request: _Request, answers: Answers) -> bytes:
    """Return an answer, which is put together from messages: one behind the other they are one with all their fields.

    To fill in each field of one takes longer than to run a small model.
    """
    outputs = [(wanted, datatype, array.shape, array.nbytes) for wanted, datatype, array in answers]
    parts: list[Any] = [_head(request.inference.model, *outputs)]
    for wanted, _, array in answers:
        if wanted.place is None:
            parts += (_before_elements(array.nbytes), array)
    if request.id or request.is_last_told:
        own = pb.ModelInferResponse(id=request.id)
        if request.is_last_told:
            own.parameters["triton_final_response"].bool_param = True
        parts.append(own.SerializeToString())
    return b"".join(parts)


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
    outputs = []
    for tensor in request.outputs:
        parameters = _parameters(tensor)
        if parameters.get("classification"):
            raise InvalidArgument(f"output {tensor.name!r}: classification is not served; sort the scores yourself")
        outputs.append(OutputTensor(tensor.name, RegionPlace.of(parameters, "output", tensor.name)))
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
    for at in range(0, len(values), _PIECE):
        elements[at : at + _PIECE] = values[at : at + _PIECE]
    return elements


async def serve(
    models: Models, regions: Regions, budget: Budget, address: str, *, joins: bool = False
) -> tuple[Any, int]:
    """Start to answer at ``HOST:PORT``; port 0 takes a free one.

    With `joins` another process answers there, and this one from its end on.

    Returns:
        The server and its port.

    Raises:
        DeviceUnavailable: The address cannot be had.
    """
    server = grpc.aio.server(
        maximum_concurrent_rpcs=budget.most_requests,
        options=[
            ("grpc.max_receive_message_length", _MOST_BYTES),
            ("grpc.max_send_message_length", _MOST_BYTES),
            ("grpc.so_reuseport", int(joins)),
        ],
    )
    servicer = Servicer(models, regions, budget)
    stubs.add_GRPCInferenceServiceServicer_to_server(servicer, server)
    as_bytes = {
        "ModelInfer": grpc.unary_unary_rpc_method_handler(servicer.ModelInfer),
        "ModelStreamInfer": grpc.stream_stream_rpc_method_handler(
            servicer.ModelStreamInfer, response_serializer=pb.ModelStreamInferResponse.SerializeToString
        ),
    }
    server.add_registered_method_handlers(_SERVICE, as_bytes)  # in place of those with messages
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise DeviceUnavailable(f"cannot listen at {address}: {error}") from None
    share_port(port, joins=joins)
    await server.start()
    return server, port
