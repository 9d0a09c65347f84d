"""Batches of requests with equal shapes; see `nnb_batch` in ``csrc/nnburst.h``."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..._core import ffi
from ...errors import InvalidArgument
from .graph import Graph
from .importer import GraphArgument, is_bool

Shapes = tuple[tuple[int, ...], ...]
BoundArgument = tuple[GraphArgument, tuple[int, ...], np.ndarray[Any, Any]]
"""An argument of a request, its dimensions, and its bytes."""
_MOST_BYTES = 64 << 20
"""Largest total size in bytes of a model's batches. In larger batches, copying costs more than batching saves."""
_MOST_SHAPES = 8
"""Largest number of a model's batches, each of which takes memory."""


class Batch:
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
        return graph.bind(binding, bools, ())


class Batches:
    """The batches of one model, one for each combination of shapes. A batch exists as long as its requests are bound.

    Args:
        most: Largest number of rows in a run. One request can have several rows.

    Raises:
        InvalidArgument: An argument has no batch dimension, or is not a numeric array.
    """

    def __init__(self, graph: Graph, most: int) -> None:
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

    def join(self, kernel: Any, inputs: Sequence[BoundArgument], outputs: Sequence[BoundArgument]) -> object:
        """Let a request's ``nnb_kernel *`` run in batches with other requests of its shapes, if two fit into a batch.

        Returns:
            An object to keep as long as the kernel; None if the request always runs alone.
        """
        bound = (*inputs, *outputs)
        shapes = tuple(dims for _, dims, _ in bound)
        rows = {dims[0] if dims else 0 for dims in shapes}
        if len(rows) != 1 or any(not math.prod(dims) for dims in shapes):
            return None
        most, nbytes = self._most // max(rows), sum(region.nbytes for _, _, region in bound)
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
