"""LSTM cells on integers: real arithmetic, rounded wherever the fixed-point cell keeps fewer digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....model import Operand, SymmPerChannelQuantParams, operand_info
from ..call import KernelCall, round_half_away
from .recurrent import normalised, sigmoid

__all__ = ["quantized_16bit_lstm", "quantized_lstm"]

Array = np.ndarray[Any, np.dtype[Any]]
_GATES = ("in", "forget", "cell", "out")


def _rounded(real: Array, scale: float, bits: int = 16) -> Array:
    """Return real values as a signed integer of so many bits would hold them."""
    most = 2 ** (bits - 1)
    return np.asarray(np.clip(round_half_away(real / scale), -most, most - 1) * scale)


def _reader(call: KernelCall, name: str, scale: float | None = None) -> Callable[[], Array]:
    """Return a function that gives an input's real values; `scale` where the operand does not say it."""
    array, operand = call.array(name), call.operand(name)
    assert not isinstance(operand.extra_params, SymmPerChannelQuantParams)
    factor, zero_point = operand.scale or scale or 0.0, operand.zero_point
    return lambda: (array.astype(np.float64) - zero_point) * factor


def _store(real: Array, operand: Operand, out: Array) -> None:
    dtype = operand_info(operand.type).dtype
    assert dtype is not None
    bounds = np.iinfo(dtype)
    out[...] = np.clip(round_half_away(real / operand.scale) + operand.zero_point, bounds.min, bounds.max)


def _bias_scale(call: KernelCall, gate: str) -> float:
    return call.operand("x").scale * call.operand(f"w_{gate}").scale


def quantized_16bit_lstm(call: KernelCall) -> None:
    """QUANTIZED_16BIT_LSTM: gates in 4.12 and 0.15, the cell in 5.11 binary digits, the output in 1/128."""
    names = ("x", "prev_out", "prev_cell", *(f"{kind}_{gate}" for kind in ("w", "r") for gate in _GATES))
    read = {name: _reader(call, name) for name in names}
    read |= {f"b_{gate}": _reader(call, f"b_{gate}", _bias_scale(call, gate)) for gate in _GATES}
    targets = [(call.output(which), call.out(which)) for which in (0, 1)]

    def step() -> None:
        i = {name: values() for name, values in read.items()}

        def gate(name: str) -> Array:
            z = i["x"] @ i[f"w_{name}"].T + i["prev_out"] @ i[f"r_{name}"].T + i[f"b_{name}"]
            return _rounded(z, 2.0**-12)

        entering, forget, out = (_rounded(sigmoid(gate(name)), 2.0**-15) for name in ("in", "forget", "out"))
        added = _rounded(entering * _rounded(np.tanh(gate("cell")), 2.0**-15), 2.0**-15)
        cell = _rounded(_rounded(added, 2.0**-11) + _rounded(forget * i["prev_cell"], 2.0**-11), 2.0**-11)
        result = _rounded(out * _rounded(np.tanh(cell), 2.0**-15), 2.0**-15)
        for real, (operand, array) in zip((cell, result), targets, strict=True):
            _store(real, operand, array)

    call.do(step)


def quantized_lstm(call: KernelCall) -> None:
    """QUANTIZED_LSTM: int8 inputs and weights; each gate has a scale before its layer normalisation."""
    scales = {gate: call.number(f"scale_{gate}") for gate in _GATES}
    hidden_scale, hidden_zero = call.number("hidden_scale"), call.integer("hidden_zero_point")
    clips = {name: call.number(name) if call.given(name) else 0.0 for name in ("cell_clip", "proj_clip")}
    names = [f"{kind}_{gate}" for kind in ("w", "r", "p", "n") for gate in _GATES]
    read = {name: _reader(call, name) for name in ("x", "prev_out", "prev_cell", "proj", *names) if call.given(name)}
    for gate in _GATES:
        if call.given(f"b_{gate}"):
            norm = call.operand(f"n_{gate}").scale / 1024 if call.given(f"n_{gate}") else 0.0
            read[f"b_{gate}"] = _reader(call, f"b_{gate}", norm or _bias_scale(call, gate))
    if call.given("proj_bias"):
        read["proj_bias"] = _reader(call, "proj_bias", hidden_scale * call.operand("proj").scale)
    targets = [(call.output(which), call.out(which)) for which in (0, 1, 2)]
    cell_scale = call.operand("prev_cell").scale

    def step() -> None:
        i = {name: values() for name, values in read.items()}

        def gate(name: str, seen: Array | None) -> Array:
            z = i["x"] @ i[f"w_{name}"].T + i["prev_out"] @ i[f"r_{name}"].T
            if seen is not None and f"p_{name}" in i:
                z = z + seen * i[f"p_{name}"]
            if f"n_{name}" in i:
                z = normalised(_rounded(z, scales[name])) * i[f"n_{name}"]
            return _rounded(z + i[f"b_{name}"], 2.0**-12)

        cell = i["prev_cell"]
        forget = _rounded(sigmoid(gate("forget", cell)), 2.0**-15)
        entering = _rounded(sigmoid(gate("in", cell)), 2.0**-15) if "w_in" in i else 1 - forget
        fresh = _rounded(np.tanh(gate("cell", None)), 2.0**-15)
        cell = _rounded(_rounded(forget * cell, cell_scale) + _rounded(entering * fresh, cell_scale), cell_scale)
        if clips["cell_clip"]:
            cell = np.clip(cell, -clips["cell_clip"], clips["cell_clip"])
        out = _rounded(sigmoid(gate("out", cell)), 2.0**-15) * _rounded(np.tanh(cell), 2.0**-15)
        hidden = np.clip(round_half_away(out / hidden_scale) + hidden_zero, -128, 127)
        out = (hidden - hidden_zero) * hidden_scale
        if "proj" in i:
            out = out @ i["proj"].T + i.get("proj_bias", 0.0)
            if clips["proj_clip"]:
                out = np.clip(out, -clips["proj_clip"], clips["proj_clip"])
        for real, (operand, array) in zip((out, cell, out), targets, strict=True):
            _store(real, operand, array)

    call.do(step)
