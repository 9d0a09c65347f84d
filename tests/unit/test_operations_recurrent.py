"""Recurrent operations and the later convolutions of the reference device against loops over units and taps."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from nnburst.devices.reference.kernels import fixed_point
from nnburst.errors import ErrorStatus
from nnburst.model import ModelBuilder, OperandType
from support.operations import F32, FLOATS, I32, Q8, Q8S, Array, Case, Fx, O, rng, run_model

T = OperandType


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def tensors(seed: int, **shapes: tuple[int, ...] | None) -> dict[str, Any]:
    draw = rng(seed)
    return {name: None if shape is None else draw.normal(size=shape) * 0.7 for name, shape in shapes.items()}


BATCH, STEPS, INPUTS, UNITS, OUTS = 2, 3, 3, 4, 2


def test_rnn() -> None:
    p = tensors(1, x=(BATCH, INPUTS), w=(UNITS, INPUTS), r=(UNITS, UNITS), b=(UNITS,), prev=(BATCH, UNITS))

    def wanted(x: Array, w: Array, r: Array, b: Array, prev: Array) -> tuple[Array, Array]:
        out = np.zeros((BATCH, UNITS))
        for n, u in itertools.product(range(BATCH), range(UNITS)):
            z = b[u] + sum(x[n, i] * w[u, i] for i in range(INPUTS)) + sum(prev[n, k] * r[u, k] for k in range(UNITS))
            out[n, u] = max(z, 0)
        return out, out

    Case(O.RNN, *p.values(), 1).check(wanted, FLOATS)


@pytest.mark.parametrize("rank", [1, 2])
def test_svdf_pushes_its_newest_result(rank: int) -> None:
    filters, memory = UNITS * rank, 3
    p = tensors(
        2, x=(BATCH, INPUTS), wf=(filters, INPUTS), wt=(filters, memory), b=(UNITS,), prev=(BATCH, memory * filters)
    )
    p["prev"].reshape(BATCH, filters, memory)[:, :, -1] = 0  # the place of the newest is free

    def wanted(x: Array, wf: Array, wt: Array, b: Array, prev: Array) -> tuple[Array, Array]:
        state = np.zeros((BATCH, filters, memory))
        out = np.tile(b, (BATCH, 1))
        for n, f in itertools.product(range(BATCH), range(filters)):
            seen = [*prev.reshape(BATCH, filters, memory)[n, f, :-1], float(x[n] @ wf[f])]
            out[n, f // rank] += sum(s * w for s, w in zip(seen, wt[f], strict=True))
            state[n, f] = [*seen[1:], 0]
        return state.reshape(BATCH, -1), out

    Case(O.SVDF, *p.values(), rank, 0).check(wanted, FLOATS)


def lstm_inputs(seed: int, *, cifg: bool, peephole: bool, projection: bool, norm: bool) -> dict[str, Any]:
    o = OUTS if projection else UNITS
    entering = None if cifg else True

    def gates(prefix: str, shape: tuple[int, ...], first: Any = entering) -> dict[str, Any]:
        return {f"{prefix}{g}": shape if g != "i" or first else None for g in "ifco"}

    shapes: dict[str, Any] = {**gates("w", (UNITS, INPUTS)), **gates("r", (UNITS, o))}
    shapes |= {f"p{g}": (UNITS,) if peephole and (g != "i" or not cifg) else None for g in "ifo"}
    shapes |= gates("b", (UNITS,))
    shapes |= {"proj": (o, UNITS) if projection else None, "projb": (o,) if projection else None}
    shapes |= {"out": (BATCH, o), "cell": (BATCH, UNITS)}
    shapes |= {f"n{g}": (UNITS,) if norm and (g != "i" or not cifg) else None for g in "ifco"}
    return tensors(seed, **shapes)


def lstm_step(
    p: dict[str, Array], x: Array, out: Array, cell: Array, clips: tuple[float, float]
) -> tuple[Array, Array]:
    """One sample at a time, one unit at a time."""
    new_out, new_cell = [], []
    for n in range(len(x)):

        def gate(g: str, seen: Array | None, n: int = n) -> list[float]:
            z = [float(p["w" + g][u] @ x[n] + p["r" + g][u] @ out[n]) for u in range(UNITS)]
            if seen is not None and "p" + g in p:
                z = [v + seen[u] * p["p" + g][u] for u, v in enumerate(z)]
            if "n" + g in p:
                mean = sum(z) / UNITS
                deviation = math.sqrt(sum((v - mean) ** 2 for v in z) / UNITS)
                z = [(v - mean) / deviation * p["n" + g][u] for u, v in enumerate(z)]
            return [v + p["b" + g][u] for u, v in enumerate(z)]

        f = [sigmoid(v) for v in gate("f", cell[n])]
        i = [sigmoid(v) for v in gate("i", cell[n])] if "wi" in p else [1 - v for v in f]
        c = [f[u] * cell[n][u] + i[u] * math.tanh(v) for u, v in enumerate(gate("c", None))]
        c = [min(max(v, -clips[0]), clips[0]) for v in c] if clips[0] else c
        h = np.array([sigmoid(v) * math.tanh(c[u]) for u, v in enumerate(gate("o", np.array(c)))])
        if "proj" in p:
            h = p["proj"] @ h + p["projb"]
            h = np.clip(h, -clips[1], clips[1]) if clips[1] else h
        new_out.append(h)
        new_cell.append(c)
    return np.array(new_out), np.array(new_cell)


VARIANTS = list(itertools.product([False, True], repeat=4))


@pytest.mark.parametrize(("cifg", "peephole", "projection", "norm"), VARIANTS)
def test_lstm(cifg: bool, peephole: bool, projection: bool, norm: bool) -> None:
    p = lstm_inputs(3, cifg=cifg, peephole=peephole, projection=projection, norm=norm)
    x, clips = rng(4).normal(size=(BATCH, INPUTS)), (0.5, 0.3)
    states = [p[n] for n in ("out", "cell")]
    weights = [v for n, v in p.items() if n not in ("out", "cell") and n[0] != "n"]
    norms = [p[f"n{g}"] for g in "ifco"]
    names = ["x", *(n for n in p if p[n] is not None and n[0] != "n" and n not in ("out", "cell")), "out", "cell"]
    names += [f"n{g}" for g in "ifco" if p[f"n{g}"] is not None]

    def named(*reals: Any) -> tuple[dict[str, Array], list[float]]:
        arrays = [r for r in reals if isinstance(r, np.ndarray)]
        return dict(zip(names, arrays, strict=True)), [r for r in reals if not isinstance(r, np.ndarray)]

    def wanted(*reals: Any) -> tuple[Array, ...]:
        given, limits = named(*reals)
        out, cell = lstm_step(given, given["x"], given["out"], given["cell"], (limits[0], limits[1]))
        scratch = np.zeros((BATCH, UNITS * (3 if cifg else 4)))
        return scratch, out, cell, out

    tail = norms if norm else []
    Case(O.LSTM, x, *weights, *states, 4, *map(Fx, clips), *tail).check(wanted, FLOATS)

    sequence = rng(5).normal(size=(STEPS, BATCH, INPUTS))

    def wanted_sequence(*reals: Any, major: bool) -> tuple[Array, ...]:
        given, limits = named(*reals)
        out, cell, outs = given["out"], given["cell"], []
        xs = given["x"] if major else given["x"].swapaxes(0, 1)
        for step in xs:
            out, cell = lstm_step(given, step, out, cell, (limits[0], limits[1]))
            outs.append(out)
        found = np.array(outs)
        return (found if major else found.swapaxes(0, 1)), out, cell

    for major in (True, False):
        data = sequence if major else sequence.swapaxes(0, 1).copy()
        case = Case(O.UNIDIRECTIONAL_SEQUENCE_LSTM, data, *weights, *states, 4, *map(Fx, clips), major, *norms)
        case.check(lambda *r, m=major: wanted_sequence(*r, major=m), (F32,), count=3)
        case.check(lambda *r, m=major: wanted_sequence(*r, major=m)[:1], (F32,))


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("aux", ["none", "linked", "instead"])
def test_both_ways_lstm_is_two_of_one_way(merge: bool, aux: str) -> None:
    ways = [lstm_inputs(seed, cifg=False, peephole=True, projection=False, norm=False) for seed in (6, 7)]
    x = rng(8).normal(size=(STEPS, BATCH, INPUTS))
    second = None if aux == "none" else rng(9).normal(size=(STEPS, BATCH, INPUTS))
    more = [
        [rng(10 + w).normal(size=(UNITS, INPUTS)) * 0.5 if aux == "linked" else None for _ in "ifco"] for w in (0, 1)
    ]
    weights = [[v for n, v in p.items() if n not in ("out", "cell") and n[0] != "n"] for p in ways]
    states = [p[n] for p in ways for n in ("out", "cell")]
    tail = [4, Fx(0.0), Fx(0.0), merge, True, *[None] * 8]
    case = Case(O.BIDIRECTIONAL_SEQUENCE_LSTM, x, *weights[0], *weights[1], *states, second, *more[0], *more[1], *tail)

    def one_way(way: int) -> Array:
        p = {n: np.float32(v).astype(np.float64) for n, v in ways[way].items() if v is not None}
        data, extra = x, second if aux == "linked" else None
        if aux == "instead" and way == 1:
            assert second is not None
            data = second
        if extra is not None:
            data = np.concatenate([data, extra], -1)
            for g, w in zip("ifco", more[way], strict=True):
                p[f"w{g}"] = np.concatenate([p[f"w{g}"], w], 1)
        out, cell, outs = p["out"], p["cell"], []
        for step in data[::-1] if way else data:
            out, cell = lstm_step(p, step, out, cell, (0, 0))
            outs.append(out)
        return np.array(outs[::-1] if way else outs)

    both = [one_way(0), one_way(1)]
    wanted = [np.concatenate(both, -1)] if merge else both
    case.check(lambda *r: wanted, (F32,), count=len(wanted))
    outputs, _, _ = case.run(F32, count=len(wanted) + 4)
    np.testing.assert_allclose(outputs[-4], both[0][-1], atol=1e-5)
    np.testing.assert_allclose(outputs[-2], both[1][0], atol=1e-5)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("major", [False, True])
def test_sequences_of_rnn(merge: bool, major: bool) -> None:
    cells = [tensors(s, w=(UNITS, INPUTS), r=(UNITS, UNITS), b=(UNITS,), prev=(BATCH, UNITS)) for s in (11, 12)]
    x = rng(13).normal(size=(STEPS, BATCH, INPUTS))
    data = x if major else x.swapaxes(0, 1).copy()

    def one_way(way: int) -> Array:
        state, outs = cells[way]["prev"], []
        for step in x[::-1] if way else x:
            state = np.tanh(step @ cells[way]["w"].T + state @ cells[way]["r"].T + cells[way]["b"])
            outs.append(state)
        return np.array(outs[::-1] if way else outs)

    def back(array: Array) -> Array:
        return array if major else array.swapaxes(0, 1)

    forward, backward = one_way(0), one_way(1)
    one = Case(O.UNIDIRECTIONAL_SEQUENCE_RNN, data, *cells[0].values(), 4, int(major))
    one.check(lambda *r: (back(forward), forward[-1]), FLOATS, count=2)
    both = [np.concatenate([forward, backward], -1)] if merge else [forward, backward]
    case = Case(
        O.BIDIRECTIONAL_SEQUENCE_RNN, data, *cells[0].values(), *cells[1].values(), None, None, None, 4, major, merge
    )
    states = [forward[-1], backward[0]]
    case.check(lambda *r: [*map(back, both), *states], FLOATS, count=len(both) + 2)


def test_quantized_16bit_lstm() -> None:
    draw, size = rng(14), 4
    x, out = draw.integers(100, 156, (2, 3)), draw.integers(60, 200, (2, size))
    w = [draw.integers(60, 200, (size, 3)) for _ in range(4)]
    r = [draw.integers(60, 200, (size, size)) for _ in range(4)]
    bias, cell = [draw.integers(-3000, 3000, size) for _ in range(4)], draw.integers(-3000, 3000, (2, size))
    scale, zero = 0.01, 128
    b = ModelBuilder()
    inputs = [b.input("x", Q8, x.shape, scale=1 / 128, zero_point=128)]
    inputs += [b.constant(np.uint8(v), Q8, scale=scale, zero_point=zero) for v in (*w, *r)]
    inputs += [b.constant(np.int32(v), I32, scale=scale / 128) for v in bias]
    inputs += [
        b.input("cell", T.TENSOR_QUANT16_SYMM, cell.shape, scale=2.0**-11),
        b.input("out", Q8, out.shape, scale=1 / 128, zero_point=128),
    ]
    for i, index in enumerate(b.operation(O.QUANTIZED_16BIT_LSTM, *inputs)):
        b.output(f"y{i}", index)
    status, found, _ = run_model(b.build(), [np.uint8(x), np.int16(cell), np.uint8(out)])
    assert status is ErrorStatus.NONE
    row = (np.concatenate([x, out], 1) - 128) / 128
    real = [row @ ((np.concatenate([r[g], w[g]], 1) - zero) * scale).T for g in range(4)]
    i, f, g, o = (z + bias[k] * scale / 128 for k, z in enumerate(real))
    c = 1 / (1 + np.exp(-f)) * cell / 2048 + 1 / (1 + np.exp(-i)) * np.tanh(g)
    h = 1 / (1 + np.exp(-o)) * np.tanh(c)
    assert np.abs(found[0] - c * 2048).max() <= 2
    assert np.abs(found[1] - (h * 128 + 128)).max() <= 1


@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize("norm", [False, True])
def test_quantized_lstm(projection: bool, norm: bool) -> None:
    draw = rng(15)
    o = OUTS if projection else UNITS
    Q8Y, Q16S = T.TENSOR_QUANT8_SYMM, T.TENSOR_QUANT16_SYMM
    x, h, c = draw.integers(-90, 90, (2, 3)), draw.integers(-90, 90, (2, o)), draw.integers(-9000, 9000, (2, UNITS))
    w = [draw.integers(-127, 128, (UNITS, 3)) for _ in range(4)]
    r = [draw.integers(-127, 128, (UNITS, o)) for _ in range(4)]
    n = [draw.integers(8000, 32000, UNITS) for _ in range(4)]
    bias, proj = [draw.integers(-2000, 2000, UNITS) for _ in range(4)], draw.integers(-127, 128, (o, UNITS))
    sx, sw, sc, so, sh, sn = 0.01, 0.008, 2.0**-12, 1 / 128, 1 / 128, 2.0**-15
    sb = sn / 1024 if norm else sx * sw
    b = ModelBuilder()
    inputs = [b.input("x", Q8S, x.shape, scale=sx, zero_point=0)]
    inputs += [b.constant(np.int8(v), Q8Y, scale=sw) for v in (*w, *r)]
    inputs += [b.omitted(Q16S) for _ in range(3)]
    inputs += [b.constant(np.int32(v), I32, scale=sb) for v in bias]
    inputs += [b.constant(np.int8(proj), Q8Y, scale=sw) if projection else b.omitted(Q8Y), b.omitted(I32)]
    inputs += [b.input("h", Q8S, h.shape, scale=so, zero_point=3), b.input("c", Q16S, c.shape, scale=sc)]
    inputs += [b.constant(np.int16(v), Q16S, scale=sn) if norm else b.omitted(Q16S) for v in n]
    inputs += [b.scalar(0.0), b.scalar(0.0), *[b.scalar(2.0**-12)] * 4]
    inputs += [b.scalar(0 if projection else 3), b.scalar(sh)]  # without a projection the hidden state is the output
    for i, index in enumerate(b.operation(O.QUANTIZED_LSTM, *inputs)):
        b.output(f"y{i}", index)
    status, found, _ = run_model(b.build(), [np.int8(x), np.int8(h), np.int16(c)])
    assert status is ErrorStatus.NONE

    def gate(k: int) -> Array:
        z = (x * sx) @ (w[k] * sw).T + ((h - 3) * so) @ (r[k] * sw).T
        if norm:
            z = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True) * n[k] * sn
        return z + bias[k] * sb

    i, f, g, out = map(gate, range(4))
    cell = 1 / (1 + np.exp(-f)) * c * sc + 1 / (1 + np.exp(-i)) * np.tanh(g)
    hidden = 1 / (1 + np.exp(-out)) * np.tanh(cell)
    hidden = hidden @ (proj * sw).T if projection else hidden
    assert np.abs(found[1] - np.clip(cell / sc, -32768, 32767)).max() <= 16  # gates keep 15 digits
    for which in (0, 2):
        assert np.abs(found[which] - np.clip(hidden / so + 3, -128, 127)).max() <= (3 if projection else 2)


def test_grouped_convolution() -> None:
    x, w, bias = rng(16).normal(size=(2, 4, 5, 6)), rng(17).normal(size=(4, 2, 3, 3)), rng(18).normal(size=4)
    for kind in FLOATS:

        def wanted(x: Array, w: Array, b: Array) -> Array:
            out = np.tile(b, (2, 3, 3, 1)).astype(float)
            for i, j, k in itertools.product(range(3), range(3), range(4)):
                group = k // 2
                patch = x[:, i : i + 2, j : j + 3, 3 * group : 3 * group + 3]
                out[:, i, j, k] += (patch * w[k]).sum((1, 2, 3))
            return out

        Case(O.GROUPED_CONV_2D, x, w, bias, 2, 1, 1, 2, 0, False).check(wanted, (kind,))
        nchw = Case(O.GROUPED_CONV_2D, x.transpose(0, 3, 1, 2), w, bias, 0, 0, 0, 0, 1, 1, 2, 0, True)
        nchw.check(lambda x, w, b: wanted(x.transpose(0, 2, 3, 1), w, b).transpose(0, 3, 1, 2), (kind,))


def scattered(x: Array, w: Array, out: tuple[int, int], stride: tuple[int, int], head: tuple[int, int]) -> Array:
    sums = np.zeros((len(x), *out, len(w)))
    for i, j, p, q in itertools.product(*map(range, (*x.shape[1:3], *w.shape[1:3]))):
        row, column = i * stride[0] + p - head[0], j * stride[1] + q - head[1]
        if 0 <= row < out[0] and 0 <= column < out[1]:
            sums[:, row, column] += x[:, i, j] @ w[:, p, q].T
    return sums


@pytest.mark.parametrize("stride", [(1, 1), (2, 3), (3, 2)])
def test_transposed_convolution(stride: tuple[int, int]) -> None:
    x, w, bias = rng(19).normal(size=(2, 3, 4, 2)), rng(20).normal(size=(3, 3, 2, 2)), rng(21).normal(size=3)
    full = tuple((n - 1) * s + f for n, s, f in zip((3, 4), stride, (3, 2), strict=True))
    explicit = (full[0] - 2, full[1] - 1)  # 1, 1 above and below; 1, 0 left and right
    Case(O.TRANSPOSE_CONV_2D, x, w, bias, 1, 0, 1, 1, stride[1], stride[0], 0, False).check(
        lambda x, w, b: scattered(x, w, explicit, stride, (1, 1)) + b, FLOATS
    )
    same = (3 * stride[0], 4 * stride[1])
    heads = tuple(max(0, n - m) // 2 for n, m in zip(full, same, strict=True))
    shape = np.array([2, *same, 3])
    Case(O.TRANSPOSE_CONV_2D, x, w, bias, shape, 1, stride[1], stride[0], 1, False).check(
        lambda x, w, b: np.maximum(scattered(x, w, same, stride, heads) + b, 0), FLOATS
    )
    Case(O.TRANSPOSE_CONV_2D, x.transpose(0, 3, 1, 2), w, bias, 1, 0, 1, 1, stride[1], stride[0], 0, True).check(
        lambda x, w, b: (scattered(x.transpose(0, 2, 3, 1), w, explicit, stride, (1, 1)) + b).transpose(0, 3, 1, 2),
        FLOATS,
    )


@pytest.mark.parametrize("kind", [Q8, Q8S])
@pytest.mark.parametrize("per_channel", [False, True])
def test_late_convolutions_of_integers(kind: OperandType, per_channel: bool) -> None:
    draw, shift = rng(22), 0 if kind == Q8 else 128
    dtype = np.uint8 if kind == Q8 else np.int8
    x, w, bias = draw.integers(0, 256, (1, 3, 3, 2)), draw.integers(-100, 100, (2, 2, 2, 2)), draw.integers(-99, 99, 2)
    scales = np.array([0.5, 0.125]) if per_channel else np.array([0.25, 0.25])
    for operation in (O.TRANSPOSE_CONV_2D, O.GROUPED_CONV_2D):
        b = ModelBuilder()
        image = b.input("x", kind, x.shape, scale=0.5, zero_point=100 - shift)
        if per_channel:
            filter_ = b.constant(np.int8(w if operation == O.TRANSPOSE_CONV_2D else w[..., :1]), channel_scales=scales)
            bias_ = b.constant(np.int32(bias))
        else:
            values = (w if operation == O.TRANSPOSE_CONV_2D else w[..., :1]) + 128 - shift
            filter_ = b.constant(values.astype(dtype), kind, scale=0.25, zero_point=128 - shift)
            bias_ = b.constant(np.int32(bias), scale=0.125)
        tail = [2, 1, 1, 2, 0, False] if operation == O.GROUPED_CONV_2D else [0, 0, 0, 0, 1, 1, 0, False]
        y = b.operation(
            operation, image, filter_, bias_, *map(b.scalar, tail), outputs=[{"scale": 64.0, "zero_point": 128 - shift}]
        )[0]
        b.output("y", y)
        status, (found,), _ = run_model(b.build(), [(x - shift).astype(dtype)])
        assert status is ErrorStatus.NONE
        centred = (x - 100).astype(float)
        if operation == O.TRANSPOSE_CONV_2D:
            sums = scattered(centred, w, (4, 4), (1, 1), (0, 0))
        else:
            sums = np.zeros((1, 2, 2, 2))
            for i, j, k in itertools.product(range(2), range(2), range(2)):
                sums[:, i, j, k] = (centred[:, i : i + 2, j : j + 2, k] * w[k, :, :, 0]).sum((1, 2))
        real = (sums + bias) * 0.5 * scales
        wanted = np.clip(np.sign(real) * np.floor(np.abs(real) / 64 + 0.5) + 128, 0, 255) - shift
        np.testing.assert_array_equal(found, wanted)


def test_fixed_point_functions_follow_the_real_ones() -> None:
    """Three steps of Newton's method in 16 bits leave less than 13 of 32768 steps."""
    a = np.arange(-(2**15), 2**15)
    found = fixed_point.sigmoid(a)
    assert np.abs(found - 2**15 / (1 + np.exp(-a / 2**12))).max() < 13
    assert (np.diff(found) >= -13).all()
    for whole in range(7):
        found = fixed_point.tanh(a, whole)
        assert np.abs(found - 2**15 * np.tanh(a / 2.0 ** (15 - whole))).max() < 13
        np.testing.assert_array_equal(found[1:], -found[1:][::-1])


@pytest.mark.parametrize("factor", [3.7, 0.25, 1e-3, 2.0**-20])
def test_fixed_point_factors_round_twice(factor: float) -> None:
    values = rng(19).integers(-(2**20), 2**20, 5000)
    assert (
        np.abs(fixed_point.scaled(values, factor) - values * factor).max() <= 0.75
    )  # a half may become one, and that a half again
    assert fixed_point.divided(np.array([-3, -1, 1, 3, 5]), 1).tolist() == [-2, -1, 1, 2, 3]


def test_fixed_point_normalisation_follows_the_real_one() -> None:
    draw = rng(20)
    z, weights, bias = draw.integers(-8000, 8000, (3, 8)), draw.integers(1, 2**15, 8), draw.integers(-(2**20), 2**20, 8)
    real = (z - z.mean(1, keepdims=True)) / z.std(1, keepdims=True) * weights / 2**15 + bias / 2**25
    found = fixed_point.normalised(z, weights, bias, 2.0**-15)
    assert np.abs(found - real * 2**12).max() <= 8
    assert not fixed_point.normalised(np.full((1, 8), 77), weights, 0 * bias, 2.0**-15).any()
