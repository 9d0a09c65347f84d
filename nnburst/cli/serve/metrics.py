"""The process that shows a service's statistics to Prometheus, started and ended with it."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from importlib.util import find_spec

from ...errors import BadState, DeviceUnavailable
from ...watch import Page
from ...watch.metrics import BACKLOG
from .supervised import SupervisedProcess


@contextlib.contextmanager
def metrics(page: Page, port: int | None, pid: int) -> Iterator[str | None]:
    """Start the process, if a port is given, and yield the URL.

    It opens the page for reading, and inherits the listening socket, which this process only keeps: connections
    wait in it while a process that was killed is replaced.

    Args:
        page: Of the service.
        port: Of 127.0.0.1; 0 for any that is free.
        pid: Of the service.

    Raises:
        DeviceUnavailable: The extra is not installed.
        BadState: The port is taken.
    """
    if port is None:
        yield None
        return
    if find_spec("prometheus_client") is None:
        raise DeviceUnavailable("--metrics needs prometheus-client: pip install 'nnburst[metrics]'")
    try:
        listener = socket.create_server(("127.0.0.1", port), backlog=BACKLOG)
    except OSError as error:
        raise BadState(f"metrics cannot be served at port {port}: {error.strerror or error}") from error
    with listener:
        running = SupervisedProcess(
            "the process that serves metrics",
            "--metrics",
            "nnburst.watch.metrics",
            {"pid": pid, "page": f"/proc/{pid}/fd/{page.fd}", "listener": listener.fileno()},
            fds=[listener.fileno()],
        )
        with contextlib.closing(running):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/metrics"
