"""The pages of a service's workers for Prometheus, over HTTP, in a process of its own that only reads them.

Needs the extra ``metrics``. Anyone on the machine may connect: so few connections are open at once, each for a short
time, and the oldest makes room for the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .._core.tokens import EVERYONE, Tokens
from ..errors import NNBurstError
from .reader import Viewer, find_services
from .stats import Histogram, RowKind, RowStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

BACKLOG = 128
"""Connections that wait in the kernel; also as many as are taken before one is looked at."""
_MOST_CONNECTIONS = 8
_PATIENCE_S = 5.0
"""For a request and its answer."""
_MOST_HEAD = 1 << 14
"""Bytes of a request."""

_HELP = {
    "requests": "Requests that came through bursts.",
    "results": "Answers to them.",
    "failures": "Answers with an error status.",
    "sleeps": "Times that a thread went to sleep for lack of requests.",
    "wakes": "Times that a thread woke the other side.",
    "malformed": "Requests that could not be read.",
    "plan_hits": "Requests that were already bound.",
    "plan_misses": "Requests that had to be decoded and bound.",
    "slot_misses": "Memories that were fetched from a client.",
    "fallbacks": "Executions without a burst.",
    "compiled": "Models prepared from their definition.",
    "restored": "Models prepared from cache files.",
    "saved": "Models saved in cache files.",
    "rejected": "Cache files that were not what had been saved.",
    "models": "Models prepared.",
    "bursts": "Bursts opened.",
    "batched": "Requests that ran together with others.",
    "batches": "Runs of several requests at once.",
}
_TIMED = {
    "queue_wait": "Time from a client's send until a thread took the request.",
    "execution": "Time from there until the answer.",
    "spin": "Time that a thread polled before a request came or it slept.",
}
_BOUNDS_NS = tuple(
    scale * 10**power for power in range(3, 10) for scale in (1, 2, 5)
)  # 1 µs to 5 s, where the buckets of a page are not too many for a monitoring system


class Collector:
    """Reads the rows when it is asked for metrics, and sums them by model: a label for each burst would be too many."""

    def __init__(self) -> None:
        self._viewers: dict[int, Viewer] = {}

    def look_at(self, pids: Sequence[int]) -> None:
        """Show these processes from now on."""
        for pid in self._viewers.keys() - set(pids):
            del self._viewers[pid]
        for pid in set(pids) - self._viewers.keys():
            with contextlib.suppress(NNBurstError):  # it has ended
                self._viewers.update((pid, Viewer(found)) for found in find_services(pid))

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        by_model: dict[tuple[str, str], list[RowStats]] = defaultdict(list)
        unreadable = 0
        for viewer in self._viewers.values():
            try:
                rows = viewer.look().rows
            except NNBurstError:  # of a user's worker, say, which a model has taken over
                unreadable += 1
                continue
            labels = {row.number: row.label for row in rows if row.kind is RowKind.MODEL}
            for row in rows:
                by_model[labels.get(row.number) or labels.get(row.parent, ""), viewer.user].append(row)
        for name, text in _HELP.items():
            counter = CounterMetricFamily(f"nnburst_{name}", text, labels=["model", "user"])
            for labelled, members in by_model.items():
                counter.add_metric(labelled, sum(row.counters[name] for row in members))
            yield counter
        for name, text in _TIMED.items():
            family = HistogramMetricFamily(f"nnburst_{name}_seconds", text, labels=["model", "user"])
            for labelled, members in by_model.items():
                histogram = sum((getattr(row, name) for row in members), Histogram())
                family.add_metric(labelled, list(_cumulative(histogram)), sum_value=histogram.sum_ns / 1e9)
            yield family
        for kind, what in ((RowKind.MODEL, "models"), (RowKind.BURST, "bursts")):
            gauge = GaugeMetricFamily(f"nnburst_open_{what}", f"Open {what}.")
            gauge.add_metric([], sum(row.kind is kind for rows in by_model.values() for row in rows))
            yield gauge
        gauge = GaugeMetricFamily("nnburst_unreadable_workers", "Workers whose statistics are not what one writes.")
        gauge.add_metric([], unreadable)
        yield gauge


def _cumulative(histogram: Histogram) -> Iterator[tuple[str, float]]:
    left = list(histogram.buckets)
    total = 0
    for bound in _BOUNDS_NS:
        while left and left[0][0] < bound:
            total += left.pop(0)[1]
        yield repr(bound / 1e9), total
    yield "+Inf", total + sum(n for _, n in left)


def application(shown: Collector) -> Callable[..., Any]:
    """Return what answers a request for metrics, as WSGI."""
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry()
    collector: Any = shown
    registry.register(collector)
    made: Callable[..., Any] = make_wsgi_app(registry)
    return made


class MetricsServer:
    """Answers one request of each connection.

    Args:
        application: As `application` gives it.
        most: Connections at once.
        patience: Seconds that a connection has.
        tokens: One of which has to be shown.
    """

    def __init__(
        self,
        application: Callable[..., Any],
        most: int = _MOST_CONNECTIONS,
        patience: float = _PATIENCE_S,
        tokens: Tokens = EVERYONE,
    ) -> None:
        self._application = application
        self._tokens = tokens
        self._most = most
        self._patience = patience
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def serve(self, listener: socket.socket, ended: asyncio.Event, when_ready: Callable[[], None]) -> None:
        """Answer whoever connects to a listening socket, until the event."""
        begin = asyncio.start_unix_server if listener.family == socket.AF_UNIX else asyncio.start_server
        server = await begin(self._connected, sock=listener, limit=_MOST_HEAD, backlog=BACKLOG)
        when_ready()
        await ended.wait()
        server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= self._most:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            await asyncio.wait_for(self._converse(reader, writer), self._patience)
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            writer.transport.abort()  # what has not been sent is not sent any more
        finally:
            self._open.pop(writer, None)
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        writer.transport.set_write_buffer_limits(0)  # drain() waits until all has been sent
        writer.write(self._answer(head.decode("latin-1")))
        await writer.drain()

    def _answer(self, head: str) -> bytes:
        line, *lines = head.rstrip().split("\r\n")
        try:
            method, target, _ = line.split(" ")
        except ValueError:
            return b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        path, _, query = target.partition("?")
        environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query}
        for name, _, value in (line.partition(":") for line in lines):
            environ[f"HTTP_{name.upper().replace('-', '_')}"] = value.strip()
        if not self._tokens.admit(environ.get("HTTP_AUTHORIZATION")):
            refusal = b"HTTP/1.1 401 Unauthorized\r\nWWW-Authenticate: Bearer\r\n"
            return refusal + b"Content-Length: 0\r\nConnection: close\r\n\r\n"
        answer: list[str] = []

        def start(status: str, headers: list[tuple[str, str]]) -> None:
            answer.extend([f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in headers)])

        body = b"".join(self._application(environ, start))
        answer += [f"Content-Length: {len(body)}", "Connection: close", "", ""]
        return "\r\n".join(answer).encode("latin-1") + body


async def _serve(pids: Sequence[int], listener: socket.socket, tokens: Tokens) -> None:
    ended, shown, said = asyncio.Event(), Collector(), bytearray()
    shown.look_at(pids)

    def told() -> None:
        """A line with the workers of now; standard input ends with the service."""
        said.extend(part := os.read(0, 1 << 16))
        *lines, rest = said.split(b"\n")
        said[:] = rest
        if lines:
            shown.look_at(json.loads(lines[-1]))
        if not part:
            ended.set()

    asyncio.get_running_loop().add_reader(0, told)
    await MetricsServer(application(shown), tokens=tokens).serve(
        listener, ended, lambda: print(json.dumps({"metrics": 0}), flush=True)
    )


def main() -> int:
    """Serve until the end of standard input; the listening socket is inherited, the page looked at where it is."""
    options = json.loads(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT):  # those that the whole group gets; the service ends it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a service's real-time policy is not for this
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with socket.socket(fileno=options["listener"]) as listener:
        asyncio.run(_serve(options["pids"], listener, Tokens(options["token_file"])))
    return 0
