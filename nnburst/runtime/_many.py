"""Many inputs, one result each, in order: in batches if the model takes them, filled while the service runs."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import accumulate, chain, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import GeneralFailure, InvalidArgument
from ._arguments import NodeArg, checked_inputs

if TYPE_CHECKING:
    import numpy.typing as npt

    from ._pipeline import Pipeline
    from ._session import Session

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = Mapping[str, "npt.ArrayLike"]

_DEPTH = 4
"""Batches under way: one runs, one waits, one is filled, one is read."""


def run_many(
    session: Session, inputs: Iterable[Inputs], batch: int, timeout: float | None
) -> Generator[list[Array], None, None]:
    """See `Session.run_many`."""
    with contextlib.closing(_parts(session, inputs, batch, timeout)) as parts:
        yield from chain.from_iterable(parts)


def _parts(
    session: Session, inputs: Iterable[Inputs], batch: int, timeout: float | None
) -> Generator[Iterable[list[Array]], None, None]:
    """Yield the outputs of some inputs at a time, so that none of them costs a step of Python's."""
    if not isinstance(inputs, Iterable):
        raise InvalidArgument(f"run_many takes an iterable of dicts of arrays, got {type(inputs).__name__}")
    nodes, rest = session.get_inputs(), iter(inputs)
    try:
        first = checked_inputs(nodes, next(rest))
    except StopIteration:
        return
    every = chain([first], rest)
    if batch == 1:
        shapes = {node.name: first[node.name].shape for node in nodes if node.is_open}
        with session.lent_pipeline(16, shapes, timeout) as pipeline:
            for outputs in pipeline.map(every):
                yield (outputs,)
        return
    fixed = [node.name for node in nodes if not _is_batched(node)]
    if fixed or not nodes:
        raise InvalidArgument(f"batch={batch} needs a symbolic first dimension of every input, also of {fixed}")
    # An iterator may fill the same array again: then each input is copied before the next is taken.
    at_once = batch if isinstance(inputs, list | tuple) else 1
    shapes = {node.name: (batch, *first[node.name].shape[1:]) for node in nodes}
    with session.lent_pipeline(_DEPTH, shapes, timeout) as pipeline:
        yield from _batched(session, pipeline, shapes, every, at_once)


def _is_batched(node: NodeArg) -> bool:
    return node.shape is not None and len(node.shape) > 0 and not isinstance(node.shape[0], int)


def _batched(
    session: Session, pipeline: Pipeline, shapes: Mapping[str, tuple[int, ...]], every: Iterator[Inputs], at_once: int
) -> Iterator[Iterable[list[Array]]]:
    """Yield the outputs of the inputs of one batch after the other."""
    nodes = session.get_inputs()
    batch = next(iter(shapes.values()))[0]
    waiting: deque[list[int]] = deque()  # how many rows each input of a batch has
    rows: list[int] = []
    filled = 0
    while items := list(islice(every, min(at_once, batch - filled))):
        counts = _copy_alike(items, pipeline.current.inputs, filled)
        if not counts and len(items) > 1:  # from here one by one
            every, at_once = chain(items, every), 1
            continue
        if not counts:
            arrays = checked_inputs(nodes, items[0])
            counts = [_rows(arrays, shapes, batch)]
            if filled + counts[0] > batch:  # it begins the next batch
                yield from _finish(pipeline, waiting)
                yield _split(session.run(None, _head(pipeline.current.inputs, filled)), rows)
                rows, filled = [], 0
            for name, view in pipeline.current.inputs.items():
                view[filled : filled + counts[0]] = arrays[name]
        rows += counts
        filled += sum(counts)
        if filled == batch:
            waiting.append(rows)
            rows, filled = [], 0
            ended = pipeline.advance()
            if len(waiting) == pipeline.depth:
                yield _split(ended.copied(), waiting.popleft())
    yield from _finish(pipeline, waiting)
    if filled:
        yield _split(session.run(None, _head(pipeline.current.inputs, filled)), rows)


def _copy_alike(items: list[Inputs], views: Mapping[str, Array], filled: int) -> list[int]:
    """Copy inputs behind the rows that are filled, without a step of Python's for each.

    Returns:
        How many rows each has. Empty if they are not dicts of arrays that fit as they are, or have too many rows.
    """
    if set(map(type, items)) != {dict} or set(map(len, items)) != {len(views)}:
        return []
    counts: list[int] = []
    try:
        for name, view in views.items():
            column: list[Any] = list(map(itemgetter(name), items))
            have = list(map(len, column))
            if set(map(type, column)) != {np.ndarray} or 0 in have or have != (counts or have):
                return []
            counts = have
            np.concatenate(column, out=view[filled : filled + sum(have)], casting="no")
    except (KeyError, TypeError, ValueError):  # another name, dtype or shape; or one dimension too few
        return []
    return counts


def _rows(arrays: Mapping[str, Array], shapes: Mapping[str, tuple[int, ...]], batch: int) -> int:
    """Return how many rows an input has."""
    count: int = next(iter(arrays.values())).shape[0]
    for name, array in arrays.items():
        shape = array.shape
        if shape[0] != count or shape[1:] != shapes[name][1:] or not 1 <= count <= batch:
            raise InvalidArgument(
                f"input {name!r} has shape {shape}; in this batch it is 1 to {batch} rows, as many as the other inputs "
                f"have, of shape {shapes[name][1:]}"
            )
    return count


def _head(views: Mapping[str, Array], filled: int) -> dict[str, Array]:
    return {name: view[:filled] for name, view in views.items()}


def _finish(pipeline: Pipeline, waiting: deque[list[int]]) -> Iterator[Iterable[list[Array]]]:
    for ended in pipeline.drain():
        yield _split(ended.copied(), waiting.popleft())


def _split(outputs: list[Array], rows: list[int]) -> Iterable[list[Array]]:
    total = sum(rows)
    if any(output.ndim == 0 or output.shape[0] != total for output in outputs):
        raise GeneralFailure(f"an output has not one row for each of {total}; this model cannot be run in batches")
    count = rows[0]
    if rows.count(count) == len(rows):  # no step of Python's for each
        parts = [output.reshape(len(rows), count, *output.shape[1:]) for output in outputs]
        return map(list, zip(*parts, strict=True))
    ends = list(accumulate(rows))
    return [[output[end - count : end] for output in outputs] for count, end in zip(rows, ends, strict=True)]
