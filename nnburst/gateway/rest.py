"""The Open Inference Protocol over HTTP. Tensors are JSON, or bytes after the JSON."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from .._core.tokens import EVERYONE, Tokens
from .._version import VERSION
from ..errors import InvalidArgument, NNBurstError
from ..model.types import Array
from ..runtime.spans import use_parent
from .budget import RETRY_S, Budget, seconds_for
from .certificate import Certificate
from .inference import CODES, Answers, Inference, InputTensor, OutputTensor, Terms, extensions, infer
from .listen import guard, listen
from .metrics import triton_metrics
from .models import Models
from .regions import Regions
from .tensors import bytes_of, convert_in_thread, text_size, to_wire

_MOST_BYTES = 256 << 20
_MOST_JSON = 16 << 20
"""Maximum bytes of JSON in a request: decoding keeps the interpreter lock."""
_MOST_INFLATED = 16 << 20
"""Maximum bytes of an inflated body, which can be a thousand times longer than the compressed one."""
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
_MOST_NUMBERS = 1 << 20
"""Maximum count of numbers in the JSON of an answer: encoding keeps the interpreter lock."""
_T = TypeVar("_T")
_HEADER = "Inference-Header-Content-Length"
_MOST_DIGITS = 20


class _Input(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str = ""
    parameters: dict[str, Any] = {}
    data: list[Any] | None = None


class _Output(msgspec.Struct):
    name: str
    parameters: dict[str, Any] = {}


class _Infer(msgspec.Struct):
    """The JSON of an inference request."""

    inputs: list[_Input] = []
    outputs: list[_Output] = []
    parameters: dict[str, Any] = {}
    id: str | int | None = None


class _Index(msgspec.Struct):
    ready: bool = False


class _Load(msgspec.Struct):
    parameters: dict[str, Any] = {}


class _Region(msgspec.Struct):
    key: str
    byte_size: int
    offset: int = 0


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    try:
        return await handler(request)
    except NNBurstError as error:
        status = next(status for kind, _, status in CODES if isinstance(error, kind))
        hint = {"Retry-After": str(RETRY_S)} if status in (429, 503) else {}
        return web.json_response({"error": str(error)}, status=status, headers=hint)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return web.json_response({"error": f"{request.method} {request.path} is not served"}, status=error.status)
    except web.HTTPException as error:
        return web.json_response({"error": error.text or error.reason}, status=error.status)
    except (web.RequestPayloadError, ConnectionError) as error:  # the body is broken, or the sender has disconnected
        return web.json_response({"error": f"the body cannot be read: {error}"}, status=400)


class Rest:
    """Request handlers, one method for each path."""

    def __init__(self, models: Models, regions: Regions, budget: Budget) -> None:
        self._models = models
        self._regions = regions
        self._budget = budget

    def application(self, tokens: Tokens = EVERYONE) -> web.Application:
        application = web.Application(middlewares=[guard(tokens, "/v2/health/"), _errors], client_max_size=_MOST_BYTES)
        model, memory = "/v2/models/{model}", "/v2/systemsharedmemory"

        def add(method: str, path: str, work: Callable[[web.Request], Awaitable[Any]]) -> None:
            async def answer(request: web.Request) -> web.StreamResponse:
                result = await work(request)
                return result if isinstance(result, web.StreamResponse) else web.json_response(result)

            application.router.add_route(method, path, answer)

        for prefix in (model, model + "/versions/{version}"):
            add("GET", prefix, lambda request: self._models.describe(*_model(request)))
            add("GET", prefix + "/config", lambda request: self._models.configure(*_model(request)))
            add("GET", prefix + "/ready", self._model_ready)
            add("GET", prefix + "/stats", lambda request: self._models.statistics(*_model(request)))
            add("POST", prefix + "/infer", self._infer)
        add("GET", "/v2/models/stats", lambda request: self._models.statistics())
        for path in ("/v2", "/v2/"):
            add("GET", path, self._server)
        add("GET", "/v2/health/live", self._live)
        add("GET", "/v2/health/ready", self._ready)
        add("POST", "/v2/repository/index", self._index)
        add("POST", "/v2/repository/models/{model}/load", self._load)
        add("POST", "/v2/repository/models/{model}/unload", self._unload)
        add("GET", "/metrics", self._metrics)
        for path in (memory, memory + "/region/{region}"):
            add("GET", path + "/status", self._regions_status)
            add("POST", path + "/unregister", self._unregister)
        add("POST", memory + "/region/{region}/register", self._register)
        return application

    # ---- health and metadata ---------------------------------------------------------------------------------

    async def _live(self, request: web.Request) -> Any:
        return {"live": True}

    async def _ready(self, request: web.Request) -> Any:
        ready = await self._models.is_ready()
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _server(self, request: web.Request) -> Any:
        offered = ["binary_tensor_data", *extensions(self._models, self._regions)]
        return {"name": "nnburst", "version": VERSION, "extensions": offered}

    async def _index(self, request: web.Request) -> Any:
        return await self._models.index(only_ready=(await self._parse_body(request, _Index)).ready)

    async def _load(self, request: web.Request) -> Any:
        asked = await self._parse_body(request, _Load)
        return await self._models.load(request.match_info["model"], asked.parameters)

    async def _unload(self, request: web.Request) -> Any:
        await self._parse_body(request, _Load)
        return await self._models.change(request.match_info["model"], unload=True)

    async def _model_ready(self, request: web.Request) -> Any:
        await self._models.open(*_model(request))
        return {"name": request.match_info["model"], "ready": True}

    async def _metrics(self, request: web.Request) -> Any:
        return web.Response(text=triton_metrics(await self._models.counts()))

    async def _parse_body(self, request: web.Request, kind: type[_T]) -> _T:
        """Return the decoded body; the defaults of `kind` if there is no body."""
        with self._budget.request() as take:
            return await _read(await _body(request, take) or b"{}", kind)

    # ---- inference -------------------------------------------------------------------------------------------

    async def _infer(self, request: web.Request) -> web.Response:
        name, version = _model(request)
        with self._budget.request() as take:
            body = await _body(request, take)
            length = request.headers.get(_HEADER)
            end = len(body) if length is None else _length(length, len(body))
            head = await _read(body[:end], _Infer)
            inference, binary = _inference(name, version, head, memoryview(body)[end:], end)
            with use_parent(lambda: request.headers):
                version, answers = await infer(self._models, self._regions, inference)
            numbers = sum(one.nbytes for wanted, *_, one in answers if not binary.get(wanted.name, binary[""]))
            size = numbers + sum(text_size(array) for *_, array in answers)
            response = await convert_in_thread(size, _response, name, version, head.id, answers, binary)
            take(response.content_length or 0)
            await _send(request, response)
            return response

    # ---- shared memory ---------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> Any:
        asked = await self._parse_body(request, _Region)
        return self._regions.register(request.match_info["region"], asked.key, asked.offset, asked.byte_size)

    async def _unregister(self, request: web.Request) -> Any:
        return self._regions.unregister(request.match_info.get("region", ""))

    async def _regions_status(self, request: web.Request) -> Any:
        return self._regions.status(request.match_info.get("region", ""))


def _model(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


async def _send(request: web.Request, response: web.Response) -> None:
    """Send an answer; disconnect a client that does not read it in time."""
    try:
        async with asyncio.timeout(seconds_for(response.content_length or 0)):
            await response.prepare(request)
            await response.write_eof()
    except (TimeoutError, ConnectionError):
        if request.transport is not None:
            request.transport.abort()


async def _body(request: web.Request, take: Callable[[int], None]) -> bytes:
    """Read and inflate the body. Call `take` with the size of each received part, and of the inflated body."""
    is_packed = request.headers.get("Content-Encoding", "identity").lower() != "identity"
    most = _MOST_INFLATED if is_packed else _MOST_BYTES
    loop, body = asyncio.get_running_loop(), bytearray()
    begin = loop.time()
    while not request.content.at_eof():
        left = begin + seconds_for(len(body)) - loop.time()
        try:
            chunk = request.content.read_nowait() or await asyncio.wait_for(request.content.readany(), left)
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"only {len(body)} bytes came in {loop.time() - begin:.0f} s") from None
        take(len(chunk))
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))
    if not is_packed:
        return bytes(body)
    inflated = await asyncio.to_thread(_inflated, body)
    take(len(inflated))
    return inflated


def _inflated(body: bytearray) -> bytes:
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        inflated = stream.decompress(body, _MOST_INFLATED + 1)
    except zlib.error as error:
        raise InvalidArgument(f"the body cannot be read as gzip or deflate: {error}") from None
    if len(inflated) > _MOST_INFLATED:
        raise InvalidArgument(f"a compressed body inflates to at most {_MOST_INFLATED} bytes: send this one as it is")
    if not stream.eof or stream.unused_data:
        raise InvalidArgument("the body cannot be read: it is not one whole compressed stream")
    return inflated


def _length(text: str, most: int) -> int:
    """Return the JSON's length in bytes, from a header. Reject a length above `most`."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) <= most):
        raise InvalidArgument(f"{_HEADER} is {text[:_MOST_DIGITS]!r}, the body has {most} bytes")
    return int(text)


async def _read(data: bytes, kind: type[_T]) -> _T:
    if len(data) > _MOST_JSON:
        raise InvalidArgument(f"JSON has at most {_MOST_JSON} bytes, got {len(data)}: send tensors as binary data")
    return await convert_in_thread(len(data), _decode, data, kind)


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the request cannot be read: {error}. Numbers that JSON has not, as NaN and Infinity, go as binary data"
        ) from None


def _inference(name: str, version: str, head: _Infer, data: memoryview, size: int) -> tuple[Inference, dict[str, bool]]:
    """Return the request, and for each output name True to send the output as bytes. "" means all other outputs."""
    inputs = []
    for tensor in head.inputs:
        raw, length = None, tensor.parameters.get("binary_data_size")
        if length is not None and "shared_memory_region" not in tensor.parameters:
            if type(length) is not int or not 0 <= length <= len(data):
                raise InvalidArgument(
                    f"input {tensor.name!r}: binary_data_size is {length!r}, {len(data)} bytes are left"
                )
            raw, data = data[:length], data[length:]
        inputs.append(InputTensor.of(tensor.name, tensor.datatype, tensor.shape, tensor.parameters, raw, tensor.data))
    if len(data):
        raise InvalidArgument(f"{len(data)} bytes behind the JSON belong to no input")
    binary = {"": bool(head.parameters.get("binary_data_output", False))}
    binary |= {one.name: bool(one.parameters.get("binary_data", binary[""])) for one in head.outputs}
    outputs = [OutputTensor.of(one.name, one.parameters) for one in head.outputs]
    return Inference(name, version, inputs, outputs, size, Terms.of(head.parameters)), binary


def _check_json(name: str, datatype: str, array: Array, left: int) -> None:
    """Check that an output can be sent as JSON, and has at most `left` elements."""
    if array.size > left:
        raise InvalidArgument(
            f"output {name!r} has {array.size} elements; the JSON of an answer has at most {_MOST_NUMBERS}, of which "
            f"{left} are left: ask for binary data"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise InvalidArgument(f"output {name!r} has NaN or Infinity, which JSON has not: ask for binary data")
    if datatype == "BF16":
        raise InvalidArgument(f"output {name!r} is BF16, which JSON has not: ask for binary data")


def _response(name: str, version: str, request_id: object, answers: Answers, binary: Any) -> web.Response:
    outputs: list[dict[str, Any]] = []
    parts: list[memoryview] = []
    left = _MOST_NUMBERS
    for wanted, datatype, shape, array in answers:
        output: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": list(shape)}
        if wanted.place is not None:
            output["parameters"] = {
                "shared_memory_region": wanted.place.region,
                "shared_memory_byte_size": array.nbytes,
                "shared_memory_offset": wanted.place.offset,
            }
        elif binary.get(wanted.name, binary[""]):
            parts.append(bytes_of(to_wire(array)))
            output["parameters"] = {"binary_data_size": parts[-1].nbytes}
        else:
            _check_json(wanted.name, datatype, array, left)
            left -= array.size
            output["data"] = (array.astype(bool) if datatype == "BOOL" else array).ravel().tolist()
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": outputs}
    if request_id is not None:
        answer["id"] = request_id
    head = msgspec.json.encode(answer)
    if not parts:
        return web.Response(body=head, content_type="application/json")
    return web.Response(
        body=b"".join([head, *parts]), content_type="application/octet-stream", headers={_HEADER: str(len(head))}
    )


async def serve(
    models: Models,
    regions: Regions,
    budget: Budget,
    address: str,
    *,
    tokens: Tokens = EVERYONE,
    certificate: Certificate | None = None,
    keepalive: float = 75,
) -> tuple[web.AppRunner, int | str]:
    """Start the HTTP server. See `listen` for arguments and errors."""
    # The cleanup cuts off bodies that still arrive: call `Budget.finish` first.
    application = Rest(models, regions, budget).application(tokens)
    most = budget.most_connections
    return await listen(application, address, most, idle=keepalive, certificate=certificate)
