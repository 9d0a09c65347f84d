"""The command: options in, table and files out."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from ..others import tell_of_others, watch_others
from ..targets import checked, writing

if TYPE_CHECKING:
    from .case import Case
    from .report import Report
    from .sampling import Result

R = TypeVar("R", bound="Report")

_Writer = Callable[[Path], object]

FILE = click.Path(path_type=Path)


@contextmanager
def leaving_when_told() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end a run as Ctrl-C does: its servers end, and its files go."""

    def leave(signum: int, frame: FrameType | None) -> NoReturn:
        for each in handled:
            signal.signal(each, signal.SIG_IGN)  # another one would interrupt the leaving
        raise SystemExit(128 + signum)

    handled = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for each in handled:
        signal.signal(each, leave)
    try:
        yield
    finally:
        for each in handled:
            signal.signal(each, signal.SIG_DFL)


def row_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options that choose rows, and how much is measured of them."""
    options = (
        click.option("--quick", is_flag=True, help="A tenth of the samples: half a minute, for a first look."),
        click.option(
            "--count", type=click.IntRange(10), default=None, help="Samples per row [default: 20000, quick: 2000]."
        ),
        click.option("--rounds", type=click.IntRange(1), default=None, help="Turns per row [default: 20, quick: 3]."),
        click.option(
            "--only", "only", multiple=True, metavar="NAME",
            help="Rows by name (* allowed) or letter (a-k); may be repeated.",
        ),
        click.option("--list", "list_rows", is_flag=True, help="List the names of the rows and leave."),
        click.option(
            "--polling-window", type=click.FloatRange(0, min_open=True), default=50.0, show_default=True,
            help="Microseconds that the polling burst rows look before they sleep.",
        ),
        click.option(
            "--json", "json_path", type=FILE, callback=checked, help="Write rows and conditions to this file."
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


@click.command()
@row_options
@click.option("--model", "model", type=click.Path(dir_okay=False), help="Measure this ONNX model instead, five ways.")
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="ONNX Runtime threads (--model).")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,…", help="Shape of an input (--model).")
@click.option(
    "--clients", type=click.IntRange(1, 256), metavar="N",
    help="Measure what 1, 2, 4 … N programs get of one service that they share, instead.",
)  # fmt: skip
@click.option("--bursts", type=click.IntRange(1, 16), default=1, show_default=True, help="Of each program (--clients).")
@click.option(
    "--batch", type=click.IntRange(2, 128), default=32, show_default=True, metavar="N",
    help="Rows that run as one (--clients --model: what programs get of the model with batches and without).",
)  # fmt: skip
@click.option(
    "--batch-wait", "wait", default="1ms", show_default=True, metavar="TIME", help="What a row waits, as 1ms."
)
@leaving_when_told()
def bench(
    quick: bool,
    count: int | None,
    rounds: int | None,
    only: tuple[str, ...],
    list_rows: bool,
    polling_window: float,
    model: str | None,
    threads: int,
    shapes: tuple[str, ...],
    clients: int | None,
    bursts: int,
    batch: int,
    wait: str,
    json_path: Path | None,
) -> None:
    """Measure latencies side by side with other ways to call a process.

    Round trips over one cache line, a burst, and the peers that are installed, in turns, so that all of them meet the
    same machine. docs/benchmarks.md says how each row is measured.
    """
    if bursts != 1 and clients is None:
        raise click.UsageError("--bursts goes with --clients")
    turns, seconds = (1, 0.5) if quick else (5, 1.0)
    others = watch_others(os.sched_getaffinity(0))
    writer: _Writer
    results: Mapping[str, Result] = {}
    if model is not None and clients is not None:
        if only or list_rows or bursts != 1:
            raise click.UsageError("--clients --model goes with --quick, --shape, --batch, --batch-wait and --json")
        writer = _bench_rows(model, shapes, clients, batch, wait, seconds, turns)
    elif model is not None:
        if only or list_rows:
            raise click.UsageError("--model goes with --quick, --count, --rounds, --threads, --shape and --json")
        writer, results = _bench_model(model, threads, shapes, _plan(quick, count, rounds), polling_window / 1e6)
    elif clients is not None:
        if only or list_rows:
            raise click.UsageError("--clients goes with --quick, --bursts and --json")
        writer = _bench_clients(clients, bursts, turns, seconds)
    else:
        from .report import Report
        from .rows import all_cases

        report = measure(all_cases(), Report, only, list_rows, quick, count, rounds, polling_window)
        if report is None:
            return
        writer, results = report.write_json, report.results
    tell_of_others(others())
    if json_path:
        write(json_path, writer)
    require_figures(results)


def write(path: Path, writer: _Writer) -> None:
    with writing(path):
        writer(path)
    click.echo(f"wrote {path}", err=True)


def require_figures(results: Mapping[str, Result]) -> None:
    """End with an error if a row that can run here has no figures."""
    from .report import notes

    failed = notes(results, failed=True)
    if failed:
        raise click.ClickException("\n".join(["these rows could not be measured:", *failed]))


def measure(
    cases: tuple[Case, ...],
    kind: type[R],
    only: tuple[str, ...],
    list_rows: bool,
    quick: bool,
    count: int | None,
    rounds: int | None,
    polling_window: float,
) -> R | None:
    """Do what `row_options` say with rows: list them, or measure them and show the report.

    Raises:
        click.BadParameter: There is no such row.
    """
    from .rows import select

    chosen = select(cases, only)
    if not chosen:
        raise click.BadParameter(f"no row matches {', '.join(only)}; --list shows the names", param_hint="--only")
    if list_rows:
        for case in chosen:
            click.echo(f"{case.key:20} ({case.group}) {case.title}, {case.wait}, {case.placement}")
        return None
    report = kind(*_measured(chosen, _plan(quick, count, rounds), polling_window / 1e6))
    report.show(_console())
    return report


def _console() -> Any:
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=120)  # a pipe or a file has no width: every column


def _plan(quick: bool, count: int | None, rounds: int | None) -> Any:
    from .schedule import Plan

    return Plan(rounds or (3 if quick else 20), count or (2_000 if quick else 20_000), 0.04 if quick else 0.12)


def _bench_clients(most: int, bursts: int, turns: int, seconds: float) -> _Writer:
    from .clients import HEAD, as_json, measure_shares, medians, show

    measured = []
    for turn in range(turns):
        click.echo(f"turn {turn + 1} of {turns}", err=True)
        measured.append(list(measure_shares(most, seconds, bursts)))
    shares = medians(measured, lambda share: share.rate)
    click.echo(HEAD)
    for share in shares:
        click.echo(show(share))
    return lambda path: path.write_text(as_json(shares) + "\n", encoding="utf-8")


def _bench_rows(
    model: str, shapes: tuple[str, ...], most: int, batch: int, wait: str, seconds: float, turns: int
) -> _Writer:
    from ..tensors import parse_shapes
    from .batched import HEAD, as_json, gain, measure_rows, show
    from .clients import medians, numbers_up_to

    measured = []
    numbers = list(numbers_up_to(most))
    for pairs in measure_rows(model, parse_shapes(shapes), numbers, batch, wait, seconds, turns):
        measured.append(pairs)
        click.echo(f"turn {len(measured)} of {turns}", err=True)
    click.echo(HEAD)
    for pair in medians(measured, gain):
        click.echo(show(pair))
    return lambda path: path.write_text(as_json(measured) + "\n", encoding="utf-8")


def _bench_model(
    model: str, threads: int, shapes: tuple[str, ...], plan: Any, polling_window: float
) -> tuple[_Writer, Mapping[str, Result]]:
    from ..tensors import parse_shapes
    from .model import Contest, run_contest

    report = run_contest(Contest(model, threads, parse_shapes(shapes)), plan, polling_window)
    report.show(_console())
    return report.write_json, report.results


def _measured(
    cases: tuple[Case, ...], plan: Any, polling_window: float
) -> tuple[dict[str, Any], tuple[Case, ...], dict[str, Result]]:
    """Run the rows, and return everything that is known."""
    from .placement import allowed_cpus, conditions
    from .sampling import c_clock_overhead, time_calls
    from .schedule import run_all

    cpus = allowed_cpus()
    known = conditions(cpus, polling_window)
    known |= {"rounds": plan.rounds, "count": plan.count, "turn_seconds": plan.turn_seconds}
    known["c_clock_ns"] = c_clock_overhead()
    known["python_timer_ns"] = float(sorted(time_calls(lambda: None, 2001))[1000])
    others = watch_others({cpus.client, cpus.server})
    results = run_all(cases, cpus, plan, polling_window)
    known["others"] = others()
    turns = [turn for result in results.values() for turn in result.rounds]
    known |= {"turns": len(turns), "unsettled_turns": sum(not turn.settled for turn in turns)}
    return known, cases, results
