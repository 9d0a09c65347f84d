"""The `nnburst bench` command."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from .report import Report

FILE = click.Path(dir_okay=False, writable=True, path_type=Path)


def row_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add options to a command: the number of rounds, and the output file."""
    for option in (
        click.option("--json", "json_path", type=FILE, help="Write the table, and the machine's data, to this file."),
        click.option("--rounds", type=click.IntRange(1), help="Measurements of each row [default: 20, quick: 3]."),
        click.option("--quick", is_flag=True, help="Measure in fewer and shorter turns."),
    ):
        command = option(command)
    return command


@click.command()
@row_options
@click.option("--model", type=click.Path(dir_okay=False), help="Instead, measure five ways to run this ONNX model.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="Threads that run the model.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,…", help="Shape of an input for --model.")
def bench(
    quick: bool, rounds: int | None, model: str | None, threads: int, shapes: tuple[str, ...], json_path: Path | None
) -> None:
    """Compare the latency of calls with the round trip of a cache line between two CPUs.

    With --model, compare ways to run a model.

    The page "Benchmarks" explains each row.
    """
    from ..tensors import parse_shapes
    from .model import Contest
    from .report import Report, measure
    from .rows import all_cases

    much = rounds_and_seconds(quick, rounds)
    if model is None:
        report = Report(*measure(all_cases(), *much))
    else:
        report = Contest(model, threads, parse_shapes(shapes)).measure(*much)
    finish(report, {json_path: report.write_json})


def rounds_and_seconds(quick: bool, rounds: int | None) -> tuple[int, float]:
    """Return the number of rounds, and the seconds for each row in a round."""
    return rounds or (3 if quick else 20), 0.04 if quick else 0.12


def finish(report: Report, files: Mapping[Path | None, Callable[[Path], object]]) -> None:
    """Show a report and write its files. Raise an error if a row of the table was not measured."""
    from rich.console import Console

    console = Console()
    report.show(console if console.is_terminal else Console(width=120))  # pipes and files have no width
    for path, write in files.items():
        if path is not None:
            write(path)
            click.echo(f"wrote {path}", err=True)
    if failed := [f"{key}: {result.note}" for key, result in report.results.items() if result.note]:
        raise click.ClickException("\n".join(["these rows could not be measured:", *failed]))
