"""The command: arrays in, arrays out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...errors import InvalidArgument, NNBurstError

if TYPE_CHECKING:
    from ...runtime import Session

__all__ = ["run"]


@click.command()
@click.argument("model", type=click.Path(dir_okay=False))
@click.option("--input", "inputs", multiple=True, metavar="NAME=FILE.npy", help="An input; may be repeated.")
@click.option("--output", "outputs", multiple=True, metavar="NAME=FILE.npy", help="Save an output; may be repeated.")
@click.option("--random", "fill", is_flag=True, help="Make up the inputs that are not given.")
@click.option("--shape", "shapes", multiple=True, metavar="NAME=1,3,…", help="Shape of an input that is made up.")
@click.option("--device", default=None, help="Device that runs the model [default: the one that reads such files].")
@click.option("--show", is_flag=True, help="Only print what the model takes and gives.")
def run(
    model: str,
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    fill: bool,
    shapes: tuple[str, ...],
    device: str | None,
    show: bool,
) -> None:
    """Run a model file once, in a service process, and print or save its outputs.

    \b
    nnburst run detector.onnx --show
    nnburst run detector.onnx --input image=frame.npy --output boxes=boxes.npy
    """
    from ...runtime import Session

    try:
        with Session(model, device=device) as session:
            if show:
                _show(session)
            else:
                _run(session, inputs, outputs, fill, shapes)
    except NNBurstError as error:
        raise click.ClickException(f"{type(error).__name__}: {error}") from error


def _show(session: Session) -> None:
    from .._tensors import describe

    for kind, arguments in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for argument in arguments:
            click.echo(f"{kind:6} {describe(argument)}")


def _run(
    session: Session, inputs: tuple[str, ...], outputs: tuple[str, ...], fill: bool, shapes: tuple[str, ...]
) -> None:
    import numpy as np

    from .._tensors import describe, load_arrays, made_up, parse_pairs, parse_shapes

    arrays = load_arrays(inputs)
    files = parse_pairs(outputs, "--output")
    names = [argument.name for argument in session.get_outputs()]
    unknown = sorted(files.keys() - set(names))
    if unknown:
        raise InvalidArgument(f"--output for {unknown}; the outputs are {names}")
    missing = [argument for argument in session.get_inputs() if argument.name not in arrays]
    if missing and not fill:
        wanted = "; ".join(describe(argument) for argument in missing)
        raise InvalidArgument(f"give --input NAME=FILE.npy for each of: {wanted}; or make them up with --random")
    arrays |= made_up(missing, parse_shapes(shapes))
    for name, array in zip(names, session.run(None, arrays), strict=True):
        if name in files:
            np.save(Path(files[name]), array)
            click.echo(f"{name}: {array.dtype.name} {list(array.shape)} saved to {files[name]}")
        else:
            click.echo(f"{name}: {array.dtype.name} {list(array.shape)}")
            click.echo(np.array2string(array, threshold=40, precision=6))
