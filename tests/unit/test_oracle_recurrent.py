"""Recurrent operations with sizes and directions at random, against ONNX Runtime's RNN, or scalars."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from nnburst import Model, ModelBuilder
from nnburst.errors import ErrorStatus
from support.operations import FLOATS, I32, Q8, Array, Case, O, T, run_model
from support.oracles import Dice, by_onnx, drawn

GATES = ("in", "forget", "cell", "out")


@drawn
def test_rnn_and_its_sequences(dice: Dice) -> None:
    steps, batch, inputs, units = dice.sizes(4, 4)
    major, merge, kind = dice.truth(), dice.truth(), dice.one(FLOATS)
    code, name = dice.one([(1, "Relu"), (4, "Tanh"), (6, "Sigmoid")])
    x = dice.reals(steps, batch, inputs)
    weights = [
        (dice.reals(units, inputs, low=-1, high=1), dice.reals(units, units, low=-0.5, high=0.5), dice.reals(units))
        for _ in "fb"
    ]
    states = [dice.reals(batch, units) for _ in "fb"]

    def wanted(x: Array, ways: int) -> tuple[Array, Array]:
        w, r, b = (np.stack(parts) for parts in list(zip(*weights, strict=True)))
        b = np.concatenate([b, np.zeros_like(b)], 1)
        y, last = by_onnx(
            "RNN", x, w[:ways], r[:ways], b[:ways], None, np.stack(states[:ways]),
            outputs=2, hidden_size=units, activations=[name] * ways, direction=["forward", "bidirectional"][ways - 1],
        )  # fmt: skip
        return y.transpose(0, 2, 1, 3).reshape(len(x), batch, -1), last

    y, _ = wanted(x[:1], 1)
    Case(O.RNN, x[0], *weights[0], states[0], code).check(lambda *_: [y[0], y[0]], (kind,))
    shown = x if major else x.swapaxes(0, 1)
    y, last = wanted(x, 1)
    y = y if major else y.swapaxes(0, 1)
    case = Case(O.UNIDIRECTIONAL_SEQUENCE_RNN, shown, *weights[0], states[0], code, int(major))
    case.check(lambda *_: [y, last[0]], (kind,), count=2)
    z, both = wanted(x, 2)
    z = z if major else z.swapaxes(0, 1)
    want = [*([z] if merge else [z[..., :units], z[..., units:]]), *both]
    arguments = [*weights[0], states[0], *weights[1], states[1], None, None, None, code, major, merge]
    case = Case(O.BIDIRECTIONAL_SEQUENCE_RNN, shown, *arguments)
    case.check(lambda *_: want, (kind,), count=len(want))


def by_scalars(x: Array, out: Array, cell: Array, w: Array, r: Array, bias: Array, scale: float) -> tuple[Array, Array]:
    """Return the stored cells and outputs of QUANTIZED_16BIT_LSTM, one float after the other.

    Args:
        x: Stored inputs [batch, inputs] in 1/128 around 128.
        out: Stored previous outputs [batch, units], likewise.
        cell: Stored previous cells [batch, units] in 1/2048.
        w: Stored input weights [gate, units, inputs], zero point 128; gates: input, forget, cell, output.
        r: Stored recurrent weights [gate, units, units], likewise.
        bias: [gate, units] in `scale` / 128.
        scale: Of the weights.
    """
    inputs, cells, outs = x.shape[1], np.empty(cell.shape), np.empty(cell.shape)
    units = cell.shape[1]
    for b, u in np.ndindex(cell.shape):

        def gate(which: int, b: int = b, u: int = u) -> float:
            total = float(bias[which, u])
            for column in range(inputs + units):  # recurrent weights come first, but the input does
                weight = r[which, u, column] if column < units else w[which, u, column - units]
                value = x[b, column] if column < inputs else out[b, column - inputs]
                total += (float(value) - 128) * (float(weight) - 128)
            return min(max(total * scale / 128, -8.0), 8.0)

        enter, forget, fresh, show = (gate(which) for which in range(4))
        state = math.tanh(fresh) / (1 + math.exp(-enter)) + cell[b, u] / 2048 / (1 + math.exp(-forget))
        cells[b, u] = min(max(state * 2048, -32768), 32767)
        outs[b, u] = min(max(math.tanh(cells[b, u] / 2048) / (1 + math.exp(-show)) * 128 + 128, 0), 255)
    return cells, outs


def quantized_cell(x: Array, out: Array, cell: Array, w: Array, r: Array, bias: Array, scale: float) -> Model:
    b = ModelBuilder()
    weights = [b.constant(np.uint8(v), Q8, scale=scale, zero_point=128) for v in (*w, *r)]
    biases = [b.constant(np.int32(v), I32, scale=scale / 128) for v in bias]
    states = b.quantized_16bit_lstm(
        b.input("x", Q8, x.shape, scale=1 / 128, zero_point=128),
        *weights,
        *biases,
        b.input("prev_cell", T.TENSOR_QUANT16_SYMM, cell.shape, scale=2.0**-11),
        b.input("prev_out", Q8, out.shape, scale=1 / 128, zero_point=128),
    )
    for name, operand in zip(("cell", "out"), states, strict=True):
        b.output(name, operand)
    return b.build()


@drawn
def test_quantized_16bit_lstm_multiplies_input_and_output_by_recurrent_and_input_weights(dice: Dice) -> None:
    batch, inputs, units = dice.sizes(3, 6)
    x, out, cell = (
        dice.rng.integers(0, 256, (batch, inputs)),
        dice.rng.integers(0, 256, (batch, units)),
        dice.rng.integers(-8000, 8000, (batch, units)),
    )
    w, r = dice.rng.integers(0, 256, (4, units, inputs)), dice.rng.integers(0, 256, (4, units, units))
    bias, scale = dice.rng.integers(-3000, 3000, (4, units)), 0.01
    model = quantized_cell(x, out, cell, w, r, bias, scale)
    status, (cells, outs), _ = run_model(model, [np.uint8(x), np.int16(cell), np.uint8(out)])
    assert status is ErrorStatus.NONE
    wanted_cells, wanted_outs = by_scalars(x, out, cell, w, r, bias, scale)
    assert np.abs(cells - wanted_cells).max() <= 3  # gates have 12 digits after the point, cells keep 11
    assert np.abs(outs - wanted_outs).max() <= 1


def test_quantized_16bit_lstm_refuses_weights_that_fit_only_side_by_side() -> None:
    x, out, cell = np.zeros((1, 3), int), np.zeros((1, 2), int), np.zeros((1, 2), int)
    model = quantized_cell(x, out, cell, np.zeros((4, 2, 2), int), np.zeros((4, 2, 3), int), np.zeros((4, 2), int), 1)
    status, *_ = run_model(model, [np.uint8(x), np.int16(cell), np.uint8(out)])
    assert status is ErrorStatus.GENERAL_FAILURE


@drawn
def test_quantized_lstm_of_any_size_is_that_of_reals(dice: Dice) -> None:
    batch, inputs, units, outputs = dice.sizes(4, 6)
    cifg, peephole, projection, norm = (dice.truth() for _ in range(4))
    units = max(units, 3) if norm else units
    outputs = outputs if projection else units
    scales = {name: float(np.float32(dice.rng.uniform(0.004, 0.02))) for name in ("x", *GATES, "proj")}
    cell_scale, hidden_scale, norm_scale, out_scale = 2.0**-12, 1 / 128, 2.0**-15, 1 / 64 if projection else 1 / 128
    zero_x, zero_out = dice.upto(20, -20), dice.upto(20, -20)

    def drawn_like(*shape: int, most: int = 127) -> Array:
        return dice.rng.integers(-most, most + 1, shape)

    x, out, cell = (
        drawn_like(batch, inputs, most=90),
        drawn_like(batch, outputs, most=90),
        drawn_like(batch, units, most=9000),
    )
    w = {g: drawn_like(units, inputs) for g in GATES}
    r = {g: drawn_like(units, outputs) for g in GATES}
    p = {g: drawn_like(units, most=9000) for g in ("in", "forget", "out")}
    n = {g: dice.rng.integers(8000, 32000, units) for g in GATES}
    bias = {g: drawn_like(units, most=2000) for g in GATES}
    proj = drawn_like(outputs, units)

    b = ModelBuilder()

    def constants(kind: str, values: dict[str, Array], type_: T, scale: dict[str, float]) -> dict[str, Any]:
        """The input gate has none in a coupled cell."""
        dtype = {T.TENSOR_QUANT8_SYMM: np.int8, T.TENSOR_QUANT16_SYMM: np.int16, I32: np.int32}[type_]
        there = {g: v for g, v in values.items() if not (g == "in" and cifg)}
        return {f"{kind}_{g}": b.constant(v.astype(dtype), type_, scale=scale[g]) for g, v in there.items()}

    bias_scale = {g: norm_scale / 1024 if norm else scales["x"] * scales[g] for g in GATES}
    fixed = dict.fromkeys(GATES, norm_scale)
    given = constants("w", w, T.TENSOR_QUANT8_SYMM, scales) | constants("r", r, T.TENSOR_QUANT8_SYMM, scales)
    given |= constants("b", bias, I32, bias_scale)
    given |= constants("p", p, T.TENSOR_QUANT16_SYMM, fixed) if peephole else {}
    given |= constants("n", n, T.TENSOR_QUANT16_SYMM, fixed) if norm else {}
    if projection:
        given["proj"] = b.constant(proj.astype(np.int8), T.TENSOR_QUANT8_SYMM, scale=scales["proj"])
    made = b.quantized_lstm(
        b.input("x", T.TENSOR_QUANT8_ASYMM_SIGNED, x.shape, scale=scales["x"], zero_point=zero_x),
        **given,
        prev_out=b.input("out", T.TENSOR_QUANT8_ASYMM_SIGNED, out.shape, scale=out_scale, zero_point=zero_out),
        prev_cell=b.input("cell", T.TENSOR_QUANT16_SYMM, cell.shape, scale=cell_scale),
        **{f"scale_{g}": 2.0**-12 for g in GATES},
        hidden_zero_point=0 if projection else zero_out,
        hidden_scale=hidden_scale,
    )
    for name, operand in zip(("state", "cells", "outs"), made, strict=True):
        b.output(name, operand)
    status, (state, cells, outs), _ = run_model(b.build(), [np.int8(x), np.int8(out), np.int16(cell)])
    assert status is ErrorStatus.NONE
    real_x, real_out, before = (x - zero_x) * scales["x"], (out - zero_out) * out_scale, cell * cell_scale

    spread = [1.0]

    def gate(g: str, seen: Array | None) -> Array:
        z = real_x @ (w[g] * scales[g]).T + real_out @ (r[g] * scales[g]).T
        z = z + (seen * p[g] * norm_scale if peephole and seen is not None else 0)
        if norm:
            z = np.clip(z, -8, 8)
            spread.append(float(z.std(1).min()))
            z = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True) * n[g] * norm_scale
        return np.clip(z + bias[g] * bias_scale[g], -8, 8)

    def sigmoid(z: Array) -> Array:
        return np.asarray(1 / (1 + np.exp(-z)))

    forget = sigmoid(gate("forget", before))
    enter = 1 - forget if cifg else sigmoid(gate("in", before))
    after = np.clip(forget * before + enter * np.tanh(gate("cell", None)), -8, 8)
    hidden = sigmoid(gate("out", after)) * np.tanh(after)
    steps = 16 / min(spread)  # normalising gates that are almost equal makes much of how they were rounded
    assert np.abs(cells - np.clip(after / cell_scale, -32768, 32767)).max() <= steps
    shown = hidden @ (proj * scales["proj"]).T if projection else hidden
    carried = np.abs(proj).sum(1).max() * scales["proj"] if projection else 1.0
    steps = 0.6 + 0.6 * hidden_scale * carried / out_scale  # of the hidden state, then of the output
    assert np.abs(outs - np.clip(shown / out_scale + zero_out, -128, 127)).max() <= steps
    np.testing.assert_array_equal(state, outs)
