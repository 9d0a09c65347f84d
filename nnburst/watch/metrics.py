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
import sys
from collections import defaultdict
from collections.abc import Iterator
from email import message_from_string
from typing import TYPE_CHECKING, Any

from .._core.tokens import EVERYONE, Tokens
from ..errors import NNBurstError
from .reader import Viewer, find_services
from .stats import Histogram, RowKind, RowStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
    """Reads the rows of a service when it is asked for metrics, and sums them by model: a label for each burst would be
    too many.

    Args:
        pid: Of the service.
    """

    def __init__(self, pid: int) -> None:
        self._service = [Viewer(found) for found in find_services(pid)]
        self._workers: dict[int, Viewer] = {}

    def _look_for_workers(self) -> None:
        """Find the processes that the accounts of the service name."""
        pids = {row.client_pid for service in self._service for row in service.look().of(RowKind.PROCESS)}
        for pid in self._workers.keys() - pids:
            del self._workers[pid]
        for pid in pids - self._workers.keys():
            with contextlib.suppress(NNBurstError):  # it has ended
                self._workers.update((pid, Viewer(found)) for found in find_services(pid))

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        by_model: dict[tuple[str, str], list[RowStats]] = defaultdict(list)
        unreadable = 0
        self._look_for_workers()
        for viewer in self._workers.values():
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


class MetricsServer:
    """Answers one request of each connection: whatever is asked for, the metrics.

    Args:
        shown: What `collect` gives.
        most: Connections at once.
        patience: Seconds that a connection has.
        tokens: One of which has to be shown.
    """

    def __init__(
        self, shown: Any, most: int = _MOST_CONNECTIONS, patience: float = _PATIENCE_S, tokens: Tokens = EVERYONE
    ) -> None:
        self._shown = shown
        self._tokens = tokens
        self._most = most
        self._patience = patience
        self._open: dict[asyncio.StreamWriter, None] = {}  # the oldest first

    async def start(self, address: str) -> asyncio.Server:
        """Answer from now on at ``HOST:PORT`` or ``unix:PATH``."""
        if address.startswith("unix:"):
            return await asyncio.start_unix_server(self._connected, address.removeprefix("unix:"), limit=_MOST_HEAD)
        host, _, port = address.rpartition(":")
        return await asyncio.start_server(self._connected, host, int(port), limit=_MOST_HEAD)

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
        from prometheus_client.exposition import choose_encoder

        _, _, fields = (await reader.readuntil(b"\r\n\r\n")).partition(b"\r\n")
        headers = message_from_string(fields.decode("latin-1"))
        if self._tokens.admit(headers["Authorization"]):
            encode, kind = choose_encoder(headers.get("Accept", ""))
            status, more, body = "200 OK", f"Content-Type: {kind}", encode(self._shown)
        else:
            status, more, body = "401 Unauthorized", "WWW-Authenticate: Bearer", b""
        head = f"HTTP/1.1 {status}\r\n{more}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.transport.set_write_buffer_limits(0)  # drain() waits until all has been sent
        writer.write(head.encode() + body)
        await writer.drain()


async def _serve(address: str, tokens: Tokens) -> None:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, ended.set)  # standard input ends with the service
    server = await MetricsServer(Collector(os.getppid()), tokens=tokens).start(address)
    names = [sock.getsockname() for sock in server.sockets]
    print(json.dumps({"metrics": address if address.startswith("unix:") else names[0][1]}), flush=True)
    await ended.wait()


def main() -> int:
    """Serve with the options given as JSON until the end of standard input. Returns the status if it cannot."""
    options = json.loads(sys.argv[1])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # of the whole group; the service ends it
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a service's real-time policy is not for this
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    os.umask(0o077)  # a socket is for this user
    try:
        asyncio.run(_serve(options["metrics"], Tokens(options["token_file"])))
        return 0
    except (OSError, NNBurstError) as error:
        print(json.dumps({"error": f"cannot listen at {options['metrics']}: {error}"}), flush=True)
        return 1
