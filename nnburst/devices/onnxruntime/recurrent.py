"""Lowering of recurrent operations. A sequence becomes one ONNX node; a single step becomes several nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import GeneralFailure
from .lowering import LoweredCall

_GATES = ("in", "forget", "cell", "out")
_ORDER = ("in", "out", "forget", "cell")
"""Order of an LSTM's gates in ONNX."""
_KINDS = {0: "Affine", 1: "Relu", 4: "Tanh", 6: "Sigmoid"}
"""ONNX names of cells' activations, keyed by NNAPI code."""
_LIMITS: dict[int, tuple[float, float | None]] = {1: (0, None), 2: (-1, 1), 3: (0, 6)}
_LAYER_NORM_EPSILON = 1e-8


def _activate(c: LoweredCall, value: str) -> str:
    code = c.integer("activation")
    if code in _LIMITS:
        return c.clip(value, *_LIMITS[code])
    if code in (4, 6):
        return c.node("Tanh" if code == 4 else "Sigmoid", value)
    if code:
        raise GeneralFailure(f"there is no activation {code}")
    return value


def _join(c: LoweredCall, names: Sequence[str]) -> str:
    return c.node("Concat", *map(c.real, names), axis=0) if len(names) > 1 else c.real(names[0])


def _product(c: LoweredCall, x: str, weights: str, *sums: str) -> str:
    """Return x weights^T + sums."""
    return c.node("Gemm", x, weights, *sums, transB=1)


# -- one step ---------------------------------------------------------------------------------------------------------


def rnn(c: LoweredCall) -> None:
    sums = _product(c, c.real("prev"), c.real("r"), _product(c, c.real("x"), c.real("w"), c.real("b")))
    found = _activate(c, sums)
    c.store_result(found, 0)
    c.store_result(found, 1)


def _normalise(c: LoweredCall, x: str) -> str:
    wide, axes = c.cast(x, np.float64), c.array([-1])
    centred = c.node("Sub", wide, c.node("ReduceMean", wide, axes))
    variance = c.node("ReduceMean", c.node("Mul", centred, centred), axes)
    spread = c.node("Sqrt", c.node("Add", variance, c.array(_LAYER_NORM_EPSILON, np.float64)))
    return c.cast(c.node("Div", centred, spread), np.float32)


def lstm(c: LoweredCall) -> None:
    """Lower LSTM. Its first output, which other implementations use as scratch space, is zeros."""
    gates = _GATES if c.is_given("w_in") else _GATES[1:]
    cell, normalises = c.real("prev_cell"), c.is_given("n_out")
    bias = [] if normalises else [_join(c, [f"b_{gate}" for gate in gates])]
    weights, loops = (_join(c, [f"{kind}_{gate}" for gate in gates]) for kind in "wr")
    sums = _product(c, c.real("prev_out"), loops, _product(c, c.real("x"), weights, *bias))
    parts = dict(zip(gates, c.nodes(len(gates), "Split", sums, axis=1, num_outputs=len(gates)), strict=True))

    def gate(name: str, seen: str = "") -> str:
        z = parts[name]
        if seen and c.is_given(f"p_{name}"):
            z = c.node("Add", z, c.node("Mul", seen, c.real(f"p_{name}")))
        if normalises:
            z = c.node("Add", c.node("Mul", _normalise(c, z), c.real(f"n_{name}")), c.real(f"b_{name}"))
        return _activate(c, z) if name == "cell" else c.node("Sigmoid", z)

    def clip(value: str, name: str) -> str:
        limit = abs(c.number(name))
        return c.clip(value, -limit, limit) if limit else value

    forget = gate("forget", cell)
    entering = gate("in", cell) if "in" in gates else c.node("Sub", c.array(1, np.float32), forget)
    cell = clip(c.node("Add", c.node("Mul", forget, cell), c.node("Mul", entering, gate("cell"))), "cell_clip")
    out = c.node("Mul", gate("out", cell), _activate(c, cell))
    if c.is_given("proj"):
        out = _product(c, out, c.real("proj"), *([c.real("proj_bias")] if c.is_given("proj_bias") else []))
        out = clip(out, "proj_clip")
    c.store_result(c.node("Expand", c.array(0, np.float32), c.array(c.outputs[0])))
    for which, value in enumerate((out, cell, out), 1):
        c.store_result(value, which)


def svdf(c: LoweredCall) -> None:
    """Lower SVDF. Its state is the last results of each filter, oldest first."""
    batch, rank = c.dims("x")[0], c.integer("rank")
    filters, memory = c.dims("w_time")
    newest = c.reshape(_product(c, c.real("x"), c.real("w_feature")), (batch, filters, 1))
    state = c.reshape(c.real("prev"), (batch, filters, memory))
    ends, axes = c.array([memory]), c.array([2])
    if memory > 1:
        before = c.node("Slice", state, c.array([0]), c.array([memory - 1]), axes)
        state = c.node("Concat", before, newest, axis=2)
        none = c.array(np.zeros((batch, filters, 1)), np.float32)
        moved = c.node("Concat", c.node("Slice", state, c.array([1]), ends, axes), none, axis=2)
    else:
        state, moved = newest, c.array(np.zeros((batch, filters, 1)), np.float32)
    seen = c.node("ReduceSum", c.node("Mul", state, c.real("w_time")), axes, keepdims=0)
    found = c.node("ReduceSum", c.reshape(seen, (batch, filters // rank, rank)), axes, keepdims=0)
    c.store_result(c.reshape(moved, c.outputs[0]))
    c.store_result(_activate(c, c.node("Add", found, c.real("b")) if c.is_given("b") else found), 1)


# -- sequences --------------------------------------------------------------------------------------------------------


def _cell_activation(c: LoweredCall) -> str:
    code = c.integer("activation")
    if code not in _KINDS:
        raise GeneralFailure(f"a sequence of cells with activation {code} is not lowered")
    return _KINDS[code]


def _state(c: LoweredCall, name: str) -> str:
    return c.reshape(c.real(name), (1, *c.dims(name)))


def _as_one_direction(c: LoweredCall, names: Sequence[str]) -> str:
    return c.node("Unsqueeze", _join(c, names), c.array([0]))


def _append_sequence(
    c: LoweredCall, kind: str, count: int, *inputs: str, kinds: list[str], units: int, backward: bool
) -> tuple[str, list[str]]:
    """Append the ONNX node of a sequence. Return outputs [time, batch, units] and last states [batch, units]."""
    ones = kinds.count("Affine")
    affine: dict[str, Any] = {"activation_alpha": [1.0] * ones, "activation_beta": [0.0] * ones} if ones else {}
    direction = "reverse" if backward else "forward"
    options = {"activations": kinds, "hidden_size": units, "direction": direction, **affine}
    every, *states = c.nodes(1 + count, kind, *inputs, **options)
    one = c.array([0])
    return c.node("Squeeze", every, c.array([1])), [c.node("Squeeze", each, one) for each in states]


def _lower_rnn(c: LoweredCall, suffix: str, x: str, *, backward: bool) -> tuple[str, list[str]]:
    units, kinds = c.dims("w" + suffix)[0], [_cell_activation(c)]
    bias = c.node("Concat", c.real("b" + suffix), c.array(np.zeros(units), np.float32), axis=0)
    weights, loops = (_as_one_direction(c, [name + suffix]) for name in "wr")
    inputs = (x, weights, loops, c.node("Unsqueeze", bias, c.array([0])), "", _state(c, "prev" + suffix))
    return _append_sequence(c, "RNN", 1, *inputs, kinds=kinds, units=units, backward=backward)


def _lower_lstm(c: LoweredCall, suffix: str, x: str, *, backward: bool) -> tuple[str, list[str]]:
    kinds = ["Sigmoid", *[_cell_activation(c)] * 2]
    clips = [name for name in ("cell_clip", "proj_clip") if c.number(name)]
    beside = [name for name in ("proj", *(f"n_{gate}" for gate in _GATES)) if c.is_given(name + suffix)]
    if clips or beside or not c.is_given("w_in" + suffix):
        raise GeneralFailure("a sequence of cells that clip, project, normalise or couple gates is not lowered")
    units = c.dims("w_out" + suffix)[0]
    weights, loops, bias = (_as_one_direction(c, [f"{kind}_{gate}{suffix}" for gate in _ORDER]) for kind in "wrb")
    both = c.node("Concat", bias, c.array(np.zeros((1, 4 * units)), np.float32), axis=1)
    peepholes = [f"p_{gate}{suffix}" for gate in _ORDER[:3]]
    found = [c.is_given(name) for name in peepholes]
    if any(found) and not all(found):
        raise GeneralFailure("a sequence of cells with some peepholes is not lowered")
    inputs = [x, weights, loops, both, "", _state(c, "prev_out" + suffix), _state(c, "prev_cell" + suffix)]
    inputs += [_as_one_direction(c, peepholes)] if all(found) else []
    every, (out, cell) = _append_sequence(c, "LSTM", 2, *inputs, kinds=kinds, units=units, backward=backward)
    return every, [out, cell]


def _in_time(c: LoweredCall, value: str) -> str:
    """Move the time axis to the front, or back again."""
    return value if c.integer("time_major") else c.transpose(value, (1, 0, 2))


def _store_results(c: LoweredCall, values: Sequence[str]) -> None:
    for which, value in enumerate(values[: len(c.operation.outputs)]):
        c.store_result(value, which)


def _one_way(fed: Callable[..., Any], c: LoweredCall) -> None:
    every, states = fed(c, "", _in_time(c, c.real("x")), backward=False)
    _store_results(c, [_in_time(c, every), *states])


def _lower_bidirectional(fed: Callable[..., Any], c: LoweredCall) -> None:
    """Lower a forward and a backward cell. If the operation has the input `aux`, the backward cell reads it, not x."""
    if any(name.startswith("aux_w") and c.is_given(name) for name in c.match.positions):
        raise GeneralFailure("cells that are fed two sequences are not lowered")
    x = _in_time(c, c.real("x"))
    forward, states = fed(c, "_fw", x, backward=False)
    back = _in_time(c, c.real("aux")) if c.is_given("aux") else x
    backward, more = fed(c, "_bw", back, backward=True)
    whole = [c.node("Concat", forward, backward, axis=2)] if c.integer("merge") else [forward, backward]
    _store_results(c, [*(_in_time(c, each) for each in whole), *states, *more])


sequence_rnn, sequence_lstm = partial(_one_way, _lower_rnn), partial(_one_way, _lower_lstm)
both_ways_rnn, both_ways_lstm = partial(_lower_bidirectional, _lower_rnn), partial(_lower_bidirectional, _lower_lstm)
