"""The report of the benchmark of record: the budget, savings, and Markdown for the documentation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from nnburst.cli.bench.report import Report, finite, number
from nnburst.cli.bench.rounds import Case
from nnburst.cli.targets import size

from .budget import MOST_OTHERS, Verdict, verdicts

GROUPS = {
    "a": "(a) cache line, C threads",
    "b": "(b) queue, C threads",
    "c": "(c) queue, Python processes",
    "d": "(d) burst, Python processes",
    "e": "(e) 32-byte echo, Python processes",
    "f": "(f) payload, Python processes",
    "g": "(g) an input of 16 MiB, Python processes",
    "h": "(h) a recurrent step, reference device",
    "i": "(i) the slot table, reference device",
    "j": "(j) compilation caching, reference device",
    "k": "(k) 32 bytes, awaited in an event loop, and several in flight",
    "l": "(l) an ONNX model, the service's interpreter lock free or held",
}
FIGURES = {"p50": "p50_us", "p90": "p90_us", "p99": "p99_us", "p99.9": "p999_us", "max": "max_us"}


@dataclass
class Record(Report):
    """A finished run of the record. `others` is the share of CPU time of other programs and the host."""

    others: float = 0.0

    @property
    def verdicts(self) -> list[Verdict]:
        """The outcome of each promise of the budget."""
        return verdicts(self.results, self.others)

    def savings(self) -> list[str]:
        """Sentences about the savings of the slot table and the cost of verification, if these rows ran."""
        p50 = {key: r.percentiles_us()["p50_us"] for key, r in self.results.items() if r.rounds}
        lines = []
        if {"slot-first", "slot-later"} <= p50.keys():
            a, b = p50["slot-first"], p50["slot-later"]
            lines.append(
                f"(i) a memory that the service knows by its slot saves {a - b:.1f} µs a run ({a:.1f} → {b:.1f} µs)"
            )
        if "cache-hit" in p50:
            (nbytes,) = (case.payload_bytes for case in self.cases if case.key == "cache-hit")
            each = p50["cache-hit"] / (nbytes / (1 << 20)) / 1e3
            lines.append(f"(j) verifying and restoring costs {each:.2f} ms per MiB of cache files")
        return lines

    def show(self, console: Console) -> None:
        """Print the table, the savings and the budget."""
        super().show(console)
        for line in self.savings():
            console.print("  " + line, markup=False, highlight=False)
        console.print("[bold]Budget[/bold] (medians of the same round, median over the rounds)")
        styles = {"pass": "green", "miss": "red", "not settled": "yellow", "not measured": "yellow"}
        for v in self.verdicts:
            style = styles[v.outcome]
            console.print(f"  [{style}]{v.outcome:>12}[/{style}]  {number(v.ratio):>6}  {v.text}", highlight=False)

    def document(self) -> dict[str, Any]:
        """Return the content of the JSON file."""
        budget = [asdict(v) | {"ratio": finite(v.ratio)} for v in self.verdicts]
        return {**super().document(), "others": self.others, "budget": budget}

    def cells(self, case: Case) -> list[str]:
        """Return the cells of a row in a Markdown table."""
        result, placement = self.results[case.key], "one core" if case.one_core else "apart"
        figures, samples = result.percentiles_us(), f"{len(result.samples):,}"
        shown = [*(number(figures[name]) for name in FIGURES.values()), number(self.ratio(case)), samples]
        return [
            case.title,
            case.wait,
            placement,
            size(case.payload_bytes),
            *(shown if result.rounds else [result.note]),
        ]

    def write_markdown(self, path: Path) -> None:
        """Write the tables for `docs/benchmarks.md` and the README (`docs/tables.py --store`)."""
        machine, *conditions = self.conditions
        columns = [*FIGURES, "p50/L", "samples"]
        lines = [f"`python -m benchmarks.record`. {machine}.", ""]
        for letter, title in GROUPS.items():
            if rows := [self.cells(case) for case in self.cases if case.group == letter]:
                lines += [f"**{title}**", "", "| µs | wait | placement | payload | " + " | ".join(columns) + " |"]
                lines += ["|---" * 4 + "|--:" * len(columns) + "|"]
                lines += ["| " + " | ".join([*row, *[""] * (4 + len(columns) - len(row))]) + " |" for row in rows]
                lines.append("")
        conditions.append(
            f"other programs and the host: {self.others:.1%} of the CPU time; verdicts need {MOST_OTHERS:.0%} or less"
        )
        lines += [*self.savings(), *[""][: len(self.savings())]]
        lines += ["Conditions:", "", *(f"- {line}" for line in conditions), ""]
        lines += ["| budget | measured | |", "|---|--:|---|"]
        lines += [f"| {v.text} | {number(v.ratio)} | {v.outcome} |" for v in self.verdicts]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
