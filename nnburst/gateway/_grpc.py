"""The protocol over gRPC. Messages and stubs are those of the package ``tritonclient``."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

import grpc
import numpy as np
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
    OutputInsufficientSize,
    ResourceExhausted,
)
from ..runtime import Execution
from ._budget import Budget
from ._inference import (
    BRISK,
    VERSION,
    Answers,
    Inference,
    InputTensor,
    OutputTensor,
    Prepared,
    RegionPlace,
    elsewhere,
    prepare,
    run,
)
from ._models import Models, OpenedModel
from ._regions import Regions
from ._tensors import Array, ModelTensor

_Result = TypeVar("_Result")
_MOST_BYTES = 256 << 20
"""Of one message."""
_LONGEST_HEAD = 1 << 12
"""Bytes of a request without its elements, if it is remembered."""
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
        return pb.ServerMetadataResponse(name="nnburst", version=__version__, extensions=["system_shared_memory"])

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        model = await self._answer(context, lambda: self._models.open(request.name))

        def metadata(tensors: Mapping[str, ModelTensor]) -> Any:
            kind = pb.ModelMetadataResponse.TensorMetadata
            return [kind(name=name, datatype=one.datatype, shape=one.shape) for name, one in tensors.items()]

        return pb.ModelMetadataResponse(
            name=request.name,
            versions=[VERSION],
            platform=model.platform,
            inputs=metadata(model.inputs),
            outputs=metadata(model.outputs),
        )

    async def RepositoryIndex(self, request: Any, context: Any) -> Any:
        kind = pb.RepositoryIndexResponse.ModelIndex
        models = [kind(name=name, version=VERSION, state="READY") for name in self._models.names]
        return pb.RepositoryIndexResponse(models=models)

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        if request.name and request.name not in self._models.names:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"no model {request.name!r}")
        answer = pb.ModelStatisticsResponse()
        for name in [request.name] if request.name else self._models.names:
            counts = self._models.counts[name]
            model = answer.model_stats.add(name=name, version=VERSION, last_inference=counts.last_ms)
            model.inference_count = model.execution_count = counts.inferences
            model.inference_stats.success.count, model.inference_stats.success.ns = counts.inferences, counts.success_ns
            model.inference_stats.fail.count, model.inference_stats.fail.ns = counts.failures, counts.failure_ns
        return answer

    # ---- inference -------------------------------------------------------------------------------------------

    async def ModelInfer(self, request: Any, context: Any) -> Any:
        try:
            return await self._infer(request, context)
        except NNBurstError as error:
            await context.abort(status_code(error), str(error))

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        """One answer for each request, in their order; an error is an answer, too."""
        async for request in requests:
            try:
                answer = await self._infer(request, context)
            except NNBurstError as error:
                yield pb.ModelStreamInferResponse(
                    error_message=str(error), infer_response=pb.ModelInferResponse(id=request.id)
                )
                continue
            if request.parameters["triton_enable_empty_final_response"].bool_param:
                answer.parameters["triton_final_response"].bool_param = True
            yield pb.ModelStreamInferResponse(infer_response=answer)

    async def _infer(self, request: Any, context: Any) -> Any:
        size, number = request.ByteSize(), request.id
        self._budget.begin(size)
        try:
            model = self._models.ready(request.model_name) or await self._models.take(request.model_name)
            try:
                known, timeout = model.known, context.time_remaining()
                contents = known.taken_from(request) if known is not None and timeout is None else None
                answer = None if contents is None else await known.answer(contents, model)
                if answer is None:
                    request.raw_input_contents.extend(contents or ())
                    answer = await self._answered(model, request, size, timeout)
            except BaseException:
                model.known = None
                raise
            finally:
                self._models.give_back(model)
        finally:
            self._budget.end(size)
        if number:
            answer.id = number
        return answer

    async def _answered(self, model: OpenedModel, request: Any, size: int, timeout: float | None) -> Any:
        prepared = await self._prepared(model, request, size)
        answer = _response(request.model_name, await run(model, self._regions, prepared, timeout))
        known = model.known
        if known is None or not known.is_like(request):
            model.known = _Known.of(request, size, prepared)
        elif known.is_new:
            await known.bind(model, answer)
        return answer

    async def _prepared(self, model: OpenedModel, request: Any, size: int) -> Prepared:
        if size > BRISK and not request.raw_input_contents:
            inference = await elsewhere(lambda: _inference(request, size))
        else:
            inference = _inference(request, size)
        return await prepare(model, self._regions, inference)

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


class _Bound(NamedTuple):
    """What one request at a time has.

    Attributes:
        execution: With arrays of its own.
        places: Of the elements of its inputs, in the order of the messages.
        results: Its outputs, in the order of the answer.
        head: The answer without elements.
    """

    execution: Execution
    places: Sequence[Array]
    results: Sequence[Array]
    head: Any


class _Known:
    """A request that came before, but for its elements: they go from message to message through a bound execution.

    To look at each field of a request that is like the last one takes longer than to run a small model.
    """

    def __init__(self, request: Any, prepared: Prepared) -> None:
        self._head = _without_elements(request)
        self._shapes = {name: array.shape for name, array in prepared.arrays.items()}
        self._sizes = [array.nbytes for array in prepared.arrays.values()]
        self._wanted = [output.name for output in prepared.wanted]
        self.is_new = True
        self._bound: _Bound | None = None

    @classmethod
    def of(cls, request: Any, size: int, prepared: Prepared) -> _Known | None:
        """Return that of a small request that was answered, with all tensors in the messages, as bytes."""
        contents = request.raw_input_contents
        if prepared.parts or len(contents) != len(prepared.arrays) or size > BRISK or not all(contents):
            return None
        if size - sum(map(len, contents)) > _LONGEST_HEAD or any(output.place for output in prepared.wanted):
            return None
        return cls(request, prepared)

    def is_like(self, request: Any) -> bool:
        """Whether a request differs in nothing but elements."""
        return list(map(len, request.raw_input_contents)) == self._sizes and _without_elements(request) == self._head

    async def bind(self, model: OpenedModel, answer: Any) -> None:
        """Bind an execution when it has come for the second time, if that will give answers like this one."""
        self.is_new = False  # before other requests go on: one of them binds
        self._bound = await elsewhere(lambda: self._bound_to(model, answer))

    def _bound_to(self, model: OpenedModel, answer: Any) -> _Bound | None:
        shapes = {name: self._shapes[name] for name, tensor in model.inputs.items() if -1 in tensor.shape}
        try:
            execution = model.session.bind(shapes=shapes)
        except NNBurstError:  # the next requests go the way that this one went
            return None
        results = [execution.outputs[name] for name in self._wanted]
        raw = answer.raw_output_contents
        told = [(list(one.shape), len(data)) for one, data in zip(answer.outputs, raw, strict=True)]
        if execution.timeout is not None or [(list(array.shape), array.nbytes) for array in results] != told:
            return None
        places = [execution.inputs[name].reshape(-1).view(np.uint8) for name in self._shapes]
        head = pb.ModelInferResponse()
        head.CopyFrom(answer)
        head.ClearField("raw_output_contents")
        return _Bound(execution, places, results, head)

    def taken_from(self, request: Any) -> Sequence[bytes] | None:
        """Take the elements out of a request that is like this; None, and nothing taken, if `answer` is not for it."""
        contents: list[bytes] = request.raw_input_contents[:]
        if self._bound is None or list(map(len, contents)) != self._sizes:
            return None
        number = request.id
        request.ClearField("raw_input_contents")
        request.ClearField("id")
        is_like = request == self._head
        if number:
            request.id = number
        if is_like:
            return contents
        request.raw_input_contents.extend(contents)
        return None

    async def answer(self, contents: Sequence[bytes], model: OpenedModel) -> Any:
        """Run a request by its elements; None if an output has another shape than those before."""
        bound, self._bound = self._bound, None  # other requests go the other way; one that is given up keeps it
        assert bound is not None
        for place, data in zip(bound.places, contents, strict=True):
            place[:] = np.frombuffer(data, np.uint8)
        try:
            await model.counted(bound.execution.arun(), again=(OutputInsufficientSize,))
        except OutputInsufficientSize:
            return None
        answer = pb.ModelInferResponse()
        answer.CopyFrom(bound.head)
        for result in bound.results:
            answer.raw_output_contents.append(result.tobytes())
        self._bound = bound
        return answer


def _without_elements(request: Any) -> Any:
    head = pb.ModelInferRequest()
    head.CopyFrom(request)
    head.ClearField("raw_input_contents")
    head.ClearField("id")
    return head


@lru_cache(maxsize=256)
def _head(model: str, *outputs: tuple[str, str, tuple[int, ...]]) -> Any:
    """Return an answer but for its elements, to be copied: to fill in each field takes several times as long."""
    answer = pb.ModelInferResponse(model_name=model, model_version=VERSION)
    for name, datatype, shape in outputs:
        answer.outputs.add(name=name, datatype=datatype, shape=shape)
    return answer


def _response(model: str, answers: Answers) -> Any:
    answer = pb.ModelInferResponse()
    answer.CopyFrom(_head(model, *[(one.name, kind, array.shape) for one, kind, array in answers]))
    for i, (wanted, _, array) in enumerate(answers):
        if wanted.place is None:
            answer.raw_output_contents.append(array.tobytes())
        else:
            parameters = answer.outputs[i].parameters
            parameters["shared_memory_region"].string_param = wanted.place.region
            parameters["shared_memory_byte_size"].int64_param = array.nbytes
            if wanted.place.offset:
                parameters["shared_memory_offset"].int64_param = wanted.place.offset
    return answer


def _parameters(tensor: Any) -> Mapping[str, Any]:
    given = tensor.parameters
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "", None) for name, value in given.items()}


def _inference(request: Any, size: int) -> Inference:
    contents = request.raw_input_contents
    raw = iter(contents) if contents else None
    inputs = []
    for tensor in request.inputs:
        place = RegionPlace.of(_parameters(tensor), "input", tensor.name) if tensor.parameters else None
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
    return Inference(request.model_name, request.model_version, inputs, outputs, size if raw is None else 0)


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


async def serve(models: Models, regions: Regions, budget: Budget, address: str) -> tuple[Any, int]:
    """Start to answer at ``HOST:PORT``; port 0 takes a free one.

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
            ("grpc.so_reuseport", 0),
        ],
    )
    stubs.add_GRPCInferenceServiceServicer_to_server(Servicer(models, regions, budget), server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise DeviceUnavailable(f"cannot listen at {address}: {error}") from None
    await server.start()
    return server, port
