"""Kernels of LSTM cells on integers."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ....errors import InvalidArgument
from ....model.types import Array
from ..call import KernelCall
from .fixed_point import divide, multiply, normalise, sigmoid, tanh, times, to_16_bits

_GATES = ("in", "forget", "cell", "out")


def _readers(call: KernelCall, names: list[str]) -> dict[str, Callable[[], Array]]:
    """Return, for each input with a value, a function that reads stored values minus zero point as int64."""

    def reader(name: str) -> Callable[[], Array]:
        array, zero_point = call.array(name), call.operand(name).zero_point
        return lambda: array.astype(np.int64) - zero_point

    return {name: reader(name) for name in names if call.is_given(name)}


def quantized_16bit_lstm(call: KernelCall) -> None:
    """QUANTIZED_16BIT_LSTM: the state has 11 binary digits after the point, the output is in units of 1/128.

    A gate multiplies a row by a matrix. The row is the input, then the previous output. The matrix is the recurrent
    weights, then the input weights. So the first recurrent weights multiply the input, as on other devices.
    """
    names = [f"{kind}_{gate}" for kind in "wrb" for gate in _GATES]
    read = _readers(call, ["x", "prev_out", "prev_cell", *names])
    factors = {gate: call.operand("x").scale * call.operand(f"w_{gate}").scale * 2**12 for gate in _GATES}
    cell_out, out = call.out(0), call.out(1)
    (batch, inputs), units = call.dims("x"), call.dims("prev_out")[-1]
    shapes = {"w": (units, inputs), "r": (units, units), "b": (units,), "prev": (batch, units)}
    for name in read:  # Concatenated weights of wrong sizes could fit by chance.
        wanted = shapes.get(name.split("_")[0], (batch, inputs))
        if call.dims(name) != wanted:
            raise InvalidArgument(f"{name} has dimensions {list(call.dims(name))}; they must be {list(wanted)}")

    def step() -> None:
        i = {name: values() for name, values in read.items()}
        row = np.concatenate([i["x"], i["prev_out"]], 1)

        def gate(name: str) -> Array:
            z = row @ np.concatenate([i[f"r_{name}"], i[f"w_{name}"]], 1).T + i[f"b_{name}"]
            return to_16_bits(multiply(z, factors[name]))

        added = divide(times(sigmoid(gate("in")), tanh(gate("cell"))), 4)
        cell = to_16_bits(added + times(sigmoid(gate("forget")), i["prev_cell"]))
        result = divide(times(sigmoid(gate("out")), tanh(to_16_bits(cell << 1))), 8)
        cell_out[...] = cell
        out[...] = np.clip(result, -128, 127) + 128

    call.do(step)


def quantized_lstm(call: KernelCall) -> None:
    """QUANTIZED_LSTM: an LSTM with int8 inputs and weights.

    With layer normalisation, each gate has its own scale before the normalisation. Each product is rounded to 16 bits
    before the next product is added. Without a projection, the output is the hidden state.
    """
    kinds = [f"{kind}_{gate}" for kind in "wrpbn" for gate in _GATES]
    read = _readers(call, ["x", "prev_out", "prev_cell", "proj", "proj_bias", *kinds])
    before, cell_digits = call.operand("prev_out"), _digits(call.operand("prev_cell").scale)
    norms = {gate: call.operand(f"n_{gate}").scale if call.is_given(f"n_{gate}") else 0.0 for gate in _GATES}
    units = {gate: call.number(f"scale_{gate}") if norms[gate] else 2.0**-12 for gate in _GATES}
    hidden_scale, hidden_zero = call.number("hidden_scale"), call.integer("hidden_zero_point")
    if not (min(units.values()) > 0 and hidden_scale > 0):
        raise InvalidArgument("the scales of the gates and of the hidden state must be positive")
    scales = {"w": call.operand("x").scale, "r": before.scale, "p": 2.0**-cell_digits}
    factors = {
        f"{kind}_{gate}": scales[kind] * call.operand(f"{kind}_{gate}").scale / units[gate]
        for kind, gate in (name.split("_") for name in kinds if name in read and name[0] in scales)
    }
    cell_clip = _clip(call, "cell_clip", 2.0**-cell_digits, 2**15 - 1)
    proj_clip = _clip(call, "proj_clip", before.scale, 127)
    projection, outs = call.operand("proj").scale, [call.out(which) for which in range(3)]

    def step() -> None:
        i = {name: values() for name, values in read.items()}

        def gate(name: str, seen: Array | None) -> Array:
            bias, norm = i[f"b_{name}"], norms[name]
            z = multiply(i["x"] @ i[f"w_{name}"].T + (0 if norm else bias), factors[f"w_{name}"])
            z = to_16_bits(to_16_bits(z) + multiply(i["prev_out"] @ i[f"r_{name}"].T, factors[f"r_{name}"]))
            if seen is not None and f"p_{name}" in i:
                z = to_16_bits(z + multiply(seen * i[f"p_{name}"], factors[f"p_{name}"]))
            return normalise(z, i[f"n_{name}"], bias, norm) if norm else z

        cell = i["prev_cell"]
        forget = sigmoid(gate("forget", cell))
        entering = sigmoid(gate("in", cell)) if "w_in" in i else 2**15 - 1 - forget
        fresh = divide(entering * tanh(gate("cell", None)), 30 - cell_digits)
        cell = np.clip(divide(forget * cell, 15) + fresh, *cell_clip)
        gated = sigmoid(gate("out", cell)) * tanh(cell, 15 - cell_digits)
        hidden = np.clip(multiply(gated, 2.0**-30 / hidden_scale) + hidden_zero, -128, 127)
        if "proj" in i:
            z = (hidden - hidden_zero) @ i["proj"].T + i.get("proj_bias", 0)
            z = multiply(z, hidden_scale * projection / before.scale) + before.zero_point
            hidden = np.clip(np.clip(z, -128, 127), *proj_clip)
        for array, values in zip(outs, (hidden, cell, hidden), strict=True):
            array[...] = values

    call.do(step)


def _digits(scale: float) -> int:
    """Return the number of binary digits after the point for a scale."""
    digits = round(-math.log2(scale))
    if not math.isclose(scale, 2.0**-digits, rel_tol=1e-3) or not 9 <= digits <= 15:
        raise InvalidArgument(f"prev_cell has scale {scale:g}; it must be a power of two from 2^-15 to 2^-9")
    return digits


def _clip(call: KernelCall, name: str, scale: float, most: int) -> tuple[int, int]:
    """Return the smallest and the largest stored value that the clip limit in the input `name` allows.

    A limit of 0 clips nothing.
    """
    clip = call.number(name) / scale if call.is_given(name) else 0.0
    return (-int(min(clip, most)), int(min(clip, most))) if clip > 0 else (-most - 1, most)
