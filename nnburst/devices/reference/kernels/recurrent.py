"""Recurrent operations in floating point. Cells compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from msgspec import Struct

from ....errors import InvalidArgument
from ..call import Array, KernelCall

Function = Callable[[Array], Array]
Inputs = Mapping[str, Array]
_Sequence = tuple[Array, tuple[Array, ...]]
"""Outputs of all steps, and the last states."""
_LAYER_NORM_EPSILON = 1e-8


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return np.asarray(1 / (1 + np.exp(-x)))


ACTIVATIONS: dict[int, Function] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
    4: np.tanh,
    6: sigmoid,
}
"""Functions by the code of a recurrent operation: fused activations, and the two that cells are made with."""


def _activation(call: KernelCall) -> Function:
    code = call.integer("activation")
    if code not in ACTIVATIONS:
        raise InvalidArgument(f"activation is {code}; it must be one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[code]


def normalised(x: Array) -> Array:
    """Shift and scale each row to mean 0 and variance 1."""
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + _LAYER_NORM_EPSILON))


def _given(call: KernelCall, names: Iterable[str]) -> dict[str, Array]:
    return {name: call.array(name) for name in names if call.given(name)}


def _append(call: KernelCall, inputs: Inputs, function: Callable[[Inputs], Iterable[Array]]) -> None:
    """Append a call of a function of all inputs, in float64, whose results are those of the operation, in order."""
    outs = [call.out(which) for which in range(len(call.operation.outputs))]

    def step() -> None:
        wide = {name: array.astype(np.float64) for name, array in inputs.items()}
        for out, result in zip(outs, function(wide), strict=False):
            out[...] = result

    call.do(step)


# -- cells without gates ----------------------------------------------------------------------------------------------


def _rnn_step(i: Inputs, x: Array, state: Array, suffix: str, activation: Function, aux: Array | None = None) -> Array:
    z = x @ i[f"w{suffix}"].T + state @ i[f"r{suffix}"].T + i[f"b{suffix}"]
    return activation(z if aux is None else z + aux @ i[f"aux_w{suffix}"].T)


def rnn(call: KernelCall) -> None:
    """RNN: act(w x + r state + b)."""
    activation = _activation(call)

    def function(i: Inputs) -> Iterable[Array]:
        return (_rnn_step(i, i["x"], i["prev"], "", activation),) * 2

    _append(call, _given(call, ("x", "w", "r", "b", "prev")), function)


def svdf(call: KernelCall) -> None:
    """SVDF: each filter remembers its last results; the newest takes the last place, then all move by one."""
    activation, rank = _activation(call), call.integer("rank")
    filters, memory = call.dims("w_time")

    def function(i: Inputs) -> Iterable[Array]:
        state = i["prev"].reshape(-1, filters, memory).copy()
        state[:, :, -1] = i["x"] @ i["w_feature"].T
        found = (state * i["w_time"]).sum(-1).reshape(len(state), -1, rank).sum(-1)
        moved = np.concatenate([state[:, :, 1:], np.zeros((*state.shape[:2], 1))], -1)
        return moved.reshape(len(state), -1), activation(found + i.get("b", 0.0))

    _append(call, _given(call, ("x", "w_feature", "w_time", "b", "prev")), function)


# -- LSTM -------------------------------------------------------------------------------------------------------------


class _Cell(Struct, frozen=True):
    """An LSTM cell: which inputs are its own, and what it does with them."""

    suffix: str
    activation: Function
    cell_clip: float
    proj_clip: float

    @classmethod
    def of(cls, call: KernelCall, suffix: str = "") -> _Cell:
        return cls(suffix, _activation(call), abs(call.number("cell_clip")), abs(call.number("proj_clip")))

    def names(self) -> list[str]:
        """All inputs that the cell may have."""
        gates = ("in", "forget", "cell", "out")
        own = [f"{kind}_{gate}" for kind in ("w", "r", "p", "b", "n", "aux_w") for gate in gates]
        return [name + self.suffix for name in (*own, "proj", "proj_bias")]

    def step(self, i: Inputs, x: Array, out: Array, cell: Array, aux: Array | None) -> tuple[Array, Array]:
        """Return the next output and the next state of the cell."""

        def gate(name: str, seen: Array | None) -> Any:
            key = name + self.suffix
            z = x @ i[f"w_{key}"].T + out @ i[f"r_{key}"].T
            if aux is not None and f"aux_w_{key}" in i:
                z = z + aux @ i[f"aux_w_{key}"].T
            if seen is not None and f"p_{key}" in i:
                z = z + seen * i[f"p_{key}"]
            if f"n_{key}" in i:
                z = normalised(z) * i[f"n_{key}"]
            return z + i[f"b_{key}"]

        forget = sigmoid(gate("forget", cell))
        entering = sigmoid(gate("in", cell)) if f"w_in{self.suffix}" in i else 1 - forget
        cell = forget * cell + entering * self.activation(gate("cell", None))
        if self.cell_clip:
            cell = np.clip(cell, -self.cell_clip, self.cell_clip)
        out = sigmoid(gate("out", cell)) * self.activation(cell)
        if f"proj{self.suffix}" in i:
            out = out @ i[f"proj{self.suffix}"].T + i.get(f"proj_bias{self.suffix}", 0.0)
            if self.proj_clip:
                out = np.clip(out, -self.proj_clip, self.proj_clip)
        return out, cell


def lstm(call: KernelCall) -> None:
    """LSTM: one step. The first output is scratch space of implementations that need it: zeros."""
    cell = _Cell.of(call)

    def function(i: Inputs) -> Iterable[Array]:
        out, state = cell.step(i, i["x"], i["prev_out"], i["prev_cell"], None)
        return np.zeros(()), out, state, out

    _append(call, _given(call, ("x", "prev_out", "prev_cell", *cell.names())), function)


# -- sequences --------------------------------------------------------------------------------------------------------


def _in_time(array: Array, time_major: bool) -> Array:
    """Return a view with the steps first, or back."""
    return array if time_major else array.swapaxes(0, 1)


def _run(
    step: Callable[..., tuple[Array, ...]], x: Array, aux: Array | None, states: tuple[Array, ...], backward: bool
) -> _Sequence:
    """Feed a sequence, step by step; return the outputs in the order of the sequence, and the last states."""
    order = range(len(x))[::-1] if backward else range(len(x))
    outputs: dict[int, Array] = {}
    for t in order:
        states = step(x[t], *states, None if aux is None else aux[t])
        outputs[t] = states[0]
    return np.stack([outputs[t] for t in range(len(x))]), states


def sequence_rnn(call: KernelCall) -> None:
    """UNIDIRECTIONAL_SEQUENCE_RNN."""
    activation, time_major = _activation(call), bool(call.integer("time_major"))

    def function(i: Inputs) -> Iterable[Array]:
        def step(x: Array, state: Array, aux: None) -> tuple[Array]:
            return (_rnn_step(i, x, state, "", activation),)

        outputs, (last,) = _run(step, _in_time(i["x"], time_major), None, (i["prev"],), False)
        return _in_time(outputs, time_major), last

    _append(call, _given(call, ("x", "w", "r", "b", "prev")), function)


def sequence_lstm(call: KernelCall) -> None:
    """UNIDIRECTIONAL_SEQUENCE_LSTM."""
    cell, time_major = _Cell.of(call), bool(call.integer("time_major"))

    def function(i: Inputs) -> Iterable[Array]:
        def step(x: Array, out: Array, state: Array, aux: None) -> tuple[Array, Array]:
            return cell.step(i, x, out, state, aux)

        x = _in_time(i["x"], time_major)
        outputs, states = _run(step, x, None, (i["prev_out"], i["prev_cell"]), False)
        return _in_time(outputs, time_major), *states

    _append(call, _given(call, ("x", "prev_out", "prev_cell", *cell.names())), function)


def _both_ways(
    call: KernelCall,
    inputs: Inputs,
    run: Callable[[Inputs, Array, Array | None, bool], tuple[Array, tuple[Array, ...]]],
) -> None:
    """Append both directions. A second sequence goes to both cells with its weights, or instead of x to the second."""
    merged, time_major = bool(call.integer("merge")), bool(call.integer("time_major"))
    linked = any(name.startswith("aux_w") for name in inputs)

    def function(i: Inputs) -> Iterable[Array]:
        x = _in_time(i["x"], time_major)
        aux = _in_time(i["aux"], time_major) if "aux" in i else None
        forward, states = run(i, x, aux if linked else None, False)
        if linked or aux is None:
            backward, more = run(i, x, aux, True)
        else:
            backward, more = run(i, aux, None, True)
        sequences = [np.concatenate([forward, backward], -1)] if merged else [forward, backward]
        return *(_in_time(sequence, time_major) for sequence in sequences), *states, *more

    _append(call, inputs, function)


def both_ways_rnn(call: KernelCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_RNN."""
    activation = _activation(call)

    def run(i: Inputs, x: Array, aux: Array | None, backward: bool) -> _Sequence:
        suffix = "_bw" if backward else "_fw"

        def step(x: Array, state: Array, aux: Array | None) -> tuple[Array]:
            return (_rnn_step(i, x, state, suffix, activation, aux),)

        return _run(step, x, aux, (i[f"prev{suffix}"],), backward)

    own = [f"{name}{suffix}" for suffix in ("_fw", "_bw") for name in ("w", "r", "b", "prev", "aux_w")]
    _both_ways(call, _given(call, ("x", "aux", *own)), run)


def both_ways_lstm(call: KernelCall) -> None:
    """BIDIRECTIONAL_SEQUENCE_LSTM."""
    cells = [_Cell.of(call, suffix) for suffix in ("_fw", "_bw")]

    def run(i: Inputs, x: Array, aux: Array | None, backward: bool) -> _Sequence:
        cell = cells[backward]

        def step(x: Array, out: Array, state: Array, aux: Array | None) -> tuple[Array, Array]:
            return cell.step(i, x, out, state, aux)

        return _run(step, x, aux, (i[f"prev_out{cell.suffix}"], i[f"prev_cell{cell.suffix}"]), backward)

    own = [name for cell in cells for name in (*cell.names(), f"prev_out{cell.suffix}", f"prev_cell{cell.suffix}")]
    _both_ways(call, _given(call, ("x", "aux", *own)), run)
