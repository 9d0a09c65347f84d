"""Which entries of a cache directory go first."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .entry import EntryInfo

if TYPE_CHECKING:
    from .directory import Cache

_DOWN_TO = 0.8
"""Of the limit; so that not every save evicts."""
_HALF_LIFE = 14 * 86400.0


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
    idle = max(0.0, now - info.used)  # a clock may have been ahead
    return float(max(info.compile_ms, 0.001) * 0.5 ** (idle / _HALF_LIFE) / max(info.nbytes, 1))


def prune(
    cache: Cache,
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
    total, count = sum(info.nbytes for info in there), len(there)

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
    for info in there:
        if info.pinned and not force:
            continue
        if everything:
            go("all", info)
        elif epochs is not None and info.epoch != epochs.get(info.device, info.epoch):
            go("stale", info)
        elif age and info.used < now - age:
            go("expired", info)
        elif max_bytes is None and 0 < limits.max_entry_bytes < info.nbytes:  # a deferred save made it so
            go("too big", info)
        else:
            rest.append(info)
    too_big = total > most and (most or max_bytes == 0)
    too_many = limits.max_entries and count > limits.max_entries
    if too_big or too_many:
        for info in sorted(rest, key=lambda info: (_value(info, now), info.used)):
            fits = not too_big or total <= most * _DOWN_TO
            if fits and (not too_many or count <= limits.max_entries * _DOWN_TO):
                break
            go("evicted", info)
    return done
