"""HTTP servers of this package: where they listen, who may ask, how many connections they have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from .._core.tokens import Tokens
from ..errors import DeviceUnavailable
from .budget import FAREWELL_S


def _is_of_us(record: logging.LogRecord) -> bool:
    """Whether what aiohttp says is of this program: that a client has left, or speaks no HTTP, is no error here."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ConnectionError | web.RequestPayloadError | HttpProcessingError)


_log = logging.getLogger("nnburst.gateway")
_log.addFilter(_is_of_us)


def guard(tokens: Tokens) -> Any:
    """Refuse requests without a token, but those after the health of the server."""

    @web.middleware
    async def guarded(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
        if request.path.startswith("/v2/health/") or tokens.admit(request.headers.get("Authorization")):
            return await handler(request)
        answer = {"error": "this gateway asks for a token: send Authorization: Bearer TOKEN"}
        return web.json_response(answer, status=401, headers={"WWW-Authenticate": "Bearer"})

    return guarded


def _limit_connections(server: Any, most: int, *, ends_oldest: bool) -> None:
    """Reset connections beyond so many: without a descriptor left, the loop would log that without end."""
    note = server.connection_made

    def connection_made(handler: object, transport: asyncio.Transport) -> None:
        note(handler, transport)
        if len(server.connections) > most:
            gone = server.connections[-most - 1].transport if ends_oldest else transport
            if gone is not None:
                asyncio.get_running_loop().call_soon(gone.abort)  # once aiohttp has begun with it

    server.connection_made = connection_made


async def listen(
    application: web.Application, address: str, most: int, *, idle: float, ends_oldest: bool = False
) -> tuple[web.AppRunner, int | str]:
    """Start to answer at ``HOST:PORT``, where port 0 takes a free one, or at ``unix:PATH``.

    Args:
        most: Connections at once: one more is reset, or has the oldest reset.
        idle: Seconds that a connection may be without a request whose head has come.

    Returns:
        The runner, and its port or its address.

    Raises:
        DeviceUnavailable: The address cannot be had.
    """
    host, _, port = address.rpartition(":")
    runner = web.AppRunner(
        application,
        access_log=None,
        auto_decompress=False,  # bodies are inflated by those who read them, and counted
        keepalive_timeout=idle,
        logger=_log,
        shutdown_timeout=FAREWELL_S,
    )
    await runner.setup()
    _limit_connections(runner.server, most, ends_oldest=ends_oldest)
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
