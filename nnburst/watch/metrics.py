"""Prometheus metrics from the statistics of a service and its worker processes. Needs the extra ``metrics``."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..errors import NNBurstError
from .reader import Viewer, find_services
from .stats import Histogram, RowKind, RowStats

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
)  # The buckets reach from 1 µs to 5 s, and are as few as monitoring systems want.


class Collector:
    """Collector that reads a service's statistics at each request for metrics, and sums the numbers by model.

    Args:
        pid: Process id of the service.
    """

    def __init__(self, pid: int) -> None:
        self._service = [Viewer(found) for found in find_services(pid)]
        self._workers: dict[int, Viewer] = {}

    def _look_for_workers(self) -> None:
        pids = {row.client_pid for service in self._service for row in service.look().of(RowKind.PROCESS)}
        for pid in self._workers.keys() - pids:
            del self._workers[pid]
        for pid in pids - self._workers.keys():
            with contextlib.suppress(NNBurstError):  # the worker has ended
                self._workers.update((pid, Viewer(found)) for found in find_services(pid))

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        by_model: dict[tuple[str, str], list[RowStats]] = defaultdict(list)
        unreadable = 0
        self._look_for_workers()
        for viewer in self._workers.values():
            try:
                rows = viewer.look().rows
            except NNBurstError:  # a hostile model may control the worker
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
