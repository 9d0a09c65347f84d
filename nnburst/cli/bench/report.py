"""The report of a benchmark, as a table and as a JSON file."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from ..targets import size
from .rounds import Case, allowed_cpus, run
from .sampling import Result

_SHOWN = {"p50": "p50_us", "p99": "p99_us", "max": "max_us"}


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def finite(value: float) -> float | None:
    """Return a number if it is finite, else None: JSON has only finite numbers."""
    return value if math.isfinite(value) else None


@dataclass
class Report:
    """The figures of a finished benchmark.

    Attributes:
        conditions: Lines about the machine and the method.
        title: Title of the table.
        base: The row that ratios are relative to. With None, they are relative to the round trip of a cache line.
    """

    conditions: list[str]
    cases: Sequence[Case]
    results: Mapping[str, Result]
    title: str = "round trip in µs"
    base: str | None = None

    def ratio(self, case: Case) -> float:
        """Return the median of a row's ratios to the base; NaN without ratios."""
        return self.results[case.key].ratio(None if self.base is None else self.results[self.base])

    def show(self, console: Console) -> None:
        """Print the table, and data of the machine."""
        table = Table(self.title, "wait", "payload", box=box.SIMPLE_HEAD, pad_edge=False)
        for name in (*_SHOWN, "ratio" if self.base else "p50/L"):
            table.add_column(name, justify="right", no_wrap=True)
        for case in self.cases:
            figures = self.results[case.key].percentiles_us()
            cells = [number(figures[name]) for name in _SHOWN.values()]
            title = case.title + ", one core" * case.one_core
            table.add_row(title, case.wait, size(case.payload_bytes), *cells, number(self.ratio(case)))
        console.print(table)
        for line in self.conditions:
            console.print("  " + line, markup=False, highlight=False)

    def row(self, case: Case) -> dict[str, Any]:
        """Return a row for the JSON file. The figures are null if the row did not run."""
        result = self.results[case.key]
        return {
            **{name: getattr(case, name) for name in ("key", "title", "group", "wait", "one_core", "payload_bytes")},
            "count": sum(len(r.samples) for r in result.rounds),
            **{name: finite(value) for name, value in result.percentiles_us().items()},
            "ratio": finite(self.ratio(case)),
            "note": result.note,
        }

    def document(self) -> dict[str, Any]:
        return {"conditions": self.conditions, "ratios_to": self.base or "L", "rows": list(map(self.row, self.cases))}

    def write_json(self, path: Path) -> None:
        path.write_text(json.dumps(self.document(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def machine() -> str:
    """Return a line about the machine: processor, kernel, Python."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    named = re.search(r"^(?:model name|Processor|cpu model)\s*: (.*)", text, re.MULTILINE)
    cpu = named.group(1) if named else platform.machine()
    virtual = ", virtual machine" if "hypervisor" in text else ""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return f"{cpu}, {os.cpu_count()} cores{virtual}, Linux {platform.release()}, {python}"


def measure(cases: Sequence[Case], rounds: int, seconds: float) -> tuple[list[str], Sequence[Case], dict[str, Result]]:
    """Measure each case `rounds` times for about `seconds`. Return the arguments of a `Report`."""
    cpus, load = allowed_cpus(), os.getloadavg()[0]
    results = run(cases, rounds, seconds)
    turns = [turn for result in results.values() for turn in result.rounds]
    unsettled = sum(not turn.settled for turn in turns)
    conditions = [
        machine(),
        f"client and server: on CPU {cpus.client} and {cpus.server}; in rows with one core, both on {cpus.client}",
        "poll: a burst polls for 50 µs and then sleeps",
        "block: each wait is a system call",
        f"rounds: {rounds}",
        f"turns that do not count: {unsettled} of {len(turns)}; L changed by more than half, or has no figure",
        f"load average at the start: {load:.2f}; an idle machine is faster",
    ]
    return conditions, cases, results
