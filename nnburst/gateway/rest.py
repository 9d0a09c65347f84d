"""The protocol over HTTP: health, metadata, inference, regions. Tensors as JSON, or as bytes behind it."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.http import HttpProcessingError

from .. import __version__
from .._core.tokens import EVERYONE, Tokens
from ..errors import DeadObject, DeviceUnavailable, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted
from ..model import Array
from ..runtime.spans import below
from .budget import FAREWELL_S, RETRY_S, Budget, BudgetShare
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
from .metrics import triton_metrics
from .models import Models, NoSuchModel
from .regions import Regions
from .tensors import BRISK, as_sent, bytes_of, is_long

_MOST_BYTES = 256 << 20
_MOST_JSON = 16 << 20
"""Bytes of JSON in a request: the interpreter does nothing else while it is read, in whatever thread."""
_MOST_INFLATED = 16 << 20
"""Bytes of a compressed body, once it is inflated: a thousand times what was sent, perhaps."""
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
_PATIENCE_S, _LEAST_RATE = 30.0, 1 << 16
"""A body has so many seconds, and one more for each so many bytes: it counts as under way while it comes."""
_IDLE_S = 75
"""That a connection may be without a request whose head has come."""
_MOST_NUMBERS = 1 << 20
"""In the JSON of an answer, for the same reason."""
_DECODER, _ENCODER = msgspec.json.Decoder(), msgspec.json.Encoder()
_HEADER = "Inference-Header-Content-Length"
_MOST_DIGITS = 20
_CODES: tuple[tuple[type[NNBurstError], int], ...] = (
    (NoSuchModel, 404),
    (DeviceUnavailable, 503),
    (DeadObject, 503),
    (MissedDeadline, 504),
    (ResourceExhausted, 429),
)


def _is_of_us(record: logging.LogRecord) -> bool:
    """Whether what aiohttp says is of this program: that a client has left, or speaks no HTTP, is no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | web.RequestPayloadError | HttpProcessingError)


_log = logging.getLogger("nnburst.gateway")
_log.addFilter(_is_of_us)


def _status(error: NNBurstError) -> int:
    return next((code for kind, code in _CODES if isinstance(error, kind)), 400)


@web.middleware
async def _errors(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """An error is an object with a sentence."""
    try:
        return await handler(request)
    except NNBurstError as error:
        status = _status(error)
        hint = {"Retry-After": str(RETRY_S)} if status in (429, 503) else {}
        return web.json_response({"error": str(error)}, status=status, headers=hint)
    except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
        return web.json_response({"error": f"{request.method} {request.path} is not served"}, status=error.status)
    except web.HTTPException as error:
        return web.json_response({"error": error.text or error.reason}, status=error.status)
    except (web.RequestPayloadError, ConnectionError) as error:  # what came is none, or its sender is gone
        return web.json_response({"error": f"the body cannot be read: {error}"}, status=400)


def _guard(tokens: Tokens) -> Any:
    """Refuse requests without a token, but those after the health of the server."""

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        if request.path.startswith("/v2/health/") or tokens.admit(request.headers.get("Authorization")):
            return await handler(request)
        answer = {"error": "this gateway asks for a token: send Authorization: Bearer TOKEN"}
        return web.json_response(answer, status=401, headers={"WWW-Authenticate": "Bearer"})

    return guarded


class Rest:
    """The handlers, by path."""

    def __init__(self, models: Models, regions: Regions, budget: Budget) -> None:
        self._models = models
        self._regions = regions
        self._budget = budget

    def application(self, tokens: Tokens = EVERYONE) -> web.Application:
        application = web.Application(middlewares=[_guard(tokens), _errors], client_max_size=_MOST_BYTES)
        model, memory = "/v2/models/{model}", "/v2/systemsharedmemory"
        for prefix in (model, model + "/versions/{version}"):
            application.router.add_get(prefix, self._metadata)
            application.router.add_get(prefix + "/config", self._config)
            application.router.add_get(prefix + "/ready", self._model_ready)
            application.router.add_post(prefix + "/infer", self._infer)
            application.router.add_get(prefix + "/stats", self._statistics)
        application.router.add_get("/v2/models/stats", self._statistics)
        for path in ("/v2", "/v2/"):
            application.router.add_get(path, self._server)
        application.router.add_get("/v2/health/live", self._live)
        application.router.add_get("/v2/health/ready", self._ready)
        application.router.add_post("/v2/repository/index", self._index)
        application.router.add_post("/v2/repository/models/{model}/{change:load|unload}", self._change)
        application.router.add_get("/metrics", self._metrics)
        for path in (memory, memory + "/region/{region}"):
            application.router.add_get(path + "/status", self._regions_status)
            application.router.add_post(path + "/unregister", self._unregister)
        application.router.add_post(memory + "/region/{region}/register", self._register)
        return application

    # ---- health and metadata ---------------------------------------------------------------------------------

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        ready = await self._models.once("", self._models.is_ready)
        return web.json_response({"ready": ready}, status=200 if ready else 503)

    async def _server(self, request: web.Request) -> web.Response:
        offered = ["binary_tensor_data", *extensions(self._models, self._regions)]
        return web.json_response({"name": "nnburst", "version": __version__, "extensions": offered})

    async def _index(self, request: web.Request) -> web.Response:
        with self._budget.request() as share:
            asked = await _read(await _body(request, share) or b"{}")
        return web.json_response(await ask(lambda: self._models.index(only_ready=asked.get("ready") is True)))

    async def _change(self, request: web.Request) -> web.Response:
        name, unload = request.match_info["model"], request.match_info["change"] == "unload"
        with self._budget.request() as share:
            asked = await _read(await _body(request, share) or b"{}")
        if (given := asked.get("parameters")) and not unload:
            names = sorted(given) if isinstance(given, dict) else given
            raise InvalidArgument(f"a model is loaded as it is, not with {names}")
        async with self._models.changing:
            await ask(lambda: self._models.change(name, unload=unload))
        return web.Response()

    async def _model_ready(self, request: web.Request) -> web.Response:
        name, version = _model(request)
        await self._models.require(name, version)
        return web.json_response({"name": name, "ready": True})

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(await ask(lambda: self._models.describe(*_model(request))))

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(await ask(lambda: self._models.configure(*_model(request))))

    async def _statistics(self, request: web.Request) -> web.Response:
        asked = _model(request) if "model" in request.match_info else ("", "")
        return web.json_response({"model_stats": await ask(lambda: self._models.statistics(*asked))})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=triton_metrics(await ask(self._models.counts)))

    # ---- inference -------------------------------------------------------------------------------------------

    async def _infer(self, request: web.Request) -> web.Response:
        name, version = _model(request)
        with self._budget.request() as share:
            body = await _body(request, share)
            length = request.headers.get(_HEADER)
            end = len(body) if length is None else _length(length, len(body))
            head = await _read(body[:end])
            number = head.get("id")
            if number is not None and type(number) not in (str, int):
                raise InvalidArgument(f"id is a string or a whole number, got a {type(number).__name__}")
            inference, binary = _inference(name, version, head, memoryview(body)[end:], end)
            with below(lambda: request.headers):
                version, answers = await infer(self._models, self._regions, inference)
            size = sum(array.nbytes for wanted, *_, array in answers if not binary.get(wanted.name, binary[""]))
            if size <= BRISK and not any(is_long(array) for *_, array in answers):
                return _response(name, version, number, answers, binary)
            return await elsewhere(lambda: _response(name, version, number, answers, binary))

    # ---- shared memory ---------------------------------------------------------------------------------------

    async def _register(self, request: web.Request) -> web.Response:
        with self._budget.request() as share:
            body = await _read(await _body(request, share))
        key, offset, size = body.get("key"), body.get("offset", 0), body.get("byte_size")
        if not isinstance(key, str) or type(offset) is not int or type(size) is not int:
            raise InvalidArgument("a region has a key, an offset and a byte_size")
        self._regions.register(request.match_info["region"], key, offset, size)
        return web.Response()

    async def _unregister(self, request: web.Request) -> web.Response:
        self._regions.unregister(request.match_info.get("region", ""))
        return web.Response()

    async def _regions_status(self, request: web.Request) -> web.Response:
        regions = self._regions.status(request.match_info.get("region", ""))
        return web.json_response(
            [{"name": r.name, "key": r.key, "offset": r.offset, "byte_size": r.byte_size} for r in regions]
        )


def _model(request: web.Request) -> tuple[str, str]:
    return request.match_info["model"], request.match_info.get("version", "")


async def _body(request: web.Request, share: BudgetShare) -> bytes:
    """Read the body; what has come of it counts at once, and what it is when it is inflated."""
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ("identity", "gzip", "deflate"):
        raise web.HTTPUnsupportedMediaType(
            text=f"a body in {encoding!r} is not read; send it in gzip, deflate or plain"
        )
    most = _MOST_BYTES if encoding == "identity" else _MOST_INFLATED
    loop, body = asyncio.get_running_loop(), bytearray()
    begin = loop.time()
    while not request.content.at_eof():
        patience = begin + _PATIENCE_S + len(body) / _LEAST_RATE - loop.time()
        try:
            chunk = request.content.read_nowait() or await asyncio.wait_for(request.content.readany(), patience)
        except TimeoutError:
            raise web.HTTPRequestTimeout(text=f"only {len(body)} bytes came in {loop.time() - begin:.0f} s") from None
        share.take(len(chunk))
        body += chunk
        if len(body) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(body))
    if encoding == "identity":
        return bytes(body)
    inflated = await elsewhere(lambda: _inflated(body))
    share.take(len(inflated))
    return inflated


def _inflated(body: bytearray) -> bytes:
    stream = zlib.decompressobj(_ZLIB_OR_GZIP)
    try:
        inflated = stream.decompress(body, _MOST_INFLATED + 1)
    except zlib.error as error:
        raise InvalidArgument(f"the body cannot be read: {error}") from None
    if len(inflated) > _MOST_INFLATED:
        raise InvalidArgument(f"a compressed body inflates to at most {_MOST_INFLATED} bytes: send this one as it is")
    if not stream.eof or stream.unused_data:
        raise InvalidArgument("the body cannot be read: it is not one whole compressed stream")
    return inflated


def _length(text: str, most: int) -> int:
    """Return what a header says of the JSON's length; of many digits, only those are read that can matter."""
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS and int(text) <= most):
        raise InvalidArgument(f"{_HEADER} is {text[:_MOST_DIGITS]!r}, the body has {most} bytes")
    return int(text)


async def _read(data: bytes) -> dict[str, Any]:
    """Return the object that is JSON, read in another thread if it is long."""
    if len(data) > _MOST_JSON:
        raise InvalidArgument(f"JSON has at most {_MOST_JSON} bytes, got {len(data)}: send tensors as binary data")
    return _object(data) if len(data) <= BRISK else await elsewhere(lambda: _object(data))


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the request is no JSON: {error}. Numbers that JSON has not, as NaN and Infinity, go as binary data"
        ) from None
    if not isinstance(value, dict):
        raise InvalidArgument("the request is no JSON object")
    return value


def _tensors(head: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    tensors = head.get(kind, [])
    if not isinstance(tensors, list) or not all(
        isinstance(tensor, dict)
        and isinstance(tensor.get("name"), str)
        and isinstance(tensor.get("parameters", {}), dict)
        for tensor in tensors
    ):
        raise InvalidArgument(f"{kind} is a list of objects with a name")
    return tensors


def _inference(
    name: str, version: str, head: Mapping[str, Any], data: memoryview, size: int
) -> tuple[Inference, dict[str, bool]]:
    """Return the request, and for each output that it names whether it goes back as bytes ('' for the others)."""
    inputs = []
    for tensor in _tensors(head, "inputs"):
        what = f"input {tensor['name']!r}"
        parameters = tensor.get("parameters", {})
        shape = tensor.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int for size in shape):
            raise InvalidArgument(f"{what}: the shape is a list of numbers, got {shape!r}")
        elements: Any = RegionPlace.of(parameters, "input", tensor["name"])
        length = parameters.get("binary_data_size")
        if elements is None and length is not None:
            if type(length) is not int or not 0 <= length <= len(data):
                raise InvalidArgument(f"{what}: binary_data_size is {length!r}, {len(data)} bytes are left")
            elements, data = data[:length], data[length:]
        if elements is not None and tensor.get("data"):
            raise InvalidArgument(f"{what} comes twice, as data and as bytes or in a region; send it once")
        if elements is None:
            elements = tensor.get("data")
            if not isinstance(elements, list):
                raise InvalidArgument(f"{what} has no data")
        inputs.append(InputTensor(tensor["name"], str(tensor.get("datatype", "")), tuple(shape), elements))
    if len(data):
        raise InvalidArgument(f"{len(data)} bytes behind the JSON belong to no input")
    parameters = head.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"parameters is an object, got {parameters!r}")
    binary = {"": bool(parameters.get("binary_data_output", False))}
    outputs = []
    for tensor in _tensors(head, "outputs"):
        own = tensor.get("parameters", {})
        binary[tensor["name"]] = bool(own.get("binary_data", binary[""]))
        outputs.append(OutputTensor.of(tensor["name"], own))
    return Inference(name, version, inputs, outputs, size, Terms.of(parameters)), binary


def _check_json(name: str, datatype: str, array: Array, left: int) -> None:
    """Check that an output can go as JSON, where an answer takes so many elements more."""
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
            parts.append(bytes_of(as_sent(array)))
            output["parameters"] = {"binary_data_size": parts[-1].nbytes}
        else:
            _check_json(wanted.name, datatype, array, left)
            left -= array.size
            output["data"] = (array.astype(bool) if datatype == "BOOL" else array).ravel().tolist()
        outputs.append(output)
    answer: dict[str, Any] = {"model_name": name, "model_version": version, "outputs": outputs}
    if request_id is not None:
        answer["id"] = request_id
    head = _ENCODER.encode(answer)
    if not parts:
        return web.Response(body=head, content_type="application/json")
    return web.Response(
        body=b"".join([head, *parts]),
        content_type="application/octet-stream",
        headers={_HEADER: str(len(head))},
    )


def _limit_connections(server: Any, most: int) -> None:
    """Reset connections beyond so many: without a descriptor left, the loop would log that without end."""
    note = server.connection_made

    def connection_made(handler: object, transport: asyncio.Transport) -> None:
        note(handler, transport)
        if len(server.connections) > most:
            asyncio.get_running_loop().call_soon(transport.abort)  # once aiohttp has begun with it

    server.connection_made = connection_made


async def serve(
    models: Models,
    regions: Regions,
    budget: Budget,
    address: str,
    *,
    tokens: Tokens = EVERYONE,
) -> tuple[web.AppRunner, int | str]:
    """Start to answer at ``HOST:PORT``, where port 0 takes a free one, or at ``unix:PATH``.

    Returns:
        The runner, and its port or its address.

    Raises:
        DeviceUnavailable: The address cannot be had.
    """
    host, _, port = address.rpartition(":")
    # Bodies that still come when it is cleaned up never get the rest: `Budget.finish` comes first.
    runner = web.AppRunner(
        Rest(models, regions, budget).application(tokens),
        access_log=None,
        auto_decompress=False,  # it is inflated here, and counted
        keepalive_timeout=_IDLE_S,
        logger=_log,
        shutdown_timeout=FAREWELL_S,
    )
    await runner.setup()
    _limit_connections(runner.server, budget.most_connections)
    try:
        if address.startswith("unix:"):
            await web.UnixSite(runner, address.removeprefix("unix:")).start()
            return runner, address
        await web.TCPSite(runner, host.strip("[]"), int(port)).start()
        number: int = runner.addresses[0][1]
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise DeviceUnavailable(f"cannot listen at {address}: {getattr(error, 'strerror', error)}") from None
    return runner, number
