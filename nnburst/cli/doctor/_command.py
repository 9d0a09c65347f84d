"""Shows the findings."""

from __future__ import annotations

import sys

import click
from rich.console import Console
from rich.table import Table

from ._checks import CHECKS, Level, run_check

__all__ = ["doctor"]

_MARKS = {Level.OK: "[green]ok[/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[bold red]FAIL[/]"}


@click.command()
def doctor() -> None:
    """Check what this machine offers a burst, and say what to do about what it lacks.

    Exits with 1 if nnburst cannot work here. The last line reads "doctor: ok=… warn=… fail=…".
    """
    table = Table(show_edge=False, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    counts = dict.fromkeys(Level, 0)
    for name, check in CHECKS.items():
        finding = run_check(check)
        counts[finding.level] += 1
        # Text that was found is shown as it is: brackets in it are no markup.
        table.add_row(
            _MARKS[finding.level], name, finding.found.replace("[", r"\["), finding.remedy.replace("[", r"\[")
        )
    Console().print(table)
    click.echo("doctor: " + " ".join(f"{level.name.lower()}={count}" for level, count in counts.items()))
    sys.exit(1 if counts[Level.FAIL] else 0)
