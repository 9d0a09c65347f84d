"""The `nnburst run` command: run a model on arrays from files, and print or save its outputs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidArgument
from ..targets import parse_pairs

if TYPE_CHECKING:
    from ...runtime.session import Session


@click.command()
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="Read an input; may be repeated.")
@click.option("--output", "outputs", multiple=True, metavar="NAME=FILE.npy", help="Save an output; may be repeated.")
@click.option("--random", "fill", is_flag=True, help="Generate values for inputs that are not given.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,…", help="Shape of an input without a value.")
@click.option("--device", default=None, help="Device that runs the model [default: one that reads the file].")
@click.option(
    "--many",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    metavar="DIR",
    help="Run every .npy and .npz file of a directory.",
)
@click.option("--into", type=click.Path(path_type=Path), metavar="DIR", help="Save each file's outputs in DIR as .npz.")
@click.option(
    "--batch",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Combine files into runs of up to N rows.",
)
@click.option("--show", is_flag=True, help="Only print the model's inputs and outputs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def run(
    model: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    fill: bool,
    shapes: tuple[str, ...],
    device: str | None,
    many: Path | None,
    into: Path | None,
    batch: int,
    show: bool,
    as_json: bool,
) -> None:
    """Run a model file in a service process, once or for many inputs, and print or save its outputs.

    \b
    nnburst run detector.onnx --show
    nnburst run detector.onnx --input image=detector.npy --output boxes=boxes.npy
    nnburst run digits.onnx --many images --into answers --batch 64

    Saves strings as NumPy's type U. Saves sequences, maps and optionals as JSON in an array of one string.

    With --many, each file is one run. A model with one input takes .npy files; other models take .npz files with an
    array for each input. If a file fails, the command runs the other files, and exits with 1.
    """
    from ...runtime.session import Session
    from ..progress import call_with_notice
    from ..tensors import load_arrays, parse_shapes
    from .many import input_files, run_directory, targets

    compiling = f"compiling {model}"
    if many is not None:
        if inputs or outputs or fill or shapes or show:
            raise InvalidArgument("--many takes its inputs from files; give --into for what comes out")
        found = input_files(many)
        places = targets(found, into)
        with call_with_notice(compiling, Session, model, device=device, on_death="restart") as session:
            sys.exit(0 if run_directory(session, found, places, batch, as_json) else 1)
    if into is not None or batch != 1:
        raise InvalidArgument("--into and --batch belong to --many DIR")
    arrays, files = load_arrays(parse_pairs(inputs, "--input")), parse_pairs(outputs, "--output")
    with call_with_notice(compiling, Session, model, device=device) as session:
        if show:
            _print_model(session, as_json)
        else:
            _run(session, _inputs(session, arrays, fill, parse_shapes(shapes)), files, as_json)


def _print_model(session: Session, as_json: bool) -> None:
    from ..tensors import as_row, describe

    arguments = {"input": session.get_inputs(), "output": session.get_outputs()}
    if optional := session.get_overridable_initializers():
        arguments["optional input"] = optional
    if as_json:
        rows = {f"{kind}s": [as_row(argument) for argument in found] for kind, found in arguments.items()}
        click.echo(json.dumps(rows, indent=1))
        return
    for kind, found in arguments.items():
        for argument in found:
            click.echo(f"{kind:6} {describe(argument)}")


def _inputs(session: Session, arrays: dict[str, Any], fill: bool, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    from ..tensors import describe, generate_values

    required = session.get_inputs()
    optional = session.get_overridable_initializers()
    _check_known("--input", arrays, [argument.name for argument in (*required, *optional)])
    missing = [argument for argument in required if argument.name not in arrays]
    if missing and not fill:
        wanted = "; ".join(describe(argument) for argument in missing)
        raise InvalidArgument(f"give --input NAME=FILE.npy for each of: {wanted}; or generate them with --random")
    return {**arrays, **generate_values(missing, shapes)}


def _check_known(option: str, values: dict[str, Any], known: list[str]) -> None:
    if unknown := sorted(values.keys() - set(known)):
        raise InvalidArgument(f"{option} for {unknown}; the {option[2:]}s are {known}")


def _run(session: Session, arrays: dict[str, Any], files: dict[str, str], as_json: bool) -> None:
    import numpy as np

    from ..tensors import as_result, as_saved, plain, shorten

    arguments = {argument.name: argument for argument in session.get_outputs()}
    _check_known("--output", files, list(arguments))
    rows = []
    for (name, argument), value in zip(arguments.items(), session.run(None, arrays), strict=True):
        row = as_result(argument, value)
        if name in files:
            with open(files[name], "wb") as file:
                np.save(file, as_saved(value))  # numpy.save would append .npy to a name
            rows.append(row | {"file": files[name]})
        else:
            rows.append(row | {"values": plain(value)})
        if not as_json:
            shape = "" if row["shape"] is None else f" {row['shape']}"
            saved = f" saved to {files[name]}" if name in files else "\n" + shorten(value)
            click.echo(f"{name}: {row['dtype']}{shape}{saved}")
    if as_json:
        click.echo(json.dumps({"outputs": rows}))
