"""What the record says beyond `nnburst bench`: the budget, what is saved, Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from nnburst.cli.bench.models import size_name
from nnburst.cli.bench.report import FIGURES, GROUPS, Report, finite, machine, number

from .budget import Verdict, verdicts


class Record(Report):
    """A finished run of all rows."""

    groups: ClassVar[Mapping[str, str]] = GROUPS | {
        "b": "(b) queue, C threads",
        "c": "(c) queue, Python processes",
        "g": "(g) an input of 16 MiB, Python processes",
        "h": "(h) a recurrent step, reference device",
        "i": "(i) the slot table, reference device",
        "j": "(j) compilation caching, reference device",
        "l": "(l) an ONNX model, a thread of its service with the lock",
    }

    @property
    def verdicts(self) -> list[Verdict]:
        """The budget."""
        return verdicts(self.results, self.conditions["others"])

    def savings(self) -> list[str]:
        """What the slot table saves and what verifying costs, in words, if the rows ran."""
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
        """Print also what is saved, and the budget."""
        super().show(console)
        for line in self.savings():
            console.print("  " + line, markup=False, highlight=False)
        console.print("[bold]Budget[/bold] (medians of the same round, median over the rounds)")
        styles = {"pass": "green", "miss": "red", "not settled": "yellow", "not measured": "yellow"}
        for v in self.verdicts:
            style = styles[v.outcome]
            console.print(f"  [{style}]{v.outcome:>12}[/{style}]  {number(v.ratio):>6}  {v.text}", highlight=False)

    def document(self) -> dict[str, Any]:
        """Return what the JSON file holds."""
        return {**super().document(), "budget": [asdict(v) | {"ratio": finite(v.ratio)} for v in self.verdicts]}

    def write_markdown(self, path: Path) -> None:
        """Write the tables as `docs/benchmarks.md` and the README show them (`docs/tables.py --store`)."""
        lines = [f"`python -m benchmarks.record`. {machine(self.conditions)}.", ""]
        for title, rows in self.paragraphs():
            lines += [f"**{title}**", "", "| µs | wait | placement | payload | " + " | ".join(FIGURES) + " |"]
            lines += ["|---" * 4 + "|--:" * len(FIGURES) + "|"]
            for case in rows:
                named = [case.title, case.wait, case.placement, size_name(case.payload_bytes)]
                result = self.results[case.key]
                cells = [text(result) for text in FIGURES.values()] if result.rounds else [result.note]
                cells += [""] * (len(FIGURES) - len(cells))
                lines.append("| " + " | ".join([*named, *cells]) + " |")
            lines.append("")
        lines += [*self.savings(), *[""][: len(self.savings())]]
        lines += ["Conditions:", "", *(f"- {line}" for line in self.words()), ""]
        lines += ["| budget | measured | |", "|---|--:|---|"]
        lines += [f"| {v.text} | {number(v.ratio)} | {v.outcome} |" for v in self.verdicts]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
