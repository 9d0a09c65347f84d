"""What a service process is told when it is started: an argument of its command line; `path` follows it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import asdict

from .scheduling import Scheduling


class ServiceOptions(msgspec.Struct, frozen=True):
    """How a process serves.

    Attributes:
        devices: By name.
        log_level: A number of `logging`.
        quotas: Other than in `Quotas`, of a connection.
        max_run, max_compile: Seconds that running and compiling a model may take; None for no limit.
        scheduling: When and where its threads run.
        sandbox: Mode of `close_door`.
        warm: Load at once what most models need.
        path: Where the client's program finds its modules.
        socket: Inherited end of a socketpair.
        stderr: Becomes stdout and stderr once all is well.
        faults: Where orders of faults come from.
        parent: Process id of a client that has started it.
        client: A pidfd of any other.
        worker: Name of a service whose broker the client is, which hands over others.
        user_quotas: Other than in `PER_USER`, of a worker.
        own: It runs one user's own models, within their limits.
        named: It serves models that the broker publishes.
        apart: Devices for published models alone.
        state: Directory of the trust store; None for the usual one.
    """

    devices: tuple[str, ...]
    log_level: int = logging.WARNING
    quotas: dict[str, int] = {}
    max_run: float | None = None
    max_compile: float | None = None
    scheduling: Scheduling = Scheduling()
    sandbox: str = "on"
    warm: bool = False
    path: tuple[str, ...] = ()
    socket: int = -1
    stderr: int = -1
    faults: int = -1
    parent: int = 0
    client: int = -1
    worker: str | None = None
    user_quotas: dict[str, int] = {}
    own: bool = False
    named: bool = False
    apart: tuple[str, ...] = ()
    state: str | None = None

    def __str__(self) -> str:
        """Return them as JSON, in which a path may have bytes that are no UTF-8."""
        return json.dumps(asdict(self), default=msgspec.to_builtins)

    @classmethod
    def read(cls, text: str, **others: Any) -> ServiceOptions:
        """Return what was written so, but for some."""
        return _read({**json.loads(text), **others})


_read: Callable[[object], ServiceOptions] = partial(msgspec.convert, type=ServiceOptions)
_read({"devices": ()})  # makes what reads the type, before there are threads
