"""A kernel's interface to an operation: arrays by name, dequantised values, and the list of NumPy calls (steps)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...model.operand_types import operand_info
from ...model.operation_types import FusedActivation
from ...model.operation_view import OperationView
from ...model.types import Array, OperandDesc
from ..common import activation_limits, round_half_away

if TYPE_CHECKING:
    from .graph import Binding

KernelStep = Callable[[], Any]


def clamping(values: Array, low: Any, high: Any, out: Array) -> Iterator[KernelStep]:
    """Yield the calls that clamp values, one for each limit that is not None.

    The limits become arrays now, because NumPy would convert a number in every call.
    """
    for cut, limit in ((np.maximum, low), (np.minimum, high)):
        if limit is not None:
            yield partial(cut, values, np.array(limit, values.dtype), out=out)
            values = out


def quantise(steps: Array, operand: OperandDesc, code: int = FusedActivation.NONE) -> Array:
    """Return the stored values for multiples of the scale: round halves away from zero, then clip.

    Args:
        steps: The multiples: real values divided by the scale.
        code: The fused activation, which limits the result.
    """
    low, high = activation_limits(operand, code)
    return np.asarray(np.clip(round_half_away(steps) + operand.zero_point, low, high))


def encode_table(source: OperandDesc, target: OperandDesc, function: Callable[[Array], Array]) -> Array:
    """Return a function's results as stored values of `target`, one for each of the 256 stored values of `source`."""
    codes = np.arange(256, dtype=np.uint8).view(operand_info(source.type).dtype or np.uint8)
    with np.errstate(all="ignore"):
        real = function(_decode_into(codes, source, np.empty(256)))
        return quantise(real / target.scale, target).astype(operand_info(target.type).dtype)


class KernelCall(OperationView):
    """An operation of a request that is being bound.

    A kernel requests arrays and appends steps. Results that depend only on constants are computed before a run.

    * `array` and `out` return stored values. The array of `out` is dense.
    * `real` and `real_out` return real values, in float64 for quantised data, else in float32. Steps convert them.
      After the last step, the fused activation clamps the contents of `real_out`, which are then stored.
    * `centred` returns stored value minus zero point, for exact integer arithmetic in float64.

    The prepared model keeps results of `centred` and `real` for constants.
    """

    partial = False

    def __init__(self, binding: Binding, position: int, *, eager: bool) -> None:
        graph = binding.graph
        row, match = graph.matches[position]
        super().__init__(graph.subgraph.operations[position], graph.subgraph.operands, row, match)
        self._binding = binding
        self._position = position
        self._eager = eager
        self._arrays = binding.arrays
        self._snapshots: dict[int, Array] = {}
        self._steps: list[KernelStep] = []
        self._tail: list[KernelStep] = []

    # -- constants --------------------------------------------------------------------------------------------

    def _dims_of(self, index: int) -> tuple[int, ...]:
        return tuple(self._arrays[index].shape)

    def _value_of(self, index: int) -> Array | None:
        """Return a copy of a parameter's value, made once because a client can change the original."""
        if not (self._eager or self._is_constant(index)):
            return None
        if index not in self._snapshots:
            self._snapshots[index] = self._arrays[index].copy()
        return self._snapshots[index]

    def is_given(self, name: str) -> bool:
        return self.count(name) > 0 and self.index(name) not in self._binding.omitted

    def _is_constant(self, index: int) -> bool:
        return index in self._binding.graph.constants

    def derive(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """Return an array derived from constants of this operation, shared by all requests to the prepared model."""
        kept, key = self._binding.graph.derived, (self._position, key)
        return kept[key] if key in kept else kept.setdefault(key, make())

    def scratch(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array for a kernel's own use. Raises the errors of `MemoryBudget.take_scratch`."""
        self._binding.budget.take_scratch(shape, math.prod(shape) * np.dtype(dtype).itemsize)
        return np.empty(shape, dtype)

    # -- steps ------------------------------------------------------------------------------------------------

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._steps.append(partial(function, *args, **kwargs))

    def compute(self, function: Callable[..., Any], *arrays: Array) -> None:
        """Append a step that calls `function`, which returns the output's values before quantisation."""
        self.do(_assign, self.real_out(), function, arrays)

    def move(self, function: Callable[..., Any], *arrays: Array) -> None:
        """Append a step that calls `function`, which returns the output's values as they are stored."""
        self.do(_assign, self.out(), function, arrays)

    def finished_steps(self) -> list[KernelStep]:
        """Return the appended steps, including the storing of results, and drop this object's references to them."""
        steps = self._steps + self._tail
        self._steps, self._tail = [], []
        return steps

    # -- stored values ----------------------------------------------------------------------------------------

    def array(self, name: str, which: int = 0) -> Array:
        return self._arrays[self.index(name, which)]

    def out(self, which: int = 0) -> Array:
        return self._arrays[self.operation.outputs[which]]

    def place(self, which: int, dims: tuple[int, ...]) -> None:
        """Create the array of an output whose size becomes known only during the run."""
        self._binding.place(self.operation.outputs[which], dims)

    # -- real values ------------------------------------------------------------------------------------------

    @property
    def real_dtype(self) -> type[np.floating[Any]]:
        """The dtype of real values: float64 for quantised data, else float32."""
        return np.float64 if self.info.is_quantised else np.float32

    def real(self, name: str, which: int = 0) -> Array:
        """Return an array for an input's dequantised values. Each run converts them, if they are not constant."""
        index, dtype = self.index(name, which), self.real_dtype
        operand, source = self._operands[index], self._arrays[index]
        if source.dtype == dtype:
            return source
        if self._is_constant(index):
            return self.derive(("real", index), lambda: _decode_into(source, operand, np.empty(source.shape, dtype)))
        buffer = self.scratch(source.shape, dtype)
        self.do(_decode_into, source, operand, buffer)
        return buffer

    def centred(self, name: str, arrange: Callable[[Array], Array] | None = None) -> Array:
        """Return an input's stored values minus the zero point; floats are returned unchanged.

        Args:
            arrange: Function that returns a view of the stored values, such as a transposed one.
        """
        index, dtype = self.index(name), self.real_dtype
        stored, zero_point = self._arrays[index], dtype(self.operand(name).zero_point)
        if arrange is None and stored.dtype == dtype:
            return stored
        source = stored if arrange is None else arrange(stored)
        if self._is_constant(index):
            return self.derive(("centred", index), lambda: np.ascontiguousarray(source.astype(dtype) - zero_point))
        buffer = self.scratch(source.shape, dtype)
        self.do(np.subtract, source, zero_point, buffer)
        return buffer

    def real_out(self, which: int = 0) -> Array:
        """Return a dense array, which the kernel fills with an output's real values."""
        out, operand = self.out(which), self.output(which)
        code = self.integer("act") if self.count("act") else int(FusedActivation.NONE)
        if operand_info(operand.type).is_quantised:
            buffer = self.scratch(out.shape, np.float64)
            self._tail.append(lambda: np.copyto(out, quantise(buffer * (1.0 / operand.scale), operand, code), "unsafe"))
            return buffer
        buffer = out if out.dtype == np.float32 else self.scratch(out.shape, np.float32)
        self._tail += clamping(buffer, *activation_limits(operand, code), buffer)
        if buffer is not out:
            self._tail.append(partial(np.copyto, out, buffer, "same_kind"))
        return buffer


def _assign(out: Array, function: Callable[..., Any], arrays: tuple[Array, ...]) -> None:
    out[...] = function(*arrays)


def _decode_into(source: Array, operand: OperandDesc, buffer: Array) -> Array:
    np.copyto(buffer, source)
    if operand.zero_point:
        buffer -= operand.zero_point
    params = operand.extra_params
    if operand_info(operand.type).is_quantised:
        buffer *= operand.scale
    elif params is not None and not isinstance(params, bytes):
        shape = [1] * source.ndim
        shape[params.channel_dim] = -1
        buffer *= np.array(params.scales).reshape(shape)
    return buffer
