"""Runs on many inputs, in batches if possible, with results in order."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from copy import copy
from itertools import accumulate, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import BadState, DeadObject, GeneralFailure, InvalidArgument, NNBurstError, OutputInsufficientSize
from ...model.types import Array
from ..request.node_args import Encoded, NodeArg, checked_inputs
from .ring import LASTING

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..execution import Execution
    from ..session import Session
    from .ring import Ring

Inputs = Mapping[str, "npt.ArrayLike"]
Outcome = list[Array] | Exception
Row = int | NNBurstError
"""The number of batch rows of an input, or the input's error."""


_DEPTH = 4
"""Number of batches in use: one runs, one waits, one is filled, one is read."""


def run_many(
    session: Session, inputs: Iterable[Inputs], batch: int, timeout: float | None, returns_errors: bool
) -> Generator[Outcome, None, None]:
    """Run a session on many inputs, for `Session.run_many`."""
    index = -1
    with contextlib.closing(_run_groups(session, inputs, batch, timeout)) as parts:
        for part in parts:
            if isinstance(part, Exception):  # the caller's iterator raised it
                raise part
            for outcome in part:
                index += 1
                if isinstance(outcome, NNBurstError):
                    _name(outcome, index)
                    if not returns_errors or isinstance(outcome, DeadObject | BadState):
                        raise outcome
                yield outcome


def _name(error: NNBurstError, index: int) -> None:
    """Add the index of the failed input to an error. Drop the traceback, which would keep objects of the run alive."""
    error.__traceback__ = None
    error.args = (f"inputs[{index}]: {error}", *error.args[1:])


def _run_groups(
    session: Session, inputs: Iterable[Inputs], batch: int, timeout: float | None
) -> Generator[Iterable[Outcome] | Exception, None, None]:
    """Yield groups of results. If the iterator of `inputs` raises an error, yield the error last."""
    if not isinstance(inputs, Iterable):
        raise InvalidArgument(f"run_many takes an iterable of dicts of arrays, got {type(inputs).__name__}")
    nodes = session.compilation.inputs
    rest = _Remaining(inputs)
    while (first := rest.first()) is not None:
        try:
            arrays = checked_inputs(nodes, first)
        except NNBurstError as error:
            next(rest)
            yield (error,)
            continue
        fixed = [node.name for node in nodes if node.name in arrays and not _is_batched(node)]
        if batch > 1 and (fixed or not nodes):
            raise InvalidArgument(f"batch={batch} needs a symbolic first dimension of every input, also of {fixed}")
        shapes = {name: a.shape if batch == 1 else (batch, *a.shape[1:]) for name, a in arrays.items()}
        with session._lend_ring(_DEPTH, shapes, timeout) as ring:
            if batch == 1:
                yield from _run_one_by_one(session, ring, rest, timeout)
            else:
                yield from _Batches(session, ring, shapes, timeout).run(rest)
    if rest.error is not None:
        yield rest.error


def _run_one_by_one(session: Session, ring: Ring, rest: _Remaining, timeout: float | None) -> Iterator[tuple[Outcome]]:
    """Yield the results of equally shaped inputs, each from its own run."""
    nodes = session.compilation.inputs

    def filled() -> Iterator[tuple[bool, NNBurstError | None]]:
        for arrays in rest:
            execution = ring.current
            if not execution._set_inputs(arrays):
                try:
                    checked = checked_inputs(nodes, arrays)
                except NNBurstError as error:
                    yield False, error
                    continue
                if not execution._fill(checked):
                    rest.give_back([arrays])
                    return
            yield True, None

    with contextlib.closing(ring.run(filled())) as flights:
        for wrong, execution, failure in flights:
            outcome: Outcome
            try:
                if isinstance(failure, OutputInsufficientSize):
                    encoded = {name: view.view(Encoded) for name, view in execution._wired.items()}
                    outcome = session.run(None, encoded, timeout)
                else:
                    outcome = wrong or failure or execution._copied()
            except NNBurstError as error:
                outcome = error
            yield (outcome,)


class _Remaining:
    """The remaining inputs of the caller's iterator. An error of the iterator is kept in `error`."""

    def __init__(self, inputs: Iterable[Inputs]) -> None:
        self.error: Exception | None = None
        self.at_once = isinstance(inputs, list | tuple)
        """True for a list or tuple: its inputs can be taken several at a time. An iterator may reuse its arrays."""
        self._iterator = iter(inputs) if self.at_once else self._catch(inputs)
        self._back: list[Inputs] = []

    def _catch(self, inputs: Iterable[Inputs]) -> Iterator[Inputs]:
        try:
            yield from inputs
        except Exception as error:
            self.error = error

    def __iter__(self) -> Iterator[Inputs]:
        return self

    def __next__(self) -> Inputs:
        return self._back.pop() if self._back else next(self._iterator)

    def take(self, most: int) -> list[Inputs]:
        """Remove and return up to `most` inputs."""
        items = [self._back.pop() for _ in range(min(most, len(self._back)))]
        items.extend(islice(self._iterator, most - len(items)))
        return items

    def first(self) -> Inputs | None:
        """Return the next input without removing it; None after the last."""
        self.give_back(items := self.take(1))
        return items[0] if items else None

    def give_back(self, items: Sequence[Inputs]) -> None:
        self._back.extend(reversed(items))


def _is_batched(node: NodeArg) -> bool:
    return not node.holds and node.shape is not None and len(node.shape) > 0 and not isinstance(node.shape[0], int)


class _Batches:
    """Batches of equally shaped inputs.

    Args:
        session: The session, which also runs the inputs of a failed batch one by one.
        timeout: See `Session.run`.
    """

    def __init__(
        self, session: Session, ring: Ring, shapes: Mapping[str, tuple[int, ...]], timeout: float | None
    ) -> None:
        self._session = session
        self._ring = ring
        self._shapes = shapes
        self._timeout = timeout
        self._batch = next(iter(shapes.values()))[0]
        self._filled = 0  # number of filled rows in the next batch

    def run(self, rest: _Remaining) -> Iterator[Iterable[Outcome]]:
        """Yield the results of each batch, until an error that ends the ring."""
        with contextlib.closing(self._ring.run(self._batches(rest))) as flights:
            for (count, rows), execution, error in flights:
                outputs: list[Array] = []
                try:
                    if error is None and count == self._batch:
                        outputs = execution._copied()
                    elif error is None and count:
                        head = {name: view[:count] for name, view in execution.inputs.items()}
                        outputs = self._session.run(None, head, self._timeout)
                except NNBurstError as failure:
                    error = failure
                yield _split(outputs, rows) if error is None else self._run_each(execution, rows, error)

    def _batches(self, rest: _Remaining) -> Iterator[tuple[bool, tuple[int, list[Row]]]]:
        """Fill batches for `Ring.run`. Yield (run, (number of filled rows, rows)) for each batch.

        `run` is True for a full batch. Otherwise, the caller runs the filled rows itself, if there are any.
        """
        rows: list[Row] = []
        at_once = self._batch if rest.at_once else 1
        while items := rest.take(min(at_once, self._batch - self._filled)):
            counts = _copy_alike(items, self._ring.current.inputs, self._filled)
            if not counts and len(items) > 1:  # the next inputs are taken one by one
                rest.give_back(items)
                at_once = 1
                continue
            if not counts:
                try:
                    count = self._copy(items[0])
                except NNBurstError as error:
                    rows.append(error)
                    if not self._filled:
                        yield False, (0, rows)
                        rows = []
                    continue
                if count is None:
                    rest.give_back(items)
                    break
                counts = [count]
            overflows = self._filled + sum(counts) > self._batch
            if overflows:
                rest.give_back(items)
            else:
                rows += counts
                self._filled += sum(counts)
            if overflows or self._filled == self._batch:
                yield not overflows, (self._filled, rows)
                self._filled, rows = 0, []
        if rows:
            yield False, (self._filled, rows)

    def _copy(self, arrays: Inputs) -> int | None:
        """Copy one item's inputs into the batch, unless they have more rows than the batch has room for.

        Returns:
            The input's number of rows, even if it was not copied; None if its rows have another shape than the
            batch's rows.

        Raises:
            InvalidArgument: The input does not fit the model.
        """
        checked = checked_inputs(self._session.compilation.inputs, arrays)
        count = _rows(checked, self._batch)
        if checked.keys() != self._shapes.keys():
            return None
        if any(array.shape[1:] != self._shapes[name][1:] for name, array in checked.items()):
            return None
        if self._filled + count <= self._batch:
            for name, view in self._ring.current.inputs.items():
                view[self._filled : self._filled + count] = checked[name]
        return count

    def _run_each(self, execution: Execution, rows: list[Row], error: NNBurstError) -> Iterator[Outcome]:
        """Yield the result of each input of a failed batch. Run each input alone, to find the faulty one."""
        at = 0
        for row in rows:
            if not isinstance(row, int):
                yield row
                continue
            part = {name: view[at : at + row] for name, view in execution.inputs.items()}
            at += row
            if isinstance(error, LASTING):
                yield copy(error)  # each input gets a copy, because an index is added
                continue
            try:
                yield self._session.run(None, part, self._timeout)
            except NNBurstError as failure:
                yield failure


def _copy_alike(items: list[Inputs], views: Mapping[str, Array], filled: int) -> list[int]:
    """Copy several items (dicts of inputs) into a batch, after `filled` rows.

    Returns:
        The number of rows of each item; empty if an item does not fit.
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
    except (KeyError, TypeError, ValueError):  # a name, dtype or shape is wrong
        return []
    return counts


def _rows(arrays: Mapping[str, Array], batch: int) -> int:
    count: int = next(iter(arrays.values())).shape[0]
    for name, array in arrays.items():
        if array.shape[0] != count or count > batch:
            raise InvalidArgument(
                f"input {name!r} has shape {array.shape}; in this batch it is at most {batch} rows, as many as the "
                "other inputs have"
            )
    return count


def _split(outputs: list[Array], rows: list[Row]) -> Iterable[Outcome]:
    """Return a batch's outputs, split by input. A wrong input's error takes the place of its outputs."""
    good = [row for row in rows if isinstance(row, int)]
    parts = iter(_split_good(outputs, good) if good else ())
    return parts if len(good) == len(rows) else [next(parts) if isinstance(row, int) else row for row in rows]


def _length(output: object) -> int:
    return len(output) if isinstance(output, list) else -1


def _split_good(outputs: list[Array], rows: list[int]) -> Iterable[list[Array]]:
    total = sum(rows)
    if any(
        (output.shape[:1] if isinstance(output, np.ndarray) else (_length(output),)) != (total,) for output in outputs
    ):
        raise GeneralFailure(f"an output has not one row for each of {total}; this model cannot be run in batches")
    count, held = rows[0], [output for output in outputs if not isinstance(output, np.ndarray)]
    if not held and rows.count(count) == len(rows):
        parts = [output.reshape(len(rows), count, *output.shape[1:]) for output in outputs]
        return map(list, zip(*parts, strict=True))
    ends = list(accumulate(rows))
    return [[output[end - count : end] for output in outputs] for count, end in zip(rows, ends, strict=True)]
