"""Recurrent operations in floating point. Cells compute in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import numpy as np
from msgspec import Struct

from ....errors import InvalidArgument
from ....model import Array
from ..call import KernelCall

Function = Callable[[Array], Array]
Inputs = Mapping[str, Array]
_States = tuple[Array, ...]
_GATES = ("in", "forget", "cell", "out")
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


# -- cells ------------------------------------------------------------------------------------------------------------


class _Cell(Struct, frozen=True):
    """A cell: which inputs are its own, and what it does with them.

    Attributes:
        suffix: Of the names of its inputs.
        weights, states: These names, without it; the first state is the output.
    """

    suffix: str
    activation: Function
    weights: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]]

    @classmethod
    def of(cls, call: KernelCall, suffix: str = "") -> _Cell:
        """Return the cell of an operation."""
        return cls(suffix, _activation(call))

    def names(self) -> list[str]:
        """All inputs that the cell may have."""
        return [name + self.suffix for name in (*self.weights, *self.states)]

    def begin(self, i: Inputs) -> _States:
        """Return the states before the first step."""
        return tuple(i[name + self.suffix] for name in self.states)

    def step(self, i: Inputs, x: Array, states: _States, aux: Array | None = None) -> _States:
        """Return the states after a step."""
        raise NotImplementedError

    def run(self, i: Inputs, x: Array, aux: Array | None = None, *, backward: bool = False) -> tuple[Array, _States]:
        """Feed a sequence, step by step; return the outputs in the order of the sequence, and the last states."""
        states, outputs = self.begin(i), dict[int, Array]()
        for t in range(len(x))[::-1] if backward else range(len(x)):
            states = self.step(i, x[t], states, None if aux is None else aux[t])
            outputs[t] = states[0]
        return np.stack([outputs[t] for t in range(len(x))]), states


class _RnnCell(_Cell, frozen=True):
    """act(w x + r state + b)."""

    weights = ("w", "r", "b", "aux_w")
    states = ("prev",)

    def step(self, i: Inputs, x: Array, states: _States, aux: Array | None = None) -> _States:
        z = x @ i[f"w{self.suffix}"].T + states[0] @ i[f"r{self.suffix}"].T + i[f"b{self.suffix}"]
        return (self.activation(z if aux is None else z + aux @ i[f"aux_w{self.suffix}"].T),)


class _LstmCell(_Cell, frozen=True):
    """Gates, a state of its own, perhaps a projection."""

    cell_clip: float
    proj_clip: float
    weights = (
        *(f"{kind}_{gate}" for kind in ("w", "r", "p", "b", "n", "aux_w") for gate in _GATES),
        *("proj", "proj_bias"),
    )
    states = ("prev_out", "prev_cell")

    @classmethod
    def of(cls, call: KernelCall, suffix: str = "") -> _LstmCell:
        return cls(suffix, _activation(call), abs(call.number("cell_clip")), abs(call.number("proj_clip")))

    def step(self, i: Inputs, x: Array, states: _States, aux: Array | None = None) -> _States:
        out, cell = states

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


# -- one step ---------------------------------------------------------------------------------------------------------


def rnn(call: KernelCall) -> None:
    """RNN: the state is the output."""
    cell = _RnnCell.of(call)
    _append(call, _given(call, ("x", *cell.names())), lambda i: cell.step(i, i["x"], cell.begin(i)) * 2)


def lstm(call: KernelCall) -> None:
    """LSTM. The first output is scratch space of implementations that need it: zeros."""
    cell = _LstmCell.of(call)

    def function(i: Inputs) -> Iterable[Array]:
        out, state = cell.step(i, i["x"], cell.begin(i))
        return np.zeros(()), out, state, out

    _append(call, _given(call, ("x", *cell.names())), function)


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


# -- sequences --------------------------------------------------------------------------------------------------------


def _in_time(array: Array, time_major: bool) -> Array:
    """Return a view with the steps first, or back."""
    return array if time_major else array.swapaxes(0, 1)


def _one_way(kind: type[_Cell]) -> Callable[[KernelCall], None]:
    """Return the kernel of a sequence of steps."""

    def kernel(call: KernelCall) -> None:
        cell, time_major = kind.of(call), bool(call.integer("time_major"))

        def function(i: Inputs) -> Iterable[Array]:
            outputs, states = cell.run(i, _in_time(i["x"], time_major))
            return _in_time(outputs, time_major), *states

        _append(call, _given(call, ("x", *cell.names())), function)

    return kernel


def _both_ways(kind: type[_Cell]) -> Callable[[KernelCall], None]:
    """Return the kernel of two cells, of which one begins at the end.

    A second sequence goes to both with its weights, or instead of x to the second.
    """

    def kernel(call: KernelCall) -> None:
        first, second = kind.of(call, "_fw"), kind.of(call, "_bw")
        inputs = _given(call, ("x", "aux", *first.names(), *second.names()))
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


sequence_rnn, sequence_lstm = _one_way(_RnnCell), _one_way(_LstmCell)
both_ways_rnn, both_ways_lstm = _both_ways(_RnnCell), _both_ways(_LstmCell)
