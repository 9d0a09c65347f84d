"""``nnburst run --many``: each file of a directory is an input; a file that fails is named, and the others go on."""

from __future__ import annotations

import contextlib
import json
import os
import time
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ...errors import DeadObject, InvalidArgument, NNBurstError
from ...runtime import NodeArg
from ...runtime.request.node_args import checked_inputs
from ..progress import progress
from ..targets import why_not, writing
from ..tensors import Array, as_result, as_saved, describe, load_array

if TYPE_CHECKING:
    from ...runtime import Session

Loaded = tuple[Path, "dict[str, Array] | NNBurstError"]
Outcome = tuple[Path, "list[Any] | NNBurstError"]

_ENDINGS = (".npy", ".npz")
_MOST_DEATHS = 3
"""Deaths of the service in a row after which it is not the inputs."""


def input_files(directory: Path) -> list[Path]:
    """Return the files that are inputs, by name.

    Raises:
        InvalidArgument: There are none, or the directory cannot be read.
    """
    try:
        files = sorted(path for path in directory.iterdir() if path.suffix in _ENDINGS and path.is_file())
    except OSError as error:
        raise InvalidArgument(f"--many {directory} cannot be read: {error.strerror}") from None
    if not files:
        raise InvalidArgument(
            f"--many {directory}: no .npy and no .npz files in it; numpy.savez(file, NAME=array) writes one input"
        )
    return files


def targets(files: Sequence[Path], directory: Path | None) -> dict[Path, Path]:
    """Return where the outputs of each file go, in a directory that is made if need be.

    Raises:
        InvalidArgument: Nothing can be written there, or two files would have one target.
    """
    if directory is None:
        return {}
    try:
        directory.mkdir(exist_ok=True)
    except OSError as error:
        raise InvalidArgument(f"--into {directory} cannot be made: {error.strerror}") from None
    found: dict[Path, Path] = {}
    for file in files:
        target = directory / f"{file.stem}.npz"
        if target in found:
            raise InvalidArgument(f"--into: {found[target].name} and {file.name} would both become {target.name}")
        if target.exists() and target.samefile(file):
            raise InvalidArgument(f"--into {directory} is where the inputs are; name another directory")
        why = why_not(target)
        if why:
            raise InvalidArgument(f"--into: {target} cannot be written: {why}")
        found[target] = file
    return {file: target for target, file in found.items()}


def run_files(session: Session, files: Iterable[Path], batch: int) -> Iterator[Outcome]:
    """Yield each file with its outputs, or with what was wrong with it, in order.

    Args:
        session: Gets over a death of its service, so that one input costs no more than itself.
        files: Read while the service runs those before.
        batch: As for `Session.run_many`.

    Raises:
        InvalidArgument: The model takes no batches.
    """
    nodes = session.get_inputs()
    fixed = [describe(node) for node in nodes if not node.shape or isinstance(node.shape[0], int) or node.holds]
    if batch > 1 and fixed:
        raise InvalidArgument(
            f"--batch needs inputs of numbers with a symbolic first dimension; here is {'; '.join(fixed)}"
        )

    flying: deque[Loaded] = deque()
    rest = iter(files)

    def inputs() -> Iterator[dict[str, Array]]:
        for file in rest:
            flying.append(_loaded(file, nodes))
            arrays = flying[-1][1]
            yield {} if isinstance(arrays, NNBurstError) else arrays

    while True:
        with contextlib.suppress(NNBurstError):
            for outcome in session.run_many(inputs(), batch=batch, on_error="return"):
                loaded = flying.popleft()
                yield _alone(session, loaded) if isinstance(outcome, Exception) else (loaded[0], outcome)
        while flying:  # which of them it was shows when each runs alone
            yield _alone(session, flying.popleft())
        following = next(rest, None)
        if following is None:
            return
        yield _alone(session, _loaded(following, nodes))  # so that it goes on also if several cannot be under way


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


def _alone(session: Session, loaded: Loaded) -> Outcome:
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
    """Run all files, save what comes and say how it went. Returns whether all went well.

    Raises:
        click.ClickException: Results cannot be written, or the service dies of every input. What was done before is
            said all the same, and what was not.
    """
    nodes = session.get_outputs()
    rows: list[dict[str, Any]] = []
    failed: list[dict[str, Any]] = []
    deaths = 0
    stopped: click.ClickException | None = None
    started = time.perf_counter()
    try:
        for file, outcome in progress(run_files(session, files, batch), len(files), "running"):
            if isinstance(outcome, NNBurstError):
                failed.append({"file": str(file), "error": type(outcome).__name__, "message": str(outcome)})
                if not as_json:
                    click.echo(f"{file}: {type(outcome).__name__}: {outcome}", err=True)
                deaths = deaths + 1 if isinstance(outcome, DeadObject) else 0
                if deaths == _MOST_DEATHS:
                    raise click.ClickException(f"{file}: the service died {deaths} times in a row: {outcome}")
                continue
            deaths = 0
            row: dict[str, Any] = {"file": str(file), "outputs": list(map(as_result, nodes, outcome))}
            if file in places:
                _save(places[file], {node.name: as_saved(value) for node, value in zip(nodes, outcome, strict=True)})
                row["saved"] = str(places[file])
            rows.append(row)
    except click.ClickException as error:
        stopped = error
    seconds = time.perf_counter() - started
    missing = [str(file) for file in files[len(rows) + len(failed) :]]  # outcomes come in the order of the files
    if as_json:
        document = {"files": len(files), "seconds": round(seconds, 6), "results": rows, "failed": failed}
        click.echo(json.dumps({**document, "missing": missing}))
    else:
        where = f", saved in {places[files[0]].parent}" if places else ""
        lacking = f", {len(missing):,} from {missing[0]} on have no results" if missing else ""
        click.echo(f"{len(rows):,} of {len(files):,} files in {seconds:.2f} s{where}{lacking}")
    if stopped is not None:
        raise stopped
    return len(rows) == len(files)


def _save(target: Path, outputs: Mapping[str, Array]) -> None:
    part = target.with_name(f".{target.name}.{os.getpid()}")
    with writing(target):
        try:
            with zipfile.ZipFile(part, "w") as archive:  # as numpy.savez, which takes no output named "file"
                for name, array in outputs.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            part.replace(target)  # whole or not at all
        except BaseException:
            with contextlib.suppress(OSError):
                part.unlink()
            raise
