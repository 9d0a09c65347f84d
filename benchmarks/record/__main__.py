"""The command: `nnburst bench` with more rows, the budget, and files for the documentation. See `make bench`."""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from nnburst.cli.bench.command import FILE, leaving_when_told, measure, require_figures, row_options, write
from nnburst.cli.targets import checked

from .figure import write_figure
from .report import Record
from .rows import all_cases


def _draw(report: Record, path: Path) -> None:
    c = report.conditions
    caption = (
        f"{c['cpu']}, Linux {c['kernel']}, {c['python']}; client on CPU {c['client_cpu']}, server on CPU "
        f"{c['server_cpu']} unless 'one core'; polling window {c['polling_window_us']:g} µs"
    )
    write_figure(path, report.cases, report.results, caption)


@click.command()
@row_options
@click.option(
    "--png", "png_path", type=FILE, callback=checked, help="Draw the distributions into this file (needs matplotlib)."
)
@click.option(
    "--markdown", "markdown_path", type=FILE, callback=checked, help="Write the tables as Markdown to this file."
)
@leaving_when_told()
def record(json_path: Path | None, png_path: Path | None, markdown_path: Path | None, **options: Any) -> None:
    """Measure every row, and compare the run with the budget of the design. See docs/benchmarks.md."""
    if png_path and find_spec("matplotlib") is None:
        raise click.ClickException("--png needs matplotlib: pip install '.[bench]'")
    report = measure(all_cases(), Record, **options)
    if report is not None:
        writers = (
            (json_path, report.write_json),
            (markdown_path, report.write_markdown),
            (png_path, partial(_draw, report)),
        )
        for path, writer in writers:
            if path:
                write(path, writer)
        require_figures(report.results)


if __name__ == "__main__":
    record()
