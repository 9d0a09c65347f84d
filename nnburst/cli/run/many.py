"""``nnburst run --many``: run a model on each file of a directory."""

from __future__ import annotations

import json
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ...errors import DeadObject, InvalidArgument, NNBurstError
from ...runtime.request.node_args import NodeArg, checked_inputs
from ..progress import progress
from ..tensors import Array, as_result, as_saved, load_array

if TYPE_CHECKING:
    from ...runtime.session import Session

Loaded = tuple[Path, "dict[str, Array] | NNBurstError"]
Outcome = tuple[Path, "list[Any] | NNBurstError"]


def input_files(directory: Path) -> list[Path]:
    """Return the .npy and .npz files of a directory, sorted by name.

    Raises:
        InvalidArgument: There are none.
    """
    files = sorted(path for path in directory.iterdir() if path.suffix in (".npy", ".npz") and path.is_file())
    if not files:
        raise InvalidArgument(
            f"--many {directory}: no .npy and no .npz files in it; numpy.savez(file, NAME=array) writes one input"
        )
    return files


def targets(files: Sequence[Path], directory: Path | None) -> dict[Path, Path]:
    """Return the output file of each input file. Create the directory if necessary.

    Raises:
        InvalidArgument: Two files would have the same output file, or the directory is the input directory.
    """
    if directory is None:
        return {}
    directory.mkdir(exist_ok=True)
    if directory.samefile(files[0].parent):
        raise InvalidArgument(f"--into {directory} is where the inputs are; name another directory")
    found: dict[Path, Path] = {}
    for file in files:
        target = directory / f"{file.stem}.npz"
        if target in found:
            raise InvalidArgument(f"--into: {found[target].name} and {file.name} would both become {target.name}")
        found[target] = file
    return {file: target for target, file in found.items()}


def run_files(session: Session, files: Iterable[Path], batch: int) -> Iterator[Outcome]:
    """Yield each file with its outputs or its error, in order.

    Args:
        session: A session that restarts a dead service, so that an input that kills the service does not affect other
            inputs.
        files: The input files. A file is read while the service runs earlier files.
        batch: As for `Session.run_many`.

    Raises:
        InvalidArgument: The model cannot run batches.
    """
    nodes = session.get_inputs()
    rest = iter(files)
    flying: deque[Loaded] = deque()

    def inputs() -> Iterator[dict[str, Array]]:
        for file in rest:
            flying.append(_loaded(file, nodes))
            arrays = flying[-1][1]
            if not isinstance(arrays, NNBurstError):
                yield arrays

    died = True
    while died:
        died = False
        try:
            for outcome in session.run_many(inputs(), batch=batch, on_error="return"):
                while isinstance(flying[0][1], NNBurstError):  # an unreadable file is not among the inputs
                    yield _run_alone(session, flying.popleft())
                loaded = flying.popleft()
                yield _run_alone(session, loaded) if isinstance(outcome, Exception) else (loaded[0], outcome)
        except DeadObject:
            died = True
        while flying:  # each file runs alone, to find the one that kills the service
            yield _run_alone(session, flying.popleft())


def _loaded(file: Path, nodes: Sequence[NodeArg]) -> Loaded:
    try:
        found = load_array(file)
        if not isinstance(found, Mapping):
            if len(nodes) != 1:
                names = [node.name for node in nodes]
                raise InvalidArgument(
                    f"a .npy file is one array, and the inputs are {names}; numpy.savez takes several"
                )
            found = {nodes[0].name: found}
        return file, checked_inputs(list(nodes), found)
    except NNBurstError as error:
        return file, error


def _run_alone(session: Session, loaded: Loaded) -> Outcome:
    file, arrays = loaded
    if isinstance(arrays, NNBurstError):
        return file, arrays
    try:
        return file, session.run(None, arrays)
    except NNBurstError as error:
        return file, error


def run_directory(
    session: Session, files: Sequence[Path], places: Mapping[Path, Path], batch: int, as_json: bool
) -> bool:
    """Run all files, save the outputs and report failures. Return True if no file failed."""
    nodes = session.get_outputs()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    started = time.perf_counter()
    for file, outcome in progress(run_files(session, files, batch), len(files), "running"):
        if isinstance(outcome, NNBurstError):
            failed.append({"file": str(file), "error": type(outcome).__name__, "message": str(outcome)})
            if not as_json:
                click.echo(f"{file}: {type(outcome).__name__}: {outcome}", err=True)
            continue
        row: dict[str, Any] = {"file": str(file), "outputs": list(map(as_result, nodes, outcome))}
        if file in places:
            _save(places[file], {node.name: as_saved(value) for node, value in zip(nodes, outcome, strict=True)})
            row["saved"] = str(places[file])
        rows.append(row)
    seconds = time.perf_counter() - started
    if as_json:
        document = {"files": len(files), "seconds": round(seconds, 6), "results": rows, "failed": failed}
        click.echo(json.dumps(document))
    else:
        where = f", saved in {places[files[0]].parent}" if places else ""
        click.echo(f"{len(rows):,} of {len(files):,} files in {seconds:.2f} s{where}")
    return not failed


def _save(target: Path, outputs: Mapping[str, Array]) -> None:
    with zipfile.ZipFile(target, "w") as archive:  # numpy.savez fails for an output named "file"
        for name, array in outputs.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
