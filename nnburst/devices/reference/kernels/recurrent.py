"""Kernels of recurrent operations in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ....errors import InvalidArgument
from ....model.types import Array
from ..call import KernelCall

Function = Callable[[Array], Array]
Inputs = Mapping[str, Array]
_States = tuple[Array, ...]
_GATES = ("in", "forget", "cell", "out")
_LAYER_NORM_EPSILON = 1e-8


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


ACTIVATIONS: dict[int, Function] = {
    0: lambda x: x,
    1: lambda x: np.maximum(x, 0),
    2: lambda x: np.clip(x, -1, 1),
    3: lambda x: np.clip(x, 0, 6),
    4: np.tanh,
    6: sigmoid,
}
"""Activation functions of recurrent operations, keyed by NNAPI code."""


def _activation(call: KernelCall) -> Function:
    code = call.integer("activation")
    if code not in ACTIVATIONS:
        raise InvalidArgument(f"activation is {code}; it must be one of {sorted(ACTIVATIONS)}")
    return ACTIVATIONS[code]


def normalise(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return np.asarray(centred / np.sqrt(np.square(centred).mean(-1, keepdims=True) + _LAYER_NORM_EPSILON))


def _given_arrays(call: KernelCall, names: Iterable[str]) -> dict[str, Array]:
    return {name: call.array(name) for name in names if call.is_given(name)}


def _append(call: KernelCall, inputs: Inputs, function: Callable[[Inputs], Iterable[Array]]) -> None:
    """Append a call of a function that computes all results, in order, from the inputs in float64."""
    outs = [call.out(which) for which in range(len(call.operation.outputs))]

    def step() -> None:
        wide = {name: array.astype(np.float64) for name, array in inputs.items()}
        for out, result in zip(outs, function(wide), strict=False):
            out[...] = result

    call.do(step)


# -- cells ------------------------------------------------------------------------------------------------------------


class _Cell(NamedTuple):
    """A recurrent cell: the names of its inputs and states, and its step function.

    The arguments of `step` are the inputs, an element of the sequence, the states, and an element of the auxiliary
    sequence or None. `step` returns the next states. The first state is also the output.
    """

    names: tuple[str, ...]
    states: tuple[str, ...]
    step: Callable[..., _States]

    def begin(self, i: Inputs) -> _States:
        return tuple(i[name] for name in self.states)

    def run(self, i: Inputs, x: Array, aux: Array | None = None, *, backward: bool = False) -> tuple[Array, _States]:
        """Run the cell over a sequence. Return the outputs in the sequence's order, and the last states."""
        states, outputs = self.begin(i), dict[int, Array]()
        for t in range(len(x))[::-1] if backward else range(len(x)):
            states = self.step(i, x[t], states, None if aux is None else aux[t])
            outputs[t] = states[0]
        return np.stack([outputs[t] for t in range(len(x))]), states


def _rnn_cell(call: KernelCall, suffix: str = "") -> _Cell:
    """Return the cell of an RNN: act(w x + r state + b)."""
    activation = _activation(call)
    w, r, b, aux_w, prev = names = tuple(name + suffix for name in ("w", "r", "b", "aux_w", "prev"))

    def step(i: Inputs, x: Array, states: _States, aux: Array | None = None) -> _States:
        z = x @ i[w].T + states[0] @ i[r].T + i[b]
        return (activation(z if aux is None else z + aux @ i[aux_w].T),)

    return _Cell(names, (prev,), step)


def _lstm_cell(call: KernelCall, suffix: str = "") -> _Cell:
    """Return the cell of an LSTM, with gates, a cell state and an optional projection."""
    activation, cell_clip, proj_clip = _activation(call), abs(call.number("cell_clip")), abs(call.number("proj_clip"))
    kinds = [f"{kind}_{gate}{suffix}" for kind in ("w", "r", "p", "b", "n", "aux_w") for gate in _GATES]
    states = (f"prev_out{suffix}", f"prev_cell{suffix}")

    def step(i: Inputs, x: Array, states: _States, aux: Array | None = None) -> _States:
        out, cell = states

        def gate(name: str, seen: Array | None) -> Any:
            key = name + suffix
            z = x @ i[f"w_{key}"].T + out @ i[f"r_{key}"].T
            if aux is not None and f"aux_w_{key}" in i:
                z = z + aux @ i[f"aux_w_{key}"].T
            if seen is not None and f"p_{key}" in i:
                z = z + seen * i[f"p_{key}"]
            if f"n_{key}" in i:
                z = normalise(z) * i[f"n_{key}"]
            return z + i[f"b_{key}"]

        forget = sigmoid(gate("forget", cell))
        entering = sigmoid(gate("in", cell)) if f"w_in{suffix}" in i else 1 - forget
        cell = forget * cell + entering * activation(gate("cell", None))
        if cell_clip:
            cell = np.clip(cell, -cell_clip, cell_clip)
        out = sigmoid(gate("out", cell)) * activation(cell)
        if f"proj{suffix}" in i:
            out = out @ i[f"proj{suffix}"].T + i.get(f"proj_bias{suffix}", 0.0)
            if proj_clip:
                out = np.clip(out, -proj_clip, proj_clip)
        return out, cell

    return _Cell((*kinds, f"proj{suffix}", f"proj_bias{suffix}", *states), states, step)


# -- one step ---------------------------------------------------------------------------------------------------------


def rnn(call: KernelCall) -> None:
    """RNN: the state is the output."""
    cell = _rnn_cell(call)
    _append(call, _given_arrays(call, ("x", *cell.names)), lambda i: cell.step(i, i["x"], cell.begin(i)) * 2)


def lstm(call: KernelCall) -> None:
    """LSTM: the first output, which other implementations use as scratch space, is zeros."""
    cell = _lstm_cell(call)

    def function(i: Inputs) -> Iterable[Array]:
        out, state = cell.step(i, i["x"], cell.begin(i))
        return np.zeros(()), out, state, out

    _append(call, _given_arrays(call, ("x", *cell.names)), function)


def svdf(call: KernelCall) -> None:
    """SVDF: the state is the last results of each filter, oldest first."""
    activation, rank = _activation(call), call.integer("rank")
    filters, memory = call.dims("w_time")

    def function(i: Inputs) -> Iterable[Array]:
        state = i["prev"].reshape(-1, filters, memory).copy()
        state[:, :, -1] = i["x"] @ i["w_feature"].T
        found = (state * i["w_time"]).sum(-1).reshape(len(state), -1, rank).sum(-1)
        moved = np.concatenate([state[:, :, 1:], np.zeros((*state.shape[:2], 1))], -1)
        return moved.reshape(len(state), -1), activation(found + i.get("b", 0.0))

    _append(call, _given_arrays(call, ("x", "w_feature", "w_time", "b", "prev")), function)


# -- sequences --------------------------------------------------------------------------------------------------------


def _in_time(array: Array, time_major: bool) -> Array:
    """Return a view with the time axis moved to the front, or back again."""
    return array if time_major else array.swapaxes(0, 1)


def _one_way(cell_of: Callable[..., _Cell]) -> Callable[[KernelCall], None]:

    def kernel(call: KernelCall) -> None:
        cell, time_major = cell_of(call), bool(call.integer("time_major"))

        def function(i: Inputs) -> Iterable[Array]:
            outputs, states = cell.run(i, _in_time(i["x"], time_major))
            return _in_time(outputs, time_major), *states

        _append(call, _given_arrays(call, ("x", *cell.names)), function)

    return kernel


def _run_bidirectional(cell_of: Callable[..., _Cell]) -> Callable[[KernelCall], None]:
    """Return the kernel that runs a forward and a backward cell.

    If an auxiliary sequence has weights, both cells read it. Without weights, the backward cell reads it in place of x.
    """

    def kernel(call: KernelCall) -> None:
        first, second = cell_of(call, "_fw"), cell_of(call, "_bw")
        inputs = _given_arrays(call, ("x", "aux", *first.names, *second.names))
        merged, time_major = bool(call.integer("merge")), bool(call.integer("time_major"))
        linked = any(name.startswith("aux_w") for name in inputs)

        def function(i: Inputs) -> Iterable[Array]:
            x = _in_time(i["x"], time_major)
            aux = _in_time(i["aux"], time_major) if "aux" in i else None
            forward, states = first.run(i, x, aux if linked else None)
            fed = (x, aux) if linked or aux is None else (aux, None)
            backward, more = second.run(i, *fed, backward=True)
            sequences = [np.concatenate([forward, backward], -1)] if merged else [forward, backward]
            return *(_in_time(sequence, time_major) for sequence in sequences), *states, *more

        _append(call, inputs, function)

    return kernel


sequence_rnn, sequence_lstm = _one_way(_rnn_cell), _one_way(_lstm_cell)
both_ways_rnn, both_ways_lstm = _run_bidirectional(_rnn_cell), _run_bidirectional(_lstm_cell)
