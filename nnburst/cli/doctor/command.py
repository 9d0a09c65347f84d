"""Shows the findings."""

from __future__ import annotations

import json
import sys

import click
from rich.console import Console
from rich.table import Table

from .checks import Finding, Level, all_checks, run_check

_MARKS = {Level.OK: "[green]ok[/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[bold red]FAIL[/]"}


@click.command()
@click.argument("devices", nargs=-1, metavar="[DEVICE]...")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def doctor(devices: tuple[str, ...], as_json: bool) -> None:
    """Check whether this machine suits bursts, and recommend remedies.

    Opens each device in a service, with those that are named, such as nnburst-function:call=FILE.py:NAME, and says what
    they need beyond the sandbox; imports each extra, and lists ONNX Runtime's execution providers. Exits with 1 if
    nnburst cannot work here. The last line reads "doctor: ok=… warn=… fail=…".
    """
    findings = {name: run_check(check) for name, check in all_checks(devices).items()}
    counts = {level.name.lower(): 0 for level in Level}
    for finding in findings.values():
        counts[finding.level.name.lower()] += 1
    if as_json:
        rows = [
            {"check": name, "level": finding.level.name.lower(), "found": finding.found, "remedy": finding.remedy}
            for name, finding in findings.items()
        ]
        click.echo(json.dumps({"checks": rows, **counts}, indent=1))
    else:
        _show(findings)
        click.echo("doctor: " + " ".join(f"{level}={count}" for level, count in counts.items()))
    sys.exit(1 if counts["fail"] else 0)


def _show(findings: dict[str, Finding]) -> None:
    table = Table(show_edge=False, pad_edge=False)
    for title in ("", "check", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for name, finding in findings.items():
        # Text that was found is shown as it is: brackets in it are no markup.
        table.add_row(
            _MARKS[finding.level], name, finding.found.replace("[", r"\["), finding.remedy.replace("[", r"\[")
        )
    Console().print(table)
