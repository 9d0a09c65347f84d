"""Requests of one shape that run as one: see `nnb_batch` in ``csrc/nnburst.h``."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..._core import ffi
from ...burst import WorkingMemory
from ...errors import GeneralFailure, InvalidArgument, MissedDeadline, NNBurstError, ResourceExhausted
from ..deadline import earlier, is_limit
from .graph import Graph
from .importer import GraphArgument, is_bool
from .row_trial import ROWS_KEPT, Rows, require_rows_apart, run_rows

_log = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]
BoundArgument = tuple[GraphArgument, tuple[int, ...], np.ndarray[Any, Any]]
"""An argument of a request, its dimensions and where it lies."""
_MOST_BYTES = 64 << 20
"""Of the arguments of a model's batches. Large requests run alone: copying them costs more than a batch gains."""
_MOST_SHAPES = 8
"""Of the requests of a model that run together, at a time: each takes memory and a binding for each number of rows."""
_MOST_TRIALS = 1024
"""Of a model. Their outcomes are never forgotten, or clients could have rows tried again and again."""
_LONGEST_TRIAL_NS = 2_000_000_000
"""With the wait for another one. It ends at half of the time that its request has left, if that is earlier."""
_TIMED = 8
"""Runs of a batch, at most, of which the fastest counts."""
_SHORT_NS = 10_000_000
"""Of a batch. A longer one is worth all threads."""
_GAIN = 1.5
"""How many times as fast a batch has to be on all threads, or it runs on one."""
_SIZES = (3, 8, 1, 16, 32, 64, 128, 224)
"""Tried for open dimensions other than the first, all alike, until the graph runs with one."""


class Batch:
    """Runs some of at most so many requests of one shape at a time, on arrays of its own."""

    def __init__(
        self, graph: Graph, inputs: Sequence[BoundArgument], outputs: Sequence[BoundArgument], most: int
    ) -> None:
        bound = (*inputs, *outputs)
        self._stacks = [np.zeros((most, region.nbytes), np.uint8) for _, _, region in bound]
        self.nbytes = sum(stack.nbytes for stack in self._stacks)
        self._runs = [self._run(graph, inputs, outputs, n) for n in range(2, most + 1)]
        stacks = ffi.new("uint8_t *[]", [ffi.from_buffer("uint8_t[]", stack) for stack in self._stacks])
        nbytes = ffi.new("uint64_t[]", [region.nbytes for _, _, region in bound])
        runs = ffi.new("nnb_kernel *[]", [ffi.NULL, ffi.NULL, *(run.kernel for run in self._runs)])
        self._kept = stacks, nbytes, runs
        self.pointer = ffi.new("nnb_batch *", (most, len(inputs), len(bound), nbytes, stacks, runs))

    def _run(self, graph: Graph, inputs: Sequence[BoundArgument], outputs: Sequence[BoundArgument], n: int) -> Any:
        binding = graph.session.io_binding()
        binds = [binding.bind_input] * len(inputs) + [binding.bind_output] * len(outputs)
        pairs = zip(inputs, self._stacks[: len(inputs)], strict=True)
        bools = [(stack[:n].view(np.bool_), stack[:n]) for (node, _, _), stack in pairs if is_bool(node)]
        for bind, (node, dims, _), stack in zip(binds, (*inputs, *outputs), self._stacks, strict=True):
            bind(node.name, "cpu", 0, node.element.number, [n * dims[0], *dims[1:]], stack.ctypes.data)
        return graph.bound(binding, bools, ())


class Batches:
    """The batches of one model, by shapes, each as long as requests of these shapes are bound.

    Attributes:
        graph: What runs them: on one thread, where more do not make them much faster. What these would take of the
            processors is the clients'.

    Args:
        most: Rows of a run; a request may have several.
        on_one_thread: Makes the same graph run on one thread; None if it is not to.

    Raises:
        InvalidArgument: An argument has no rows, or rows that run together have other results than alone.
    """

    def __init__(self, graph: Graph, most: int, on_one_thread: Callable[[], Graph | None]) -> None:
        for node in (*graph.inputs, *graph.outputs):
            if node.holds or node.element.library:
                raise InvalidArgument(
                    f"{node.name!r} holds other values than NumPy's numbers, which do not run together"
                )
            if not node.shape or isinstance(node.shape[0], int):
                raise InvalidArgument(f"{node.name!r} of shape {node.shape} has no open first dimension")
        self.graph = graph
        self._most = most
        self._lock = threading.Lock()
        self._batches: weakref.WeakValueDictionary[Shapes, Batch] = weakref.WeakValueDictionary()
        self._trial = threading.Lock()
        """Held for a trial, at most until it has to end; one at a time."""
        self._tried: dict[Shapes, bool] = {}
        """Whether rows of inputs of these inner dimensions may run together."""
        rows = self._try_rows()
        if rows and (took := self._fastest(graph, rows)) < _SHORT_NS and (other := on_one_thread()):
            self.graph = other if self._fastest(other, rows) < _GAIN * took else graph

    def _fastest(self, graph: Graph, rows: Sequence[Rows]) -> int:
        """Nanoseconds of the fastest of a few runs of as many rows as run together."""
        inputs = [np.resize(each, (self._most, *each.shape[1:])) for each in rows]
        took: list[int] = []
        while len(took) < _TIMED and sum(took) < _TIMED * _SHORT_NS:
            started = time.perf_counter_ns()
            run_rows(graph, inputs)
            took.append(time.perf_counter_ns() - started)
        return min(took)

    def _try_rows(self) -> list[Rows]:
        """Try rows whose inner dimensions the graph says, or that it runs with; returns those that it says all of."""
        inner = [(node.shape or ())[1:] for node in self.graph.inputs]
        is_open = any(not isinstance(size, int) for sizes in inner for size in sizes)
        for guess in _SIZES if is_open else _SIZES[:1]:
            shapes = tuple(tuple(size if isinstance(size, int) else guess for size in sizes) for sizes in inner)
            try:
                rows = require_rows_apart(self.graph, shapes)
                self._tried[shapes] = True
                return [] if is_open else rows
            except GeneralFailure as error:
                failure = error
        if not is_open:
            raise InvalidArgument(f"its rows could not be tried: {failure}")
        return []

    def _may_join(self, inputs: Sequence[BoundArgument], nbytes: int, deadline_ns: int) -> bool:
        """Whether rows of these inner dimensions may run together; they are tried if they have not been."""
        shapes = tuple(dims[1:] for _, dims, _ in inputs)
        now = time.monotonic_ns()
        half = now + max(0, deadline_ns - now) // 2 if is_limit(deadline_ns) else 0
        until = earlier(half, now + _LONGEST_TRIAL_NS)
        is_full = len(self._tried) >= _MOST_TRIALS or len(self._batches) >= _MOST_SHAPES
        if shapes in self._tried or is_full or not self._trial.acquire(timeout=(until - now) / 1e9):
            return self._tried.get(shapes, False)
        try:
            if shapes not in self._tried:  # by the request that this one has waited for
                memory = WorkingMemory()
                memory.take(ROWS_KEPT * nbytes)
                require_rows_apart(self.graph, shapes, until)
                self._tried[shapes] = True
        except NNBurstError as error:
            if isinstance(error, ResourceExhausted) or (isinstance(error, MissedDeadline) and until == half):
                return False  # for want of what this request has; the next one may have more
            self._tried[shapes] = False
            _log.warning("requests whose rows have the shapes %s run alone: %s", list(map(list, shapes)), error)
        finally:
            self._trial.release()
        return self._tried[shapes]

    def join(
        self, kernel: Any, inputs: Sequence[BoundArgument], outputs: Sequence[BoundArgument], deadline_ns: int = 0
    ) -> object:
        """Let the ``nnb_kernel *`` of a request run together with others of its shapes, if it has rows and is small.

        Its deadline, 0 for none, limits the trial of rows like its own.

        Returns:
            What has to live as long as the kernel.
        """
        bound = (*inputs, *outputs)
        shapes = tuple(dims for _, dims, _ in bound)
        rows = {dims[0] if dims else 0 for dims in shapes}
        if len(rows) != 1 or any(not math.prod(dims) for dims in shapes):
            return None
        most, nbytes = self._most // max(rows), sum(region.nbytes for _, _, region in bound)
        if min(most, _MOST_BYTES // nbytes) < 2 or not self._may_join(inputs, nbytes // max(rows), deadline_ns):
            return None
        with self._lock:
            batch = self._batches.get(shapes)
            if batch is None:
                others = list(self._batches.values())
                room = _MOST_BYTES - sum(other.nbytes for other in others)
                most = min(most, room // nbytes)
                if most < 2 or len(others) >= _MOST_SHAPES:
                    return None
                batch = self._batches[shapes] = Batch(self.graph, inputs, outputs, most)
        arguments = ffi.new("void *[]", [ffi.cast("void *", region.ctypes.data) for _, _, region in bound])
        kernel.batch, kernel.arguments = batch.pointer, arguments
        return batch, arguments
