"""What a kernel sees of an operation while it is bound: arrays by name, real values, and the list of steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ...model import (
    Array,
    FusedActivation,
    OperandDesc,
    OperandInfo,
    OperationView,
    operand_info,
)
from ..common import activation_limits, round_half_away

if TYPE_CHECKING:
    from .graph import Binding

KernelStep = Callable[[], Any]

_EXACT = 2.0**24
"""Below it every integer is a float32."""
_AT_ONCE = 1 << 13
"""Elements that are quantised at a time."""


def clamping(values: Array, low: Any, high: Any, out: Array) -> Iterator[KernelStep]:
    """Yield the calls that cut values to limits, None for none; nothing if there are none.

    The limits are arrays, for NumPy would make one of a number in every call, which takes as long as a small clamp.
    """
    for cut, limit in ((np.maximum, low), (np.minimum, high)):
        if limit is not None:
            yield partial(cut, values, np.array(limit, values.dtype), out=out)
            values = out


def _codes(info: OperandInfo) -> Array:
    """Return the 256 values of a one-byte type, ordered by bit pattern."""
    assert info.dtype is not None
    return np.arange(256, dtype=np.uint8).view(info.dtype)


def decode_table(operand: OperandDesc, dtype: Any = np.float64) -> Array:
    """Return the real value of each of the 256 bit patterns of a one-byte quantised operand."""
    codes = _codes(operand_info(operand.type)).astype(np.float64)
    table: Array = ((codes - operand.zero_point) * operand.scale).astype(dtype)
    return table


def encode(real: Array, operand: OperandDesc) -> Array:
    """Quantise real values to an operand's stored values: round half away from zero, then cut."""
    low, high = activation_limits(operand, FusedActivation.NONE)
    stored = round_half_away(real / operand.scale) + operand.zero_point
    codes: Array = np.clip(stored, low, high).astype(operand_info(operand.type).dtype)
    return codes


def encode_table(source: OperandDesc, target: OperandDesc, function: Callable[[Array], Array]) -> Array:
    """Return what a function of one real number makes of each of the 256 bit patterns, as stored values."""
    with np.errstate(all="ignore"):
        return encode(function(decode_table(source)), target)


class KernelCall(OperationView):
    """An operation that is being bound.

    A kernel asks for arrays and appends steps; nothing is computed before the steps run, except for constants.

    * `array` and `out` are the stored values; `out` is dense.
    * `real` and `real_out` are real values in float32, or float64 if quantised; conversions are steps of their own.
      What the kernel leaves in `real_out` is clamped by the fused activation and stored after its last step.
    * `centred` is stored value minus zero point, for exact integer arithmetic in float64.

    What `centred` and `real` make of a constant is kept with the prepared model.
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

    # -- what is known ----------------------------------------------------------------------------------------

    def _dims_of(self, index: int) -> tuple[int, ...]:
        return tuple(self._arrays[index].shape)

    def _value_of(self, index: int) -> Array | None:
        """Return a parameter's value, copied once: a client may change it between two looks."""
        if not (self._eager or self._is_constant(index)):
            return None
        if index not in self._snapshots:
            self._snapshots[index] = self._arrays[index].copy()
        return self._snapshots[index]

    def given(self, name: str) -> bool:
        return self.count(name) > 0 and self.index(name) not in self._binding.omitted

    def _is_constant(self, index: int) -> bool:
        return index in self._binding.graph.constants

    def derived(self, key: Hashable, make: Callable[[], Array]) -> Array:
        """Return an array derived from constants of this operation; made once per prepared model.

        Two threads may both make it; one result is kept.
        """
        kept, key = self._binding.graph.derived, (self._position, key)
        return kept[key] if key in kept else kept.setdefault(key, make())

    def scratch(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Return an array for a kernel's own use, that its steps keep; raises as `MemoryBudget.take_scratch`."""
        self._binding.budget.take_scratch(shape, math.prod(shape) * np.dtype(dtype).itemsize)
        return np.empty(shape, dtype)

    # -- steps ------------------------------------------------------------------------------------------------

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._steps.append(partial(function, *args, **kwargs))

    def clamp(self, values: Array, low: Any, high: Any, out: Array) -> None:
        """Append the calls that cut values to limits, of which one or both may be None."""
        self._steps += clamping(values, low, high, out)

    def compute(self, function: Callable[..., Any], *arrays: Array) -> None:
        """Append a call whose result becomes the real values of the output."""
        self.do(_assign, self.real_out(), function, arrays)

    def move(self, function: Callable[..., Any], *arrays: Array) -> None:
        """Append a call whose result becomes the stored values of the output."""
        self.do(_assign, self.out(), function, arrays)

    def finished_steps(self) -> list[KernelStep]:
        """Hand over the steps, with those that store the results last. Once: kept here too, they would form a cycle."""
        steps = self._steps + self._tail
        self._steps, self._tail = [], []
        return steps

    # -- stored values ----------------------------------------------------------------------------------------

    def array(self, name: str, which: int = 0) -> Array:
        """Return an input's stored values."""
        return self._arrays[self.index(name, which)]

    def out(self, which: int = 0) -> Array:
        return self._arrays[self.operation.outputs[which]]

    def place(self, which: int, dims: tuple[int, ...]) -> None:
        """Give an output its array, once a measured operation knows how large it is."""
        self._binding.place(self.operation.outputs[which], dims)

    def clamp_out(self) -> None:
        """Append the fused activation on stored values of the output."""
        low, high = activation_limits(self.output(), self.integer("act"))
        out = self.out()
        if self.info.is_quantised and self.integer("act") == FusedActivation.NONE:
            return
        self._steps += clamping(out, low, high, out)

    # -- real values ------------------------------------------------------------------------------------------

    @property
    def real_dtype(self) -> type[np.floating[Any]]:
        """In what this operation computes: float64 if its data is quantised, else float32."""
        return np.float64 if self.info.is_quantised else np.float32

    def real(self, name: str, which: int = 0) -> Array:
        """Return an input's real values, converted by a step if they are stored otherwise."""
        index, dtype = self.index(name, which), self.real_dtype
        operand, source = self._operands[index], self._arrays[index]
        if source.dtype == dtype:
            return source
        if self._is_constant(index):
            return self.derived(("real", index), lambda: _decode_into(source, operand, np.empty(source.shape, dtype)))
        buffer = self.scratch(source.shape, dtype)
        if source.itemsize == 1 and operand_info(operand.type).is_quantised:
            table = decode_table(operand, dtype)
            self.do(table.take, source.view(np.uint8), None, buffer, "clip")
        else:
            self.do(_decode_into, source, operand, buffer)
        return buffer

    def sum_dtype(self, name: str, channel_axis: int) -> type[np.floating[Any]]:
        """In what sums of products of x with a filter, over all axes but one, are exact: float32, else float64."""
        if not self.info.is_quantised:
            return np.float32
        index, operand, x = self.index(name), self.operand(name), self.operand("x")
        if not self._is_constant(index):
            return np.float64

        def largest() -> Array:
            weights = np.abs(self._arrays[index].astype(np.float64) - operand.zero_point)
            over = tuple(axis for axis in range(weights.ndim) if axis != channel_axis)
            codes = np.abs(_codes(operand_info(x.type)).astype(np.float64) - x.zero_point)
            return np.atleast_1d(weights.sum(over).max() * codes.max())

        return np.float32 if self.derived(("largest sum", index), largest)[0] < _EXACT else np.float64

    def centred(self, name: str, arrange: Callable[[Array], Array] = lambda array: array, dtype: Any = None) -> Array:
        """Return stored value minus zero point (the value itself for floats), rearranged and dense.

        Args:
            arrange: Makes a view of the stored values, e.g. a transposed one.
            dtype: In what; default `real_dtype`.
        """
        index, dtype = self.index(name), dtype or self.real_dtype
        source = arrange(self._arrays[index])
        if self._is_constant(index):
            zero_point = dtype(self.operand(name).zero_point)
            return self.derived(
                ("centred", index, dtype), lambda: np.ascontiguousarray(source.astype(dtype) - zero_point)
            )
        buffer = self.scratch(source.shape, dtype)
        self.centre_into(name, source, buffer)
        return buffer

    def centre_into(self, name: str, source: Array, target: Array) -> None:
        """Append the step that writes stored value minus zero point of an input's view into an array."""
        zero_point = self.operand(name).zero_point
        if zero_point == 0:
            self.do(np.copyto, target, source)
        else:
            self.do(np.subtract, source, target.dtype.type(zero_point), target)

    def store_sums(self, sums: Array, out: Array, bias: Array, factor: Any) -> None:
        """Append the step that quantises sums of products to the output: (sum + bias) x factor.

        Args:
            sums: Integers [rows, channels] in floating point.
            out: Stored values [rows, channels].
            factor: Real value of a step of the sums, for all channels or by channel.
        """
        self._steps += self._storing(self.output(), self.integer("act"), sums, out, bias, factor)

    def real_out(self, which: int = 0) -> Array:
        """Return the array for the real values of an output; dense."""
        out, operand = self.out(which), self.output(which)
        info = operand_info(operand.type)
        code = self.integer("act") if self.count("act") else int(FusedActivation.NONE)
        low, high = activation_limits(operand, code)
        if out.dtype == np.float32:
            self._tail += clamping(out, low, high, out)
            return out
        if not info.is_quantised:
            buffer = self.scratch(out.shape, np.float32)
            self._tail += clamping(buffer, low, high, buffer)
            self._tail.append(partial(np.copyto, out, buffer, "same_kind"))
            return buffer
        buffer = self.scratch(out.shape, np.float64)
        flat = buffer.reshape(-1, 1) if buffer.ndim == 0 else buffer.reshape(-1, buffer.shape[-1])
        self._tail += self._storing(operand, code, flat, out.reshape(flat.shape))
        return buffer

    def _storing(
        self, operand: OperandDesc, code: int, values: Array, out: Array, bias: Any = None, factor: Any = 1.0
    ) -> Iterator[KernelStep]:
        """Yield the steps that quantise rows of real values: round half away from zero, then cut.

        As many rows at a time as stay in a cache.
        """
        rows, columns = values.shape
        at_once = max(1, min(rows, _AT_ONCE // max(1, columns)))
        buffers = self.scratch((2, at_once, columns), np.float64)
        integers = self.scratch((at_once, columns), np.int32)
        low, high = (limit - operand.zero_point for limit in activation_limits(operand, code))
        factor = np.asarray(factor / operand.scale)
        for start in range(0, rows, at_once):
            part, stored = values[start : start + at_once], out[start : start + at_once]
            real, half, whole = (buffer[: len(part)] for buffer in (*buffers, integers))
            if bias is not None:
                yield partial(np.add, part, bias, real)
                part = real
            yield partial(np.multiply, part, factor, real)
            yield partial(np.copysign, 0.5, real, half)
            yield partial(np.add, real, half, real)
            yield from clamping(real, low, high, real)
            yield partial(store, real, whole, operand.zero_point, stored)


def store(real: Array, whole: Array, zero_point: int, out: Array) -> None:
    """Store real values without their fraction plus a zero point; `whole` is room for int32."""
    np.copyto(whole, real, "unsafe")
    np.add(whole, zero_point, out, casting="unsafe")


def _assign(out: Array, function: Callable[..., Any], arrays: tuple[Array, ...]) -> None:
    out[...] = function(*arrays)


def _decode_into(source: Array, operand: OperandDesc, buffer: Array) -> Array:
    """Write the real values of stored ones, per channel if the operand is; return the buffer."""
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
