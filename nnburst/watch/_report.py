"""Reports of a service's activity as plain values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .stats import ACCOUNT, COUNTERS, Histogram, RowKind, RowStats, ServiceStats

_TIMED = ("queue_wait", "execution", "spin")


def report(now: ServiceStats, before: ServiceStats | None = None) -> dict[str, Any]:
    """Return the activity between two snapshots, or since the service started, as JSON values."""
    began = now.since_ns if before is None else before.taken_ns
    old = () if before is None else before.rows

    def part(row: RowStats, rows: Sequence[RowStats], former: Sequence[RowStats]) -> dict[str, Any]:
        return {
            "label": row.label,
            "client_pid": row.client_pid,
            "client_uid": row.client_uid,
            "client_has_left": row.has_left,
            "age_s": _seconds(now.taken_ns - row.since_ns),
            **_numbers(rows, former, now.taken_ns - max(began, row.since_ns)),
        }

    below, old_below = _by_parent(now.of(RowKind.BURST)), _by_parent(old)
    old_by_number = {row.number: [row] for row in old}
    models = []
    for model in now.of(RowKind.MODEL):
        bursts, former = below[model.number], old_by_number.get(model.number, [])
        models.append(
            {
                # This includes bursts that ended between the snapshots.
                **part(model, [model, *bursts], [*former, *old_below[model.number]]),
                "bursts": [part(row, [row], old_by_number.get(row.number, [])) for row in bursts],
            }
        )
    return {
        "name": now.name,
        "pid": now.pid,
        "uid": now.uid,
        "age_s": _seconds(now.taken_ns - now.since_ns),
        "unwatched": now.unwatched,
        **_numbers(now.rows, old, now.taken_ns - began),
        "models": models,
        "clients": _clients(now, models),
    }


def _clients(now: ServiceStats, models: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the resources of each client process's connections, and the load of the process's bursts."""
    clients: dict[int, dict[str, Any]] = {}
    for row in now.of(RowKind.CLIENT):
        new = {"client_pid": row.client_pid, "client_uid": row.client_uid, "client_has_left": True, "connections": 0}
        client = clients.setdefault(row.client_pid, {**new, "busy": 0.0, **dict.fromkeys(ACCOUNT, 0)})
        client["connections"] += 1
        client["client_has_left"] &= row.has_left
        for name in ACCOUNT:
            client[name] += row.counters[name]
    for burst in (burst for model in models for burst in model["bursts"]):
        if (pid := burst["client_pid"]) in clients:
            clients[pid]["busy"] = round(clients[pid]["busy"] + burst["busy"], 4)
    return list(clients.values())


def _by_parent(rows: Iterable[RowStats]) -> Mapping[int, list[RowStats]]:
    found: dict[int, list[RowStats]] = defaultdict(list)
    for row in rows:
        found[row.parent].append(row)
    return found


def _numbers(rows: Sequence[RowStats], former: Sequence[RowStats], ns: int) -> dict[str, Any]:
    """Return the differences of all numbers between `former` and `rows`, which are `ns` nanoseconds apart."""
    counters = {
        # The difference could be negative: a snapshot can miss a row that ends at that moment.
        name: max(0, sum(row.counters[name] for row in rows) - sum(row.counters[name] for row in former))
        for name in COUNTERS
    }
    timed = {name: _sum(rows, name).since(_sum(former, name)) for name in _TIMED}
    return {
        "seconds": _seconds(ns),
        "executions_per_s": round(counters["results"] / ns * 1e9, 3) if ns > 0 else 0.0,
        "busy": round(timed["execution"].sum_ns / ns, 4) if ns > 0 else 0.0,
        "counters": counters,
        **{name: histogram.summary() for name, histogram in timed.items()},
    }


def _sum(rows: Iterable[RowStats], name: str) -> Histogram:
    return sum((getattr(row, name) for row in rows), Histogram())


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 3)
