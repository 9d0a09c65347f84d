"""Batches: requests of one shape that run together; see `nnb_batch` in ``csrc/nnburst.h``."""

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
"""An argument of a request, with its dimensions and its place in memory."""
_MOST_BYTES = 64 << 20
"""Largest size in bytes of all arguments of a model's batches. Beyond it, copying costs more than batching gains."""
_MOST_SHAPES = 8
"""Largest number of shapes with a batch: each takes memory, and a binding for each number of rows."""


class Batch:
    """A batch, which runs several requests of one shape together on its own arrays."""

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
    """The batches of one model, one per combination of shapes. A batch lives as long as its requests are bound.

    Args:
        most: Largest number of rows in a run; a request may have several.

    Raises:
        InvalidArgument: An argument has no rows.
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
        """Let the ``nnb_kernel *`` of a small request with rows run together with others of its shapes.

        Returns:
            An object that must live as long as the kernel.
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
