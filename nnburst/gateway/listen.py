"""HTTP servers: addresses, access, and limits on connections."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger
from aiohttp.http import HttpProcessingError

from .._core.tokens import Tokens
from ..errors import DeviceUnavailable
from .budget import FAREWELL_S
from .certificate import Certificate

_ID = "X-Request-ID"
_MOST_ID = 128
_HANDSHAKE_S = 60.0
"""Seconds after which asyncio ends a TLS handshake. Python 3.11 can keep objects of a failed handshake for longer."""


def _is_own_error(record: logging.LogRecord) -> bool:
    """Return True for aiohttp's log records about errors of this program, not of clients."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | web.RequestPayloadError | HttpProcessingError)


_log = logging.getLogger("nnburst.gateway")
_log.addFilter(_is_own_error)
access = logging.getLogger("nnburst.access")
"""The log of requests, one line of level INFO for each."""


def request_id(value: object) -> str:
    """Return the id that a client gave its request; a new id if the given one is missing, too long or not printable."""
    is_id = isinstance(value, str) and value.isascii() and value.isprintable() and 0 < len(value) <= _MOST_ID
    return str(value) if is_id else uuid4().hex


def note_request(client: str, call: str, status: object, seconds: float, name: str) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    call = "".join(c if c.isprintable() else " " for c in call)  # gRPC allows any characters
    fields = {"client": client, "call": call, "status": str(status), "ms": round(seconds * 1e3, 3), "request_id": name}
    access.info(
        "%(client)s %(call)s: %(status)s in %(ms)s ms, request %(request_id)s", fields, extra={"fields": fields}
    )


class _AccessLogger(AbstractAccessLogger):
    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        call, name = f"{request.method} {request.rel_url.raw_path}", response.headers.get(_ID, "")
        note_request(request.remote or "a socket", call, response.status, time, name)

    @property
    def enabled(self) -> bool:
        return self.logger.isEnabledFor(logging.INFO)


async def _name(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[_ID] = request_id(request.headers.get(_ID))


def guard(tokens: Tokens, free: str | None = None) -> Any:
    """Return a middleware that refuses requests without a token, except for paths that begin with `free`."""

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        is_free = free is not None and request.path.startswith(free)
        if is_free or tokens.admit(request.headers.get("Authorization")):
            return await handler(request)
        answer = {"error": "this gateway asks for a token: send Authorization: Bearer TOKEN"}
        return web.json_response(answer, status=401, headers={"WWW-Authenticate": "Bearer"})

    return guarded


class _New(asyncio.Protocol):
    """A connection before the end of its TLS handshake. Only this object's deletion shows that the handshake failed."""

    def __init__(self, begin: Callable[[Any], None]) -> None:
        self.connection_made = begin  # type: ignore[assignment, method-assign]


class _Runner(web.AppRunner):
    """Runner of a server that limits connections. Without descriptors, the event loop would log errors endlessly."""

    def __init__(self, application: web.Application, most: int, *, ends_oldest: bool, **options: Any) -> None:
        super().__init__(application, **options)
        self._most, self._ends_oldest, self._handshakes = most, ends_oldest, set[asyncio.TimerHandle]()

    @property
    def server(self) -> Any:
        return self._accept

    def _accept(self) -> _New:
        """Return the protocol object of a new connection. An error makes asyncio close the connection."""
        server: Any = super().server
        if not self._ends_oldest and len(server.connections) + len(self._handshakes) >= self._most:
            raise ConnectionRefusedError

        def end() -> None:
            timer.cancel()
            self._handshakes.discard(timer)

        new = _New(self._begin)
        timer = asyncio.get_running_loop().call_later(_HANDSHAKE_S, weakref.finalize(new, end))
        self._handshakes.add(timer)
        return new

    def _begin(self, transport: Any) -> None:
        server: Any = super().server
        handler = server()
        transport.set_protocol(handler)
        handler.connection_made(transport)
        if len(server.connections) > self._most and (gone := server.connections[-self._most - 1].transport):
            asyncio.get_running_loop().call_soon(gone.abort)  # aiohttp must set up the connection first


async def listen(
    application: web.Application,
    address: str,
    most: int,
    *,
    idle: float,
    ends_oldest: bool = False,
    certificate: Certificate | None = None,
) -> tuple[web.AppRunner, int | str]:
    """Start a server at ``HOST:PORT`` (port 0 for any free port) or ``unix:PATH``.

    Args:
        most: Maximum number of connections. A further connection is reset or, with `ends_oldest`, resets the oldest.
        certificate: The certificate for TLS; None for no TLS.
        idle: Seconds after which a connection that sends no request head is closed.

    Returns:
        The runner; and the server's port or, for a Unix socket, its address.

    Raises:
        DeviceUnavailable: The address is unusable.
    """
    host, _, port = address.rpartition(":")
    application.on_response_prepare.append(_name)
    runner = _Runner(
        application,
        most,
        ends_oldest=ends_oldest,
        access_log=access,
        access_log_class=_AccessLogger,
        auto_decompress=False,  # the handlers inflate bodies and count the bytes
        keepalive_timeout=idle,
        logger=_log,
        shutdown_timeout=FAREWELL_S,
    )
    await runner.setup()
    tls = None if certificate is None else certificate.context
    try:
        if address.startswith("unix:"):
            await web.UnixSite(runner, address.removeprefix("unix:"), ssl_context=tls).start()
            return runner, address
        await web.TCPSite(runner, host.strip("[]"), int(port), ssl_context=tls).start()
        number: int = runner.addresses[0][1]
    except (OSError, UnicodeError) as error:
        await runner.cleanup()
        raise DeviceUnavailable(f"cannot listen at {address}: {getattr(error, 'strerror', error)}") from None
    return runner, number
