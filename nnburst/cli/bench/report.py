"""What a run says: the table on screen, the JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rich import box
from rich.console import Console
from rich.table import Table

from .case import Case
from .models import size_name
from .placement import ONE_CORE
from .sampling import Result

_COLUMNS = ("p50_us", "p90_us", "p99_us", "p999_us", "max_us")
_WIDE = 112  # characters that the whole table needs
MOST_OTHERS = 0.05
"""Share of the CPUs' time beyond which others disturb too many turns; an idle machine has about 0.01."""
GROUPS = {
    "a": "(a) cache line, C threads",
    "d": "(d) burst, Python processes",
    "e": "(e) 32-byte echo, Python processes",
    "f": "(f) payload, Python processes",
    "k": "(k) 32 bytes, awaited in an event loop, and several in flight",
}


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None


def _figure(column: str) -> Callable[[Result], str]:
    return lambda result: number(result.percentiles_us()[column])


FIGURES: dict[str, Callable[[Result], str]] = {
    "p50": _figure("p50_us"),
    "p90": _figure("p90_us"),
    "p99": _figure("p99_us"),
    "p99.9": _figure("p999_us"),
    "max": _figure("max_us"),
    "p50/L": lambda result: number(result.ratio_to_line()),
    "samples": lambda result: f"{len(result.samples):,}",
}
_NARROW_FIGURES = ("p50", "p99", "max", "p50/L")


def machine(conditions: Mapping[str, Any]) -> str:
    """Say where it was measured."""
    c = conditions
    virtual = ", virtual machine" if c["virtual_machine"] else ""
    return f"{c['cpu']}, {c['cores']} cores{virtual}, Linux {c['kernel']}, {c['python']}"


def notes(results: Mapping[str, Result], failed: bool) -> list[str]:
    """Return the notes of rows that have failed, or of the others. Rows with the same note share a line."""
    keys: dict[str, list[str]] = {}
    for key, result in results.items():
        if result.note and result.failed == failed:
            keys.setdefault(result.note, []).append(key)
    return [f"{', '.join(named)}: {note}" for note, named in keys.items()]


def show_notes(console: Console, results: Mapping[str, Result]) -> None:
    """Print why rows have no figures, or fewer. The command ends with those that have failed."""
    for note in notes(results, failed=False):
        console.print(note, style="yellow", markup=False, highlight=False)


def write_document(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Report:
    """A finished run.

    Attributes:
        conditions: Machine, placement and amount, by name.
        groups: Titles of the paragraphs of the table, by letter.
    """

    conditions: Mapping[str, Any]
    cases: Sequence[Case]
    results: Mapping[str, Result]
    groups: ClassVar[Mapping[str, str]] = GROUPS

    def paragraphs(self) -> Iterator[tuple[str, list[Case]]]:
        for letter, title in sorted(self.groups.items()):
            rows = [case for case in self.cases if case.group == letter]
            if rows:
                yield title, rows

    def words(self) -> list[str]:
        c = self.conditions
        return [
            machine(c),
            f"client on CPU {c['client_cpu']}, server on CPU {c['server_cpu']} (one core: both on the client's); "
            "every thread of both processes pinned",
            f"polling window {c['polling_window_us']:g} µs; block means window 0, so every wait is a system call",
            f"{c['rounds']} rounds in turns, L measured before and after each turn; {c['unsettled_turns']} of "
            f"{c['turns']} turns saw L change by more than 1.5, or no L at all, and are left out of the ratios",
            f"each sample contains one clock reading: {c['c_clock_ns']:.0f} ns in C, in Python "
            f"{c['python_timer_ns']:.0f} ns with the loop and a call that does nothing; nothing is subtracted",
            f"bytecode: {c['bytecode']}",
            f"load average at the start {c['load_average_at_start']}; other programs and the host had "
            f"{c['others']:.1%} of the two CPUs' time (above {MOST_OTHERS:.0%} they disturb too many turns)",
        ]

    def show(self, console: Console) -> None:
        """Print the table and the conditions. A narrow terminal gets fewer columns."""
        figures = FIGURES if console.width >= _WIDE else {name: FIGURES[name] for name in _NARROW_FIGURES}
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=False)
        table.add_column("round trip in µs")
        for name in ("wait", "payload"):
            table.add_column(name, no_wrap=True)
        for name in figures:
            table.add_column(name, justify="right", no_wrap=True)
        for title, rows in self.paragraphs():
            table.add_section()
            table.add_row(title, style="bold")
            for case in rows:
                result = self.results[case.key]
                where = ", one core" if case.placement == ONE_CORE else ""
                values = [text(result) for text in figures.values()] if result.rounds else ["-"]
                style = None if result.rounds else "dim"
                table.add_row(f"  {case.title}{where}", case.wait, size_name(case.payload_bytes), *values, style=style)
        console.print(table)
        show_notes(console, self.results)
        console.print("[bold]Conditions[/bold]")
        for line in self.words():
            console.print("  " + line, markup=False, highlight=False)

    def row(self, case: Case) -> dict[str, Any]:
        """Return one row of the JSON file; the figures are null if it did not run."""
        result = self.results[case.key]
        figures: dict[str, float | None] = dict.fromkeys((*_COLUMNS, "ratio_to_L"))
        if result.rounds:
            figures |= result.percentiles_us()
            figures["ratio_to_L"] = finite(result.ratio_to_line())
        return {
            "name": case.key,
            "title": case.title,
            "group": case.group,
            "wait": case.wait,
            "placement": case.placement,
            "payload_bytes": case.payload_bytes,
            "count": sum(len(r.samples) for r in result.rounds),
            **figures,
            "note": result.note,
            "rounds": [
                {
                    "count": len(r.samples),
                    "p50_us": finite(r.p50 / 1e3),
                    "L_before_us": finite(r.line_before / 1e3),
                    "L_after_us": finite(r.line_after / 1e3),
                    "settled": r.settled,
                }
                for r in result.rounds
            ],
        }

    def document(self) -> dict[str, Any]:
        return {"conditions": dict(self.conditions), "rows": [self.row(c) for c in self.cases]}

    def write_json(self, path: Path) -> None:
        write_document(path, self.document())
