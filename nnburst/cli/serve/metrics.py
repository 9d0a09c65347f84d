"""The process that shows a service's statistics to Prometheus, started and ended with it."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from ..._core.tokens import Tokens
from ...errors import BadState, DeviceUnavailable, InvalidArgument
from ...gateway.address import unix_path
from ...service import listen_at, remove_own
from ...watch.metrics import BACKLOG
from ..targets import whole_number
from .supervised import SupervisedProcess


class Metrics:
    """The process."""

    def __init__(self, url: str, process: SupervisedProcess) -> None:
        self.url = url
        self._process = process

    def look_at(self, pids: Sequence[int]) -> None:
        """Say whose pages are to be shown: those of the service's workers."""
        self._process.options["pids"] = [*pids]  # for one that is started later
        self._process.tell(json.dumps([*pids]))


@contextlib.contextmanager
def metrics(where: str | None, token_file: str | None = None) -> Iterator[Metrics | None]:
    """Start the process, if a port is given.

    It opens pages for reading, and inherits the listening socket, which this process only keeps: connections wait in it
    while a process that was killed is replaced.

    Args:
        where: A port of 127.0.0.1, 0 for any that is free; or ``unix:PATH``.
        token_file: Of `Tokens`, one of which has to be shown; None for none.

    Raises:
        DeviceUnavailable: The extra is not installed.
        BadState: The port or the path is taken.
        InvalidArgument: It is neither; or the file of tokens is none.
    """
    if where is None:
        yield None
        return
    if find_spec("prometheus_client") is None:
        raise DeviceUnavailable("--metrics needs prometheus-client: pip install 'nnburst[metrics]'")
    Tokens(token_file)  # which says what is wrong with it
    path, port = unix_path(where), whole_number(where)
    if not path and (port is None or port > 65535):
        raise InvalidArgument(f"--metrics {where}: give a port of this machine, or unix:/PATH")
    try:
        listener = listen_at(Path(path)) if path else socket.create_server(("127.0.0.1", port or 0), backlog=BACKLOG)
    except OSError as error:
        raise BadState(f"metrics cannot be served at {where}: {error.strerror or error}") from error
    with listener, contextlib.ExitStack() as ending:
        if path is not None:
            ending.callback(remove_own, Path(path), Path(path).lstat())
        running = SupervisedProcess(
            "the process that serves metrics",
            "--metrics",
            "nnburst.watch.metrics",
            {"pids": [], "listener": listener.fileno(), "token_file": token_file},
            fds=[listener.fileno()],
        )
        with contextlib.closing(running):
            url = where if path is not None else f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
            yield Metrics(url, running)
