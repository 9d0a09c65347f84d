"""The gateway's process: a client of the shared service, so that what comes over the network never meets its memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .._core.tokens import Tokens
from ..errors import NNBurstError
from .budget import FAREWELL_S, Budget
from .inference import elsewhere
from .models import Models
from .regions import Regions

_log = logging.getLogger(__name__)
_THREADS = 32
"""Runs of models that may wait at once; what one run needs is short beside what it waits for."""


async def _serve(
    models: Models, regions: Regions, tokens: Tokens, grpc: str | None, rest: str | None, drain: float
) -> None:
    from . import grpc as _grpc
    from . import rest as _rest

    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(_THREADS, thread_name_prefix="nnburst-oip"))
    ended, budget = asyncio.Event(), Budget()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def end() -> None:
        loop.remove_reader(0)
        ended.set()

    def renew() -> None:
        try:
            tokens.renew()
        except NNBurstError as error:
            _log.error("%s; those of before are still taken", error)
        models.renew()

    loop.add_signal_handler(signal.SIGHUP, loop.run_in_executor, None, renew)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # which the service has blocked until now
    loop.add_reader(0, end)
    async with contextlib.AsyncExitStack() as stack:
        ports: dict[str, Any] = {}
        if grpc is not None:
            server, ports["grpc"] = await _grpc.serve(models, regions, budget, grpc, tokens=tokens)
            stack.push_async_callback(server.stop, None)
        if rest is not None:
            runner, ports["rest"] = await _rest.serve(models, regions, budget, rest, tokens=tokens)
            stack.push_async_callback(runner.cleanup)
        print(json.dumps(ports), flush=True)
        loop.run_in_executor(None, models.is_ready)  # so that the first request finds them open
        await ended.wait()
        models.stop()
        await budget.finish(drain)
        await asyncio.gather(elsewhere(models.close), asyncio.sleep(FAREWELL_S))  # the last answers are sent
        # Its sockets end with the process, which clients take for UNAVAILABLE. A gRPC server that stops in order says
        # CANCELLED to what has come meanwhile, which they would take for their own doing.
        os._exit(0)


def run(
    address: str,
    *,
    grpc: str | None,
    rest: str | None,
    shared_memory: bool,
    control: bool,
    drain: float,
    unloaded: list[str],
    token_file: str | None = None,
) -> int:
    """Serve until SIGTERM, Ctrl-C or the end of standard input. Prints the ports as JSON when it is ready.

    SIGHUP says that the models, and the tokens, are new ones.

    Args:
        grpc, rest: Where to listen, ``HOST:PORT`` or ``unix:PATH``.
        shared_memory: Whether clients may register memory.
        control: Whether they may load and unload models.
        unloaded: As for `Models`.
        drain: Seconds that requests under way have when it is stopped.
        token_file: Of `Tokens`, one of which a client has to show; None for none.

    Returns:
        The exit status, if it could not start.
    """
    models = Models(address, may_change=control, unloaded=unloaded)
    regions = Regions(shared_memory)
    with contextlib.closing(models), contextlib.closing(regions):
        try:
            os.umask(0o077)  # sockets are for this user, and those who are given more
            asyncio.run(_serve(models, regions, Tokens(token_file), grpc, rest, drain))
        except NNBurstError as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return 1
    return 0


def main() -> int:
    """Run with the arguments of `run`, given as JSON."""
    options = json.loads(sys.argv[1])
    return run(options.pop("address"), **options)
