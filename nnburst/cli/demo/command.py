"""The `nnburst demo` command: a burst, a pipe and this process classify the same images."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from ...errors import InvalidArgument
from ...runtime.open_service import in_process, launch
from ...runtime.session import Session
from ..child import caller_of
from ..progress import call_with_notice, progress
from .network import DATA, EXAMPLES, INPUT, OUTPUT, build_model, load_digits

Array = npt.NDArray[np.float32]
Ask = Callable[[Array], Array]
"""A function that classifies one image and returns ten probabilities."""

BURST, PIPE, LOCAL = "burst to the service", "multiprocessing.Pipe", "in this process"
PERCENTILES = (50.0, 90.0, 99.0, 99.9)
WARM_UP = 100


@click.command()
@click.option("--passes", type=click.IntRange(min=1), default=8, show_default=True, help="Passes over all images.")
@click.option("--device", default="nnburst-reference", show_default=True, help="Device that runs the network.")
@click.option(
    "--save",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE.onnx",
    help="Only write an example model and its input (.npy). A model named detector.onnx finds objects; any other "
    "name gets a model that reads digits.",
)
def demo(passes: int, device: str, file: Path | None) -> None:
    """Classify 1,797 real handwritten digits in an isolated service process, one image per execution.

    Compares the burst with multiprocessing.Pipe and with in-process execution. Exits with 1 if any bit of
    an answer differs from in-process execution.

    \b
    nnburst demo --save digits.onnx
    nnburst run digits.onnx --input image=digits.npy
    """
    if file is not None:
        _save(file)
        return
    digits, load = load_digits(), os.getloadavg()[0]
    with (
        launch(devices=[device]) as service,
        call_with_notice("compiling the network", service.session, build_model()) as remote,
        in_process(devices=[device]) as here,
        here.session(build_model()) as local,
        caller_of(_classifier_in_child, device) as (pipe, _),
    ):
        took, answers = race({BURST: classifier(remote), PIPE: pipe, LOCAL: classifier(local)}, digits.images, passes)
    of_all, held_out = (digits.accuracy(answers[BURST][-1], held_out_only=only) for only in (False, True))
    click.echo(
        f"{len(digits.labels)} handwritten digits on {device}: accuracy {of_all:.2%} of all, {held_out:.2%} of the "
        f"{int(digits.held_out.sum())} held out"
    )
    _print_table(took)
    click.echo(
        f"Conditions: {len(os.sched_getaffinity(0))} CPUs, nothing pinned, NumPy {np.__version__}, {passes} passes = "
        f"{len(took[BURST])} calls each after {WARM_UP} to warm up, contenders in turns. Load average at the start "
        f"{load:.2f}: an idle machine is faster."
    )
    for name in (BURST, PIPE):
        if wrong := np.count_nonzero((answers[name].view(np.uint32) != answers[LOCAL].view(np.uint32)).any((2, 3))):
            raise click.ClickException(f"{wrong} answers of {name} differ from in-process execution of the same model")
    (p50, _, p99, _), (pipe_p50, *_) = (percentiles_us(took[name]) for name in (BURST, PIPE))
    click.echo(f"demo: accuracy={held_out:.4f} p50_us={p50:.1f} p99_us={p99:.1f} pipe_p50_us={pipe_p50:.1f}")


def _save(file: Path) -> None:
    if file.suffix != ".onnx":
        raise InvalidArgument(f"--save {file}: give a name that ends with .onnx, as `nnburst run` wants it")
    model = "detector.onnx" if file.name == "detector.onnx" else "digits.onnx"
    beside = file.with_suffix(".npy")
    file.write_bytes((DATA / model).read_bytes())
    np.save(beside, EXAMPLES[model]())
    click.echo(f"{file} is written, with an input; now: nnburst run {file} --input image={beside}")


def classifier(session: Session) -> Ask:
    """Return a function that classifies an image with a session, through shared memory."""
    bound = session.bind()
    image, probabilities, run = bound.inputs[INPUT], bound.outputs[OUTPUT], bound.run

    def ask(pixels: Array) -> Array:
        image[...] = pixels
        run()
        answer: Array = probabilities.copy()
        return answer

    return ask


def _classifier_in_child(device: str) -> Ask:
    return classifier(in_process(devices=(device,)).session(build_model()))


def race(
    contenders: Mapping[str, Ask], images: npt.NDArray[np.float32], passes: int
) -> tuple[dict[str, npt.NDArray[np.int64]], dict[str, Array]]:
    """Let every contender classify every image `passes` times, one image per execution.

    The contenders take turns after each pass, so that a disturbance of the machine affects all contenders.

    Returns:
        By contender, the nanoseconds of each call, and the answers [passes, n, 1, 10].
    """
    took: dict[str, list[int]] = {name: [] for name in contenders}
    answers: dict[str, list[Any]] = {name: [] for name in contenders}
    for ask in contenders.values():
        for image in images[:WARM_UP]:
            ask(image)
    turns = [*contenders] * passes
    now = time.perf_counter_ns
    for name in progress(turns, len(turns), "classifying", draws_between=True):
        ask = contenders[name]
        for image in list(images):
            before = now()
            answer = ask(image)
            took[name].append(now() - before)
            answers[name].append(answer)
    return {name: np.array(each) for name, each in took.items()}, {
        name: np.stack(each).reshape(passes, len(images), 1, -1) for name, each in answers.items()
    }


def percentiles_us(took: npt.NDArray[np.int64]) -> list[float]:
    """Return the `PERCENTILES`, in microseconds, of durations in nanoseconds, without interpolation."""
    return [float(value) / 1e3 for value in np.percentile(took, PERCENTILES, method="higher")]


def _print_table(took: Mapping[str, npt.NDArray[np.int64]]) -> None:
    table = Table(title="one image per call: hand over, run, copy the answer (µs)", title_justify="left")
    table.add_column("")
    for percentile in PERCENTILES:
        table.add_column(f"p{percentile:g}", justify="right")
    for name, each in took.items():
        table.add_row(name, *(f"{value:.1f}" for value in percentiles_us(each)))
    Console().print(table)
