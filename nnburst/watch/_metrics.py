"""The page of a service for Prometheus, over HTTP on the loopback interface. Needs the extra ``metrics``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..errors import BadState, DeviceUnavailable
from ._page import Page
from ._stats import Histogram, RowKind, RowStats

if TYPE_CHECKING:
    from prometheus_client.core import Metric

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
}
_TIMED = {
    "queue_wait": "Time from a client's send until a thread took the request.",
    "execution": "Time from there until the answer.",
    "spin": "Time that a thread polled before a request came or it slept.",
}
_BOUNDS_NS = tuple(
    scale * 10**power for power in range(3, 10) for scale in (1, 2, 5)
)  # 1 µs to 5 s, where the buckets of a page are not too many for a monitoring system


class _Collector:
    """Reads the rows when it is asked for metrics, and sums them by model: a label for each burst would be too many."""

    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        rows = self._page.look()
        labels = {row.number: row.label for row in rows if row.kind is RowKind.MODEL}
        by_model: dict[str, list[RowStats]] = defaultdict(list)
        for row in rows:
            by_model[labels.get(row.number) or labels.get(row.parent, "")].append(row)
        for name, text in _HELP.items():
            counter = CounterMetricFamily(f"nnburst_{name}", text, labels=["model"])
            for model, members in by_model.items():
                counter.add_metric([model], sum(row.counters[name] for row in members))
            yield counter
        for name, text in _TIMED.items():
            family = HistogramMetricFamily(f"nnburst_{name}_seconds", text, labels=["model"])
            for model, members in by_model.items():
                histogram = sum((getattr(row, name) for row in members), Histogram())
                family.add_metric([model], list(_cumulative(histogram)), sum_value=histogram.sum_ns / 1e9)
            yield family
        for kind, what in ((RowKind.MODEL, "models"), (RowKind.BURST, "bursts")):
            gauge = GaugeMetricFamily(f"nnburst_open_{what}", f"Open {what}.")
            gauge.add_metric([], sum(row.kind is kind for row in rows))
            yield gauge


def _cumulative(histogram: Histogram) -> Iterator[tuple[str, float]]:
    left = list(histogram.buckets)
    total = 0
    for bound in _BOUNDS_NS:
        while left and left[0][0] < bound:
            total += left.pop(0)[1]
        yield repr(bound / 1e9), total
    yield "+Inf", total + sum(n for _, n in left)


@contextmanager
def exporting(page: Page, port: int) -> Iterator[int]:
    """Answer Prometheus while the block runs.

    Args:
        page: Of this process.
        port: Of 127.0.0.1; 0 for any that is free.

    Yields:
        The port.

    Raises:
        DeviceUnavailable: The extra is not installed.
        BadState: The port is taken.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise DeviceUnavailable("--metrics needs prometheus-client: pip install 'nnburst[metrics]'") from error
    registry = CollectorRegistry()
    collector: Any = _Collector(page)
    registry.register(collector)
    try:
        server, thread = start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise BadState(f"metrics cannot be served at port {port}: {error.strerror or error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
