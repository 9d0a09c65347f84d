"""The gateway process between network and service: it forwards requests, shows the service's statistics, or both.

Processes that run models therefore parse no data from the network.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from .._core.tokens import Tokens
from ..errors import NNBurstError
from ..service.process.limited_log import begin_log
from ..watch.metrics import Collector
from .budget import FAREWELL_S, Budget
from .certificate import Certificate
from .models import Models
from .regions import Regions

_log = logging.getLogger(__name__)
_THREADS = 32
"""Number of threads that run requests; they mostly wait for the service."""


class Served(msgspec.Struct):
    """The options of the process.

    Attributes:
        grpc, rest, metrics: Address of each server, ``HOST:PORT`` or ``unix:PATH``; None for no server.
        address: Address of the service.
        shared_memory: True if clients may register memory.
        control: True if clients may load and unload models.
        unloaded: See `Models`.
        drain: Seconds to wait for requests in progress when the process stops.
        token_file: Path of the file that `Tokens` reads; each client must send a token. None for no tokens.
        cert, key: Paths of the files that `Certificate` reads; None for no TLS.
        keepalive: Seconds after which a silent connection is closed.
        log_level, log_format: Arguments of `begin_log`.
    """

    grpc: str | None = None
    rest: str | None = None
    metrics: str | None = None
    address: str = ""
    shared_memory: bool = False
    control: bool = False
    unloaded: Sequence[str] = ()
    drain: float = 0.0
    token_file: str | None = None
    cert: str | None = None
    key: str | None = None
    keepalive: float = 75.0
    log_level: str = "WARNING"
    log_format: str = "text"


async def _serve(options: Served) -> None:
    loop, tokens = asyncio.get_running_loop(), Tokens(options.token_file)
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="nnburst-oip"))
    ended, hangup, budget = asyncio.Event(), asyncio.Event(), Budget()
    certificate = Certificate(options.cert, options.key) if options.cert or options.key else None
    models = Models(options.address, may_change=options.control, unloaded=options.unloaded)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def end() -> None:
        loop.remove_reader(0)
        ended.set()

    async def reload_on_hangup() -> None:
        while await hangup.wait():
            hangup.clear()
            for each in (tokens, certificate):
                try:
                    if each is not None:
                        each.renew()
                except NNBurstError as error:
                    _log.error("%s; what there was before is still taken", error)
            await models.renew()

    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # the signal was blocked at the start
    loop.add_reader(0, end)
    async with contextlib.AsyncExitStack() as stack:
        ports, regions, beside = dict[str, Any](), Regions(options.shared_memory), list[asyncio.Task[Any]]()
        if options.metrics is not None:
            from .metrics import serve_metrics

            collector = Collector(os.getppid())
            runner, ports["metrics"] = await serve_metrics(collector, options.metrics, tokens)
            stack.push_async_callback(runner.cleanup)
        how: dict[str, Any] = {"tokens": tokens, "certificate": certificate, "keepalive": options.keepalive}
        if options.grpc is not None:
            from . import grpc

            server, ports["grpc"] = await grpc.serve(models, regions, budget, options.grpc, **how)
            stack.push_async_callback(server.stop, None)
            host = options.grpc.rpartition(":")[0]
            address = options.grpc if host == "unix" else f"{host}:{ports['grpc']}"
            again = grpc.serve_again(partial(grpc.serve, models, regions, budget, address, **how))
            beside.append(asyncio.create_task(again))
        if options.rest is not None:
            from . import rest

            runner, ports["rest"] = await rest.serve(models, regions, budget, options.rest, **how)
            stack.push_async_callback(runner.cleanup)
        print(json.dumps(ports), flush=True)
        beside.append(asyncio.create_task(reload_on_hangup()))
        if serves_models := bool(options.grpc or options.rest):
            beside.append(asyncio.create_task(models.is_ready()))
        await ended.wait()
        await budget.finish(options.drain)
        for task in beside:
            task.cancel()
        if serves_models:
            await asyncio.gather(models.close(), asyncio.sleep(FAREWELL_S))  # sending the last answers takes time
        # Clients report sockets that end abruptly as UNAVAILABLE. An orderly stop would answer calls with CANCELLED, as
        # if the clients had cancelled them.
        os._exit(0)


def main() -> int:
    """Serve until SIGTERM, Ctrl-C or the end of standard input. Print the ports as JSON when ready.

    SIGHUP reloads models, tokens and certificate. The command-line argument is `Served` as JSON.

    Returns:
        The exit status if the gateway cannot start; otherwise `main` ends the process.
    """
    options = msgspec.json.decode(sys.argv[1], type=Served)
    begin_log("nnburst gateway", options.log_level, options.log_format)
    if options.metrics is not None:
        with contextlib.suppress(OSError):  # the service's real-time policy is not for metrics
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.umask(0o077)  # only this user can connect to Unix sockets
    try:
        asyncio.run(_serve(options))
    except NNBurstError as error:
        print(json.dumps({"error": str(error)}), flush=True)
    return 1
