"""The command: arrays in, arrays out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...errors import InvalidArgument, NNBurstError
from .._targets import why_not, writing

if TYPE_CHECKING:
    from ...runtime import Session


@click.command()
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input; may be repeated.")
@click.option("--output", "outputs", multiple=True, metavar="NAME=FILE.npy", help="Save an output; may be repeated.")
@click.option("--random", "fill", is_flag=True, help="Make up the inputs that are not given.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,…", help="Shape of an input that is made up.")
@click.option("--device", default=None, help="Device that runs the model [default: the one that reads such files].")
@click.option("--show", is_flag=True, help="Only print what the model takes and gives.")
@click.option("--json", "as_json", is_flag=True, help="One JSON document.")
def run(
    model: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    fill: bool,
    shapes: tuple[str, ...],
    device: str | None,
    show: bool,
    as_json: bool,
) -> None:
    """Run a model file once, in a service process, and print or save its outputs.

    \b
    nnburst run detector.onnx --show
    nnburst run detector.onnx --input image=frame.npy --output boxes=boxes.npy
    """
    from ...runtime import Session
    from .._tensors import load_arrays, parse_pairs

    try:
        arrays, files = load_arrays(inputs), _targets(parse_pairs(outputs, "--output"))
        with Session(model, device=device) as session:
            if show:
                _show(session, as_json)
            else:
                _run(session, arrays, files, fill, shapes, as_json)
    except NNBurstError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _show(session: Session, as_json: bool) -> None:
    from .._tensors import as_row, describe

    arguments = {"input": session.get_inputs(), "output": session.get_outputs()}
    if as_json:
        rows = {f"{kind}s": [as_row(argument) for argument in found] for kind, found in arguments.items()}
        click.echo(json.dumps(rows, indent=1))
        return
    for kind, found in arguments.items():
        for argument in found:
            click.echo(f"{kind:6} {describe(argument)}")


def _targets(files: dict[str, str]) -> dict[str, Path]:
    """Look at the files of outputs before anything runs.

    Raises:
        InvalidArgument: One cannot be written, or is given twice.
    """
    for name, file in files.items():
        why = why_not(Path(file))
        if why:
            raise InvalidArgument(f"--output {name}={file} cannot be written: {why}")
    targets = {name: Path(file) for name, file in files.items()}
    if len(set(targets.values())) < len(targets):
        raise InvalidArgument(f"--output: two outputs would be written into one file: {files}")
    return targets


def _run(
    session: Session,
    arrays: dict[str, Any],
    files: dict[str, Path],
    fill: bool,
    shapes: tuple[str, ...],
    as_json: bool,
) -> None:
    import numpy as np

    from .._tensors import describe, made_up, parse_shapes

    names = [argument.name for argument in session.get_outputs()]
    takes = [argument.name for argument in session.get_inputs()]
    for option, given, known in (("--input", arrays, takes), ("--output", files, names)):
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise InvalidArgument(f"{option} for {unknown}; the {option[2:]}s are {known}")
    missing = [argument for argument in session.get_inputs() if argument.name not in arrays]
    if missing and not fill:
        wanted = "; ".join(describe(argument) for argument in missing)
        raise InvalidArgument(f"give --input NAME=FILE.npy for each of: {wanted}; or make them up with --random")
    arrays |= made_up(missing, parse_shapes(shapes))
    rows = []
    for name, array in zip(names, session.run(None, arrays), strict=True):
        row = {"name": name, "dtype": array.dtype.name, "shape": list(array.shape)}
        if name in files:
            with writing(files[name]), open(files[name], "wb") as file:
                np.save(file, array)  # into exactly this file, whatever its name ends with
            rows.append(row | {"file": str(files[name])})
        else:
            rows.append(row | {"values": array.tolist()})
        if not as_json:
            saved = f" saved to {files[name]}" if name in files else ""
            click.echo(f"{name}: {row['dtype']} {row['shape']}{saved}")
            if name not in files:
                click.echo(np.array2string(array, threshold=40, precision=6))
    if as_json:
        click.echo(json.dumps({"outputs": rows}))
