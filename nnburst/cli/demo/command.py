"""The command: lets a burst, a pipe and this process classify the same images in turns, and reports."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from ...errors import InvalidArgument
from ...runtime import Session, in_process, launch
from ..child import answering
from ..progress import progress
from ..targets import checked, writing
from .network import DATA, EXAMPLES, INPUT, OUTPUT, Digits, build_model, load_digits

Array = npt.NDArray[np.float32]
Ask = Callable[[Array], Array]
"""Hands one image over, runs, and returns a private copy of the ten probabilities."""

NOOP = "nnburst-noop"
BURST, PIPE, LOCAL = "burst to the service", "multiprocessing.Pipe", "in this process"
BURST_ALONE, PIPE_ALONE = "burst, no-op device", "Pipe, no-op device"
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
WARM_UP, CHUNK = 100, 200


@click.command()
@click.option("--passes", type=click.IntRange(min=1), default=8, show_default=True, help="Times all images are run.")
@click.option("--device", default="nnburst-reference", show_default=True, help="Device that runs the network.")
@click.option(
    "--save",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    callback=checked,
    metavar="FILE",
    help="Write a model to try things with instead, digits.onnx or detector.onnx, and an input for it (.npy).",
)
def demo(passes: int, device: str, file: Path | None) -> None:
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
    digits, load = load_digits(), os.getloadavg()[0]
    with ExitStack() as stack:
        service = stack.enter_context(launch(devices=tuple(dict.fromkeys((device, NOOP)))))
        local = stack.enter_context(in_process(devices=(device,)))
        contenders = {
            BURST: asking(stack.enter_context(service.session(build_model(), device=device))),
            PIPE: stack.enter_context(answering(_in_child, device))[0],
            LOCAL: asking(stack.enter_context(local.session(build_model()))),
            BURST_ALONE: asking(stack.enter_context(service.session(build_model(), device=NOOP))),
            PIPE_ALONE: stack.enter_context(answering(_in_child, NOOP))[0],
        }
        took, answers = race(contenders, digits.images, passes)
    held_out = _report(digits, took, answers[BURST][-1], passes, device, load)
    wrong = [text for name in (BURST, PIPE) for text in differences(name, answers[LOCAL][0], answers[name])]
    if wrong:
        raise click.ClickException(
            f"{len(wrong)} answers differ from in-process execution of the same model; first: {wrong[0]}"
        )
    (p50, _, p99, _), (transport, *_), (pipe, *_) = (percentiles_us(took[name]) for name in (BURST, BURST_ALONE, PIPE))
    click.echo(
        f"demo: accuracy={held_out:.4f} p50_us={p50:.1f} p99_us={p99:.1f} transport_p50_us={transport:.1f} "
        f"pipe_p50_us={pipe:.1f}"
    )


def _save(file: Path) -> None:
    if file.name not in EXAMPLES:
        raise InvalidArgument(f"--save {file}: the models are called {' and '.join(EXAMPLES)}")
    beside = file.with_suffix(".npy")
    with writing(file):
        file.write_bytes((DATA / file.name).read_bytes())
    with writing(beside):
        np.save(beside, EXAMPLES[file.name]())
    click.echo(f"{file} is written, with an input; now: nnburst run {file} --input image={beside}")


def asking(session: Session) -> Ask:
    """Return what runs a session on arrays that it shares with the service."""
    bound = session.bind()
    image, probabilities, run = bound.inputs[INPUT], bound.outputs[OUTPUT], bound.run

    def ask(given: Array) -> Array:
        image[...] = given
        run()
        answer: Array = probabilities.copy()
        return answer

    return ask


def _in_child(device: str) -> Ask:
    return asking(in_process(devices=(device,)).session(build_model()))


def race(
    contenders: Mapping[str, Ask], images: npt.NDArray[np.float32], passes: int
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, list[Array]]]:
    """Let every contender classify every image, one image per execution, some times.

    The contenders take turns pass by pass, so that a disturbance of the machine meets all of them.

    Returns:
        Nanoseconds of each call, and the answers [n, 1, 10] of each pass, by contender.
    """
    took: dict[str, list[int]] = {name: [] for name in contenders}
    answers: dict[str, list[Any]] = {name: [[] for _ in range(passes)] for name in contenders}
    for ask in contenders.values():
        for image in images[:WARM_UP]:
            ask(image)
    starts = range(0, len(images), CHUNK)
    turns = [(turn, name, start) for turn in range(passes) for name in contenders for start in starts]
    now = time.perf_counter_ns
    for turn, name, start in progress(turns, len(turns), "classifying", draws_between=True):
        ask = contenders[name]
        for image in list(images[start : start + CHUNK]):
            before = now()
            answer = ask(image)
            took[name].append(now() - before)
            answers[name][turn].append(answer)
    return {name: np.array(each) for name, each in took.items()}, {
        name: [np.stack(each) for each in several] for name, several in answers.items()
    }


def percentiles_us(took: npt.NDArray[np.int64]) -> list[float]:
    """Return the `PERCENTILES` of durations, which were observed, in microseconds."""
    return [float(value) / 1e3 for value in np.percentile(took, PERCENTILES, method="higher")]


def differences(name: str, expected: Array, passes: list[Array]) -> list[str]:
    """Return in words which answers have other bits than expected."""
    return [
        f"{name}, image {i}: probabilities differ by up to {np.abs(expected[i] - got[i]).max():.3g}"
        for got in passes
        for i in np.flatnonzero((expected.view(np.uint32) != got.view(np.uint32)).reshape(len(got), -1).any(axis=1))
    ]


def _report(
    digits: Digits, took: Mapping[str, npt.NDArray[np.int64]], answers: Array, passes: int, device: str, load: float
) -> float:
    """Print the table; return the accuracy on the images held out."""
    of_all, held_out = (digits.accuracy(answers, held_out_only=only) for only in (False, True))
    console = Console()
    console.print(
        f"{len(digits.labels)} handwritten digits on {device}: accuracy {of_all:.2%} of all, {held_out:.2%} of the "
        f"{int(digits.held_out.sum())} held out",
        soft_wrap=True,
    )
    table = Table(title="one image per call: hand over, run, copy the answer (µs)", title_justify="left")
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile:g}", justify="right")
    for title, names in (("whole call", (BURST, PIPE, LOCAL)), ("transport alone", (BURST_ALONE, PIPE_ALONE))):
        table.add_row(f"[bold]{title}[/]")
        for name in names:
            table.add_row(f"  {name}", *(f"{value:.1f}" for value in percentiles_us(took[name])))
        table.add_section()
    console.print(table)
    console.print(
        f"Conditions: {len(os.sched_getaffinity(0))} CPUs, nothing pinned, NumPy {np.__version__}, {passes} passes = "
        f"{len(took[BURST])} calls each after {WARM_UP} to warm up, contenders in turns. Load average at the start "
        f"{load:.2f}: an idle machine is faster.",
        highlight=False,
        soft_wrap=True,
    )
    return held_out
