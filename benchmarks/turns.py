"""Measurement of calls in turns, and rows of figures with verdicts."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def in_turns(calls: dict[str, Callable[[], object]], seconds: float, warm_up: int = 20) -> dict[str, float]:
    """Measure calls in twenty turns each. Return the median time of each call in seconds."""
    laps: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(warm_up):
            call()
    gc.disable()
    for _ in range(20):
        for name, call in calls.items():
            end = time.perf_counter() + seconds / 20
            call()
            began = time.perf_counter()
            while began < end or not laps[name]:
                call()
                began, before = time.perf_counter(), began
                laps[name].append(began - before)
    gc.enable()
    return {name: float(np.median(times)) for name, times in laps.items()}


class Verdicts:
    """Rows of figures. The figure `kept` of each row is True if its limit is kept."""

    def __init__(self) -> None:
        self._rows: dict[str, dict[str, Any]] = {}

    def show(self, row: str, figures: dict[str, Any]) -> None:
        """Print a row."""
        self._rows[row] = figures
        numbers = ", ".join(
            f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}"
            for name, value in figures.items()
            if name != "kept"
        )
        print(f"{row}: {numbers}: {'kept' if figures['kept'] else 'MISSED'}", flush=True)

    def finish(self, path: Path | None) -> int:
        """Write the rows as JSON, if a path is given. Return the exit status."""
        if path:
            path.write_text(json.dumps(self._rows, indent=1) + "\n", encoding="utf-8")
        return int(not all(figures["kept"] for figures in self._rows.values()))
