"""Which entries of a cache directory go first."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .index import EntryInfo
from .limits import Limits

_DOWN_TO = 0.8
"""Of the limit; so that not every save evicts."""
_HALF_LIFE = 14 * 86400.0


class Prunable(Protocol):
    """What `prune` asks of a cache directory."""

    limits: Limits

    def litter(self) -> list[str]: ...
    def sweep(self, names: Sequence[str]) -> int: ...
    def entries(self) -> list[EntryInfo]: ...
    def remove(self, entry: str, generation: str) -> int: ...


@dataclass
class Pruned:
    """Entries and bytes that a pass removed, by class, and entries that it could not."""

    entries: dict[str, int] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)
    busy: int = 0

    def add(self, kind: str, nbytes: int) -> None:
        self.entries[kind] = self.entries.get(kind, 0) + 1
        self.nbytes[kind] = self.nbytes.get(kind, 0) + nbytes


def _value(info: EntryInfo, now: float) -> float:
    """Milliseconds that an entry saves per byte, decaying since it was last used."""
    idle = max(0.0, now - max(info.last_hit, info.created))  # a clock may have been ahead
    kept = float(0.5 ** (idle / _HALF_LIFE))
    return max(info.saves_ms, 0.001) * (1 + info.hits) * kept / max(info.nbytes, 1)


_POLICIES: dict[str, Callable[[EntryInfo, float], float]] = {
    "value": _value,
    "lru": lambda info, now: float(max(info.last_hit, info.created)),
}


def prune(
    cache: Prunable,
    *,
    max_bytes: int | None = None,
    max_age: float | None = None,
    epochs: Mapping[str, str] | None = None,
    everything: bool = False,
    force: bool = False,
    dry_run: bool = False,
) -> Pruned:
    """Remove stale, leftover and expired entries, then the least valuable ones until the rest fits.

    Args:
        max_bytes: Instead of its limit; entries go until 80 % of it are left. 0: as many as are not in use.
        max_age: Seconds since the last use, instead of its limit.
        epochs: Hex epoch by device name; entries of another epoch are stale.
        force: Pinned entries, too.
        dry_run: Only say what would go.
    """
    limits, now, done = cache.limits, time.time(), Pruned()
    most = limits.max_bytes if max_bytes is None else max_bytes
    age = limits.max_age if max_age is None else max_age
    litter = cache.litter()
    if litter:
        done.entries["litter"] = len(litter)
        done.nbytes["litter"] = 0 if dry_run else cache.sweep(litter)
    there = cache.entries()
    left = [info for info in there if force or not info.pinned]
    total = sum(info.nbytes for info in there)
    count = len(there)

    def go(kind: str, info: EntryInfo) -> None:
        nonlocal total, count
        freed = info.nbytes if dry_run else cache.remove(info.entry, info.generation)
        if freed < 0:
            done.busy += 1
            return
        done.add(kind, info.nbytes)
        total -= info.nbytes
        count -= 1

    rest = []
    for info in left:
        used = max(info.last_hit, info.created)
        if everything:
            go("all", info)
        elif epochs is not None and info.epoch != epochs.get(info.device, info.epoch):
            go("stale", info)
        elif age and used < now - age:
            go("expired", info)
        elif max_bytes is None and 0 < limits.max_entry_bytes < info.nbytes:  # a deferred save made it so
            go("too big", info)
        else:
            rest.append(info)
    too_big = total > most and (most or max_bytes == 0)
    too_many = limits.max_entries and count > limits.max_entries
    if not everything and (too_big or too_many):
        order = _POLICIES.get(limits.policy, _value)
        for info in sorted(rest, key=lambda info: (order(info, now), info.last_hit)):
            fits = total <= most * _DOWN_TO or not too_big
            if fits and not (limits.max_entries and count > limits.max_entries * _DOWN_TO and too_many):
                break
            go("evicted", info)
    return done
