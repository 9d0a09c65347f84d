"""The command: sets the contenders up, lets them race, and reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import click
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ...burst import default_polling_window
from ...runtime import launch
from ..others import tell_of_others, watch_others
from ..targets import checked
from .contenders import BurstContender, Contender, InProcessContender, PipeContender
from .network import Digits, build_model, load_digits
from .race import PERCENTILES, WARM_UP, Lap, race

NOOP = "nnburst-noop"
BURST, PIPE, LOCAL = "burst to the service", "multiprocessing.Pipe", "in this process"
BURST_ALONE, PIPE_ALONE = "burst, no-op device", "Pipe, no-op device"


@click.command()
@click.option("--passes", type=click.IntRange(min=1), default=8, show_default=True, help="Times all images are run.")
@click.option("--device", default="nnburst-reference", show_default=True, help="Device that runs the network.")
@click.option(
    "--polling-window",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="How long a burst polls before it sleeps; 0 never polls.  [default: 50e-6 with two CPUs or more, else 0]",
)
@click.option(
    "--save",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=checked,
    metavar="FILE",
    help="Write a model to try things with instead, digits.onnx or detector.onnx, and an input for it (.npy).",
)
def demo(passes: int, device: str, polling_window: float | None, file: Path | None) -> None:
    """Classify 1,797 real handwritten digits in an isolated service process, one image per execution.

    Compares the burst with multiprocessing.Pipe and with in-process execution. Exits with 1 if any answer differs,
    in any bit, from in-process execution of the same model.

    \b
    nnburst demo --save digits.onnx
    nnburst run digits.onnx --input image=digits.npy
    """
    if file is not None:
        _save(file)
        return
    digits, others = load_digits(), watch_others(os.sched_getaffinity(0))
    laps = _run(digits, passes, device, polling_window)
    _report(digits, laps, passes, device, polling_window)
    tell_of_others(others())
    differences = [difference for lap in laps.values() for difference in lap.differences]
    if differences:
        raise click.ClickException(
            f"{len(differences)} answers differ from in-process execution of the same model; first: {differences[0]}"
        )
    p50, _, p99, _ = laps[BURST].percentiles_us()
    click.echo(
        f"demo: accuracy={digits.accuracy(laps[BURST].answers, held_out_only=True):.4f} p50_us={p50:.1f} "
        f"p99_us={p99:.1f} transport_p50_us={laps[BURST_ALONE].percentiles_us()[0]:.1f} "
        f"pipe_p50_us={laps[PIPE].percentiles_us()[0]:.1f}"
    )


def _save(file: Path) -> None:
    from .save import save  # which needs ONNX

    beside = save(file)
    click.echo(f"{file} is written, with an input; now: nnburst run {file} --input image={beside}")


def _run(digits: Digits, passes: int, device: str, polling_window: float | None) -> dict[str, Lap]:
    model = build_model()
    with ExitStack() as stack:
        local = stack.enter_context(closing(InProcessContender(device, model)))
        expected = np.stack([local.classify_unbound(image) for image in digits.images])
        service = stack.enter_context(launch(devices=tuple(dict.fromkeys((device, NOOP)))))
        contenders: dict[str, Contender] = {
            BURST: stack.enter_context(closing(BurstContender(service, model, device, polling_window))),
            PIPE: stack.enter_context(closing(PipeContender(device))),
            LOCAL: local,
            BURST_ALONE: stack.enter_context(closing(BurstContender(service, model, NOOP, polling_window))),
            PIPE_ALONE: stack.enter_context(closing(PipeContender(NOOP))),
        }
        with _progress(len(contenders) * passes * len(digits.images)) as advance:
            return race(contenders, digits.images, dict.fromkeys((BURST, PIPE, LOCAL), expected), passes, advance)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str, int], None]]:
    """Give what draws the bar when asked: a drawing thread would disturb the measurement."""
    console = Console(stderr=True)
    columns = TextColumn("{task.description:<21}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, auto_refresh=False, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda name, count: progress.update(task, advance=count, description=name, refresh=True)


def _report(digits: Digits, laps: dict[str, Lap], passes: int, device: str, polling_window: float | None) -> None:
    answers = laps[BURST].answers
    console = Console()
    console.print(
        f"{len(digits.labels)} handwritten digits on {device}: "
        f"accuracy {digits.accuracy(answers, held_out_only=False):.2%} of all, "
        f"{digits.accuracy(answers, held_out_only=True):.2%} of the {int(digits.held_out.sum())} held out",
        soft_wrap=True,
    )
    table = Table(title="one image per call: hand over, run, copy the answer (µs)", title_justify="left")
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile:g}", justify="right")
    for title, names in (("whole call", (BURST, PIPE, LOCAL)), ("transport alone", (BURST_ALONE, PIPE_ALONE))):
        table.add_row(f"[bold]{title}[/]")
        for name in names:
            table.add_row(f"  {name}", *(f"{value:.1f}" for value in laps[name].percentiles_us()))
        table.add_section()
    console.print(table)
    window = default_polling_window() if polling_window is None else polling_window
    console.print(
        f"Conditions: {len(os.sched_getaffinity(0))} CPUs, nothing pinned, polling window {window * 1e6:g} µs, NumPy "
        f"{np.__version__}, {passes} passes = {laps[BURST].nanoseconds.size} calls each after {WARM_UP} to warm up, "
        "contenders in turns.",
        highlight=False,
        soft_wrap=True,
    )
