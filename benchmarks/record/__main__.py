"""The command of the benchmark of record: more rows than `nnburst bench`, the budget, and files. See `make bench`."""

from __future__ import annotations

from pathlib import Path

import click

from nnburst.cli.bench.command import FILE, finish, rounds_and_seconds, row_options
from nnburst.cli.bench.report import measure
from nnburst.cli.bench.rounds import allowed_cpus

from .others import watch_others
from .report import Record
from .rows import all_cases, select


@click.command()
@row_options
@click.option("--only", multiple=True, metavar="NAME", help="Rows by name (* allowed) or letter; may be repeated.")
@click.option("--markdown", "markdown_path", type=FILE, help="Write the tables as Markdown to this file.")
def record(
    quick: bool,
    rounds: int | None,
    only: tuple[str, ...],
    json_path: Path | None,
    markdown_path: Path | None,
) -> None:
    """Measure every row, and compare the ratios with the budget of the design. See docs/benchmarks.md."""
    cases, others = select(all_cases(), only), watch_others(set(allowed_cpus()))
    conditions, _, results = measure(cases, *rounds_and_seconds(quick, rounds))
    report = Record(conditions, cases, results, others=others())
    finish(report, {json_path: report.write_json, markdown_path: report.write_markdown})


if __name__ == "__main__":
    record()
